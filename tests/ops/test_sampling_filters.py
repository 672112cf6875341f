"""Which tokens the filters keep, against dictionaries and sorting in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sampling_reference import draw, log_softmax, logits_of, sampling_distribution

from photon_jax.ops.sampling import _filter, _mask_stops

SETTINGS = (
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.3, "top_k": 1_000_000},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.35},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 12, "min_p": 0.2},
    {"temperature": 1.5, "top_p": 0.7, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.05, "top_k": 5, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 9, "banned": (3, 0, 17)},
    {"temperature": 1.0, "top_p": 0.5, "banned": (1,)},
)
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@jax.jit
def kept_logits(logits, rows):
    """The filters themselves: from outside only one of the kept tokens of a row can be seen."""
    return _filter(_mask_stops(logits, rows) / jnp.expand_dims(rows["temperature"], 1), rows)


def keep(logits, settings):
    """Returns the kept set of every row under its own settings."""
    rows = {
        name: jnp.asarray([{**NEUTRAL, **s}[name] for s in settings], "int32" if name == "top_k" else "float32")
        for name in NEUTRAL
    }
    stop_ids = np.zeros((len(settings), 4), np.int32)
    for row, setting in enumerate(settings):
        banned = setting.get("banned", ())
        stop_ids[row, : len(banned)] = banned
    counts = jnp.asarray([len(s.get("banned", ())) for s in settings], jnp.int32)
    rows |= {"stop_ids": jnp.asarray(stop_ids), "num_stop_ids": counts, "masks_stops": jnp.minimum(counts, 1)}
    kept = np.asarray(kept_logits(jnp.asarray(logits, jnp.float32), rows))
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in kept]


@pytest.mark.parametrize("vocab_size", [50, 257, 1003])
@pytest.mark.parametrize("has_ties", [False, True])
def test_kept_sets_are_exactly_those_of_the_reference(vocab_size, has_ties):
    num_met = 0
    for seed in range(8):
        logits = 3.0 * np.random.default_rng(seed).standard_normal((len(SETTINGS), vocab_size)).astype(np.float32)
        if has_ties:
            logits = np.round(2.0 * logits) / 2.0
        for row, (setting, kept) in enumerate(zip(SETTINGS, keep(logits, SETTINGS), strict=True)):
            assert kept == set(sampling_distribution(logits[row], **setting)), (seed, setting)
            num_met += len(kept) > setting.get("top_k", vocab_size)
    assert (num_met > 0) == has_ties  # ties across the k-th place were among them


def test_ties_with_the_last_token_kept_are_kept():
    logits = np.log(np.asarray([[4.0, 2.0, 2.0, 2.0, 1.0, 1.0]])).repeat(4, axis=0)
    settings = ({**NEUTRAL, "top_k": 2}, {**NEUTRAL, "top_p": 0.4}, {**NEUTRAL, "min_p": 0.5}, {**NEUTRAL, "top_k": 5})
    assert keep(logits, settings) == [{0, 1, 2, 3}] * 3 + [{0, 1, 2, 3, 4, 5}]


@pytest.mark.parametrize("setting", [{"top_k": 10}, {"top_p": 0.307}, {"top_k": 30, "top_p": 0.5}])
def test_neighbouring_floats_are_told_apart(setting):
    """All tokens but a few are as likely as each other up to the sixth digit, yet none of them is a tie."""
    logits = np.full((1, 50), -5.0) - np.random.default_rng(0).permutation(50) * 2.0**-20
    logits[0, [3, 30]] = 0.0, -1.0
    setting = {**NEUTRAL, **setting}
    assert keep(logits, [setting]) == [set(sampling_distribution(logits[0], **setting))]


def test_top_p_counts_only_what_top_k_left():
    logits = np.log(np.asarray([[0.4, 0.3, 0.2, 0.1]]))
    # of the two tokens left the first has 4/7, more than 0.55 of them; of all four it has 0.4
    assert keep(logits, [{**NEUTRAL, "top_k": 2, "top_p": 0.55}]) == [{0}]
    assert keep(logits, [{**NEUTRAL, "top_p": 0.55}]) == [{0, 1}]


@pytest.mark.parametrize("temperature", [1e-35, 1e-20, 1e-8, 1e-5, 1e-3, 0.03, 100.0, 1e6])
def test_extreme_temperatures_keep_a_distribution(temperature):
    """Logits divided by a small number are so large that their last bits decide: only differences may be divided."""
    rng = np.random.default_rng(0)
    head = rng.standard_normal((50, 16)).astype(np.float32)
    hidden = 4.0 * rng.standard_normal((16, 16)).astype(np.float32)
    token_ids, logprobs = draw(hidden, head, temperature=temperature, top_p=0.9, seeds=[[i, 0] for i in range(16)])
    logits = logits_of(hidden, head).astype(np.float64)
    tempered = log_softmax(logits / np.float32(temperature))[np.arange(16), token_ids]
    np.testing.assert_allclose(logprobs[:, 1], tempered, rtol=1e-5, atol=1e-5)
    assert np.isfinite(logprobs).all()
    assert (logprobs[:, 1:] <= 1e-6).all()
    if temperature < 1e-3:
        np.testing.assert_array_equal(token_ids, logits.argmax(axis=1))


def falling_head():
    """Returns an output projection whose logits, for a hidden state of ones, fall steeply from id 0 to id 49."""
    head = np.zeros((50, 16), np.float32)
    head[:, 0] = np.linspace(400.0, 0.0, 50)
    return head


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_stop_ids_are_masked_only_where_asked_and_only_as_many_as_count(temperature):
    stop_ids = np.zeros((16, 32), np.int32)
    stop_ids[:, :4] = (0, 1, 3, 2)
    token_ids, logprobs = draw(
        np.ones((16, 16), np.float32),
        falling_head(),
        temperature=temperature,
        seeds=[[i, 0] for i in range(16)],
        stop_ids=stop_ids,
        masks_stops=[0, 1, 1, 1, 1, 1, 0, 0] * 2,
        num_stop_ids=[4, 0, 1, 2, 3, 4, 0, 1] * 2,
    )
    np.testing.assert_array_equal(token_ids, [0, 0, 1, 2, 2, 4, 0, 0] * 2)
    raw = logprobs[:8, 0]
    assert (raw[[0, 1, 6, 7]] == raw[0]).all()
    # the raw kind is the model's own distribution: a masked token keeps its probability in it
    np.testing.assert_allclose(raw[[2, 3, 5]], raw[0] - np.asarray([1, 2, 4]) * 400.0 / 49.0, rtol=1e-4)


def test_stop_ids_beyond_the_vocabulary_mask_nothing():
    fields = {"stop_ids": np.full((16, 32), 50), "masks_stops": 1, "num_stop_ids": 32}
    for sign, best in ((1.0, 0), (-1.0, 49)):
        token_ids, _ = draw(np.full((16, 16), sign, np.float32), falling_head(), **fields)
        np.testing.assert_array_equal(token_ids, best)
