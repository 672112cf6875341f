"""Times the host's share of a decode step: schedule, choose the bucket, build the upload, apply the results.

  PYTHONPATH=. python scripts/bench_host.py --batch_sizes=8,64,256

No device takes part: results are drawn from a fixed array. Prints one JSON line a batch size, microseconds a step.
"""

import argparse
import json
import statistics
import time

import numpy as np

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import CacheConfig, SchedulerConfig
from photon_jax.engine.buckets import padded_buckets
from photon_jax.engine.input_builder import InputBuilder
from photon_jax.request import Request, SamplingParams
from photon_jax.scheduler.plan import StepResult
from photon_jax.scheduler.scheduler import Scheduler

VOCAB_SIZE = 128_256
STOP_IDS = (128_001, 128_008, 128_009)


def main() -> None:
    """Prints the times of each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_sizes", default="1,8,64,256")
    parser.add_argument("--prompt_len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--block_size", type=int, default=64)
    flags = parser.parse_args()
    for size in flags.batch_sizes.split(","):
        print(json.dumps(time_batch(int(size), flags.prompt_len, flags.steps, flags.block_size)), flush=True)


def time_batch(batch: int, prompt_len: int, num_steps: int, block_size: int) -> dict[str, float]:
    """Returns the median microseconds of each part of a decode step of `batch` rows."""
    config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=max(2048, batch))
    max_len = prompt_len + num_steps
    layout = CacheLayout(num_blocks=batch * -(-max_len // block_size) + 1, block_size=block_size)
    scheduler = Scheduler(config, CacheConfig(block_size=block_size), layout, max_model_len=max_len)
    buckets = padded_buckets(config, layout, max_model_len=max_len)
    builder = InputBuilder(block_size=block_size, max_num_seqs=batch)
    rng = np.random.default_rng(batch)
    for index in range(batch):
        prompt = tuple(rng.integers(VOCAB_SIZE, size=prompt_len).tolist())
        params = SamplingParams(max_tokens=num_steps, temperature=0.7, top_p=0.9).resolve({})
        scheduler.add(Request(request_id=str(index), prompt_token_ids=prompt, params=params, stop_token_ids=STOP_IDS))
    tokens, logprobs = rng.integers(1000, size=batch).astype(np.int32), np.zeros((batch, 3), np.float32)
    times: dict[str, list[float]] = {"schedule": [], "build": [], "apply": []}
    while scheduler.has_unfinished:
        marks = [time.perf_counter()]
        plan = scheduler.schedule()
        marks.append(time.perf_counter())
        builder.build(plan, buckets.choose(plan))
        marks.append(time.perf_counter())
        num_rows = len(plan.scheduled)
        scheduler.apply(plan, StepResult(tokens[:num_rows], logprobs[:num_rows]))
        marks.append(time.perf_counter())
        if plan.num_tokens == num_rows == batch:
            for name, begin, end in zip(times, marks, marks[1:], strict=False):
                times[name].append(end - begin)
    medians = {f"{name}_us": round(statistics.median(values) * 1e6, 1) for name, values in times.items()}
    return {"batch": batch, "steps": len(times["apply"])} | medians | {"total_us": round(sum(medians.values()), 1)}


if __name__ == "__main__":
    main()
