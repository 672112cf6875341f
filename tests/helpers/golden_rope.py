"""Rotary embeddings whose frequencies, cosines and sines are kept in a golden file. NumPy and no engine."""

import dataclasses

from helpers.golden_models import GOLDEN_FOLDER

GOLDEN_PATH = GOLDEN_FOLDER / "rope.npz"
POSITIONS = (0, 1, 4095, 8192, 100000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeCase:
    """The config.json fields that decide the rotary embedding, and the length it serves."""

    config: dict[str, object]
    seq_len: int = 4096


def _case(head_dim: int, max_position_embeddings: int = 32768, seq_len: int = 4096, **fields: object) -> RopeCase:
    shape = {
        "hidden_size": 4 * head_dim,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_position_embeddings,
    }
    return RopeCase(config={**shape, **fields}, seq_len=seq_len)


_LLAMA32 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}

CASES = {
    "default": _case(64, rope_theta=100000.0),
    "default_128": _case(128, rope_theta=1000000.0),
    "default_without_theta": _case(64),
    "default_new": _case(64, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    "theta_inside_wins": _case(64, rope_theta=10000.0, rope_parameters={"rope_theta": 250000.0}),
    "linear_type": _case(64, rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 8.0}),
    "linear_new": _case(64, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}),
    "dynamic_within": _case(64, 4096, 4096, rope_theta=10000.0, rope_scaling=_DYNAMIC),
    "dynamic_beyond": _case(64, 4096, 10000, rope_theta=10000.0, rope_scaling=_DYNAMIC),
    "dynamic_original_ignored": _case(
        64, 4096, 10000, rope_theta=10000.0, rope_scaling={**_DYNAMIC, "original_max_position_embeddings": 1024}
    ),
    "llama3": _case(64, 131072, rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **_LLAMA32}),
    "llama3_type": _case(128, 131072, rope_theta=500000.0, rope_scaling={"type": "llama3", **_LLAMA32, "factor": 8.0}),
    "llama3_new": _case(
        128, 131072, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **_LLAMA32, "factor": 8.0}
    ),
    "llama3_original_from_length": _case(
        64,
        8192,
        rope_theta=500000.0,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "llama3_original_beside": _case(
        64,
        131072,
        rope_theta=500000.0,
        original_max_position_embeddings=4096,
        rope_scaling={"rope_type": "llama3", **_LLAMA32},
    ),
    "yarn": _case(128, rope_theta=1000000.0, rope_scaling={"type": "yarn", **_YARN}),
    "yarn_new": _case(
        64,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 24, "beta_slow": 2},
    ),
    "yarn_not_truncated": _case(
        64, rope_theta=150000.0, rope_scaling={"rope_type": "yarn", "truncate": False, **_YARN}
    ),
    "yarn_mscale": _case(
        64, rope_theta=10000.0, rope_scaling={"rope_type": "yarn", "mscale": 0.707, "mscale_all_dim": 1.2, **_YARN}
    ),
    "yarn_mscale_alone": _case(64, rope_theta=10000.0, rope_scaling={"rope_type": "yarn", "mscale": 0.707, **_YARN}),
    "yarn_attention_factor": _case(
        64,
        rope_theta=10000.0,
        rope_scaling={"rope_type": "yarn", "attention_factor": 1.25, "mscale": 2.0, "mscale_all_dim": 1.0, **_YARN},
    ),
}
