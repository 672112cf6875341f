"""Times the scores of four-way questions, beside the least time that the arithmetic of their tokens would take.

    PYTHONPATH=. python scripts/bench_score.py --model=FOLDER --questions=QUIZ.jsonl --flops_per_s=790e12

A line of the file has question and choices. Where it has fewer lines than --num_questions, they are asked again under
other numbers. Prints one JSON line: requests (question with one choice) a second, of the median run after one that
compiles, and the roofline: two operations a parameter and computed token, those from the prefix cache left out.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import jax

import photon_jax
from photon_jax.bench.report import describe_machine


def main() -> None:
    """Prints the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--num_questions", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--linear", default="auto")
    parser.add_argument("--flops_per_s", type=float, help="of the device; unset: no roofline")
    parser.add_argument("--max_num_seqs", type=int, default=512)
    parser.add_argument("--max_num_batched_tokens", type=int, default=8192)
    parser.add_argument("--block_size", type=int, default=64)
    flags = parser.parse_args()
    for name in ("num_questions", "repeats", "flops_per_s"):
        value = getattr(flags, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} must be more than 0, got {value}")
    try:
        rows = read_questions(flags.questions)
    except (OSError, ValueError) as error:
        parser.error(f"--questions: {error}")
    settings = {name: getattr(flags, name) for name in ("dtype", "linear", "block_size")}
    settings |= {name: getattr(flags, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    with photon_jax.LLM(flags.model, max_model_len=1024, progress=False, **settings) as llm:
        print(json.dumps(time_scores(llm, rows, flags) | settings | describe_machine()), flush=True)


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of the file; raises ValueError where one is no question."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not row.get("question") or not row.get("choices"):
            raise ValueError(f"line {number} of {path} must have a question and choices")
    if not rows:
        raise ValueError(f"{path} is empty")
    return rows


def time_scores(llm: photon_jax.LLM, rows: list[dict[str, Any]], flags: argparse.Namespace) -> dict[str, object]:
    """Returns the rates; each run asks other questions, by their numbers."""
    runs = []
    for repeat in range(flags.repeats + 1):
        numbers = range(repeat * flags.num_questions, (repeat + 1) * flags.num_questions)
        questions = [f"Question {n + 1}: {rows[n % len(rows)]['question']}\nAnswer:" for n in numbers]
        choices = [[f" {choice}" for choice in rows[n % len(rows)]["choices"]] for n in numbers]
        before, begin = llm.metrics(), time.perf_counter()
        scores = llm.score(questions, choices, progress=False)
        runs.append((time.perf_counter() - begin, llm.metrics().since(before), sum(map(len, scores))))
    total_s = statistics.median(seconds for seconds, _, _ in runs[1:])
    _, metrics, num_requests = next(run for run in runs[1:] if run[0] >= total_s)
    record: dict[str, object] = {
        "model": os.path.basename(os.path.normpath(flags.model)),
        "num_requests": num_requests,
        "requests_per_s": round(num_requests / total_s, 1),
        "total_s": round(total_s, 4),
        "total_s_runs": [round(seconds, 4) for seconds, _, _ in runs],
        "num_computed_tokens": metrics.num_tokens,
        "num_prefix_hit_tokens": metrics.num_prefix_hit_tokens,
        "num_steps": metrics.num_steps,
        "padding_share": round(metrics.padding_share, 4),
        "host_us_per_step": round(metrics.host_us_per_step, 1),
        "wait_us_per_step": round(metrics.wait_us_per_step, 1),
    }
    if flags.flops_per_s:
        num_params = sum(leaf.size for leaf in jax.tree.leaves(llm.params))
        least_s = 2.0 * num_params * metrics.num_tokens / flags.flops_per_s
        record |= {"roofline_s": round(least_s, 4), "roofline_requests_per_s": round(num_requests / least_s, 1)}
        record["share_of_roofline"] = round(least_s / total_s, 4)
    return record


if __name__ == "__main__":
    main()
