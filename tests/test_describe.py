"""The model card: what it says of each kind of checkpoint, and that no weight is read for it."""

import dataclasses
import json

import jax
import pytest
from helpers.gguf_files import architecture, gguf_fields, gguf_tensors, write_gguf
from helpers.golden_models import MODELS, draw_weights, write_hf_folder
from helpers.tiny_checkpoint import BEGIN, END, ENGINE_FIELDS, TOKENIZER_CONFIG, TURN, write_checkpoint

import photon_jax
from photon_jax.checkpoint.gguf_io import GgufCheckpoint
from photon_jax.checkpoint.load import open_checkpoint
from photon_jax.checkpoint.orbax_io import save_checkpoint
from photon_jax.checkpoint.safetensors_io import SafetensorsCheckpoint
from photon_jax.describe import describe_checkpoint
from photon_jax.errors import CheckpointError
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.params import abstract_params, random_params

BY_NAME = {model.name: model for model in MODELS}


@pytest.fixture
def no_weight_is_read(monkeypatch):
    for owner in (SafetensorsCheckpoint, GgufCheckpoint):
        monkeypatch.setattr(owner, "read", lambda self, name: pytest.fail(f"{name} was read"))


def test_card_of_a_folder_with_everything(tmp_path, no_weight_is_read):
    tokenizer_config = {**TOKENIZER_CONFIG, "pad_token": {"content": "<|turn|>"}, "unk_token": "<none>"}
    generation_config = {"do_sample": False, "top_k": 4, "eos_token_id": [END, 7]}
    write_checkpoint(tmp_path, tokenizer_config=tokenizer_config, generation_config=generation_config)
    card = describe_checkpoint(tmp_path, dtype="bfloat16")
    assert (card.path, card.architecture, card.dtype) == (tmp_path, "LlamaForCausalLM", "bfloat16")
    assert (card.num_layers, card.hidden_size, card.mlp_size, card.vocab_size) == (2, 64, 96, 432)
    assert (card.num_heads, card.num_kv_heads, card.head_dim) == (6, 2, 16)
    assert (card.max_position_embeddings, card.rope.kind, card.has_tied_head) == (512, "default", False)
    assert card.special_tokens == {
        "bos_token": ("<|begin|>", BEGIN),
        "eos_token": ("<|end|>", END),
        "pad_token": ("<|turn|>", TURN),
    }
    assert (card.bos_token_id, card.eos_token_ids) == (BEGIN, (END, 7))
    assert (card.has_tokenizer, card.has_chat_template) == (True, True)
    assert card.generation_defaults == {"top_k": 4, "temperature": 0.0}
    assert card.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, head size, bytes
    assert (card.kv_dtype, "256 bytes a token, bfloat16" in str(card)) == ("bfloat16", True)
    rounded = describe_checkpoint(tmp_path, dtype="bfloat16", kv_dtype="int8")
    assert rounded.kv_bytes_per_token == 2 * 2 * 2 * (16 + 4)  # a scale of four bytes a head
    assert "160 bytes a token, int8" in str(rounded)
    assert card.tensor_types == {"float32": 21}
    attention, mlp = 2 * 64 * (6 + 2 + 2 + 6) * 16, 2 * 3 * 64 * 96
    expected = {"embedding": 432 * 64, "attention": attention, "mlp": mlp, "norms": 5 * 64, "head": 432 * 64}
    assert card.disk_bytes == {part: 4 * size for part, size in expected.items()}
    assert card.memory_bytes == {part: 2 * size for part, size in expected.items()}
    assert card.num_parameters == sum(expected.values())


@pytest.mark.parametrize("name", ["llama_bias", "qwen3", "llama_tied"])
def test_sizes_are_those_of_the_tensors(tmp_path, no_weight_is_read, name):
    model = BY_NAME[name]
    write_hf_folder(tmp_path, model)
    card = describe_checkpoint(tmp_path, dtype="float32")
    weights = draw_weights(model)
    assert card.num_parameters == sum(tensor.size for tensor in weights.values())
    assert sum(card.disk_bytes.values()) == sum(card.memory_bytes.values()) == 4 * card.num_parameters
    assert card.has_tied_head == model.config["tie_word_embeddings"] == ("head" not in card.disk_bytes)
    assert (card.has_tokenizer, card.special_tokens, card.generation_defaults) == (False, {}, {})


