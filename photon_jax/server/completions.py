"""POST /v1/completions."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.requests import Request
from starlette.responses import Response

from photon_jax.client.prompts import as_list
from photon_jax.client.submission import Prompt
from photon_jax.errors import RequestError
from photon_jax.server.answering import Asked, compile_form, generate_all, make_head, make_job, stream_all
from photon_jax.server.completion_answer import CompletionJob, chunk_events, whole_answer
from photon_jax.server.documents import generating
from photon_jax.server.errors import FieldError, about_field
from photon_jax.server.json_answer import JsonAnswer
from photon_jax.server.logprobs import TokenNames
from photon_jax.server.protocol_completions import CompletionAnswer, CompletionRequest
from photon_jax.server.sampling import check_length, check_model, check_text, form_field, sampling_params
from photon_jax.server.state import ServerState
from photon_jax.server.streaming import EventStream, unless_disconnected
from photon_jax.server.unsupported import FieldCheck

if TYPE_CHECKING:
    from photon_jax.client.async_llm import AsyncLLM

DEFAULT_MAX_TOKENS = 16  # as OpenAI documents it
MAX_CHOICES = 1024  # of all prompts of a request together


def router(state: ServerState) -> APIRouter:
    """Returns the endpoint of completions."""
    api = APIRouter()
    fields = FieldCheck()

    @api.post("/v1/completions", response_model=None, responses=generating(CompletionAnswer, CompletionAnswer))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues a text or token ids, one prompt or several."""
        check_model(state, body.model)
        fields.check(body)
        engine = state.ready_engine()
        job = await make_job(_make_job, state, engine, body, request)
        if body.stream:
            updates = stream_all(engine, job.asked, job.head.id)
            return EventStream(chunk_events(job, updates), keep_alive_s=state.settings.keep_alive_s)
        outputs = await unless_disconnected(request, generate_all(engine, job.asked, job.head.id))
        return JsonAnswer(await asyncio.to_thread(whole_answer, job, outputs))

    return api


def _make_job(state: ServerState, engine: "AsyncLLM", body: CompletionRequest) -> CompletionJob:
    """Returns what is to be done for a request."""
    tokenizer = engine.llm.tokenizer
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens < (0 if body.echo else 1):
        raise FieldError("max_tokens", f"max_tokens must be at least 1, got {max_tokens}; only with echo may it be 0")
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        if prompt_logprobs is not None:
            raise FieldError("prompt_logprobs", "prompt_logprobs don't go with echo and logprobs, which give them too")
        prompt_logprobs = body.logprobs
    # An echo without output runs for one token, which is left out: the engine always makes one.
    params = sampling_params(
        body, max_tokens=max(max_tokens, 1), logprobs=body.logprobs, prompt_logprobs=prompt_logprobs
    )
    prompts = _encode_prompts(engine, body, max(max_tokens, 1))
    if len(prompts) * params.n > MAX_CHOICES:
        raise FieldError("n", f"{len(prompts)} prompts with n={params.n}: at most {MAX_CHOICES} choices, ask for fewer")
    asked = [Asked(prompt, params) for prompt in prompts]
    with about_field(form_field(body)):
        compile_form(engine, asked[0])
    return CompletionJob(
        body=body,
        asked=asked,
        head=make_head("cmpl", state.model_name),
        names=TokenNames(tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
        tokenizer=tokenizer,
        has_output=max_tokens > 0,
    )


def _encode_prompts(engine: "AsyncLLM", body: CompletionRequest, max_tokens: int) -> list[Prompt]:
    adds_special = body.add_special_tokens is not False
    tokenizer, max_model_len, vocab_size = engine.llm.tokenizer, engine.max_model_len, engine.llm.config.vocab_size
    is_told = body.echo or body.prompt_logprobs is not None  # and so needs a text, which a padded id has not
    num_known = tokenizer.vocab_size if tokenizer is not None and is_told else vocab_size

    def encode(given: object) -> Prompt:
        if not isinstance(given, str):
            assert isinstance(given, list), f"a prompt is a text or ids, got {given!r:.100}"
            prompt = Prompt(token_ids=tuple(given))
        elif tokenizer is None:
            raise RequestError("the prompt is text and the model has no tokenizer; give token ids")
        else:
            check_text(tokenizer, len(given), max_model_len, param="prompt")
            prompt = Prompt(token_ids=tuple(tokenizer.encode(given, add_special_tokens=adds_special)), text=given)
        check_length(len(prompt.token_ids), max_tokens, max_model_len, param="prompt")
        wrong = next((token_id for token_id in prompt.token_ids if not 0 <= token_id < vocab_size), None)
        if wrong is not None:
            raise RequestError(f"the prompt holds {wrong}; the model's ids are 0 to {vocab_size - 1}")
        highest = max(prompt.token_ids, default=0)
        if highest >= num_known:
            raise RequestError(
                f"the prompt holds {highest}, which has no text to give back; the ids 0 to {num_known - 1} have one"
            )
        if not prompt.token_ids:
            raise RequestError("the prompt is empty; give at least one token")
        return prompt

    prompts = as_list(body.prompt)
    if not prompts:
        raise FieldError("prompt", "prompt is an empty list; give at least one prompt")
    return [_encode_as(index, len(prompts), given, encode) for index, given in enumerate(prompts)]


def _encode_as(index: int, num_prompts: int, given: object, encode: Callable[[object], Prompt]) -> Prompt:
    """Returns a prompt; of several, an error says which it is."""
    try:
        with about_field("prompt"):
            return encode(given)
    except FieldError as error:
        raise error if num_prompts == 1 else type(error)("prompt", f"prompt {index}: {error}") from error
