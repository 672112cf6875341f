"""Workloads: prompts of random token ids and how many tokens each is to get. Host only."""

import dataclasses
import math
from typing import Literal, get_args

import numpy as np

from photon_jax.errors import ConfigError

Lengths = Literal["fixed", "uniform", "lognormal"]
Mix = Literal["plain", "shared_prefix", "long_context"]

LOGNORMAL_SIGMA = 0.8
MIN_LEN, MAX_LEN = 4, 1024  # of lognormal lengths
LONG_SHARE = 8  # of long_context: one request in so many has the long prompt


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSpec:
    """What a workload is made of; `make_workload` draws it.

    Attributes:
      num_requests: how many.
      lengths: how the lengths of prompts, then those of outputs, are drawn: "fixed", all the mean; "uniform", from 1 to
        twice the mean less 1; "lognormal", as chats are: sigma 0.8, rounded, clipped to [4, 1024].
      prompt_len, output_len: their means, tokens.
      mix: "plain"; "shared_prefix", the same prefix_len tokens before each prompt; "long_context", in which every
        eighth prompt has prefix_len tokens more of its own.
      prefix_len: tokens.
    """

    num_requests: int
    lengths: Lengths = "fixed"
    prompt_len: int = 128
    output_len: int = 128
    mix: Mix = "plain"
    prefix_len: int = 2048

    def __post_init__(self) -> None:
        for name in ("num_requests", "prompt_len", "output_len", "prefix_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, choices in (("lengths", get_args(Lengths)), ("mix", get_args(Mix))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests to be served.

    Attributes:
      prompts: token ids.
      output_lens: tokens that each is to get; no end-of-sequence id counts.
    """

    prompts: tuple[tuple[int, ...], ...]
    output_lens: tuple[int, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that are to be made."""
        return sum(self.output_lens)

    @property
    def max_len(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(prompt) + count for prompt, count in zip(self.prompts, self.output_lens, strict=True))


def make_workload(spec: WorkloadSpec, *, vocab_size: int, seed: int, wave: int = 0) -> Workload:
    """Returns requests whose lengths depend on the spec alone, and whose token ids depend on the seed too.

    So runs of several seeds ask for the same work, and no prefix cache can answer one from another. Waves of one seed
    have the shared prefix in common, and nothing else.
    """
    rng = np.random.default_rng(0)
    prompt_lens = _draw_lengths(rng, spec.lengths, spec.prompt_len, spec.num_requests)
    output_lens = _draw_lengths(rng, spec.lengths, spec.output_len, spec.num_requests)
    shared = np.random.default_rng(seed).integers(vocab_size, size=spec.prefix_len).tolist()
    ids = np.random.default_rng([seed, wave])
    prompts = []
    for index, length in enumerate(prompt_lens):
        prefix = []
        if spec.mix == "shared_prefix":
            prefix = shared
        elif spec.mix == "long_context" and index % LONG_SHARE == 0:
            prefix = ids.integers(vocab_size, size=spec.prefix_len).tolist()
        prompts.append((*prefix, *ids.integers(vocab_size, size=length).tolist()))
    return Workload(prompts=tuple(prompts), output_lens=tuple(output_lens))


def _draw_lengths(rng: np.random.Generator, lengths: Lengths, mean: int, count: int) -> list[int]:
    if lengths == "fixed":
        return [mean] * count
    if lengths == "uniform":
        return [int(length) for length in rng.integers(1, 2 * mean, size=count)]
    # the mean of a lognormal is exp(mu + sigma**2 / 2)
    drawn = rng.lognormal(math.log(mean) - LOGNORMAL_SIGMA**2 / 2, LOGNORMAL_SIGMA, count)
    return [int(length) for length in np.clip(np.rint(drawn), MIN_LEN, MAX_LEN)]
