"""Metrics: what an engine compiled and where its memory went, as plain numbers."""

import dataclasses

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the programs that JAX's backend compiles or fetches from its compile cache while it is open."""

    def __init__(self) -> None:
        self.num_compiles = 0
        self.seconds = 0.0

    def __enter__(self) -> "CompileCounter":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.num_compiles += 1
            self.seconds += duration_secs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLedger:
    """Where an engine's device memory goes.

    Attributes:
      workspace_bytes: temporary memory of the largest step program compiled so far.
      max_cached_tokens: tokens whose keys and values fit.
      max_request_tokens: longest request that can be served, prompt and output together.
    """

    weight_bytes: int
    cache_bytes: int
    workspace_bytes: int
    num_blocks: int
    block_size: int
    max_cached_tokens: int
    max_request_tokens: int

    def __str__(self) -> str:
        mib = 1 << 20
        return (
            f"memory: weights {self.weight_bytes / mib:.0f} MiB, "
            f"KV cache {self.cache_bytes / mib:.0f} MiB ({self.num_blocks - 1} blocks of {self.block_size} tokens = "
            f"{self.max_cached_tokens} tokens, and the null block), workspace {self.workspace_bytes / mib:.0f} MiB; "
            f"longest request {self.max_request_tokens} tokens"
        )
