"""Stand-ins: larger step programs that take the place of those which are not compiled yet. Host only."""

from collections.abc import Iterable, Sequence

from photon_jax.step_io import StepLayout


def stands_in(there: StepLayout, wanted: StepLayout) -> bool:
    """Returns whether each step that comes in one layout could as well come in another one, padded to it."""
    is_decode = wanted.query_tile == 1 and wanted.num_tokens == wanted.num_rows
    return (
        there.num_tokens >= wanted.num_tokens
        and there.num_rows >= wanted.num_rows
        and there.table_width >= wanted.table_width
        and (there.query_tile == wanted.query_tile or is_decode)
        and there.has_scores >= wanted.has_scores
        and there.has_top >= wanted.has_top
        and there.has_controls >= wanted.has_controls
        and there.is_greedy <= wanted.is_greedy
        and there.processors == wanted.processors
        and there.num_steps == wanted.num_steps
    )


def find_stand_in(wanted: StepLayout, there: Iterable[StepLayout]) -> StepLayout | None:
    """Returns the layout of least work that stands in for another one; None if there is none."""
    return min((layout for layout in there if stands_in(layout, wanted)), key=_work, default=None)


def are_enough(there: Sequence[StepLayout], wanted: Iterable[StepLayout]) -> bool:
    """Returns whether steps can do without the wanted programs; several of them in one dispatch are never needed."""
    return all(layout.num_steps > 1 or any(stands_in(other, layout) for other in there) for layout in wanted)


def compile_order(missing: Sequence[StepLayout], there: Sequence[StepLayout]) -> list[StepLayout]:
    """Returns programs in the order in which they are to be compiled.

    First the one that stands in for most of those that steps can't do without, then the decode steps, the largest
    first, then the others likewise; the plain ones before those with scores, most likely tokens or controls.
    """
    lacking = [layout for layout in missing if not are_enough(there, [layout])]
    ordered = sorted(missing, key=_place)
    if lacking:
        most = max(lacking, key=lambda layout: sum(stands_in(layout, other) for other in lacking))
        ordered.remove(most)
        ordered.insert(0, most)
    return ordered


def _work(layout: StepLayout) -> tuple[int, ...]:
    kinds = layout.has_scores + layout.has_top + layout.has_controls
    return layout.num_tokens, layout.num_rows, layout.table_width, kinds, not layout.is_greedy


def _place(layout: StepLayout) -> tuple[int, ...]:
    is_rare = layout.has_scores or layout.has_top or layout.has_controls
    is_mixed = layout.num_tokens != layout.num_rows or layout.query_tile > 1
    return is_rare, is_mixed, -layout.num_tokens, -layout.table_width, -layout.num_steps
