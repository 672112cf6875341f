"""Weight map: which tensors of a checkpoint fill which leaf of Params, complete or an error."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

import numpy as np

from photon_jax.errors import CheckpointError
from photon_jax.models.config import ModelConfig

Part = Literal["whole", "query", "key", "value", "gate", "up"]
Style = Literal["hf", "gguf"]

_MAX_NAMED = 8
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^rope_freqs\.weight$")
_HEAD_NAMES = {"hf": "lm_head.weight", "gguf": "output.weight"}
# leaf of Params (layers without their number) -> (part, tensor without suffix) in the order of the leaf's outputs
_SOURCES: dict[Style, dict[str, tuple[tuple[Part, str], ...]]] = {
    "hf": {
        ".embedding": (("whole", "model.embed_tokens"),),
        ".final_norm": (("whole", "model.norm"),),
        ".lm_head": (("whole", "lm_head"),),
        ".input_norm": (("whole", "model.layers.{}.input_layernorm"),),
        ".qkv_proj": (
            ("query", "model.layers.{}.self_attn.q_proj"),
            ("key", "model.layers.{}.self_attn.k_proj"),
            ("value", "model.layers.{}.self_attn.v_proj"),
        ),
        ".q_norm": (("whole", "model.layers.{}.self_attn.q_norm"),),
        ".k_norm": (("whole", "model.layers.{}.self_attn.k_norm"),),
        ".o_proj": (("whole", "model.layers.{}.self_attn.o_proj"),),
        ".post_attention_norm": (("whole", "model.layers.{}.post_attention_layernorm"),),
        ".gate_up_proj": (("gate", "model.layers.{}.mlp.gate_proj"), ("up", "model.layers.{}.mlp.up_proj")),
        ".down_proj": (("whole", "model.layers.{}.mlp.down_proj"),),
    },
    "gguf": {
        ".embedding": (("whole", "token_embd"),),
        ".final_norm": (("whole", "output_norm"),),
        ".lm_head": (("whole", "output"),),
        ".input_norm": (("whole", "blk.{}.attn_norm"),),
        ".qkv_proj": (("query", "blk.{}.attn_q"), ("key", "blk.{}.attn_k"), ("value", "blk.{}.attn_v")),
        ".q_norm": (("whole", "blk.{}.attn_q_norm"),),
        ".k_norm": (("whole", "blk.{}.attn_k_norm"),),
        ".o_proj": (("whole", "blk.{}.attn_output"),),
        ".post_attention_norm": (("whole", "blk.{}.ffn_norm"),),
        ".gate_up_proj": (("gate", "blk.{}.ffn_gate"), ("up", "blk.{}.ffn_up")),
        ".down_proj": (("whole", "blk.{}.ffn_down"),),
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint and the part of a leaf that it fills.

    Attributes:
      name: of the tensor.
      part: which outputs of the leaf it holds.
      shape: of the tensor; a matrix has its outputs first.
      is_transposed: whether the leaf has its inputs first.
    """

    name: str
    part: Part
    shape: tuple[int, ...]
    is_transposed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class WeightMap:
    """Sources of every leaf.

    Attributes:
      config: of the model.
      leaves: key path of a leaf in Params, as `jax.tree_util.keystr` writes it -> its sources.
      is_interleaved: whether the rows of query and key heads are stored as rotary pairs, two neighbours a pair;
        Params hold them as two halves.
    """

    config: ModelConfig
    leaves: Mapping[str, tuple[Source, ...]]
    is_interleaved: bool

    def place(self, leaf: np.ndarray, source: Source, tensor: np.ndarray) -> None:
        """Writes a tensor into its part of the leaf, cast to the leaf's dtype; fused QKV is grouped by KV head."""
        rows = leaf.T if source.is_transposed else leaf  # outputs first, as in the tensor
        if source.part == "whole":
            np.copyto(rows, tensor, casting="unsafe")
        elif source.part in ("gate", "up"):
            start = 0 if source.part == "gate" else self.config.mlp_size
            np.copyto(rows[start : start + self.config.mlp_size], tensor, casting="unsafe")
        else:
            self._place_heads(rows, source.part, tensor)

    def _place_heads(self, rows: np.ndarray, part: Part, tensor: np.ndarray) -> None:
        kv_heads, groups, head_dim = self.config.num_kv_heads, self.config.num_groups, self.config.head_dim
        within = {"query": slice(groups), "key": slice(groups, groups + 1), "value": slice(groups + 1, groups + 2)}
        target = rows.reshape(kv_heads, groups + 2, 2, head_dim // 2, -1)[:, within[part]]  # [K heads 2 d/2 I]
        if self.is_interleaved and part != "value":
            pairs = tensor.reshape(kv_heads, target.shape[1], head_dim // 2, 2, -1)
            np.copyto(target, pairs.swapaxes(2, 3), casting="unsafe")
        else:
            np.copyto(target, tensor.reshape(target.shape), casting="unsafe")


def make_weight_map(
    config: ModelConfig, leaf_shapes: Mapping[str, tuple[int, ...]], style: Style, *, is_interleaved: bool = False
) -> WeightMap:
    """Returns the sources of the leaves that `models.params.abstract_params` has for this config.

    Args:
      config: of the model.
      leaf_shapes: key path -> shape of every leaf.
      style: whose tensor names.
      is_interleaved: as in `WeightMap`.
    """
    leaves = {path: _leaf_sources(config, path, shape, style) for path, shape in leaf_shapes.items()}
    return WeightMap(config, leaves, is_interleaved)


def _leaf_sources(config: ModelConfig, path: str, shape: tuple[int, ...], style: Style) -> tuple[Source, ...]:
    match = re.fullmatch(r"(?:\.layers\[(\d+)\])?(\.\w+)(\.weight|\.bias)?", path)
    assert match is not None, f"leaf {path} has no place in the weight map"
    layer, leaf, suffix = match.groups()
    is_transposed = suffix == ".weight"  # of a linear layer; the embedding, the head and the norms have no suffix
    outputs_first = shape[::-1] if is_transposed else shape
    rows: dict[Part, int] = {
        "whole": outputs_first[0],
        "query": config.num_heads * config.head_dim,
        "key": config.num_kv_heads * config.head_dim,
        "value": config.num_kv_heads * config.head_dim,
        "gate": config.mlp_size,
        "up": config.mlp_size,
    }
    return tuple(
        Source(template.format(layer) + (suffix or ".weight"), part, (rows[part], *outputs_first[1:]), is_transposed)
        for part, template in _SOURCES[style][leaf]
    )


def check_tensors(weight_map: WeightMap, shapes: Mapping[str, tuple[int, ...]], style: Style, where: str) -> None:
    """Raises CheckpointError unless the checkpoint has each tensor of the map in its shape, and no other.

    A head that is present though the embeddings are tied is skipped, as are stored rotary frequencies.
    """
    sources = {source.name: source for leaf in weight_map.leaves.values() for source in leaf}
    head_name = _HEAD_NAMES[style]
    missing = sorted(sources.keys() - shapes.keys())
    if missing == [head_name]:
        raise CheckpointError(
            f"{where} has no tensor {head_name}, though tie_word_embeddings is false; "
            "if the model shares it with the embedding, set tie_word_embeddings to true in its configuration"
        )
    if missing:
        raise CheckpointError(f"{where} lacks {_name_some(missing)}")
    surplus = sorted(name for name in shapes.keys() - sources.keys() if not _IGNORED.search(name))
    if weight_map.config.tie_word_embeddings and head_name in surplus:
        surplus.remove(head_name)
    if surplus:
        raise CheckpointError(
            f"{where} has {_name_some(surplus)} that {weight_map.config.architecture} has no place for "
            "with this configuration"
        )
    for name, source in sources.items():
        if tuple(shapes[name]) != source.shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(shapes[name])}, "
                f"the configuration asks for {list(source.shape)}"
            )


def _name_some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"
