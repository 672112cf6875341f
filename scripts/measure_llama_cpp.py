"""Measures what Q8_0 costs the same model in llama.cpp, on the windows that measure_quantization.py reads.

  pip install cyllama    # llama.cpp with a Python interface
  PYTHONPATH=. python scripts/measure_llama_cpp.py --model=SOME.gguf --eval_text=OTHER.txt --every=5

The file's tensors are dequantized, and its matrices written as Q8_0, with the embedding or without; the distributions
that llama.cpp computes are compared with those of the float32 model that photon_jax computes. Most of the time
is in llama.cpp's own steps, which take as many threads as there are cores. Runs on a CPU.
"""

import argparse
import os
import re
import tempfile
from pathlib import Path

import gguf
import jax
import numpy as np
from cyllama.llama.llama_cpp import LlamaBatch, LlamaContext, LlamaContextParams, LlamaModel, LlamaModelParams
from measure_quantization import add_text_flags, read_windows
from tqdm import tqdm

from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.quantization.report import compare_logprobs, text_loss, window_logprobs

_log_softmax = jax.jit(jax.nn.log_softmax)
Q8_0, F32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32


def write_file(source, target, kind_of):
    """Writes a GGUF file with the source's fields, and its tensors as kind_of(name, shape) says."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(
            field.name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        )
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = kind_of(tensor.name, values.shape)
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class _Model(LlamaModel):
    @property
    def n_vocab(self):
        """What get_logits_ith of cyllama asks for, and its model lacks."""
        return self.get_vocab().n_vocab


class LlamaCpp:
    """llama.cpp on one file, keys and values as float32."""

    def __init__(self, path, num_tokens):
        model_params, params = LlamaModelParams(), LlamaContextParams()
        params.n_ctx = params.n_batch = params.n_ubatch = num_tokens
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        params.type_k = params.type_v = 0  # float32
        self._model = _Model(str(path), model_params)
        self._context = LlamaContext(self._model, params)

    def logprobs(self, window):
        """Returns the log-probabilities f32[T-1 V] after each token of a window i32[T] but the last."""
        tokens = window[:-1].tolist()
        self._context.kv_cache_clear()
        batch = LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
        for position, token in enumerate(tokens):
            batch.add(token, position, [0], True)
        self._context.decode(batch)
        logits = np.empty((len(tokens), self._model.n_vocab), np.float32)
        for index in range(len(tokens)):
            logits[index] = self._context.get_logits_ith(index)  # a list, and the only form there is
        return _log_softmax(logits)


def main() -> None:
    """Prints a line for each file: perplexity, divergence and agreement beside the float32 model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    add_text_flags(parser)
    flags = parser.parse_args()
    loaded = load_checkpoint(flags.model, dtype="float32")
    windows = read_windows(loaded, flags.eval_text, flags.window, flags.max_windows, flags.every)
    kinds = {
        "llama.cpp, float32": lambda name, shape: F32,
        "llama.cpp, Q8_0": lambda name, shape: Q8_0 if len(shape) == 2 and name.startswith("blk.") else F32,
        "llama.cpp, Q8_0, embedding and head": lambda name, shape: Q8_0 if len(shape) == 2 else F32,
    }
    with tempfile.TemporaryDirectory() as folder:
        others = {}
        for index, (label, kind_of) in enumerate(kinds.items()):
            if not re.search(flags.forms, label):
                continue
            path = Path(folder) / f"{index}.gguf"
            write_file(flags.model, path, kind_of)
            others[label] = LlamaCpp(path, flags.window)
        totals = {label: np.zeros(4) for label in others}
        for window in tqdm(windows, desc="comparing"):
            before = window_logprobs(loaded.params, window, loaded.config)
            for label, other in others.items():
                totals[label] += compare_logprobs(before, other.logprobs(window), window)
    for label, sums in totals.items():
        print(f"{label:58} {text_loss(sums, windows)}")


if __name__ == "__main__":
    main()
