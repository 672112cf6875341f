"""ServerState: what the handlers of one server share: its settings, the engine once there is one, its phase."""

import collections
import concurrent.futures
import dataclasses
import re
import time
from typing import TYPE_CHECKING, Literal

from photon_jax.engine.metrics import CompileCounter
from photon_jax.errors import CapacityError, ConfigError, EngineDeadError
from photon_jax.server.latencies import Latencies
from photon_jax.server.rates import Rates

if TYPE_CHECKING:
    from photon_jax.client.async_llm import AsyncLLM

Phase = Literal["loading", "ready", "draining", "dead"]
ToolFormatName = Literal["auto", "none", "hermes", "llama3_json"]

DEFAULT_PORT = 5728
NUM_FORM_THREADS = 2
# for which requests are not served: bounds of limits.py, and, as "capacity", a full queue, loading or an end to come
REASONS = ("headers", "api_key", "body_size", "body_time", "body_json", "capacity")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """What a server is told once, when it starts.

    Attributes:
      host: address to listen on; the loopback address by default.
      port: to listen on; 0 takes a free one.
      api_keys: keys of which a client must send one as its bearer token; none: no key is asked for.
      cors_origins: origins whose pages a browser may let read the answers; "*" is all of them.
      max_body_bytes: longest request body.
      max_queue: requests that may wait for their turn; more are refused. None: as many as the engine takes.
      drain_s: seconds that running requests get to finish when the server ends.
      keep_alive_s: seconds of silence in a stream after which a comment line is sent.
      client_timeout_s: seconds that a client has to send a request's headers, then its body, and to take what waits
        for it.
      tool_format: how the model writes calls of tools; "auto" goes by its chat template, "none" looks for none.
      metrics_prefix: what the names of all metrics begin with.
      tls_cert: file of the certificate chain, to serve https.
      tls_key: file of its key.
      static_dir: folder of another page than the built-in one: its index.html is the page, and what lies beside that is
        under /static/.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    max_queue: int | None = 1024
    drain_s: float = 30.0
    keep_alive_s: float = 15.0
    client_timeout_s: float = 60.0
    tool_format: ToolFormatName = "auto"
    metrics_prefix: str = "photon_jax:"
    tls_cert: str | None = None
    tls_key: str | None = None
    static_dir: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, got {self.max_body_bytes}")
        if self.max_queue is not None and self.max_queue < 1:
            raise ConfigError(f"max_queue must be at least 1, got {self.max_queue}")
        for name in ("drain_s", "keep_alive_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not self.client_timeout_s > 0:
            raise ConfigError(f"client_timeout_s must be above 0, got {self.client_timeout_s}")
        if not all(self.api_keys):
            raise ConfigError("api_keys holds an empty key; leave it out to ask for none")
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", self.metrics_prefix):
            raise ConfigError(f"metrics_prefix must be letters, digits, _ and :, got {self.metrics_prefix!r:.100}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together; give both or neither")


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class ServerState:
    """The state of one server; its fields are written in the event loop alone.

    Attributes:
      model_name: under which clients ask for the model.
      engine: None until the model is loaded.
      phase: "loading" until it can serve, "draining" when it takes no more work, "dead" when the engine failed.
      loading_message: what loading does right now, for people.
      created_at: when the server was made, seconds since 1970.
      refused: requests that were not served, by reason; see REASONS.
      rates: of the last seconds.
      latencies: of the requests that have ended.
      compiles: of programs since the server began to load its model.
      forms: threads in which the forms of answers are compiled, which may take seconds: they keep nobody else waiting.
    """

    model_name: str
    settings: ServerSettings = dataclasses.field(default_factory=ServerSettings)
    engine: "AsyncLLM | None" = None
    phase: Phase = "loading"
    loading_message: str = "starting"
    created_at: float = dataclasses.field(default_factory=time.time)
    refused: collections.Counter[str] = dataclasses.field(
        default_factory=lambda: collections.Counter(dict.fromkeys(REASONS, 0))
    )
    rates: Rates = dataclasses.field(default_factory=Rates)
    latencies: Latencies = dataclasses.field(default_factory=Latencies)
    compiles: CompileCounter = dataclasses.field(default_factory=CompileCounter)
    forms: concurrent.futures.Executor = dataclasses.field(
        default_factory=lambda: concurrent.futures.ThreadPoolExecutor(NUM_FORM_THREADS, "photon-forms")
    )

    def ready_engine(self) -> "AsyncLLM":
        """Returns the engine that takes new work.

        Raises:
          CapacityError: it is not loaded yet, or the server is about to end.
          EngineDeadError: it failed.
        """
        if self.phase == "draining":
            raise CapacityError("the server is about to end and takes no new requests; try another one")
        if self.phase == "dead":
            raise EngineDeadError("the engine failed and serves no more; start the server again")
        if self.engine is None or self.phase == "loading":
            raise CapacityError(f"the model is still loading ({self.loading_message}); try again later")
        return self.engine
