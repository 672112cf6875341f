import dataclasses

import jax
import numpy as np
import pytest
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax.errors import CheckpointError
from photon_jax.models.check_params import check_params
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.params import abstract_params


def test_params_that_fit_pass_as_jax_and_as_numpy_arrays():
    check_params(tiny_params(), abstract_params(tiny_config()))
    check_params(jax.tree.map(np.asarray, tiny_params()), tiny_params())


class Foreign:
    """An array of another library: what it calls a dtype, NumPy does not know."""

    shape, dtype = (258, 64), "its.float32"


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (Foreign(), r"leaf \.embedding is a .*Foreign, which is no array of JAX or NumPy, expected float32\[258 64\]"),
        (np.zeros((258, 64), ">f4"), r"leaf \.embedding is >f4\[258 64\], not in this machine's byte order"),
        (np.zeros((258, 64), object), r"leaf \.embedding is object\[258 64\]"),
        (jax.random.split(jax.random.key(0), (258, 64)), r"leaf \.embedding is key<fry>\[258 64\]"),
        (1.5, r"leaf \.embedding is a builtins\.float, which is no array"),
        ({"a": 1.5}, r"no leaf \.embedding, expected float32\[258 64\] there"),
        ({1: np.zeros(2), "a": np.zeros(2)}, "no tree that JAX can take apart: .*key"),
    ],
)
def test_leaves_of_any_kind_are_refused_by_name(leaf, message):
    with pytest.raises(CheckpointError, match=message):
        check_params(dataclasses.replace(tiny_params(), embedding=leaf), tiny_params())


def test_traced_params_are_refused_by_name():
    with pytest.raises(CheckpointError, match=r"leaf \.embedding is a float32\[258 64\] that a transformation"):
        jax.eval_shape(lambda params: check_params(params, tiny_params()), tiny_params())


def test_int8_params_with_groups_of_another_size_are_refused():
    small, large = (abstract_params(tiny_config(quantization=QuantizationConfig(group_size=g))) for g in (32, 64))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), small)
    check_params(zeros, small)
    with pytest.raises(CheckpointError, match=r"qkv_proj\.scale is float32\[160 2\], expected float32\[160 1\]"):
        check_params(zeros, large)


def test_a_static_field_that_differs_is_refused_though_the_leaves_are_alike():
    config = tiny_config(quantization=QuantizationConfig(group_size=64))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_params(config))
    layer = zeros.layers[0]
    other = dataclasses.replace(layer, qkv_proj=dataclasses.replace(layer.qkv_proj, group_size=128))
    with pytest.raises(CheckpointError, match="a tree of another structure"):
        check_params(dataclasses.replace(zeros, layers=(other, *zeros.layers[1:])), abstract_params(config))
