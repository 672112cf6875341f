"""Times photon-bench and Hugging Face transformers in turn, on one GGUF file and the same settings.

Run it with a Python that has torch, transformers, accelerate and gguf; photon_jax stays in an environment of its own:

  python scripts/bench_against_transformers.py --gguf=MODEL.gguf --photon_bench=.venv/bin/photon-bench

Each round runs photon-bench, then transformers, so that both meet the same machine; the median of the rounds counts.
Both get random token ids, decode greedily and are stopped by nothing but the length; the prefill time is that of the
same prompts with one output token. It prints a Markdown table with the ratios.

The flags are argparse's: absl is no dependency of the Python that runs this.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time

RATES = ("prefill_tokens_per_s", "decode_tokens_per_s", "output_tokens_per_s")
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    batch_sizes: tuple[int, ...]
    prompt_len: int
    output_len: int
    dtype: str
    threads: int


def rates_of(settings: Settings, batch_size: int, prefill_s: float, total_s: float) -> dict[str, float]:
    """Returns the rates that photon-bench prints, from the same two times."""
    num_output = batch_size * settings.output_len
    return {
        "prefill_tokens_per_s": batch_size * settings.prompt_len / prefill_s,
        "decode_tokens_per_s": (num_output - batch_size) / (total_s - prefill_s),
        "output_tokens_per_s": num_output / total_s,
    }


class Transformers:
    """The reference engine: the model loaded once, timed per batch size."""

    def __init__(self, gguf: str, settings: Settings) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(settings.threads)
        folder, name = os.path.split(os.path.abspath(gguf))
        self._torch = torch
        self._settings = settings
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=getattr(torch, settings.dtype)
        ).eval()
        # Nothing but the length may end a sequence.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def run(self, batch_size: int, seed: int) -> dict[str, float]:
        prefill_s = self._time(batch_size, seed, 1)
        return rates_of(
            self._settings, batch_size, prefill_s, self._time(batch_size, seed + 500, self._settings.output_len)
        )

    def _time(self, batch_size: int, seed: int, num_tokens: int) -> float:
        torch = self._torch
        generator = torch.Generator().manual_seed(seed)
        shape = (batch_size, self._settings.prompt_len)
        ids = torch.randint(0, self._model.config.vocab_size, shape, generator=generator)
        started = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )
        elapsed_s = time.perf_counter() - started
        assert out.shape == (batch_size, shape[1] + num_tokens), f"unexpected output shape {tuple(out.shape)}"
        return elapsed_s


def run_photon(command: str, gguf: str, settings: Settings, linear: str) -> dict[int, dict[str, object]]:
    """Returns photon-bench's record by batch size; it warms up and times one run of each."""
    done = subprocess.run(
        [
            command,
            f"--model={gguf}",
            f"--batch_sizes={','.join(map(str, settings.batch_sizes))}",
            f"--prompt_len={settings.prompt_len}",
            f"--output_len={settings.output_len}",
            f"--dtype={settings.dtype}",
            f"--linear={linear}",
            "--repeats=1",
            "--noprogress",
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return {record["batch_size"]: record for record in records}


def measure(options: argparse.Namespace, settings: Settings) -> tuple[dict[str, dict[int, list]], dict[int, list]]:
    """Returns our records by --linear and batch size, and those of transformers by batch size, one a round."""
    reference = Transformers(options.gguf, settings)
    for batch_size in settings.batch_sizes:
        reference.run(batch_size, seed=0)  # warm-up
    linears = options.linear.split(",") if options.photon_bench else []
    ours: dict[str, dict[int, list]] = {linear: {size: [] for size in settings.batch_sizes} for linear in linears}
    theirs: dict[int, list] = {batch_size: [] for batch_size in settings.batch_sizes}
    for number in range(1, options.rounds + 1):
        for linear in linears:
            for batch_size, record in run_photon(options.photon_bench, options.gguf, settings, linear).items():
                ours[linear][batch_size].append(record)
        for batch_size in settings.batch_sizes:
            theirs[batch_size].append(reference.run(batch_size, seed=1_000 * number + batch_size))
        print(f"round {number} of {options.rounds} done", file=sys.stderr)
    return ours, theirs


def median_rates(records: list) -> dict[str, float]:
    return {rate: statistics.median(record[rate] for record in records) for rate in RATES}


def table(settings: Settings, ours: dict[str, dict[int, list]], theirs: dict[int, list]) -> str:
    """Returns the Markdown table, tokens per second, with the ratio to transformers on each row of ours."""
    rows = [
        "| engine | batch | prefill | decode | output | output / transformers |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for batch_size in settings.batch_sizes:
        reference = median_rates(theirs[batch_size])
        engines = [(f"photon_jax, linear={linear}", median_rates(runs[batch_size])) for linear, runs in ours.items()]
        for name, rates in [*engines, ("transformers", reference)]:
            cells = [f"{rates[rate]:.1f}" for rate in RATES]
            ratio = f"{rates['output_tokens_per_s'] / reference['output_tokens_per_s']:.2f}"
            rows.append("| " + " | ".join([name, str(batch_size), *cells, ratio]) + " |")
    return "\n".join(rows)


def notes(options: argparse.Namespace, settings: Settings, ours: dict[str, dict[int, list]]) -> str:
    """Returns what the table was measured with."""
    reference = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    lines = [
        f"Tokens/s, {os.path.basename(options.gguf)}, {settings.dtype}, prompt {settings.prompt_len}, "
        f"{settings.output_len} new, {settings.threads} threads, median of {options.rounds} rounds in turn; "
        f"{platform.machine()}, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name, version in reference.items())
        + f"; host peak of transformers {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB."
    ]
    for linear, runs in ours.items():
        last = runs[settings.batch_sizes[0]][-1]
        versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
        largest = max(settings.batch_sizes)
        peak_gib = runs[largest][-1]["host_peak_rss_bytes"] / 2**30
        lines.append(f"photon-bench --linear={linear}: {last['device']}, {versions}; host peak {peak_gib:.2f} GiB.")
        first, top = median_rates(runs[min(settings.batch_sizes)]), median_rates(runs[largest])
        gain = top["output_tokens_per_s"] / first["output_tokens_per_s"]
        lines.append(f"It makes at batch {largest} {gain:.2f} times the tokens of batch {min(settings.batch_sizes)}.")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", required=True, help="the model file")
    parser.add_argument("--photon_bench", help="path of the photon-bench command; unset: transformers alone")
    parser.add_argument("--linear", default="auto,xla", help="values of photon-bench's --linear, comma-separated")
    parser.add_argument("--batch_sizes", default="1,8", help="comma-separated")
    parser.add_argument("--prompt_len", type=int, default=128)
    parser.add_argument("--output_len", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--threads", type=int, default=2, help="CPUs that either engine may use")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    settings = Settings(
        batch_sizes=tuple(int(size) for size in options.batch_sizes.split(",")),
        prompt_len=options.prompt_len,
        output_len=options.output_len,
        dtype=options.dtype,
        threads=options.threads,
    )
    # Both engines inherit it; XLA takes its number of threads from the CPUs it may use.
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < settings.threads:
        sys.exit(f"--threads={settings.threads}, but this process may use {len(allowed)} CPUs; lower it")
    os.sched_setaffinity(0, allowed[: settings.threads])
    ours, theirs = measure(options, settings)
    print(table(settings, ours, theirs), notes(options, settings, ours), sep="\n\n")


if __name__ == "__main__":
    main()
