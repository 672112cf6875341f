import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.same_params import assert_same_params
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.checkpoint.orbax_io import (
    METADATA_NAME,
    open_checkpoint_folder,
    restore_params,
    save_checkpoint,
)
from photon_jax.errors import CheckpointError, ConfigError
from photon_jax.models.config import QuantizationConfig, RopeConfig
from photon_jax.models.params import abstract_params, random_params
from photon_jax.quantization.int8 import dequantize

EVERY_BIAS = tiny_config(
    has_qkv_bias=True,
    has_o_bias=True,
    has_mlp_bias=True,
    has_qk_norm=True,
    tie_word_embeddings=False,
    rope=RopeConfig(kind="yarn", factor=4.0, truncate=False),
    eos_token_ids=(3, 257),
)
INT8 = tiny_config(quantization=QuantizationConfig(group_size=32, has_embedding=True))


@pytest.mark.parametrize(("config", "dtype"), [(tiny_config(), "float32"), (EVERY_BIAS, "bfloat16"), (INT8, "float16")])
def test_what_was_saved_is_loaded_bit_for_bit(tmp_path, config, dtype):
    config = dataclasses.replace(config, dtype=dtype)
    params = random_params(config, jax.random.key(3))
    save_checkpoint(tmp_path / "saved", params, config)
    moved = shutil.move(tmp_path / "saved", tmp_path / "elsewhere")
    loaded = load_checkpoint(moved, dtype=dtype)
    assert_same_params(loaded.params, params)
    assert dataclasses.replace(loaded.config, checkpoint_dtype=config.checkpoint_dtype) == config
    assert loaded.eos_token_ids == config.eos_token_ids
    assert loaded.tokenizer_source is None


def test_numpy_leaves_are_saved_too(tmp_path):
    save_checkpoint(tmp_path / "saved", jax.tree.map(np.asarray, tiny_params()), tiny_config())
    assert_same_params(load_checkpoint(tmp_path / "saved", dtype="float32").params, tiny_params())


def test_weights_are_cast_to_the_dtype_asked_for_and_scales_are_not(tmp_path):
    params = random_params(INT8, jax.random.key(3))
    save_checkpoint(tmp_path / "saved", params, INT8)
    loaded = load_checkpoint(tmp_path / "saved", dtype="bfloat16")
    config = dataclasses.replace(INT8, dtype="bfloat16")
    assert_same_params(loaded.params, jax.tree.map(lambda x, y: x.astype(y.dtype), params, abstract_params(config)))
    assert loaded.config.checkpoint_dtype == "float32"


def test_dense_weights_can_be_made_int8_and_int8_ones_not_made_others(tmp_path):
    save_checkpoint(tmp_path / "dense", tiny_params(), tiny_config())
    loaded = load_checkpoint(tmp_path / "dense", dtype="float32", quantization=INT8.quantization)
    save_checkpoint(tmp_path / "int8", loaded.params, loaded.config)
    assert_same_params(load_checkpoint(tmp_path / "int8", dtype="float32").params, loaded.params)
    embedding = loaded.params.embedding
    error = dequantize(embedding.q, embedding.scale, group_size=32) - tiny_params().embedding
    assert (jnp.abs(error) <= jnp.repeat(embedding.scale, 32, axis=1) / 2).all()
    with pytest.raises(ConfigError, match=r"int8.*QuantizationConfig.*leave that out"):
        load_checkpoint(tmp_path / "int8", dtype="float32", quantization=QuantizationConfig(group_size=64))


def test_files_that_belong_to_the_model_are_kept_and_read(tmp_path):
    generation = json.dumps({"temperature": 0.25, "eos_token_id": [9]}).encode()
    save_checkpoint(tmp_path / "saved", tiny_params(), tiny_config(), files={"generation_config.json": generation})
    loaded = load_checkpoint(tmp_path / "saved", dtype="float32")
    assert loaded.generation_config == {"temperature": 0.25}
    assert loaded.eos_token_ids == (257, 9)


def test_parameters_that_do_not_fit_the_config_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"leaf \.embedding is float32\[258 64\], expected bfloat16\[258 64\]"):
        save_checkpoint(tmp_path / "saved", tiny_params(), tiny_config(dtype="bfloat16"))
    assert not list(tmp_path.iterdir())


def test_a_folder_is_replaced_only_when_asked_and_only_if_it_is_a_checkpoint(tmp_path):
    folder = tmp_path / "saved"
    save_checkpoint(folder, tiny_params(), tiny_config())
    other = random_params(tiny_config(), jax.random.key(1))
    with pytest.raises(CheckpointError, match="holds a checkpoint; set overwrite"):
        save_checkpoint(folder, other, tiny_config())
    save_checkpoint(folder, other, tiny_config(), overwrite=True)
    assert_same_params(load_checkpoint(folder, dtype="float32").params, other)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="is no checkpoint of photon_jax; it isn't replaced"):
        save_checkpoint(tmp_path / "home", other, tiny_config(), overwrite=True)
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", other, tiny_config())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "home", "saved"]


def test_a_target_that_cannot_be_written_is_one_error_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"can't be written to .*file/saved"):
        save_checkpoint(tmp_path / "file" / "saved", tiny_params(), tiny_config())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


