"""What the OpenAPI document says of answers: bodies of success and of each error."""

from typing import Any

from photon_jax.server.protocol import ErrorAnswer

Responses = dict[int | str, dict[str, Any]]

_ERRORS = {
    400: "The request is wrong, or can never be served.",
    401: "A key is missing or unknown.",
    404: "The server has no such model.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    431: "There are too many headers.",
    500: "A fault of the server's own.",
    503: "The server is loading, full, or about to end; it may be tried again after Retry-After.",
}


def errors(*statuses: int) -> Responses:
    """Returns the errors that an endpoint may answer with, by status."""
    return {status: {"model": ErrorAnswer, "description": _ERRORS[status]} for status in statuses}


def reading(answer: object) -> Responses:
    """Returns the answers of an endpoint that takes a body and doesn't stream."""
    return {200: {"model": answer}, **errors(400, 401, 404, 408, 413, 431, 500, 503)}


def generating(answer: type, chunk: type) -> Responses:
    """Returns the answers of an endpoint that generates: a whole answer, or a stream of chunks and then [DONE]."""
    content = event_stream(f"Each event is a {chunk.__name__} or an error; then [DONE].")
    return {**reading(answer), 200: {"model": answer, "content": content}}


def event_stream(what: str) -> dict[str, Any]:
    """Returns the content of an answer that is a stream; its schema is that of an event.

    Args:
      what: says what the data of an event are.
    """
    data = {"type": "string", "description": what}
    return {"text/event-stream": {"schema": {"type": "object", "properties": {"data": data}}}}


def without_422(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the document without FastAPI's own answer to wrong bodies: here those are errors of status 400."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)
    return document
