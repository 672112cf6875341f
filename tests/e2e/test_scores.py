"""Scores of given tokens and log-probabilities beside an output, on a tiny random checkpoint."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_checkpoint import ENGINE_FIELDS, VOCAB_SIZE, draw_ids, write_checkpoint

from photon_jax import LLM, RequestError, SamplingParams, forward

BLOCK, CHUNK = ENGINE_FIELDS["block_size"], ENGINE_FIELDS["max_num_batched_tokens"]
LONGEST = 96
NEUTRAL = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=5, logprobs=0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
KINDS = ("raw", "tempered", "sampling")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **ENGINE_FIELDS) as llm:
        yield llm


def log_softmax(llm, tokens, temperature=1.0):
    """Returns f32[len(tokens) V] of the plain forward; one shape, so one program."""
    padded = np.zeros((1, LONGEST), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = forward(llm.params, llm.config, jnp.asarray(padded))[0, : len(tokens)]
    return np.asarray(jax.nn.log_softmax(logits / temperature, axis=-1))


def best(logprobs, count):
    """Returns ids and values of the likeliest tokens, ties by the lowest id."""
    ids = np.argsort(-logprobs, axis=-1, kind="stable")[:, :count]
    return ids, np.take_along_axis(logprobs, ids, axis=-1)


def num_computed(llm, run):
    """Returns what run() gives, and the tokens that the engine computed for it."""
    counters = llm._started.engine.scheduler.counters
    before = counters.num_scheduled_tokens
    return run(), counters.num_scheduled_tokens - before


def assert_same_scores(ours, expected):
    assert (ours.prompt_token_ids, ours.token_ids) == (expected.prompt_token_ids, expected.token_ids)
    np.testing.assert_array_equal(ours.logprobs, expected.logprobs)
    np.testing.assert_array_equal(ours.is_greedy, expected.is_greedy)


# continuations


@pytest.mark.parametrize("num_context", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 70])
def test_a_continuation_gets_the_log_softmax_of_the_plain_forward(llm, num_context):
    context, continuation = draw_ids(num_context, num_context), draw_ids(num_context + 1, 7)
    expected = log_softmax(llm, context + continuation)[num_context - 1 : -1]
    continuation[3] = int(expected[3].argmax())
    (score,) = llm.score([context], [continuation], progress=False)
    expected = log_softmax(llm, context + continuation)[num_context - 1 : -1]
    assert (score.prompt_token_ids, score.token_ids) == (tuple(context), tuple(continuation))
    assert score.logprobs.dtype == np.float32 and score.is_greedy.dtype == np.bool_
    np.testing.assert_allclose(score.logprobs, expected[np.arange(7), continuation], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(score.is_greedy, expected.argmax(axis=-1) == continuation)
    assert score.is_greedy[3] and not score.is_all_greedy
    assert score.sum == pytest.approx(score.logprobs.sum(), abs=1e-4)


@pytest.mark.parametrize("num_prompt", [3, BLOCK, 50])
def test_scores_have_the_bits_of_the_log_probabilities_of_generated_tokens(llm, num_prompt):
    prompt = draw_ids(num_prompt, num_prompt)
    for params in (NEUTRAL, GREEDY):
        (output,) = llm.generate([prompt], params, progress=False)
        completion = output.outputs[0]
        (score,) = llm.score([prompt], [completion.token_ids], progress=False)
        (whole,) = llm.score([prompt + list(completion.token_ids)], progress=False)
        np.testing.assert_array_equal(whole.logprobs[-8:], score.logprobs)
        # at temperature 1 with no filter the three kinds are one; greedy decoding is certain of what it samples
        for kind in KINDS if params is NEUTRAL else KINDS[:2]:
            np.testing.assert_array_equal(getattr(completion.logprobs, kind), score.logprobs, err_msg=kind)
        assert score.is_all_greedy == (params is GREEDY)
        assert score.sum == pytest.approx(completion.cumulative_logprob, abs=1e-6)


def test_continuations_of_one_prompt_share_its_computation_and_change_no_bit(llm, folder):
    prompts = [draw_ids(31, 3 * BLOCK), draw_ids(32, BLOCK + 3)]
    endings = [[draw_ids(40 + i, 5) for i in range(4)], [draw_ids(50 + i, 1 + i) for i in range(2)]]
    nested, count = num_computed(llm, lambda: llm.score(prompts, endings, progress=False))
    assert [len(group) for group in nested] == [4, 2]
    # scores begin with the prompt's last token: the blocks before the one that holds it are shared; nothing is computed
    # of the last token of each
    whole = [3 * BLOCK + 4 + 3 * (BLOCK + 4), (BLOCK + 3) + (3 + 1)]
    assert count == sum(whole)
    with LLM(folder, **ENGINE_FIELDS, enable_prefix_caching=False) as plain:
        for prompt, group, scores in zip(prompts, endings, nested, strict=True):
            for ending, score in zip(group, scores, strict=True):
                (alone,) = plain.score([prompt], [ending], progress=False)
                assert_same_scores(score, alone)
    again, count = num_computed(llm, lambda: llm.score(prompts, endings, progress=False))
    assert count == 4 * (BLOCK + 4) + 3 + (3 + 1)
    for first, second in zip(itertools.chain(*nested), itertools.chain(*again), strict=True):
        assert_same_scores(first, second)


def test_text_continuations_begin_after_as_many_tokens_as_their_prompt_has(llm):
    prompt, endings = "The fox", [" jumps over", " and the dog", ""]
    context = llm.tokenizer.encode(prompt)
    (scores,) = llm.score([prompt], [endings], progress=False)
    for ending, score in zip(endings, scores, strict=True):
        whole = llm.tokenizer.encode(prompt + ending)
        assert score.prompt_token_ids + score.token_ids == tuple(whole)
        assert len(score.prompt_token_ids) == len(context)
        (by_ids,) = llm.score([whole[: len(context)]], [whole[len(context) :]], progress=False)
        assert_same_scores(score, by_ids)
    (mixed,) = llm.score([prompt], [[7, 8]], progress=False)
    assert mixed.prompt_token_ids + mixed.token_ids == (*context, 7, 8)


def test_an_empty_continuation_is_certain(llm):
    (score,) = llm.score([[5, 6, 7]], [[]], progress=False)
    assert (score.token_ids, score.sum, score.is_all_greedy, len(score.logprobs)) == ((), 0.0, True, 0)


def test_one_prompt_takes_one_entry_and_a_list_of_prompts_one_each(llm):
    (score,) = llm.score([5, 6], [7, 8], progress=False)
    for same in (llm.score([[5, 6]], [[7, 8]], progress=False), llm.score((5, 6), np.array([7, 8]), progress=False)):
        assert_same_scores(same[0], score)
    ((first, second),) = llm.score([5, 6], [[7, 8], [9]], progress=False)
    assert_same_scores(first, score)
    assert second.token_ids == (9,)
    assert llm.score([], [], progress=False) == []
    for prompts, continuations in ((iter([5, 6]), iter([7, 8])), (iter([[5, 6]]), (each for each in ([7, 8],)))):
        assert_same_scores(llm.score(prompts, continuations, progress=False)[0], score)
    ((first, second),) = llm.score(np.array([5, 6]), (iter(each) for each in ([7, 8], [9])), progress=False)
    assert (first.token_ids, second.token_ids) == ((7, 8), (9,))


ODD = [{"a": "x", "b": "y"}, {"x", "y"}, b"xy", 7, 1.5, np.array(7)]


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        ([[5], [6]], [[7]], "1 continuations for 2 prompts"),
        ([[5], [6]], [[7], [[8]]], "some prompts have one continuation and some a list"),
        ([[5], []], [[7], [8]], "prompt 1: the prompt is empty, so nothing comes before the continuation"),
        ([[5], [6]], [[[7]], [[8], [VOCAB_SIZE]]], f"prompt 1: .*holds {VOCAB_SIZE}"),
        ([[5]], ["text"], "'text' is text and its prompt is token ids"),
        ([[5]], [[7] * (ENGINE_FIELDS["max_model_len"] + 1)], "max_model_len is 256"),
        ("The fox", [[[1.5]]], "a text or a list of token ids"),
        (["a", "b"], "xy", "continuations are one text for a list of prompts, got 'xy'; give a list"),
        *((["a", "b"], odd, "continuations are for each prompt a text, .* got") for odd in ODD),
        *((["a", "b"], ["x", odd], "prompt 1: continuations are for each prompt a text, .* got") for odd in ODD),
        *(("a", odd, "continuations are for each prompt a text, .* got") for odd in ODD),
    ],
)
def test_what_can_not_be_scored_is_refused_and_nothing_is_left_behind(llm, prompts, continuations, message):
    with pytest.raises(RequestError, match=message):
        llm.score(prompts, continuations, progress=False)
    assert not llm._started.engine.scheduler.has_unfinished


# log-probabilities beside an output


def test_the_most_likely_tokens_of_each_place_are_those_of_the_kind_asked_for(llm):
    prompt, temperature, top_k = draw_ids(60, 20), 0.6, 5
    for kind in KINDS:
        params = SamplingParams(
            temperature=temperature, top_k=top_k, max_tokens=8, ignore_eos=True, seed=3, logprobs=20, logprobs_kind=kind
        )
        (output,) = llm.generate([prompt], params, progress=False)
        completion, logprobs = output.outputs[0], output.outputs[0].logprobs
        heat = 1.0 if kind == "raw" else temperature
        expected = log_softmax(llm, prompt + list(completion.token_ids), heat)[len(prompt) - 1 : -1]
        count = top_k if kind == "sampling" else 20
        ids, values = best(expected, count)
        if kind == "sampling":
            values = values - np.log(np.exp(values).sum(axis=-1, keepdims=True))
            assert np.isneginf(logprobs.top_logprobs[:, top_k:]).all()
        assert (logprobs.top_ids.shape, logprobs.top_ids.dtype) == ((8, 20), np.int32)
        assert (logprobs.top_logprobs.shape, logprobs.top_logprobs.dtype) == ((8, 20), np.float32)
        np.testing.assert_array_equal(logprobs.top_ids[:, :count], ids)
        np.testing.assert_allclose(logprobs.top_logprobs[:, :count], values, atol=1e-5, rtol=0)
        places, columns = np.nonzero(logprobs.top_ids == np.expand_dims(completion.token_ids, 1))
        assert len(places) == 8  # top_k is 5, so each sampled token is among the 20
        np.testing.assert_array_equal(logprobs.top_logprobs[places, columns], getattr(logprobs, kind))


def test_a_request_for_fewer_gets_the_first_ones_and_the_same_bits(llm):
    prompt = draw_ids(61, 40)
    params = [
        SamplingParams(temperature=0.9, max_tokens=6, ignore_eos=True, seed=1, logprobs=k, prompt_logprobs=p)
        for k, p in ((20, 20), (None, None), (0, 0), (1, 7), (7, None))
    ]
    together = llm.generate([prompt] * len(params), params, progress=False)
    alone = [llm.generate([prompt], each, progress=False)[0] for each in params]
    (score,) = llm.score([prompt], progress=False)
    full = together[0]
    for each, *outputs in zip(params, together, alone, strict=True):
        for output in outputs:
            completion, scores = output.outputs[0], output.prompt_logprobs
            assert completion.token_ids == full.outputs[0].token_ids
            assert (completion.logprobs is None) == (each.logprobs is None)
            assert (scores is None) == (each.prompt_logprobs is None)
            if completion.logprobs is not None:
                for name in KINDS:
                    np.testing.assert_array_equal(
                        getattr(completion.logprobs, name), getattr(full.outputs[0].logprobs, name)
                    )
                for name in ("top_ids", "top_logprobs"):
                    whole = getattr(full.outputs[0].logprobs, name)
                    np.testing.assert_array_equal(getattr(completion.logprobs, name), whole[:, : each.logprobs])
            if scores is not None:
                np.testing.assert_array_equal(scores.logprobs, score.logprobs)
                np.testing.assert_array_equal(scores.is_greedy, score.is_greedy)
                for name in ("top_ids", "top_logprobs"):
                    whole = getattr(full.prompt_logprobs, name)
                    np.testing.assert_array_equal(getattr(scores, name), whole[:, : each.prompt_logprobs])


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 2 * CHUNK + 5])
def test_prompt_log_probabilities_are_complete_first_and_again_and_beside_hits(llm, length):
    prompt = draw_ids(length, length)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=4)
    plain = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    expected = log_softmax(llm, prompt)[:-1]
    ids, values = best(expected, 4)
    outputs = [llm.generate([prompt], params, progress=False)[0] for _ in range(2)]
    hit, third = llm.generate([prompt, prompt], [plain, params], progress=False)
    assert hit.num_cached_tokens == (length - 1) // BLOCK * BLOCK and hit.prompt_logprobs is None
    for output in (*outputs, third):
        assert output.num_cached_tokens == 0  # each of its tokens is scored, so each is computed
        scores = output.prompt_logprobs
        assert len(scores.logprobs) == len(scores.is_greedy) == length - 1
        np.testing.assert_allclose(scores.logprobs, expected[np.arange(length - 1), prompt[1:]], atol=1e-5, rtol=0)
        np.testing.assert_array_equal(scores.top_ids, ids)
        np.testing.assert_allclose(scores.top_logprobs, values, atol=1e-5, rtol=0)
        np.testing.assert_array_equal(scores.top_logprobs, outputs[0].prompt_logprobs.top_logprobs)
        np.testing.assert_array_equal(scores.logprobs, outputs[0].prompt_logprobs.logprobs)
        assert output.outputs[0].token_ids == hit.outputs[0].token_ids


def test_a_stream_has_the_prompts_log_probabilities_from_its_first_token_on(llm):
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=0, logprobs=2)
    outputs = list(llm.stream(draw_ids(62, CHUNK + 9), params))
    for output in outputs:
        assert len(output.prompt_logprobs.logprobs) == CHUNK + 8
        assert output.outputs[0].logprobs.top_ids.shape == (len(output.outputs[0].token_ids), 2)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_a_number_of_log_probabilities_out_of_range_is_refused(field):
    with pytest.raises(RequestError, match=rf"{field} must be an integer in \[0, 20\], got 21"):
        SamplingParams(**{field: 21})
    with pytest.raises(RequestError, match="logprobs_kind must be one of raw, tempered, sampling, got 'best'"):
        SamplingParams(logprobs_kind="best")


# samples of one prompt


def test_samples_compute_their_prompt_once(llm, folder):
    prompt, num_samples = draw_ids(63, CHUNK - 2), 4
    params = SamplingParams(n=num_samples, max_tokens=2, ignore_eos=True, seed=9, prompt_logprobs=1, logprobs=1)
    (output,), count = num_computed(llm, lambda: llm.generate([prompt], params, progress=False))
    num_shared = (len(prompt) - 1) // BLOCK * BLOCK  # whole blocks; what follows is each sample's own
    assert count == len(prompt) + (num_samples - 1) * (len(prompt) - num_shared) + num_samples
    assert len({completion.token_ids for completion in output.outputs}) == num_samples
    with LLM(folder, **ENGINE_FIELDS, enable_prefix_caching=False) as plain:
        (apart,), count = num_computed(plain, lambda: plain.generate([prompt], params, progress=False))
    assert count == num_samples * (len(prompt) + 1)
    for ours, theirs in zip(output.outputs, apart.outputs, strict=True):
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_array_equal(ours.logprobs.sampling, theirs.logprobs.sampling)
        np.testing.assert_array_equal(ours.logprobs.top_logprobs, theirs.logprobs.top_logprobs)
    np.testing.assert_array_equal(output.prompt_logprobs.logprobs, apart.prompt_logprobs.logprobs)
