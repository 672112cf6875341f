"""An LLM that looks ahead gives what one that takes turns gives: texts, stops, log-probabilities, scores, streams."""

import itertools

import pytest
from helpers.tiny_checkpoint import ENGINE_FIELDS, VOCAB_SIZE, draw_ids, write_checkpoint

from photon_jax import LLM, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def turns(folder):
    with LLM(folder, **ENGINE_FIELDS) as opened:
        yield opened


@pytest.fixture(scope="module")
def ahead(folder):
    with LLM(folder, **ENGINE_FIELDS, steps_ahead=1, max_steps_per_dispatch=4) as opened:
        yield opened


PROMPTS = [draw_ids(seed, 3 + 5 * seed) for seed in range(6)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=1.0, max_tokens=30, seed=1, logprobs=0),
    SamplingParams(temperature=0.7, max_tokens=1, seed=2),
    SamplingParams(
        temperature=1.5, max_tokens=30, seed=3, n=2, stop_token_ids=[*range(3, VOCAB_SIZE, 16)], min_tokens=5
    ),
    SamplingParams(temperature=1.0, max_tokens=30, seed=4, stop=["a", "the"], min_tokens=2, logprobs=1),
    SamplingParams(temperature=1.0, max_tokens=17, seed=5, frequency_penalty=1.0, logprobs=2),
]


def facts(outputs):
    """Returns what may not differ, bit by bit."""
    return [
        (
            completion.token_ids,
            completion.text,
            completion.finish_reason,
            completion.stop_reason,
            completion.cumulative_logprob,
            None if completion.logprobs is None else completion.logprobs.raw.tobytes(),
            None if completion.logprobs is None else completion.logprobs.top_ids.tobytes(),
            None if completion.logprobs is None else completion.logprobs.top_logprobs.tobytes(),
        )
        for output in outputs
        for completion in output.outputs
    ]


def test_a_batch_of_all_kinds_gets_the_same(turns, ahead):
    expected = facts(turns.generate(PROMPTS, PARAMS, progress=False))
    assert {fact[2] for fact in expected} == {"stop", "length"}
    assert facts(ahead.generate(PROMPTS, PARAMS, progress=False)) == expected


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_each_alone_gets_the_same(turns, ahead, index):
    expected = facts(turns.generate([PROMPTS[index]], PARAMS[index], progress=False))
    assert facts(ahead.generate([PROMPTS[index]], PARAMS[index], progress=False)) == expected


def test_a_stream_grows_to_the_same_end_and_may_be_closed_in_the_middle(turns, ahead):
    expected = [fact[0] for fact in facts(turns.generate([PROMPTS[1]], PARAMS[1], progress=False))]
    seen = [output.outputs[0].token_ids for output in ahead.stream(PROMPTS[1], PARAMS[1])]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in itertools.pairwise(seen))
    assert [seen[-1]] == expected
    stream = ahead.stream(PROMPTS[0], PARAMS[0])
    next(stream)
    stream.close()
    scheduler = ahead._started.engine.scheduler
    assert not scheduler.has_unfinished
    scheduler.check_integrity()
    assert facts(ahead.generate([PROMPTS[0]], PARAMS[0], progress=False)) == facts(
        turns.generate([PROMPTS[0]], PARAMS[0], progress=False)
    )


def test_scores_are_the_same(turns, ahead):
    expected, found = turns.score(PROMPTS, progress=False), ahead.score(PROMPTS, progress=False)
    assert [score.logprobs.tobytes() for score in found] == [score.logprobs.tobytes() for score in expected]


def test_metrics_count_the_work(ahead):
    before = ahead.metrics()
    ahead.generate(PROMPTS[:2], SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True), progress=False)
    after = ahead.metrics()
    num_steps, num_dispatches = after.num_steps - before.num_steps, after.num_dispatches - before.num_dispatches
    assert num_steps >= 13
    assert num_dispatches < num_steps
    assert after.num_tokens > before.num_tokens
    assert 0.0 < after.occupancy <= 1.0 and 0.0 <= after.padding_share < 1.0
    assert after.host_us_per_step > 0.0 and after.wait_us_per_step > 0.0
    assert after.num_compiles >= before.num_compiles > 0
