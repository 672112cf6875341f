"""Log-probabilities of tokens, and the most likely ones: values, order, ties, bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sampling_reference import log_softmax

from photon_jax.ops.logprobs import likeliest, logprob_at, top_logprobs
from photon_jax.request import MAX_LOGPROBS, LogprobsKind
from photon_jax.step_io import TOP_KINDS, TOP_WIDTH

top_logprobs = jax.jit(top_logprobs)
logprob_at = jax.jit(logprob_at)
likeliest = jax.jit(likeliest)


def random_logits(vocab_size, rows=8):
    return (3.0 * np.random.default_rng(vocab_size).standard_normal((rows, vocab_size))).astype(np.float32)


@pytest.mark.parametrize("vocab_size", [20, 21, 258, 5003])
def test_the_most_likely_tokens_come_in_order_with_the_log_softmax(vocab_size):
    logits = random_logits(vocab_size)
    ids, values = top_logprobs(jnp.asarray(logits))
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_WIDTH]
    np.testing.assert_array_equal(ids, expected)
    want = np.take_along_axis(log_softmax(logits), expected, axis=1)
    np.testing.assert_allclose(values, want, rtol=1e-5, atol=1e-5)


def test_the_lowest_of_equal_tokens_comes_first_and_impossible_ones_last():
    logits = np.full((2, 40), -np.inf, np.float32)
    logits[0, [31, 7, 19]] = 1.0
    logits[0, 25] = 2.0
    logits[1] = 0.5
    ids, values = top_logprobs(jnp.asarray(logits))
    assert ids[0, :4].tolist() == [25, 7, 19, 31]
    assert ids[0, 4:].tolist() == [i for i in range(40) if i not in (7, 19, 25, 31)][: TOP_WIDTH - 4]
    assert np.isfinite(values[0, :4]).all() and np.isneginf(values[0, 4:]).all()
    assert ids[1].tolist() == list(range(TOP_WIDTH))


@pytest.mark.parametrize("vocab_size", [1, 16, 17, 258, 5003])
def test_the_likeliest_token_is_the_argmax_and_of_equal_ones_the_lowest(vocab_size):
    logits = random_logits(vocab_size)
    logits[1] = -np.inf
    logits[2, -1] = np.inf
    logits[3:] = np.round(logits[3:])  # many are equal
    found = likeliest(jnp.asarray(logits))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, logits.argmax(axis=1))


def test_each_value_has_the_bits_of_the_token_alone():
    logits = jnp.asarray(random_logits(258))
    ids, values = top_logprobs(logits)
    for place in range(TOP_WIDTH):
        np.testing.assert_array_equal(logprob_at(logits, ids[:, place]), values[:, place])


def test_a_vocabulary_smaller_than_the_width_is_filled_up():
    logits = random_logits(6)
    ids, values = top_logprobs(jnp.asarray(logits))
    assert ids.shape == values.shape == (8, TOP_WIDTH)
    np.testing.assert_array_equal(ids[:, :6], np.argsort(-logits, axis=1))
    np.testing.assert_array_equal(ids[:, 6:], 0)
    assert np.isneginf(values[:, 6:]).all()
    np.testing.assert_allclose(np.exp(values[:, :6]).sum(axis=1), 1.0, rtol=1e-6)


def test_what_a_request_may_ask_for_is_what_a_step_gives():
    assert MAX_LOGPROBS == TOP_WIDTH
    assert LogprobsKind.__args__ == TOP_KINDS
