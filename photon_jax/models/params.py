"""Model parameters as an immutable PyTree, and the abstract tree that fixes their shapes before any array exists."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from photon_jax.models.config import ModelConfig, QuantizationConfig
from photon_jax.quantization.int8 import Q_MAX, QuantizedLinear, check_group_size, num_groups


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DenseLinear:
    """A linear layer: y = x @ weight + bias.

    The weight is stored inputs first, the transpose of a checkpoint's: on a CPU a product with one to eight rows then
    reads it at memory speed, while outputs first is repacked on every call (measured on the demo model's shapes:
    0.59 ms against 1.02 ms a layer with two rows, 0.93 against 1.16 with eight).

    Attributes:
      has_outputs_first: the weight lies [O I] after all, as a kernel writes it that dequantizes.
    """

    weight: jax.Array  # [I O]
    bias: jax.Array | None = None  # [O]
    has_outputs_first: bool = dataclasses.field(default=False, metadata={"static": True})


Linear = DenseLinear | QuantizedLinear
Table = jax.Array | QuantizedLinear  # of an embedding or head, [V D]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerParams:
    """Weights of one decoder layer; shapes of linears are those of the dense form.

    Attributes:
      qkv_proj: [D K*(G+2)*d], outputs grouped by KV head: for each, its G query heads, its key, its value.
      gate_up_proj: [D 2*F], the gate's outputs, then the up projection's.
    """

    input_norm: jax.Array  # [D]
    qkv_proj: Linear
    q_norm: jax.Array | None  # [d]
    k_norm: jax.Array | None  # [d]
    o_proj: Linear  # [H*d D]
    post_attention_norm: jax.Array  # [D]
    gate_up_proj: Linear
    down_proj: Linear  # [F D]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Params:
    """Weights of a model. A tied head has no leaf of its own: it reads the embedding.

    Layers are separate leaves and unrolled in the step: on a CPU a slice of stacked weights is copied before the
    matmul that reads it (measured: 181 ms a pass against 37 on the demo model's shape).
    """

    embedding: Table  # [V D]
    layers: tuple[LayerParams, ...]
    final_norm: jax.Array  # [D]
    lm_head: Table | None  # [V D], outputs first like the embedding, None when tied to it

    @property
    def head(self) -> Table:
        """The output projection [V D], the embedding itself when tied."""
        return self.embedding if self.lm_head is None else self.lm_head


def abstract_params(config: ModelConfig) -> Params:
    """Returns the tree of `jax.ShapeDtypeStruct` that parameters of `config` have, int8 where it says so.

    Raises:
      ConfigError: a group of the quantization is larger than a layer's inputs.
    """
    dtype = jnp.dtype(config.dtype)
    hidden, mlp, head_dim = config.hidden_size, config.mlp_size, config.head_dim

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def linear(name: str, outputs: int, inputs: int, has_bias: bool) -> Linear:
        bias = array(outputs) if has_bias else None
        if config.quantization is not None:
            return _abstract_quantized(name, outputs, inputs, config.quantization, bias)
        return DenseLinear(weight=array(inputs, outputs), bias=bias)  # type: ignore[arg-type]

    def table(name: str) -> Table:
        if config.quantization is not None and config.quantization.has_embedding:
            return _abstract_quantized(name, config.vocab_size, hidden, config.quantization, None)
        return array(config.vocab_size, hidden)  # type: ignore[return-value]

    def layer(index: int) -> LayerParams:
        place = f"layers[{index}]."
        return LayerParams(
            input_norm=array(hidden),  # type: ignore[arg-type]
            qkv_proj=linear(f"{place}qkv_proj", config.qkv_size, hidden, config.has_qkv_bias),
            q_norm=array(head_dim) if config.has_qk_norm else None,  # type: ignore[arg-type]
            k_norm=array(head_dim) if config.has_qk_norm else None,  # type: ignore[arg-type]
            o_proj=linear(f"{place}o_proj", hidden, config.num_heads * head_dim, config.has_o_bias),
            post_attention_norm=array(hidden),  # type: ignore[arg-type]
            gate_up_proj=linear(f"{place}gate_up_proj", 2 * mlp, hidden, config.has_mlp_bias),
            down_proj=linear(f"{place}down_proj", hidden, mlp, config.has_mlp_bias),
        )

    return Params(
        embedding=table("embedding"),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=array(hidden),  # type: ignore[arg-type]
        lm_head=None if config.tie_word_embeddings else table("lm_head"),
    )


def _abstract_quantized(
    name: str, outputs: int, inputs: int, quantization: QuantizationConfig, bias: jax.ShapeDtypeStruct | None
) -> QuantizedLinear:
    group_size = quantization.group_size
    check_group_size(group_size, inputs, name)
    return QuantizedLinear(
        q=jax.ShapeDtypeStruct((outputs, inputs), jnp.int8),  # type: ignore[arg-type]
        scale=jax.ShapeDtypeStruct((outputs, num_groups(inputs, group_size)), jnp.float32),  # type: ignore[arg-type]
        bias=bias,  # type: ignore[arg-type]
        group_size=group_size,
    )


def random_params(config: ModelConfig, key: jax.Array) -> Params:
    """Returns parameters drawn at 1/sqrt(fan_in), norms around one, biases around zero: for tests and benchmarks.

    Int8 values are drawn evenly, with one size of scale.
    """
    leaves, tree = jax.tree.flatten(abstract_params(config))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(abstract_params(config))[0]]

    def draw(index: int, path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if path.endswith(".q"):
            return jax.random.randint(jax.random.fold_in(key, index), leaf.shape, -Q_MAX, Q_MAX + 1, jnp.int8)
        if path.endswith(".scale"):
            num_inputs = leaves[index - 1].shape[-1]  # of q, the leaf before
            power = round(math.log2(math.sqrt(3 / num_inputs) / Q_MAX))  # products with int8 are exact
            return jnp.full(leaf.shape, 2.0**power, leaf.dtype)
        noise = jax.random.normal(jax.random.fold_in(key, index), leaf.shape, jnp.float32)
        if path.endswith("norm"):
            noise = 1.0 + 0.1 * noise
        elif path.endswith("bias"):
            noise = 0.1 * noise
        else:
            fan_in = leaf.shape[0] if path.endswith("weight") else leaf.shape[-1]
            noise = noise / math.sqrt(fan_in)
        return noise.astype(leaf.dtype)

    drawn = [draw(i, path, leaf) for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True))]
    params: Params = jax.tree.unflatten(tree, drawn)
    return params


def num_bytes(params: Params) -> int:
    """Returns the bytes of all distinct leaves."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
