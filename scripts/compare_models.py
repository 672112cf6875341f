"""Compares settings, or checkpoints of one tokenizer, on a text and on prompts; the first one is the measure.

  PYTHONPATH=. python scripts/compare_models.py --text=prose.txt --plot=compared.png
      --setting='float32: dtype=float32' --setting='int8: dtype=float32 quantization=int8 group_size=64'

A setting is a name and fields of LLM: model, dtype, quantization, group_size, int8_activations, kv_dtype, linear,
attention. Perplexity, divergence (KL, nats a token) and the share of equal likeliest tokens come from the plain forward
pass over whole windows. The greedy part runs through the engine, with its kernels and cache: each window's beginning is
continued, and compared token by token. With --engine_perplexity the text is scored through the engine too. A plot needs
matplotlib.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import photon_jax
from photon_jax.evals.perplexity import score_text
from photon_jax.quantization.report import compare_logprobs, text_loss, text_windows, window_logprobs


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
    limits = {"max_model_len": max(flags.window, flags.prompt_tokens + flags.max_tokens) + 1, "progress": False}
    fields = dict(fields)
    return photon_jax.LLM(fields.pop("model", flags.model), **limits, **fields)


def read_windows(llm, flags):
    """Returns the windows of the text; they are the same for all settings."""
    ids = llm.tokenizer.encode(flags.text.read_text(encoding="utf-8"))
    return text_windows(ids, size=flags.window, num_windows=flags.max_windows)


def greedy_tokens(llm, windows, flags):
    """Returns what the engine makes of each window's beginning, i32[prompts max_tokens]."""
    params = photon_jax.SamplingParams(temperature=0.0, max_tokens=flags.max_tokens, ignore_eos=True)
    prompts = [window[: flags.prompt_tokens].tolist() for window in windows]
    outputs = llm.generate(prompts, params, progress=False)
    return np.array([output.outputs[0].token_ids for output in outputs])


def first_differences(ours, theirs):
    """Returns for each row how many tokens are equal before the first that is not."""
    is_equal = np.concatenate([ours == theirs, np.zeros((len(ours), 1), bool)], axis=1)
    return is_equal.argmin(axis=1)


def measure(flags):
    """Returns a record for each setting."""
    records, reference = [], None
    for name, fields in map(parse_setting, flags.setting):
        with open_llm(flags, fields) as llm:
            windows = read_windows(llm, flags)
            tokens = greedy_tokens(llm, windows, flags)
            reference = reference or open_reference(llm, windows, tokens)
            totals = np.zeros(4)
            for window, before in zip(windows, reference["logprobs"], strict=True):
                after = window_logprobs(llm.params, window, llm.config, kv_dtype=fields.get("kv_dtype", "auto"))
                totals += compare_logprobs(before, after, window)
            loss, equal = text_loss(totals, windows), first_differences(reference["tokens"], tokens)
            record = {
                "setting": name,
                "num_tokens": loss.num_tokens,
                "perplexity": loss.perplexity_after,
                "perplexity_change": loss.perplexity_loss,
                "mean_kl": loss.mean_kl,
                "top1_agreement": loss.top1_agreement,
                "num_prompts": len(equal),
                "greedy_equal_to_the_end": int((equal == flags.max_tokens).sum()),
                "greedy_equal_tokens": equal.tolist(),
            }
            if flags.engine_perplexity:
                text = flags.text.read_text(encoding="utf-8")
                sizes = {"window": flags.window, "stride": flags.window, "max_windows": len(windows)}
                record["engine_perplexity"] = score_text(llm, text, **sizes, progress=False).perplexity
        records.append(record)
        print(json.dumps({key: value for key, value in record.items() if key != "greedy_equal_tokens"}), flush=True)
    return records


def open_reference(llm, windows, tokens):
    """Returns what the others are compared with; the log-probabilities stay on the host."""
    logprobs = [np.asarray(window_logprobs(llm.params, window, llm.config)) for window in windows]
    return {"logprobs": logprobs, "tokens": tokens}


def print_table(records, max_tokens):
    print("\n| setting | perplexity | mean KL, nats | same likeliest token | greedy texts equal | equal tokens, mean |")
    print("| --- | --- | --- | --- | --- | --- |")
    for record in records:
        mean = np.mean(record["greedy_equal_tokens"])
        print(
            f"| {record['setting']} | {record['perplexity_change']:+.3%} | {record['mean_kl']:.5f} | "
            f"{record['top1_agreement']:.1%} | {record['greedy_equal_to_the_end']} of {record['num_prompts']} | "
            f"{mean:.1f} of {max_tokens} |"
        )
    print(f"\nperplexity of {records[0]['setting']}: {records[0]['perplexity']:.4f}, {records[0]['num_tokens']} tokens")


def plot(records, max_tokens, path):
    """Draws the divergence of each setting, and how many prompts are still equal after each token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    others = records[1:]
    left.barh([record["setting"] for record in others], [record["mean_kl"] for record in others])
    left.set_xlabel("mean KL, nats a token")
    left.invert_yaxis()
    for record in others:
        equal = np.array(record["greedy_equal_tokens"])
        right.plot([np.mean(equal >= count) for count in range(max_tokens + 1)], label=record["setting"])
    right.set_xlabel("greedy tokens")
    right.set_ylabel(f"share of prompts equal to {records[0]['setting']}")
    right.set_ylim(0, 1.02)
    right.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="of the settings that name none")
    parser.add_argument("--setting", action="append", required=True, help="NAME: FIELD=VALUE ...; may be repeated")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--max_windows", type=int, default=16)
    parser.add_argument("--prompt_tokens", type=int, default=32, help="of a window that are continued")
    parser.add_argument("--max_tokens", type=int, default=48, help="greedy tokens of each prompt")
    parser.add_argument("--engine_perplexity", action="store_true")
    parser.add_argument("--plot", type=Path)
    flags = parser.parse_args()
    records = measure(flags)
    print_table(records, flags.max_tokens)
    if flags.plot:
        plot(records, flags.max_tokens, flags.plot)


if __name__ == "__main__":
    main()
