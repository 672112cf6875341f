"""The decode bench on a small model: its tokens are the model's, a wrong step is noticed, its bytes are counted."""

import dataclasses

import pytest

from photon_jax.bench import decode
from photon_jax.bench.decode import TOLERANCE, DecodeBench, DecodeSpec, read_bytes, time_engine
from photon_jax.bench.decode_parts import time_parts
from photon_jax.bench.offline import compile_plain
from photon_jax.models.params import num_bytes

SPEC = DecodeSpec(batch=3, prompt_len=20, num_steps=6, repeats=2)


@pytest.fixture
def started(llm):
    compile_plain(llm, progress=False)
    yield llm.started
    llm.started.engine.scheduler.restart(b"bench")  # the cache was overwritten


def test_tokens_of_scrambled_blocks_agree_with_the_plain_forward(started):
    bench = DecodeBench(started, SPEC)
    tables = [seq.block_ids for seq in bench.sequences]
    assert len({block for table in tables for block in table}) == 6 and tables != sorted(tables)
    run = bench.run()
    assert run.difference < 1e-5 and run.num_outcomes == 1
    assert run.num_checked == 3 * 6 and len(run.step_s_runs) == 2
    assert run.tokens_per_s == pytest.approx(3 / run.step_s)
    cache_bytes = 3 * (20 + 3.5) * started.runner.cache.bytes_per_token
    assert run.num_bytes == num_bytes(started.runner.params) + cache_bytes  # the embedding is the head: read once


def test_a_step_that_reads_the_blocks_of_another_row_is_noticed(started, monkeypatch):
    draw = decode._draw_sequences

    def share_blocks(*args):
        sequences = draw(*args)
        for seq in sequences:
            seq.block_ids = sequences[0].block_ids
        return sequences

    monkeypatch.setattr(decode, "_draw_sequences", share_blocks)
    assert DecodeBench(started, SPEC).run().difference > 10 * TOLERANCE


def test_an_embedding_of_its_own_is_not_read_whole(started):
    params = started.runner.params
    untied = dataclasses.replace(params, lm_head=params.embedding)
    assert num_bytes(untied) > read_bytes(untied) == num_bytes(params)


def test_each_part_of_a_layer_is_timed_with_the_bytes_of_its_weights(started):
    parts = time_parts(started, DecodeBench(started, SPEC).decode_steps[0], repeats=1)
    assert [part.name for part in parts] == ["attention", "qkv", "o", "gate_up", "down", "head_sample"]
    assert all(part.seconds > 0 for part in parts)
    final_norm = started.runner.params.final_norm
    assert sum(part.num_bytes for part in parts) == num_bytes(started.runner.params) - final_norm.nbytes


def test_the_engine_is_timed_on_the_same_rows(started):
    step_s, host_s = time_engine(started, SPEC)
    assert 0 < host_s < step_s
    assert not started.engine.scheduler.has_unfinished
