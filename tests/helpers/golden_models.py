"""Small random checkpoints whose logits are kept as golden files: configurations, and weights drawn from a seed.

Read by scripts/make_model_goldens.py, which runs transformers, and by the tests, which don't: NumPy and safetensors
alone, nothing of the engine.
"""

import dataclasses
import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

GOLDEN_FOLDER = Path(__file__).parent.parent / "models" / "golden"
NUM_TOKENS = 4096
POSITIONS = (0, 1, 2, 3, 7, 15, 63, 127, 255, 511, 800, 1023, 1024, 2047, 4094, 4095)
SHORT_NUM_TOKENS = 512  # below the dynamic cases' trained length

_BASE: dict[str, object] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenModel:
    """One checkpoint: its name, its config.json, and the seed of its weights and tokens."""

    name: str
    config: dict[str, object]
    seed: int

    @property
    def golden_path(self) -> Path:
        return GOLDEN_FOLDER / f"{self.name}.npz"


def _model(seed: int, name: str, architecture: str, **fields: object) -> GoldenModel:
    model_type = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}.get(
        architecture, architecture.removesuffix("ForCausalLM").lower()
    )
    config = {"architectures": [architecture], "model_type": model_type, **_BASE, **fields}
    return GoldenModel(name=name, config=config, seed=seed)


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}

# both forms of the rope configuration, both keys of its kind, tied and untied heads are spread over the cases
MODELS = (
    _model(11, "llama_tied", "LlamaForCausalLM", tie_word_embeddings=True, rope_theta=10000.0),
    _model(12, "llama_untied", "LlamaForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 50000.0}),
    _model(13, "llama_bias", "LlamaForCausalLM", attention_bias=True, mlp_bias=True, rope_theta=10000.0),
    _model(14, "llama_linear", "LlamaForCausalLM", rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 4.0}),
    _model(
        15,
        "llama_dynamic",
        "LlamaForCausalLM",
        max_position_embeddings=1024,
        rope_theta=10000.0,
        rope_scaling={"rope_type": "dynamic", "factor": 2.0},
    ),
    _model(
        16,
        "llama_dynamic_new",
        "LlamaForCausalLM",
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 20000.0},
    ),
    _model(
        17,
        "llama_llama3",
        "LlamaForCausalLM",
        tie_word_embeddings=True,
        rope_theta=10000.0,
        rope_scaling={"rope_type": "llama3", **_LLAMA3},
    ),
    _model(
        18,
        "llama_llama3_new",
        "LlamaForCausalLM",
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **_LLAMA3},
    ),
    _model(
        19,
        "llama_yarn",
        "LlamaForCausalLM",
        max_position_embeddings=4096,
        rope_theta=10000.0,
        rope_scaling={"type": "yarn", **_YARN},
    ),
    _model(
        20,
        "qwen3_yarn_new",
        "Qwen3ForCausalLM",
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "beta_fast": 16, "truncate": False, **_YARN},
    ),
    _model(21, "qwen2", "Qwen2ForCausalLM", rope_theta=10000.0, use_sliding_window=False, sliding_window=4096),
    _model(22, "qwen3", "Qwen3ForCausalLM", head_dim=32, tie_word_embeddings=True, rope_theta=10000.0),
    _model(23, "mistral", "MistralForCausalLM", head_dim=32, sliding_window=None, rope_theta=10000.0),
)


def token_ids(model: GoldenModel) -> np.ndarray:  # i32[1 4096]
    """Returns the tokens that the golden logits belong to."""
    random = np.random.RandomState(model.seed)
    return random.randint(0, model.config["vocab_size"], (1, NUM_TOKENS)).astype(np.int32)


def draw_weights(model: GoldenModel) -> dict[str, np.ndarray]:
    """Returns float32 tensors by their Hugging Face names: 1/sqrt(fan_in), norms around one, biases around zero.

    Each tensor has a stream of its own, of the generator whose numbers NumPy promises never to change.
    """
    return {name: _draw(model.seed, name, shape) for name, shape in tensor_shapes(model.config).items()}


def tensor_shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a checkpoint's tensors by their Hugging Face names."""
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    architecture = config["architectures"][0]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    has_attention_bias = config.get("attention_bias", False)
    linears = {
        "self_attn.q_proj": (heads * head_dim, hidden, has_attention_bias or architecture.startswith("Qwen2")),
        "self_attn.k_proj": (kv_heads * head_dim, hidden, has_attention_bias or architecture.startswith("Qwen2")),
        "self_attn.v_proj": (kv_heads * head_dim, hidden, has_attention_bias or architecture.startswith("Qwen2")),
        "self_attn.o_proj": (hidden, heads * head_dim, has_attention_bias),
        "mlp.gate_proj": (mlp, hidden, config.get("mlp_bias", False)),
        "mlp.up_proj": (mlp, hidden, config.get("mlp_bias", False)),
        "mlp.down_proj": (hidden, mlp, config.get("mlp_bias", False)),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, (outputs, inputs, has_bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (outputs, inputs)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (outputs,)
        if architecture.startswith("Qwen3"):
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def _draw(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = np.random.RandomState([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if "norm" in name:
        noise = 1.0 + 0.3 * noise
    elif name.endswith("bias"):
        noise = 0.3 * noise
    else:
        noise = noise / np.sqrt(shape[-1])
    return noise.astype(np.float32)


def write_hf_folder(folder: Path, model: GoldenModel, *, num_shards: int = 1) -> dict[str, np.ndarray]:
    """Writes config.json and safetensors as a Hugging Face checkpoint has them; returns the tensors."""
    weights = draw_weights(model)
    write_config(folder, model.config)
    write_weights(folder, weights, num_shards=num_shards)
    return weights


def write_config(folder: Path, config: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_weights(folder: Path, weights: dict[str, np.ndarray], *, num_shards: int = 1) -> None:
    """Writes tensors to one file, or round-robin to several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{shard + 1:05}-of-{num_shards:05}.safetensors" for shard in range(num_shards)]
    weight_map = {name: files[i % num_shards] for i, name in enumerate(weights)}
    for file in files:
        part = {name: weights[name] for name in weights if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
