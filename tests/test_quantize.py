"""quantize(): an int8 checkpoint that loads without the original, and the numbers that go with it."""

import dataclasses
import os
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gguf_files import architecture, gguf_fields, gguf_tensors, write_gguf
from helpers.golden_models import MODELS
from helpers.same_params import assert_same_params
from helpers.tiny_checkpoint import ENGINE_FIELDS, write_checkpoint

from photon_jax import LLM, CheckpointError, ConfigError, SamplingParams
from photon_jax.checkpoint.demo import demo_model_path
from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.config import EngineConfig
from photon_jax.describe import describe_checkpoint
from photon_jax.loading import read_model
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.decoder import forward
from photon_jax.models.params import num_bytes
from photon_jax.quantization.int8 import QuantizedLinear
from photon_jax.quantization.report import REPORT_NAME, compare_on_text, read_report, text_windows
from photon_jax.quantize import quantize
from photon_jax.text.tokenizer import find_tokenizer

PLAIN = QuantizationConfig(group_size=64)
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("quantize") / "model")


def test_a_plainly_rounded_checkpoint_restores_bit_for_bit_without_the_original(model, tmp_path):
    source = shutil.copytree(model, tmp_path / "source")
    at_load = load_checkpoint(source, dtype="float32", quantization=PLAIN)
    quantize(source, tmp_path / "out", PLAIN, progress=False)
    shutil.rmtree(source)
    loaded = load_checkpoint(tmp_path / "out", dtype="float32")
    assert loaded.config.quantization == PLAIN
    assert_same_params(loaded.params, at_load.params)
    assert find_tokenizer(loaded.tokenizer_source).encode(TEXT) == find_tokenizer(model).encode(TEXT)


def test_a_calibrated_checkpoint_keeps_its_numbers_and_they_are_true(model, tmp_path):
    quantization = QuantizationConfig(group_size=32, has_embedding=True)
    report = quantize(
        model,
        tmp_path / "out",
        quantization,
        calibration_text=TEXT,
        eval_text=TEXT[:800],
        eval_window=32,
        progress=False,
    )
    assert report.is_calibrated and read_report(tmp_path / "out") == report
    before, after = (load_checkpoint(path, dtype="float32") for path in (model, tmp_path / "out"))
    windows = text_windows(find_tokenizer(before.tokenizer_source).encode(TEXT[:800]), size=32)
    assert compare_on_text(before.params, after.params, before.config, windows) == report.text_loss
    assert 0.0 < report.text_loss.mean_kl < 0.01
    shown = str(describe_checkpoint(tmp_path / "out"))
    assert "mean KL" in shown and "scales searched for with a text" in shown


def test_rounding_while_reading_and_rounding_the_whole_model_are_the_same(model, tmp_path):
    streamed = quantize(model, tmp_path / "streamed", PLAIN, progress=False)
    whole = quantize(model, tmp_path / "whole", PLAIN, eval_text=TEXT[:800], eval_window=32, progress=False)
    assert streamed.matrices == whole.matrices and len(streamed.matrices) == 8
    assert (streamed.text_loss, whole.text_loss is None) == (None, False)
    ours, theirs = (load_checkpoint(tmp_path / name, dtype="float32") for name in ("streamed", "whole"))
    assert_same_params(ours.params, theirs.params)
    assert ours.config == theirs.config


def test_weights_that_a_file_holds_as_int8_keep_their_bits_and_cost_nothing(tmp_path):
    tied = next(each for each in MODELS if each.name == "llama_tied")
    source = tmp_path / "model.gguf"
    fields = {name: value for name, value in gguf_fields(tied).items() if not name.startswith("tokenizer.")}
    write_gguf(source, architecture(tied), fields, gguf_tensors(tied), "Q8_0")
    quantization = QuantizationConfig(group_size=32)
    report = quantize(source, tmp_path / "out", quantization, progress=False)
    assert {error.relative_error for error in report.matrices} == {0.0}
    at_load = load_checkpoint(source, dtype="float32", quantization=quantization)
    assert_same_params(load_checkpoint(tmp_path / "out", dtype="float32").params, at_load.params)


