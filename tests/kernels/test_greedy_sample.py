"""The likeliest token and its log-probability in one pass over the logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels.greedy_sample import greedy_sample, greedy_sample_reference
from pallas_kernels.greedy_sample.triton import PART


def make_inputs(num_rows, num_tokens, num_banned=3):
    """Returns logits, the ids of each row's likeliest tokens, and how many of them are banned: all in the first row."""
    rng = np.random.default_rng(num_tokens)
    logits = rng.normal(0, 4, (num_rows, num_tokens)).astype(np.float32)
    likeliest = np.argsort(-logits, axis=1)[:, :num_banned].astype(np.int32)
    counts = np.arange(num_rows, dtype=np.int32)[::-1] % (num_banned + 1)
    return jnp.asarray(logits), jnp.asarray(likeliest), jnp.asarray(counts)


def check(logits, banned_ids, num_banned, *, interpret):
    token_ids, logprobs, top_ids, top_logprobs = greedy_sample(logits, banned_ids, num_banned, interpret=interpret)
    expected_ids, _, expected_tops, _ = greedy_sample_reference(logits, banned_ids, num_banned)
    np.testing.assert_array_equal(token_ids, expected_ids)
    np.testing.assert_array_equal(top_ids, expected_tops)
    is_top = token_ids == top_ids
    assert not num_banned[-1] and is_top[-1]
    np.testing.assert_array_equal(logprobs[is_top], top_logprobs[is_top])
    exact = np.asarray(logits, np.float64)
    exact = exact - exact.max(axis=1, keepdims=True)
    exact = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    # sums of V terms add pairwise: log2 V roundings; then those of exp, log and two differences
    bound = 2.0**-24 * (np.log2(logits.shape[1]) + 8 + 4 * np.abs(logits).max())
    for ids, values in ((token_ids, logprobs), (top_ids, top_logprobs)):
        np.testing.assert_allclose(values, exact[np.arange(len(exact)), ids], rtol=0, atol=bound)
    return token_ids, logprobs


@pytest.mark.parametrize("num_tokens", [7, PART, 2 * PART + 5])
def test_kernel_gives_the_likeliest_token_and_the_likeliest_that_is_not_banned_with_their_log_probabilities(num_tokens):
    check(*make_inputs(5, num_tokens), interpret=True)


def test_of_equal_logits_the_lowest_id_wins_in_a_part_and_among_parts():
    logits = np.zeros((2, 3 * PART), np.float32)
    logits[0, [PART + 7, PART + 9, 2 * PART]] = 1.0
    token_ids, _, top_ids, _ = greedy_sample(
        logits, np.zeros((2, 1), np.int32), np.array([0, 1], np.int32), interpret=True
    )
    assert token_ids.tolist() == [PART + 7, 1] and top_ids.tolist() == [PART + 7, 0]


def test_a_row_has_the_same_bits_alone_and_in_company():
    inputs = make_inputs(5, 2 * PART + 5)
    together = greedy_sample(*inputs, interpret=True)
    alone = greedy_sample(*(each[3:4] for each in inputs), interpret=True)
    for found, expected in zip(alone, together, strict=True):
        np.testing.assert_array_equal(found, expected[3:4])


def test_what_is_not_a_number_shows_in_the_log_probability_and_the_id_is_one_of_the_vocabulary():
    logits = np.full((2, 9), np.nan, np.float32)
    logits[1] = np.arange(9)
    logits[1, 4] = np.nan
    for num_banned in (0, 1):
        banned = np.zeros((2, 1), np.int32), np.full(2, num_banned, np.int32)
        ids, logprobs, top_ids, top_logprobs = greedy_sample(logits, *banned, interpret=True)
        assert np.isnan(logprobs).all() and np.isnan(top_logprobs).all()
        assert np.min([ids, top_ids]) >= 0 and np.max([ids, top_ids]) < 9


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 64, 1024])
def test_gpu_kernel_gives_the_likeliest_token_at_real_sizes(num_rows):
    inputs = make_inputs(num_rows, 128_256)
    _, logprobs = check(*inputs, interpret=False)
    _, alone, *_ = greedy_sample(*(each[num_rows // 2 : num_rows // 2 + 1] for each in inputs))
    np.testing.assert_array_equal(alone, logprobs[num_rows // 2 : num_rows // 2 + 1])


@pytest.mark.lowers
@pytest.mark.parametrize(("device", "vocab_size"), [("NVIDIA H200", 128_256), ("NVIDIA A100", 49_152)])
def test_it_lowers_for_cuda(device, vocab_size):
    arguments = (
        jax.ShapeDtypeStruct((64, vocab_size), jnp.float32),
        jax.ShapeDtypeStruct((64, 16), jnp.int32),
        jax.ShapeDtypeStruct((64,), jnp.int32),
    )
    text = lower_for_cuda(greedy_sample, *arguments, device=device)
    assert text.count("xla.gpu.triton") == 2


def test_wrong_shapes_are_named():
    logits, banned_ids, num_banned = make_inputs(2, 9)
    with pytest.raises(ValueError, match=r"expected logits \[M V\], banned_ids \[M S\] and num_banned \[M\], got"):
        greedy_sample(logits, banned_ids[:1], num_banned)
