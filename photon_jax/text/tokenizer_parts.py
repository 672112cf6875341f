"""What a tokenizer is made of, whichever file it came from."""

import dataclasses
from collections.abc import Iterable, Mapping
from types import TracebackType

import tokenizers

from photon_jax.errors import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerParts:
    """A tokenizer as read from its files.

    Attributes:
      backend: the vocabulary and its rules.
      special_tokens: text of bos_token, eos_token and the like, those that are declared; chat templates see them.
      bos_token_id: None when the tokenizer declares no BOS.
      eos_token_ids: ids that the tokenizer declares as ends of a text or a turn.
      add_bos: whether encoding begins with BOS; None: as the backend's own rule for special tokens does.
      chat_templates: template text by name, the usual one under "default"; empty when there is none.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool | None
    chat_templates: Mapping[str, str]


class TokenizersFault:
    """Context in which the tokenizers library's complaints about a file become a CheckpointError.

    That library raises bare `Exception`; any subclass is something else and passes unchanged.
    """

    def __init__(self, what: str) -> None:
        """Names what is being built, for the message."""
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is Exception:
            raise CheckpointError(f"{self._what} can't be used as a tokenizer: {error}") from error


def mark_special(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """Makes the tokens of these texts special in the backend, where the vocabulary has them and they are not yet."""
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys(texts)
            if text not in marked and backend.token_to_id(text) is not None
        ]
    )
