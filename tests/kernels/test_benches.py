"""The benches of kernels: their tables of blocks, and that a kernel and XLA's version are checked and timed alike."""

import functools

import numpy as np
import pytest

from pallas_kernels import glue_bench
from pallas_kernels.common.bench import Reporter, run_jobs
from pallas_kernels.paged_attention import bench as attention_bench
from pallas_kernels.paged_attention.tiles import TileConfig

TILES = TileConfig(split_tokens=64, tile_tokens=64)


@pytest.mark.parametrize("is_contiguous", [False, True])
def test_the_rows_of_a_call_have_blocks_of_their_own_and_never_the_null_block(is_contiguous):
    tables = np.asarray(attention_bench._tables(40, (3, 2, 4, 8), is_contiguous=is_contiguous))
    for blocks in tables.reshape(6, -1):
        assert len(set(blocks.tolist())) == 32 and blocks.min() >= 1 and blocks.max() < 40
        steps = np.diff(blocks) % 39
        assert (steps == 1).all() == is_contiguous
    assert len(np.unique(tables.reshape(6, -1), axis=0)) > 1  # calls do not find each other's blocks in a cache


def test_a_kernel_between_products_is_timed_beside_its_specification(monkeypatch):
    monkeypatch.setattr(glue_bench, "_NUM_CALLS", 2)
    kernel = functools.partial(glue_bench.add_rms_norm, interpret=True)
    monkeypatch.setattr(glue_bench, "add_rms_norm", kernel)
    reporter = Reporter(None, budget_s=60)
    run_jobs(glue_bench._norm_jobs(1), reporter, num_runs=1)
    assert [row["tiles"] for row in reporter.rows] == ["kernel", "xla"]
    assert all(row["us"] > 0 and row["relative_error"] < 1e-5 for row in reporter.rows)


@pytest.mark.parametrize("is_int8", [False, True])
def test_long_contexts_are_timed_in_scattered_blocks_and_right_in_all_rows(monkeypatch, is_int8):
    kernel = functools.partial(attention_bench.append_attention, interpret=True)
    monkeypatch.setattr(attention_bench, "append_attention", kernel)
    monkeypatch.setattr(attention_bench, "_CALLS_A_STEP", 1)
    pool = attention_bench._draw_pool(5, num_layers=1, head_dim=128, is_int8=is_int8)
    reporter = Reporter(None, budget_s=60)
    jobs = attention_bench._case_jobs(pool, 2, 128, (TILES,))
    run_jobs(jobs, reporter, num_runs=1)
    names = [(row["case"], row["tiles"]) for row in reporter.rows]
    name = "b2_c128_d128" + ("_int8" if is_int8 else "")
    assert names == ([] if is_int8 else [(name, "xla")]) + [(name, TILES.label)]
    assert all(row["us"] > 0 for row in reporter.rows)
    scale_bytes = 4 if is_int8 else 0
    assert jobs[-1].num_bytes == 2 * 2 * 128 * 8 * (128 * (1 if is_int8 else 2) + scale_bytes)
