"""quantize(): an int8 checkpoint that loads without the original, and the numbers that go with it."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.same_params import assert_same_params
from helpers.tiny_checkpoint import ENGINE_FIELDS, write_checkpoint

from photon_jax import LLM, CheckpointError, ConfigError, SamplingParams
from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.config import EngineConfig
from photon_jax.describe import describe_checkpoint
from photon_jax.loading import read_model
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.decoder import forward
from photon_jax.models.params import num_bytes
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


def test_an_llm_serves_int8_weights_and_its_ledger_shows_their_bytes(model):
    with LLM(model, quantization="int8", group_size=64, int8_activations=True, **ENGINE_FIELDS) as llm:
        output = llm.generate("The quick brown fox", SamplingParams(max_tokens=6, temperature=0.0), progress=False)
        assert len(output[0].outputs[0].token_ids) == 6
        assert num_bytes(llm.params) == sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
        assert f"weights {num_bytes(llm.params) / 2**20:.0f} MiB" in llm.memory_report()
