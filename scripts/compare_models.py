"""Compares settings, or checkpoints of one tokenizer, on a text and on prompts; the first one is the measure.

  PYTHONPATH=. python scripts/compare_models.py --text=prose.txt --json=compared.json --plot=compared.png
  PYTHONPATH=. python scripts/compare_models.py --text=prose.txt
      --setting='float32: dtype=float32' --setting='int8: dtype=float32 quantization=int8 group_size=64'
  PYTHONPATH=. python scripts/compare_models.py --read=compared.json --plot=compared.png

Without --setting it makes the README's table; the rows with our kernels need a GPU. A setting is a name and fields of
LLM: model, dtype, quantization, group_size, int8_activations, kv_dtype, linear, attention. Perplexity, divergence (KL,
nats a token) and the share of equal likeliest tokens come from the plain forward pass over whole windows, which has no
kernels. Perplexity and likeliest tokens are measured again as the engine computes them, with its kernels and cache, and
each window's beginning is continued greedily and compared token by token. With --jobs settings are measured at once,
which hides the time to compile. --read prints the table of results again. A plot needs matplotlib.
"""

import argparse
import importlib.util
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

import photon_jax
from photon_jax.quantization.report import compare_logprobs, text_loss, text_windows, window_logprobs

XLA = "linear=xla attention=xla"
TABLE = (
    f"float32: dtype=float32 {XLA}",
    f"bfloat16: dtype=bfloat16 {XLA}",
    f"int8, groups of 32: dtype=float32 quantization=int8 group_size=32 {XLA}",
    f"int8, groups of 64: dtype=float32 quantization=int8 group_size=64 {XLA}",
    f"int8, groups of 128: dtype=float32 quantization=int8 group_size=128 {XLA}",
    f"int8 KV cache: dtype=float32 kv_dtype=int8 {XLA}",
    f"int8 in 128, int8 KV cache: dtype=float32 quantization=int8 group_size=128 kv_dtype=int8 {XLA}",
    f"int8 in 128, int8 activations: dtype=float32 quantization=int8 group_size=128 int8_activations=true {XLA}",
)
KERNELS = "linear=triton attention=triton"
GPU_TABLE = (
    f"float32, kernels: dtype=float32 {KERNELS}",
    f"bfloat16, kernels: dtype=bfloat16 {KERNELS}",
    f"bfloat16, int8 in 128, kernels: dtype=bfloat16 quantization=int8 group_size=128 {KERNELS}",
    f"bfloat16, int8 in 128, int8 KV cache, kernels: dtype=bfloat16 quantization=int8 group_size=128 kv_dtype=int8 "
    f"{KERNELS}",
)
COLUMNS = (
    ("setting", lambda record: record["setting"]),
    ("perplexity", lambda record: f"{record['perplexity_change']:+.2%}"),
    ("mean KL, nats", lambda record: f"{record['mean_kl']:.5f}"),
    ("same likeliest token", lambda record: f"{record['top1_agreement']:.1%}"),
    ("engine: perplexity", lambda record: f"{record['engine_perplexity_change']:+.2%}"),
    ("engine: same likeliest token", lambda record: f"{record['engine_top1_agreement']:.1%}"),
    ("greedy texts equal", lambda record: f"{record['greedy_equal_to_the_end']} of {record['num_prompts']}"),
    ("equal tokens, mean", lambda record: f"{np.mean(record['greedy_equal_tokens']):.1f} of {record['max_tokens']}"),
)


def parse_setting(text):
    """Returns name and fields of "name: field=value field=value"; numbers and booleans as JSON has them."""
    name, _, rest = text.partition(":")
    fields = {}
    for item in rest.split():
        key, _, value = item.partition("=")
        try:
            fields[key] = json.loads(value)
        except json.JSONDecodeError:
            fields[key] = value
    return name.strip(), fields


