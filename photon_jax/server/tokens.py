"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer for clients that have none."""

from typing import TYPE_CHECKING

from fastapi import APIRouter

from photon_jax.server.chat_prompt import encode_chat
from photon_jax.server.documents import errors
from photon_jax.server.errors import FieldError, about_field
from photon_jax.server.logprobs import TokenNames
from photon_jax.server.protocol_tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
)
from photon_jax.server.sampling import check_model
from photon_jax.server.state import ServerState
from photon_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from photon_jax.client.async_llm import AsyncLLM

_READING = errors(400, 401, 404, 413, 500, 503)


def router(state: ServerState) -> APIRouter:
    """Returns the endpoints; their handlers run in threads, as a long text takes a while."""
    api = APIRouter()

    @api.post("/tokenize", responses=_READING, response_model_exclude_unset=True)
    def tokenize(body: TokenizeRequest) -> TokenizeAnswer:
        """Returns the token ids of a prompt or of a conversation, as generating from it would use them."""
        check_model(state, body.model)
        engine = state.ready_engine()
        ids = _encode(_tokenizer_of(engine), body)
        answer: TokenizeAnswer = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}
        if body.return_token_strs:
            names = TokenNames(engine.llm.tokenizer)
            answer["token_strs"] = [names.text_of(token_id) for token_id in ids]
        return answer

    @api.post("/detokenize", responses=_READING)
    def detokenize(body: DetokenizeRequest) -> DetokenizeAnswer:
        """Returns the text of token ids, special tokens too."""
        check_model(state, body.model)
        tokenizer = _tokenizer_of(state.ready_engine())
        with about_field("tokens"):
            return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}

    @api.get("/tokenizer_info", responses=errors(400, 401, 500, 503))
    def tokenizer_info() -> TokenizerInfo:
        """Returns special tokens and the chat template, under the names of tokenizer_config.json."""
        engine = state.ready_engine()
        tokenizer = _tokenizer_of(engine)
        texts = {name: text for name, (text, _) in tokenizer.special_tokens.items()}
        return {
            "tokenizer_class": "photon_jax",
            "vocab_size": tokenizer.vocab_size,
            "bos_token": texts.get("bos_token"),
            "eos_token": texts.get("eos_token"),
            "pad_token": texts.get("pad_token"),
            "unk_token": texts.get("unk_token"),
            "add_bos_token": tokenizer.encode("")[:1] == [tokenizer.bos_token_id],
            "chat_template": tokenizer.chat_template,
            "model_max_length": engine.max_model_len,
        }

    return api


def _tokenizer_of(engine: "AsyncLLM") -> Tokenizer:
    if engine.llm.tokenizer is None:
        raise FieldError(None, "the model has no tokenizer: prompts must be token ids")
    return engine.llm.tokenizer


def _encode(tokenizer: Tokenizer, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise FieldError("prompt", "give either prompt or messages")
    if body.prompt is not None:
        with about_field("prompt"):
            return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    assert body.messages is not None, "neither a prompt nor messages"
    prompt = encode_chat(
        tokenizer,
        body.messages,
        tools=[tool.model_dump(exclude_unset=True) for tool in body.tools] if body.tools else None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )
    return list(prompt.token_ids)
