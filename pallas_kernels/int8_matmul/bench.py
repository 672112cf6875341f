"""Bench of the small-M matmuls at the shapes of Llama-3.2-1B, beside XLA's bf16 matmul."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.bench import Job, Reporter, relative_error, run_jobs
from pallas_kernels.common.device import has_mosaic
from pallas_kernels.common.limbs import LimbRows, split_limbs_reference
from pallas_kernels.common.parts import add_parts
from pallas_kernels.int8_matmul.api import dense_matmul, int8_matmul, limb_matmul_parts
from pallas_kernels.int8_matmul.cases import llama_1b_shapes, make_inputs, real_cases, small_cases
from pallas_kernels.int8_matmul.limb_tiles import LimbTiles, choose_limb_tiles
from pallas_kernels.int8_matmul.mosaic_tiles import MosaicTiles
from pallas_kernels.int8_matmul.reference import (
    dense_matmul_reference,
    dequantize,
    int8_matmul_reference,
    limb_matmul_reference,
)
from pallas_kernels.int8_matmul.tiles import TileConfig, candidates, heuristic, tuning_key

_ROTATED_BYTES = 130e6  # of weights in use in turn, over twice the L2 of an H200
_GLUE = 1e-4
_LIMB_GLUE = 1e-9  # of a result in the scales of the next call's rows
_TOLERANCES = {"bfloat16": 1e-2, "float32": 1e-4}
Weights = tuple[jax.Array, jax.Array | None]


def check_correctness(reporter: Reporter, *, is_smoke: bool) -> None:
    """Compares the kernels with the reference, heuristic tiles and one with splits."""
    tasks = []
    for case in small_cases() if is_smoke else (*small_cases(), *real_cases()):
        label = {"kernel": "matmul", "case": case.name}

        def compare(case: Any = case, label: dict[str, Any] = label) -> None:
            x, weights, scale = make_inputs(case)
            group = case.group_size
            split = TileConfig(method="dot", tile_n=32, tile_k=max(128, 2 * group), k_splits=2, num_stages=3)
            expected = (
                dense_matmul_reference(x, weights)
                if scale is None
                else int8_matmul_reference(x, weights, scale, group_size=group)
            )
            for tiles in (heuristic(m=case.m, n=case.n, k=case.k, group_size=group), split):
                out = _call(x, (weights, scale), group, tiles, is_smoke)
                error = relative_error(out, expected)
                status = "OK" if error < _TOLERANCES[case.dtype] else "FAILED"
                reporter.emit(**label, tiles=tiles.label, status=status, relative_error=error)

        tasks.append((label, compare))
    reporter.guarded_all(tasks)


def _call(x: jax.Array, weights: Weights, group_size: int, tiles: TileConfig, interpret: bool) -> jax.Array:
    weight, scale = weights
    if scale is None:
        return dense_matmul(x, weight, tiles=tiles, interpret=interpret)
    return int8_matmul(x, weight, scale, group_size=group_size, tiles=tiles, interpret=interpret)


def _xla(x: jax.Array, weights: Weights, group_size: int) -> jax.Array:
    weight, scale = weights
    if scale is not None:
        weight = dequantize(weight, scale, group_size=group_size).astype(x.dtype)
    return jnp.einsum("MI,OI->MO", x, weight, preferred_element_type=jnp.float32).astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("n", "k", "group_size"))
def _draw(key: jax.Array, *, n: int, k: int, group_size: int) -> Weights:
    if not group_size:
        return (jax.random.normal(key, (n, k), jnp.bfloat16) / math.sqrt(k)).astype(jnp.bfloat16), None
    q = lax.bitcast_convert_type(jax.random.bits(key, (n, k), jnp.uint8), jnp.int8)
    scale = jax.random.uniform(key, (n, -(-k // group_size)), jnp.float32, 0.5, 1.5) / (127 * math.sqrt(k))
    return q, scale.astype(jnp.float16)


def _chain(multiply: Callable[[jax.Array, Weights], jax.Array], length: int) -> Callable[..., jax.Array]:
    """Returns a program that runs through all weight sets `length` times, each call waiting for the one before."""

    def program(x: jax.Array, sets: Sequence[Weights]) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            for weights in sets:
                y = multiply(x, weights)
                x = x + (y[:, :1] * _GLUE).astype(x.dtype)
            return x, None

        return lax.scan(step, x, None, length=length)[0]

    return program


def _case_jobs(shape: str, m: int, group_size: int, *, with_xla: bool, limit: int | None = None) -> list[Job]:
    n, k = llama_1b_shapes()[shape]
    weight_bytes = n * k * (1 if group_size else 2) + (2 * n * -(-k // group_size) if group_size else 0)
    num_sets = min(32, max(2, math.ceil(_ROTATED_BYTES / weight_bytes)))
    sets = [_draw(jax.random.key(index), n=n, k=k, group_size=group_size) for index in range(num_sets)]
    x = jax.random.normal(jax.random.key(1000 + m), (m, k), jnp.bfloat16)
    length = max(3, min(40, round(6e-3 / num_sets / (weight_bytes / 2e12 + 2e-6))))
    expected = _xla_exact(x, sets[0], group_size)
    name = f"{shape}_m{m}_{'int8_g' + str(group_size) if group_size else 'bf16'}"
    common: dict[str, Any] = {
        "arguments": (x, sets),
        "num_calls": num_sets * length,
        "num_bytes": weight_bytes + 2 * m * (n + k),
    }

    def job(tiles_label: str, multiply: Callable[[jax.Array, Weights], jax.Array], **facts: Any) -> Job:
        return Job(
            label={"kernel": "matmul", "case": name, "tiles": tiles_label, **facts},
            program=_chain(multiply, length),
            check=lambda: relative_error(jax.jit(multiply)(x, sets[0]), expected),
            **common,
        )

    jobs = [job("xla", functools.partial(_xla, group_size=group_size))] if with_xla else []
    key = tuning_key(m=m, n=n, k=k, group_size=group_size, dtype="bfloat16")
    for tiles in candidates(m=m, n=n, k=k, group_size=group_size)[:limit]:
        multiply = functools.partial(_call, group_size=group_size, tiles=tiles, interpret=False)
        jobs.append(job(tiles.label, multiply, key=key, config=dataclasses.asdict(tiles)))
    return jobs


def _limb_jobs(shape: str, m: int, group_size: int) -> list[Job]:
    """Returns jobs of the default tiles with and without Mosaic, of rows whose limbs are there."""
    n, k = llama_1b_shapes()[shape]
    num_bytes = n * k + 4 * n * -(-k // group_size)
    num_sets = min(32, max(2, math.ceil(_ROTATED_BYTES / num_bytes)))
    drawn = [_draw(jax.random.key(index), n=n, k=k, group_size=group_size) for index in range(num_sets)]
    sets = [(q, scale.astype(jnp.float32)) for q, scale in drawn if scale is not None]
    values = jax.random.normal(jax.random.key(1000 + m), (m, k))
    x = jax.jit(functools.partial(split_limbs_reference, group_size=group_size))(values)
    length = max(3, min(40, round(6e-3 / num_sets / (num_bytes / 2e12 + 2e-6))))

    def job(tiles: LimbTiles | MosaicTiles) -> Job:
        def program(x: LimbRows, sets: Sequence[tuple[jax.Array, jax.Array]]) -> LimbRows:
            def step(x: LimbRows, _: None) -> tuple[LimbRows, None]:
                for q, scale in sets:
                    y = add_parts(limb_matmul_parts(x, q, scale, tiles=tiles)[:, :, :1])
                    x = dataclasses.replace(x, scale=x.scale + y * _LIMB_GLUE)
                return x, None

            return lax.scan(step, x, None, length=length)[0]

        def check() -> float:
            return relative_error(add_parts(limb_matmul_parts(x, *sets[0], tiles=tiles)), expected)

        label = {"kernel": "limbs", "case": f"{shape}_m{m}_int8_g{group_size}", "tiles": tiles.label}
        options: dict[str, Any] = {
            "num_calls": num_sets * length,
            "num_bytes": num_bytes,
            "check": check,
            "tolerance": 1e-5,
        }
        return Job(label=label, program=program, arguments=(x, sets), **options)

    expected = limb_matmul_reference(x, *sets[0])
    facts: dict[str, Any] = {"m": m, "n": n, "k": k, "group_size": group_size, "scale_dtype": jnp.dtype("float32")}
    choices = (choose_limb_tiles(**facts, has_mosaic=has) for has in dict.fromkeys((has_mosaic(), False)))
    return [job(tiles) for tiles in dict.fromkeys(choices)]


@jax.jit
def _dense_exact(x: jax.Array, weight: jax.Array) -> jax.Array:
    out: jax.Array = jnp.einsum(
        "MI,OI->MO", x.astype(jnp.float32), weight.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    return out


def _xla_exact(x: jax.Array, weights: Weights, group_size: int) -> jax.Array:
    weight, scale = weights
    out: jax.Array = _dense_exact(x, weight if scale is None else dequantize(weight, scale, group_size=group_size))
    return out


def time_glue(reporter: Reporter) -> None:
    """Times the small operation between two calls, which every other time here includes."""
    x = jax.random.normal(jax.random.key(0), (1, 2048), jnp.bfloat16)

    def program(x: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            for _i in range(16):
                x = lax.optimization_barrier(x + (x[:, :1] * _GLUE).astype(x.dtype))
            return x, None

        return lax.scan(step, x, None, length=50)[0]

    label = {"kernel": "glue", "case": "one small operation", "tiles": "xla"}
    run_jobs([Job(label=label, program=program, arguments=(x,), num_calls=800, num_bytes=8192)], reporter)


def run(reporter: Reporter, *, rows: Sequence[int] = (1, 16, 8, 128)) -> None:
    """Times all tiles at all shapes; the order puts first what decides most."""
    for m in rows:
        for shape in ("gate_up", "down", "qkv", "o", "head"):
            for group_size in (128, 0):
                limit = 4 if shape == "head" else None
                with_xla = not group_size or (shape == "qkv" and m in (1, 16))
                label = {"kernel": "matmul", "case": f"{shape}_m{m}_g{group_size}", "tiles": "all"}
                if reporter.is_out_of_time:
                    reporter.emit(**label, status="NOT RUN: budget spent")
                    continue
                jobs = reporter.guarded(
                    label,
                    functools.partial(_case_jobs, shape, m, group_size, with_xla=with_xla, limit=limit),
                )
                run_jobs(jobs or (), reporter)
                if group_size and 16 < m <= 128:
                    jobs = reporter.guarded(label, functools.partial(_limb_jobs, shape, m, group_size))
                    run_jobs(jobs or (), reporter)
    for m in set(rows) & {1, 16}:
        jobs = reporter.guarded(
            {"kernel": "matmul", "case": f"gate_up_m{m}_g32", "tiles": "all"},
            functools.partial(_case_jobs, "gate_up", m, 32, with_xla=False, limit=8),
        )
        run_jobs(jobs or (), reporter)
