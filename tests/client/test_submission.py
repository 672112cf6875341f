"""Submissions as they grow: outputs and updates of any cut are those of the whole, and cost what is new in them."""

import numpy as np
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from photon_jax.client.submission import Prompt, Sample, Submission
from photon_jax.client.updates import UpdateReader
from photon_jax.outputs import FinishReason, TokenDelta
from photon_jax.request import Request, SamplingParams
from photon_jax.text.stream import TextStream

NUM_TOP = 2


def make_submission(n=1, **given):
    params = SamplingParams(max_tokens=500, logprobs=NUM_TOP, n=n, **given)
    requests = [Request(request_id=f"r-{i}", prompt_token_ids=(1, 2), params=params, sample_index=i) for i in range(n)]
    samples = [Sample(request, TextStream(ByteTokenizer(), params)) for request in requests]
    return Submission("r", Prompt(token_ids=(1, 2)), params, samples, 0.0)


def make_delta(number, num_tokens, reason=None):
    rng = np.random.default_rng(number)
    return TokenDelta(
        request_id="r-0",
        new_token_ids=tuple(ord("a") + (number + idx) % 26 for idx in range(num_tokens)),
        logprobs=rng.standard_normal((num_tokens, 3)).astype(np.float32),
        top_ids=rng.integers(0, 9, (num_tokens, NUM_TOP)).astype(np.int32),
        top_logprobs=rng.standard_normal((num_tokens, NUM_TOP)).astype(np.float32),
        finish_reason=reason,
    )


def facts(text, token_ids, logprobs):
    return text, token_ids, [getattr(logprobs, name).tolist() for name in ("raw", "tempered", "sampling", "top_ids")]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), min_size=1, max_size=20),
    st.sampled_from([(), ("yz", "defg")]),
)
def test_outputs_and_updates_hold_all_that_came_whenever_they_are_asked_for(steps, stop):
    grown, whole, deltas, outputs = make_submission(stop=stop), make_submission(stop=stop), [], []
    reader, number = UpdateReader(grown), 0
    for num_tokens, asks_output, asks_update in [*steps, (1, False, True)]:
        is_last = number == len(steps)
        number += 1
        for submission in (grown, whole):
            submission.samples[0].append(
                make_delta(3 * number, num_tokens, FinishReason.LENGTH if is_last else None), 0
            )
        if asks_output:
            outputs.append((grown.output().outputs[0], facts_of_output(grown)))
        if asks_update:
            update = reader.take()
            deltas += () if update is None else update.deltas
            assert reader.take() is None, "it is not told twice"
        if grown.is_finished:
            break
    deltas += () if reader.is_done else reader.take().deltas
    reason = "length" if number > len(steps) else "stop"
    assert reader.is_done and grown.is_finished and deltas[-1].finish_reason in (reason, "stop")
    wanted = facts_of_output(whole)
    assert facts_of_output(grown) == wanted
    joined = [np.concatenate([getattr(delta.logprobs, name) for delta in deltas]).tolist() for name in KINDS]
    assert ("".join(d.text for d in deltas), sum((d.token_ids for d in deltas), ()), joined) == wanted
    for output, before in outputs:  # what was given out before never changes
        assert facts(output.text, output.token_ids, output.logprobs) == before


def test_an_abort_leaves_out_text_that_was_held_back():
    for stop, text in (((), "abc"), (("cd",), "ab")):
        submission = make_submission(stop=stop)
        (sample,) = submission.samples
        sample.append(make_delta(0, 3), 0.0)
        sample.abort(1.0)
        completion = submission.output().outputs[0]
        assert (completion.text, completion.finish_reason) == (text, "abort")
        assert submission.output().metrics.total_s == 1.0


KINDS = ("raw", "tempered", "sampling", "top_ids")


def facts_of_output(submission):
    completion = submission.output().outputs[0]
    return facts(completion.text, completion.token_ids, completion.logprobs)


def test_a_stream_copies_its_tables_a_few_times_and_not_for_every_token():
    submission, tables = make_submission(), []
    for number in range(400):
        submission.samples[0].append(make_delta(number, 1), 0.0)
        tables.append(submission.output().outputs[0].logprobs.raw)
    assert [len(table) for table in tables] == list(range(1, 401))
    assert len({id(table.base) for table in tables}) <= 10, "a table is copied when it has doubled"


def test_outputs_cannot_be_written_to():
    submission = make_submission()
    submission.samples[0].append(make_delta(0, 2), 0.0)
    with pytest.raises(ValueError, match="read-only"):
        submission.output().outputs[0].logprobs.raw[0] = 1.0
