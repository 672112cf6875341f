"""Llama as two small Flax modules, NNX and Linen, written from the papers and not from the package: an oracle.

Pre-norm blocks (https://arxiv.org/abs/2302.13971) of grouped-query attention (https://arxiv.org/abs/2305.13245) with
rotary positions in two halves (https://arxiv.org/abs/2104.09864) and a gated SiLU MLP; plain rotary frequencies only.
"""

import jax
import jax.numpy as jnp
from flax import linen, nnx

HIGHEST = jax.lax.Precision.HIGHEST


def rotate(x, theta):
    """x: f32[B T heads d]; turns each pair (i, i + d/2) by its position."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), frequency)[None, :, None]
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(q, k, v):
    """q: f32[B T H d], k, v: f32[B T K d]; head h reads key-value head h // (H / K)."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k, precision=HIGHEST) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, v, precision=HIGHEST)


def mix(x, q, k, v, config, q_norm, k_norm):
    heads = [a.reshape(*x.shape[:2], -1, config.head_dim) for a in (q, k, v)]
    q, k = rotate(q_norm(heads[0]), config.rope.theta), rotate(k_norm(heads[1]), config.rope.theta)
    return attend(q, k, heads[2]).reshape(*x.shape[:2], -1)


class NnxAttention(nnx.Module):
    def __init__(self, c, rngs):
        def linear(inputs, outputs, bias):
            return nnx.Linear(inputs, outputs, use_bias=bias, precision=HIGHEST, rngs=rngs)

        self.q_proj = linear(c.hidden_size, c.num_heads * c.head_dim, c.has_qkv_bias)
        self.k_proj = linear(c.hidden_size, c.num_kv_heads * c.head_dim, c.has_qkv_bias)
        self.v_proj = linear(c.hidden_size, c.num_kv_heads * c.head_dim, c.has_qkv_bias)
        self.o_proj = linear(c.num_heads * c.head_dim, c.hidden_size, c.has_o_bias)
        if c.has_qk_norm:
            self.q_norm = nnx.RMSNorm(c.head_dim, epsilon=c.rms_norm_eps, rngs=rngs)
            self.k_norm = nnx.RMSNorm(c.head_dim, epsilon=c.rms_norm_eps, rngs=rngs)
        self.config = c

    def __call__(self, x):
        norms = (self.q_norm, self.k_norm) if self.config.has_qk_norm else (lambda a: a, lambda a: a)
        return self.o_proj(mix(x, self.q_proj(x), self.k_proj(x), self.v_proj(x), self.config, *norms))


class NnxMlp(nnx.Module):
    def __init__(self, c, rngs):
        def linear(inputs, outputs):
            return nnx.Linear(inputs, outputs, use_bias=c.has_mlp_bias, precision=HIGHEST, rngs=rngs)

        self.gate_proj = linear(c.hidden_size, c.mlp_size)
        self.up_proj = linear(c.hidden_size, c.mlp_size)
        self.down_proj = linear(c.mlp_size, c.hidden_size)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class NnxBlock(nnx.Module):
    def __init__(self, c, rngs):
        self.input_layernorm = nnx.RMSNorm(c.hidden_size, epsilon=c.rms_norm_eps, rngs=rngs)
        self.self_attn = NnxAttention(c, rngs)
        self.post_attention_layernorm = nnx.RMSNorm(c.hidden_size, epsilon=c.rms_norm_eps, rngs=rngs)
        self.mlp = NnxMlp(c, rngs)

    def __call__(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class NnxModel(nnx.Module):
    def __init__(self, c, rngs):
        self.embed_tokens = nnx.Embed(c.vocab_size, c.hidden_size, rngs=rngs)
        self.layers = nnx.List([NnxBlock(c, rngs) for _ in range(c.num_layers)])
        self.norm = nnx.RMSNorm(c.hidden_size, epsilon=c.rms_norm_eps, rngs=rngs)

    def __call__(self, token_ids):
        x = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class NnxLlama(nnx.Module):
    """token_ids i32[B T] -> logits f32[B T V]."""

    def __init__(self, c, rngs):
        self.model = NnxModel(c, rngs)
        self.is_tied = c.tie_word_embeddings
        if not self.is_tied:
            self.lm_head = nnx.Linear(c.hidden_size, c.vocab_size, use_bias=False, precision=HIGHEST, rngs=rngs)

    def __call__(self, token_ids):
        x = self.model(token_ids)
        if self.is_tied:
            return jnp.einsum("btd,vd->btv", x, self.model.embed_tokens.embedding[...], precision=HIGHEST)
        return self.lm_head(x)


def dense(outputs, bias, name):
    return linen.Dense(outputs, use_bias=bias, precision=HIGHEST, name=name)


class LinenAttention(linen.Module):
    config: object

    @linen.compact
    def __call__(self, x):
        c = self.config
        q = dense(c.num_heads * c.head_dim, c.has_qkv_bias, "q_proj")(x)
        k, v = (dense(c.num_kv_heads * c.head_dim, c.has_qkv_bias, name)(x) for name in ("k_proj", "v_proj"))
        norms = [lambda a: a] * 2
        if c.has_qk_norm:
            norms = [linen.RMSNorm(epsilon=c.rms_norm_eps, name=name) for name in ("q_norm", "k_norm")]
        return dense(c.hidden_size, c.has_o_bias, "o_proj")(mix(x, q, k, v, c, *norms))


class LinenMlp(linen.Module):
    config: object

    @linen.compact
    def __call__(self, x):
        c = self.config
        gate, up = (dense(c.mlp_size, c.has_mlp_bias, name)(x) for name in ("gate_proj", "up_proj"))
        return dense(c.hidden_size, c.has_mlp_bias, "down_proj")(jax.nn.silu(gate) * up)


class LinenBlock(linen.Module):
    config: object

    @linen.compact
    def __call__(self, x):
        c = self.config
        first, second = (
            linen.RMSNorm(epsilon=c.rms_norm_eps, name=name) for name in ("input_layernorm", "post_attention_layernorm")
        )
        x = x + LinenAttention(c, name="self_attn")(first(x))
        return x + LinenMlp(c, name="mlp")(second(x))


class LinenModel(linen.Module):
    config: object

    def setup(self):
        c = self.config
        self.embed_tokens = linen.Embed(c.vocab_size, c.hidden_size)
        self.layers = [LinenBlock(c) for _ in range(c.num_layers)]
        self.norm = linen.RMSNorm(epsilon=c.rms_norm_eps)

    def __call__(self, token_ids):
        x = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class LinenLlama(linen.Module):
    """token_ids i32[B T] -> logits f32[B T V]."""

    config: object

    def setup(self):
        self.model = LinenModel(self.config)
        if not self.config.tie_word_embeddings:
            self.lm_head = linen.Dense(self.config.vocab_size, use_bias=False, precision=HIGHEST)

    def __call__(self, token_ids):
        x = self.model(token_ids)
        if self.config.tie_word_embeddings:
            return jnp.einsum("btd,vd->btv", x, self.model.embed_tokens.embedding, precision=HIGHEST)
        return self.lm_head(x)
