"""Lifecycle: a server's process from its first answer, while the model loads, to an end that cuts nothing off."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator

import uvicorn

from photon_jax.client.async_llm import AsyncLLM
from photon_jax.errors import ConfigError, EngineDeadError
from photon_jax.llm import LLM
from photon_jax.progress import OnProgress
from photon_jax.server.app import create_app
from photon_jax.server.connections import guarded_protocol
from photon_jax.server.limits import protect
from photon_jax.server.state import ServerSettings, ServerState

Load = Callable[[OnProgress], LLM]

CLOSE_S = 5  # in which streams must take their last words
WATCH_S = 0.25
KEEP_ALIVE_S = 75  # of an idle connection, more than the 60 s after which common proxies let go of theirs
MAX_CONNECTIONS = 8192
SPARE_FILES = 64  # open files for other things than connections


def serve(state: ServerState, load: Load) -> None:
    """Serves until SIGTERM or SIGINT: then no new work is taken, and running requests get `drain_s` to finish.

    A second signal ends the process at once.

    Args:
      load: returns the model; called in a thread, while the page and the health endpoints answer. It gets what to call
        with each step of the loading.

    Raises:
      ConfigError: the address or the certificate can't be used.
      PhotonError: what `load` raised.
    """
    with listen(state.settings) as listener, state.compiles:
        asyncio.run(_Process(state, load).run(listener))


class _Process:
    """One run of a server."""

    def __init__(self, state: ServerState, load: Load) -> None:
        self._state = state
        self._load = load
        self._llm: LLM | None = None
        self._failure: BaseException | None = None
        self._stop = asyncio.Event()
        self._loader = threading.Thread(target=self._load_model, name="photon-load", daemon=True)
        self._server = _Server(uvicorn_config(state))

    async def run(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self._say(f"listening on {_url(self._state.settings, listener)}, loading {self._state.model_name}")
        self._loader.start()
        watching, stopping = asyncio.create_task(self._watch()), asyncio.create_task(self._stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        stopping.cancel()
        await self._drain()
        self._server.should_exit = True
        await self._close_connections(serving)
        self._end()

    def _load_model(self) -> None:
        """Runs in the loader's thread."""
        try:
            llm = self._load(self._on_progress)
        except BaseException as error:
            self._call(self._on_failure, error)
        else:
            self._call(self._on_loaded, llm)

    def _call(self, function: Callable[..., None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(function, argument)

    def _on_progress(self, what: str, num_done: int, num_total: int) -> None:
        self._call(
            lambda message: setattr(self._state, "loading_message", message), _message(what, num_done, num_total)
        )

    def _on_loaded(self, llm: LLM) -> None:
        self._llm = llm
        if self._state.phase == "loading":
            self._state.engine = AsyncLLM(
                llm, max_queue=self._state.settings.max_queue, on_finish=self._state.latencies.observe
            )
            self._state.phase = "ready"
            self._say("ready")

    def _on_failure(self, error: BaseException) -> None:
        self._failure = error
        self._stop.set()

    async def _watch(self) -> None:
        """Looks at the engine now and then: at how fast it is, and whether it failed."""
        while True:
            await asyncio.sleep(WATCH_S)
            engine = self._state.engine
            if engine is None:
                continue
            self._state.rates.look(engine.stats())
            if engine.error is not None and self._state.phase == "ready":
                self._state.phase = "dead"
                logging.error("the engine failed", exc_info=engine.error)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._say("ended at once")
            sys.stderr.flush()
            os._exit(128 + number)
        self._stop.set()

    async def _drain(self) -> None:
        was_ready, self._state.phase = self._state.phase == "ready", "draining"
        if was_ready and self._state.engine is not None:
            self._say(f"ending: running requests have {self._state.settings.drain_s:g} s; a second signal ends at once")
            try:
                has_finished = await self._state.engine.drain(self._state.settings.drain_s)
            except EngineDeadError:
                return
            if not has_finished:
                self._say("ended the requests that were left")

    async def _close_connections(self, serving: "asyncio.Task[None]") -> None:
        """Waits until every answer is read, but not for readers that take nothing."""
        await asyncio.wait({serving}, timeout=CLOSE_S)
        left = list(self._server.server_state.connections)
        for connection in left:
            connection.transport.abort()
        if left:
            self._say(f"cut off {len(left)} clients that did not read their answers")
        await serving

    def _end(self) -> None:
        if self._state.engine is not None:
            self._state.engine.close()
        if self._llm is not None:
            self._llm.close()
        if self._failure is not None:
            raise self._failure
        if self._loader.is_alive():  # deep in the compiler, from which nothing calls it back
            sys.stderr.flush()
            os._exit(0)

    def _say(self, what: str) -> None:
        print(f"photon-web-server: {what}", file=sys.stderr, flush=True)


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to us: its own end stops streams in the middle."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def uvicorn_config(state: ServerState) -> uvicorn.Config:
    """Returns the application behind all its limits, with how it is served.

    Raises:
      ConfigError: the certificate can't be used.
    """
    settings = state.settings
    config = uvicorn.Config(
        protect(create_app(state), state),
        http=guarded_protocol(timeout_s=settings.client_timeout_s, max_connections=_max_connections()),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=2 * CLOSE_S,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tls_cert {settings.tls_cert!r} and tls_key {settings.tls_key!r} can't be used: {error}"
        ) from error
    return config


def _max_connections() -> int:
    """Returns how many connections the process may hold and still open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(min(MAX_CONNECTIONS, soft - SPARE_FILES), 1)


def listen(settings: ServerSettings) -> socket.socket:
    """Returns a socket that listens where the settings say."""
    try:
        family, *_, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"can't listen on port {settings.port} of host {settings.host}: {error}") from error
    # Inherited by connections; asyncio sets it for sockets of its own alone. Without it each small piece of a stream
    # waits until the client has acknowledged the one before, for which clients take 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _url(settings: ServerSettings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls_cert else 'http'}://{host}:{listener.getsockname()[1]}"


def _message(what: str, num_done: int, num_total: int) -> str:
    """Returns a step of the loading as text."""
    if what == "loading" and num_done < num_total:
        mib = 2**20
        return f"reading weights: {num_done / mib:.1f} of {num_total / mib:.1f} MiB"
    if what == "loading":
        return "weights are read; looking how the device computes them best"
    return f"compiling step programs: {num_done} of {num_total}"
