"""Compiles are counted while one listens; the memory ledger reads as a sentence."""

import jax
import jax.numpy as jnp

from photon_jax.engine.metrics import CompileCounter, MemoryLedger


def test_fresh_programs_are_counted_and_known_ones_are_not():
    program = jax.jit(lambda x: 3.0 * x + 1.0)
    short, long = jnp.zeros((3,)), jnp.zeros((5,))
    with CompileCounter() as counter:
        program(short)
        assert counter.num_compiles == 1
        program(short)
        assert counter.num_compiles == 1
        program(long)
    assert counter.num_compiles == 2
    assert counter.seconds > 0.0


def test_counting_stops_at_the_end_and_counters_do_not_disturb_each_other():
    x = jnp.zeros((7,))
    with CompileCounter() as outer:
        with CompileCounter() as inner:
            jax.jit(lambda x: x - 1.0)(x)
        jax.jit(lambda x: x - 2.0)(x)
    jax.jit(lambda x: x - 3.0)(x)
    assert (inner.num_compiles, outer.num_compiles) == (1, 2)


def test_ledger_says_where_the_memory_went():
    ledger = MemoryLedger(
        weight_bytes=3 << 20,
        expanded_bytes=6 << 20,
        cache_bytes=5 << 20,
        kv_dtype="int8",
        control_bytes=2 << 20,
        workspace_bytes=7 << 20,
        free_bytes=9 << 20,
        num_blocks=11,
        block_size=64,
        max_cached_tokens=640,
        max_request_tokens=512,
    )
    text = str(ledger)
    for part in (
        "weights 3 MiB",
        "int8 ones a second time for long steps 6 MiB",
        "KV cache 5 MiB of int8",
        "10 blocks of 64 tokens = 640 tokens",
        "workspace 7 MiB",
        "free 9 MiB",
        "controls 2 MiB",
    ):
        assert part in text, part
    assert text.endswith("longest request 512 tokens")
