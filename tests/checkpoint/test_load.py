"""Loading Hugging Face folders: where each weight lands, heads tied or not, stop tokens, files that must be refused."""

import json
import struct
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.golden_models import MODELS, draw_weights, tensor_shapes, write_config, write_hf_folder, write_weights
from safetensors.numpy import save_file

from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.errors import CheckpointError

BY_NAME = {model.name: model for model in MODELS}
UNTIED, TIED = BY_NAME["llama_untied"], BY_NAME["llama_tied"]


def load(folder, dtype="float32", **kwargs):
    return load_checkpoint(folder, dtype=dtype, **kwargs)


def write_with(folder, model=UNTIED, **changes):
    """Writes a checkpoint with tensors replaced, added, or (None) left out; `__` in a name stands for a dot."""
    weights = draw_weights(model)
    for name, tensor in changes.items():
        weights[name.replace("__", ".")] = tensor
    write_config(folder, model.config)
    write_weights(folder, {name: tensor for name, tensor in weights.items() if tensor is not None})


# where each weight lands


@pytest.mark.parametrize("name", ["llama_bias", "qwen3", "mistral"])
def test_fused_projections_are_grouped_by_kv_head(tmp_path, name):
    model = BY_NAME[name]
    weights = write_hf_folder(tmp_path, model)
    loaded = load(tmp_path)
    config = loaded.config
    d, groups = config.head_dim, config.num_groups
    for number, layer in enumerate(loaded.params.layers):
        prefix = f"model.layers.{number}.self_attn"
        for kind in ("weight", "bias") if config.has_qkv_bias else ("weight",):
            rows = []
            for head in range(config.num_kv_heads):
                rows.append(weights[f"{prefix}.q_proj.{kind}"][head * groups * d : (head + 1) * groups * d])
                rows.append(weights[f"{prefix}.k_proj.{kind}"][head * d : (head + 1) * d])
                rows.append(weights[f"{prefix}.v_proj.{kind}"][head * d : (head + 1) * d])
            np.testing.assert_array_equal(np.asarray(getattr(layer.qkv_proj, kind)), np.concatenate(rows).T)


