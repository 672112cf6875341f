"""Sampling controls: their distributions, their order, and that they leave other rows alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.controls_reference import as_row, controlled_logits, draw_controlled, make_controls, make_sequence
from helpers.sampling_reference import chi_square, chi_square_bound, draw, log_softmax, logits_of, sampling_distribution

from photon_jax.controls import ProcessorFailure
from photon_jax.request import MIN_REPETITION_PENALTY

VOCAB, WIDTH, NUM_DRAWS, NUM_SEEDS = 50, 16, 2048, 20
PROMPT, OUTPUT = (4, 9, 4, 30, 1), (9, 2, 2, 17, 40, 2)
CONTROLS = {
    "repetition": {"repetition_penalty": 1.8},
    "repetition below one": {"repetition_penalty": MIN_REPETITION_PENALTY, "temperature": 1e6},
    "presence": {"presence_penalty": 1.5},
    "negative presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {2: 1.5, 7: -100.0, 30: 2.0, 11: -0.5}},
    "allowed": {"allowed_token_ids": (1, 2, 9, 17, 30, 31, 44)},
    "bad words": {"bad_words": ((3,), (40, 2, 5), (2, 8), (17, 40, 2, 9), (40, 7), (2, 2, 17, 40, 2, 12))},
    "min_tokens": {"banned": (0, 2, 30)},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.3},
    "bias and allowed": {"logit_bias": {9: 2.0, 5: 3.0}, "allowed_token_ids": range(12), "temperature": 0.7},
    "penalties and filters": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "top_k": 20, "min_p": 0.02},
    "bad words and top_p": {"bad_words": ((2, 9), (1,), (40, 2, 30)), "top_p": 0.8, "temperature": 1.4},
    "everything": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {6: 1.0, 9: -1.0},
        "allowed_token_ids": range(3, 48),
        "bad_words": ((10,), (2, 12)),
        "banned": (20, 21),
        "temperature": 1.3,
        "top_k": 25,
        "top_p": 0.9,
        "min_p": 0.01,
    },
}
FILTERS = ("temperature", "top_k", "top_p", "min_p")


@functools.cache
def model():
    """Returns hidden states f32[16 D] and an output projection whose logits f32[16 V] spread by about 2."""
    rng = np.random.default_rng(VOCAB)
    head = rng.standard_normal((VOCAB, WIDTH)).astype(np.float32) / 2.0
    return rng.standard_normal((16, WIDTH)).astype(np.float32), head


def fields_of(control):
    """Returns a control's filters and stop ids as fields of step inputs."""
    banned = tuple(control.get("banned", ()))
    filters = {name: control[name] for name in FILTERS if name in control}
    stops = {"stop_ids": [*banned] + [0] * (32 - len(banned)), "num_stop_ids": len(banned), "masks_stops": 1}
    return {"temperature": 1.0} | filters | stops


def params_of(control):
    return {name: value for name, value in control.items() if name not in (*FILTERS, "banned")}


def reference(control, row=0):
    """Returns the logits f64[V] and the distribution that the reference gives for one hidden state."""
    hidden, head = model()
    changes = {name: value for name, value in control.items() if name not in FILTERS}
    logits = as_row(controlled_logits(logits_of(hidden, head)[row], prompt=PROMPT, output=OUTPUT, **changes), VOCAB)
    filters = {"temperature": 1.0} | {name: control[name] for name in FILTERS if name in control}
    return logits, sampling_distribution(logits, **filters)


def seeds(seed, count=NUM_DRAWS):
    return np.stack([np.arange(count) + seed * count, np.full(count, 7)], axis=1)


def draw_many(control, seed):
    hidden, head = model()
    controls = make_controls(make_sequence(PROMPT, OUTPUT, **params_of(control)), vocab_size=VOCAB)
    repeated = np.repeat(hidden[:1], NUM_DRAWS, axis=0)
    return draw_controlled(repeated, head, controls, tile=None, seeds=seeds(seed), **fields_of(control))


@pytest.mark.parametrize("name", CONTROLS)
def test_draws_follow_the_reference_distribution(name):
    _, expected = reference(CONTROLS[name])
    _, plain = reference({})
    assert expected != plain
    wanted = np.asarray([expected.get(token, 0.0) * NUM_DRAWS for token in range(VOCAB)])
    results = []
    for seed in range(NUM_SEEDS):
        token_ids, logprobs, _ = draw_many(CONTROLS[name], seed)
        counts = np.bincount(token_ids, minlength=VOCAB)
        assert counts[wanted == 0.0].sum() == 0
        results.append(chi_square(counts, wanted))
    # independent statistics add up to one of all their degrees of freedom
    statistic, degrees = np.sum(results, axis=0)
    assert degrees >= NUM_SEEDS
    assert statistic < chi_square_bound(degrees), (statistic, degrees)
    sampling = np.log([expected[token] for token in token_ids.tolist()])
    np.testing.assert_allclose(logprobs[:, 2], sampling, rtol=1e-5, atol=1e-5)
    raw = log_softmax(logits_of(*model())[0])
    np.testing.assert_allclose(logprobs[:, 0], raw[token_ids], rtol=1e-5, atol=1e-5)


