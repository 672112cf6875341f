"""Engine configuration: frozen dataclasses that are checked when they are made. Host only."""

import dataclasses
from typing import Literal, get_args

from photon_jax.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Backend = Literal["auto", "reference", "xla", "triton", "mosaic"]
Warmup = Literal["full", "lazy"]


def _require_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} must be a positive integer, got {value!r}")


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = dataclasses.field(default=64, metadata={"help": "tokens in a cache block, a power of two"})
    num_blocks: int | None = dataclasses.field(
        default=None, metadata={"help": "cache blocks, the null block included; unset: what memory_fraction allows"}
    )
    memory_fraction: float = dataclasses.field(
        default=0.9, metadata={"help": "share of the free device memory that the cache may take"}
    )
    enable_prefix_caching: bool = dataclasses.field(
        default=True, metadata={"help": "reuse the blocks of equal prompt prefixes"}
    )

    def __post_init__(self) -> None:
        _require_positive(self, "block_size", "num_blocks")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(f"num_blocks must be at least 2 (one is the null block), got {self.num_blocks}")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"memory_fraction must be in (0, 1], got {self.memory_fraction}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the queue."""

    max_num_seqs: int = dataclasses.field(default=64, metadata={"help": "sequences that run at once"})
    max_num_batched_tokens: int = dataclasses.field(default=512, metadata={"help": "tokens computed in one step"})
    max_waiting: int = dataclasses.field(default=1_000_000, metadata={"help": "requests that may wait"})

    def __post_init__(self) -> None:
        _require_positive(self, "max_num_seqs", "max_num_batched_tokens", "max_waiting")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence needs a token in every step"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """Which implementation computes each op; hashable, a static argument of the step.

    `auto` is resolved once when the engine starts: `reference` on a CPU, `xla` on a GPU.
    """

    linear: Backend = dataclasses.field(default="auto", metadata={"help": "implementation of the linear layers"})
    attention: Backend = dataclasses.field(default="auto", metadata={"help": "implementation of paged attention"})

    def __post_init__(self) -> None:
        for name in ("linear", "attention"):
            _require_choice(name, getattr(self, name), get_args(Backend))
            if getattr(self, name) == "mosaic" or (name, getattr(self, name)) == ("linear", "triton"):
                raise ConfigError(f"{name}={getattr(self, name)!r} has no kernel in this release; use auto or xla")

    def resolve(self, platform: str) -> "KernelConfig":
        """Returns the config with every `auto` replaced by the choice for a JAX platform name.

        Raises:
          ConfigError: the platform has no such kernel.
        """
        if self.attention == "triton" and platform != "gpu":
            raise ConfigError(f"attention='triton' needs an NVIDIA GPU, JAX runs on {platform!r}; use auto")
        chosen: Backend = "reference" if platform == "cpu" else "xla"
        return KernelConfig(
            linear=chosen if self.linear == "auto" else self.linear,
            attention=chosen if self.attention == "auto" else self.attention,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything about an engine that is decided before it starts."""

    dtype: DType = dataclasses.field(
        default="auto",
        metadata={"help": "dtype of weights, activations and cache; auto: float32 on a CPU, bfloat16 on a GPU"},
    )
    max_model_len: int | None = dataclasses.field(
        default=None, metadata={"help": "longest sequence, prompt and output together; unset: what the model allows"}
    )
    warmup: Warmup = dataclasses.field(
        default="lazy",
        metadata={"help": "full: compile every step shape at the start; lazy: those of one request, others when met"},
    )
    use_generation_config: bool = dataclasses.field(
        default=True, metadata={"help": "take sampling defaults from the checkpoint's generation_config"}
    )
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    kernels: KernelConfig = dataclasses.field(default_factory=KernelConfig)

    def __post_init__(self) -> None:
        _require_choice("dtype", self.dtype, get_args(DType))
        _require_choice("warmup", self.warmup, get_args(Warmup))
        _require_positive(self, "max_model_len")


def make_engine_config(base: EngineConfig | None, **fields: object) -> EngineConfig:
    """Returns the config that flat keyword arguments describe, or `base` when none is given.

    Raises:
      ConfigError: a field is unknown, or both `base` and fields are given.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if base is not None:
        if given:
            raise ConfigError(f"give engine_config or the fields {', '.join(sorted(given))}, not both")
        return base
    parts: dict[str, dict[str, object]] = {"engine": {}, "cache": {}, "scheduler": {}, "kernels": {}}
    owners = {"engine": EngineConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "kernels": KernelConfig}
    for name, value in given.items():
        for part, owner in owners.items():
            if name in {f.name for f in dataclasses.fields(owner)} - {"cache", "scheduler", "kernels"}:
                parts[part][name] = value
                break
        else:
            raise ConfigError(f"unknown engine setting {name!r}")
    seqs, tokens = parts["scheduler"].get("max_num_seqs"), parts["scheduler"].get("max_num_batched_tokens")
    if isinstance(seqs, int) and tokens is None:
        parts["scheduler"]["max_num_batched_tokens"] = max(seqs, SchedulerConfig().max_num_batched_tokens)
    if isinstance(tokens, int) and seqs is None:
        parts["scheduler"]["max_num_seqs"] = min(tokens, SchedulerConfig().max_num_seqs)
    return EngineConfig(
        **parts["engine"],  # type: ignore[arg-type]
        cache=CacheConfig(**parts["cache"]),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(**parts["scheduler"]),  # type: ignore[arg-type]
        kernels=KernelConfig(**parts["kernels"]),  # type: ignore[arg-type]
    )