RESTORE_ON_A_MESH = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.checkpoint.orbax_io import restore_params
from photon_jax.models.params import abstract_params

assert jax.device_count() == 4
mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 2), ("data", "model"))
loaded = load_checkpoint({folder!r}, dtype="float32")

def over_outputs(leaf):
    spec = PartitionSpec("model") if leaf.ndim == 2 and leaf.shape[0] % 2 == 0 else PartitionSpec()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

wanted = jax.tree.map(over_outputs, abstract_params(loaded.config))
params = restore_params(Path({folder!r}), wanted)
for leaf, want, expected in zip(*map(jax.tree.leaves, (params, wanted, loaded.params)), strict=True):
    assert leaf.sharding == want.sharding and len(leaf.devices()) == 4
    np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected))
q, scale = params.layers[0].qkv_proj.q, params.layers[0].qkv_proj.scale
assert str(q.dtype) == "int8"
assert q.addressable_shards[0].data.shape[0] * 2 == q.shape[0] == scale.addressable_shards[0].data.shape[0] * 2
"""


def test_an_int8_checkpoint_is_restored_onto_a_mesh_of_four_devices(model, tmp_path):
    quantization = QuantizationConfig(group_size=32, has_embedding=True)
    quantize(model, tmp_path / "out", quantization, dtype="bfloat16", progress=False)
    path = [str(each) for each in sys.path]
    code = textwrap.dedent(RESTORE_ON_A_MESH).format(path=path, folder=str(tmp_path / "out"))
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


MEASURE_PEAK = """
import sys
sys.path[:0] = {path!r}
import jax, jax.numpy as jnp
from helpers.tiny_model import tiny_config, tiny_params
from photon_jax.checkpoint.orbax_io import save_checkpoint
from photon_jax.models.config import QuantizationConfig
from photon_jax.quantize import quantize

def peak():
    with open("/proc/self/status") as status:  # ru_maxrss begins with what the process that forked this one held
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

