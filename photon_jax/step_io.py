"""What goes into a step and what comes out: types only, so that host code can import them without JAX.

A step's inputs travel as one packed i32 buffer, and its results come back as one. `input_fields` and `output_fields`
are the only description of both: the host writes NumPy views into them, the device unpacks with the same list.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import jax

STOP_IDS_WIDTH = 32
TOP_WIDTH = 20  # most likely tokens that a step returns, where it returns more than the likeliest one
TOP_KINDS = ("raw", "tempered", "sampling")  # the distributions that they can be of, by number


class Field(NamedTuple):
    """One array inside a packed i32 buffer; 32-bit dtypes only."""

    name: str
    shape: tuple[int, ...]
    dtype: type[np.generic]

    @property
    def size(self) -> int:
        """Elements, which is also 32-bit words."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepLayout:
    """The padded sizes of one step: hashable, the static argument that makes one compiled program.

    Attributes:
      num_tokens: T.
      num_rows: B.
      table_width: P, blocks.
      query_tile: tokens of one sequence that one attention item covers; 1 when each row computes one token.
      row_tile: rows that the reference ops compute at once.
      has_scores: whether the step also returns the log-probability of a target token at each position.
      has_top: whether it returns the TOP_WIDTH most likely tokens of each sampled row, and of each scored position, and
        not the likeliest one of each sampled row alone.
      is_greedy: whether no row samples randomly, so that the program can do without that branch.
      has_controls: whether a row has penalties, a bias, masked tokens or a processor.
      processors: the functions of the rows' logits processors, each once.
      num_steps: decode steps that run one after the other; more than one where each row computes one token, and has
        neither scores nor controls.
    """

    num_tokens: int
    num_rows: int
    table_width: int
    query_tile: int
    row_tile: int
    has_scores: bool = False
    has_top: bool = False
    is_greedy: bool = False
    has_controls: bool = False
    processors: tuple[Callable[..., object], ...] = ()
    num_steps: int = 1

    @property
    def num_items(self) -> int:
        """Attention items A that rows of T tokens together can need."""
        if self.query_tile == 1:
            return self.num_tokens
        return min(self.num_rows + self.num_tokens // self.query_tile, self.num_tokens)


class StepInputs(NamedTuple):
    """What one step reads; every array is padded to the layout.

    Padding tokens read token 0 at position 0 and write to the null block; rows past num_rows and items past num_items
    are not computed by the reference ops, and are ignored in what the others compute.

    Attributes:
      token_ids: the token computed; rows that continue on the device take BatchState's last token instead.
      positions: place of the token in its own sequence.
      slot_mapping: where its key and value are stored: block_id * block_size + offset.
      score_indices, target_ids: place in [0, T) of each token whose successor is scored, row after row, and that
        successor; empty where the layout has no scores.
      item_rows, item_starts, item_lens: work list of attention: row of the sequence, first token in [0, T), how many
        of the query_tile tokens are real.
      block_tables: physical block of each logical block; padded with the null block.
      logits_indices: the token whose logits are sampled.
      continues: 1 where the row's only token is its slot's last sampled token.
      state_slots: the row's place in BatchState; 0 is the null slot.
      sample_positions: position that the sampled token will have; it keys the noise.
      stop_ids: ids that are masked while masks_stops is 1; the first num_stop_ids of the row count.
      top_kinds: index into TOP_KINDS of the distribution whose most likely tokens are returned.
      control_slots: state_slots of the rows that sample and have controls, else 0; empty where no row has any.
      processor_ids: 1 + index of the row's function in the layout's processors, 0 without one; likewise.
      num_steps, num_masked_steps: the row's steps, and those of them in which its stop ids are masked, where the layout
        has several; the other fields are those of the first step. Empty where it has one.
      counts: num_tokens, num_rows, num_items and num_scores in use; num_rows is 0 where no row samples.
    """

    token_ids: "jax.Array"  # i32[T]
    positions: "jax.Array"  # i32[T]
    slot_mapping: "jax.Array"  # i32[T]
    score_indices: "jax.Array"  # i32[T]
    target_ids: "jax.Array"  # i32[T]
    item_rows: "jax.Array"  # i32[A]
    item_starts: "jax.Array"  # i32[A]
    item_lens: "jax.Array"  # i32[A]
    block_tables: "jax.Array"  # i32[B P]
    logits_indices: "jax.Array"  # i32[B]
    continues: "jax.Array"  # i32[B]
    state_slots: "jax.Array"  # i32[B]
    sample_positions: "jax.Array"  # i32[B]
    temperature: "jax.Array"  # f32[B]
    top_p: "jax.Array"  # f32[B]
    min_p: "jax.Array"  # f32[B]
    top_k: "jax.Array"  # i32[B]
    seeds: "jax.Array"  # u32[B 2]
    prompt_digests: "jax.Array"  # u32[B]
    sample_indices: "jax.Array"  # i32[B]
    masks_stops: "jax.Array"  # i32[B]
    num_stop_ids: "jax.Array"  # i32[B]
    stop_ids: "jax.Array"  # i32[B E]
    top_kinds: "jax.Array"  # i32[B]
    control_slots: "jax.Array"  # i32[B]
    processor_ids: "jax.Array"  # i32[B]
    num_steps: "jax.Array"  # i32[B]
    num_masked_steps: "jax.Array"  # i32[B]
    counts: "jax.Array"  # i32[4]


class StepOutputs(NamedTuple):
    """What one step returns to the host.

    Attributes:
      token_ids: sampled tokens.
      logprobs: of the sampled token: raw, after temperature, of the sampling distribution.
      score_logprobs: raw log-probability of target_ids, place by place, when the layout has scores.
      top_ids, top_logprobs: the most likely tokens of the row's top_kinds distribution, one where the layout has no
        top; past a vocabulary smaller than W, id 0 and -inf.
      score_is_greedy: 1 where the target is the argmax (ties: the lowest id).
      score_top_ids, score_top_logprobs: the most likely tokens in their places, when the layout has both.
    """

    token_ids: "jax.Array"  # i32[B]
    logprobs: "jax.Array"  # f32[B 3]
    top_ids: "jax.Array"  # i32[B W]
    top_logprobs: "jax.Array"  # f32[B W]
    score_logprobs: "jax.Array | None" = None  # f32[T]
    score_is_greedy: "jax.Array | None" = None  # i32[T]
    score_top_ids: "jax.Array | None" = None  # i32[T W]
    score_top_logprobs: "jax.Array | None" = None  # f32[T W]


def input_fields(layout: StepLayout) -> tuple[Field, ...]:
    """Returns the arrays of StepInputs in the order in which they lie in the packed buffer."""
    tokens, rows, items = layout.num_tokens, layout.num_rows, layout.num_items
    floats, unsigned = {"temperature", "top_p", "min_p"}, {"seeds", "prompt_digests"}
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(StepInputs._fields, (rows,))
    shapes |= dict.fromkeys(("token_ids", "positions", "slot_mapping"), (tokens,))
    shapes |= dict.fromkeys(("item_rows", "item_starts", "item_lens"), (items,))
    shapes |= {
        **dict.fromkeys(("score_indices", "target_ids"), (tokens if layout.has_scores else 0,)),
        "block_tables": (rows, layout.table_width),
        "seeds": (rows, 2),
        "stop_ids": (rows, STOP_IDS_WIDTH),
        **dict.fromkeys(("control_slots", "processor_ids"), (rows if layout.has_controls else 0,)),
        **dict.fromkeys(("num_steps", "num_masked_steps"), (rows if layout.num_steps > 1 else 0,)),
        "counts": (4,),
    }
    return tuple(
        Field(name, shape, np.float32 if name in floats else np.uint32 if name in unsigned else np.int32)
        for name, shape in shapes.items()
    )


def output_fields(layout: StepLayout) -> tuple[Field, ...]:
    """Returns the arrays of StepOutputs in the order in which they lie in the packed results."""
    top_shape = (layout.num_rows, TOP_WIDTH if layout.has_top else 1)
    fields = [
        Field("token_ids", (layout.num_rows,), np.int32),
        Field("logprobs", (layout.num_rows, 3), np.float32),
        Field("top_ids", top_shape, np.int32),
        Field("top_logprobs", top_shape, np.float32),
    ]
    if layout.has_scores:
        fields.append(Field("score_logprobs", (layout.num_tokens,), np.float32))
        fields.append(Field("score_is_greedy", (layout.num_tokens,), np.int32))
    if layout.has_scores and layout.has_top:
        fields.append(Field("score_top_ids", (layout.num_tokens, TOP_WIDTH), np.int32))
        fields.append(Field("score_top_logprobs", (layout.num_tokens, TOP_WIDTH), np.float32))
    return tuple(fields)


def packed_size(fields: tuple[Field, ...]) -> int:
    """Returns the 32-bit words of a packed buffer."""
    return sum(field.size for field in fields)


def host_views(buffer: np.ndarray, fields: tuple[Field, ...]) -> dict[str, np.ndarray]:
    """Returns a NumPy view into the packed i32 buffer for each field; writing to a view writes to the buffer."""
    views, offset = {}, 0
    for field in fields:
        size = field.size
        view = buffer[offset : offset + size]
        if field.dtype is not np.int32:
            view = view.view(field.dtype)
        views[field.name] = view if len(field.shape) == 1 else view.reshape(field.shape)
        offset += size
    return views
