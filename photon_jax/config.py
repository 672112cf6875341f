"""Engine configuration: frozen dataclasses that are checked when they are made. Host only."""

import dataclasses
from typing import Literal, TypedDict, get_args

from photon_jax.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Backend = Literal["auto", "reference", "xla", "triton", "mosaic", "uniform"]
Warmup = Literal["full", "lazy"]
Quantization = Literal["int8"]
KVDType = Literal["auto", "int8"]

GROUP_SIZES = (32, 64, 128)
MAX_SIZE = 2**31 - 1
OWN_KERNELS: tuple[Backend, ...] = ("triton", "uniform")  # backends of a GPU that are our own kernels


def _require_positive(owner: "CacheConfig | SchedulerConfig | EngineConfig", *names: str) -> None:
    """Raises ConfigError unless the fields are positive integers, or None where that is their default."""
    defaults = {field.name: field.default for field in dataclasses.fields(owner)}
    for name in names:
        value = getattr(owner, name)
        is_unset = value is None and defaults[name] is None
        if not is_unset and (type(value) is not int or not 1 <= value <= MAX_SIZE):
            raise ConfigError(f"{name} must be a positive integer, got {value!r:.100}")


def _require_bools(owner: "CacheConfig | KernelConfig | EngineConfig") -> None:
    """Raises ConfigError unless each field that is declared a bool is one."""
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        if field.type is bool and not isinstance(value, bool):
            raise ConfigError(f"{field.name} must be True or False, got {value!r:.100}")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r:.100}")


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
    kv_dtype: KVDType = dataclasses.field(
        default="auto", metadata={"help": "of keys and values in the cache; auto: as the model's activations"}
    )
    enable_prefix_caching: bool = dataclasses.field(
        default=True, metadata={"help": "reuse the blocks of equal prompt prefixes"}
    )

    def __post_init__(self) -> None:
        _require_choice("kv_dtype", self.kv_dtype, get_args(KVDType))
        _require_positive(self, "block_size", "num_blocks")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(f"num_blocks must be at least 2 (one is the null block), got {self.num_blocks}")
        if type(self.memory_fraction) not in (int, float) or not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"memory_fraction must be in (0, 1], got {self.memory_fraction!r:.100}")
        _require_bools(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the queue.

    Looking a step ahead hides the host's work and the launch behind the device's, on a CPU too: 2.3 of 41 ms a step
    with one sequence of the demo model (2 cores). It costs a step when a sequence ends at a stop id.
    """

    max_num_seqs: int = dataclasses.field(default=64, metadata={"help": "sequences that run at once"})
    max_num_batched_tokens: int = dataclasses.field(default=512, metadata={"help": "tokens computed in one step"})
    max_waiting: int = dataclasses.field(default=1_000_000, metadata={"help": "requests that may wait"})
    steps_ahead: int = dataclasses.field(
        default=1, metadata={"help": "steps launched before the results of the one before them are read"}
    )
    max_steps_per_dispatch: int | None = dataclasses.field(
        default=None,
        metadata={"help": "decode steps that may run in one dispatch while none can join; unset: 1 on a CPU, else 8"},
    )

    def __post_init__(self) -> None:
        _require_positive(self, "max_num_seqs", "max_num_batched_tokens", "max_waiting", "max_steps_per_dispatch")
        if type(self.steps_ahead) is not int or self.steps_ahead != 0:
            _require_positive(self, "steps_ahead")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence needs a token in every step"
            )

    def resolve(self, platform: str) -> "SchedulerConfig":
        """Returns the config with what is unset replaced by the choice for a JAX platform name.

        Several steps a dispatch save launches where steps are short. A new request waits for the dispatches on their
        way, and tokens come when their dispatch is done: at most (steps_ahead + 1) * max_steps_per_dispatch steps late.
        So does one that waits for a place or for blocks, from when these are free.
        """
        steps = self.max_steps_per_dispatch or (1 if platform == "cpu" else 8)
        return dataclasses.replace(self, max_steps_per_dispatch=steps)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """Which implementation computes each op; hashable, a static argument of the step.

    `auto` is resolved once when the engine starts: `reference` on a CPU, `triton` on a GPU. That is our int8 product
    (dense ones stay with XLA) and our decode attention, which takes head sizes that are powers of two.

    With `invariant` the bits of a request depend on the request alone: never on the rows that are computed with it, on
    the chunks of its prompt, or on a preemption. On a CPU that is what `reference` does in any case. On a GPU `auto`
    then becomes `uniform`: each op is one kernel, with one order of its sums, for every number of rows.
    """

    linear: Backend = dataclasses.field(default="auto", metadata={"help": "implementation of the linear layers"})
    attention: Backend = dataclasses.field(default="auto", metadata={"help": "implementation of paged attention"})
    invariant: bool = dataclasses.field(
        default=False,
        metadata={"help": "the same bits in any company, on a GPU by slower kernels; on a CPU reference does that"},
    )

    def __post_init__(self) -> None:
        _require_bools(self)
        for name in ("linear", "attention"):
            value = getattr(self, name)
            _require_choice(name, value, get_args(Backend))
            if value == "mosaic":
                others = "auto" if self.invariant else "auto or xla"
                raise ConfigError(f"{name}={value!r} has no kernel in this release; use {others}")
            if self.invariant and value in ("xla", "triton"):
                raise ConfigError(f"{name}={value!r} is not invariant, which invariant=True asks for; use auto")
            if value == "uniform" and not self.invariant:
                raise ConfigError(f"{name}='uniform' is what auto becomes with invariant=True; use that")

    def resolve(self, platform: str, *, head_dim: int) -> "KernelConfig":
        """Returns the config with every `auto` replaced by the choice for a JAX platform name and a model's head size.

        Raises:
          ConfigError: the platform has no such kernel.
        """
        for name in ("linear", "attention"):
            value = getattr(self, name)
            if value in OWN_KERNELS and platform != "gpu":
                raise ConfigError(f"{name}={value!r} needs an NVIDIA GPU, JAX runs on {platform!r}; use auto")
            if self.invariant and value == "reference" and platform != "cpu":
                raise ConfigError(f"{name}='reference' is invariant on a CPU alone, JAX runs on {platform!r}; use auto")
        has_kernel = head_dim >= 16 and head_dim & (head_dim - 1) == 0
        if self.invariant and not (platform == "cpu" or (platform == "gpu" and has_kernel)):
            raise ConfigError(
                "invariant=True needs a CPU, or an NVIDIA GPU and a head size that is a power of two of at least 16; "
                f"JAX runs on {platform!r}, and the model's head size is {head_dim}"
            )
        own: Backend = "uniform" if self.invariant else "triton"
        linear: Backend = {"cpu": "reference", "gpu": own}.get(platform, "xla")
        attention: Backend = "xla" if linear == "triton" and not has_kernel else linear
        return dataclasses.replace(
            self,
            linear=linear if self.linear == "auto" else self.linear,
            attention=attention if self.attention == "auto" else self.attention,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything about an engine that is decided before it starts."""

    dtype: DType = dataclasses.field(
        default="auto",
        metadata={"help": "dtype of weights, activations and cache; auto: float32 on a CPU, bfloat16 on a GPU"},
    )
    quantization: Quantization | None = dataclasses.field(
        default=None, metadata={"help": "round the weights of linear layers to int8 at load; unset: keep dtype"}
    )
    group_size: int = dataclasses.field(
        default=128, metadata={"help": "inputs that share a scale of int8 weights: 32, 64 or 128"}
    )
    quantize_embedding: bool = dataclasses.field(
        default=False, metadata={"help": "with quantization: the embedding and the output head too"}
    )
    int8_activations: bool = dataclasses.field(
        default=False, metadata={"help": "int8 linear layers round their inputs to int8 too, in every step"}
    )
    max_model_len: int | None = dataclasses.field(
        default=None, metadata={"help": "longest sequence, prompt and output together; unset: what the model allows"}
    )
    warmup: Warmup = dataclasses.field(
        default="lazy",
        metadata={"help": "full: compile every step shape at the start; lazy: those of one request, others when met"},
    )
    compile_cache_dir: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "folder that keeps compiled programs for later processes; unset: none",
            "has_flag": False,
        },
    )
    strict_compile: bool = dataclasses.field(
        default=False, metadata={"help": "a step program compiled after warm-up is an error, not a line in the log"}
    )
    use_generation_config: bool = dataclasses.field(
        default=True, metadata={"help": "take sampling defaults from the checkpoint's generation_config"}
    )
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    kernels: KernelConfig = dataclasses.field(default_factory=KernelConfig)

    def __post_init__(self) -> None:
        _require_choice("dtype", self.dtype, get_args(DType))
        if self.quantization is not None:
            _require_choice("quantization", self.quantization, get_args(Quantization))
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            raise ConfigError(f"group_size must be 32, 64 or 128, got {self.group_size!r:.100}")
        _require_bools(self)
        if self.quantize_embedding and self.quantization is None:
            raise ConfigError('quantize_embedding needs quantization="int8"')
        _require_choice("warmup", self.warmup, get_args(Warmup))
        if self.compile_cache_dir is not None and not (
            isinstance(self.compile_cache_dir, str) and self.compile_cache_dir
        ):
            raise ConfigError(f"compile_cache_dir must be the path of a folder, got {self.compile_cache_dir!r:.100}")
        _require_positive(self, "max_model_len")
        for name, kind in (("cache", CacheConfig), ("scheduler", SchedulerConfig), ("kernels", KernelConfig)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} must be a {kind.__name__}, got {getattr(self, name)!r:.100}")

    def check_serves(self) -> None:
        """Raises where an engine would fail as soon as requests come in company.

        Raises:
          ConfigError: steps of several requests would be compiled when they are met, which strict_compile forbids.
        """
        if self.strict_compile and self.warmup != "full":
            raise ConfigError('strict_compile needs warmup="full" to serve requests; give that, or leave it out')