def test_a_slightly_wrong_distribution_is_noticed():
    _, expected = reference({"frequency_penalty": 0.4})
    wanted = np.asarray([expected[token] * NUM_DRAWS for token in range(VOCAB)])
    counts = [np.bincount(draw_many(CONTROLS["frequency"], seed)[0], minlength=VOCAB) for seed in range(NUM_SEEDS)]
    results = [chi_square(count, wanted) for count in counts]
    statistic, degrees = np.sum(results, axis=0)
    assert statistic > chi_square_bound(degrees)


@pytest.mark.parametrize("is_greedy", [False, True])
def test_greedy_rows_take_the_best_of_the_controlled_logits(is_greedy):
    hidden, head = model()
    sequences = [make_sequence(PROMPT, OUTPUT, **params_of(control)) for control in CONTROLS.values()]
    count = len(sequences) + 2
    stops = [fields_of(control) for control in CONTROLS.values()] + [fields_of({})] * 2
    token_ids, logprobs, _ = draw_controlled(
        np.concatenate([hidden[: len(sequences)], hidden[:2]]),
        head,
        make_controls(*sequences, vocab_size=VOCAB),
        slots=[*range(1, count - 1), 0, 0],
        tile=8,
        is_greedy=is_greedy,
        **{name: [stop[name] for stop in stops] for name in ("stop_ids", "num_stop_ids", "masks_stops")},
    )
    expected = [reference(control, row)[0].argmax() for row, control in enumerate(CONTROLS.values())]
    raw = logits_of(hidden, head)
    np.testing.assert_array_equal(token_ids, [*expected, *raw[:2].argmax(axis=1)])
    assert (token_ids[:-2] != raw[: len(sequences)].argmax(axis=1)).any()
    np.testing.assert_array_equal(logprobs[:, 2], 0.0)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_without_controls_has_the_bits_of_a_program_without_them(temperature):
    hidden, head = model()
    fields = {"temperature": temperature, "seeds": seeds(0, 16), "top_p": 0.9}
    plain = draw(hidden, head, **fields)
    controls = make_controls(make_sequence(PROMPT, OUTPUT, **params_of(CONTROLS["everything"])), vocab_size=VOCAB)
    token_ids, logprobs, _ = draw_controlled(hidden, head, controls, slots=np.arange(16) % 2, **fields)
    np.testing.assert_array_equal(token_ids[::2], plain[0][::2])
    np.testing.assert_array_equal(logprobs[::2], plain[1][::2])
    assert (token_ids[1::2] != plain[0][1::2]).any()


def test_a_row_with_controls_has_the_same_bits_in_any_place_and_in_tiles_of_each_size():
    hidden, head = model()
    sequences = [make_sequence(PROMPT, OUTPUT, **params_of(control)) for control in CONTROLS.values()]
    controls = make_controls(*sequences, vocab_size=VOCAB)
    rows = hidden, seeds(1, 16), np.arange(16) % (len(sequences) + 1)

    def draw_rows(tile, shift):
        states, numbers, slots = (np.roll(values, shift, axis=0) for values in rows)
        found = draw_controlled(states, head, controls, slots=slots, tile=tile, seeds=numbers, temperature=0.9)
        return [np.roll(values, -shift, axis=0) for values in found[:2]]

    expected = draw_rows(8, 0)
    for tile in (2, 8):
        for ours, wanted in zip(draw_rows(tile, 3), expected, strict=True):
            np.testing.assert_array_equal(ours, wanted)


def test_bad_words_that_would_leave_no_token_are_not_masked():
    hidden, head = model()
    params = {"allowed_token_ids": (5, 6), "bad_words": ((2, 5), (2, 6))}
    controls = make_controls(make_sequence(PROMPT, OUTPUT, **params), vocab_size=VOCAB)
    token_ids, logprobs, _ = draw_controlled(hidden, head, controls, temperature=1.0, seeds=seeds(0, 16))
    assert set(token_ids.tolist()) <= {5, 6}
    assert np.isfinite(logprobs).all()


