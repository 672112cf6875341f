"""photon-bench: how fast the engine serves random prompts.

  photon-bench --model=demo --batch_sizes=1,8 --prompt_len=128 --output_len=128 --dtype=float32
  photon-bench --shape=llama-3.2-1b --num_requests=2000 --lengths=lognormal --max_num_seqs=256
  photon-bench --shape=llama-3.2-1b --num_requests=500 --lengths=lognormal --rates=50%,80% --plot=latency.png
  photon-bench --url=http://localhost:8000/v1 --model=NAME --num_requests=100 --rates=2

The first form prints one line of JSON for each batch size: what ran, where, and the median of --repeats runs after one
warm-up run; its prefill time is that of the same prompts with one output token each. The second serves a mix of
requests that all come at once, and also says where the time went; the third serves it as it comes at given rates, in
requests a second or as shares of those served when all come at once, and says how long requests and tokens took; the
last one asks a server, without --rates for all of it at once. --shape takes random weights of a model's shape.

Prompts are random token ids, greedy, and no end-of-sequence id stops them; each run has new prompts, so that a prefix
cache can't answer for them.
"""

import asyncio
import dataclasses
import json
import math
import os
import time
import typing
from collections.abc import Iterator
from typing import NamedTuple, cast

from absl import flags

import photon_jax
from photon_jax.bench.batches import Setting, bench_batch, time_replay, time_text
from photon_jax.bench.offline import bench_offline, compile_plain, describe_steps
from photon_jax.bench.online import Timeline, describe_online, engine_sender, run_online, timelines_s, url_sender
from photon_jax.bench.report import describe_machine, peak_rss_bytes, plot
from photon_jax.bench.shapes import SHAPES, draw_weights, shape_config
from photon_jax.bench.workloads import Lengths, Mix, Workload, WorkloadSpec, make_workload
from photon_jax.cli.command import define_common_flags, load_llm, run_command, shows_progress, use_compile_cache
from photon_jax.cli.flags import engine_fields_from_flags, errors_name_flags
from photon_jax.client.async_llm import AsyncLLM
from photon_jax.config import EngineConfig, SchedulerConfig, make_engine_config
from photon_jax.engine.metrics import CompileCounter
from photon_jax.errors import ConfigError
from photon_jax.loading import weights_quantization