class EngineSettings(TypedDict, total=False):
    """The fields of EngineConfig and of the configs that it holds, as flat keyword arguments; None is the default."""

    dtype: DType | None
    quantization: Quantization | None
    group_size: int | None
    quantize_embedding: bool | None
    int8_activations: bool | None
    max_model_len: int | None
    warmup: Warmup | None
    compile_cache_dir: str | None
    strict_compile: bool | None
    use_generation_config: bool | None
    block_size: int | None
    num_blocks: int | None
    memory_fraction: float | None
    kv_dtype: KVDType | None
    enable_prefix_caching: bool | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_waiting: int | None
    steps_ahead: int | None
    max_steps_per_dispatch: int | None
    linear: Backend | None
    attention: Backend | None
    invariant: bool | None


def make_engine_config(base: EngineConfig | None, **fields: object) -> EngineConfig:
    """Returns the config that flat keyword arguments describe, or `base` when none is given.

    Raises:
      ConfigError: a field is unknown, or both `base` and fields are given.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if base is not None:
        if given:
            raise ConfigError(f"give engine_config or the fields {', '.join(sorted(given))}, not both")
        if not isinstance(base, EngineConfig):
            raise ConfigError(f"engine_config must be an EngineConfig, got {base!r:.100}")
        return base
    parts: dict[str, dict[str, object]] = {"engine": {}, "cache": {}, "scheduler": {}, "kernels": {}}
    owners = {"engine": EngineConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "kernels": KernelConfig}
    for name, value in given.items():
        for part, owner in owners.items():
            if name in {f.name for f in dataclasses.fields(owner)} - {"cache", "scheduler", "kernels"}:
                parts[part][name] = value
                break
        else:
            known = {f.name for owner in owners.values() for f in dataclasses.fields(owner)} - parts.keys()
            raise ConfigError(f"unknown engine setting {name!r}; the settings are {', '.join(sorted(known))}")
    seqs, tokens = parts["scheduler"].get("max_num_seqs"), parts["scheduler"].get("max_num_batched_tokens")
    if isinstance(seqs, int) and tokens is None:
        parts["scheduler"]["max_num_batched_tokens"] = max(seqs, SchedulerConfig().max_num_batched_tokens)
    if isinstance(tokens, int) and tokens > 0 and seqs is None:
        parts["scheduler"]["max_num_seqs"] = min(tokens, SchedulerConfig().max_num_seqs)
    return EngineConfig(
        **parts["engine"],  # type: ignore[arg-type]
        cache=CacheConfig(**parts["cache"]),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(**parts["scheduler"]),  # type: ignore[arg-type]
        kernels=KernelConfig(**parts["kernels"]),  # type: ignore[arg-type]
    )
