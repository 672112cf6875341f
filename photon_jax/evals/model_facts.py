"""What the harness writes into its results about the model and its tokenizer."""

import dataclasses
import hashlib
from collections.abc import Mapping

import jax
import numpy as np

from photon_jax.describe import ModelCard
from photon_jax.models.params import Params
from photon_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFacts:
    """What the harness reads off a tokenizer, under the names that it uses."""

    name_or_path: str
    chat_template: str | Mapping[str, str] | None
    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    pad_token: str | None
    pad_token_id: int | None


def tokenizer_facts(tokenizer: Tokenizer, card: ModelCard, eos_token_id: int) -> TokenizerFacts:
    """Returns the facts; a template that is the only one is given without its name."""
    special, templates = tokenizer.special_tokens, tokenizer.chat_templates
    bos_token, bos_token_id = special.get("bos_token", (None, None))
    pad_token, pad_token_id = special.get("pad_token", (None, None))
    return TokenizerFacts(
        name_or_path=str(card.path),
        chat_template=templates.get("default") if len(templates) < 2 else templates,
        bos_token=bos_token,
        bos_token_id=bos_token_id,
        eos_token=tokenizer.decode([eos_token_id], skip_special_tokens=False),
        eos_token_id=eos_token_id,
        pad_token=pad_token,
        pad_token_id=pad_token_id,
    )


def model_facts(card: ModelCard, params: Params) -> dict[str, object]:
    """Returns what identifies the model and its arithmetic; reads all weights for their hash."""
    quantization = card.quantization
    return {
        "model_path": str(card.path),
        "model_num_parameters": card.num_parameters,
        "model_dtype": card.dtype,
        "model_kv_dtype": card.kv_dtype,
        "model_quantization": None if quantization is None else f"int8, groups of {quantization.group_size}",
        "model_sha": weights_hash(params),
        "model_device": jax.devices()[0].device_kind,
    }


def weights_hash(params: Params) -> str:
    """Returns the SHA-256 of the weights as they are in memory: of each leaf its path, dtype, shape and bytes."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        array = np.ascontiguousarray(jax.device_get(leaf))
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        found.update(memoryview(array.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]  # a buffer all the same
    return found.hexdigest()
