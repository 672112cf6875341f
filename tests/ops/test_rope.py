"""Rotary embeddings against transformers' frequencies, cosines and sines, and against float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.golden_rope import CASES, GOLDEN_PATH, POSITIONS

from photon_jax.models.hf_config import config_from_hf
from photon_jax.ops import rope as rope_ops


def read(name):
    """Returns the model config of a case and the golden arrays."""
    config = config_from_hf({"architectures": ["LlamaForCausalLM"], **CASES[name].config})
    with np.load(GOLDEN_PATH) as arrays:
        return config, {key.split(".")[1]: arrays[key] for key in arrays.files if key.startswith(f"{name}.")}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_attention_factor_are_within_two_ulp_of_transformers(name):
    config, golden = read(name)
    frequencies, factor = rope_ops.inverse_frequencies(config.rope, config.head_dim, CASES[name].seq_len)
    assert frequencies.dtype == np.float32
    np.testing.assert_array_max_ulp(frequencies, golden["frequencies"], maxulp=2)
    np.testing.assert_array_max_ulp(np.float32(factor), golden["attention_factor"].astype(np.float32), maxulp=2)


@pytest.mark.parametrize("name", CASES)
def test_cos_and_sin_equal_transformers_given_its_frequencies(name, monkeypatch):
    config, golden = read(name)
    given = (golden["frequencies"], float(golden["attention_factor"]))
    monkeypatch.setattr(rope_ops, "inverse_frequencies", lambda *_: given)
    positions = jnp.asarray(POSITIONS, jnp.int32)
    cos, sin = rope_ops.rope_tables(positions, config=config, seq_len=CASES[name].seq_len, tiles=None)
    np.testing.assert_allclose(np.asarray(cos), golden["cos"], rtol=0.0, atol=1e-6)
    np.testing.assert_allclose(np.asarray(sin), golden["sin"], rtol=0.0, atol=1e-6)


def test_every_kind_moves_the_frequencies():
    """The golden cases differ from plain rotary embedding wherever they should, so that they can tell kinds apart."""
    for name in CASES:
        config, golden = read(name)
        plain = dataclasses.replace(config.rope, kind="default")
        frequencies, _ = rope_ops.inverse_frequencies(plain, config.head_dim, CASES[name].seq_len)
        distance = np.abs(frequencies / golden["frequencies"] - 1.0).max()
        is_plain = config.rope.kind == "default" or name == "dynamic_within"
        assert (distance < 1e-6) if is_plain else (distance > 0.1), name


@pytest.mark.parametrize("position", [4095, 4096, 8191, 100000])
def test_bf16_models_keep_phases_in_float32(position):
    config, _ = read("llama3")
    config = dataclasses.replace(config, dtype="bfloat16")
    frequencies, _ = rope_ops.inverse_frequencies(config.rope, config.head_dim, 4096)
    cos, sin = rope_ops.rope_tables(jnp.asarray([position], jnp.int32), config=config, seq_len=4096, tiles=None)
    x = jnp.ones((1, 1, config.head_dim), jnp.bfloat16)
    rotated = np.asarray(rope_ops.apply_rope(x, cos, sin).astype(jnp.float32))[0, 0]
    # the phase itself is a float32 product: its rounding is part of the definition, everything after is checked
    phase = (np.float32(position) * frequencies).astype(np.float64)
    expected = np.concatenate([np.cos(phase) - np.sin(phase), np.cos(phase) + np.sin(phase)])
    np.testing.assert_allclose(rotated, expected, rtol=2**-8, atol=1e-5)
