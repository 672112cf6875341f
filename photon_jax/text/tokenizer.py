"""Tokenizer: text to token ids and back, and conversations to token ids. Host only."""

import json
import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from photon_jax.errors import CheckpointError, RequestError
from photon_jax.request import MAX_STOP_IDS
from photon_jax.text.pieces import TokenBytes, read_decoder, strip_start

if TYPE_CHECKING:
    from photon_jax.text.tokenizer_parts import TokenizerParts

_logger = logging.getLogger(__name__)
SHORT_TEXT = 4096  # characters, encoded in a millisecond; threads that begin for them would take longer


class Tokenizer:
    """The tokenizer of one checkpoint; no call changes it, so threads may share it."""

    def __init__(self, parts: "TokenizerParts") -> None:
        """Takes over the parts; see `from_pretrained` and `from_gguf`.

        Raises:
          CheckpointError: the decoder is of an unsupported kind, or a chat template is not valid.
        """
        from photon_jax.text.chat_template import ChatTemplate
        from photon_jax.text.token_length import max_token_chars

        self._backend = parts.backend
        decoder = parts.backend.decoder
        self._decoder = read_decoder(None if decoder is None else json.loads(decoder.__getstate__()))
        added = parts.backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        texts = {name: (text, parts.backend.token_to_id(text)) for name, text in parts.special_tokens.items()}
        self._special_tokens = {name: (text, found) for name, (text, found) in texts.items() if found is not None}
        self._vocab_size = 1 + max(parts.backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._token_bytes = TokenBytes(self._decoder, parts.backend.id_to_token, range(self._vocab_size))
        self._shown_bytes = TokenBytes(
            self._decoder, parts.backend.id_to_token, range(self._vocab_size), left_out=self._special_ids
        )
        self._max_token_chars = max_token_chars(parts.backend)
        self._bos_token_id = parts.bos_token_id
        self._eos_token_ids = parts.eos_token_ids
        self._backend_adds_bos = parts.bos_token_id is not None and parts.backend.encode("").ids[:1] == [
            parts.bos_token_id
        ]
        adds_bos = self._backend_adds_bos if parts.add_bos is None else parts.add_bos
        self._adds_bos = adds_bos and parts.bos_token_id is not None
        templates = self._chat_templates = dict(parts.chat_templates)
        self._chat_template = ChatTemplate(templates, special_tokens=parts.special_tokens) if templates else None
        self._template_text = templates.get("default")
        self._tool_template_text = templates.get("tool_use", self._template_text)

    @classmethod
    def from_pretrained(cls, folder: Path) -> "Tokenizer":
        """Returns the tokenizer of a checkpoint folder; see `read_tokenizer_folder` for the files it reads."""
        from photon_jax.text.tokenizer_files import read_tokenizer_folder

        return cls(read_tokenizer_folder(Path(folder)))

    @classmethod
    def from_gguf(cls, fields: Mapping[str, object]) -> "Tokenizer":
        """Returns the tokenizer of a GGUF file, from its metadata as plain Python values by key."""
        from photon_jax.text.gguf_tokenizer import read_gguf_fields

        return cls(read_gguf_fields(fields))

    @property
    def bos_token_id(self) -> int | None:
        """The id of the beginning-of-sequence token; None when the tokenizer has none."""
        return self._bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that the tokenizer itself declares as the end of a text or a turn; the model may know more."""
        return self._eos_token_ids

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id; a model's own vocabulary may be padded beyond it."""
        return self._vocab_size

    @property
    def max_token_chars(self) -> int | None:
        """The most characters of a text that one token stands for; None where that is not certain."""
        return self._max_token_chars

    @property
    def special_tokens(self) -> dict[str, tuple[str, int]]:
        """Text and id of the declared special tokens that are in the vocabulary, by name, such as pad_token."""
        return dict(self._special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The Jinja text of the usual chat template; None when there is none."""
        return self._template_text

    @property
    def tool_template(self) -> str | None:
        """The Jinja text of the chat template that is used when tools are given; None when there is none."""
        return self._tool_template_text

    @property
    def chat_templates(self) -> dict[str, str]:
        """Text of each chat template by name, the usual one under "default"; empty when there is none."""
        return dict(self._chat_templates)

    @property
    def num_stripped(self) -> int:
        """How many spaces at the start of a decoded text are cut, at most."""
        return self._decoder.num_stripped

    def is_special(self, token_id: int) -> bool:
        """Returns whether the token is left out of the text when special tokens are skipped."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to the text; none for an id without a token."""
        return self._token_bytes[token_id]

    def joined_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> bytes:
        """Returns the bytes that several tokens add to the text, special ones left out where they are skipped."""
        table = self._shown_bytes if skip_special_tokens else self._token_bytes
        return b"".join(map(table.__getitem__, token_ids))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a prompt text.

        Args:
          text: special tokens written out in it become their ids.
          add_special_tokens: whether to add what the tokenizer adds by default. Where that is a BOS, the ids begin
            with exactly one, also when the text already does.

        Raises:
          RequestError: the text is not a string of Unicode characters.
        """
        _check_text(text)
        if len(text) <= SHORT_TEXT:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:  # a batch of one: unlike `encode`, it lets other threads run, which a long text would stop for seconds
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = list(encoding.ids)
        if not add_special_tokens:
            return ids
        if not self._adds_bos:
            return ids[1:] if self._backend_adds_bos else ids
        if self._num_leading_bos(ids) > self._backend_adds_bos:
            _logger.warning("the prompt text already begins with the BOS token; no second one is added")
        return self._with_one_bos(ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of the ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
          RequestError: an id is outside the vocabulary.
        """
        pieces: list[bytes] = []
        for index, value in enumerate(ids):
            token_id = operator.index(value)
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"token id {token_id} at place {index} is outside the tokenizer's vocabulary, 0 to "
                    f"{self._vocab_size - 1}"
                )
            if not (skip_special_tokens and token_id in self._special_ids):
                pieces.append(self.token_bytes(token_id))
        return strip_start(b"".join(pieces).decode("utf-8", "replace"), self._decoder.num_stripped)[0]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Returns the prompt text of a conversation; see `ChatTemplate.render` for the arguments.

        Raises:
          RequestError: the checkpoint has no chat template, or the template refuses the conversation.
        """
        if self._chat_template is None:
            raise RequestError(
                "the tokenizer has no chat template; give a prompt text instead of messages, or put a "
                "chat_template.jinja into the checkpoint's folder"
            )
        return self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **template_kwargs
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Returns the token ids of a conversation; where the tokenizer adds a BOS, they begin with exactly one.

        Raises:
          RequestError: as `apply_chat_template`.
        """
        text = self.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **template_kwargs
        )
        ids = self.encode(text, add_special_tokens=False)
        return self._with_one_bos(ids) if self._adds_bos else ids

    def _num_leading_bos(self, ids: Sequence[int]) -> int:
        count = 0
        while count < len(ids) and ids[count] == self._bos_token_id:
            count += 1
        return count

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        assert self._bos_token_id is not None, "a tokenizer without BOS adds one"
        return [self._bos_token_id, *ids[self._num_leading_bos(ids) :]]


