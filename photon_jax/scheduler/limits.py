"""Limits: what a request may ask of the model's length and of the cache. Host only."""

from photon_jax.cache.layout import CacheLayout
from photon_jax.errors import RequestError
from photon_jax.request import Request


def max_new_tokens(num_prompt_tokens: int, layout: CacheLayout, max_model_len: int) -> int:
    """Returns the greatest max_tokens that a prompt of this length may ask for; below 1 if none.

    The last token sampled is never fed back, so it counts for max_model_len, yet takes no place in the cache.
    """
    return min(max_model_len, layout.max_tokens + 1) - num_prompt_tokens


def num_slots_of(request: Request, layout: CacheLayout, max_model_len: int) -> int:
    """Returns how many tokens of the cache a request takes at its greatest length.

    Raises:
      RequestError: it can never be served.
    """
    name, num_prompt = f"request {request.request_id!r}", len(request.prompt_token_ids)
    if num_prompt == 0:
        raise RequestError(f"{name} has an empty prompt; give at least one token")
    max_tokens, what = 0, f"prompt of {num_prompt} tokens"
    if not request.score:
        assert request.params.max_tokens is not None, f"{name} has no max_tokens"
        max_tokens = request.params.max_tokens
        if num_prompt + 1 > max_model_len:
            raise RequestError(
                f"{name}: {what} leaves no room to generate, max_model_len is {max_model_len}; "
                "shorten the prompt or raise EngineConfig.max_model_len"
            )
        what += f" and max_tokens {max_tokens}"
    if num_prompt + max_tokens > max_model_len:
        raise RequestError(
            f"{name}: {what} make {num_prompt + max_tokens} tokens, max_model_len is {max_model_len}; "
            "ask for fewer or raise EngineConfig.max_model_len"
        )
    num_slots = num_prompt + max(max_tokens - 1, 0)  # the last token sampled is never fed back
    if num_slots > layout.max_tokens:
        raise RequestError(
            f"{name}: {what} need a cache of {num_slots} tokens, the whole cache holds {layout.max_tokens} "
            f"({layout.num_usable_blocks} blocks of {layout.block_size}); "
            "ask for fewer, or raise CacheConfig.num_blocks or memory_fraction"
        )
    return num_slots
