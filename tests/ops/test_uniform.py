"""The ops of kernels.invariant on a GPU, interpreted: right, and with the same bits in any company."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.interpreted import interpret_kernels
from helpers.sampling_reference import head_params, sampling_inputs
from helpers.tiny_model import tiny_config

from photon_jax.config import KernelConfig
from photon_jax.models.params import DenseLinear
from photon_jax.ops.linear import head_logits, linear, linear_gated, linear_parts
from photon_jax.ops.sampling import head_sample, head_score
from photon_jax.ops.tiles import RowTiles
from photon_jax.quantization.int8 import quantize_int8

UNIFORM = KernelConfig(invariant=True).resolve("gpu", head_dim=16)
CONFIG = tiny_config(vocab_size=50, hidden_size=16)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    interpret_kernels(monkeypatch)


def layers(has_bias):
    rng = np.random.default_rng(1)
    weight = jnp.asarray(rng.standard_normal((64, 96)) / 10, jnp.float32)
    bias = jnp.asarray(rng.standard_normal(64), jnp.float32) if has_bias else None
    int8 = dataclasses.replace(quantize_int8(weight, group_size=32), bias=bias)
    return {
        "dense": DenseLinear(weight=weight.T, bias=bias),
        "dense, outputs first": DenseLinear(weight=weight, bias=bias, has_outputs_first=True),
        "int8": int8,
        "int8 activations": dataclasses.replace(int8, int8_activations=True),
    }


@pytest.mark.parametrize(
    ("form", "has_bias"),
    [("dense", False), ("dense, outputs first", False), ("int8", False), ("int8", True), ("int8 activations", False)],
)
def test_linear_layers_of_every_form_agree_with_the_reference(form, has_bias):
    layer, x = layers(has_bias)[form], jax.random.normal(jax.random.key(0), (5, 96))
    for op, options in ((linear, {}), (linear_parts, {}), (linear_gated, {"dtype": jnp.dtype("float32")})):
        found, expected = (op(x, layer, backend=backend, **options) for backend in ("uniform", "reference"))
        assert found.shape == expected.shape and found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_logits_of_a_dense_and_an_int8_head_agree_with_the_reference():
    x, head = jax.random.normal(jax.random.key(0), (5, 64)), jax.random.normal(jax.random.key(1), (100, 64))
    for table in (head, quantize_int8(head, group_size=64)):
        found, expected = (head_logits(x, table, backend=backend) for backend in ("uniform", "reference"))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def model():
    """Returns hidden states f32[16 D] and an output projection f32[V D] whose logits spread by about 2."""
    rng = np.random.default_rng(0)
    shapes = (16, CONFIG.hidden_size), (CONFIG.vocab_size, CONFIG.hidden_size)
    hidden, head = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return hidden, head / 2.0


def sample(hidden, head, *, is_greedy=False, has_top=False, **fields):
    """Returns tokens and log-probabilities, and those of the likeliest tokens."""
    inputs, params = sampling_inputs(len(hidden), **fields), head_params(head)
    options = {"config": CONFIG, "kernels": UNIFORM, "tiles": None, "is_greedy": is_greedy, "has_top": has_top}
    found = jax.jit(lambda *arrays: head_sample(*arrays, **options))(jnp.asarray(hidden), inputs, params)
    return [np.asarray(each) for each in found[:4]]


def test_a_row_samples_the_same_bits_alone_in_company_and_in_a_program_of_greedy_rows():
    hidden, head = model()
    is_random = np.arange(16) % 2
    fields = {"temperature": is_random * 0.9, "top_p": 1.0 - 0.2 * is_random, "top_k": is_random * 20}
    fields["seeds"] = np.stack([np.arange(16), np.zeros(16)], axis=1)
    together = sample(hidden, head, **fields)
    cold = sample(hidden[::2], head, is_greedy=True)
    warm = sample(hidden[[3]], head, **{name: value[[3]] for name, value in fields.items()})
    for found, rows in ((cold, slice(None, None, 2)), (warm, [3])):
        for ours, theirs in zip(found, together, strict=True):
            np.testing.assert_array_equal(ours, theirs[rows])
    *likeliest, top_ids, top_values = sample(hidden[::2], head, has_top=True)
    for ours, theirs in zip((*likeliest, top_ids[:, :1], top_values[:, :1]), cold, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_score_is_the_log_probability_of_the_same_token_sampled():
    hidden, head = model()
    token_ids, logprobs, *_ = sample(hidden, head, is_greedy=True)
    scores, is_likeliest = head_score(
        jnp.asarray(hidden),
        jnp.asarray(token_ids),
        head_params(head),
        config=CONFIG,
        kernels=UNIFORM,
        tiles=RowTiles(4, jnp.int32(16)),
    )
    np.testing.assert_array_equal(scores, logprobs[:, 0])
    assert np.all(is_likeliest)
