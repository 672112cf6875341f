"""Loading as int8: the same values as rounding the loaded model, and what a GGUF file holds as int8 bit for bit."""

import dataclasses
import logging

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gguf_files import TYPES, architecture, gguf_fields, gguf_tensors, write_gguf
from helpers.golden_models import MODELS, write_hf_folder
from helpers.same_params import assert_same_params

from photon_jax.checkpoint import fill
from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.errors import ConfigError
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.params import DenseLinear, abstract_params
from photon_jax.quantization.int8 import QuantizedLinear, dequantize
from photon_jax.quantization.weights import matrices, quantize_params

BY_NAME = {model.name: model for model in MODELS}
TIED, UNTIED = BY_NAME["llama_tied"], BY_NAME["llama_untied"]


def write(path, model, type_name):
    return write_gguf(path, architecture(model), gguf_fields(model), gguf_tensors(model), type_name)


@pytest.mark.parametrize("has_embedding", [False, True])
@pytest.mark.parametrize("name", ["llama_bias", "llama_untied", "qwen3"])
def test_loading_as_int8_equals_rounding_the_loaded_model(tmp_path, name, has_embedding, monkeypatch):
    monkeypatch.setattr(fill, "CHUNK_ELEMENTS", 5000)  # several chunks a leaf, the last one short
    write_hf_folder(tmp_path, BY_NAME[name])
    quantization = QuantizationConfig(group_size=64, has_embedding=has_embedding)
    dense = load_checkpoint(tmp_path, dtype="float32")
    loaded = load_checkpoint(tmp_path, dtype="float32", quantization=quantization)
    assert_same_params(loaded.params, quantize_params(dense.params, quantization))
    assert loaded.config == dataclasses.replace(dense.config, quantization=quantization)
    leaves, expected = jax.tree.leaves(loaded.params), jax.tree.leaves(abstract_params(loaded.config))
    assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [(leaf.shape, leaf.dtype) for leaf in expected]
    assert isinstance(loaded.params.embedding, QuantizedLinear) == has_embedding


def test_weights_are_rounded_once_from_what_the_file_holds_not_from_the_dtype_of_the_activations(tmp_path):
    write_hf_folder(tmp_path, TIED)
    quantization = QuantizationConfig(group_size=64)
    exact = load_checkpoint(tmp_path, dtype="float32", quantization=quantization).params
    loaded = load_checkpoint(tmp_path, dtype="bfloat16", quantization=quantization).params
    for a, b in zip(exact.layers, loaded.layers, strict=True):
        np.testing.assert_array_equal(np.asarray(a.qkv_proj.q), np.asarray(b.qkv_proj.q))
    assert loaded.final_norm.dtype == jnp.bfloat16


def test_a_tied_int8_table_is_shared_and_counted_once(tmp_path):
    write_hf_folder(tmp_path, TIED)
    loaded = load_checkpoint(
        tmp_path, dtype="float32", quantization=QuantizationConfig(group_size=32, has_embedding=True)
    )
    assert loaded.params.head is loaded.params.embedding
    assert loaded.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
    dense = load_checkpoint(tmp_path, dtype="float32")
    assert loaded.num_bytes < 0.3 * dense.num_bytes


@pytest.mark.parametrize("model", [TIED, UNTIED, BY_NAME["qwen3"]], ids=lambda model: model.name)
def test_q8_0_becomes_groups_of_32_bit_for_bit(tmp_path, model):
    write(tmp_path / "model.gguf", model, "Q8_0")
    quantization = QuantizationConfig(group_size=32, has_embedding=True)
    params = load_checkpoint(tmp_path / "model.gguf", dtype="float32", quantization=quantization).params
    dense = load_checkpoint(tmp_path / "model.gguf", dtype="float32").params  # as the gguf package dequantizes
    for (name, ours), (_, expected) in zip(matrices(params, quantization), matrices(dense, quantization), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(expected), err_msg=name)
    blocks = gguf.quantize(gguf_tensors(model)["token_embd.weight"], TYPES["Q8_0"]).reshape(-1, 34)
    np.testing.assert_array_equal(np.asarray(params.embedding.q).reshape(-1, 32), blocks[:, 2:].view(np.int8))
    np.testing.assert_array_equal(
        np.asarray(params.embedding.scale).reshape(-1), blocks[:, :2].view(np.float16).reshape(-1)
    )


@pytest.mark.parametrize(("type_name", "group_size"), [("Q4_1", 32), ("Q8_0", 64)])
def test_other_stored_kinds_are_dequantized_and_said(tmp_path, caplog, type_name, group_size):
    write(tmp_path / "model.gguf", TIED, type_name)
    quantization = QuantizationConfig(group_size=group_size)
    with caplog.at_level(logging.WARNING):
        params = load_checkpoint(tmp_path / "model.gguf", dtype="float32", quantization=quantization).params
    num_matrices = 7 * len(params.layers)
    assert f"{num_matrices} of {type_name}" in caplog.text
    dense = load_checkpoint(tmp_path / "model.gguf", dtype="float32").params
    assert_same_params(params, quantize_params(dense, quantization))


def test_files_of_floats_are_rounded_without_a_word(tmp_path, caplog):
    write(tmp_path / "model.gguf", TIED, "BF16")
    load_checkpoint(tmp_path / "model.gguf", dtype="float32", quantization=QuantizationConfig(group_size=32))
    assert not caplog.text


def test_a_group_larger_than_a_layer_is_named_before_anything_is_read(tmp_path):
    write_hf_folder(tmp_path, TIED)
    with pytest.raises(ConfigError, match=r"layers\[0\]\.qkv_proj has 64 inputs.*group_size 128"):
        load_checkpoint(
            tmp_path,
            dtype="float32",
            quantization=QuantizationConfig(group_size=128),
            on_tensor=lambda name, *_: pytest.fail(f"{name} was read"),
        )


def test_dequantize_gives_what_the_linear_layers_multiply_with(tmp_path):
    write_hf_folder(tmp_path, TIED)
    quantization = QuantizationConfig(group_size=32)
    params = load_checkpoint(tmp_path, dtype="float32", quantization=quantization).params
    dense = load_checkpoint(tmp_path, dtype="float32").params
    for ours, theirs in zip(params.layers, dense.layers, strict=True):
        assert isinstance(theirs.down_proj, DenseLinear)
        weight = dequantize(ours.down_proj.q, ours.down_proj.scale, group_size=32)
        np.testing.assert_allclose(np.asarray(weight), np.asarray(theirs.down_proj.weight).T, atol=0.002)
