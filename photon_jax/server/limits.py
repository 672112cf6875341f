"""Limits: what every request passes before it reaches a handler. Plain ASGI, so that no stream is buffered."""

import asyncio
import collections
import hashlib
import hmac
import re
from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from photon_jax.server.errors import RETRY_AFTER_S, error_response
from photon_jax.server.ids import random_id
from photon_jax.server.json_checks import check_json
from photon_jax.server.state import ServerState

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024  # request line and headers together
MAX_BUFFERED_BYTES = 256 * 2**20  # bodies of all requests together
DISCARD_S = 5.0  # for which a refused body is still read, so that its client gets to read the answer

# Of every answer that has none of its own; the page has, see pages.py.
SECURITY_HEADERS = (
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
)

_CLOSE = {"Connection": "close"}
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


def protect(app: ASGIApp, state: ServerState) -> ASGIApp:
    """Returns the application behind all limits.

    What is refused counts in `state.refused`, by the reasons in state.py.
    """
    settings, refused = state.settings, state.refused
    app = BodyLimits(Heads(app), settings.max_body_bytes, settings.client_timeout_s, refused)
    if settings.api_keys:
        app = ApiKeys(app, settings.api_keys, refused)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    return Envelope(HeaderLimits(app, refused), refused)


class Envelope:
    """Gives each answer the request's id, which is the client's own if it sent one, and the security headers."""

    def __init__(self, app: ASGIApp, refused: collections.Counter[str]) -> None:
        self._app = app
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        request_id = given if given and _REQUEST_ID.fullmatch(given) else random_id().encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def send_enveloped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                held = {name.lower() for name, _ in headers}
                if message["status"] == 503 and scope["method"] == "POST":
                    self._refused["capacity"] += 1
                headers += [(b"x-request-id", request_id)]
                headers += [header for header in SECURITY_HEADERS if header[0] not in held]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_enveloped)


class HeaderLimits:
    """Refuses requests with too many or too long headers; those that never end are refused where they are read."""

    def __init__(self, app: ASGIApp, refused: collections.Counter[str]) -> None:
        self._app = app
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        message = _header_fault(scope) if scope["type"] == "http" else None
        if message is not None:
            self._refused["headers"] += 1
            await error_response(431, message, headers=_CLOSE)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _header_fault(scope: Scope) -> str | None:
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        return f"the request has {len(headers)} headers, {MAX_HEADERS} are allowed"
    line = len(scope.get("raw_path", b"")) + len(scope["query_string"])
    num_bytes = line + sum(len(name) + len(value) for name, value in headers)
    if num_bytes > MAX_HEADER_BYTES:  # they came in one piece, which is read whole
        return f"the request's line and headers are {num_bytes} bytes, {MAX_HEADER_BYTES} are allowed"
    return None


class Heads:
    """Answers HEAD as GET, without the body: what a GET would begin to send is the whole answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})  # a stream sees its client leave then

        await self._app({**scope, "method": "GET"}, receive, send_head)


class ApiKeys:
    """Asks for a key where work is done or the model is told of; pages, health and metrics are open."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], refused: collections.Counter[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] == "http" and needs_key(scope["method"], scope["path"]) and not self._has_key(scope):
            self._refused["api_key"] += 1
            is_missing = _header(scope, b"authorization") is None
            message = "no API key was given" if is_missing else "the API key is not one of this server's"
            answer = error_response(
                401,
                f"{message}; send one as the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        """Returns whether the request has a right key; takes as long for any wrong one."""
        scheme, _, key = (_header(scope, b"authorization") or b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        is_known = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == b"bearer" and any(is_known)


def needs_key(method: str, path: str) -> bool:
    """Returns whether a request needs an API key, where there are any."""
    if method == "OPTIONS":
        return False
    return method not in ("GET", "HEAD") or f"{path}/".startswith(("/v1/", "/tokenizer_info/"))


class BodyLimits:
    """Reads a body whole, within bounds of size, time and shape, before a handler sees the request."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float, refused: collections.Counter[str]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._refused = refused
        self._num_buffered = 0  # bytes of the bodies of all requests that are being served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            try:
                await self._read(scope, receive, body)
            except _RefusedError as error:
                if error.reason is not None:
                    self._refused[error.reason] += 1
                await error.answer(scope, receive, send)
                return
            except ClientDisconnect:
                return
            is_given = False

            async def replay() -> Message:
                nonlocal is_given
                if is_given:
                    return await receive()
                is_given = True
                return {"type": "http.request", "body": bytes(body), "more_body": False}

            await self._app(scope, replay, send)
        finally:
            self._num_buffered -= len(body)

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> None:
        """Fills `body`, or raises _RefusedError or ClientDisconnect."""
        has_more, is_too_long = True, _content_length(scope) > self._max_bytes
        try:
            async with asyncio.timeout(self._timeout_s):
                while has_more and not is_too_long:
                    has_more = await self._read_part(receive, body)
                    is_too_long = len(body) > self._max_bytes
        except TimeoutError:
            raise _RefusedError("body_time", 408, f"the body did not come within {self._timeout_s:g} s") from None
        if is_too_long:
            if has_more and _header(scope, b"expect") is None:
                await _discard(receive)
            raise _RefusedError("body_size", 413, f"the body is longer than the {self._max_bytes} bytes that are taken")
        try:
            check_json(bytes(body))
        except ValueError as error:
            raise _RefusedError("body_json", 400, str(error)) from error

    async def _read_part(self, receive: Receive, body: bytearray) -> bool:
        """Returns whether there is more."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        if self._num_buffered + len(part) > MAX_BUFFERED_BYTES:
            raise _RefusedError(None, 503, "the server holds as many bytes of requests as it can; try again later")
        body += part
        self._num_buffered += len(part)
        return bool(message.get("more_body", False))


class _RefusedError(Exception):
    """A body is not taken. Where it was not read whole the connection ends too.

    Attributes:
      reason: under which it counts; None where its status counts by itself.
    """

    def __init__(self, reason: str | None, status: int, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        headers = {} if reason == "body_json" else dict(_CLOSE)
        if status == 503:
            headers["Retry-After"] = str(RETRY_AFTER_S)
        self.answer = error_response(status, message, headers=headers)


def _has_body(scope: Scope) -> bool:
    """Returns whether a body follows: not asked of the client, so that a GET's connection can still end."""
    return _content_length(scope) > 0 or _header(scope, b"transfer-encoding") is not None


def _content_length(scope: Scope) -> int:
    value = _header(scope, b"content-length") or b"0"
    return int(value) if value.isdigit() else 0


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


async def _discard(receive: Receive) -> None:
    """Reads what still comes of a body, for a while: a client that sends first and reads then gets its answer."""
    try:
        async with asyncio.timeout(DISCARD_S):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        return
