"""Measures what int8 weights, activations, keys and values cost a model on a text, form by form, in float32.

PYTHONPATH=. python scripts/measure_quantization.py --calibration_text=SOME.txt --eval_text=OTHER.txt
PYTHONPATH=. python scripts/measure_quantization.py ... --forms='64|128, both' --every=5
"""

import argparse
import functools
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.models.config import QuantizationConfig
from photon_jax.quantization.calibrate import measure_importance, scale_inputs, search_clip
from photon_jax.quantization.report import compare_logprobs, text_loss, text_windows, window_logprobs
from photon_jax.quantization.weights import quantize_params, with_int8_activations
from photon_jax.text.tokenizer import find_tokenizer

GROUP_SIZES = (32, 64, 128)


class Form(NamedTuple):
    """How a model is made int8; its name is what --forms looks at."""

    group_size: int | None = None  # of the weights; None leaves them alone
    has_embedding: bool = False
    search: str = "plain"  # or "clip", "scaled", "both"
    int8_activations: bool = False
    int8_cache: bool = False

    @property
    def label(self):
        weights = "float weights" if self.group_size is None else f"{self.group_size}, {self.search}"
        extras = [
            name
            for name, is_on in (
                ("embedding and head", self.has_embedding),
                ("int8 activations", self.int8_activations),
                ("int8 KV cache", self.int8_cache),
            )
            if is_on
        ]
        return ", ".join([weights, *extras])


def all_forms():
    """Returns the forms in the order of the table."""
    forms = [Form(int8_cache=True)]
    for size in GROUP_SIZES:
        forms += [Form(size, has_embedding, search) for has_embedding in (False, True) for search in ("plain", "both")]
        forms += [Form(size, search=search) for search in ("clip", "scaled")]
        forms += [
            Form(size, search="both", int8_activations=has_activations, int8_cache=has_cache)
            for has_activations, has_cache in ((True, False), (False, True), (True, True))
        ]
        forms.append(Form(size, True, "both", int8_activations=True, int8_cache=True))
    return forms


def make_all(forms, params, config, importance):
    """Returns the parameters of each form; forms of one rounding share them."""

    @functools.cache
    def scale(group_size):
        return scale_inputs(params, config, importance, QuantizationConfig(group_size=group_size))

    @functools.cache
    def quantize(group_size, has_embedding, search):
        kind = QuantizationConfig(group_size=group_size, has_embedding=has_embedding)
        dense, weighing = scale(group_size) if search in ("scaled", "both") else (params, importance)
        ratios = search_clip(dense, kind, weighing) if search in ("clip", "both") else None
        return quantize_params(dense, kind, clip_ratios=ratios)

    def make(form):
        if form.group_size is None:
            return params
        quantized = quantize(form.group_size, form.has_embedding, form.search)
        return with_int8_activations(quantized) if form.int8_activations else quantized

    return [make(form) for form in forms]


def read_windows(loaded, path, size, count=None, every=1):
    """Returns the token ids of a text in windows: each `every`-th of the first `count`."""
    tokenizer = find_tokenizer(loaded.tokenizer_source)
    assert tokenizer is not None, "texts need a tokenizer"
    return text_windows(tokenizer.encode(path.read_text(encoding="utf-8")), size=size, num_windows=count)[::every]


def add_text_flags(parser):
    """Adds the flags that say what is read, and which forms read it."""
    parser.add_argument("--forms", default="", help="regular expression; forms whose label has no match are left out")
    parser.add_argument("--eval_text", type=Path, required=True)
    parser.add_argument("--window", type=int, default=1024, help="tokens that are read together")
    parser.add_argument("--max_windows", type=int, default=None, help="of the text's beginning; all, if not given")
    parser.add_argument("--every", type=int, default=1, help="5 reads each fifth of these windows")


def main() -> None:
    """Prints a line for each form: perplexity, divergence and agreement beside the model itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration_text", type=Path, required=True)
    add_text_flags(parser)
    flags = parser.parse_args()
    loaded = load_checkpoint(flags.model, dtype="float32")
    params, config = loaded.params, loaded.config
    windows = read_windows(loaded, flags.eval_text, flags.window, flags.max_windows, flags.every)
    calibration = read_windows(loaded, flags.calibration_text, min(512, flags.window))
    print(f"{len(windows)} windows of {flags.window} tokens; calibrated on {len(calibration)} of {len(calibration[0])}")
    importance = measure_importance(params, config, calibration)
    forms = [form for form in all_forms() if re.search(flags.forms, form.label)]
    made = make_all(forms, params, config, importance)
    totals = np.zeros((len(forms), 4))
    for window in tqdm(windows, desc="comparing"):
        before = window_logprobs(params, window, config)
        for index, form in enumerate(forms):
            kv_dtype = "int8" if form.int8_cache else "auto"
            after = window_logprobs(made[index], window, config, kv_dtype=kv_dtype)
            totals[index] += compare_logprobs(before, after, window)
    for form, sums in zip(forms, totals, strict=True):
        print(f"{form.label:58} {text_loss(sums, windows)}")


if __name__ == "__main__":
    main()
