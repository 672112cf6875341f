"""The input builder writes each field of a plan; padding points at the null block and computes nothing."""

import dataclasses
import zlib

import numpy as np
import pytest

from photon_jax.engine.input_builder import InputBuilder
from photon_jax.request import Request, SamplingParams
from photon_jax.scheduler.plan import ScheduledSequence, StepPlan
from photon_jax.scheduler.sequence import SequenceState
from photon_jax.step_io import STOP_IDS_WIDTH, StepLayout, host_views, input_fields

BLOCK_SIZE = 4
LAYOUT = StepLayout(num_tokens=16, num_rows=4, table_width=6, query_tile=4, row_tile=8, has_scores=True)
DECODE = StepLayout(num_tokens=4, num_rows=4, table_width=6, query_tile=1, row_tile=4)


def make_sequence(arrival, slot, num_prompt, *, output=(), blocks=(), fields=None, **params):
    """Returns a sequence whose prompt is 100 * arrival, and so on; `fields` are of its request."""
    prompt = tuple(100 * arrival + i for i in range(num_prompt))
    params = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "max_tokens": 9} | params
    request = Request(request_id=str(arrival), prompt_token_ids=prompt, params=SamplingParams(**params))
    return SequenceState(
        request=dataclasses.replace(request, **(fields or {})),
        arrival=arrival,
        token_ids=[*prompt, *output],
        max_num_slots=99,
        max_num_blocks=9,
        admission=arrival,
        block_ids=list(blocks),
        state_slot=slot,
    )


def make_builder():
    return InputBuilder(block_size=BLOCK_SIZE, max_num_seqs=4)


def build(builder, *rows, layout=LAYOUT):
    """Returns views of the buffer for rows of (sequence, start, number of tokens)."""
    scheduled = []
    for seq, start, count in rows:
        seq.num_tokens = max(seq.num_tokens, len(seq.token_ids))  # which tests append to
        samples = start + count == seq.num_tokens and not seq.request.score
        scheduled.append(ScheduledSequence(seq, start, count, int(samples), seq.admission))
    return host_views(builder.build(StepPlan(tuple(scheduled)), layout), input_fields(layout))


@pytest.fixture
def views():
    """A decoding row, the middle chunk of a prompt, the last chunk of a score request."""
    decoding = make_sequence(1, 3, 5, output=(7, 8), blocks=(9, 2))
    chunk = make_sequence(2, 1, 20, blocks=(5, 11, 4, 6, 8))
    scored = make_sequence(3, 2, 6, blocks=(3, 1), fields={"score": True})
    return build(make_builder(), (decoding, 6, 1), (chunk, 3, 7), (scored, 4, 2))


def test_tokens_lie_row_after_row_with_their_positions_and_slots(views):
    expected_tokens = [8, *range(203, 210), 304, 305]
    expected_positions = [6, *range(3, 10), 4, 5]
    # block * 4 + offset: position 6 of blocks (9, 2); 3 to 9 of blocks (5, 11, 4); 4 and 5 of blocks (3, 1)
    expected_slots = [2 * 4 + 2, 5 * 4 + 3, 44, 45, 46, 47, 16, 17, 4, 5]
    for name, expected in (
        ("token_ids", expected_tokens),
        ("positions", expected_positions),
        ("slot_mapping", expected_slots),
    ):
        np.testing.assert_array_equal(views[name], expected + [0] * 6, err_msg=name)


def test_targets_are_the_next_tokens_of_score_rows_alone(views):
    np.testing.assert_array_equal(views["score_indices"], [8] + [0] * 15)
    np.testing.assert_array_equal(views["target_ids"], [305] + [0] * 15)
    assert views["counts"][3] == 1


def test_tables_hold_the_blocks_and_then_the_null_block(views):
    np.testing.assert_array_equal(
        views["block_tables"], [[9, 2, 0, 0, 0, 0], [5, 11, 4, 6, 8, 0], [3, 1, 0, 0, 0, 0], [0] * 6]
    )


def test_work_list_covers_every_token_in_items_of_one_row(views):
    np.testing.assert_array_equal(views["item_rows"], [0, 1, 1, 2, 0, 0, 0, 0])
    np.testing.assert_array_equal(views["item_starts"], [0, 1, 5, 8, 0, 0, 0, 0])
    np.testing.assert_array_equal(views["item_lens"], [1, 4, 3, 2, 0, 0, 0, 0])
    np.testing.assert_array_equal(views["counts"][:3], [10, 3, 4])


def test_rows_point_at_their_last_token_and_the_position_after_it(views):
    np.testing.assert_array_equal(views["logits_indices"], [0, 7, 9, 0])
    np.testing.assert_array_equal(views["sample_positions"], [7, 10, 6, 0])


def test_only_rows_that_sample_write_their_slot(views):
    np.testing.assert_array_equal(views["state_slots"], [3, 0, 0, 0])


