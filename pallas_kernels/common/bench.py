"""Timing of kernels: many dependent calls in one scan, wall clock, results as JSON lines."""

import concurrent.futures
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

NOMINAL_BYTES_PER_S = 4.8e12  # datasheet of an H200
PRACTICAL_BYTES_PER_S = 4.3e12  # measured device-to-device copy on an H200


class Reporter:
    """Prints results as they come, appends them to a file, and keeps them for the summary."""

    def __init__(self, path: Path | None, *, budget_s: float) -> None:
        self._file = path.open("w") if path else None
        self._deadline = time.monotonic() + budget_s
        self.rows: list[dict[str, Any]] = []

    @property
    def is_out_of_time(self) -> bool:
        """Whether the time budget is spent."""
        return time.monotonic() > self._deadline

    def emit(self, **row: Any) -> None:
        """Writes one result."""
        self.rows.append(row)
        line = json.dumps(row)
        print(line, flush=True)
        if self._file:
            self._file.write(line + "\n")
            self._file.flush()

    def guarded(self, label: dict[str, Any], function: Callable[[], Any]) -> Any:
        """Returns what the function returns, or None after reporting whatever it raised."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(function)
            error = future.exception()
        if error is not None:
            self.emit(**label, error=f"{type(error).__name__}: {error}"[:400])
            return None
        return future.result()

    def guarded_all(self, tasks: Sequence[tuple[dict[str, Any], Callable[[], Any]]], *, num_threads: int = 8) -> None:
        """Runs labelled functions in threads; each that raises is reported, and the others go on."""
        with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
            futures = [(label, pool.submit(function)) for label, function in tasks]
        for label, future in futures:
            error = future.exception()
            if error is not None:
                self.emit(**label, error=f"{type(error).__name__}: {error}"[:400])

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One program to check and time.

    Attributes:
      label: what the result is filed under.
      program: a function of `arguments` that makes `num_calls` dependent calls.
      arguments: of the program.
      num_calls: calls of the kernel in one run of the program.
      num_bytes: least bytes that one call has to move.
      num_flops: operations of one call, where they and not the bytes bound it.
      check: returns the relative error of one call, or None where nothing is to be compared.
      tolerance: largest error that is right.
    """

    label: dict[str, Any]
    program: Callable[..., Any]
    arguments: tuple[Any, ...]
    num_calls: int
    num_bytes: float
    num_flops: float = 0.0
    check: Callable[[], float] | None = None
    tolerance: float = 1e-2


def relative_error(found: jax.Array, expected: jax.Array) -> float:
    """Returns |found - expected| / |expected| in float64; NaN where either has one."""
    a, b = np.asarray(found).astype(np.float64), np.asarray(expected).astype(np.float64)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def _time_us(compiled: Callable[..., Any], job: Job, *, num_runs: int) -> tuple[float, float]:
    """Returns the least and the median microseconds of a call; the first three runs build and warm up graphs."""
    for _ in range(3):
        jax.block_until_ready(compiled(*job.arguments))
    times = []
    for _ in range(num_runs):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*job.arguments))
        times.append((time.perf_counter() - start) / job.num_calls * 1e6)
    return min(times), statistics.median(times)


def _prepare(job: Job) -> tuple[Callable[..., Any], float | None]:
    """Returns the compiled program of a job, and the error that its check found."""
    compiled = jax.jit(job.program).lower(*job.arguments).compile()
    return compiled, job.check() if job.check else None


def run_jobs(jobs: Sequence[Job], reporter: Reporter, *, num_threads: int = 8, num_runs: int = 7) -> None:
    """Compiles and checks the jobs in threads, then times them one after the other.

    A job that fails is reported with its error, one whose check fails is reported and not timed, and when the budget is
    spent the rest is reported as NOT RUN.
    """
    if reporter.is_out_of_time:
        for job in jobs:
            reporter.emit(**job.label, status="NOT RUN: budget spent")
        return
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(_prepare, job) for job in jobs]
    for job, future in zip(jobs, futures, strict=True):
        failure = future.exception()
        if failure is not None:
            reporter.emit(**job.label, error=f"{type(failure).__name__}: {failure}"[:400])
            continue
        compiled, error = future.result()
        if error is not None and not error < job.tolerance:
            reporter.emit(**job.label, status="WRONG", relative_error=error)
            continue
        reporter.guarded(job.label, functools.partial(_measure, job, compiled, error, reporter, num_runs))


def _measure(job: Job, compiled: Callable[..., Any], error: float | None, reporter: Reporter, num_runs: int) -> None:
    least, median = _time_us(compiled, job, num_runs=num_runs)
    reporter.emit(
        **job.label,
        us=round(least, 3),
        us_median=round(median, 3),
        gb_per_s=round(job.num_bytes / least / 1e3, 1),
        share_of_4_3=round(job.num_bytes / (least * 1e-6) / PRACTICAL_BYTES_PER_S, 3),
        share_of_4_8=round(job.num_bytes / (least * 1e-6) / NOMINAL_BYTES_PER_S, 3),
        tflop_per_s=round(job.num_flops / least / 1e6, 1),
        relative_error=error,
    )


def print_summary(reporter: Reporter) -> None:
    """Prints for each case the best tiles beside XLA, and counts what failed or did not run."""
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in reporter.rows:
        if "us" in row:
            cases.setdefault((row["kernel"], row["case"]), []).append(row)
    print(f"\n{'case':44} {'best tiles':34} {'us':>8} {'GB/s':>7} {'of 4.3':>7} {'XLA us':>8}")
    for (kernel, case), rows in cases.items():
        ours = min((r for r in rows if r["tiles"] != "xla"), key=lambda r: float(r["us"]), default=None)
        xla = min((float(r["us"]) for r in rows if r["tiles"] == "xla"), default=float("nan"))
        if ours is None:
            print(f"{kernel + ' ' + case:44} {'-':34} {'':8} {'':7} {'':7} {xla:8.2f}")
            continue
        numbers = f"{ours['us']:8.2f} {ours['gb_per_s']:7.0f} {ours['share_of_4_3']:7.1%} {xla:8.2f}"
        print(f"{kernel + ' ' + case:44} {ours['tiles']:34} {numbers}")
    wrong = [r for r in reporter.rows if r.get("status") in ("WRONG", "FAILED") or "error" in r]
    skipped = [r for r in reporter.rows if str(r.get("status", "")).startswith("NOT RUN")]
    print(f"\n{len(reporter.rows)} results, {len(wrong)} wrong or failed, {len(skipped)} not run")
    sys.stdout.flush()
