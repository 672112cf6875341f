"""GGUF files: each stored type, each architecture's row order, rope scaling, and files that must be refused."""

import dataclasses
import struct

import gguf
import jax
import numpy as np
import pytest
from helpers.gguf_files import TYPES, architecture, gguf_fields, gguf_tensors, write_gguf
from helpers.golden_models import MODELS, write_hf_folder
from helpers.same_params import assert_same_params

from photon_jax.checkpoint.gguf_io import open_gguf, read_fields
from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.errors import CheckpointError
from photon_jax.models.gguf_config import config_from_gguf
from photon_jax.models.hf_config import config_from_hf

BY_NAME = {model.name: model for model in MODELS}
TIED = BY_NAME["llama_tied"]


def write(path, model=TIED, type_name="F32", *, fields=None, tensors=None):
    all_fields = {**gguf_fields(model), **(fields or {})}
    kept = {key: value for key, value in all_fields.items() if value is not None}
    all_tensors = {**gguf_tensors(model), **(tensors or {})}
    present = {name: tensor for name, tensor in all_tensors.items() if tensor is not None}
    return write_gguf(path, architecture(model), kept, present, type_name)


@pytest.mark.parametrize("name", ["llama_tied", "llama_untied", "llama_bias", "qwen2", "qwen3"])
def test_gguf_and_hugging_face_files_of_one_model_load_the_same(tmp_path, name):
    model = BY_NAME[name]
    write_hf_folder(tmp_path / "hf", model)
    write(tmp_path / "model.gguf", model, fields={f"{architecture(model)}.rope.freq_base": theta_of(model)})
    from_hf = load_checkpoint(tmp_path / "hf", dtype="float32")
    from_gguf = load_checkpoint(tmp_path / "model.gguf", dtype="float32")
    assert_same_params(from_gguf.params, from_hf.params)
    rounded = dataclasses.replace(from_gguf.config, rms_norm_eps=from_hf.config.rms_norm_eps)  # stored as float32
    assert rounded == from_hf.config
    assert abs(from_gguf.config.rms_norm_eps - from_hf.config.rms_norm_eps) < 1e-12
    assert from_gguf.eos_token_ids == (2,)
    assert from_gguf.tokenizer_source["tokenizer.ggml.tokens"][3] == "t3"


def theta_of(model):
    return config_from_hf(model.config).rope.theta


@pytest.mark.parametrize("type_name", TYPES)
def test_each_type_is_dequantized(tmp_path, type_name):
    stored = write(tmp_path / "model.gguf", type_name=type_name)
    original = gguf_tensors(TIED)
    checkpoint = open_gguf(tmp_path / "model.gguf")
    for name, expected in stored.items():
        np.testing.assert_array_equal(checkpoint.read(name).astype(np.float32), expected, err_msg=name)
        limit = {"F32": 0.0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.02, "Q4_0": 0.4, "Q4_1": 0.3}[type_name]
        assert np.abs(expected - original[name]).max() <= limit * np.abs(original[name]).max()
    loaded = load_checkpoint(tmp_path / "model.gguf", dtype="float32")
    np.testing.assert_array_equal(np.asarray(loaded.params.embedding), stored["token_embd.weight"])


def test_fields_are_plain_python_values(tmp_path):
    write(tmp_path / "model.gguf")
    fields = read_fields(tmp_path / "model.gguf")
    assert fields["general.architecture"] == "llama"
    assert type(fields["llama.block_count"]) is int
    assert type(fields["llama.rope.freq_base"]) is float
    assert fields["tokenizer.ggml.tokens"][:2] == ["t0", "t1"]


def test_end_of_turn_token_stops_too(tmp_path):
    write(tmp_path / "model.gguf", fields={"tokenizer.ggml.eot_token_id": 9})
    assert load_checkpoint(tmp_path / "model.gguf", dtype="float32").eos_token_ids == (2, 9)


def test_gguf_dtype_of_params_is_the_one_asked_for(tmp_path):
    write(tmp_path / "model.gguf", type_name="Q8_0")
    loaded = load_checkpoint(tmp_path / "model.gguf", dtype="bfloat16")
    assert {str(leaf.dtype) for leaf in leaves(loaded.params)} == {"bfloat16"}
    assert loaded.config.dtype == "bfloat16"


