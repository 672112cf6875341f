"""Calibration: inputs move their size without changing the model, and what it finds rounds better."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax.models.config import QuantizationConfig
from photon_jax.models.decoder import forward
from photon_jax.quantization.calibrate import measure_importance, scale_inputs, search_clip
from photon_jax.quantization.report import compare_on_text, error_table, matrix_errors, text_windows
from photon_jax.quantization.weights import matrices, matrix_names, quantize_params, with_int8_activations

CONFIG = tiny_config(has_qkv_bias=True, has_mlp_bias=True)
QUANTIZATION = QuantizationConfig(group_size=64)


@functools.cache
def outlier_params():
    """Returns a model whose norms and values make some inputs much larger than others, as those of real models are."""
    params = tiny_params(CONFIG)
    sizes = jnp.asarray(np.random.default_rng(1).lognormal(0.0, 1.2, CONFIG.hidden_size), jnp.float32)

    def stretch(layer):
        return dataclasses.replace(
            layer, input_norm=layer.input_norm * sizes, post_attention_norm=layer.post_attention_norm * sizes[::-1]
        )

    return dataclasses.replace(params, layers=tuple(stretch(layer) for layer in params.layers))


@functools.cache
def windows(seed):
    return text_windows(np.random.default_rng(seed).integers(256, size=6 * 48), size=48)


@functools.cache
def importance():
    return measure_importance(outlier_params(), CONFIG, windows(0))


@functools.cache
def scaled():
    return scale_inputs(outlier_params(), CONFIG, importance(), QUANTIZATION)


def weighted_error(dense, quantized, weighing):
    pairs = zip(matrices(dense, QUANTIZATION), matrices(quantized, QUANTIZATION), strict=True)
    return {
        name: float((np.square(np.asarray(a) - np.asarray(b)) * np.asarray(weighing[name])).sum())
        for (name, a), (_, b) in pairs
    }


def test_importance_is_the_mean_square_of_the_inputs():
    params = outlier_params()
    tokens = np.concatenate(windows(0))
    x = np.asarray(params.embedding, np.float64)[tokens]
    normed = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + CONFIG.rms_norm_eps)
    expected = np.square(normed * np.asarray(params.layers[0].input_norm, np.float64)).mean(axis=0)
    np.testing.assert_allclose(np.asarray(importance()["layers[0].qkv_proj"]), expected, rtol=1e-4)
    sizes = {name: matrix.shape[1] for name, matrix in matrices(params, QUANTIZATION)}
    assert {name: importance()[name].shape for name in sizes} == {name: (size,) for name, size in sizes.items()}


def test_scaling_leaves_the_model_as_it_was():
    tokens = jnp.stack([jnp.asarray(window) for window in windows(1)[:2]])
    before, after = (forward(params, CONFIG, tokens) for params in (outlier_params(), scaled()[0]))
    np.testing.assert_allclose(np.asarray(after), np.asarray(before), rtol=1e-4, atol=1e-4)
    assert any(
        not np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(jax.tree.leaves(outlier_params()), jax.tree.leaves(scaled()[0]), strict=True)
    )


def test_importance_after_scaling_is_what_the_scaled_model_shows():
    measured = measure_importance(scaled()[0], CONFIG, windows(0))
    for name in matrix_names(scaled()[0], QUANTIZATION):
        np.testing.assert_allclose(np.asarray(scaled()[1][name]), np.asarray(measured[name]), rtol=1e-3, err_msg=name)


def test_clip_ratios_make_no_matrix_worse_and_most_better():
    params = outlier_params()
    ratios = search_clip(params, QUANTIZATION, importance())
    plain = weighted_error(params, quantize_params(params, QUANTIZATION), importance())
    clipped = weighted_error(params, quantize_params(params, QUANTIZATION, clip_ratios=ratios), importance())
    assert all(clipped[name] <= plain[name] * (1 + 1e-6) for name in plain)
    assert sum(clipped.values()) < 0.95 * sum(plain.values())


@pytest.mark.parametrize("how", ["clipping", "scaling", "both"])
def test_each_search_brings_the_model_closer_on_another_text(how):
    params, (dense, weighing) = outlier_params(), (outlier_params(), importance())
    if how != "clipping":
        dense, weighing = scaled()
    ratios = None if how == "scaling" else search_clip(dense, QUANTIZATION, weighing)
    plain = compare_on_text(params, quantize_params(params, QUANTIZATION), CONFIG, windows(1))
    better = compare_on_text(params, quantize_params(dense, QUANTIZATION, clip_ratios=ratios), CONFIG, windows(1))
    assert 0.0 < better.mean_kl < plain.mean_kl


def test_a_text_says_what_both_models_make_of_it():
    params = outlier_params()
    quantized = quantize_params(params, QUANTIZATION)
    loss = compare_on_text(params, quantized, CONFIG, windows(1))
    tokens = jnp.stack([jnp.asarray(window) for window in windows(1)])
    ours, theirs = (
        np.asarray(jax.nn.log_softmax(forward(each, CONFIG, tokens[:, :-1])), np.float64)
        for each in (params, quantized)
    )
    targets = np.asarray(tokens)[:, 1:, None]
    assert loss.num_tokens == targets.size
    np.testing.assert_allclose(loss.perplexity_before, np.exp(-np.take_along_axis(ours, targets, 2).mean()), rtol=1e-5)
    np.testing.assert_allclose(loss.perplexity_after, np.exp(-np.take_along_axis(theirs, targets, 2).mean()), rtol=1e-5)
    np.testing.assert_allclose(loss.mean_kl, (np.exp(ours) * (ours - theirs)).sum(axis=-1).mean(), rtol=1e-2)
    assert loss.top1_agreement == pytest.approx((ours.argmax(-1) == theirs.argmax(-1)).mean())
    assert "perplexity" in str(loss) and "KL" in str(loss)


def test_a_model_is_equal_to_itself_on_any_text():
    loss = compare_on_text(outlier_params(), outlier_params(), CONFIG, windows(1)[:1])
    assert (loss.mean_kl, loss.top1_agreement, loss.perplexity_loss) == (0.0, 1.0, 0.0)


def test_the_table_has_a_line_for_each_matrix():
    params = outlier_params()
    ratios = {"layers[0].o_proj": jnp.full((64, 2), 0.5)}
    quantized = quantize_params(params, QUANTIZATION, clip_ratios=ratios)
    errors = matrix_errors(params, quantized, QUANTIZATION)
    assert [error.name for error in errors] == matrix_names(params, QUANTIZATION)
    by_name = {error.name: error for error in errors}
    assert 0.0 < by_name["layers[0].qkv_proj"].relative_error < by_name["layers[0].qkv_proj"].worst_group < 0.02
    assert by_name["layers[0].qkv_proj"].clipped_share == 0.0
    assert by_name["layers[0].o_proj"].clipped_share > 0.0
    lines = error_table(errors).splitlines()
    assert len(lines) == 1 + len(errors) and lines[1].startswith("layers[0].qkv_proj")


def test_rounded_activations_cost_more_than_rounded_weights_and_stay_close():
    params = outlier_params()
    quantized = quantize_params(params, QUANTIZATION)
    weights_only = compare_on_text(params, quantized, CONFIG, windows(1))
    both = compare_on_text(params, with_int8_activations(quantized), CONFIG, windows(1))
    assert weights_only.mean_kl < both.mean_kl < 20 * weights_only.mean_kl
