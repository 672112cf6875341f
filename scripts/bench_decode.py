"""Times decode steps of the engine's own step program on random weights of a model shape, from a checkout.

  PYTHONPATH=. python scripts/bench_decode.py --shape=llama-3.2-1b --dtype=bfloat16 --batches=1,8,64 --out=decode.jsonl

Rows are greedy, their cache blocks lie in random places, sampled tokens are fed back on the device, and several steps
share a dispatch. Before a speed is printed, the tokens of the timed runs are forced through the plain forward of the
same weights in float32, all layers: where the mean difference of log-probabilities is over 0.02, there is no speed, and
the exit code is 1.

Prints a JSON line a batch (`--out` keeps them): milliseconds of a step, output tokens a second, and the share of the
byte roofline, which reads each weight once and the keys and values of the mean context once, at 4.3 TB/s (measured copy
of an H200). `--parts` adds the parts of a layer, each by itself; `--engine` the same batch through scheduler and
engine; `--prefill_lens` whole prompts in one step. The last lines are a table; scripts/plot_decode.py draws what is in
the files of several runs.
"""

import argparse
import json
import sys
from pathlib import Path

from pallas_kernels.common.bench import PRACTICAL_BYTES_PER_S
from photon_jax.bench.decode import TOLERANCE, DecodeBench, DecodeSpec, read_bytes, time_engine, time_prefill
from photon_jax.bench.decode_parts import time_parts
from photon_jax.bench.report import describe_machine
from photon_jax.bench.shapes import SHAPES, draw_weights, shape_config
from photon_jax.config import make_engine_config
from photon_jax.engine.start import StartedEngine, start_engine
from photon_jax.models.config import QuantizationConfig

Record = dict[str, object]


def main() -> int:
    """Starts one engine, times it at each batch size; returns 1 if a batch was not right."""
    flags = parse_flags()
    quantization = QuantizationConfig(group_size=flags.group_size, has_embedding=True) if flags.quantization else None
    config = shape_config(flags.shape, flags.dtype, quantization)
    lines = flags.out.open("w") if flags.out else None

    def emit(record: Record) -> None:
        print(json.dumps(record), flush=True)
        if lines:
            lines.write(json.dumps(record) + "\n")
            lines.flush()

    started = start(flags, draw_weights(config), config)
    names = ("shape", "quantization", "group_size", "kv_dtype", "context")
    about = {name: getattr(flags, name) for name in names} | {"dtype": config.dtype} | describe_machine()
    about |= {"kernels": str(started.runner.config.kernels), "steps_per_dispatch": flags.steps_per_dispatch}
    emit({"start_s": round(started.seconds, 2), "max_num_seqs": started.engine.scheduler.max_num_seqs} | about)
    for length in flags.prefill_lens:
        emit({"prefill_len": length, "ms": milliseconds(time_prefill(started, length, repeats=flags.repeats))})
    records = []
    for batch in flags.batches:
        spec = DecodeSpec(batch=batch, prompt_len=flags.context, num_steps=flags.steps, repeats=flags.repeats)
        records.append(time_batch(started, spec, flags) | about)
        emit(records[-1])
    print_table(records)
    if lines:
        lines.close()
    return int(any("error" in record for record in records))


def parse_flags() -> argparse.Namespace:
    """Returns the flags, lists as lists of numbers."""

    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",") if each]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.2-1b")
    parser.add_argument("--dtype", default="auto", help="of weights, activations and cache")
    parser.add_argument("--quantization", choices=["int8"], help="of all linear layers, embedding and head included")
    parser.add_argument("--group_size", type=int, default=128, help="inputs per scale of int8 weights")
    parser.add_argument("--kv_dtype", default="auto", choices=["auto", "int8"])
    parser.add_argument("--batches", type=numbers, default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=100, help="tokens of each row before the first decode step")
    parser.add_argument("--steps", type=int, default=128, help="a multiple of --steps_per_dispatch")
    parser.add_argument("--steps_per_dispatch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of all the steps; the median counts")
    parser.add_argument("--prefill_lens", type=numbers, default=[], help="prompts to time, each in one step")
    parser.add_argument("--parts", type=numbers, default=[], help="batches of which to time the parts of a layer too")
    parser.add_argument("--engine", action="store_true", help="time the batches through scheduler and engine too")
    parser.add_argument("--linear", help="implementation of the linear layers; unset: auto")
    parser.add_argument("--attention", help="implementation of attention; unset: auto")
    parser.add_argument("--invariant", action="store_true", help="kernels that give a row its bits in any company")
    parser.add_argument("--out", type=Path, help="file for the JSON lines")
    flags = parser.parse_args()
    if flags.steps % flags.steps_per_dispatch or flags.repeats < 1:
        parser.error("--steps must be a multiple of --steps_per_dispatch, and --repeats at least 1")
    return flags


