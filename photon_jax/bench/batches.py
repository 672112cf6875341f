"""Batches of equal requests: rates of prefill and decode at each batch size, with text too, and of bare steps."""

import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from photon_jax.bench.offline import compile_ahead, replay
from photon_jax.bench.report import peak_rss_bytes
from photon_jax.bench.workloads import WorkloadSpec, make_workload
from photon_jax.engine.metrics import CompileCounter
from photon_jax.errors import ConfigError
from photon_jax.llm import LLM
from photon_jax.request import SamplingParams

NEVER = "\u2e2e never \u2e2e"  # a stop string that random tokens don't make


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One point of the benchmark."""

    batch_size: int
    prompt_len: int
    output_len: int

    @property
    def spec(self) -> WorkloadSpec:
        """The same requests as a mix."""
        return WorkloadSpec(num_requests=self.batch_size, prompt_len=self.prompt_len, output_len=self.output_len)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Times of one run, seconds."""

    prefill_s: float  # all prompts with one output token each
    total_s: float  # all prompts with all output tokens
    ttft_s: float  # median over the requests of the full run


def bench_batch(
    llm: LLM, setting: Setting, repeats: int, compiles: CompileCounter, *, first_seed: int
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


def time_replay(llm: LLM, setting: Setting, repeats: int) -> dict[str, object]:
    """Returns the rates of the same steps dispatched back to back, with no scheduler and no text; medians."""
    seconds: dict[int, float] = {}
    for num_tokens in (1, setting.output_len):
        spec = dataclasses.replace(setting.spec, output_len=num_tokens)
        workload = make_workload(spec, vocab_size=llm.config.vocab_size, seed=0)
        compile_ahead(llm, workload, progress=False)
        seconds[num_tokens] = statistics.median([replay(llm, workload) for _ in range(repeats + 1)][1:])
    num_output, total_s = setting.batch_size * setting.output_len, seconds[setting.output_len]
    decode_s = total_s - seconds[1]
    return {
        "replay_output_tokens_per_s": round(num_output / total_s, 1),
        "replay_decode_tokens_per_s": round((num_output - setting.batch_size) / decode_s, 1) if decode_s > 0 else None,
        "replay_s": round(total_s, 4),
    }


def time_text(llm: LLM, setting: Setting, repeats: int, *, first_seed: int) -> dict[str, object]:
    """Returns the rate of the same batch with a stop string and a log-probability for each token, beside its text.

    Raises:
      ConfigError: the model has no tokenizer.
    """
    if llm.tokenizer is None:
        raise ConfigError("--text needs a model with a tokenizer; give its folder with --model, not a --shape")
    runs = [
        _time_generate(llm, setting, first_seed + i, num_tokens=setting.output_len, stop=NEVER, logprobs=1)[0]
        for i in range(repeats + 2)
    ]
    total_s = statistics.median(runs[2:])
    return {
        "text_output_tokens_per_s": round(setting.batch_size * setting.output_len / total_s, 1),
        "text_total_s": round(total_s, 4),
    }


def run_once(llm: LLM, setting: Setting, seed: int) -> Run:
    """Runs the prompts of one seed twice, first for one token each, then for all."""
    prefill_s, _ = _time_generate(llm, setting, seed, num_tokens=1)
    total_s, ttft_s = _time_generate(llm, setting, seed + 500, num_tokens=setting.output_len)
    return Run(prefill_s=prefill_s, total_s=total_s, ttft_s=ttft_s)


def _time_generate(llm: LLM, setting: Setting, seed: int, *, num_tokens: int, **asked: Any) -> tuple[float, float]:
    """Returns the seconds that a batch of random prompts took, and the median time to a request's first token."""
    ids = np.random.default_rng(seed).integers(0, llm.config.vocab_size, (setting.batch_size, setting.prompt_len))
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **asked)
    started = time.perf_counter()
    outputs = llm.generate(ids.tolist(), params, progress=False)
    total_s = time.perf_counter() - started
    made = [len(output.outputs[0].token_ids) for output in outputs]
    assert made == [num_tokens] * setting.batch_size, f"expected {num_tokens} tokens from each request, got {made}"
    waits = [output.metrics.time_to_first_token_s for output in outputs]
    return total_s, statistics.median(wait for wait in waits if wait is not None)
