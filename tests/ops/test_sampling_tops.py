"""The most likely tokens beside a sampled one: of the distribution that its row names, and nothing else changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sampling_reference import EPS, draw, head_params, log_softmax, logits_of, sampling_distribution
from helpers.tiny_model import tiny_config

from photon_jax.config import KernelConfig
from photon_jax.ops.sampling import head_score
from photon_jax.ops.tiles import RowTiles
from photon_jax.step_io import TOP_KINDS, TOP_WIDTH

WIDTH, VOCAB, ROWS = 16, 50, 16
RAW, TEMPERED, SAMPLING = range(len(TOP_KINDS))


def model(vocab_size=VOCAB):
    rng = np.random.default_rng(vocab_size)
    hidden = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    return hidden, rng.standard_normal((vocab_size, WIDTH)).astype(np.float32)


def in_order(logprobs):
    """Returns ids and values of the most likely tokens, ties by the lowest id."""
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :TOP_WIDTH]
    return ids, np.take_along_axis(logprobs, ids, axis=1)


def test_each_row_gets_the_distribution_that_it_names():
    hidden, head = model()
    kinds = np.arange(ROWS) % 3
    fields = {"temperature": 0.6, "top_k": 7, "min_p": 0.01, "masks_stops": 1, "num_stop_ids": 2, "stop_ids": 3}
    _, _, ids, values = draw(hidden, head, has_top=True, top_kinds=kinds, **fields)
    logits = logits_of(hidden, head)
    for row, kind in enumerate(kinds):
        expected = log_softmax(logits[row] / 0.6 if kind == TEMPERED else logits[row])[None]
        if kind == SAMPLING:
            kept = sampling_distribution(logits[row], temperature=0.6, top_k=7, min_p=0.01, banned=[3])
            expected = np.log([[kept.get(token, 0.0) or 1e-300 for token in range(VOCAB)]])
            assert np.isneginf(values[row, len(kept) :]).all() and len(kept) <= 7
        count = len(kept) if kind == SAMPLING else TOP_WIDTH
        want_ids, want = in_order(expected)
        np.testing.assert_array_equal(ids[row, :count], want_ids[0, :count])
        np.testing.assert_allclose(values[row, :count], want[0, :count], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("mates", "is_greedy"), [(0.0, True), (0.0, False), (1.3, False)])
def test_greedy_rows_are_certain_where_sampling_is_named_and_raw_else(mates, is_greedy):
    hidden, head = model()
    kinds = np.arange(ROWS) % 3
    temperature = np.where(np.arange(ROWS) < 8, 0.0, mates)
    token_ids, _, ids, values = draw(
        hidden, head, has_top=True, top_kinds=kinds, temperature=temperature, is_greedy=is_greedy
    )
    want_ids, want = in_order(log_softmax(logits_of(hidden, head)))
    for row in range(8):
        if kinds[row] == SAMPLING:
            others = [token for token in range(TOP_WIDTH) if token != token_ids[row]][: TOP_WIDTH - 1]
            assert ids[row].tolist() == [token_ids[row], *others]
            assert values[row].tolist() == [0.0] + [-np.inf] * (TOP_WIDTH - 1)
        else:
            np.testing.assert_array_equal(ids[row], want_ids[row])
            np.testing.assert_allclose(values[row], want[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [50, 1003])
@pytest.mark.parametrize("tile", [8, None])
def test_asking_for_the_most_likely_tokens_changes_no_bit_of_the_sample(vocab_size, tile):
    hidden, head = model(vocab_size)
    fields = {
        "temperature": np.where(np.arange(ROWS) % 4 == 0, 0.0, 0.9),
        "top_p": 0.9,
        "sample_positions": np.arange(ROWS),
    }
    plain = draw(hidden, head, tile=tile, **fields)
    for kind in range(len(TOP_KINDS)):
        token_ids, logprobs, ids, values = draw(hidden, head, tile=tile, has_top=True, top_kinds=kind, **fields)
        np.testing.assert_array_equal(token_ids, plain[0])
        np.testing.assert_array_equal(logprobs, plain[1])
        found = ids == token_ids[:, None]
        assert (found.sum(axis=1) <= 1).all() and found.any(axis=1).sum() >= 8
        for row in np.flatnonzero(found.any(axis=1)):
            assert values[row][found[row]][0] == logprobs[row, kind], (kind, row)


@pytest.mark.parametrize("vocab_size", [50, 1003])
@pytest.mark.parametrize("tile", [8, None])
@pytest.mark.parametrize("temperature", ["cold", "warm", "both"])
def test_the_likeliest_token_alone_has_the_bits_that_it_has_among_twenty(vocab_size, tile, temperature):
    hidden, head = model(vocab_size)
    head = np.resize(head[: vocab_size // 2], head.shape)  # every token has a twin: the lower id is the likelier
    best = np.argsort(-logits_of(hidden, head), axis=1, kind="stable")[:, :2].astype(np.int32)
    share = {"cold": 1, "warm": ROWS + 1, "both": 2}[temperature]
    fields = {
        "temperature": np.where(np.arange(1, ROWS + 1) % share == 0, 0.0, 0.9),
        "top_p": 0.9,
        "sample_positions": np.arange(ROWS),
        "stop_ids": np.pad(best, ((0, 0), (0, 30))),
        "num_stop_ids": np.arange(ROWS) // 3 % 3,  # of these tokens that may not be sampled
        "masks_stops": 1,
        "top_kinds": np.arange(ROWS) % 3,
    }
    alone = draw(hidden, head, tile=tile, has_top=False, **fields)
    twenty = draw(hidden, head, tile=tile, has_top=True, **fields)
    for found, expected in zip(alone[:2], twenty[:2], strict=True):
        np.testing.assert_array_equal(found, expected)
    for found, expected in zip(alone[2:], twenty[2:], strict=True):
        assert found.shape == (ROWS, 1)
        assert found.tobytes() == np.ascontiguousarray(expected[:, :1]).tobytes()
    assert (alone[2][:, 0] == alone[0]).any() and (alone[2][:, 0] != alone[0]).any()


def test_scores_and_samples_give_the_same_bits_of_the_same_distribution():
    hidden, head = model(258)
    token_ids, logprobs, ids, values = draw(hidden, head, has_top=True, temperature=1.0)
    config = tiny_config(rms_norm_eps=EPS, vocab_size=len(head), hidden_size=WIDTH)

    @jax.jit
    def score(hidden, targets, params):
        tiles = RowTiles(8, jnp.int32(ROWS))
        return head_score(
            hidden, targets, params, config=config, kernels=KernelConfig(linear="reference"), tiles=tiles, has_top=True
        )

    results = score(jnp.asarray(hidden), jnp.asarray(token_ids), head_params(head))
    for kind in range(3):  # at temperature 1, with no filter, the three are one
        np.testing.assert_array_equal(results[0], logprobs[:, kind])
    np.testing.assert_array_equal(results[1], token_ids == ids[:, 0])
    np.testing.assert_array_equal(results[2], ids)
    np.testing.assert_array_equal(results[3], values)
