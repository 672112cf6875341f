"""POST /v1/chat/completions."""

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.requests import Request
from starlette.responses import Response

from photon_jax.server.answering import Asked, compile_form, generate_all, make_head, make_job, stream_all
from photon_jax.server.chat_answer import ChatJob, chunk_events, whole_answer
from photon_jax.server.chat_parts import template_tools, tool_use
from photon_jax.server.chat_prompt import encode_chat, where_reasoning_is
from photon_jax.server.documents import generating
from photon_jax.server.errors import FieldError, about_field
from photon_jax.server.json_answer import JsonAnswer
from photon_jax.server.logprobs import TokenNames
from photon_jax.server.protocol_chat import ChatAnswer, ChatChunk, ChatRequest
from photon_jax.server.sampling import check_length, check_model, form_field, sampling_params
from photon_jax.server.state import ServerState
from photon_jax.server.streaming import EventStream, unless_disconnected
from photon_jax.server.unsupported import FieldCheck
from photon_jax.text.tool_calls import find_tool_format

if TYPE_CHECKING:
    from photon_jax.client.async_llm import AsyncLLM


def router(state: ServerState) -> APIRouter:
    """Returns the endpoint of chats."""
    api = APIRouter()
    fields = FieldCheck()

    @api.post("/v1/chat/completions", response_model=None, responses=generating(ChatAnswer, ChatChunk))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        check_model(state, body.model)
        fields.check(body)
        engine = state.ready_engine()
        job = await make_job(_make_job, state, engine, body, request)
        if body.stream:
            updates = stream_all(engine, [job.asked], job.head.id)
            return EventStream(chunk_events(job, updates), keep_alive_s=state.settings.keep_alive_s)
        (output,) = await unless_disconnected(request, generate_all(engine, [job.asked], job.head.id))
        return JsonAnswer(await asyncio.to_thread(whole_answer, job, output))

    return api


def _make_job(state: ServerState, engine: "AsyncLLM", body: ChatRequest) -> ChatJob:
    """Returns what is to be done for a request."""
    tokenizer = engine.llm.tokenizer
    template = None if tokenizer is None else tokenizer.tool_template
    with about_field("tools"):
        use = tool_use(body, find_tool_format(template, state.settings.tool_format))
    names = {"logprobs": "top_logprobs"}
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens, names["max_tokens"] = body.max_completion_tokens, "max_completion_tokens"
    params = sampling_params(
        body, max_tokens=max_tokens, logprobs=_num_logprobs(body), prompt_logprobs=body.prompt_logprobs, names=names
    )
    if use.forced is not None:
        params = dataclasses.replace(params, structured_outputs=use.forced)
    prompt = encode_chat(
        tokenizer,
        body.messages,
        max_model_len=engine.max_model_len,
        tools=template_tools(body),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )
    check_length(len(prompt.token_ids), max_tokens, engine.max_model_len, param="messages")
    token_names = TokenNames(tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
    head = make_head("chatcmpl", state.model_name)
    asked = Asked(prompt, params)
    with about_field("tools" if use.forced is not None else form_field(body)):
        compile_form(engine, asked)
    # An answer of a given form has nothing before it.
    start = "after" if params.structured_outputs else where_reasoning_is(tokenizer, body, prompt)
    return ChatJob(body=body, asked=asked, head=head, names=token_names, tool_use=use, reasoning_start=start)


def _num_logprobs(body: ChatRequest) -> int | None:
    """Returns how many likely tokens are asked for in each place; None for no log-probabilities at all."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None:
        raise FieldError("top_logprobs", "top_logprobs go with logprobs=true")
    return None
