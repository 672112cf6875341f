"""Tile check: which tile sizes give a token the same bits on this machine, found by trying them on one sequence."""

import dataclasses
import functools

import jax
import numpy as np

from photon_jax.cache.layout import CacheLayout
from photon_jax.engine.buckets import BASE_ROW_TILE, CONTEXT_TILE, LARGE_QUERY_TILE, BucketSpec, TileChoice
from photon_jax.engine.runner import ModelRunner
from photon_jax.engine.step import StepConfig
from photon_jax.models.decoder import truncated
from photon_jax.models.params import Params
from photon_jax.request import Request, SamplingParams
from photon_jax.scheduler.plan import ScheduledSequence, StepPlan
from photon_jax.scheduler.sequence import SequenceState, SequenceStatus

NUM_TOKENS = 70  # reaches a second context tile
NUM_LAYERS = 2  # the keys of the second layer depend on everything that the first one does
SMALL_ROW_TILE = 2
LARGE_ROW_TILE = 32


def choose_tiles(params: Params, config: StepConfig, block_size: int) -> TileChoice:
    """Returns the tile sizes that may serve one request side by side, in a cache of blocks of that size.

    Within one compiled shape a row's bits don't depend on its place or its company, but matrix products of different
    heights may add in different orders: that depends on the CPU. So the first layers compute one sequence with the
    base tile, with a small one and with a large one, and those that agree in every bit of the cache and of the
    log-probabilities are used. The base tile alone is always right.

    What is compiled depends on the shape of the model and the kind of its cache alone: engines of one process, and of
    one compile cache, share it whatever their other settings are.
    """
    # blocks of a context tile and more are read in one way, shorter ones in another
    trace = functools.partial(_trace, params, config, min(block_size, CONTEXT_TILE))
    expected = trace(BASE_ROW_TILE, 1)
    row_tiles, query_tile = [BASE_ROW_TILE], 1
    if _agree(trace(SMALL_ROW_TILE, 1), expected):
        row_tiles.insert(0, SMALL_ROW_TILE)
    if _agree(trace(LARGE_ROW_TILE, LARGE_QUERY_TILE), expected):
        row_tiles.append(LARGE_ROW_TILE)
        query_tile = LARGE_QUERY_TILE
    return TileChoice(tuple(row_tiles), query_tile)


def _agree(ours: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, expected, strict=True))


def _trace(params: Params, config: StepConfig, block_size: int, row_tile: int, query_tile: int) -> list[np.ndarray]:
    """Returns keys, values, tokens and log-probabilities of one sequence, fed whole or token by token."""
    params, model = truncated(params, config.model, NUM_LAYERS)
    model = dataclasses.replace(model, bos_token_id=None, eos_token_ids=())
    config = dataclasses.replace(config, model=model, max_model_len=NUM_TOKENS)
    num_blocks = 2 * CONTEXT_TILE // block_size
    layout = CacheLayout(num_blocks=1 + num_blocks, block_size=block_size)
    chunk = row_tile if query_tile > 1 else 1
    buckets = BucketSpec(
        decode_rows=(row_tile,),
        mixed_tokens=(row_tile,),
        rare_rows=(row_tile,),
        rare_tokens=(row_tile,),
        mixed_rows=row_tile,
        table_widths=(num_blocks,),
        tiles=TileChoice((row_tile,), query_tile),
    )
    runner = ModelRunner(params, config, layout, buckets, max_num_seqs=1)
    results: list[np.ndarray] = []
    for start in range(0, NUM_TOKENS, chunk):
        is_last = start + chunk >= NUM_TOKENS
        seq = _sequence(model.vocab_size, num_blocks, admission=1 + is_last, temperature=0.9 if is_last else 0.0)
        row = ScheduledSequence(seq, start, min(chunk, NUM_TOKENS - start), int(is_last), seq.admission)
        result = runner.collect(runner.launch(StepPlan((row,))))
        results = [result.token_ids, result.logprobs]
    return [*(np.asarray(array[:, 1:]).view(np.uint8) for array in jax.tree.leaves(runner.cache)), *results]


def _sequence(vocab_size: int, num_blocks: int, *, admission: int, temperature: float) -> SequenceState:
    token_ids = np.random.default_rng(0).integers(vocab_size, size=NUM_TOKENS).tolist()
    sampling = SamplingParams(temperature=temperature, top_p=0.9, top_k=vocab_size // 2, min_p=0.0, max_tokens=1)
    return SequenceState(
        request=Request(request_id="tile check", prompt_token_ids=tuple(token_ids), params=sampling),
        arrival=0,
        token_ids=token_ids,
        max_num_slots=NUM_TOKENS,
        max_num_blocks=num_blocks,
        admission=admission,
        block_ids=list(range(1, 1 + num_blocks)),
        status=SequenceStatus.RUNNING,
        state_slot=1,
    )
