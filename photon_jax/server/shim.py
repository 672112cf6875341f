"""Endpoint /api/chat: one message in, one answer out, as clients of the system before this one ask."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter
from fastapi.requests import Request
from pydantic import Field
from typing_extensions import TypedDict

from photon_jax.client.submission import Prompt
from photon_jax.request import SamplingParams
from photon_jax.server.answering import Asked, generate_all
from photon_jax.server.documents import reading
from photon_jax.server.errors import FieldError, about_field
from photon_jax.server.ids import random_id
from photon_jax.server.protocol import Fields
from photon_jax.server.sampling import check_length, check_text
from photon_jax.server.state import ServerState
from photon_jax.server.streaming import unless_disconnected

if TYPE_CHECKING:
    from photon_jax.client.async_llm import AsyncLLM

DEFAULT_MAX_TOKENS = 512


class OldChatRequest(Fields):
    """A message.

    Attributes:
      session_id: taken, and without effect: the server keeps no conversations.
    """

    message: Annotated[str, Field(min_length=1)]
    session_id: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None


class OldChatAnswer(TypedDict):
    """An answer.

    Attributes:
      tokens: of the answer.
      duration_ms: from the request to its end.
    """

    response: str
    tokens: int
    duration_ms: float


def router(state: ServerState) -> APIRouter:
    """Returns the endpoint."""
    routes = APIRouter()

    @routes.post("/api/chat", responses=reading(OldChatAnswer))
    async def old_chat(body: OldChatRequest, request: Request) -> OldChatAnswer:
        """Answers one message, of a conversation that begins with it."""
        begin = time.perf_counter()
        engine = state.ready_engine()
        asked = await asyncio.to_thread(_asked, engine, body)
        work = generate_all(engine, [asked], f"chat-{random_id()}")
        (output,) = await unless_disconnected(request, work)
        (answer,) = output.outputs
        return {
            "response": answer.text,
            "tokens": len(answer.token_ids),
            "duration_ms": round(1_000 * (time.perf_counter() - begin), 3),
        }

    return routes


def _asked(engine: "AsyncLLM", body: OldChatRequest) -> Asked:
    tokenizer = engine.llm.tokenizer
    if tokenizer is None:
        raise FieldError("message", "the model has no tokenizer, so it can't chat; use /v1/completions with token ids")
    check_text(tokenizer, len(body.message), engine.max_model_len, param="message")
    with about_field("message"):
        ids = tokenizer.encode_chat([{"role": "user", "content": body.message}])
    room = engine.max_model_len - len(ids)
    max_tokens = max(1, min(DEFAULT_MAX_TOKENS, room)) if body.max_tokens is None else body.max_tokens
    check_length(len(ids), max_tokens, engine.max_model_len, param="message")
    params = SamplingParams(max_tokens=max_tokens, temperature=body.temperature, top_p=body.top_p)
    return Asked(Prompt(token_ids=tuple(ids)), params)
