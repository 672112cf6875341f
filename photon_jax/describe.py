"""Model card: what a checkpoint is and what it takes, from its headers alone or from a model that runs."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import jax

from photon_jax.cache.kv_cache import bytes_per_block
from photon_jax.checkpoint.load import OpenedCheckpoint, open_checkpoint
from photon_jax.config import KVDType
from photon_jax.models.config import QuantizationConfig, RopeConfig
from photon_jax.models.params import Params, abstract_params
from photon_jax.quantization.report import QuantizationReport, read_report
from photon_jax.text.tokenizer import Tokenizer, all_eos_token_ids, find_tokenizer

# part of a model -> the leaves of Params that belong to it
_PARTS = {
    "embedding": re.compile(r"^\.embedding\b"),
    "attention": re.compile(r"\.(qkv_proj|o_proj)\b"),
    "mlp": re.compile(r"\.(gate_up_proj|down_proj)\b"),
    "norms": re.compile(r"\.\w*norm\b"),
    "head": re.compile(r"^\.lm_head\b"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """What a model is made of; `str` of it is a table for people.

    Attributes:
      path: of the checkpoint.
      architecture: the checkpoint's name for it, such as "LlamaForCausalLM".
      num_layers, hidden_size, num_heads, num_kv_heads, head_dim, mlp_size, vocab_size: its shape.
      num_parameters: weights of the checkpoint that are used; a head tied to the embedding counts once.
      has_tied_head: whether the head is the embedding.
      dtype: of the parameters in memory, and of the cache unless kv_dtype says otherwise.
      kv_dtype: of the keys and values in the cache.
      quantization: how int8 weights are kept in memory, None for none.
      tensor_types: how the file stores its tensors: type -> how many.
      disk_bytes: bytes of the tensors in the file, by part of the model.
      memory_bytes: bytes of the parameters in memory, by part of the model.
      kv_bytes_per_token: what the cache takes for a token, keys and values of all layers.
      max_position_embeddings: longest context that the model was made for, in tokens.
      rope: rotary embedding and its scaling.
      special_tokens: name, such as bos_token, -> text and id, as the tokenizer declares them.
      bos_token_id: None where the checkpoint names none.
      eos_token_ids: each id that ends a sequence.
      has_tokenizer, has_chat_template: whether text, and whether conversations, can be encoded.
      generation_defaults: sampling parameters that the checkpoint recommends.
      quantization_report: what making the checkpoint int8 cost, where it says so.
    """

    path: Path
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    vocab_size: int
    num_parameters: int
    has_tied_head: bool
    dtype: str
    quantization: QuantizationConfig | None
    tensor_types: Mapping[str, int]
    disk_bytes: Mapping[str, int]
    memory_bytes: Mapping[str, int]
    kv_dtype: str
    kv_bytes_per_token: int
    max_position_embeddings: int
    rope: RopeConfig
    special_tokens: Mapping[str, tuple[str, int]]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    has_chat_template: bool
    generation_defaults: Mapping[str, object]
    quantization_report: QuantizationReport | None = None

    def __str__(self) -> str:
        rows = _rows(self)
        width = max(len(name) for name in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def describe_checkpoint(
    path: str | Path,
    *,
    dtype: str = "auto",
    quantization: QuantizationConfig | None = None,
    use_generation_config: bool = True,
    kv_dtype: KVDType = "auto",
) -> ModelCard:
    """Returns the card of a checkpoint on disk; reads its headers, its configuration and its tokenizer, no weight.

    Args:
      path, dtype, quantization, use_generation_config: as in `load_checkpoint`.
      kv_dtype: as in CacheConfig.

    Raises:
      CheckpointError: the checkpoint is missing, damaged, incomplete, or of a kind that isn't supported.
    """
    opened = open_checkpoint(path, dtype=dtype, use_generation_config=use_generation_config)
    config = opened.config.with_quantization(opened.config.quantization or quantization)
    opened = dataclasses.replace(opened, config=config)
    return make_card(opened, find_tokenizer(opened.tokenizer_source), abstract_params(config), kv_dtype=kv_dtype)


def make_card(opened: OpenedCheckpoint, tokenizer: Tokenizer | None, params: Params, *, kv_dtype: KVDType) -> ModelCard:
    """Returns the card of an opened checkpoint whose parameters are `params`, arrays or their abstract tree."""
    config = opened.config
    sources = [(path, source) for path, leaf in opened.weight_map.leaves.items() for source in leaf]
    disk = [(path, opened.tensors.num_bytes(source.name)) for path, source in sources]
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    memory = [(jax.tree_util.keystr(path), leaf.size * leaf.dtype.itemsize) for path, leaf in leaves]
    types = sorted(opened.tensors.dtype_name(source.name) for _, source in sources)
    bos = config.bos_token_id if tokenizer is None or tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return ModelCard(
        path=opened.path,
        architecture=config.architecture,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mlp_size=config.mlp_size,
        vocab_size=config.vocab_size,
        num_parameters=sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config.with_quantization(None)))),
        has_tied_head=config.tie_word_embeddings,
        dtype=config.dtype,
        quantization=config.quantization,
        tensor_types={name: types.count(name) for name in dict.fromkeys(types)},
        disk_bytes=_by_part(disk),
        memory_bytes=_by_part(memory),
        kv_dtype=config.dtype if kv_dtype == "auto" else kv_dtype,
        kv_bytes_per_token=bytes_per_block(config, 1, kv_dtype),
        max_position_embeddings=config.max_position_embeddings,
        rope=config.rope,
        special_tokens={} if tokenizer is None else tokenizer.special_tokens,
        bos_token_id=bos,
        eos_token_ids=all_eos_token_ids(opened.eos_token_ids, tokenizer, vocab_size=config.vocab_size),
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        generation_defaults=opened.generation_config,
        quantization_report=read_report(opened.path),
    )


def _by_part(sizes: list[tuple[str, int]]) -> dict[str, int]:
    """Returns the bytes of each part; leaves are named by their key path in Params."""
    found = dict.fromkeys(_PARTS, 0)
    for path, num_bytes in sizes:
        found[next(part for part, pattern in _PARTS.items() if pattern.search(path))] += num_bytes
    return {part: num_bytes for part, num_bytes in found.items() if num_bytes}


def _rows(card: ModelCard) -> dict[str, str]:
    named = {name: f"{name} {text!r} ({token_id})" for name, (text, token_id) in card.special_tokens.items()}
    if card.bos_token_id is not None and "bos_token" not in named:
        named["bos_token"] = f"bos_token ({card.bos_token_id})"
    return {
        "model": str(card.path),
        "architecture": card.architecture,
        "parameters": f"{card.num_parameters:,}" + (", head tied to the embedding" if card.has_tied_head else ""),
        "shape": f"{card.num_layers} layers, hidden {card.hidden_size}, mlp {card.mlp_size}, vocabulary "
        f"{card.vocab_size}",
        "attention": f"{card.num_heads} heads, {card.num_kv_heads} key-value heads, head size {card.head_dim}",
        "context": f"{card.max_position_embeddings} tokens, {_rope_text(card.rope)}",
        "on disk": f"{_sizes_text(card.disk_bytes)}; {_counts_text(card.tensor_types)}",
        "in memory": f"{_sizes_text(card.memory_bytes)}; {card.dtype}{_int8_text(card.quantization)}",
        **({} if card.quantization_report is None else {"int8": str(card.quantization_report)}),
        "KV cache": f"{card.kv_bytes_per_token:,} bytes a token, {card.kv_dtype}",
        "special tokens": ", ".join(named.values()) or "none",
        "ends a sequence": ", ".join(map(str, card.eos_token_ids)) or "no token",
        "text": "no tokenizer: token ids only"
        if not card.has_tokenizer
        else f"tokenizer, {'chat template' if card.has_chat_template else 'no chat template'}",
        "generation defaults": ", ".join(f"{name} {value}" for name, value in card.generation_defaults.items())
        or "none",
    }


def _rope_text(rope: RopeConfig) -> str:
    scaling = "" if rope.kind == "default" else f", factor {rope.factor:g}"
    return f"rope {rope.kind}, theta {rope.theta:g}{scaling}"


def _int8_text(quantization: QuantizationConfig | None) -> str:
    if quantization is None:
        return ""
    what = "all matrices" if quantization.has_embedding else "linear layers"
    return f", {what} int8 with a scale for {quantization.group_size} inputs"


def _sizes_text(sizes: Mapping[str, int]) -> str:
    parts = ", ".join(f"{part} {num_bytes / 2**20:.1f}" for part, num_bytes in sizes.items())
    return f"{sum(sizes.values()) / 2**20:.1f} MiB ({parts})"


def _counts_text(types: Mapping[str, int]) -> str:
    return "tensors: " + ", ".join(f"{count} {name}" for name, count in types.items())
