"""Times the host's share of the steps of a mixed workload: what the processor does between two steps, with no device.

  PYTHONPATH=. python scripts/bench_host.py --tokenizer=SmolLM2-135M-Instruct.Q4_1.gguf

2,000 requests of lognormal lengths come at once. The tokens are random ones; all else is the engine's own: scheduler,
buckets, inputs, results, text. Prints one JSON line: processor time of the thread, which what else the machine does
hardly changes, microseconds a step of each part, and milliseconds of taking the requests and giving out the outputs.
The collector of garbage runs inside of the other parts; its share is told beside them.
"""

import argparse
import collections
import functools
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import gguf
import numpy as np

from photon_jax.bench.dry_run import sampling_params
from photon_jax.bench.workloads import WorkloadSpec, make_workload
from photon_jax.cache.layout import CacheLayout
from photon_jax.client.local_client import LocalClient
from photon_jax.client.submission import Prompt
from photon_jax.config import CacheConfig, SchedulerConfig
from photon_jax.engine.buckets import BucketSpec, padded_buckets
from photon_jax.engine.engine import Engine
from photon_jax.engine.input_builder import InputBuilder
from photon_jax.engine.metrics import LaunchCounters
from photon_jax.scheduler.plan import StepPlan, StepResult
from photon_jax.scheduler.scheduler import Scheduler
from photon_jax.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 8192
STOP_IDS = (2,)
VOCAB_SIZE = 49_152
Value = TypeVar("Value")


class Clock:
    """Processor time of the thread by part, seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        gc.callbacks.append(self._on_gc)

    def timed(self, name: str, call: Callable[..., Value]) -> Callable[..., Value]:
        """Returns the call, its time counted."""

        @functools.wraps(call)
        def timed_call(*args: object, **kwargs: object) -> Value:
            begin = time.thread_time()
            value = call(*args, **kwargs)
            self.seconds[name] += time.thread_time() - begin
            return value

        return timed_call

    def _on_gc(self, phase: str, _: dict[str, int]) -> None:
        self.seconds["gc"] += time.thread_time() * (1 if phase == "stop" else -1)


class RandomRunner:
    """Builds what a step would be given, and answers with random tokens; none of them ends a sequence."""

    allows_several = True

    def __init__(self, buckets: BucketSpec, builder: InputBuilder) -> None:
        self.launched = LaunchCounters()
        self._buckets = buckets
        self._builder = builder
        rng = np.random.default_rng(0)
        self._tokens = rng.integers(STOP_IDS[-1] + 1, VOCAB_SIZE, 1 << 20).astype(np.int32)
        self._logprobs = rng.random((1 << 20, 3), np.float32)
        self._at = 0

    def launch(self, plan: StepPlan) -> int:
        """Returns how many tokens the step samples."""
        layout = self._buckets.choose(plan)
        self._builder.build(plan, layout)
        self.launched.count(plan, layout)
        return len(plan.scheduled) * plan.num_steps

    def collect(self, count: int) -> StepResult:
        """Returns so many tokens."""
        self._at = self._at + count if self._at + 2 * count < len(self._tokens) else 0
        used = slice(self._at, self._at + count)
        return StepResult(self._tokens[used], self._logprobs[used])


def main() -> None:
    """Prints the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_requests", type=int, default=2000)
    parser.add_argument("--prompt_len", type=int, default=220)
    parser.add_argument("--output_len", type=int, default=180)
    parser.add_argument("--max_num_seqs", type=int, default=1024)
    parser.add_argument("--max_num_batched_tokens", type=int, default=4096)
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--max_steps_per_dispatch", type=int, default=1)
    parser.add_argument("--tokenizer", type=Path, help="folder or .gguf file; without one there is no text")
    flags = parser.parse_args()
    print(json.dumps(time_mix(flags)), flush=True)


def time_mix(flags: argparse.Namespace) -> dict[str, float]:
    """Returns the times of one run."""
    config = SchedulerConfig(
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_waiting=flags.num_requests,
        max_steps_per_dispatch=flags.max_steps_per_dispatch,
    )
    layout = CacheLayout(num_blocks=1 + (1 << 20) // flags.block_size, block_size=flags.block_size)
    scheduler = Scheduler(config, CacheConfig(block_size=flags.block_size), layout, max_model_len=MAX_MODEL_LEN)
    runner = RandomRunner(
        padded_buckets(config, layout, max_model_len=MAX_MODEL_LEN),
        InputBuilder(block_size=flags.block_size, max_num_seqs=flags.max_num_seqs),
    )
    engine = Engine(scheduler, runner, steps_ahead=1)
    client = LocalClient(engine, _tokenizer(flags.tokenizer), vocab_size=VOCAB_SIZE, eos_token_ids=STOP_IDS)
    clock = Clock()
    scheduler.schedule = clock.timed("schedule", scheduler.schedule)
    scheduler.apply = clock.timed("apply", scheduler.apply)
    runner.launch = clock.timed("build", runner.launch)
    engine.step = clock.timed("engine", engine.step)
    spec = WorkloadSpec(
        num_requests=flags.num_requests, lengths="lognormal", prompt_len=flags.prompt_len, output_len=flags.output_len
    )
    workload = make_workload(spec, vocab_size=VOCAB_SIZE, seed=0)
    prompts = [Prompt(token_ids=ids) for ids in workload.prompts]
    begin = time.perf_counter()
    submissions = clock.timed("submit", client.submit_all)(prompts, sampling_params(workload), score=False)
    clock.timed("run", client.run)(submissions)
    outputs = clock.timed("outputs", lambda: [each.output() for each in submissions])()
    wall_s = time.perf_counter() - begin
    assert sum(len(each.outputs[0].token_ids) for each in outputs) == workload.num_output_tokens
    return _describe(clock.seconds, scheduler.counters.num_steps, runner.launched.num_rows) | {"wall_s": wall_s}


def _describe(seconds: dict[str, float], num_steps: int, num_rows: int) -> dict[str, float]:
    parts = {name: seconds[name] for name in ("schedule", "build", "apply")}
    parts["client"] = seconds["run"] - seconds["engine"]
    parts |= {"total": seconds["run"], "of_that_gc": seconds["gc"]}
    return (
        {"num_steps": num_steps, "mean_rows": round(num_rows / num_steps, 1)}
        | {f"{name}_us_per_step": round(value * 1e6 / num_steps, 1) for name, value in parts.items()}
        | {f"{name}_ms": round(seconds[name] * 1e3, 1) for name in ("submit", "run", "outputs")}
    )


def _tokenizer(source: Path | None) -> Tokenizer | None:
    if source is None:
        return None
    if source.is_dir():
        return Tokenizer.from_pretrained(source)
    return Tokenizer.from_gguf({name: field.contents() for name, field in gguf.GGUFReader(source).fields.items()})


if __name__ == "__main__":
    main()