def test_card_of_a_gguf_file(tmp_path, no_weight_is_read):
    model = BY_NAME["llama_tied"]
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture(model), gguf_fields(model) | {"tokenizer.ggml.tokens": ["t"]}, {}, "F32")
    with pytest.raises(CheckpointError, match="lacks tensors"):
        describe_checkpoint(path)
    fields = {key: value for key, value in gguf_fields(model).items() if key != "tokenizer.ggml.tokens"}
    write_gguf(path, architecture(model), fields, gguf_tensors(model), "Q8_0")
    card = describe_checkpoint(path, dtype="float32")
    assert set(card.tensor_types) == {"Q8_0", "F32"}
    dense = sum(tensor.nbytes for tensor in gguf_tensors(model).values())
    assert sum(card.memory_bytes.values()) == dense
    assert dense / 4 < sum(card.disk_bytes.values()) < dense / 3  # 34 bytes for 32 weights
    assert (card.bos_token_id, card.eos_token_ids, card.has_tokenizer) == (1, (2,), False)
    assert "bos_token (1)" in str(card)


def test_int8_weights_take_what_the_card_says(tmp_path):
    quantization = QuantizationConfig(group_size=32)
    write_checkpoint(tmp_path / "hf")
    card = describe_checkpoint(tmp_path / "hf", dtype="float32", quantization=quantization)
    config = dataclasses.replace(photon_config(tmp_path / "hf"), quantization=quantization)
    leaves = jax.tree.leaves(abstract_params(config))
    assert sum(card.memory_bytes.values()) == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert card.num_parameters == describe_checkpoint(tmp_path / "hf").num_parameters
    assert "linear layers int8 with a scale for 32 inputs" in str(card)


def photon_config(folder):
    return open_checkpoint(folder, dtype="float32").config


def test_card_of_a_saved_checkpoint_is_that_of_its_source(tmp_path):
    write_checkpoint(tmp_path / "hf")
    config = photon_config(tmp_path / "hf")
    files = {path.name: path.read_bytes() for path in (tmp_path / "hf").glob("*token*")}
    save_checkpoint(tmp_path / "saved", random_params(config, jax.random.key(1)), config, files=files)
    source, saved = (describe_checkpoint(tmp_path / name, dtype="float32") for name in ("hf", "saved"))
    assert dataclasses.replace(saved, path=source.path, tensor_types=source.tensor_types) == source
    assert sum(saved.tensor_types.values()) < sum(source.tensor_types.values())  # fused


def test_the_table_shows_each_part(tmp_path):
    write_hf_folder(tmp_path, BY_NAME["llama_yarn"])
    table = str(describe_checkpoint(tmp_path, dtype="float32"))
    rows = {line[:20].strip(): line[20:].strip() for line in table.splitlines()}
    assert rows["architecture"] == "LlamaForCausalLM"
    assert rows["context"].startswith(f"{BY_NAME['llama_yarn'].config['max_position_embeddings']} tokens, rope yarn")
    assert ", factor " in rows["context"]
    assert rows["text"] == "no tokenizer: token ids only"
    assert (rows["special tokens"], rows["generation defaults"]) == ("bos_token (1)", "none")
    assert rows["in memory"].endswith("; float32")


def test_more_ends_of_a_sequence_than_a_step_watches_are_an_error_naming_the_files(tmp_path):
    write_checkpoint(tmp_path, generation_config={"eos_token_id": list(range(40))})
    with pytest.raises(CheckpointError, match=r"eos_token_id in config\.json, generation_config\.json .* 40 ids"):
        describe_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": list(range(33))}))
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match="33 ids together; at most 32"):
        photon_jax.LLM(tmp_path, **ENGINE_FIELDS)
