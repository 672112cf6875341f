"""Sampling controls through the engine: greedy traces, processors, what compiles, what a restart keeps."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.controls_reference import as_row, controlled_logits
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax import LogitsProcessor, RequestError, SamplingParams, forward
from photon_jax.cache.layout import CacheLayout
from photon_jax.client.local_client import LocalClient
from photon_jax.client.submission import Prompt
from photon_jax.config import CacheConfig, KernelConfig, SchedulerConfig
from photon_jax.engine.buckets import TileChoice, tiled_buckets
from photon_jax.engine.controls import ControlSlots, _control_row, _neutral_row, control_bytes
from photon_jax.engine.engine import Engine
from photon_jax.engine.metrics import CompileCounter
from photon_jax.engine.runner import ModelRunner
from photon_jax.engine.step import StepConfig
from photon_jax.scheduler.scheduler import Scheduler

CONFIG = tiny_config(num_layers=1)
VOCAB = CONFIG.vocab_size
TRACES = []
PROMPT = (72, 101, 108, 108, 111, 32, 72, 101)
LENGTH, MAX_TOKENS = 32, 16
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}


class Started:
    """An engine with one bucket for decode steps and one for others, so that few programs are compiled."""

    def __init__(self):
        limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8, steps_ahead=1, max_steps_per_dispatch=1)
        cache, layout = CacheConfig(block_size=16, num_blocks=99), CacheLayout(num_blocks=99, block_size=16)
        buckets = tiled_buckets(limits, layout, max_model_len=64, tiles=TileChoice())
        config = StepConfig(model=CONFIG, kernels=KernelConfig().resolve("cpu", head_dim=16), max_model_len=64)
        self.runner = ModelRunner(tiny_params(CONFIG), config, layout, buckets, max_num_seqs=8)
        self.engine = Engine(Scheduler(limits, cache, layout, max_model_len=64), self.runner, steps_ahead=1)


@pytest.fixture(scope="module")
def started():
    return Started()


def make_client(started, **fields):
    return LocalClient(started.engine, ByteTokenizer(), vocab_size=VOCAB, eos_token_ids=(257,), **fields)


@pytest.fixture
def client(started):
    yield make_client(started)
    started.engine.drain()
    started.engine.scheduler.check_integrity()
    assert not started.engine.scheduler.has_unfinished


def run(client, *params, prompt=PROMPT):
    submissions = client.submit_all([Prompt(token_ids=tuple(prompt))] * len(params), params, score=False)
    client.run(submissions)
    return [submission.output() for submission in submissions]


def tokens(client, *params, prompt=PROMPT):
    return [output.outputs[0].token_ids for output in run(client, *params, prompt=prompt)]


def greedy(**fields):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": MAX_TOKENS} | fields))


def trace(process=None, *, min_tokens=0, **controls):
    """Returns the greedy output that the reference gives; `process` maps (logits, token, position) to logits."""
    output = []
    while len(output) < MAX_TOKENS and output[-1:] != [257]:
        sequence = [*PROMPT, *output]
        padded = jnp.asarray([sequence + [0] * (LENGTH - len(sequence))])
        logits = np.asarray(forward(tiny_params(CONFIG), CONFIG, padded))[0, len(sequence) - 1].astype(np.float64)
        if process is not None:
            logits = process(logits, sequence[-1], len(sequence))
        banned = (257,) if len(output) < min_tokens else ()
        scores = controlled_logits(logits, prompt=PROMPT, output=output, banned=banned, **controls)
        output.append(int(as_row(scores, VOCAB).argmax()))
    return tuple(output)


def climb(state, logits, token, position):
    """Adds more and more to one token after another."""
    TRACES.append("climb")
    step = state["step"] + 1
    target = (7 * position + token) % logits.shape[0]
    return {"step": step}, logits.at[target].add(0.4 * step.astype(jnp.float32))


def climbing(first):
    """Returns `climb` as the reference takes it."""
    step = first

    def process(logits, token, position):
        nonlocal step
        step += 1
        logits = logits.copy()
        logits[(7 * position + token) % VOCAB] += 0.4 * step
        return logits

    return process


def upper_half(state, logits, token, position):
    TRACES.append("upper_half")
    return state, jnp.where(jnp.arange(logits.shape[0]) < 129, -jnp.inf, logits)


def start_at(step):
    return LogitsProcessor(climb, {"step": np.int32(step)})


def test_greedy_traces_are_those_of_the_reference_in_one_batch(client):
    plain = trace()
    repeated = [token for token in plain if plain.count(token) > 1]
    few = tuple(dict.fromkeys((*plain[:5], 257)))
    pairs = tuple(itertools.pairwise(plain))
    cases = [
        {},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.5},
        {"frequency_penalty": -0.5, "presence_penalty": -1.0},
        {"logit_bias": {plain[0]: -5.0, 97: 2.0, 257: 1.0}},
        {"allowed_token_ids": few},
        {"allowed_token_ids": few, "frequency_penalty": 1.0},
        {"bad_words": (plain[:1], *pairs[3:6])},
        {"bad_words": pairs},
        PENALTIES | {"logit_bias": {257: 100.0}, "min_tokens": 5},
        PENALTIES | {"logit_bias": {98: 1.0}, "allowed_token_ids": range(40, 258), "bad_words": ((99,), *pairs)},
    ]
    assert repeated  # so that penalties have something to count
    expected = [trace(**case) for case in cases]
    expected += [trace(climbing(0)), trace(climbing(5), **PENALTIES)]
    params = [greedy(**case) for case in cases]
    params += [greedy(logits_processor=start_at(0)), greedy(logits_processor=start_at(5), **PENALTIES)]
    found = tokens(client, *params)
    for case, ours, wanted in zip(params, found, expected, strict=True):
        assert ours == wanted, case
    assert len(set(expected)) >= len(expected) - 2
    assert found[-4][-1] == 257 and len(found[-4]) == 6


def test_processors_are_traced_once_and_compiled_when_their_functions_first_meet(client):
    params = [
        greedy(),
        greedy(logits_processor=start_at(0)),
        greedy(logits_processor=upper_half, presence_penalty=0.5),
        greedy(logits_processor=start_at(2), repetition_penalty=1.2),
    ]
    with CompileCounter() as first:
        found = tokens(client, *params)
    assert first.num_compiles > 0
    processed = trace(lambda logits, *_: np.where(np.arange(VOCAB) < 129, -np.inf, logits), presence_penalty=0.5)
    assert found == [trace(), trace(climbing(0)), processed, trace(climbing(2), repetition_penalty=1.2)]
    with CompileCounter() as second:
        assert tokens(client, *params[::-1]) == found[::-1]
        assert tokens(client, greedy(logits_processor=start_at(9)))[0] == trace(climbing(9))
    assert second.num_compiles == 0
    assert TRACES.count("climb") == TRACES.count("upper_half") == 1


def test_each_sample_has_its_own_state_and_counts(client):
    params = SamplingParams(max_tokens=8, n=3, seed=5, logits_processor=start_at(0), frequency_penalty=0.5)
    (output,) = run(client, params)
    alone = run(client, SamplingParams(max_tokens=8, seed=5, logits_processor=start_at(0), frequency_penalty=0.5))
    assert output.outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert len({completion.token_ids for completion in output.outputs}) == 3


def test_log_probabilities_are_raw_before_the_controls_and_sampled_after_them(client):
    params = SamplingParams(max_tokens=6, seed=3, allowed_token_ids=(65, 66), logprobs=0, ignore_eos=True)
    (output,) = run(client, params)
    completion = output.outputs[0]
    sequence = [*PROMPT, *completion.token_ids]
    logits = np.asarray(forward(tiny_params(CONFIG), CONFIG, jnp.asarray([sequence])))[0, len(PROMPT) - 1 : -1]
    rows = np.arange(6)
    raw = np.asarray(jax.nn.log_softmax(logits))[rows, list(completion.token_ids)]
    two = np.asarray(jax.nn.log_softmax(logits[:, [65, 66]]))[rows, np.asarray(completion.token_ids) - 65]
    np.testing.assert_allclose(completion.logprobs.raw, raw, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(completion.logprobs.sampling, two, rtol=1e-5, atol=1e-5)


def test_bad_words_are_kept_out_of_the_text_in_all_their_places(client):
    letters = {"allowed_token_ids": [*b" abc"], "ignore_eos": True, "max_tokens": 40}
    params = [SamplingParams(seed=seed, bad_words=words, **letters) for seed in range(4) for words in ((), ("ab", "c"))]
    texts = [output.outputs[0].text for output in run(client, *params)]
    assert all("ab" not in text and "c" not in text for text in texts[1::2])
    assert all("ab" in text or "c" in text for text in texts[::2])


def test_a_default_repetition_penalty_is_used_where_none_is_given(started):
    with_default = make_client(started, sampling_defaults={"repetition_penalty": 1.4})
    plain = make_client(started)
    (output,) = run(with_default, greedy())
    assert output.sampling_params.repetition_penalty == 1.4
    assert output.outputs[0].token_ids == tokens(plain, greedy(repetition_penalty=1.4))[0]
    assert output.outputs[0].token_ids != tokens(plain, greedy())[0]


def broken_off_tokens(started, monkeypatch, *params):
    """Returns the outputs of requests whose steps break off now and then, with two of them on their way."""
    client = make_client(started)
    submissions = client.submit_all([Prompt(token_ids=PROMPT)] * len(params), params, score=False)
    collect, calls = started.runner.collect, []

    def failing(handle):
        calls.append(handle)
        if len(calls) in (1, 5, 6, 11):
            raise KeyboardInterrupt
        return collect(handle)

    monkeypatch.setattr(started.runner, "collect", failing)
    while not all(submission.is_finished for submission in submissions):
        try:
            client.step()
        except KeyboardInterrupt:
            started.engine.scheduler.check_integrity()
    assert len(calls) > 11
    return [submission.output().outputs[0].token_ids for submission in submissions]


STATEFUL = (
    greedy(logits_processor=start_at(1), repetition_penalty=1.2),
    SamplingParams(max_tokens=MAX_TOKENS, seed=9, logits_processor=start_at(0), bad_words=[[1, 2]]),
    greedy(frequency_penalty=0.7),
)


def test_steps_that_break_off_change_no_token(started, monkeypatch):
    expected = tokens(make_client(started), *STATEFUL)
    assert broken_off_tokens(started, monkeypatch, *STATEFUL) == expected


def test_processor_states_from_after_a_step_that_broke_off_would_change_tokens(started, monkeypatch):
    expected, reset = tokens(make_client(started), *STATEFUL), ControlSlots.reset

    def save_newest(self):
        self._in_flight.clear()
        reset(self)

    monkeypatch.setattr(ControlSlots, "reset", save_newest)
    found = broken_off_tokens(started, monkeypatch, *STATEFUL)
    assert found[0] != expected[0]
    assert found[2] == expected[2]


def test_what_steps_count_on_the_device_is_what_the_tokens_count(client, started):
    params = [
        greedy(max_tokens=30, **PENALTIES),
        SamplingParams(seed=1, max_tokens=30, bad_words=[[1, 2], [3]], logit_bias={5: 1.0}, repetition_penalty=1.1),
        greedy(max_tokens=30),
        greedy(max_tokens=30, allowed_token_ids=range(90, 120), frequency_penalty=0.1),
    ]
    submissions = client.submit_all([Prompt(token_ids=PROMPT)] * len(params), params, score=False)
    for _ in range(18):
        client.step()
    started.engine.drain()
    state, num_checked = started.runner.state.controls, 0
    for seq in started.engine.scheduler._running.values():
        if seq.request.has_controls and seq.num_output_tokens > 3:
            ours = jax.tree.map(lambda array, slot=seq.state_slot: np.asarray(array[slot]), state)
            jax.tree.map(np.testing.assert_array_equal, ours, _control_row(seq, VOCAB))
            num_checked += 1
    assert num_checked == 3
    null, neutral = jax.tree.map(lambda array: np.asarray(array[0]), state), _neutral_row(VOCAB)
    for name in ("penalties", "bias", "num_bad_words"):
        np.testing.assert_array_equal(getattr(null, name), getattr(neutral, name), err_msg=name)
    client.abort_all(submissions)


def test_the_control_state_is_counted_as_memory(client, started):
    tokens(client, greedy(presence_penalty=1.0))
    num_slots = 9
    assert started.runner.control_bytes == control_bytes(vocab_size=VOCAB, num_slots=num_slots)
    assert started.runner.control_bytes > num_slots * VOCAB * (4 + 4 + 1)


def wrong_state(state, logits, token, position):
    return state.astype("float32"), logits


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"logit_bias": {258: 1.0}}, "logit_bias holds 258; the model's ids are 0 to 257"),
        ({"allowed_token_ids": [3, 300]}, "allowed_token_ids holds 300"),
        ({"bad_words": [[3, 999]]}, "bad_words holds 999"),
        ({"bad_words": ["a long sentence that is no word"]}, "the bad word 'a long .* is 31 tokens long"),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "bad_words rule out each of allowed_token_ids"),
        ({"allowed_token_ids": [257], "min_tokens": 1}, "only stop ids are left"),
        ({"logits_processor": lambda s, x, t, p: x}, r"<lambda> must return \(state, logits\), got float32\[258\]"),
        ({"logits_processor": lambda s, x, t, p: (s, x[1:])}, r"must return logits float32\[258\], got float32\[257\]"),
        ({"logits_processor": lambda s, x, t, p: (s, x.astype("bfloat16"))}, r"got bfloat16\[258\]"),
        ({"logits_processor": lambda s, x, t, p: (1, x)}, r"must return a state like the first one, \(\), got"),
        (
            {"logits_processor": LogitsProcessor(wrong_state, 1)},
            r"wrong_state .* like the first one, int32\[\], got fl",
        ),
        ({"logits_processor": LogitsProcessor(climb, {"step": "1"})}, r"arrays and numbers, got '1' at \['step'\]"),
        ({"logits_processor": LogitsProcessor(climb, jax.random.key(0))}, "jax.random.key_data"),
    ],
)
def test_a_control_that_cannot_be_served_is_refused_before_anything_runs(client, fields, match):
    with pytest.raises(RequestError, match=match):
        run(client, greedy(), greedy(**fields))