def test_an_empty_place_is_neutral(views):
    for name in ("temperature", "top_p", "min_p", "top_k", "seeds", "masks_stops", "num_stop_ids", "continues"):
        assert not views[name][3:].any(), name


def test_parameters_travel_with_their_rows():
    params = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "top_k": 40, "min_tokens": 2}
    fields = {"stop_token_ids": (17, 9), "seed": (4_294_967_295, 2_147_483_648), "sample_index": 3}
    plain = make_sequence(6, 1, 2, blocks=(3,))
    rich = make_sequence(5, 4, 3, output=(1,), blocks=(2,), fields=fields, **params)
    views = build(make_builder(), (plain, 1, 1), (rich, 3, 1), layout=DECODE)
    for name, value in params.items():
        if name != "min_tokens":
            assert views[name][1] == views[name].dtype.type(value), name
    np.testing.assert_array_equal(views["seeds"][:2], [[0, 0], [4_294_967_295, 2_147_483_648]])
    np.testing.assert_array_equal(views["sample_indices"], [0, 3, 0, 0])
    np.testing.assert_array_equal(views["num_stop_ids"], [0, 2, 0, 0])
    np.testing.assert_array_equal(views["stop_ids"][1], [17, 9] + [0] * (STOP_IDS_WIDTH - 2))
    np.testing.assert_array_equal(views["masks_stops"], [0, 1, 0, 0])
    digests = [zlib.crc32(np.asarray(p, "<i4").tobytes()) for p in ((600, 601), (500, 501, 502))]
    np.testing.assert_array_equal(views["prompt_digests"], [*digests, 0, 0])


def test_the_digest_is_of_the_prompt_alone():
    before, after = make_sequence(1, 1, 3, blocks=(1,)), make_sequence(1, 2, 3, output=(4, 5), blocks=(2, 3))
    other = make_sequence(2, 3, 3, blocks=(4,))
    views = build(make_builder(), (before, 2, 1), (after, 4, 1), (other, 2, 1), layout=DECODE)
    assert views["prompt_digests"][0] == views["prompt_digests"][1] != views["prompt_digests"][2]


@pytest.mark.parametrize(("num_output", "expected"), [(0, 1), (1, 1), (2, 0), (3, 0)])
def test_stops_are_masked_until_min_tokens_are_out(num_output, expected):
    seq = make_sequence(1, 1, 3, output=range(num_output), blocks=(1, 2), min_tokens=2)
    assert build(make_builder(), (seq, 2 + num_output, 1), layout=DECODE)["masks_stops"][0] == expected


def test_a_row_continues_exactly_when_its_slot_holds_its_token():
    builder = make_builder()
    seq = make_sequence(1, 2, 5, blocks=(1, 2))
    assert build(builder, (seq, 0, 4))["continues"][0] == 0
    assert build(builder, (seq, 4, 1))["continues"][0] == 0  # a prompt token: nothing was sampled yet
    seq.token_ids.append(50)
    assert build(builder, (seq, 5, 1))["continues"][0] == 1
    seq.token_ids.append(51)
    assert build(builder, (seq, 6, 1))["continues"][0] == 1


def test_a_row_that_another_sequence_wrote_over_does_not_continue():
    builder = make_builder()
    first, second = make_sequence(1, 2, 3, blocks=(1,)), make_sequence(2, 2, 3, blocks=(2,))
    build(builder, (first, 0, 3))
    build(builder, (second, 0, 3))  # takes over slot 2
    first.token_ids.append(50)
    assert build(builder, (first, 3, 1))["continues"][0] == 0
    # now the slot holds what `first` sampled, and no longer what `second` did, though it sampled at the same position
    second.token_ids.append(60)
    assert build(builder, (second, 3, 1))["continues"][0] == 0


def test_a_preempted_sequence_that_is_computed_again_does_not_continue_from_an_old_token():
    builder = make_builder()
    seq = make_sequence(1, 1, 3, blocks=(1,))
    build(builder, (seq, 0, 3))
    seq.token_ids += [50, 51]
    seq.block_ids, seq.admission = [2, 3], 7
    # preempted after position 3 was sampled, and back in the same slot: a chunk of one token, then one of two
    assert build(builder, (seq, 0, 1))["continues"][0] == 0
    assert build(builder, (seq, 1, 2))["continues"][0] == 0
    seq.state_slot, seq.admission = 4, 8  # and again, into another slot
    assert build(builder, (seq, 4, 1), layout=DECODE)["continues"][0] == 0
    seq.token_ids.append(52)
    views = build(builder, (seq, 5, 1), layout=DECODE)
    assert (views["continues"][0], views["state_slots"][0]) == (1, 4)


def test_rows_of_several_tokens_never_continue():
    builder = make_builder()
    seq = make_sequence(1, 1, 3, blocks=(1, 2))
    build(builder, (seq, 0, 3))
    seq.token_ids += [50, 51]
    assert build(builder, (seq, 3, 2))["continues"][0] == 0


