"""Offline throughput: all requests at once, and where the time went."""

import itertools
import statistics
import time
from collections.abc import Sequence

import jax

from photon_jax.bench.dry_run import dry_run, sampling_params
from photon_jax.bench.report import quantiles
from photon_jax.bench.workloads import Workload, WorkloadSpec, make_workload
from photon_jax.engine.metrics import CompileCounter, EngineMetrics
from photon_jax.engine.warmup import compile_all
from photon_jax.llm import LLM
from photon_jax.outputs import RequestOutput
from photon_jax.progress import compile_bar
from photon_jax.step_io import StepLayout

MAX_LAUNCHED = 2  # replayed steps on their way, as in the engine


def bench_offline(
    llm: LLM, spec: WorkloadSpec, *, repeats: int, replays: bool = False, progress: bool = False
) -> dict[str, object]:
    """Returns the rates of the median of several runs, of an even number the slower one, after one that warms up.

    Args:
      replays: whether to time the run's steps also dispatched back to back, with no scheduler and no text.
    """
    started = llm.started
    first = make_workload(spec, vocab_size=llm.config.vocab_size, seed=0)
    begin = time.perf_counter()
    num_programs = compile_ahead(llm, first, progress)
    compile_s = time.perf_counter() - begin
    _run(llm, first, progress)
    runs = []
    with CompileCounter() as compiles:
        for seed in range(1, repeats + 1):
            workload = make_workload(spec, vocab_size=llm.config.vocab_size, seed=seed)
            before = started.metrics()
            outputs, total_s = _run(llm, workload, progress)
            runs.append((total_s, started.metrics().since(before), outputs))
    total_s, metrics, outputs = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
    record = {
        "num_prompt_tokens": first.num_prompt_tokens,
        "num_output_tokens": first.num_output_tokens,
        "repeats": repeats,
        "total_s": round(total_s, 4),
        "total_s_runs": [round(run[0], 4) for run in runs],
        "output_tokens_per_s": round(first.num_output_tokens / total_s, 1),
        "tokens_per_s": round((first.num_prompt_tokens + first.num_output_tokens) / total_s, 1),
        "requests_per_s": round(spec.num_requests / total_s, 2),
        **_latencies(outputs),
        **describe_steps(metrics, total_s),
        "num_programs": num_programs,
        "compile_s": round(compile_s, 2),
        "num_compiles_while_timed": compiles.num_compiles,
    }
    if spec.mix == "shared_prefix":
        record |= _time_second_wave(llm, spec, seed=repeats + 1, progress=progress)
    if replays:
        replay_s = replay(llm, make_workload(spec, vocab_size=llm.config.vocab_size, seed=0))
        record |= {"replay_s": round(replay_s, 4), "share_of_replay": round(replay_s / total_s, 4)}
    return record


def describe_steps(metrics: EngineMetrics, total_s: float) -> dict[str, object]:
    """Returns what the engine did in a run of so many seconds, and where they went, microseconds of a step.

    What is neither the engine's work nor waiting is the client's: tokenizing, text, stop strings, outputs.
    """
    steps = max(metrics.num_steps, 1)
    return {
        "num_steps": metrics.num_steps,
        "num_dispatches": metrics.num_dispatches,
        "num_mixed_steps": metrics.num_mixed_steps,
        "mean_rows": round(metrics.mean_rows, 1),
        "occupancy": round(metrics.occupancy, 4),
        "prompt_tokens_per_mixed_step": round(metrics.num_prompt_tokens / max(metrics.num_mixed_steps, 1), 1),
        "padding_share": round(metrics.padding_share, 4),
        "num_preemptions": metrics.num_preemptions,
        "num_prefix_hit_tokens": metrics.num_prefix_hit_tokens,
        "step_us": round(total_s * 1e6 / steps, 1),
        "host_us_per_step": round(metrics.host_us_per_step, 1),
        "launch_us_per_step": round(metrics.launch_s * 1e6 / steps, 1),
        "wait_us_per_step": round(metrics.wait_us_per_step, 1),
        "client_us_per_step": round((total_s - metrics.host_s - metrics.wait_s) * 1e6 / steps, 1),
    }


def replay(llm: LLM, workload: Workload) -> float:
    """Returns the seconds that a workload's steps take when they are dispatched back to back, all inputs being ready.

    No scheduler, no text: what is left is the upload, the program and the fetch of its results. The engine must be
    idle. What its cache held is overwritten, so the prefix cache is forgotten.
    """
    runner, scheduler = llm.started.runner, llm.started.engine.scheduler
    assert not scheduler.has_unfinished, "a replay needs an idle engine"
    steps = list(dry_run(llm.started, workload))
    launched: list[jax.Array] = []
    begin = time.perf_counter()
    for layout, packed in steps:
        launched.append(runner.dispatch(layout, packed)[0])
        if len(launched) >= MAX_LAUNCHED:
            jax.device_get(launched.pop(0))
    jax.device_get(launched)
    seconds = time.perf_counter() - begin
    scheduler.restart(b"replay %d" % time.perf_counter_ns())
    return seconds


def _time_second_wave(llm: LLM, spec: WorkloadSpec, *, seed: int, progress: bool) -> dict[str, object]:
    """Returns the median times to the first token of requests that meet their shared prefix first, and once more."""
    found: dict[str, object] = {}
    for each, (wave, name) in itertools.product((seed, seed + 1), enumerate(("first", "second"))):
        # the first pair of waves compiles what such steps need; the second one counts
        workload = make_workload(spec, vocab_size=llm.config.vocab_size, seed=each, wave=wave)
        found[f"{name}_wave_ttft_s"] = _latencies(_run(llm, workload, progress)[0])["ttft_s"]
    return found


def compile_ahead(llm: LLM, workload: Workload, progress: bool) -> int:
    """Compiles the step programs that a workload will meet; returns how many it meets."""
    layouts: list[StepLayout] = list(dict.fromkeys(layout for layout, _ in dry_run(llm.started, workload)))
    missing = [layout for layout in layouts if layout not in llm.started.runner.launched.layouts]
    with compile_bar(progress) as on_program:
        compile_all(llm.started.runner, missing, on_program=on_program)
    return len(layouts)


def compile_plain(llm: LLM, progress: bool) -> None:
    """Compiles the programs of all steps that hold greedy requests alone, whatever their number."""
    runner = llm.started.runner
    greedy = runner.buckets.has_greedy_programs
    layouts = [layout for layout in runner.buckets.plain_layouts() if layout.is_greedy == greedy]
    with compile_bar(progress) as on_program:
        compile_all(runner, [each for each in layouts if each not in runner.launched.layouts], on_program=on_program)


def _run(llm: LLM, workload: Workload, progress: bool) -> tuple[list[RequestOutput], float]:
    prompts, params = [list(prompt) for prompt in workload.prompts], sampling_params(workload)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=progress)
    seconds = time.perf_counter() - begin
    made = [len(output.outputs[0].token_ids) for output in outputs]
    assert made == list(workload.output_lens), "a request got another number of tokens than it asked for"
    return outputs, seconds


def _latencies(outputs: Sequence[RequestOutput]) -> dict[str, object]:
    waits = [output.metrics.time_to_first_token_s for output in outputs]
    firsts = [wait for wait in waits if wait is not None]
    return {
        "ttft_s": round(statistics.median(firsts), 4),
        "ttft_s_quantiles": quantiles(firsts),
        "total_s_quantiles": quantiles([output.metrics.total_s for output in outputs]),
    }
