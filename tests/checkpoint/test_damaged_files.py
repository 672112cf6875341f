"""Damaged files: cut, flipped and overwritten at places drawn from fixed seeds, and headers that claim absurd sizes.

Each load gives a CheckpointError or a whole, finite model: never another exception, a hang, or memory by the claim.
"""

import contextlib
import json
import random
import shutil
import signal
import struct
import tracemalloc

import jax
import numpy as np
import pytest
from helpers.gguf_files import architecture, gguf_fields, gguf_tensors, write_gguf
from helpers.golden_models import MODELS, write_hf_folder
from helpers.small_tokenizers import SPECIALS
from helpers.tiny_checkpoint import checkpoint_config, small_tokenizer, write_checkpoint
from helpers.tiny_model import tiny_params

from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.checkpoint.orbax_io import save_checkpoint
from photon_jax.errors import CheckpointError
from photon_jax.text.tokenizer import Tokenizer, find_tokenizer

TIED = next(model for model in MODELS if model.name == "llama_tied")
NUM_DAMAGES = 45  # of each file: 450 in all
LIMIT_S = 10
GENERATION_CONFIG = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [2, 5]}
FILES = {
    "model.safetensors": "folder",
    "config.json": "folder",
    "tokenizer.json": "folder",
    "tokenizer_config.json": "folder",
    "generation_config.json": "folder",
    "model.safetensors.index.json": "shards",
    "model-00001-of-00002.safetensors": "shards",
    "model.gguf": "gguf",
    "photon_checkpoint.json": "saved",
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Folders by name: one file of weights with everything beside it; two shards; a GGUF file."""
    place = tmp_path_factory.mktemp("originals")
    write_checkpoint(place / "folder", generation_config=GENERATION_CONFIG)
    write_hf_folder(place / "shards", TIED, num_shards=2)
    (place / "gguf").mkdir()
    fields = {**gguf_fields(TIED), **tokenizer_fields()}
    write_gguf(place / "gguf" / "model.gguf", architecture(TIED), fields, gguf_tensors(TIED), "Q8_0")
    config = checkpoint_config()
    save_checkpoint(place / "saved", tiny_params(config), config)
    return place


def tokenizer_fields():
    model = json.loads(small_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
    }


def load(folder):
    """Returns the weights of a folder and its tokenizer, as LLM opens them."""
    path = folder / "model.gguf" if (folder / "model.gguf").exists() else folder
    loaded = load_checkpoint(path, dtype="float32")
    return loaded.params, find_tokenizer(loaded.tokenizer_source)


@contextlib.contextmanager
def time_limit(seconds):
    def stop(*_):
        raise TimeoutError(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def damage(data, rng):
    """Returns a damaged copy and whether it was cut short."""
    at = rng.randrange(min(len(data), 4096)) if rng.random() < 0.6 else rng.randrange(len(data))
    kind = rng.choice(("cut", "flip", "flip", "overwrite", "zero", "repeat"))
    if kind == "cut":
        return data[:at]
    if kind == "repeat":
        return data[:at] + data[at // 2 :]
    changed = bytearray(data)
    for place in range(at, min(at + (1 if kind == "flip" else rng.randrange(1, 9)), len(data))):
        changed[place] = {"flip": changed[place] ^ 1 << rng.randrange(8), "zero": 0}.get(kind, rng.randrange(256))
    return bytes(changed)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_by_name_or_loads_whole(originals, tmp_path, name):
    folder = shutil.copytree(originals / FILES[name], tmp_path / "model")
    whole = (folder / name).read_bytes()
    expected = jax.tree.map(np.shape, load(folder)[0])
    rng = random.Random(f"damage {name}")
    num_refused = 0
    for number in range(NUM_DAMAGES):
        (folder / name).write_bytes(damage(whole, rng))
        num_refused += is_refused(folder, expected, f"damage {number} of {name}")
    assert num_refused >= NUM_DAMAGES // 5, num_refused


def test_damaged_arrays_of_a_saved_checkpoint_are_refused_before_they_are_read(originals, tmp_path):
    folder = shutil.copytree(originals / "saved", tmp_path / "model")
    names = sorted(path for path in (folder / "params").rglob("*") if path.is_file())
    rng = random.Random("damaged arrays")
    for _ in range(NUM_DAMAGES):
        path = rng.choice(names)
        whole = path.read_bytes()
        damaged = (damage(whole, rng) + bytes(len(whole)))[: len(whole)]  # another size is refused sooner
        if damaged != whole:
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=rf"{path.name} holds other bytes than were saved"):
                load(folder)
            path.write_bytes(whole)
    load(folder)


def is_refused(folder, expected, what):
    """Returns whether loading gave a CheckpointError; fails on anything else but a whole model."""
    try:
        with time_limit(LIMIT_S):
            params, tokenizer = load(folder)
    except CheckpointError as error:
        assert len(str(error)) > 10, what
        return True
    except BaseException as error:
        raise AssertionError(f"{what} gave {error!r}") from error
    assert jax.tree.map(np.shape, params) == expected, what
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)), what
    assert tokenizer is None or isinstance(tokenizer.encode("Hello"), list)
    return False


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_ends_early_never_loads(originals, tmp_path, name):
    folder = shutil.copytree(originals / FILES[name], tmp_path / "model")
    whole = (folder / name).read_bytes()
    for length in (0, 1, 7, 8, 9, len(whole) // 3, len(whole) - 64, len(whole) - 33):
        (folder / name).write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            load(folder)


# claims that must not be believed


def refused_without_memory(folder):
    """Fails unless the load is refused, soon and with less memory than the claims would take."""
    tracemalloc.start()
    try:
        with time_limit(LIMIT_S), pytest.raises(CheckpointError):
            load(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20, f"{peak} bytes"


HUGE = (2**31 - 1, 2**62, 2**64 - 1, 10**30)


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize(
    "key",
    ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
)
def test_absurd_sizes_in_the_configuration_take_no_memory(originals, tmp_path, key, size):
    folder = shutil.copytree(originals / "folder", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: size}))
    refused_without_memory(folder)


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize("key", ("vocab_size", "num_layers", "num_heads"))
def test_absurd_sizes_in_a_saved_checkpoint_take_no_memory(originals, tmp_path, key, size):
    folder = shutil.copytree(originals / "saved", tmp_path / "model")
    path = folder / "photon_checkpoint.json"
    metadata = json.loads(path.read_text())
    metadata["config"][key] = size
    path.write_text(json.dumps(metadata))
    refused_without_memory(folder)


@pytest.mark.parametrize("size", HUGE)
def test_absurd_sizes_in_a_safetensors_header_take_no_memory(originals, tmp_path, size):
    folder = shutil.copytree(originals / "folder", tmp_path / "model")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (num_header,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + num_header])
    tensor = {"dtype": "F32", "shape": [size, 1], "data_offsets": [0, 4 * size]}
    for name, text in (
        ("shape", json.dumps({**header, "model.norm.weight": tensor})),
        ("shape alone", json.dumps({**header, "model.norm.weight": {**tensor, "data_offsets": [0, 256]}})),
    ):
        path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data[8 + num_header :])
        refused_without_memory(folder), name
    path.write_bytes(struct.pack("<Q", min(size, 2**64 - 1)) + data[8:])
    refused_without_memory(folder)


def test_absurd_counts_in_a_gguf_header_take_no_memory(originals, tmp_path):
    folder = shutil.copytree(originals / "gguf", tmp_path / "model")
    path = folder / "model.gguf"
    data = path.read_bytes()
    key = b"tokenizer.ggml.tokens"
    array_length_at = data.index(key) + len(key) + 8  # after the type of the field and of the array's elements
    name = b"token_embd.weight"
    num_dims_at = data.index(name) + len(name)
    for at, form, values in (
        (8, "<Q", HUGE[:3]),  # tensors
        (16, "<Q", HUGE[:3]),  # fields
        (24, "<Q", HUGE[:3]),  # the first key's length
        (array_length_at, "<Q", HUGE[:3]),
        (num_dims_at, "<I", (2**31, 2**32 - 1)),
        (num_dims_at + 4, "<Q", HUGE[:3]),  # a dimension
        (num_dims_at + 24, "<Q", HUGE[:3]),  # the offset of its data
    ):
        for value in values:
            path.write_bytes(data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :])
            refused_without_memory(folder)


def test_arrays_nested_without_end_are_refused(tmp_path):
    key = b"a"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<I", 9)
    (tmp_path / "model.gguf").write_bytes(header + struct.pack("<IQ", 9, 1) * 5000)
    refused_without_memory(tmp_path)


def test_a_tokenizer_of_gguf_fields_with_wrong_values_is_refused():
    fields = tokenizer_fields()
    for key, value in (
        ("token_type", [[1]] * len(fields["tokenizer.ggml.tokens"])),
        ("token_type", ["1"] * len(fields["tokenizer.ggml.tokens"])),
        ("tokens", [3] * 420),
        ("merges", ["a b c"]),
        ("merges", [["a", "b"]]),
        ("merges", ["\u4f60 \u597d"]),
        ("bos_token_id", "1"),
        ("eos_token_id", 10**9),
        ("model", 5),
        ("pre", ["gpt-2"]),
    ):
        with pytest.raises(CheckpointError, match="GGUF"):
            Tokenizer.from_gguf({**fields, f"tokenizer.ggml.{key}": value})
