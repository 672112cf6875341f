"""Gradients of a loss through the plain forward against central differences of the same function in float64."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax import forward

STEP = 1e-5  # of the differences; its square and float64's rounding over it are both below 1e-9
TOLERANCE = 1e-4  # of a leaf's gradient: float32 has seven digits, and a sum over a leaf loses some
TOKENS = np.random.default_rng(3).integers(258, size=(2, 9)).astype(np.int32)
CONFIGS = {
    "tied": tiny_config(),
    "biases, norms of queries and keys, a head of its own": tiny_config(
        has_qkv_bias=True, has_o_bias=True, has_mlp_bias=True, has_qk_norm=True, tie_word_embeddings=False
    ),
}


def loss(params, config):
    """Returns the mean negative log-probability of each token after the first, given those before it."""
    logprobs = jax.nn.log_softmax(forward(params, config, TOKENS)[:, :-1])
    return -jnp.take_along_axis(logprobs, jnp.expand_dims(TOKENS[:, 1:], 2), axis=2).mean()


@contextlib.contextmanager
def float64(monkeypatch):
    """Makes the library compute in float64 what it computes in float32."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), monkeypatch.context() as patch:
        patch.setattr(jnp, "float32", jnp.float64)
        yield


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_central_differences(name, monkeypatch):
    config = CONFIGS[name]
    params = tiny_params(config)
    gradients, tree = jax.tree.flatten_with_path(jax.jit(jax.grad(loss), static_argnums=1)(params, config))
    rng = np.random.default_rng(0)
    with float64(monkeypatch):
        exact = jax.jit(functools.partial(loss, config=config))
        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)]
        assert exact(jax.tree.unflatten(tree, leaves)).dtype == np.float64
        for index, (path, gradient) in enumerate(gradients):
            gradient = np.asarray(gradient, np.float64)
            size = np.linalg.norm(gradient)
            assert size > 1e-6, f"{jax.tree_util.keystr(path)} does not matter"
            steepest = np.zeros(gradient.size)
            steepest[np.abs(gradient).argmax()] = 1.0
            for direction in (steepest.reshape(gradient.shape), rng.choice([-1.0, 1.0], gradient.shape)):
                ends = []
                for sign in (1.0, -1.0):
                    moved = [*leaves]
                    moved[index] = leaves[index] + sign * STEP * direction
                    ends.append(float(exact(jax.tree.unflatten(tree, moved))))
                difference = (ends[0] - ends[1]) / (2.0 * STEP)
                error = abs(difference - (gradient * direction).sum())
                assert error < TOLERANCE * size, f"{jax.tree_util.keystr(path)}: {error} of {size}"
