"""Errors as answers: every failure becomes a body in OpenAI's form with the status that fits it."""

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.requests import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from photon_jax.errors import CapacityError, EngineDeadError, PhotonError, RequestError
from photon_jax.server.json_answer import JsonAnswer
from photon_jax.server.protocol import ErrorAnswer, ErrorDetail
from photon_jax.server.protocol_chat import ChatRequest
from photon_jax.server.protocol_completions import CompletionRequest
from photon_jax.server.protocol_tokens import DetokenizeRequest, TokenizeRequest

RETRY_AFTER_S = 1
_CLIENT_CLOSED_REQUEST = 499  # as other servers log it
_MAX_ECHO = 200  # characters of the caller's own input in a message
_MAX_MESSAGE = 2_000
_MAX_FAULTS = 10
_logger = logging.getLogger(__name__)


class FieldError(RequestError):
    """A field of the request can't be as it is.

    Attributes:
      param: its name; None where no single field is at fault.
    """

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(FieldError):
    """A prompt and its max_tokens are longer than the model's context; the field is the one to shorten."""


class UnknownModelError(RequestError):
    """The server has no model of this name; HTTP 404."""


class InternalError(PhotonError):
    """A fault of the server's own, whose cause is in its log and not in the answer; HTTP 500."""


class ClientLeftError(PhotonError):
    """Nobody is there to read the answer."""


class AbortedError(PhotonError):
    """The server ended a request before it was finished; HTTP 503."""


def error_detail(
    status: int, message: str, *, kind: str | None = None, param: str | None = None, code: str | None = None
) -> ErrorDetail:
    """Returns what an error's body says.

    Args:
      kind: the error's "type"; None for the usual one of the status.
      param: the field of the request that is wrong.
      code: a word for programs.
    """
    usual = "server_error" if status >= 500 else "invalid_request_error"
    return {"message": message[:_MAX_MESSAGE], "type": kind or usual, "param": param, "code": code}


