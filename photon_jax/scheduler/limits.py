"""Limits: what a request may ask of the model's length and of the cache. Host only."""

import dataclasses

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import SchedulerConfig
from photon_jax.errors import CapacityError, RequestError
from photon_jax.request import Request


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What bounds requests; it never changes, so any thread may ask.

    Attributes:
      config: how many sequences may run and wait.
      layout: of the cache.
      max_model_len: tokens of a sequence, prompt and output together.
    """

    config: SchedulerConfig
    layout: CacheLayout
    max_model_len: int

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """Returns the greatest max_tokens that a prompt of this length may ask for; below 1 if none.

        The last token sampled is never fed back, so it counts for max_model_len, yet takes no place in the cache.
        """
        return min(self.max_model_len, self.layout.max_tokens + 1) - num_prompt_tokens

    def check_queue(self, num_waiting: int) -> None:
        """Raises CapacityError unless one more request may wait."""
        if num_waiting >= self.config.max_waiting:
            raise CapacityError(
                f"the queue is full: {num_waiting} requests wait and max_waiting is {self.config.max_waiting}; "
                "try again later or raise SchedulerConfig.max_waiting"
            )

    def num_slots(self, request: Request) -> int:
        """Returns how many tokens of the cache a request takes at its greatest length: all but the last are read.

        Raises:
          RequestError: it can never be served.
        """
        name, num_prompt = f"request {request.request_id!r}", len(request.prompt_token_ids)
        if num_prompt == 0:
            raise RequestError(f"{name} has an empty prompt; give at least one token")
        max_tokens, what = 0, f"prompt of {num_prompt} tokens"
        longest = self.max_model_len + request.score  # the last token of a score is not read
        if not request.score:
            assert request.params.max_tokens is not None, f"{name} has no max_tokens"
            max_tokens = request.params.max_tokens
            if num_prompt + 1 > self.max_model_len:
                raise RequestError(
                    f"{name}: {what} leaves no room to generate, max_model_len is {self.max_model_len}; "
                    "shorten the prompt or raise EngineConfig.max_model_len"
                )
            what += f" and max_tokens {max_tokens}"
        if num_prompt + max_tokens > longest:
            raise RequestError(
                f"{name}: {what} make {num_prompt + max_tokens} tokens, max_model_len is {self.max_model_len}; "
                "ask for fewer or raise EngineConfig.max_model_len"
            )
        num_slots = max(num_prompt + max_tokens - 1, 1)  # the last token sampled is never fed back
        if num_slots > self.layout.max_tokens:
            raise RequestError(
                f"{name}: {what} need a cache of {num_slots} tokens, the whole cache holds {self.layout.max_tokens} "
                f"({self.layout.num_usable_blocks} blocks of {self.layout.block_size}); "
                "ask for fewer, or raise CacheConfig.num_blocks or memory_fraction"
            )
        return num_slots
