"""Bench of prefill attention at the shapes of Llama-3.2-1B and Qwen3-8B, beside cuDNN on the same lengths, unpaged."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from pallas_kernels.common.bench import Job, Reporter, relative_error, run_jobs
from pallas_kernels.prefill_attention.api import prefill_attention
from pallas_kernels.prefill_attention.cases import Case, Inputs, make_inputs, real_cases, small_cases
from pallas_kernels.prefill_attention.reference import prefill_attention_reference
from pallas_kernels.prefill_attention.tiles import TileConfig, candidates, heuristic, tuning_key

_LAYERS = 4
_NUM_CALLS = 16
_QUERY_TILES = (16, 32)
_TOLERANCES = {"bfloat16": 1e-2, "float32": 1e-4}


def check_correctness(reporter: Reporter, *, is_smoke: bool) -> None:
    """Compares the kernel over poisoned memory with the reference over clean memory."""
    tasks = []
    for case in small_cases() if is_smoke else (*small_cases(), *real_cases()):
        label = {"kernel": "prefill_attention", "case": case.name}

        def compare(case: Case = case, label: dict[str, Any] = label) -> None:
            expected = prefill_attention_reference(*make_inputs(case), 1, query_tile=case.query_tile)
            poisoned = make_inputs(case, is_poisoned=True)
            for tiles in (
                heuristic(head_dim=case.head_dim, dtype=case.dtype),
                TileConfig(tile_tokens=128, num_warps=8),
            ):
                out = prefill_attention(*poisoned, 1, query_tile=case.query_tile, tiles=tiles, interpret=is_smoke)
                error = relative_error(out, expected)
                status = "OK" if error < _TOLERANCES[case.dtype] else "FAILED"
                reporter.emit(**label, tiles=tiles.label, status=status, relative_error=error)

        tasks.append((label, compare))
    reporter.guarded_all(tasks)


def _bench_cases() -> tuple[Case, ...]:
    llama: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 64, "dtype": "bfloat16"}
    qwen = llama | {"head_dim": 128}
    mixed = {"new_tokens": (1,) * 64 + (480,) * 4, "context_lens": (512,) * 64 + (480,) * 4}
    shapes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("whole_2048", {"new_tokens": (2048,), "context_lens": (2048,)} | llama),
        ("eight_256", {"new_tokens": (256,) * 8, "context_lens": (256,) * 8} | llama),
        ("chunk_512_of_8192", {"new_tokens": (512,), "context_lens": (8192,)} | llama),
        ("decode_64_with_4_480", mixed | llama),
        ("whole_2048_d128", {"new_tokens": (2048,), "context_lens": (2048,)} | qwen),
        ("eight_256_d128", {"new_tokens": (256,) * 8, "context_lens": (256,) * 8} | qwen),
        ("prompt_100", {"new_tokens": (100,), "context_lens": (100,)} | llama),
    )
    return tuple(Case(name=name, num_layers=_LAYERS, num_padding=0, **shape) for name, shape in shapes)


def _num_flops(case: Case) -> float:
    """Returns the operations of the products under the causal mask."""
    pairs = sum(
        count * length - count * (count - 1) / 2
        for count, length in zip(case.new_tokens, case.context_lens, strict=True)
    )
    return 4.0 * pairs * case.num_heads * case.head_dim


def _chain(attend: Callable[[jax.Array, int], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Returns a program of dependent calls that go through the layers."""

    def program(q: jax.Array) -> jax.Array:
        def step(q: jax.Array, _: None) -> tuple[jax.Array, None]:
            for layer in range(_LAYERS):
                q = q + (attend(q, layer) * 1e-3).astype(q.dtype)
            return q, None

        return lax.scan(step, q, None, length=_NUM_CALLS // _LAYERS)[0]

    return program


def _cudnn(case: Case, inputs: Inputs) -> Callable[[jax.Array, int], jax.Array]:
    """Returns cuDNN's attention of equal whole prompts whose keys and values lie one after the other."""
    rows, length = len(case.new_tokens), case.new_tokens[0]
    key = jax.random.key(0)
    shape = (rows, length, case.num_kv_heads, case.head_dim)
    k, v = (jax.random.normal(each, shape, inputs.q.dtype) for each in jax.random.split(key))

    def attend(q: jax.Array, layer: int) -> jax.Array:
        del layer
        q = q.reshape(rows, length, case.num_heads, case.head_dim)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return out.reshape(rows * length, case.num_heads, case.head_dim)

    return attend


def _case_jobs(case: Case) -> list[Job]:
    base = {"kernel": "prefill_attention", "case": case.name}
    facts: dict[str, Any] = {"num_calls": _NUM_CALLS, "num_bytes": 0.0, "num_flops": _num_flops(case)}
    jobs = []
    for query_tile in _QUERY_TILES:
        tiled = dataclasses.replace(case, query_tile=query_tile)
        inputs = make_inputs(tiled)
        expected = prefill_attention_reference(*inputs, 0, query_tile=query_tile)
        key = tuning_key(
            head_dim=case.head_dim,
            num_groups=case.num_heads // case.num_kv_heads,
            block_size=case.block_size,
            query_tile=query_tile,
            dtype=case.dtype,
        )
        for tiles in candidates():

            def attend(q: jax.Array, layer: int, inputs: Inputs = inputs, **options: Any) -> jax.Array:
                return prefill_attention(q, *inputs[1:], layer, **options)

            call = functools.partial(attend, query_tile=query_tile, tiles=tiles)
            jobs.append(
                Job(
                    label=base
                    | {"tiles": f"q{query_tile}_{tiles.label}", "key": key, "config": dataclasses.asdict(tiles)},
                    program=_chain(call),
                    arguments=(inputs.q,),
                    check=functools.partial(
                        lambda call, q, expected: relative_error(jax.jit(call, static_argnums=1)(q, 0), expected),
                        call,
                        inputs.q,
                        expected,
                    ),
                    **facts,
                )
            )
    if len(set(case.new_tokens)) == 1 and case.new_tokens == case.context_lens:
        program = _chain(_cudnn(case, inputs))
        jobs.append(
            Job(label=base | {"tiles": "xla", "form": "cudnn"}, program=program, arguments=(inputs.q,), **facts)
        )
    return jobs


def run(reporter: Reporter, *, is_brief: bool) -> None:
    """Times all tiles over the cases, the likeliest cases first; is_brief leaves out the last ones."""
    for case in _bench_cases()[: 4 if is_brief else None]:
        label = {"kernel": "prefill_attention", "case": case.name, "tiles": "all"}
        if reporter.is_out_of_time:
            reporter.emit(**label, status="NOT RUN: budget spent")
            continue
        jobs = reporter.guarded(label, functools.partial(_case_jobs, case))
        run_jobs(jobs or (), reporter)