def start(flags: argparse.Namespace, params: object, config: object) -> StartedEngine:
    """Returns an engine that holds the largest batch and the longest prompt."""
    longest = max([flags.context + flags.steps + 1, *(length + 1 for length in flags.prefill_lens)])
    block_size, max_num_seqs = 64, max(flags.batches)
    engine_config = make_engine_config(
        None,
        dtype=config.dtype,
        warmup="lazy",
        kv_dtype=flags.kv_dtype,
        block_size=block_size,
        num_blocks=max(max_num_seqs * -(-(flags.context + flags.steps) // block_size), -(-longest // block_size)) + 1,
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max([2048, max_num_seqs, *flags.prefill_lens]),
        max_steps_per_dispatch=flags.steps_per_dispatch,
        linear=flags.linear,
        attention=flags.attention,
        invariant=flags.invariant,
    )
    return start_engine(params, config, engine_config)


def time_batch(started: StartedEngine, spec: DecodeSpec, flags: argparse.Namespace) -> Record:
    """Returns the record of one batch, with an error in the place of speeds where its tokens were not right."""
    bench = DecodeBench(started, spec)
    run = bench.run()
    record = {
        "batch": spec.batch,
        "steps": spec.num_steps,
        "mean_logprob_difference": round(run.difference, 6),
        "num_checked_tokens": run.num_checked,
        "num_outcomes": run.num_outcomes,
    }
    if not run.difference <= TOLERANCE:
        return record | {"error": f"log-probabilities differ from float32 by {run.difference:.4f}, over {TOLERANCE}"}
    record |= {
        "step_ms": milliseconds(run.step_s),
        "step_ms_runs": [milliseconds(each) for each in run.step_s_runs],
        "tokens_per_s": round(run.tokens_per_s, 1),
        "gb_per_step": round(run.num_bytes / 1e9, 4),
        "roofline_share": round(run.num_bytes / run.step_s / PRACTICAL_BYTES_PER_S, 3),
    }
    if flags.engine:
        engine_s, host_s = time_engine(started, spec)
        record |= {"engine_step_ms": milliseconds(engine_s), "host_work_ms": milliseconds(host_s)}
        record |= {"engine_tokens_per_s": round(spec.batch / engine_s, 1)}
    if spec.batch in flags.parts:
        kv_bytes = int(run.num_bytes - read_bytes(started.runner.params))
        for name, seconds, weight_bytes in time_parts(started, bench.decode_steps[0], repeats=flags.repeats):
            num_bytes = kv_bytes if name == "attention" else weight_bytes
            share = num_bytes / seconds / PRACTICAL_BYTES_PER_S
            record |= {f"{name}_ms": milliseconds(seconds), f"{name}_share": round(share, 3)}
    return record


def milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def print_table(records: list[Record]) -> None:
    """Prints a line a batch; parts that were timed follow it."""
    print(f"\n{'batch':>6} {'context':>8} {'ms a step':>10} {'tokens/s':>10} {'of 4.3 TB/s':>12} {'difference':>11}")
    for record in records:
        head = f"{record['batch']:>6} {record['context']:>8}"
        if "error" in record:
            print(f"{head} WRONG: {record['error']}")
            continue
        share, difference = record["roofline_share"], record["mean_logprob_difference"]
        print(f"{head} {record['step_ms']:>10} {record['tokens_per_s']:>10,} {share:>12.1%} {difference:>11}")
        parts = [name.removesuffix("_share") for name in record if name.endswith("_share") and name != "roofline_share"]
        for name in parts:
            print(f"{'':>6} {name:>18} {record[f'{name}_ms']:>10} {'':>10} {record[f'{name}_share']:>12.1%}")


if __name__ == "__main__":
    sys.exit(main())