KILLED_SAVE = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {path!r}
from helpers.tiny_model import tiny_config, tiny_params
import orbax.checkpoint
from photon_jax.checkpoint import orbax_io

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

{function} = kill
orbax_io.save_checkpoint({folder!r}, tiny_params(), tiny_config(), files={{"a.json": b"1"}}, overwrite=True)
"""


@pytest.mark.parametrize(
    ("moment", "replaces"),
    [
        ("orbax.checkpoint.Checkpointer.save", False),
        ("orbax_io.os.rename", False),
        ("orbax_io.json.dumps", True),
        ("orbax_io._move_into_place", True),
    ],
)
def test_a_killed_save_never_looks_whole_and_never_harms_what_was_there(tmp_path, moment, replaces):
    folder = tmp_path / "saved"
    before = random_params(tiny_config(), jax.random.key(1))
    if replaces:
        save_checkpoint(folder, before, tiny_config())
    code = KILLED_SAVE.format(path=[str(path) for path in sys.path], function=moment, folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    if replaces:
        assert_same_params(load_checkpoint(folder, dtype="float32").params, before)
    else:
        with pytest.raises(CheckpointError, match="no model at"):
            load_checkpoint(folder, dtype="float32")
    assert any(left.suffix == ".tmp" for left in tmp_path.iterdir())
    save_checkpoint(folder, tiny_params(), tiny_config(), overwrite=True)
    assert_same_params(load_checkpoint(folder, dtype="float32").params, tiny_params())


def test_a_failing_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(tmp_path / "saved", tiny_params(), tiny_config())
    assert not list(tmp_path.iterdir())


@pytest.fixture
def saved(tmp_path):
    save_checkpoint(tmp_path / "saved", tiny_params(), tiny_config())
    return tmp_path / "saved"


def test_a_missing_or_truncated_file_is_named(saved):
    largest = max((path for path in (saved / "params").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, 100)
    with pytest.raises(CheckpointError, match=f"{largest.name} has 100 bytes, .* the checkpoint is damaged"):
        load_checkpoint(saved, dtype="float32")
    largest.unlink()
    with pytest.raises(CheckpointError, match=f"{largest.name} is missing"):
        load_checkpoint(saved, dtype="float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "has format 9; this release reads 1"),
        ({"config": {"architecture": "x"}}, "config doesn't describe a model of this release"),
        ({"config": None}, "config doesn't describe a model of this release"),
        ({"files": {}}, "files must map file names to sizes"),
    ],
)
def test_a_description_of_another_kind_is_one_error(saved, change, message):
    path = saved / METADATA_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved, dtype="float32")


def test_weights_that_are_not_finite_are_named(tmp_path):
    params = tiny_params()
    params = dataclasses.replace(params, final_norm=params.final_norm.at[3].set(1e30))
    save_checkpoint(tmp_path / "saved", params, tiny_config())
    with pytest.raises(CheckpointError, match=r"\.final_norm .*in float16, it was saved as float32"):
        load_checkpoint(tmp_path / "saved", dtype="float16")


def test_one_leaf_can_be_read_by_itself(saved):
    checkpoint = open_checkpoint_folder(saved)
    assert checkpoint.shapes[".layers[1].o_proj.weight"] == (64, 96)
    leaf = checkpoint.read(".layers[1].o_proj.weight")
    np.testing.assert_array_equal(leaf, np.asarray(tiny_params().layers[1].o_proj.weight).T)


RESHARD = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from helpers.tiny_model import tiny_config, tiny_params
from photon_jax.checkpoint.orbax_io import restore_params, save_checkpoint
from photon_jax.models.params import abstract_params

assert jax.device_count() == 4
mesh = jax.sharding.Mesh(jax.devices(), ("model",))

def sharded(leaf):
    axes = ["model" if size % 4 == 0 else None for size in leaf.shape]
    spec = PartitionSpec(*(axis if axes.index("model") == i else None for i, axis in enumerate(axes)))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

wanted = jax.tree.map(sharded, abstract_params(tiny_config()))
params = restore_params(Path({folder!r}), wanted)
for leaf, want, expected in zip(*map(jax.tree.leaves, (params, wanted, tiny_params())), strict=True):
    assert leaf.sharding == want.sharding and len(leaf.addressable_shards) == 4
    assert leaf.addressable_shards[0].data.size * 4 == leaf.size
    np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected))
save_checkpoint({folder!r} + "-sharded", params, tiny_config())
third = SingleDeviceSharding(jax.devices()[2])
on_third = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=third), wanted)
assert restore_params(Path({folder!r}), on_third).embedding.devices() == {{jax.devices()[2]}}
"""


def test_a_checkpoint_of_one_device_is_restored_sharded_over_four_and_back(saved):
    code = textwrap.dedent(RESHARD).format(path=[str(path) for path in sys.path], folder=str(saved))
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    back = saved.with_name("saved-sharded")
    assert_same_params(load_checkpoint(back, dtype="float32").params, tiny_params())
    assert_same_params(restore_params(back, abstract_params(tiny_config())), tiny_params())