def open_llm(flags, fields):
    """Returns the LLM of a setting, with a cache that leaves room for others, and steps of few shapes."""
    length = max(flags.window, flags.prompt_tokens + flags.max_tokens) + 1
    limits = {
        "max_model_len": length,
        "max_num_seqs": flags.max_windows,
        "max_num_batched_tokens": max(flags.window, flags.max_windows * flags.prompt_tokens),
        "max_steps_per_dispatch": 1,
        "num_blocks": flags.max_windows * -(-length // 64) + 1,
        "progress": False,
    }
    fields = dict(fields)
    return photon_jax.LLM(fields.pop("model", flags.model), **limits, **fields)


def read_windows(llm, flags):
    """Returns windows spread over the text; they are the same for all settings."""
    ids = llm.tokenizer.encode(flags.text.read_text(encoding="utf-8"))
    windows = text_windows(ids, size=flags.window)
    assert windows, f"{flags.text} has {len(ids)} tokens, too few for a window of {flags.window}"
    return windows[:: -(-len(windows) // flags.max_windows)]


def greedy_tokens(llm, windows, flags):
    """Returns what the engine makes of each window's beginning, i32[prompts max_tokens]."""
    params = photon_jax.SamplingParams(temperature=0.0, max_tokens=flags.max_tokens, ignore_eos=True)
    prompts = [window[: flags.prompt_tokens].tolist() for window in windows]
    outputs = llm.generate(prompts, params, progress=False)
    return np.array([output.outputs[0].token_ids for output in outputs])


def engine_scores(llm, windows):
    """Returns the engine's loss of the windows' tokens, summed, and the likeliest token i32[windows T-1] of each."""
    params = photon_jax.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    outputs = llm.generate([window.tolist() for window in windows], params, progress=False)
    scores = [output.prompt_logprobs for output in outputs]
    loss = -sum(score.logprobs.sum(dtype=np.float64) for score in scores)
    return loss, np.stack([score.top_ids[:, 0] for score in scores])


def first_differences(ours, theirs):
    """Returns for each row how many tokens are equal before the first that is not."""
    is_equal = np.concatenate([ours == theirs, np.zeros((len(ours), 1), bool)], axis=1)
    return is_equal.argmin(axis=1)


class Comparison:
    """The first setting's results, and what the others are beside them."""

    def __init__(self, flags):
        self._flags, self._losses, self._lock = flags, {}, threading.Lock()
        self._windows = self._logprobs = self._reference = None

    def measure(self, setting):
        """Returns the record of a setting; the first call makes the reference, and must have returned before others."""
        flags, (name, fields) = self._flags, parse_setting(setting)
        with open_llm(flags, fields) as llm:
            if self._windows is None:
                self._windows = read_windows(llm, flags)
                self._logprobs = [np.asarray(window_logprobs(llm.params, each, llm.config)) for each in self._windows]
            tokens = greedy_tokens(llm, self._windows, flags)
            loss, likeliest = engine_scores(llm, self._windows)
            self._reference = self._reference or (tokens, loss, likeliest)
            plain = self._plain_loss(llm, fields)
        equal = first_differences(self._reference[0], tokens)
        record = {
            "setting": name,
            "fields": fields,
            "num_tokens": plain.num_tokens,
            "perplexity": plain.perplexity_after,
            "perplexity_change": plain.perplexity_loss,
            "mean_kl": plain.mean_kl,
            "top1_agreement": plain.top1_agreement,
            "engine_perplexity": float(np.exp(loss / likeliest.size)),
            "engine_perplexity_change": float(np.expm1((loss - self._reference[1]) / likeliest.size)),
            "engine_top1_agreement": float((likeliest == self._reference[2]).mean()),
            "num_prompts": len(equal),
            "max_tokens": flags.max_tokens,
            "greedy_equal_to_the_end": int((equal == flags.max_tokens).sum()),
            "greedy_equal_tokens": equal.tolist(),
        }
        print(json.dumps({key: value for key, value in record.items() if key != "greedy_equal_tokens"}), flush=True)
        return record

    def _plain_loss(self, llm, fields):
        """Returns the TextLoss of the plain forward; settings that differ in kernels alone share it."""
        key = json.dumps({key: value for key, value in fields.items() if key not in ("linear", "attention")})
        with self._lock:
            if key in self._losses:
                return self._losses[key]
        totals = np.zeros(4)
        for window, before in zip(self._windows, self._logprobs, strict=True):
            after = window_logprobs(llm.params, window, llm.config, kv_dtype=fields.get("kv_dtype", "auto"))
            totals += compare_logprobs(before, after, window)
        with self._lock:
            return self._losses.setdefault(key, text_loss(totals, self._windows))


def measure_all(flags):
    """Returns where it was measured, and a record for each setting."""
    device = jax.devices()[0]
    settings = flags.setting or [*TABLE, *(GPU_TABLE if device.platform == "gpu" else ())]
    comparison = Comparison(flags)
    records = [comparison.measure(settings[0])]
    with ThreadPoolExecutor(flags.jobs) as pool:
        records += pool.map(comparison.measure, settings[1:])
    where = {"device": device.device_kind, "jax": jax.__version__, "model": flags.model, "window": flags.window}
    return {**where, "prompt_tokens": flags.prompt_tokens, "records": records}


def print_table(results):
    """Prints the table in Markdown, as the README has it."""
    records = results["records"]
    print("\n| " + " | ".join(name for name, _ in COLUMNS) + " |")
    print("| " + " | ".join("---" for _ in COLUMNS) + " |")
    for record in records:
        print("| " + " | ".join(show(record) for _, show in COLUMNS) + " |")
    first = records[0]
    print(
        f"\n{results['model']} on {results['device']}, jax {results['jax']}: perplexity {first['perplexity']:.4f} of "
        f"{first['setting']}, {first['engine_perplexity']:.4f} in the engine, {first['num_tokens']} tokens in windows "
        f"of {results['window']}; {first['num_prompts']} prompts of {results['prompt_tokens']} tokens"
    )


def plot(results, path):
    """Draws the divergence of each setting, and how many prompts are still equal after each token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first, *others = results["records"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    left.barh([record["setting"] for record in others], [record["mean_kl"] for record in others])
    left.set_xlabel("mean KL, nats a token")
    left.invert_yaxis()
    for index, record in enumerate(others):
        equal, counts = np.array(record["greedy_equal_tokens"]), range(record["max_tokens"] + 1)
        style = ("-", "--")[index // 10]  # there are ten colors
        right.plot([np.mean(equal >= count) for count in counts], style, label=record["setting"])
    right.set_xlabel("greedy tokens")
    right.set_ylabel(f"share of prompts equal to {first['setting']}")
    right.set_ylim(0, 1.02)
    right.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def main():
    """Measures or reads the results, and shows them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="of the settings that name none")
    parser.add_argument("--setting", action="append", help="NAME: FIELD=VALUE ...; may be repeated")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path)
    source.add_argument("--read", type=Path, help="JSON file of a run, to show and not to measure")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--max_windows", type=int, default=16, help="spread over the text")
    parser.add_argument("--prompt_tokens", type=int, default=32, help="of a window that are continued")
    parser.add_argument("--max_tokens", type=int, default=48, help="greedy tokens of each prompt")
    parser.add_argument("--jobs", type=int, default=1, help="settings that are measured at once")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--plot", type=Path)
    flags = parser.parse_args()
    if flags.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; install it with: pip install matplotlib")
    if flags.text and not flags.text.is_file():
        parser.error(f"--text={flags.text} is no file; give one of plain text, UTF-8")
    results = json.loads(flags.read.read_text(encoding="utf-8")) if flags.read else measure_all(flags)
    print_table(results)
    if flags.json:
        flags.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if flags.plot:
        plot(results, flags.plot)


if __name__ == "__main__":
    main()
