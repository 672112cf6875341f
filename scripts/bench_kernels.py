"""Checks and times the Pallas kernels, from a checkout.

On a GPU: `PYTHONPATH=. python scripts/bench_kernels.py --out results.jsonl`. Without one, `--smoke` interprets small
cases. Whole decode steps are timed by scripts/bench_decode.py.
"""

import argparse
import datetime
import platform
import sys
import warnings
from pathlib import Path

import jax
import jax.extend

from pallas_kernels import glue_bench
from pallas_kernels.common.bench import Reporter, print_summary
from pallas_kernels.common.device import device_name
from pallas_kernels.common.tuning import winner_lines
from pallas_kernels.int8_matmul import bench as matmul_bench
from pallas_kernels.paged_attention import bench as attention_bench
from pallas_kernels.prefill_attention import bench as prefill_bench

KERNELS = "what to time: matmul; attention, of decode steps up to 8k of context; long, of 4k to 32k; prefill; glue"


def main() -> int:
    """Runs correctness first, then the timings that the budget allows; returns 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="interpret small cases; no GPU, no timings")
    parser.add_argument("--out", type=Path, help="file for results, one JSON object a line")
    parser.add_argument("--budget_s", type=float, default=270, help="stop starting new cases after this long")
    parser.add_argument("--tuned_dir", type=Path, help="folder for the tables of winners of this run, one per kernel")
    parser.add_argument("--kernels", default="matmul,attention,prefill,long,glue", help=KERNELS)
    parser.add_argument("--rows", default="1,16,8,128", help="rows M of matmuls")
    parser.add_argument("--brief", action="store_true", help="fewer attention cases")
    flags = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*Triton backend is deprecated.*")
    reporter = Reporter(flags.out, budget_s=flags.budget_s)
    versions = {"jax": jax.__version__, "python": platform.python_version(), "device": device_name()}
    reporter.emit(kernel="all", case="versions", **versions, backend=jax.extend.backend.get_backend().platform_version)
    attention_bench.check_correctness(reporter, is_smoke=flags.smoke)
    prefill_bench.check_correctness(reporter, is_smoke=flags.smoke)
    matmul_bench.check_correctness(reporter, is_smoke=flags.smoke)
    if not flags.smoke:
        _run_kernels(reporter, flags)
        print_summary(reporter)
    if flags.tuned_dir:
        _write_winners(reporter, flags.tuned_dir)
    reporter.close()
    failed = [row for row in reporter.rows if row.get("status") in ("FAILED", "WRONG") or "error" in row]
    print(f"{len(failed)} failures", flush=True)
    return 1 if failed else 0


def _run_kernels(reporter: Reporter, flags: argparse.Namespace) -> None:
    matmul_bench.time_glue(reporter)
    rows = [int(m) for m in flags.rows.split(",")]
    # The first rows, then attention, then the others: what a short budget leaves out matters least.
    if "matmul" in flags.kernels:
        matmul_bench.run(reporter, rows=rows[:2])
    if "attention" in flags.kernels:
        attention_bench.run(reporter, is_brief=flags.brief)
    if "prefill" in flags.kernels:
        prefill_bench.run(reporter, is_brief=flags.brief)
    if "long" in flags.kernels:
        attention_bench.run_long(reporter, is_brief=flags.brief)
    if "glue" in flags.kernels:
        glue_bench.run(reporter)
    if "matmul" in flags.kernels:
        matmul_bench.run(reporter, rows=rows[2:])


def _write_winners(reporter: Reporter, folder: Path) -> None:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    names = {"matmul": "int8_matmul"} | {name: name for name in ("paged_attention", "prefill_attention")}
    for kernel, name in names.items():
        rows = [row for row in reporter.rows if row["kernel"] == kernel and "us" in row and "key" in row]
        path = folder / f"{name}_{device_name()}.json"
        path.write_text("".join(line + "\n" for line in winner_lines(rows, jax_version=jax.__version__, date=today)))


if __name__ == "__main__":
    sys.exit(main())