MEAN_LENS = {"fixed": (128, 128), "uniform": (128, 128), "lognormal": (220, 180)}  # prompt, output


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines every flag of the command."""
    flags.DEFINE_enum(
        "shape",
        None,
        sorted(SHAPES),
        "Random weights of this shape, with --dtype and --quantization, instead of --model.",
        flag_values=flag_values,
    )
    flags.DEFINE_list(
        "batch_sizes", ["1", "8"], "Requests that run together, one setting each.", flag_values=flag_values
    )
    flags.DEFINE_integer("repeats", 3, "Timed runs; the median counts.", lower_bound=1, flag_values=flag_values)
    flags.DEFINE_bool(
        "replay", False, "Time the same steps also back to back, with no scheduler.", flag_values=flag_values
    )
    flags.DEFINE_bool(
        "text",
        False,
        "Time the batches also with a stop string and the log-probability of each token.",
        flag_values=flag_values,
    )
    flags.DEFINE_list(
        "rates",
        [],
        "Requests per second at which a mix comes, one setting each; unset: all at once. 50%: half of those that were "
        "served when all came at once, which is measured first.",
        flag_values=flag_values,
    )
    flags.DEFINE_string(
        "url",
        None,
        "Measure the OpenAI-compatible server at this address, such as http://localhost:8000/v1, by the name --model.",
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "max_concurrency",
        None,
        "Most requests of --rates or --url on their way at a time; unset: no bound.",
        lower_bound=1,
        flag_values=flag_values,
    )
    flags.DEFINE_string("plot", None, "Picture to draw of what was measured, .png or .svg.", flag_values=flag_values)
    _define_mix_flags(flag_values)
    define_common_flags(flag_values)


def _define_mix_flags(flag_values: flags.FlagValues) -> None:
    flags.DEFINE_integer(
        "num_requests", 0, "Requests of a mix; 0: --batch_sizes.", lower_bound=0, flag_values=flag_values
    )
    flags.DEFINE_enum(
        "lengths",
        "fixed",
        list(typing.get_args(Lengths)),
        "How the lengths of a mix are drawn: all the mean, from 1 to twice the mean, or lognormal as in chats.",
        flag_values=flag_values,
    )
    flags.DEFINE_enum(
        "mix",
        "plain",
        list(typing.get_args(Mix)),
        "shared_prefix: --prefix_len equal tokens before each prompt; long_context: as many more of its own before "
        "every eighth.",
        flag_values=flag_values,
    )
    for name, what in (("prompt_len", "Prompt"), ("output_len", "Output")):
        flags.DEFINE_integer(
            name,
            None,
            f"{what} tokens of a request, in a mix their mean; unset: 128, lognormal {MEAN_LENS['lognormal']}.",
            lower_bound=1,
            flag_values=flag_values,
        )
    flags.DEFINE_integer("prefix_len", 2048, "Tokens, see --mix.", lower_bound=1, flag_values=flag_values)


def main(flag_values: flags.FlagValues) -> None:
    """Loads the model once and prints a line for each setting."""
    if flag_values.url:
        records = bench_server(flag_values)
    elif flag_values.num_requests:
        records = bench_mix(flag_values)
    else:
        records = bench_batches(flag_values)
    shown = []
    for record in records:
        print(json.dumps(record, allow_nan=False), flush=True)
        shown.append(record)
    if flag_values.plot:
        plot(shown, flag_values.plot)


def bench_batches(flag_values: flags.FlagValues) -> Iterator[dict[str, object]]:
    """Yields a record for each batch size."""
    settings = settings_from_flags(flag_values)
    config = engine_config_for(settings, engine_fields_from_flags(flag_values))
    begin = time.perf_counter()
    with CompileCounter() as compiles, load(flag_values, config) as llm:
        described = describe(flag_values, llm, config, time.perf_counter() - begin)
        for index, setting in enumerate(settings):
            record = bench_batch(llm, setting, flag_values.repeats, compiles, first_seed=1_000 * index)
            if flag_values.text:
                record |= time_text(llm, setting, flag_values.repeats, first_seed=1_000 * index + 900)
            if flag_values.replay:
                record |= time_replay(llm, setting, flag_values.repeats)
            yield described | record


def bench_mix(flag_values: flags.FlagValues) -> Iterator[dict[str, object]]:
    """Yields a record of a mix that comes at once, and one for each rate at which it comes.

    With rates in requests per second alone there is none of it at once.
    """
    spec, rates = spec_from_flags(flag_values), rates_from_flags(flag_values)
    longest = make_workload(spec, vocab_size=2, seed=0).max_len
    config = _make_config({"max_model_len": longest} | engine_fields_from_flags(flag_values))
    begin = time.perf_counter()
    progress = shows_progress(flag_values)
    with load(flag_values, config) as llm:
        described = describe(flag_values, llm, config, time.perf_counter() - begin) | dataclasses.asdict(spec)
        at_once = 0.0
        if not rates or any(rate.is_share for rate in rates):
            record = bench_offline(
                llm, spec, repeats=flag_values.repeats, replays=flag_values.replay, progress=progress
            )
            at_once = spec.num_requests / cast(float, record["total_s"])
            yield described | record | {"memory": llm.memory_report(), "host_peak_rss_bytes": peak_rss_bytes()}
        if rates:
            compile_plain(llm, progress)
        for index, rate in enumerate(rates):
            workload = make_workload(spec, vocab_size=llm.config.vocab_size, seed=101 + index)
            before = llm.metrics()
            timelines = asyncio.run(_serve(llm, workload, rate.requests_per_s(at_once), flag_values.max_concurrency))
            online = describe_online(timelines, rate.requests_per_s(at_once))
            yield described | online | describe_steps(llm.metrics().since(before), timelines_s(timelines))


async def _serve(llm: "photon_jax.LLM", workload: Workload, rate: float, most: int | None) -> list[Timeline]:
    async with AsyncLLM(llm) as engine:
        return await run_online(engine_sender(engine), workload, rate, max_concurrency=most)


def bench_server(flag_values: flags.FlagValues) -> Iterator[dict[str, object]]:
    """Yields a record for each rate at which a mix comes to an OpenAI-compatible server, or one of it at once.

    Raises:
      ConfigError: there is no mix, or nothing answers at the address.
    """
    if not flag_values.num_requests:
        raise ConfigError("--url needs --num_requests, such as --num_requests=100, and takes --rates, such as 1,2")
    spec = spec_from_flags(flag_values)
    for rate in rates_from_flags(flag_values) or [Rate(math.inf)]:
        workload = make_workload(spec, vocab_size=1 << 16, seed=0)
        timelines = asyncio.run(_ask(flag_values, workload, rate.value))
        described = {"url": flag_values.url, "model": flag_values.model} | dataclasses.asdict(spec)
        described["max_concurrency"] = flag_values.max_concurrency
        yield described | describe_online(timelines, rate.value)


async def _ask(flag_values: flags.FlagValues, workload: Workload, rate: float) -> list[Timeline]:
    async with url_sender(flag_values.url, flag_values.model) as send:
        return await run_online(send, workload, rate, max_concurrency=flag_values.max_concurrency)


class Rate(NamedTuple):
    """Requests per second, or the share of those that are served when all come at once."""

    value: float
    is_share: bool = False

    def requests_per_s(self, at_once: float) -> float:
        """Returns the rate, given how many a second are served when all come at once."""
        return self.value * at_once if self.is_share else self.value


def rates_from_flags(flag_values: flags.FlagValues) -> list[Rate]:
    """Returns the rates.

    Raises:
      ConfigError: one is no positive number, or a share of what --url serves.
    """
    rates = []
    for text in flag_values.rates:
        is_share = text.endswith("%")
        try:
            value = float(text.removesuffix("%")) / (100.0 if is_share else 1.0)
        except ValueError:
            value = math.nan
        if not 0.0 < value < math.inf:
            raise ConfigError(f"--rates must be positive numbers separated by commas, got {text!r}")
        if is_share and flag_values.url:
            raise ConfigError(f"--rates of a server must be requests per second, got {text!r}")
        rates.append(Rate(value, is_share))
    return rates


def load(flag_values: flags.FlagValues, config: EngineConfig) -> "photon_jax.LLM":
    """Returns the model that the flags name, or random weights of the shape that they name."""
    if flag_values.shape is None:
        return load_llm(flag_values, config)
    use_compile_cache(flag_values)
    with errors_name_flags():
        shape = shape_config(flag_values.shape, config.dtype, weights_quantization(config))
        return photon_jax.LLM(
            params=draw_weights(shape), config=shape, engine_config=config, progress=shows_progress(flag_values)
        )


def spec_from_flags(flag_values: flags.FlagValues) -> WorkloadSpec:
    """Returns what the flags say of a mix."""
    prompt_len, output_len = MEAN_LENS[flag_values.lengths]
    return WorkloadSpec(
        num_requests=flag_values.num_requests,
        lengths=flag_values.lengths,
        prompt_len=flag_values.prompt_len or prompt_len,
        output_len=flag_values.output_len or output_len,
        mix=flag_values.mix,
        prefix_len=flag_values.prefix_len,
    )


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
    prompt_len, output_len = MEAN_LENS["fixed"]
    return [
        Setting(
            batch_size=size,
            prompt_len=flag_values.prompt_len or prompt_len,
            output_len=flag_values.output_len or max(output_len, 2),
        )
        for size in sizes
    ]


def engine_config_for(settings: list[Setting], fields: dict[str, object]) -> EngineConfig:
    """Returns the engine config of the given fields, with limits that the settings need where none were given."""
    needed: dict[str, object] = {
        "max_model_len": max(s.prompt_len + s.output_len for s in settings),
        "max_num_seqs": max(max(s.batch_size for s in settings), SchedulerConfig().max_num_seqs),
    }
    if "max_num_batched_tokens" in fields:
        needed.pop("max_num_seqs")  # the two go together: one that was given decides
    return _make_config(needed | fields)


def _make_config(fields: dict[str, object]) -> EngineConfig:
    with errors_name_flags():
        return make_engine_config(None, **fields)


def describe(
    flag_values: flags.FlagValues, llm: "photon_jax.LLM", config: EngineConfig, load_s: float
) -> dict[str, object]:
    """Returns what identifies a measurement: device, versions, model and engine settings."""
    shape = llm.config
    return {
        "engine": "photon_jax",
        **describe_machine(),
        "model": flag_values.shape or os.path.basename(os.path.normpath(flag_values.model)),
        "architecture": shape.architecture,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "dtype": shape.dtype,
        "quantization": config.quantization,
        "kernels": dataclasses.asdict(config.kernels),
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "load_s": round(load_s, 3),
    }


def run() -> None:
    """Entry point of the installed command."""
    run_command(main, define_flags, __doc__)


if __name__ == "__main__":
    run()
