"""Writes a checkpoint folder with random weights of a model's shape, for what needs files, a tokenizer or a server.

    PYTHONPATH=.:tests python scripts/make_random_checkpoint.py --output=FOLDER --tokenizer=FOLDER_OR_GGUF

The tokenizer is another model's: a folder, or a GGUF file. Its vocabulary is filled up to the shape's with words that
no text is encoded to, so that each token that random weights may sample has a text of its own; a smaller one is raised.
The shape is one of Llama's architecture.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import jax
from helpers.tiny_checkpoint import write_checkpoint

from photon_jax.bench.shapes import SHAPES, draw_weights, shape_config
from photon_jax.checkpoint.gguf_io import read_fields
from photon_jax.errors import CheckpointError
from photon_jax.models.config import ModelConfig, RopeConfig
from photon_jax.text.gguf_tokenizer import read_gguf_fields
from photon_jax.text.tokenizer_files import read_tokenizer_folder
from photon_jax.text.tokenizer_parts import TokenizerParts
from photon_jax.text.write_tokenizer import tokenizer_files

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def main() -> None:
    """Writes weights in bfloat16, the tokenizer, and the configuration of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = sorted(name for name in SHAPES if shape_config(name, "bfloat16").architecture == "LlamaForCausalLM")
    parser.add_argument("--shape", choices=shapes, default="llama-3.2-1b")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True, help="folder or .gguf file of another model")
    flags = parser.parse_args()
    try:
        parts = read_tokenizer(Path(flags.tokenizer))
    except CheckpointError as error:
        parser.error(f"--tokenizer: {error}")
    config = shape_config(flags.shape, "bfloat16")
    num_ids = 1 + max(parts.backend.get_vocab(with_added_tokens=True).values())
    config = dataclasses.replace(config, vocab_size=max(config.vocab_size, num_ids))
    write_checkpoint(flags.output, params=jax.device_get(draw_weights(config)), config=config, tokenizer_config=None)
    path = flags.output / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | hf_fields(config)), encoding="utf-8")
    for name, content in filled_tokenizer(parts, config.vocab_size).items():
        (flags.output / name).write_bytes(content)


def read_tokenizer(source: Path) -> TokenizerParts:
    """Returns the tokenizer of a folder or of a GGUF file."""
    return read_tokenizer_folder(source) if source.is_dir() else read_gguf_fields(read_fields(source))


def hf_fields(config: ModelConfig) -> dict[str, object]:
    """Returns what the config.json of the tests' checkpoints lacks."""
    fields: dict[str, object] = {"model_type": "llama", "torch_dtype": "bfloat16", "eos_token_id": []}
    if config.rope.kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        fields["rope_scaling"] = {"rope_type": "llama3"} | {name: getattr(config.rope, name) for name in names}
    assert config.rope.kind in ("llama3", RopeConfig().kind), f"rope {config.rope.kind} is not written yet"
    return fields


def filled_tokenizer(parts: TokenizerParts, vocab_size: int) -> dict[str, bytes]:
    """Returns the tokenizer's files, its vocabulary filled up to a size."""
    files = tokenizer_files(parts)
    content = json.loads(files["tokenizer.json"])
    vocab = content["model"]["vocab"]
    taken = {*vocab.values(), *(token["id"] for token in content["added_tokens"])}
    for index in sorted(set(range(vocab_size)) - taken):
        vocab[f"Ġ{word(index)}"] = index
    return files | {"tokenizer.json": json.dumps(content).encode()}


def word(index: int) -> str:
    """Returns a word of five letters or more, another one for each number."""
    letters = ""
    while index or len(letters) < 5:
        index, letter = divmod(index, len(LETTERS))
        letters += LETTERS[letter]
    return letters.upper()


if __name__ == "__main__":
    main()
