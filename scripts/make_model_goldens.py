"""Writes the golden files in tests/models/golden with transformers (needs torch, transformers, accelerate, gguf).

    python scripts/make_model_goldens.py models rope
    python scripts/make_model_goldens.py smollm2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf --text prose.txt

Run it in an environment of its own: the engine and its tests need none of these packages.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from helpers import golden_models, golden_prompts, golden_rope

_MIN_GAP = 2e-3
_NUM_PROMPTS = 20
_BATCH = 14
_NUM_GENERATED = 64
_NUM_SCORED = 320


def make_model_goldens() -> None:
    """Logits of the small random checkpoints at some positions, in float32 with eager attention."""
    for model in golden_models.MODELS:
        with tempfile.TemporaryDirectory() as folder:
            golden_models.write_hf_folder(Path(folder), model)
            reference = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
        ids = torch.from_numpy(golden_models.token_ids(model)).long()
        arrays = {}
        if "dynamic" in model.name:  # first, before the longer sequence grows the model's frequencies
            arrays["short_logits"] = _logits(reference, ids[:, : golden_models.SHORT_NUM_TOKENS])
        arrays["logits"] = _logits(reference, ids)
        np.savez_compressed(model.golden_path, **arrays)
        print(f"{model.golden_path.name}: {model.golden_path.stat().st_size} bytes", flush=True)


def _logits(reference: torch.nn.Module, ids: torch.Tensor) -> np.ndarray:
    positions = [position for position in golden_models.POSITIONS if position < ids.shape[1]]
    with torch.inference_mode():
        return reference(input_ids=ids, use_cache=False).logits[0, positions].numpy()


def make_rope_goldens() -> None:
    """Inverse frequencies, attention factor, cos and sin of every kind of rotary embedding."""
    arrays = {}
    for name, case in golden_rope.CASES.items():
        config = transformers.LlamaConfig(**case.config)
        kind = config.rope_parameters["rope_type"]
        embedding = LlamaRotaryEmbedding(config)
        if kind == "default":
            frequencies, factor = embedding.compute_default_rope_parameters(config)
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=case.seq_len)
        phase = torch.tensor(golden_rope.POSITIONS, dtype=torch.float32)[:, None] * frequencies
        arrays[f"{name}.frequencies"] = frequencies.numpy()
        arrays[f"{name}.attention_factor"] = np.float64(factor)
        arrays[f"{name}.cos"] = (phase.cos() * factor).numpy()
        arrays[f"{name}.sin"] = (phase.sin() * factor).numpy()
    path = golden_rope.GOLDEN_PATH
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {path.stat().st_size} bytes")


def make_smollm2_golden(gguf_path: Path, text_path: Path) -> None:
    """Greedy continuations of prompts with clear winners at each step, and log-probabilities of a text."""
    tokenizer = _tokenizer(gguf_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32, attn_implementation="eager"
    )
    generations = []
    for start in range(0, len(golden_prompts.PROMPTS), _BATCH):
        prompts = golden_prompts.PROMPTS[start : start + _BATCH]
        prompt_ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
        for prompt, ids, output_ids in zip(prompts, prompt_ids, _greedy(reference, prompt_ids), strict=True):
            gaps = _gaps(reference, ids, output_ids)
            print(f"{min(gaps):.4f} {prompt!r}", flush=True)
            if min(gaps) > _MIN_GAP:
                generations.append(
                    {
                        "prompt": prompt,
                        "prompt_token_ids": ids,
                        "output_token_ids": output_ids,
                        "gaps": [round(gap, 4) for gap in gaps],
                        "text": tokenizer.decode(output_ids, skip_special_tokens=False),
                    }
                )
    generations = generations[:_NUM_PROMPTS]
    text = text_path.read_text(encoding="utf-8")[:4000]
    scored = tokenizer.encode(text, add_special_tokens=False).ids[:_NUM_SCORED]
    golden = {
        "generations": generations,
        "scored": {"token_ids": scored, "logprobs": _logprobs(reference, scored)},
    }
    path = golden_models.GOLDEN_FOLDER / "smollm2.json"
    path.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")).replace("},{", "},\n{") + "\n")
    print(f"{path.name}: {len(generations)} prompts, {path.stat().st_size} bytes")


def _tokenizer(gguf_path: Path) -> Tokenizer:
    """The byte-level BPE of the file; transformers' own reading of it doesn't split digits."""
    fields = GGUFReader(gguf_path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    control = [
        token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"].contents(), strict=True) if kind == 3
    ]
    tokenizer.add_special_tokens(control)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _greedy(reference: torch.nn.Module, prompt_ids: list[list[int]]) -> list[list[int]]:
    """64 tokens by argmax after each prompt, through end-of-text tokens too; the batch is padded on the left."""
    longest = max(len(ids) for ids in prompt_ids)
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompt_ids])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompt_ids])
    reference.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        whole = reference.generate(padded, attention_mask=mask, max_new_tokens=_NUM_GENERATED)
    return whole[:, longest:].tolist()


def _gaps(reference: torch.nn.Module, prompt_ids: list[int], output_ids: list[int]) -> list[float]:
    """How far the best logit is above the second at each step, 0 where another token is the best: no padding here."""
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([prompt_ids + output_ids]), use_cache=False).logits
    top = logits[0, len(prompt_ids) - 1 : -1].topk(2)
    is_best = top.indices[:, 0] == torch.tensor(output_ids)
    return torch.where(is_best, top.values[:, 0] - top.values[:, 1], 0.0).tolist()


def _logprobs(reference: torch.nn.Module, ids: list[int]) -> list[float]:
    """Log-probability of each token but the first, given those before it."""
    with torch.inference_mode():
        logprobs = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    values = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert all(math.isfinite(value) for value in values), "a log-probability isn't finite"
    return [round(value, 5) for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["models", "rope", "smollm2"])
    parser.add_argument("--gguf", type=Path, help="the demo model's file, for smollm2")
    parser.add_argument("--text", type=Path, help="English prose to score, for smollm2")
    arguments = parser.parse_args()
    if "smollm2" in arguments.what and not (arguments.gguf and arguments.text):
        parser.error("smollm2 needs --gguf and --text")
    golden_models.GOLDEN_FOLDER.mkdir(parents=True, exist_ok=True)
    if "models" in arguments.what:
        make_model_goldens()
    if "rope" in arguments.what:
        make_rope_goldens()
    if "smollm2" in arguments.what:
        make_smollm2_golden(arguments.gguf, arguments.text)


if __name__ == "__main__":
    main()