def leaves(params):
    return jax.tree.leaves(params)


# rope scaling


def config_with(fields, rope_factors=None):
    base = {"general.architecture": "llama", **gguf_fields(TIED)}
    return config_from_gguf({**base, **fields}, tensor_names=gguf_tensors(TIED), rope_factors=rope_factors)


def test_linear_scaling_under_the_newer_and_the_older_key():
    newer = config_with({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}).rope
    older = config_with({"llama.rope.scale_linear": 4.0}).rope
    assert newer == older
    assert (newer.kind, newer.factor) == ("linear", 4.0)


def test_yarn_scaling_equals_the_hugging_face_form():
    model = BY_NAME["llama_yarn"]
    fields = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 1024,
    }
    assert config_with(fields).rope == config_from_hf(model.config).rope


def llama3_factors(factor=8.0, low=1.0, high=4.0, original=1024, theta=10000.0, head_dim=16):
    """The converter's own loop, a dimension at a time."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_scaling_is_found_from_the_stored_factors(tmp_path):
    model = BY_NAME["llama_llama3"]
    write(tmp_path / "model.gguf", model, tensors={"rope_freqs.weight": llama3_factors()})
    assert load_checkpoint(tmp_path / "model.gguf", dtype="float32").config.rope == config_from_hf(model.config).rope


def test_factors_of_another_scaling_are_refused():
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight.*llama3"):
        config_with({}, rope_factors=llama3_factors(high=16.0))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight.*\(8,\)"):
        config_with({}, rope_factors=llama3_factors(head_dim=32))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight.*linear"):
        config_with({"llama.rope.scaling.type": "linear"}, rope_factors=llama3_factors())


# what is refused


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"general.architecture": "gemma"}, "gemma"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 512}, "sliding-window"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_count": 8}, r"rope\.dimension_count"),
        ({"llama.attention.value_length": 8}, r"attention\.value_length"),
        ({"llama.embedding_length": None}, "embedding_length"),
        ({"llama.block_count": "2"}, "block_count"),
        ({"llama.attention.head_count": [4, 4]}, r"attention\.head_count"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
    ],
)
def test_fields_the_engine_cannot_follow_are_errors_naming_them(fields, match):
    with pytest.raises(CheckpointError, match=match):
        config_with(fields)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"blk.1.ffn_up.weight": None}, r"lacks tensor blk\.1\.ffn_up\.weight"),
        ({"blk.0.extra.weight": np.ones((2, 32), np.float32)}, r"blk\.0\.extra\.weight"),
        ({"blk.0.attn_k.weight": np.ones((16, 64), np.float32)}, r"blk\.0\.attn_k\.weight.*\[16, 64\].*\[32, 64\]"),
    ],
)
def test_missing_surplus_and_misshaped_tensors_are_named(tmp_path, changes, match):
    write(tmp_path / "model.gguf", tensors=changes)
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(tmp_path / "model.gguf", dtype="float32")


def test_type_that_cannot_be_dequantized_is_named_with_its_tensor(tmp_path):
    write(tmp_path / "model.gguf", tensors={"blk.0.ffn_up.weight": np.ones((96, 64), np.int32)})
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight has type I32"):
        load_checkpoint(tmp_path / "model.gguf", dtype="float32")


def test_unknown_type_is_named_with_its_tensor(tmp_path):
    path = tmp_path / "model.gguf"
    write(path)
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions and the two sizes
    assert struct.unpack_from("<I", data, at) == (gguf.GGMLQuantizationType.F32,)
    struct.pack_into("<I", data, at, 999)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight has type 999"):
        open_gguf(path)


def test_truncated_file_is_named_wherever_it_ends(tmp_path):
    path = tmp_path / "model.gguf"
    write(path)
    whole = path.read_bytes()
    for length in (0, 3, 4, 20, 100, 1000, len(whole) // 2, len(whole) - 1000):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            open_gguf(path)


def test_part_of_a_split_model_is_refused(tmp_path):
    write(tmp_path / "model.gguf", fields={"split.count": 3})
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        open_gguf(tmp_path / "model.gguf")


def test_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(CheckpointError, match=r"model\.gguf.*GGUF"):
        open_gguf(tmp_path / "model.gguf")
