"""photon-bench: offline throughput of the engine on random prompts.

  photon-bench --model=demo --batch_sizes=1,8 --prompt_len=128 --output_len=128 --dtype=float32

Prints one line of JSON for each batch size: what ran, where, and the median of --repeats runs after one warm-up run.
Prompts are random token ids, greedy, and no end-of-sequence id stops them; each run has new prompts, so that a prefix
cache can't answer for them. The prefill time is that of the same prompts with one output token each.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import sys
import time

import jax
import numpy as np
from absl import flags

import photon_jax
from photon_jax.cli.command import define_common_flags, load_llm, run_command
from photon_jax.cli.flags import engine_fields_from_flags, errors_name_flags
from photon_jax.config import EngineConfig, SchedulerConfig, make_engine_config
from photon_jax.engine.metrics import CompileCounter
from photon_jax.errors import ConfigError
from photon_jax.request import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One point of the benchmark."""

    batch_size: int
    prompt_len: int
    output_len: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Times of one run, seconds."""

    prefill_s: float  # all prompts with one output token each
    total_s: float  # all prompts with all output tokens
    ttft_s: float  # median over the requests of the full run


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines every flag of the command."""
    flags.DEFINE_list(
        "batch_sizes", ["1", "8"], "Requests that run together, one setting each.", flag_values=flag_values
    )
    flags.DEFINE_integer("prompt_len", 128, "Prompt tokens of a request.", lower_bound=1, flag_values=flag_values)
    flags.DEFINE_integer("output_len", 128, "Output tokens of a request.", lower_bound=2, flag_values=flag_values)
    flags.DEFINE_integer("repeats", 3, "Timed runs; the median counts.", lower_bound=1, flag_values=flag_values)
    define_common_flags(flag_values)


def main(flag_values: flags.FlagValues) -> None:
    """Loads the model once and prints a line for each setting."""
    settings = settings_from_flags(flag_values)
    config = engine_config_for(settings, engine_fields_from_flags(flag_values))
    started = time.perf_counter()
    with CompileCounter() as compiles, load_llm(flag_values, config) as llm:
        load_s = time.perf_counter() - started
        described = describe(flag_values.model, llm, config, load_s)
        for index, setting in enumerate(settings):
            record = described | bench(llm, setting, flag_values.repeats, compiles, first_seed=1_000 * index)
            print(json.dumps(record, allow_nan=False), flush=True)


def settings_from_flags(flag_values: flags.FlagValues) -> list[Setting]:
    """Returns the settings, one for each batch size.

    Raises:
      ConfigError: a batch size is no positive integer.
    """
    sizes = []
    for text in flag_values.batch_sizes:
        if not text.strip().isdecimal() or int(text) < 1:
            raise ConfigError(f"--batch_sizes must be positive integers separated by commas, got {text!r}")
        sizes.append(int(text))
    if not sizes:
        raise ConfigError("--batch_sizes is empty; give at least one, such as --batch_sizes=1,8")
    return [
        Setting(batch_size=size, prompt_len=flag_values.prompt_len, output_len=flag_values.output_len) for size in sizes
    ]


def engine_config_for(settings: list[Setting], fields: dict[str, object]) -> EngineConfig:
    """Returns the engine config of the given fields, with limits that the settings need where none were given."""
    needed: dict[str, object] = {
        "max_model_len": max(s.prompt_len + s.output_len for s in settings),
        "max_num_seqs": max(max(s.batch_size for s in settings), SchedulerConfig().max_num_seqs),
    }
    if "max_num_batched_tokens" in fields:
        needed.pop("max_num_seqs")  # the two go together: one that was given decides
    with errors_name_flags():
        return make_engine_config(None, **(needed | fields))


def bench(
    llm: "photon_jax.LLM", setting: Setting, repeats: int, compiles: CompileCounter, *, first_seed: int
) -> dict[str, object]:
    """Returns the rates of one setting: one run to warm up, then the median of `repeats` runs."""
    run_once(llm, setting, first_seed)
    before = compiles.num_compiles
    runs = [run_once(llm, setting, first_seed + 1 + i) for i in range(repeats)]
    prefill_s = statistics.median(run.prefill_s for run in runs)
    total_s = statistics.median(run.total_s for run in runs)
    decode_s = statistics.median(run.total_s - run.prefill_s for run in runs)
    num_output = setting.batch_size * setting.output_len
    return dataclasses.asdict(setting) | {
        "repeats": repeats,
        "prefill_tokens_per_s": round(setting.batch_size * setting.prompt_len / prefill_s, 1),
        "decode_tokens_per_s": round((num_output - setting.batch_size) / decode_s, 1) if decode_s > 0 else None,
        "output_tokens_per_s": round(num_output / total_s, 1),
        "ttft_s": round(statistics.median(run.ttft_s for run in runs), 4),
        "total_s": round(total_s, 4),
        "total_s_runs": [round(run.total_s, 4) for run in runs],
        "host_peak_rss_bytes": peak_rss_bytes(),
        "num_compiles": compiles.num_compiles,
        "num_compiles_while_timed": compiles.num_compiles - before,
    }


def run_once(llm: "photon_jax.LLM", setting: Setting, seed: int) -> Run:
    """Runs the prompts of one seed twice, first for one token each, then for all."""
    prefill_s, _ = _time_generate(llm, setting, seed, num_tokens=1)
    total_s, ttft_s = _time_generate(llm, setting, seed + 500, num_tokens=setting.output_len)
    return Run(prefill_s=prefill_s, total_s=total_s, ttft_s=ttft_s)


def _time_generate(llm: "photon_jax.LLM", setting: Setting, seed: int, *, num_tokens: int) -> tuple[float, float]:
    """Returns the seconds that a batch of random prompts took, and the median time to a request's first token."""
    ids = np.random.default_rng(seed).integers(0, llm.config.vocab_size, (setting.batch_size, setting.prompt_len))
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(ids.tolist(), params, progress=False)
    total_s = time.perf_counter() - started
    made = [len(output.outputs[0].token_ids) for output in outputs]
    assert made == [num_tokens] * setting.batch_size, f"expected {num_tokens} tokens from each request, got {made}"
    waits = [output.metrics.time_to_first_token_s for output in outputs]
    return total_s, statistics.median(wait for wait in waits if wait is not None)


def describe(model: str, llm: "photon_jax.LLM", config: EngineConfig, load_s: float) -> dict[str, object]:
    """Returns what identifies a measurement: device, versions, model and engine settings."""
    device = jax.devices()[0]
    shape = llm.config
    return {
        "engine": "photon_jax",
        "device": f"{jax.device_count()} x {device.device_kind}",
        "platform": device.platform,
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {
            "photon_jax": photon_jax.__version__,
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "model": os.path.basename(os.path.normpath(model)),
        "architecture": shape.architecture,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "dtype": shape.dtype,
        "kernels": dataclasses.asdict(config.kernels),
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "load_s": round(load_s, 3),
    }


def peak_rss_bytes() -> int:
    """Returns the most memory that this process has held on the host."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def run() -> None:
    """Entry point of the installed command."""
    run_command(main, define_flags, __doc__)


if __name__ == "__main__":
    run()
