"""Bench of a whole decode step of Llama-3.2-1B: microseconds a step, embedding, head and greedy choice included."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common.bench import Job, Reporter, relative_error, run_jobs
from pallas_kernels.decode_step.chain import Shape, State, Variant, Weight, decode, forward
from pallas_kernels.paged_attention.tiles import TileConfig as AttentionTiles

_GROUP = 128
_CONTEXT = 448  # tokens before the first step; 64 steps fill eight blocks of 64
_NUM_STEPS = 64
_TOLERANCE = 3e-2  # of logits after two layers, against float32
SMALL = Shape(num_layers=2, hidden=256, num_heads=4, num_kv_heads=2, mlp=512, vocabulary=384)


def variants(*, kind: str, m: int, interpret: bool = False) -> tuple[Variant, ...]:
    """Returns what is compared, for `bf16` or `int8` weights and m rows."""
    fused: dict[str, Any] = {"matmul": "fused", "append": "kernel", "interpret": interpret}
    found = []
    if kind == "bf16":
        found.append(Variant(name="xla", matmul="xla", attention="xla"))
        found.append(Variant(name="xla_matmul", matmul="xla", append="kernel", interpret=interpret))
    found.append(Variant(name="fused", **fused))
    found.append(Variant(name="parts", **fused | {"matmul": "parts"}))
    if m <= 8 and not interpret:
        short = AttentionTiles(split_tokens=128, tile_tokens=128, num_warps=4, num_stages=1)
        found.append(Variant(name="fused_short_splits", attention_tiles=short, **fused))
    return tuple(found)


@functools.partial(jax.jit, static_argnames=("n", "k", "is_int8"))
def _draw(key: jax.Array, *, n: int, k: int, is_int8: bool) -> Weight:
    if not is_int8:
        return (jax.random.normal(key, (n, k), jnp.bfloat16) / math.sqrt(k)).astype(jnp.bfloat16), None
    q = lax.bitcast_convert_type(jax.random.bits(key, (n, k), jnp.uint8), jnp.int8)
    # Uniform int8 has a deviation of 74; with it a layer's outputs have the size of its inputs.
    scale = jax.random.uniform(key, (n, -(-k // _GROUP)), jnp.float32, 0.8, 1.2) / (74 * math.sqrt(k))
    return q, scale.astype(jnp.float16)


def draw_weights(shape: Shape, *, kind: str) -> dict[str, Any]:
    """Returns random weights of a model, linear layers and head in int8 if kind is `int8`."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * shape.num_layers + 2))
    is_int8 = kind == "int8"
    ones = jnp.ones((shape.hidden,), jnp.bfloat16)
    layers: list[dict[str, Any]] = []
    for _ in range(shape.num_layers):
        layer = {name: _draw(next(keys), n=n, k=k, is_int8=is_int8) for name, (n, k) in shape.linears.items()}
        layers.append(layer | {"norm": ones, "mlp_norm": ones})
    embedding, _ = _draw(next(keys), n=shape.vocabulary, k=shape.hidden, is_int8=False)
    head = _draw(next(keys), n=shape.vocabulary, k=shape.hidden, is_int8=True) if is_int8 else (embedding, None)
    return {"embedding": embedding, "layers": layers, "norm": ones, "head": head}


def draw_state(shape: Shape, m: int) -> tuple[State, jax.Array]:
    """Returns a state of m rows with _CONTEXT random tokens each, and scrambled tables."""
    width = (_CONTEXT + _NUM_STEPS) // shape.block_size
    order = np.random.default_rng(m).permutation(np.arange(1, m * width + 1))
    cache = (shape.num_layers, m * width + 1, shape.num_kv_heads, shape.block_size, shape.head_dim)
    k, v = (jax.random.normal(jax.random.key(seed), cache, jnp.bfloat16) for seed in (1, 2))
    state = State(
        tokens=jnp.arange(m, dtype=jnp.int32),
        lens=jnp.full((m,), _CONTEXT, jnp.int32),
        k=k,
        v=v,
    )
    return state, jnp.asarray(order.reshape(m, width), jnp.int32)


def logits(weights: dict[str, Any], state: State, tables: jax.Array, variant: Variant) -> jax.Array:
    """Returns logits of the first two layers."""
    weights = weights | {"layers": weights["layers"][:2]}
    found: jax.Array = jax.jit(functools.partial(forward, variant=variant, group_size=_GROUP))(weights, state, tables)[
        0
    ]
    return found


def _num_bytes(weights: dict[str, Any], shape: Shape, m: int) -> float:
    read = [*weights["layers"], weights["head"]]
    context = 2 * shape.num_layers * m * (_CONTEXT + _NUM_STEPS / 2) * shape.num_kv_heads * shape.head_dim * 2
    return float(context + sum(leaf.nbytes for leaf in jax.tree.leaves(read)))


def check_correctness(reporter: Reporter, *, is_smoke: bool) -> None:
    """Compares the logits of every variant with those of the references, for a small model.

    On a GPU the timed variants are compared at their real size, before they are timed, and this adds nothing.
    """
    for kind, m in (("bf16", 3), ("int8", 1)) if is_smoke else ():
        weights = draw_weights(SMALL, kind=kind)
        state, tables = draw_state(SMALL, m)
        expected = logits(weights, state, tables, Variant(name="reference", matmul="reference", attention="reference"))
        for variant in variants(kind=kind, m=m, interpret=True):
            label = {"kernel": "decode_step", "case": f"small_m{m}_{kind}", "tiles": variant.name}
            found = reporter.guarded(label, functools.partial(logits, weights, state, tables, variant))
            if found is not None:
                error = relative_error(found, expected)
                status = "OK" if error < _TOLERANCE else "FAILED"
                reporter.emit(**label, status=status, relative_error=error)


def _jobs(weights: dict[str, Any], shape: Shape, *, kind: str, m: int) -> list[Job]:
    state, tables = draw_state(shape, m)
    expected = logits(weights, state, tables, Variant(name="reference", matmul="reference", attention="reference"))
    jobs = []
    for variant in variants(kind=kind, m=m):

        def check(variant: Variant = variant) -> float:
            return relative_error(logits(weights, state, tables, variant), expected)

        jobs.append(
            Job(
                label={"kernel": "decode_step", "case": f"llama_1b_m{m}_{kind}", "tiles": variant.name},
                program=functools.partial(decode, variant=variant, group_size=_GROUP, num_steps=_NUM_STEPS),
                arguments=(weights, state, tables),
                num_calls=_NUM_STEPS,
                num_bytes=_num_bytes(weights, shape, m),
                check=check,
                tolerance=_TOLERANCE,
            )
        )
    return jobs


def run(reporter: Reporter, *, rows: Sequence[int] = (1, 8, 64)) -> None:
    """Times all variants for these numbers of rows; us is for a whole step."""
    shape = Shape()
    for m in rows:
        for kind in ("int8", "bf16"):
            label = {"kernel": "decode_step", "case": f"llama_1b_m{m}_{kind}", "tiles": "all"}
            if reporter.is_out_of_time:
                reporter.emit(**label, status="NOT RUN: budget spent")
                continue
            weights = reporter.guarded(label, functools.partial(draw_weights, shape, kind=kind))
            jobs = weights and reporter.guarded(label, functools.partial(_jobs, weights, shape, kind=kind, m=m))
            run_jobs(jobs or (), reporter)
