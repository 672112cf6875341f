"""The errors that photon_jax raises on purpose: one base class and five kinds."""

import contextlib
from collections.abc import Iterator


class PhotonError(Exception):
    """Base of every error that photon_jax raises on purpose."""


class ConfigError(PhotonError, ValueError):
    """A setting is wrong, or two settings contradict each other; raised at start-up."""


class RequestError(PhotonError, ValueError):
    """The caller's request is wrong or can never be served; HTTP 400.

    Attributes:
      prompt_index: which prompt of the call it is about; None when it is about no one of them.
    """

    prompt_index: int | None = None


class CapacityError(PhotonError, RuntimeError):
    """The waiting queue is full; the same request may succeed later; HTTP 503 with Retry-After."""


class CheckpointError(PhotonError, ValueError):
    """A checkpoint file, tensor, configuration or tokenizer can't be used."""


class EngineDeadError(PhotonError, RuntimeError):
    """The engine failed and serves no more; the cause is chained."""


def shown(value: object) -> str:
    """Returns what a message shows of a value: the first 100 characters; Python writes no integers of many digits."""
    try:
        return f"{value!r:.100}"
    except ValueError:
        return f"{type(value).__name__} of too many digits to show"


@contextlib.contextmanager
def naming_prompt(index: int, num_prompts: int) -> Iterator[None]:
    """Makes a RequestError that is raised inside say which of a call's prompts it is about."""
    try:
        yield
    except RequestError as error:
        error.prompt_index = index
        if num_prompts == 1:
            raise
        named = RequestError(f"prompt {index}: {error}")
        named.prompt_index = index
        raise named from error
