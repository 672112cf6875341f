"""Rotary position embedding: inverse frequencies of each long-context scheme, and their application.

Rotary embedding: Su et al., arXiv:2104.09864. Frequencies are float32 constants made on the host; the phase and its
cosine and sine are float32 whatever the model's dtype.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from photon_jax.models.config import ModelConfig, RopeConfig
from photon_jax.ops.tiles import RowTiles, map_rows


def inverse_frequencies(rope: RopeConfig, head_dim: int, seq_len: int) -> tuple[np.ndarray, float]:
    """Returns the inverse frequencies f32[head_dim / 2] and the factor by which cos and sin are scaled.

    Args:
      rope: the kind and its numbers.
      seq_len: longest sequence to be served; kind "dynamic" depends on it (once, not while a sequence grows: the
        tokens of a request must not depend on when its keys were written).
    """
    if rope.kind == "dynamic" and seq_len > rope.original_max_position_embeddings:
        return _dynamic(rope, head_dim, seq_len), 1.0
    plain = _plain(rope.theta, head_dim)
    if rope.kind == "linear":
        return plain / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim), rope.attention_factor
    return plain, 1.0


def _plain(theta: float, head_dim: int) -> np.ndarray:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.asarray(np.float32(1.0) / np.power(np.float32(theta), exponents), np.float32)


def _dynamic(rope: RopeConfig, head_dim: int, seq_len: int) -> np.ndarray:
    """NTK-aware scaling of the base for sequences longer than the trained length."""
    stretch = rope.factor * seq_len / rope.original_max_position_embeddings - (rope.factor - 1.0)
    return _plain(rope.theta * stretch ** (head_dim / (head_dim - 2)), head_dim)


def _llama3(plain: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3.1's scheme: long waves are divided by the factor, short ones kept, those between are blended."""
    wavelengths = np.float32(2.0 * math.pi) / plain
    rotations = np.float32(rope.original_max_position_embeddings) / wavelengths
    blend = (rotations - np.float32(rope.low_freq_factor)) / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, np.float32(0.0), np.float32(1.0))
    return np.asarray((np.float32(1.0) - blend) * (plain / np.float32(rope.factor)) + blend * plain, np.float32)


def _yarn(plain: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """YaRN, section 3.2 of arXiv:2309.00071: a linear ramp over the dimensions between two rotation counts."""

    def dimension_of(num_rotations: float) -> float:
        length = rope.original_max_position_embeddings / (num_rotations * 2.0 * math.pi)
        return head_dim * math.log(length) / (2.0 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = np.float32(1.0) - np.clip(ramp, np.float32(0.0), np.float32(1.0))
    interpolated = plain / np.float32(rope.factor)
    return np.asarray(interpolated * (np.float32(1.0) - kept) + plain * kept, np.float32)


def rope_tables(
    positions: jax.Array,  # i32[T]
    *,
    config: ModelConfig,
    seq_len: int,
    tiles: RowTiles | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin f32[T d/2] of the phases position * inverse frequency, scaled by the attention factor."""
    frequencies, factor = inverse_frequencies(config.rope, config.head_dim, seq_len)

    def tables(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        phase = jnp.expand_dims(positions.astype(jnp.float32), 1) * jnp.expand_dims(jnp.asarray(frequencies), 0)
        return jnp.cos(phase) * factor, jnp.sin(phase) * factor

    cos, sin = map_rows(tables, tiles, positions)
    return cos, sin


def apply_rope(
    x: jax.Array,  # [T h d]
    cos: jax.Array,  # f32[T d/2]
    sin: jax.Array,  # f32[T d/2]
) -> jax.Array:  # [T h d]
    """Returns x rotated by its position's phases; the halves of a head are the pairs, as in Hugging Face's models."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.expand_dims(cos, 1), jnp.expand_dims(sin, 1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
