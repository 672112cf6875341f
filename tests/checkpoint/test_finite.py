"""Weights that are NaN or infinite: found at load in every stored type, and named."""

import ml_dtypes
import numpy as np
import pytest
from helpers.gguf_files import architecture, gguf_fields, gguf_tensors, write_gguf
from helpers.golden_models import MODELS, draw_weights, write_config, write_weights
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from photon_jax.checkpoint.finite import check_finite, is_finite
from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.errors import CheckpointError

TIED = next(model for model in MODELS if model.name == "llama_tied")
FLOATS = (np.float16, np.float32, np.float64)
STORED = (*FLOATS, ml_dtypes.bfloat16)
NAME = "model.layers.1.mlp.up_proj.weight"


@given(hnp.arrays(st.sampled_from(FLOATS), hnp.array_shapes(max_dims=2, max_side=5), elements=st.floats(width=16)))
def test_it_agrees_with_numpy_on_any_array(array):
    assert is_finite(array) == np.isfinite(array).all()
    short = array.astype(ml_dtypes.bfloat16)
    assert is_finite(short) == np.isfinite(short).all()


@pytest.mark.parametrize("dtype", STORED)
def test_the_edges_of_each_type_are_told_apart(dtype):
    largest = float(ml_dtypes.finfo(dtype).max)
    for value in (0.0, -0.0, largest, -largest, float(ml_dtypes.finfo(dtype).smallest_subnormal)):
        assert is_finite(np.array([1.0, value], dtype)), value
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        assert not is_finite(np.array([1.0, value], dtype)), value
    assert is_finite(np.zeros((0, 3), dtype))


def test_the_number_of_wrong_elements_is_counted():
    with pytest.raises(CheckpointError, match=r"tensor w has 3 of 8 elements that are NaN or infinite"):
        check_finite("w", np.array([[1, np.nan, 2, -np.inf], [np.inf, 3, 4, 5]], np.float32))


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_safetensors_file_with_one_wrong_weight_is_refused(tmp_path, stored, asked, value):
    weights = {name: tensor.astype(stored) for name, tensor in draw_weights(TIED).items()}
    weights[NAME][3, 5] = value
    write_config(tmp_path, TIED.config)
    write_weights(tmp_path, weights)
    with pytest.raises(CheckpointError, match=rf"tensor {NAME} has 1 of {weights[NAME].size} elements"):
        load_checkpoint(tmp_path, dtype=asked)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_a_gguf_file_with_a_wrong_weight_or_scale_is_refused(tmp_path, type_name):
    tensors = gguf_tensors(TIED)
    tensors["blk.0.ffn_down.weight"][2, 3] = np.inf
    with np.errstate(all="ignore"):
        write_gguf(tmp_path / "model.gguf", architecture(TIED), gguf_fields(TIED), tensors, type_name)
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ffn_down\.weight has \d+ of"):
        load_checkpoint(tmp_path / "model.gguf", dtype="float32")
