"""Checkpoint folders of the tiny model, in Hugging Face's layout, with a byte-level tokenizer or without one.

Two kinds of weights with one shape, so that they share compiled programs: random ones, and a chain, whose greedy
continuation is written down by hand.
"""

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from helpers.small_tokenizers import train_byte_level
from helpers.tiny_model import tiny_config, tiny_params
from safetensors.numpy import save_file

from photon_jax.models.config import ModelConfig
from photon_jax.models.params import Params

VOCAB_SIZE = 432  # padded beyond the tokenizer's 420
BEGIN, END, TURN = 0, 1, 2  # special tokens of the tokenizer
# LLMs of all tests that can do with them: engines of one geometry share their programs within a process
ENGINE_FIELDS = {
    "block_size": 16,
    "num_blocks": 40,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 256,
    "progress": False,
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt }}"
)
TOKENIZER_CONFIG = {
    "bos_token": "<|begin|>",
    "eos_token": "<|end|>",
    "add_bos_token": True,
    "chat_template": CHAT_TEMPLATE,
}


def checkpoint_config(**changes) -> ModelConfig:
    """Returns the shape of all checkpoints here; <|end|> ends a sequence."""
    return tiny_config(**{"vocab_size": VOCAB_SIZE, "tie_word_embeddings": False, "eos_token_ids": (END,)} | changes)


@functools.cache
def small_tokenizer() -> tokenizers.Tokenizer:
    return train_byte_level()


def chain_params(config: ModelConfig, chains: list[list[int]]) -> Params:
    """Returns weights whose greedy token depends on the last token alone.

    Each token of a chain is followed by the next one of that chain, no token may be in two places; a token that no
    chain continues is followed by its own id plus one. The likeliest token leads by tens of nats.
    """
    successors = {token_id: (token_id + 1) % config.vocab_size for token_id in range(config.vocab_size)}
    links = [link for chain in chains for link in itertools.pairwise(chain)]
    assert len({first for first, _ in links}) == len(links), "a token is followed by two others"
    successors.update(links)
    embedding = np.random.default_rng(5).standard_normal((config.vocab_size, config.hidden_size)).astype(np.float32)
    lm_head = np.zeros_like(embedding)
    for first, second in successors.items():
        lm_head[second] += embedding[first]
    zeroed = jax.tree.map(jnp.zeros_like, tiny_params(config))
    return dataclasses.replace(
        zeroed,
        embedding=jnp.asarray(embedding),
        final_norm=jnp.ones_like(zeroed.final_norm),
        lm_head=jnp.asarray(lm_head),
    )


def write_checkpoint(
    folder: Path,
    *,
    params: Params | None = None,
    config: ModelConfig | None = None,
    tokenizer_config: dict[str, object] | None = TOKENIZER_CONFIG,
    generation_config: dict[str, object] | None = None,
) -> Path:
    """Writes a checkpoint and returns its folder.

    Args:
      params: of `config`; None for random ones.
      tokenizer_config: None for a folder without a tokenizer.
      generation_config: None for none.
    """
    config = config or checkpoint_config()
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _hf_config(config))
    save_file(_hf_tensors(params or tiny_params(config), config), folder / "model.safetensors")
    if tokenizer_config is not None:
        (folder / "tokenizer.json").write_text(small_tokenizer().to_str(), encoding="utf-8")
        _write_json(folder / "tokenizer_config.json", tokenizer_config)
    if generation_config is not None:
        _write_json(folder / "generation_config.json", generation_config)
    return folder


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _hf_config(config: ModelConfig) -> dict[str, object]:
    eos = config.eos_token_ids
    return {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
        "torch_dtype": "float32",
    }


def _hf_tensors(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    tensors = {"model.embed_tokens.weight": params.embedding, "model.norm.weight": params.final_norm}
    if params.lm_head is not None:
        tensors["lm_head.weight"] = params.lm_head
    groups, dim = config.num_groups, config.head_dim
    for number, layer in enumerate(params.layers):
        # [I O] -> [O I], outputs grouped by KV head -> [K G+2 d I]
        qkv = np.asarray(layer.qkv_proj.weight).T.reshape(config.num_kv_heads, groups + 2, dim, config.hidden_size)
        gate, up = np.split(np.asarray(layer.gate_up_proj.weight).T, 2)
        weights = {
            "input_layernorm": layer.input_norm,
            "self_attn.q_proj": qkv[:, :groups].reshape(-1, config.hidden_size),
            "self_attn.k_proj": qkv[:, groups].reshape(-1, config.hidden_size),
            "self_attn.v_proj": qkv[:, groups + 1].reshape(-1, config.hidden_size),
            "self_attn.o_proj": layer.o_proj.weight.T,
            "post_attention_layernorm": layer.post_attention_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down_proj.weight.T,
        }
        tensors |= {f"model.layers.{number}.{name}.weight": weight for name, weight in weights.items()}
    return {name: np.ascontiguousarray(np.asarray(tensor)) for name, tensor in tensors.items()}


def draw_ids(seed: int, length: int) -> list[int]:
    """Returns random token ids, none of them special."""
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()