def error_response(
    status: int,
    message: str,
    *,
    kind: str | None = None,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JsonAnswer:
    """Returns an answer that tells of an error; see `error_detail`."""
    body: ErrorAnswer = {"error": error_detail(status, message, kind=kind, param=param, code=code)}
    return JsonAnswer(body, status_code=status, headers=dict(headers or {}))


def status_and_detail(error: PhotonError) -> tuple[int, ErrorDetail]:
    """Returns the HTTP status of an error and what its body says."""
    if isinstance(error, UnknownModelError):
        return 404, error_detail(404, str(error), param="model", code="model_not_found")
    if isinstance(error, RequestError):
        param = error.param if isinstance(error, FieldError) else field_of(str(error))
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return 400, error_detail(400, str(error), param=param, code=code)
    if isinstance(error, CapacityError):
        return 503, error_detail(503, str(error), code="overloaded")
    if isinstance(error, AbortedError):
        return 503, error_detail(503, str(error), code="aborted")
    if isinstance(error, EngineDeadError):
        return 503, error_detail(503, str(error), code="engine_dead")
    return 500, error_detail(500, str(error) or "an internal error; the server's log has its cause")


def field_of(message: str) -> str | None:
    """Returns the field that a message is about: as ours, it begins with its name, or else names it first.

    What stands in quotes is the caller's own, and before a colon may stand which of the prompts it is.
    """
    about, own = re.match(r"(?:prompt \d+: )?(.*)", message, re.DOTALL), re.compile(r"'.*?'|\".*?\"", re.DOTALL)
    text = own.sub("", about[1]) if about is not None else ""
    words = re.findall(r"[A-Za-z0-9_]+", text)
    first = next((word for word in words[:1] if word in _FIELDS), None)
    named = next((word for word in words if word in _FIELDS and "_" in word), None)
    return first or named or ("prompt" if message.startswith("prompt ") else None)


@contextlib.contextmanager
def about_field(param: str, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Makes a RequestError that is raised inside say which field it is about.

    Args:
      param: where its message names none.
      names: of fields that the request has under other names.
    """
    try:
        yield
    except FieldError:
        raise
    except RequestError as error:
        found = field_of(str(error)) or param
        name = (names or {}).get(found, found)
        raise FieldError(name, re.sub(rf"\b{found}\b", name, str(error))) from error


_FIELDS = frozenset(
    name
    for request in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
    for name in request.model_fields
)


def photon_error_response(error: PhotonError) -> JsonAnswer:
    """Returns the answer to a request that failed with this error, with what a client needs to know about a retry."""
    status, detail = status_and_detail(error)
    headers = {}
    if isinstance(error, CapacityError | AbortedError):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    elif status >= 500:
        headers["x-should-retry"] = "false"
    return JsonAnswer({"error": detail}, status_code=status, headers=headers)


def error_event(error: BaseException) -> ErrorAnswer:
    """Returns what a stream that has begun says of an error; the cause of an unforeseen one is logged."""
    if not isinstance(error, PhotonError):
        _logger.error("a stream failed", exc_info=error)
        error = InternalError()
    return {"error": status_and_detail(error)[1]}


def install_error_handlers(app: FastAPI) -> None:
    """Makes the application answer every failure in OpenAI's form."""

    async def on_photon_error(_: Request, error: Exception) -> JsonAnswer:
        assert isinstance(error, PhotonError), f"{error!r} has another handler"
        if isinstance(error, AbortedError):
            _logger.info("a request was ended: %s", error)
        elif isinstance(error, EngineDeadError):  # whose cause was logged when it died
            _logger.error("a request failed: %s", error)
        elif status_and_detail(error)[0] >= 500 and not isinstance(error, CapacityError):
            _logger.error("a request failed: %s", error, exc_info=error.__cause__)
        return photon_error_response(error)

    async def on_client_left(_: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)  # for the log alone

    async def on_validation(_: Request, error: Exception) -> JsonAnswer:
        assert isinstance(error, RequestValidationError), f"{error!r} has another handler"
        message, param = _describe(error)
        return error_response(400, message, param=param)

    async def on_http(request: Request, error: Exception) -> JsonAnswer:
        assert isinstance(error, HTTPException), f"{error!r} has another handler"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        message = str(error.detail) or HTTPStatus(error.status_code).phrase
        if code is not None:
            asked = f"{request.method[:_MAX_ECHO]} {request.scope['path'][:_MAX_ECHO]}"
            message = f"this server has no {asked}; /openapi.json lists what it has"
        return error_response(error.status_code, message, code=code, headers=error.headers)

    async def on_fault(_: Request, error: Exception) -> JsonAnswer:
        return photon_error_response(InternalError())  # Starlette raises it again afterwards, and uvicorn logs it

    app.add_exception_handler(PhotonError, on_photon_error)
    app.add_exception_handler(ClientLeftError, on_client_left)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_fault)


def _describe(error: RequestValidationError) -> tuple[str, str | None]:
    """Returns what is wrong with a body, in bounded length, and its first wrong field."""
    faults = error.errors()
    lines = [_describe_fault(fault) for fault in faults[:_MAX_FAULTS]]
    if len(faults) > _MAX_FAULTS:
        lines.append(f"and {len(faults) - _MAX_FAULTS} more")
    fields = [part for part in faults[0]["loc"][1:] if isinstance(part, str)] if faults else []
    return "; ".join(lines), fields[0][:_MAX_ECHO] if fields else None


def _describe_fault(fault: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in fault["loc"][1:])[:_MAX_ECHO]
    if fault["type"] == "json_invalid":
        return f"the body is not valid JSON: {fault.get('ctx', {}).get('error', '')} at character {where}"
    if not where:
        return "the body must be a JSON object, sent with Content-Type: application/json"
    if fault["type"] == "missing":
        return f"{where} is missing"
    return f"{where}: {fault['msg'][:_MAX_ECHO]}, got {_short(fault.get('input'))}"


def _short(value: object) -> str:
    """Returns the beginning of a value as JSON; what a hostile body holds is not written out in full to be cut."""
    if isinstance(value, str):
        value = value[:_MAX_ECHO]
    elif isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return json.dumps(value, default=repr)[:_MAX_ECHO]
