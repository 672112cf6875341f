"""LLM on a tiny random checkpoint: prompts to results, scores, seeds, prefix hits, leaving and closing."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_checkpoint import BEGIN, ENGINE_FIELDS, VOCAB_SIZE, draw_ids, write_checkpoint

from photon_jax import LLM, ConfigError, EngineConfig, EngineDeadError, RequestError, SamplingParams, forward
from photon_jax.client.local_client import LocalClient
from photon_jax.engine.metrics import CompileCounter

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
NOISY = SamplingParams(max_tokens=8, ignore_eos=True, seed=11)
MAX_LEN = ENGINE_FIELDS["max_model_len"]
BLOCK = ENGINE_FIELDS["block_size"]
LONGEST = 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **ENGINE_FIELDS) as llm:
        yield llm


def tokens(llm, prompts, params=GREEDY):
    outputs = llm.generate(prompts, params, progress=False)
    return [completion.token_ids for output in outputs for completion in output.outputs]


def logits_of(llm, prompts):
    """Returns f32[len(prompts) LONGEST V] of the plain forward; one shape, so one program."""
    padded = np.zeros((8, LONGEST), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    return np.asarray(forward(llm.params, llm.config, jnp.asarray(padded)))[: len(prompts)]


def log_softmax(logits):
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))


# prompts and results


def test_results_come_in_the_order_of_the_prompts_with_their_own_params(llm):
    prompts = ["The fox", draw_ids(1, 50), np.array(draw_ids(2, 3)), tuple(draw_ids(3, 20)), "dog"]
    params = [SamplingParams(temperature=0.0, max_tokens=9 - 2 * i, ignore_eos=True, logprobs=0) for i in range(5)]
    outputs = llm.generate(prompts, params, progress=False)
    assert [output.prompt for output in outputs] == ["The fox", None, None, None, "dog"]
    assert outputs[0].prompt_token_ids == tuple(llm.tokenizer.encode("The fox"))
    assert outputs[0].prompt_token_ids[0] == BEGIN
    assert [output.prompt_token_ids for output in outputs[1:4]] == [tuple(map(int, prompt)) for prompt in prompts[1:4]]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 7, 5, 3, 1]
    assert len({output.request_id for output in outputs}) == 5
    for output, prompt, each in zip(outputs, prompts, params, strict=True):
        (alone,) = llm.generate(prompt, each, progress=False)
        completion = output.outputs[0]
        assert (completion.token_ids, completion.text) == (alone.outputs[0].token_ids, alone.outputs[0].text)
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == "length"
        for kind in ("raw", "tempered", "sampling"):
            ours, theirs = getattr(completion.logprobs, kind), getattr(alone.outputs[0].logprobs, kind)
            assert ours.dtype == np.float32 and len(ours) == len(completion.token_ids)
            np.testing.assert_array_equal(ours, theirs)
        assert completion.cumulative_logprob == pytest.approx(completion.logprobs.raw.sum(), rel=1e-6)


def test_no_prompts_give_no_results(llm):
    assert llm.generate([], progress=False) == []
    assert llm.score([], progress=False) == []


def test_logprobs_are_given_only_when_asked_for(llm):
    (output,) = llm.generate([5], SamplingParams(temperature=0.0, max_tokens=3), progress=False)
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob < 0


def test_max_tokens_left_out_fills_the_context(llm):
    (output,) = llm.generate(draw_ids(4, MAX_LEN - 5), SamplingParams(temperature=0.0, ignore_eos=True), progress=False)
    assert output.sampling_params.max_tokens == len(output.outputs[0].token_ids) == 5
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (5, None, "a text, token ids or a list of either"),
        ([[5], []], None, "prompt 1: .*empty prompt"),
        ([[5], [5, VOCAB_SIZE]], None, f"prompt 1: .*holds {VOCAB_SIZE}; the model's ids are 0 to {VOCAB_SIZE - 1}"),
        ([-1], None, "holds -1"),
        ([5.5], None, "a text or a list of token ids"),
        ([5], [GREEDY, GREEDY], "2 sampling_params for 1 prompts"),
        ([[5], [5] * MAX_LEN], None, r"prompt 1: .*max_model_len is 256; shorten the prompt"),
        ([5], SamplingParams(max_tokens=MAX_LEN), "ask for fewer or raise EngineConfig.max_model_len"),
        ([5], SamplingParams(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids holds"),
        ("\ud800", None, "lone surrogate"),
    ],
)
def test_wrong_request_is_refused_and_the_next_one_is_served(llm, prompts, params, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params, progress=False)
    assert tokens(llm, [5, 6]) == tokens(llm, [[5, 6]])
    assert not llm._started.engine.scheduler.has_unfinished


def test_two_ways_of_giving_settings_at_once_are_refused(folder):
    with pytest.raises(ConfigError, match="give engine_config or the fields block_size, not both"):
        LLM(folder, block_size=16, engine_config=EngineConfig())


# streams


def test_stream_gives_what_generate_gives_piece_by_piece(llm):
    for params in (GREEDY, NOISY):
        (whole,) = llm.generate("The fox", params, progress=False)
        outputs = list(llm.stream("The fox", params))
        assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 9))
        assert [output.outputs[0].finish_reason for output in outputs] == [None] * 7 + ["length"]
        texts = [output.outputs[0].text for output in outputs]
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
        last, expected = outputs[-1].outputs[0], whole.outputs[0]
        assert (last.token_ids, last.text) == (expected.token_ids, expected.text)
        assert outputs[-1].prompt == "The fox"


def test_text_of_random_tokens_never_shrinks_and_ends_as_the_decoded_ids(llm):
    for seed in range(12):
        params = SamplingParams(temperature=2.0, max_tokens=40, seed=seed, ignore_eos=True)
        outputs = list(llm.stream([5, 6], params))
        texts = [output.outputs[0].text for output in outputs]
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
        known = [token_id for token_id in outputs[-1].outputs[0].token_ids if token_id < llm.tokenizer.vocab_size]
        assert texts[-1] == llm.tokenizer.decode(known)  # the model's padding has no text


def test_streams_and_generate_take_turns(llm):
    alone = [tokens(llm, prompt)[0] for prompt in ([5], [6, 7], draw_ids(5, 40))]
    first, second = llm.stream([5], GREEDY), llm.stream([6, 7], GREEDY)
    seen = [next(first), next(second)]
    assert tokens(llm, draw_ids(5, 40)) == alone[2:]
    *_, seen[1] = second
    *_, seen[0] = first
    assert [output.outputs[0].token_ids for output in seen] == alone[:2]
    assert [output.outputs[0].finish_reason for output in seen] == ["length", "length"]


@pytest.mark.parametrize("num_seen", [0, 1, 3])
def test_closed_or_dropped_stream_leaves_nothing_behind(llm, num_seen):
    expected = tokens(llm, [[6, 7]])
    scheduler = llm._started.engine.scheduler
    for leave in ("close", "drop"):
        stream = llm.stream(draw_ids(6, 40), SamplingParams(max_tokens=100))
        for _ in range(num_seen):
            next(stream)
        assert scheduler.has_unfinished
        if leave == "close":
            stream.close()
        del stream
        assert not scheduler.has_unfinished
        assert scheduler.num_free_blocks == ENGINE_FIELDS["num_blocks"] - 1
        assert tokens(llm, [[6, 7]]) == expected


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_interrupted_generate_leaves_nothing_behind(llm, monkeypatch, num_steps):
    prompts = [draw_ids(7, 40), [5]]
    expected = tokens(llm, prompts)
    step, left = LocalClient.step, iter(range(num_steps))

    def interrupted_step(client):
        if next(left, None) is None:
            raise KeyboardInterrupt
        step(client)

    with monkeypatch.context() as patch:
        patch.setattr(LocalClient, "step", interrupted_step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY, progress=False)
    scheduler = llm._started.engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.has_unfinished
    assert tokens(llm, prompts) == expected


# scores and log-probabilities


def test_scores_are_the_log_softmax_of_the_plain_forward(llm):
    prompts = [draw_ids(20 + length, length) for length in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, LONGEST)]
    logits = logits_of(llm, prompts)
    scores = llm.score(prompts, progress=False)
    for prompt, row, score in zip(prompts, logits, scores, strict=True):
        targets, places = prompt[1:], np.arange(len(prompt) - 1)
        assert score.prompt_token_ids == tuple(prompt)
        assert score.logprobs.dtype == np.float32 and score.is_greedy.dtype == np.bool_
        assert len(score.logprobs) == len(score.is_greedy) == len(prompt) - 1
        np.testing.assert_allclose(score.logprobs, log_softmax(row)[places, targets], atol=1e-5)
        np.testing.assert_array_equal(score.is_greedy, row[places].argmax(-1) == targets)
    again = llm.score(prompts[::-1], progress=False)[::-1]
    for first, second in zip(scores, again, strict=True):
        np.testing.assert_array_equal(first.logprobs, second.logprobs)
        np.testing.assert_array_equal(first.is_greedy, second.is_greedy)


def test_scores_of_generated_tokens_are_their_logprobs_and_greedy(llm):
    prompt = draw_ids(8, 20)
    (output,) = llm.generate(prompt, GREEDY, progress=False)
    completion = output.outputs[0]
    (score,) = llm.score(prompt + list(completion.token_ids), progress=False)
    np.testing.assert_allclose(score.logprobs[-8:], completion.logprobs.raw, atol=1e-5)
    assert score.is_greedy[-8:].all()
    (text_score,) = llm.score("The fox", progress=False)
    assert text_score.prompt_token_ids == tuple(llm.tokenizer.encode("The fox"))


def test_score_takes_a_context_and_the_token_after_it_and_no_more(llm):
    (score,) = llm.score(draw_ids(9, MAX_LEN + 1), progress=False)
    assert len(score.logprobs) == MAX_LEN
    with pytest.raises(RequestError, match="max_model_len is 256"):
        llm.score(draw_ids(9, MAX_LEN + 2), progress=False)


def test_three_kinds_of_logprobs_are_of_the_distributions_that_they_name(llm):
    prompt, top_k = draw_ids(10, 12), 5
    params = SamplingParams(temperature=0.6, top_k=top_k, max_tokens=16, seed=3, ignore_eos=True, logprobs=0)
    (output,) = llm.generate(prompt, params, progress=False)
    completion = output.outputs[0]
    (logits,) = logits_of(llm, [[*prompt, *completion.token_ids]])
    logits = logits[len(prompt) - 1 :][:16]
    places, ids = np.arange(16), list(completion.token_ids)
    floor = np.sort(logits, axis=-1)[:, -top_k, None]
    kept = np.where(logits >= floor, logits, -np.inf) / np.float32(0.6)
    np.testing.assert_allclose(completion.logprobs.raw, log_softmax(logits)[places, ids], atol=1e-5)
    np.testing.assert_allclose(completion.logprobs.tempered, log_softmax(logits / 0.6)[places, ids], atol=1e-5)
    np.testing.assert_allclose(completion.logprobs.sampling, log_softmax(kept)[places, ids], atol=1e-5)
    assert len(set(ids)) > 1


# seeds


def test_seeded_request_gets_its_tokens_in_any_company_and_slot(llm):
    (alone,) = tokens(llm, [[5, 6, 7]], NOISY)
    assert tokens(llm, [[5, 6, 7]], NOISY) == [alone]
    unseeded = SamplingParams(max_tokens=12, ignore_eos=True)
    other = SamplingParams(max_tokens=3, ignore_eos=True, seed=12)
    for place in range(4):
        prompts, params = [[8], [9, 10], draw_ids(11, 30)], [unseeded, other, unseeded]
        prompts.insert(place, [5, 6, 7])
        params.insert(place, NOISY)
        assert tokens(llm, prompts, params)[place] == alone
    stream = llm.stream(draw_ids(12, 40), unseeded)
    next(stream)
    assert tokens(llm, [[5, 6, 7]], NOISY) == [alone]
    stream.close()


def test_one_params_object_gives_two_prompts_noise_of_their_own(llm):
    # equal logits are needed to compare noise: at this temperature all tokens are about equally likely
    flat = SamplingParams(temperature=1e6, max_tokens=8, ignore_eos=True, seed=11)
    first, second, third = tokens(llm, [[5], [6], [5]], flat)
    assert first == third
    assert sum(a == b for a, b in zip(first, second, strict=True)) <= 1


def test_samples_of_one_prompt_differ_and_come_again(llm):
    params = SamplingParams(n=4, max_tokens=8, ignore_eos=True, seed=11)
    samples = tokens(llm, [[5, 6, 7]], params)
    assert len(set(samples)) == 4
    assert tokens(llm, [[5, 6, 7]], params) == samples
    assert tokens(llm, [[5, 6, 7]], NOISY) == samples[:1]
    other = SamplingParams(n=2, max_tokens=8, ignore_eos=True, seed=12)
    assert not set(tokens(llm, [[5, 6, 7]], other)) & set(samples)


def test_requests_without_a_seed_differ_and_follow_the_seed_of_the_llm(folder):
    def draw(seed):
        with LLM(folder, **ENGINE_FIELDS, seed=seed) as llm:
            return tokens(llm, [[5], [5]], SamplingParams(max_tokens=8, ignore_eos=True))

    first, second = draw(0)
    assert first != second
    assert draw(0) == [first, second]
    assert not {first, second} & set(draw(1))


# the engine's sizes and its prefix cache


def test_equal_prompts_share_their_prefix_blocks_and_get_the_same_tokens(llm):
    prompt = draw_ids(13, 3 * BLOCK - 8)
    first, second, third = llm.generate([prompt, prompt, [*prompt[:-1], 5]], GREEDY, progress=False)
    assert [output.num_cached_tokens for output in (first, second, third)] == [0, 2 * BLOCK, 2 * BLOCK]
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    # three chunks of two blocks each: all but the last block, whose last token must be computed
    whole = draw_ids(14, 6 * BLOCK)
    (fresh,), (again,) = (llm.generate(whole, GREEDY, progress=False) for _ in range(2))
    assert (fresh.num_cached_tokens, again.num_cached_tokens) == (0, 5 * BLOCK)
    np.testing.assert_array_equal(fresh.outputs[0].logprobs.raw, again.outputs[0].logprobs.raw)


def test_prefix_cache_can_be_switched_off(folder, llm):
    prompt = draw_ids(13, 3 * BLOCK - 8)
    with LLM(folder, **ENGINE_FIELDS, enable_prefix_caching=False) as plain:
        outputs = plain.generate([prompt, prompt], GREEDY, progress=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert [output.outputs[0].token_ids for output in outputs] == tokens(llm, [prompt, prompt])


def test_chunk_size_does_not_change_a_token_and_old_cache_contents_do_not_leak(folder, llm):
    prompts = [draw_ids(15, 30), draw_ids(16, 32)]
    expected = tokens(llm, prompts)
    for chunk in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
        with LLM(folder, **{**ENGINE_FIELDS, "max_num_seqs": 1, "max_num_batched_tokens": chunk}) as chunked:
            runner = chunked._started.runner
            runner.cache = jax.tree.map(lambda array: jnp.asarray(np.full(array.shape, 1e4, array.dtype)), runner.cache)
            assert tokens(chunked, prompts) == expected, chunk
            assert chunked._started.engine.scheduler.counters.num_chunks >= 2 * (29 // chunk)


def test_options_compile_nothing_once_a_size_was_seen(llm):
    tokens(llm, [draw_ids(17, 30), [5], [6], [7]])
    tokens(llm, [5], NOISY)
    with CompileCounter() as counter:
        options = SamplingParams(
            temperature=0.7,
            top_k=3,
            top_p=0.9,
            min_p=0.01,
            min_tokens=2,
            max_tokens=5,
            stop_token_ids=[9],
            n=3,
            stop="x",
        )
        llm.generate([draw_ids(18, 9), "The fox"], options, progress=False)
        list(llm.stream([5], GREEDY))
    assert counter.num_compiles == 0


# bars, lines, the end


def test_loading_and_generating_show_bars_and_a_ready_line_on_standard_error(folder, capsys):
    with LLM(folder, **{**ENGINE_FIELDS, "progress": True}) as llm:
        started = capsys.readouterr()
        llm.generate([[5], [6], [7]], GREEDY)
        generated = capsys.readouterr()
        llm.generate([[5], [6], [7]], GREEDY, progress=False)
        list(llm.stream([5], GREEDY))
        quiet = capsys.readouterr()
        report = llm.memory_report()
    assert "loading: 100%" in started.err
    (line,) = [line for line in started.err.splitlines() if line.startswith("ready in ")]
    assert " step programs, " in line and " from the compile cache; " in line
    shown, reported = (re.sub(r"free \d+ MiB", "", text) for text in (line, report))  # other processes take and give it
    assert shown.endswith(reported) and "free " in report
    assert "39 blocks of 16 tokens = 624 tokens" in report and "longest request 256 tokens" in report
    assert "weights " in report and "workspace " in report
    assert "3/3" in generated.err and "request" in generated.err and "tokens/s" in generated.err
    assert (started.out, generated.out, quiet.out, quiet.err) == ("", "", "", "")


def test_nothing_is_shown_when_progress_is_off(folder, capsys):
    with LLM(folder, **ENGINE_FIELDS):
        assert capsys.readouterr() == ("", "")


def test_closed_llm_gives_its_memory_back_and_says_that_it_is_closed(folder):
    with LLM(folder, **ENGINE_FIELDS) as llm:
        stream = llm.stream([5, 6], GREEDY)
        next(stream)
        cache = llm._started.runner.cache
    assert all(array.is_deleted() for array in jax.tree.leaves((cache, llm.params)))
    assert [output.outputs[0].finish_reason for output in stream] == ["abort"]
    llm.close()
    for use in (
        lambda: llm.generate([5]),
        lambda: llm.score([5]),
        lambda: llm.stream([5]),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        llm.memory_report,
    ):
        with pytest.raises(EngineDeadError, match="this LLM is closed; make a new one"):
            use()
    assert llm.tokenizer.decode(llm.tokenizer.encode("The fox")) == "The fox"
