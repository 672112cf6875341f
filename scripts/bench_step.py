"""Times the engine's steps on random weights of a model shape: prefill, then decode at several batch sizes.

  PYTHONPATH=. python scripts/bench_step.py --shape=llama-3.2-1b --dtype=bfloat16 --batch_sizes=1,8,64

Prints one JSON line a batch size: milliseconds of a decode step through the whole engine, of the host's work in it, and
of the step program alone (launched again and again before one wait); the program's share of the engine's step; and the
memory bandwidth that the weights alone need.
"""

import argparse
import dataclasses
import json
import time

import jax
import numpy as np

from photon_jax.bench.shapes import SHAPES, draw_weights, shape_config
from photon_jax.config import make_engine_config
from photon_jax.engine.input_builder import InputBuilder
from photon_jax.engine.start import StartedEngine, start_engine
from photon_jax.engine.step import jit_step
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.params import num_bytes
from photon_jax.request import Request, SamplingParams


def main() -> None:
    """Starts one engine and times it at each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.2-1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch_sizes", default="1,8,64")
    parser.add_argument("--prompt_len", type=int, default=256)
    parser.add_argument("--prefill_lens", default="100,2048", help="prompts whose whole step is timed, alone")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--group_size", type=int, default=None, help="int8 weights, embedding and head included")
    parser.add_argument("--linear", default=None)
    parser.add_argument("--attention", default=None)
    parser.add_argument("--steps_ahead", type=int, default=None)
    parser.add_argument("--max_steps_per_dispatch", type=int, default=None)
    flags = parser.parse_args()
    batch_sizes = [int(size) for size in flags.batch_sizes.split(",")]
    quantization = QuantizationConfig(group_size=flags.group_size, has_embedding=True) if flags.group_size else None
    config = shape_config(flags.shape, flags.dtype, quantization)
    params = draw_weights(config)
    max_len = max(flags.prompt_len + flags.steps, *(int(each) for each in flags.prefill_lens.split(","))) + 64
    engine_config = make_engine_config(
        None,
        dtype=flags.dtype,
        max_model_len=max_len,
        max_num_seqs=max(batch_sizes),
        max_num_batched_tokens=2048,
        num_blocks=max(batch_sizes) * -(-max_len // 64) + 1,
        linear=flags.linear,
        attention=flags.attention,
        steps_ahead=flags.steps_ahead,
        max_steps_per_dispatch=flags.max_steps_per_dispatch,
    )
    started = start_engine(params, config, engine_config)
    print(json.dumps({"start_s": round(started.seconds, 2), "num_programs": started.num_programs}), flush=True)
    for length in [int(each) for each in flags.prefill_lens.split(",")]:
        prefill_s = time_prefill(started, length)
        print(json.dumps({"prefill_len": length, "program_ms": round(prefill_s * 1e3, 3)}), flush=True)
    for batch in batch_sizes:
        row = {name: getattr(flags, name) for name in ("shape", "dtype", "group_size", "prompt_len")} | {"batch": batch}
        row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        print(json.dumps(row | time_batch(started, batch, flags.prompt_len, flags.steps)), flush=True)


def time_batch(started: StartedEngine, batch: int, prompt_len: int, num_steps: int) -> dict[str, float]:
    """Returns the times of one batch; the first of two rounds compiles."""
    rng = np.random.default_rng(batch)
    scheduler, engine = started.engine.scheduler, started.engine
    vocab_size = started.runner.config.model.vocab_size
    for name in ("warm", "timed"):
        for index in range(batch):
            ids = tuple(rng.integers(vocab_size, size=prompt_len).tolist())
            params = SamplingParams(max_tokens=num_steps, temperature=0.0).resolve({})
            scheduler.add(Request(request_id=f"{name}-{batch}-{index}", prompt_token_ids=ids, params=params))
        begin = time.perf_counter()
        while scheduler.num_waiting or not engine.last_plan.is_decode or scheduler.num_running < batch:
            engine.step()
        engine.drain()
        prefill_s = time.perf_counter() - begin
        begin, work_s, first = time.perf_counter(), engine.clock.work_s, scheduler.counters.num_steps
        while scheduler.counters.num_steps < first + num_steps // 2:
            engine.step()
        engine.drain()
        count = scheduler.counters.num_steps - first
        step_s, host_s = (time.perf_counter() - begin) / count, (engine.clock.work_s - work_s) / count
        program_s = time_program(started)
        while scheduler.has_unfinished:
            engine.step()
    weight_bytes = num_bytes(started.runner.params)
    return {
        "prefill_tokens_per_s": round(batch * prompt_len / prefill_s, 1),
        "engine_step_ms": round(step_s * 1e3, 3),
        "host_work_ms": round(host_s * 1e3, 3),
        "program_ms": round(program_s * 1e3, 3),
        "engine_share": round(program_s / step_s, 3),
        "tokens_per_s": round(batch / step_s, 1),
        "weight_gb_per_s": round(weight_bytes / program_s / 1e9, 1),
    }


def time_prefill(started: StartedEngine, length: int) -> float:
    """Returns the seconds of the step program that computes one prompt whole."""
    scheduler, engine = started.engine.scheduler, started.engine
    ids = tuple(np.random.default_rng(length).integers(started.runner.config.model.vocab_size, size=length).tolist())
    params = SamplingParams(max_tokens=2, temperature=0.0).resolve({})
    scheduler.add(Request(request_id=f"prefill-{length}", prompt_token_ids=ids, params=params))
    engine.step()
    seconds = time_program(started)
    while scheduler.has_unfinished:
        engine.step()
    return seconds


def time_program(started: StartedEngine, count: int = 30) -> float:
    """Returns the seconds of one step of the program that ran last, launched `count` times before one wait.

    It writes the same keys and values to the same places, so the engine's sequences go on unharmed.
    """
    runner, plan = started.runner, started.engine.last_plan
    layout = runner.buckets.choose(plan)
    builder = InputBuilder(block_size=started.layout.block_size, max_num_seqs=runner.state.last_token.size - 1)
    packed = jax.device_put(builder.build(plan, layout))
    last_token = runner.state.last_token.copy()
    for _ in range(2):
        begin = time.perf_counter()
        for _ in range(count):
            outputs, runner.cache, runner.state, _ = jit_step(
                runner.params, runner.cache, runner.state, packed, layout=layout, config=runner.config
            )
        outputs.block_until_ready()
        seconds = time.perf_counter() - begin
    runner.state = dataclasses.replace(runner.state, last_token=last_token)
    return seconds / (count * plan.num_steps)


if __name__ == "__main__":
    main()