def test_a_slot_takes_the_parameters_of_its_new_owner():
    builder = make_builder()
    fields = {"stop_token_ids": (1, 2, 3), "seed": (1, 2)}
    old = make_sequence(1, 2, 3, blocks=(1,), fields=fields, temperature=0.5, top_k=3)
    new = make_sequence(2, 2, 3, blocks=(2,), fields={"stop_token_ids": (9,)}, temperature=1.5)
    assert build(builder, (old, 0, 3))["temperature"][0] == np.float32(0.5)
    views = build(builder, (new, 0, 3))
    assert views["temperature"][0] == np.float32(1.5)
    assert views["top_k"][0] == 0
    np.testing.assert_array_equal(views["seeds"][0], [0, 0])
    assert views["num_stop_ids"][0] == 1
    assert views["stop_ids"][0, 0] == 9
    assert build(builder, (old, 2, 1))["top_k"][0] == 3


def test_every_step_has_a_buffer_of_its_own():
    builder = make_builder()
    seq = make_sequence(1, 1, 3, blocks=(1,))
    first = build(builder, (seq, 0, 2))
    kept = {name: view.copy() for name, view in first.items()}
    seq.block_ids.append(7)
    build(builder, (seq, 2, 1))
    for name, view in first.items():
        np.testing.assert_array_equal(view, kept[name], err_msg=name)


def test_a_dispatch_of_several_steps_holds_the_first_and_how_many_each_row_takes():
    layout = dataclasses.replace(DECODE, num_steps=4)
    builder = make_builder()
    first = make_sequence(1, 2, 3, blocks=(1, 2), min_tokens=3)
    second = make_sequence(2, 1, 5, output=(7,), blocks=(3, 4, 5))
    rows = (ScheduledSequence(first, 2, 4, 4, 1), ScheduledSequence(second, 5, 2, 2, 2))
    views = host_views(builder.build(StepPlan(rows, num_steps=4), layout), input_fields(layout))
    np.testing.assert_array_equal(views["num_steps"], [4, 2, 0, 0])
    np.testing.assert_array_equal(views["num_masked_steps"], [3, 0, 0, 0])
    np.testing.assert_array_equal(views["token_ids"], [102, 7, 0, 0])
    np.testing.assert_array_equal(views["positions"], [2, 5, 0, 0])
    np.testing.assert_array_equal(views["sample_positions"], [3, 6, 0, 0])
    np.testing.assert_array_equal(views["counts"], [2, 2, 2, 0])
    # the next one continues where the last step of each row ends, before the host knows those tokens
    rows = (ScheduledSequence(first, 6, 1, 1, 1), ScheduledSequence(second, 7, 1, 1, 2))
    views = host_views(builder.build(StepPlan(rows), DECODE), input_fields(DECODE))
    np.testing.assert_array_equal(views["continues"], [1, 1, 0, 0])


def test_a_row_whose_token_is_nowhere_is_refused():
    seq = make_sequence(1, 1, 3, blocks=(1,))
    seq.num_tokens += 1
    with pytest.raises(AssertionError, match="neither here nor there"):
        make_builder().build(StepPlan((ScheduledSequence(seq, 3, 1, 1, 1),)), DECODE)


def test_block_tables_grow_by_what_was_added_and_widen():
    layout = dataclasses.replace(DECODE, table_width=40)
    builder = make_builder()
    seq = make_sequence(1, 1, 3, blocks=(1,))
    build(builder, (seq, 2, 1), layout=layout)
    for count in (2, 16, 17, 40):
        seq.block_ids = list(range(1, count + 1))
        table = build(builder, (seq, 2, 1), layout=layout)["block_tables"][0]
        np.testing.assert_array_equal(table, [*range(1, count + 1), *[0] * (40 - count)])
    seq.block_ids, seq.admission = [9], 2
    np.testing.assert_array_equal(build(builder, (seq, 2, 1), layout=layout)["block_tables"][0], [9] + [0] * 39)


def test_only_rows_that_sample_under_controls_have_a_control_slot():
    plain = make_sequence(1, 3, 5, output=(7,), blocks=(9, 2))
    penalized = make_sequence(2, 4, 3, blocks=(5,), presence_penalty=0.5)
    chunk = make_sequence(3, 1, 20, blocks=(1, 3, 4, 6, 8), logit_bias={1: 1.0})
    rows = tuple(
        ScheduledSequence(seq, start, count, samples, seq.admission)
        for seq, start, count, samples in ((plain, 5, 1, 1), (penalized, 0, 3, 1), (chunk, 0, 7, 0))
    )
    layout = dataclasses.replace(LAYOUT, has_controls=True)
    buffer = make_builder().build(StepPlan(rows), layout, (0, 2, 0))
    views = host_views(buffer, input_fields(layout))
    np.testing.assert_array_equal(views["control_slots"], [0, 4, 0, 0])
    np.testing.assert_array_equal(views["processor_ids"], [0, 2, 0, 0])
    assert not build(make_builder(), (penalized, 0, 3), layout=LAYOUT)["control_slots"].size