small = tiny_config()
save_checkpoint({folder!r} + "/small", tiny_params(small), small)  # all libraries are there now
quantize({folder!r} + "/small", {folder!r} + "/small-int8", QuantizationConfig(group_size=64), progress=False)
before = peak()
quantize({model!r}, {folder!r} + "/out", QuantizationConfig(group_size=64), progress=False)
print(peak() - before)
"""


def test_quantizing_without_texts_never_holds_the_model_as_floats(request, tmp_path):
    demo_path = request.config.getoption("--demo_model") or str(demo_model_path())
    code = textwrap.dedent(MEASURE_PEAK).format(
        path=[str(each) for each in sys.path], folder=str(tmp_path), model=demo_path
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown = int(done.stdout)
    loaded = load_checkpoint(tmp_path / "out", dtype="float32")
    floats = 4 * describe_checkpoint(demo_path).num_parameters
    mapped = os.path.getsize(demo_path)  # pages of the file count too
    assert loaded.num_bytes < grown < 0.8 * floats + mapped


def test_what_is_not_int8_has_the_dtype_asked_for(model, tmp_path):
    quantize(model, tmp_path / "out", PLAIN, dtype="bfloat16", progress=False)
    loaded = load_checkpoint(tmp_path / "out", dtype="bfloat16")
    assert loaded.config.checkpoint_dtype == "bfloat16"
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.params)} == {"int8", "float32", "bfloat16"}
    assert loaded.params.final_norm.dtype == "bfloat16" and loaded.params.layers[0].o_proj.scale.dtype == "float32"


def test_bad_input_is_refused_and_leaves_nothing(model, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"layers\[0\]\.qkv_proj has 64 inputs.*group_size 128"):
        quantize(model, out, QuantizationConfig(group_size=128), progress=False)
    with pytest.raises(ConfigError, match=r"calibration_text has .* tokens; it needs at least 512"):
        quantize(model, out, PLAIN, calibration_text="short", progress=False)
    with pytest.raises(ConfigError, match=r"eval_text has .* tokens; it needs at least 1024"):
        quantize(model, out, PLAIN, eval_text="short", progress=False)
    with pytest.raises(ConfigError, match=r"eval_window must be at least 2, .*, got 1"):
        quantize(model, tmp_path / "out", PLAIN, eval_text=TEXT, eval_window=1, progress=False)
    with pytest.raises(ConfigError, match="group_size must be at least 1, got 0"):
        QuantizationConfig(group_size=0)
    assert list(tmp_path.iterdir()) == []
    quantize(model, out, PLAIN, progress=False)
    with pytest.raises(CheckpointError, match="overwrite"):
        quantize(model, out, PLAIN, progress=False)
    with pytest.raises(ConfigError, match="int8 already"):
        quantize(out, tmp_path / "again", PLAIN, progress=False)
    (out / REPORT_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match="damaged"):
        read_report(out)


def test_texts_need_a_tokenizer(tmp_path):
    model = write_checkpoint(tmp_path / "model", tokenizer_config=None)
    with pytest.raises(ConfigError, match="calibration_text needs a tokenizer"):
        quantize(model, tmp_path / "out", PLAIN, calibration_text=TEXT, progress=False)


def test_int8_activations_are_a_setting_of_int8_models_alone(model):
    with pytest.raises(ConfigError, match="int8_activations needs int8 weights"):
        read_model(model, EngineConfig(int8_activations=True), False)
    weights_only, both = (
        read_model(model, EngineConfig(quantization="int8", group_size=64, int8_activations=on), False)
        for on in (False, True)
    )
    assert jax.tree.leaves(both.params)[0].shape == jax.tree.leaves(weights_only.params)[0].shape
    tokens = jnp.arange(20).reshape(1, 20)
    ours, theirs = (np.asarray(forward(each.params, each.config, tokens)) for each in (both, weights_only))
    assert 0.0 < np.sqrt(np.square(ours - theirs).mean()) < 0.05 * theirs.std()


def test_weights_with_int8_activations_are_replaced_by_others_of_their_kind(model):
    settings = {"quantization": "int8", "group_size": 64, "int8_activations": True, **ENGINE_FIELDS}
    prompts, params = [[5, 6, 7], [8] * 20], SamplingParams(max_tokens=6, temperature=0.0, logprobs=0)

    def bits(llm):
        completions = [output.outputs[0] for output in llm.generate(prompts, params, progress=False)]
        return [(each.token_ids, each.logprobs.raw.tobytes()) for each in completions]

    with LLM(model, **settings) as llm:
        before = llm.params
        old = bits(llm)
        doubled = jax.tree.map(lambda leaf: -leaf if leaf.ndim == 2 and leaf.dtype == jnp.int8 else leaf, before)
        with pytest.raises(CheckpointError, match="another structure"):
            llm.update_params(switched(doubled, is_on=False))
        assert bits(llm) == old
        llm.update_params(doubled)
        new = bits(llm)
        config = llm.config
    with LLM(params=switched(doubled, is_on=False), config=config, int8_activations=True, **ENGINE_FIELDS) as other:
        assert bits(other) == new != old


def switched(params, *, is_on):
    """Returns int8 parameters whose linear layers round their inputs, or don't."""
    return jax.tree.map(
        lambda node: dataclasses.replace(node, int8_activations=is_on) if isinstance(node, QuantizedLinear) else node,
        params,
        is_leaf=lambda node: isinstance(node, QuantizedLinear),
    )


def test_an_llm_serves_int8_weights_and_its_ledger_shows_their_bytes(model):
    with LLM(model, quantization="int8", group_size=64, int8_activations=True, **ENGINE_FIELDS) as llm:
        output = llm.generate("The quick brown fox", SamplingParams(max_tokens=6, temperature=0.0), progress=False)
        assert len(output[0].outputs[0].token_ids) == 6
        assert num_bytes(llm.params) == sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
        assert f"weights {num_bytes(llm.params) / 2**20:.0f} MiB" in llm.memory_report()