def find_tokenizer(source: Path | Mapping[str, object] | None) -> Tokenizer | None:
    """Returns the tokenizer of a checkpoint folder or of a GGUF file's fields; None where there is none.

    Raises:
      CheckpointError: its files or fields can't be understood.
    """
    if isinstance(source, Mapping):
        return Tokenizer.from_gguf(source)
    if source is None or not _has_tokenizer(Path(source)):
        _logger.warning("the checkpoint has no tokenizer: prompts must be token ids, and outputs have no text")
        return None
    return Tokenizer.from_pretrained(source)


def _has_tokenizer(folder: Path) -> bool:
    from photon_jax.text.tokenizer_files import TOKENIZER_FILE

    return (folder / TOKENIZER_FILE).is_file()


def all_eos_token_ids(model_ids: Iterable[int], tokenizer: Tokenizer | None, *, vocab_size: int) -> tuple[int, ...]:
    """Returns every id that ends a sequence: the model's and the tokenizer's own, those that can be sampled.

    Args:
      model_ids: of config.json and generation_config.json, or of the GGUF fields.
      vocab_size: of the model.

    Raises:
      CheckpointError: they are more than a step can watch.
    """
    union = dict.fromkeys((*model_ids, *(() if tokenizer is None else tokenizer.eos_token_ids)))
    ids = tuple(token_id for token_id in union if 0 <= token_id < vocab_size)
    if len(ids) > MAX_STOP_IDS:
        raise CheckpointError(
            f"eos_token_id in config.json, generation_config.json and the tokenizer's own are {len(ids)} ids together; "
            f"at most {MAX_STOP_IDS} can be watched, shorten the lists"
        )
    return ids


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"a prompt text must be a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(
            f"the text holds the lone surrogate U+{code:04X} at character {error.start}, which is no Unicode text; "
            "decode the input with errors='replace'"
        ) from error
