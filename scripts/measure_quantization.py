"""Measures what int8 weights and activations cost a model on a text, form by form, in float32.

PYTHONPATH=. python scripts/measure_quantization.py --calibration_text=SOME.txt --eval_text=OTHER.txt
"""

import argparse
from pathlib import Path

from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.models.config import QuantizationConfig
from photon_jax.quantization.calibrate import measure_importance, scale_inputs, search_clip
from photon_jax.quantization.report import compare_on_text, text_windows
from photon_jax.quantization.weights import quantize_params, with_int8_activations
from photon_jax.text.tokenizer import find_tokenizer


def main() -> None:
    """Prints a line for each form: perplexity, divergence and agreement beside the model itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration_text", type=Path, required=True)
    parser.add_argument("--eval_text", type=Path, required=True)
    parser.add_argument("--group_sizes", default="32,64,128")
    parser.add_argument("--window", type=int, default=1024, help="tokens that are read together")
    parser.add_argument("--max_windows", type=int, default=None)
    flags = parser.parse_args()
    loaded = load_checkpoint(flags.model, dtype="float32")
    params, config = loaded.params, loaded.config
    tokenizer = find_tokenizer(loaded.tokenizer_source)
    assert tokenizer is not None, "texts need a tokenizer"
    calibration, evaluation = (
        tokenizer.encode(path.read_text(encoding="utf-8")) for path in (flags.calibration_text, flags.eval_text)
    )
    windows = text_windows(evaluation, size=flags.window, num_windows=flags.max_windows)
    importance = measure_importance(params, config, text_windows(calibration, size=min(512, flags.window)))

    def show(label, quantized):
        print(f"{label:36} {compare_on_text(params, quantized, config, windows)}", flush=True)

    for group_size in map(int, flags.group_sizes.split(",")):
        for has_embedding in (False, True):
            form = QuantizationConfig(group_size=group_size, has_embedding=has_embedding)
            name = f"{group_size}{' with embedding' if has_embedding else ''}"
            show(f"{name}, plain", quantize_params(params, form))
            ratios = search_clip(params, form, importance)
            show(f"{name}, clip", quantize_params(params, form, clip_ratios=ratios))
            dense, weighing = scale_inputs(params, config, importance, form)
            show(f"{name}, scaled", quantize_params(dense, form))
            both = quantize_params(dense, form, clip_ratios=search_clip(dense, form, weighing))
            show(f"{name}, scaled and clip", both)
            show(f"{name}, int8 activations", with_int8_activations(both))


if __name__ == "__main__":
    main()
