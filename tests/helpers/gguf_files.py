"""Tiny GGUF files of the golden checkpoints: fields, names and row order as converters write them."""

import gguf
import numpy as np
from helpers.golden_models import draw_weights

TYPES = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
    "Q4_1": gguf.GGMLQuantizationType.Q4_1,
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf_name):
    stem, suffix = hf_name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"


def interleave_pairs(tensor, head_dim):
    """Reorders the rows of each head from two halves to neighbouring pairs, as converters to "llama" do."""
    halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def gguf_tensors(model):
    """Returns float32 tensors under their GGUF names."""
    config = model.config
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    tensors = {}
    for name, tensor in draw_weights(model).items():
        if architecture(model) == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = interleave_pairs(tensor, head_dim)
        tensors[gguf_name(name)] = tensor
    return tensors


def architecture(model):
    return "llama" if model.config["model_type"] == "mistral" else model.config["model_type"]


def gguf_fields(model):
    """Returns the metadata of a checkpoint without rope scaling."""
    config, prefix = model.config, architecture(model)
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return {
        f"{prefix}.block_count": config["num_hidden_layers"],
        f"{prefix}.context_length": config["max_position_embeddings"],
        f"{prefix}.embedding_length": config["hidden_size"],
        f"{prefix}.feed_forward_length": config["intermediate_size"],
        f"{prefix}.attention.head_count": config["num_attention_heads"],
        f"{prefix}.attention.head_count_kv": config["num_key_value_heads"],
        f"{prefix}.attention.key_length": head_dim,
        f"{prefix}.attention.value_length": head_dim,
        f"{prefix}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{prefix}.rope.dimension_count": head_dim,
        f"{prefix}.rope.freq_base": config.get("rope_theta", 10000.0),
        f"{prefix}.vocab_size": config["vocab_size"],
        "general.file_type": 0,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(config["vocab_size"])],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(path, prefix, fields, tensors, type_name="F32"):
    """Writes a file; matrices in the type named, vectors in float32, integer matrices as they are.

    Returns the float32 values that the file stands for.
    """
    writer = gguf.GGUFWriter(path, prefix)
    for key, value in fields.items():
        _add_field(writer, key, value)
    stored = {}
    for name, tensor in tensors.items():
        kind = TYPES[type_name] if tensor.ndim > 1 else TYPES["F32"]
        if tensor.dtype == np.int32:
            writer.add_tensor(name, tensor)
            continue
        data = gguf.quantize(tensor, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        stored[name] = gguf.dequantize(data, kind).astype(np.float32).reshape(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _add_field(writer, key, value):
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