def shift(state, logits, token, position):
    """Forbids tokens below its state, and counts it up."""
    return state + token + position, jnp.where(jnp.arange(logits.shape[0]) < state, -jnp.inf, logits)


def double(state, logits, token, position):
    return {"logits": state["logits"] + logits, "last": position}, 2.0 * logits


@pytest.mark.parametrize("tile", [None, 8])
def test_each_row_runs_its_own_processor_on_its_own_state(tile):
    hidden, head = model()
    logits = logits_of(hidden, head)
    states = (
        jnp.asarray([0, 10, 20], jnp.int32),
        {"logits": jnp.ones((3, VOCAB), jnp.float32), "last": jnp.asarray([-7, -8, -9], jnp.int32)},
    )
    sequences = [make_sequence(PROMPT, OUTPUT, presence_penalty=0.5)] * 2
    controls = make_controls(*sequences, vocab_size=VOCAB, processors=(shift, double), states=states)
    slots = np.asarray([0, 1, 2, 2] * 4)
    ids = np.asarray([0, 1, 2, 1] * 4)
    token_ids, _, new = draw_controlled(
        hidden,
        head,
        controls,
        slots=slots,
        processor_ids=ids,
        tile=tile,
        token_ids=np.arange(16),
        sample_positions=np.arange(100, 116),
    )
    for row in range(16):
        processed = logits[row].astype(np.float64)
        if ids[row] == 1:
            processed[: 10 * slots[row]] = -np.inf
        processed = 2.0 * processed if ids[row] == 2 else processed
        penalty = 0.5 if slots[row] else 0.0
        expected = as_row(controlled_logits(processed, prompt=PROMPT, output=OUTPUT, presence_penalty=penalty), VOCAB)
        assert token_ids[row] == expected.argmax(), row
        assert new[0][row] == 10 * slots[row] + (row + 100 + row if ids[row] == 1 else 0)
        assert new[1]["last"][row] == (100 + row if ids[row] == 2 else -7 - slots[row])
    np.testing.assert_allclose(new[1]["logits"][ids == 2], 1.0 + logits[ids == 2], rtol=1e-6)
    np.testing.assert_array_equal(new[1]["logits"][ids != 2], 1.0)


def rule_out(state, logits, token, position):
    return state, jnp.where(jnp.arange(VOCAB) == 3, logits, state)


def force(state, logits, token, position):
    return state, logits.at[11].set(jnp.inf)


def draw_processed(fill, processor_id, **params):
    """Returns what rows of both temperatures draw after processor 1, whose state is `fill`, or 2, or none."""
    hidden, head = model()
    controls = make_controls(
        make_sequence(PROMPT, OUTPUT, **params),
        vocab_size=VOCAB,
        processors=(rule_out, force),
        states=(jnp.full((2,), fill, jnp.float32), ()),
    )
    fields = {"temperature": [0.0, 1.0] * 8, "seeds": seeds(0, 16), "top_p": 0.9}
    return draw_controlled(hidden, head, controls, processor_ids=processor_id, **fields)[:2]


@pytest.mark.parametrize("fill", [-np.inf, np.nan])
def test_a_processor_that_leaves_nothing_changes_nothing(fill):
    params = {"allowed_token_ids": (7, 8), "presence_penalty": 1.0}
    for ours, expected in zip(draw_processed(fill, 1, **params), draw_processed(fill, 0, **params), strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert np.isfinite(expected).all()
    token_ids, _ = draw_processed(fill, 1, presence_penalty=1.0)
    np.testing.assert_array_equal(token_ids, 3)


def test_a_processor_may_force_a_token_with_an_infinite_logit():
    token_ids, logprobs = draw_processed(0.0, 2, repetition_penalty=0.1, logit_bias={11: 100.0})
    np.testing.assert_array_equal(token_ids, 11)
    np.testing.assert_array_equal(logprobs[:, 2], 0.0)


def call_one_row(state, logits, token, position):
    return state, jax.pure_callback(lambda row: row, jax.ShapeDtypeStruct(logits.shape, logits.dtype), logits)


def test_a_processor_that_can_not_be_traced_for_many_rows_at_once_is_named():
    hidden, head = model()
    controls = make_controls(
        make_sequence(PROMPT, OUTPUT), vocab_size=VOCAB, processors=(force, call_one_row), states=((), ())
    )
    with pytest.raises(ProcessorFailure) as caught:
        draw_controlled(hidden, head, controls, processor_ids=2, tile=None)
    assert caught.value.fn is call_one_row and isinstance(caught.value.__cause__, NotImplementedError)
