"""The sampled token and its log-probabilities: their kinds, their noise, and that company changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sampling_reference import (
    EPS,
    chi_square,
    chi_square_bound,
    draw,
    head_params,
    log_softmax,
    logits_of,
    sampling_distribution,
    sampling_inputs,
)
from helpers.tiny_model import tiny_config

from photon_jax.config import KernelConfig
from photon_jax.ops import logprobs as logprobs_module
from photon_jax.ops import norm, sampling
from photon_jax.ops.sampling import head_score
from photon_jax.ops.tiles import RowTiles
from photon_jax.request import MIN_TEMPERATURE

VOCAB, WIDTH, NUM_DRAWS = 50, 16, 8192
MIXES = {
    "plain": {"temperature": 1.0},
    "cool": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "min_tokens": {"temperature": 1.0, "banned": (1, 0)},
    "k_and_p": {"temperature": 1.2, "top_k": 20, "top_p": 0.7},
    "k_and_min_p": {"temperature": 0.8, "top_k": 9, "min_p": 0.05},
    "p_and_min_p": {"temperature": 1.5, "top_p": 0.9, "min_p": 0.08},
    "all": {"temperature": 1.1, "top_k": 25, "top_p": 0.85, "min_p": 0.03},
    "all_banned": {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "banned": (2, 7, 30)},
}


@functools.cache
def model(vocab_size=VOCAB):
    """Returns hidden states f32[16 D] and an output projection f32[V D] whose logits spread by about 2."""
    rng = np.random.default_rng(vocab_size)
    head = rng.standard_normal((vocab_size, WIDTH)).astype(np.float32) / 2.0
    return rng.standard_normal((16, WIDTH)).astype(np.float32), head


def draw_many(mix, **fields):
    """Returns NUM_DRAWS tokens of the first hidden state, their log-probabilities, and its logits."""
    hidden, head = model()
    banned = mix.get("banned", ())
    fields |= {name: value for name, value in mix.items() if name != "banned"}
    fields |= {"stop_ids": [*banned] + [0] * (32 - len(banned)), "num_stop_ids": len(banned), "masks_stops": 1}
    token_ids, logprobs = draw(np.repeat(hidden[:1], NUM_DRAWS, axis=0), head, tile=None, **fields)
    return token_ids, logprobs, logits_of(hidden, head)[0]


def different_seeds(count=NUM_DRAWS, first=0):
    return np.stack([np.arange(first, first + count), np.full(count, 7)], axis=1)


def check_distribution(token_ids, expected):
    counts = np.bincount(token_ids, minlength=VOCAB)
    wanted = np.asarray([expected.get(token, 0.0) * len(token_ids) for token in range(VOCAB)])
    assert counts[wanted == 0.0].sum() == 0
    statistic, degrees = chi_square(counts, wanted)
    assert degrees > 0
    assert statistic < chi_square_bound(degrees), (statistic, degrees)


@pytest.mark.parametrize("name", MIXES)
def test_draws_follow_the_reference_distribution(name):
    token_ids, _, logits = draw_many(MIXES[name], seeds=different_seeds())
    check_distribution(token_ids, sampling_distribution(logits, **MIXES[name]))


@pytest.mark.parametrize("field", ["sample_positions", "sample_indices", "prompt_digests"])
def test_draws_that_differ_in_one_number_alone_follow_the_distribution_too(field):
    token_ids, _, logits = draw_many(MIXES["plain"], seeds=[3, 5], **{field: np.arange(NUM_DRAWS)})
    check_distribution(token_ids, sampling_distribution(logits, temperature=1.0))


def test_a_wrong_distribution_is_noticed():
    token_ids, _, logits = draw_many(MIXES["cool"], seeds=different_seeds())
    with pytest.raises(AssertionError):
        check_distribution(token_ids, sampling_distribution(logits, temperature=0.65))


@pytest.mark.parametrize("name", ["plain", "cool", "top_k", "all", "all_banned"])
def test_the_three_kinds_of_log_probability(name):
    mix = MIXES[name]
    token_ids, logprobs, logits = draw_many(mix, seeds=different_seeds())
    expected = sampling_distribution(logits, **mix)
    heated = log_softmax(logits.astype(np.float64) / mix["temperature"])
    sampling = np.log([expected[token] for token in token_ids.tolist()])
    wanted = np.stack([log_softmax(logits)[token_ids], heated[token_ids], sampling], axis=1)
    np.testing.assert_allclose(logprobs, wanted, rtol=1e-5, atol=1e-5)
    if "top_k" in mix:  # few enough tokens are kept for each of them to be drawn
        seen = dict(zip(token_ids.tolist(), logprobs[:, 2].tolist(), strict=True))
        assert set(seen) == set(expected)
        assert abs(sum(np.exp(list(seen.values()))) - 1.0) < 1e-5


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, 1e-37, 1e-30])
def test_the_least_temperatures_draw_the_best_tokens_alone_and_evenly(temperature):
    hidden, head = model()
    head = head.copy()
    head[3] = head[logits_of(hidden, head)[0].argmax()]
    logits = logits_of(hidden, head)[0]
    seeds = different_seeds(512)
    draws, logprobs = draw(np.repeat(hidden[:1], 512, axis=0), head, temperature=temperature, seeds=seeds)
    expected = sampling_distribution(logits, temperature=temperature)
    assert set(draws.tolist()) == {token for token, probability in expected.items() if probability > 0.0}
    wanted = log_softmax(logits.astype(np.float64) / temperature)[draws]
    np.testing.assert_allclose(logprobs[:, 1:], np.stack([wanted, wanted], axis=1), rtol=1e-6, atol=1e-6)


def test_greedy_rows_have_the_raw_log_probability_twice_and_no_doubt():
    hidden, head = model()
    logits = logits_of(hidden, head)
    token_ids, logprobs = draw(hidden, head, temperature=0.0, top_k=3, top_p=0.2, min_p=0.9)
    np.testing.assert_array_equal(token_ids, logits.argmax(axis=1))
    np.testing.assert_allclose(logprobs[:, 0], log_softmax(logits).max(axis=1), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(logprobs[:, 1], logprobs[:, 0])
    np.testing.assert_array_equal(logprobs[:, 2], 0.0)


@pytest.mark.parametrize("temperature", [[0.0] * 16, [0.0] * 7 + [1.0] * 9])
def test_the_lowest_id_wins_a_greedy_tie(temperature):
    head = np.zeros((VOCAB, WIDTH), np.float32)
    head[[9, 31, 44], 0] = 2.0
    for hidden, best in ((np.ones, 9), (np.zeros, 0)):
        token_ids, _ = draw(hidden((16, WIDTH), np.float32), head, temperature=temperature)
        np.testing.assert_array_equal(token_ids[:7], best)


@pytest.mark.parametrize("vocab_size", [50, 1003])
def test_rows_are_the_same_bits_whatever_their_mates_sample(vocab_size):
    """Row 3 is greedy, row 5 samples with no filter; their mates go through every branch."""
    hidden, head = model(vocab_size)
    own = np.arange(16) == 5
    fields = {"seeds": different_seeds(16), "sample_positions": np.arange(16)}
    greedy = draw(hidden, head, temperature=0.0, **fields)
    alone = draw(hidden, head, temperature=np.where(own, 0.8, 0.0), **fields)
    mates = (
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 0.5, "top_p": 0.7},
        {"temperature": 2.0, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "masks_stops": 1, "num_stop_ids": 3},
    )
    neutral = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "masks_stops": 0, "num_stop_ids": 0}
    for mate in mates:
        mixed = {name: np.where(own, neutral[name], value) for name, value in mate.items()}
        mixed["temperature"][3] = 0.0
        for name in mate.keys() - {"temperature"}:
            mixed[name][3] = neutral[name]
        for expected, ours in zip(greedy, draw(hidden, head, **mixed, **fields), strict=True):
            np.testing.assert_array_equal(ours[3], expected[3], err_msg=f"{mate}")
        for expected, ours in zip(alone, draw(hidden, head, **mixed, **fields), strict=True):
            np.testing.assert_array_equal(ours[5], expected[5], err_msg=f"{mate}")


def test_a_seeded_row_is_the_same_in_any_place():
    hidden, head = model()
    own = {"seeds": [11, 13], "prompt_digests": 17, "sample_indices": 2, "sample_positions": 40, "temperature": 0.9}
    seen = set()
    for place in range(16):
        states, fields = np.roll(hidden, place, axis=0), {}
        for name, value in own.items():
            mates = np.random.default_rng(place).integers(1, 100, (16, 2) if name == "seeds" else 16).astype(float)
            mates[place] = value
            fields[name] = mates
        token_ids, logprobs = draw(states, head, top_p=np.where(np.arange(16) == place, 0.9, 0.5), **fields)
        seen.add((int(token_ids[place]), logprobs[place].tobytes()))
    assert len(seen) == 1


def noise_of(**fields):
    """Returns the tokens of 64 rows whose logits are all equal: where the noise alone is greatest."""
    defaults = {"seeds": [1, 2], "prompt_digests": 3, "sample_indices": 4, "sample_positions": 5}
    token_ids, _ = draw(np.zeros((64, WIDTH), np.float32), model()[1], temperature=1.0, **(defaults | fields))
    return token_ids


def test_noise_is_keyed_by_seed_prompt_sample_and_position():
    assert len(set(noise_of().tolist())) == 1
    numbers = np.arange(100, 164)
    other = np.full(64, 9)
    varied = {
        "low seed": noise_of(seeds=np.stack([numbers, other], axis=1)),
        "high seed": noise_of(seeds=np.stack([other, numbers], axis=1)),
        "prompt": noise_of(prompt_digests=numbers),
        "sample": noise_of(sample_indices=numbers),
        "position": noise_of(sample_positions=numbers),
        "position of another sample": noise_of(sample_positions=numbers, sample_indices=5),
        "position after another prompt": noise_of(sample_positions=numbers, prompt_digests=4),
    }
    for name, token_ids in varied.items():
        assert len(set(token_ids.tolist())) > 20, name
    names = list(varied)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            # 64 independent draws of 50 agree in 1.3 places on average
            assert (varied[first] == varied[second]).sum() < 10, (first, second)


def test_seeds_and_digests_use_all_their_bits():
    high = np.asarray([[1 << 31, 0], [0, 1 << 31], [0, 0], [(1 << 32) - 1, (1 << 32) - 1]] * 16, np.uint32)
    assert len({tuple(noise_of(seeds=high, sample_positions=np.arange(64) // 4)[i::4]) for i in range(4)}) == 4
    digests = np.asarray([1 << 31, 0] * 32, np.uint32)
    tokens = noise_of(prompt_digests=digests, sample_positions=np.arange(64) // 2)
    assert not np.array_equal(tokens[::2], tokens[1::2])


def test_rows_past_the_ones_in_use_are_not_computed():
    hidden, head = model()
    token_ids, logprobs = draw(hidden, head, num_rows=8)
    assert (logprobs[:8, 0] < 0.0).all()
    assert not token_ids[8:].any()
    assert not logprobs[8:].any()


@pytest.mark.parametrize("is_tiled", [False, True])
def test_score_is_the_log_softmax_at_the_target(is_tiled):
    hidden, head = model(258)
    head = np.concatenate([head, head])  # every token has a twin: the lower id is the argmax
    logits = logits_of(hidden, head)
    targets = np.random.default_rng(0).integers(0, len(head), 16)
    targets[:4] = logits.argmax(axis=1)[:4]
    targets[4:8] = logits.argmax(axis=1)[4:8] + 258
    config = tiny_config(rms_norm_eps=EPS, vocab_size=len(head), hidden_size=WIDTH)

    @jax.jit
    def score(hidden, targets, params):
        tiles = RowTiles(8, jnp.int32(16)) if is_tiled else None
        return head_score(hidden, targets, params, config=config, kernels=KernelConfig(linear="reference"), tiles=tiles)

    logprobs, is_greedy = score(jnp.asarray(hidden), jnp.asarray(targets, jnp.int32), head_params(head))
    np.testing.assert_allclose(logprobs, log_softmax(logits)[np.arange(16), targets], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(is_greedy, targets == logits.argmax(axis=1))
    assert is_greedy[:4].all()
    assert not is_greedy[4:8].any()


def test_a_program_for_greedy_rows_gives_what_the_general_one_gives():
    rng = np.random.default_rng(11)
    hidden = rng.standard_normal((8, 16)).astype(np.float32)
    head = rng.standard_normal((50, 16)).astype(np.float32)
    fields = {"temperature": 0.0, "masks_stops": 1, "num_stop_ids": 1, "stop_ids": 7}
    general, greedy = draw(hidden, head, **fields), draw(hidden, head, is_greedy=True, **fields)
    assert np.array_equal(general[0], greedy[0])
    np.testing.assert_allclose(general[1], greedy[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("has_top", [False, True])
def test_the_kernels_of_greedy_rows_take_the_same_tokens_with_the_same_log_probabilities(monkeypatch, has_top):
    kernels = ((sampling, "greedy_sample"), (norm, "rms_norm_kernel"))
    kernels += ((logprobs_module, "greedy_sample"), (logprobs_module, "top_k"))
    for module, name in kernels:
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=True))
    hidden, head = model()
    likeliest = np.argsort(-logits_of(hidden, head), axis=1)[:, :1]
    fields = {"stop_ids": np.repeat(likeliest, 32, axis=1), "num_stop_ids": 1, "masks_stops": np.arange(16) % 2}
    fields["top_kinds"] = np.arange(16) // 2 % 3
    token_ids, logprobs, top_ids, top_values, _ = sampling.head_sample(
        jnp.asarray(hidden),
        sampling_inputs(16, **fields),
        head_params(head),
        config=tiny_config(rms_norm_eps=EPS, vocab_size=VOCAB, hidden_size=WIDTH),
        kernels=KernelConfig(linear="triton", attention="reference"),
        tiles=None,
        is_greedy=True,
        has_top=has_top,
    )
    expected_ids, expected, *tops = draw(hidden, head, is_greedy=True, has_top=has_top, **fields)
    np.testing.assert_array_equal(token_ids, expected_ids)
    np.testing.assert_array_equal(top_ids, tops[0])
    np.testing.assert_allclose(top_values, tops[1], rtol=0, atol=1e-5)
    is_taken = np.asarray(top_ids) == np.asarray(token_ids)[:, None]
    assert is_taken.sum() >= 10
    for row, column in np.argwhere(is_taken):
        assert top_values[row, column] == logprobs[row, 2 if fields["top_kinds"][row] == 2 else 0]
    assert not np.any((expected_ids == likeliest[:, 0]) != (np.arange(16) % 2 == 0)), "every other row's is banned"
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-5)