def test_gate_comes_before_up_and_matrices_have_their_inputs_first(tmp_path):
    weights = write_hf_folder(tmp_path, UNTIED)
    params = load(tmp_path).params
    for number, layer in enumerate(params.layers):
        prefix = f"model.layers.{number}"
        both = [weights[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        np.testing.assert_array_equal(np.asarray(layer.gate_up_proj.weight), np.concatenate(both).T)
        np.testing.assert_array_equal(np.asarray(layer.down_proj.weight), weights[f"{prefix}.mlp.down_proj.weight"].T)
        np.testing.assert_array_equal(np.asarray(layer.o_proj.weight), weights[f"{prefix}.self_attn.o_proj.weight"].T)
        np.testing.assert_array_equal(np.asarray(layer.input_norm), weights[f"{prefix}.input_layernorm.weight"])
    np.testing.assert_array_equal(np.asarray(params.embedding), weights["model.embed_tokens.weight"])
    np.testing.assert_array_equal(np.asarray(params.lm_head), weights["lm_head.weight"])


@pytest.mark.parametrize("num_shards", [2, 5])
def test_shards_load_like_one_file(tmp_path, num_shards):
    write_hf_folder(tmp_path / "one", UNTIED)
    write_hf_folder(tmp_path / "many", UNTIED, num_shards=num_shards)
    # the index alone says what counts
    save_file({"stray": np.ones(3, np.float32)}, tmp_path / "many" / "other.safetensors")
    (tmp_path / "many" / "model.safetensors").write_bytes(b"an older file")
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(many.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_every_pair_of_dtypes_is_one_rounding(tmp_path, stored, asked):
    weights = {name: tensor.astype(stored) for name, tensor in draw_weights(TIED).items()}
    write_config(tmp_path, TIED.config)
    write_weights(tmp_path, weights)
    loaded = load(tmp_path, asked)
    assert loaded.config.dtype == asked
    assert loaded.config.checkpoint_dtype == np.dtype(stored).name
    for leaf in jax.tree.leaves(loaded.params):
        assert str(leaf.dtype) == asked
    expected = weights["model.embed_tokens.weight"].astype(np.float32).astype(loaded.params.embedding.dtype)
    np.testing.assert_array_equal(np.asarray(loaded.params.embedding), expected)


def test_weights_beyond_float16_are_refused_and_not_made_infinite(tmp_path):
    write_with(tmp_path, model__norm__weight=np.full(64, 1e6, np.float32))
    assert load(tmp_path, "bfloat16")
    with pytest.raises(CheckpointError, match=r"final_norm.*float16"):
        load(tmp_path, "float16")


def test_progress_counts_every_byte_of_the_file_once(tmp_path):
    weights = write_hf_folder(tmp_path, UNTIED)
    seen = []
    load(tmp_path, on_tensor=lambda name, done, total: seen.append((name, done, total)))
    assert sorted(name for name, _, _ in seen) == sorted(weights)
    total = sum(tensor.nbytes for tensor in weights.values())
    assert {bytes_in_all for _, _, bytes_in_all in seen} == {total}
    assert [done for _, done, _ in seen] == list(np.cumsum([weights[name].nbytes for name, _, _ in seen]))


# tied and untied heads


def test_tied_head_is_the_embedding_and_counts_once(tmp_path):
    weights = write_hf_folder(tmp_path, TIED)
    loaded = load(tmp_path)
    assert loaded.params.lm_head is None
    assert loaded.params.head is loaded.params.embedding
    assert loaded.num_bytes == sum(tensor.nbytes for tensor in weights.values())


def test_head_that_is_present_though_tied_is_skipped(tmp_path):
    write_with(tmp_path, TIED, lm_head__weight=np.full((160, 64), 7.0, np.float32))
    loaded = load(tmp_path)
    assert loaded.params.head is loaded.params.embedding


def test_untied_head_that_is_absent_is_an_error_naming_it(tmp_path):
    write_with(tmp_path, lm_head__weight=None)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load(tmp_path)


# what else the folder says


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(2, [9, 2], (2, 9)), ([4, 5], 6, (4, 5, 6)), (None, 3, (3,)), (2, None, (2,))],
)
def test_stop_tokens_are_those_of_both_files(tmp_path, config_eos, generation_eos, expected):
    write_hf_folder(tmp_path, TIED)
    write_config(tmp_path, {**TIED.config, "eos_token_id": config_eos})
    generation = {"eos_token_id": generation_eos, "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    loaded = load(tmp_path)
    assert loaded.eos_token_ids == expected
    assert loaded.generation_config["temperature"] == 0.6


def test_optional_files_may_be_missing(tmp_path):
    write_hf_folder(tmp_path, TIED)
    loaded = load(str(tmp_path))
    assert (loaded.generation_config, loaded.tokenizer_source, loaded.path) == ({}, None, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert load(tmp_path).tokenizer_source == tmp_path


def test_stored_rotary_frequencies_are_ignored(tmp_path):
    write_with(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(8, np.float32))
    assert load(tmp_path)


# tensors that must be refused


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model__norm__weight": None}, r"lacks tensor model\.norm\.weight"),
        ({"model__layers__1__mlp__up_proj__weight": None}, r"lacks tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        (
            {"model__layers__0__self_attn__q_proj__bias": np.ones(64, np.float32)},
            r"tensor model\.layers\.0\.self_attn\.q_proj\.bias .*no place",
        ),
        ({"model__layers__2__input_layernorm__weight": np.ones(64, np.float32)}, r"model\.layers\.2\."),
        (
            {"model__layers__0__self_attn__k_proj__weight": np.ones((64, 32), np.float32)},
            r"model\.layers\.0\.self_attn\.k_proj\.weight has shape \[64, 32\].*\[32, 64\]",
        ),
        ({"model__embed_tokens__weight": np.ones((161, 64), np.float32)}, r"embed_tokens.*\[161, 64\].*\[160, 64\]"),
        ({"model__norm__weight": np.ones(64, np.int32)}, r"model\.norm\.weight has dtype I32"),
    ],
)
def test_missing_surplus_and_misshaped_tensors_are_named(tmp_path, changes, match):
    write_with(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path)


def test_long_lists_of_missing_tensors_are_cut(tmp_path):
    write_config(tmp_path, UNTIED.config)
    write_weights(tmp_path, {"model.norm.weight": np.ones(64, np.float32)})
    with pytest.raises(CheckpointError, match=r"lacks tensors .* and \d+ more"):
        load(tmp_path)


# files that must be refused


def test_truncated_file_is_named_wherever_it_ends(tmp_path):
    write_hf_folder(tmp_path, TIED)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors isn't a whole safetensors file"):
            load(tmp_path)


@pytest.mark.parametrize("header", [b"not json", b'{"a": 1}', b"[]", b"\xff\xfe"])
def test_corrupt_header_is_refused(tmp_path, header):
    write_config(tmp_path, TIED.config)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", 3])
def test_index_that_reaches_outside_its_folder_is_refused(tmp_path, shard):
    write_hf_folder(tmp_path / "model", UNTIED, num_shards=2)
    write_hf_folder(tmp_path, UNTIED)
    (tmp_path / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index_path = tmp_path / "model" / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["model.norm.weight"] = shard
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: tensor model\.norm\.weight is in"):
        load(tmp_path / "model")


def test_index_and_shards_that_disagree_are_refused(tmp_path):
    write_hf_folder(tmp_path, UNTIED, num_shards=2)
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    names = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = next(n for n in names if n != index["weight_map"]["model.norm.weight"])
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"has no tensor model\.norm\.weight"):
        load(tmp_path)
    (tmp_path / names[0]).unlink()
    with pytest.raises(CheckpointError, match=rf"{names[0]} is missing"):
        load(tmp_path)
    index_path.write_text('{"weight_map": []}')
    with pytest.raises(CheckpointError, match="weight_map"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", [b"{", b"", b"[1]", b"\xff{}", b"[" * 100_000])
def test_bad_json_is_named(tmp_path, name, text):
    write_hf_folder(tmp_path, TIED)
    (tmp_path / name).write_bytes(text)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


def test_bad_stop_token_in_the_generation_config_is_named(tmp_path):
    write_hf_folder(tmp_path, TIED)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        load(tmp_path)


def test_path_without_a_model_is_an_error_with_the_choices(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    for path in (tmp_path / "nothing", tmp_path / "model.bin"):
        with pytest.raises(CheckpointError, match=r"'demo', a folder with config\.json and safetensors, or a \.gguf"):
            load(path)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(tmp_path)
    write_config(tmp_path, TIED.config)
    with pytest.raises(CheckpointError, match="converted to safetensors"):
        load(tmp_path)


# memory

_MEASURE = """
import sys
import jax
from photon_jax.checkpoint.load import load_checkpoint

def peak_bytes():  # of this program alone; getrusage's counter starts at the parent's
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

jax.block_until_ready(jax.numpy.zeros(8))
load_checkpoint(sys.argv[1], dtype="float32")  # a small one: what the first load costs whatever the size
before = peak_bytes()
loaded = load_checkpoint(sys.argv[2], dtype="float32")
print(peak_bytes() - before, loaded.num_bytes)
"""


def test_peak_of_the_host_stays_under_the_model_and_one_shard(tmp_path):
    """On a CPU the device's arrays are host memory: the peak is the model, plus what is read and not yet placed."""
    write_hf_folder(tmp_path / "small", TIED)
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3, "vocab_size": 512}
    config = {**UNTIED.config, **sizes}
    write_config(tmp_path / "large", config)
    weights = {name: np.ones(shape, np.float32) for name, shape in tensor_shapes(config).items()}
    write_weights(tmp_path / "large", weights, num_shards=4)
    shard_bytes = max(path.stat().st_size for path in (tmp_path / "large").glob("*.safetensors"))
    output = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path / "small"), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    growth, model_bytes = map(int, output.split())
    assert model_bytes == sum(tensor.nbytes for tensor in weights.values()) > 100 * 2**20
    assert model_bytes * 0.8 < growth < model_bytes + shard_bytes, (growth, model_bytes, shard_bytes)
