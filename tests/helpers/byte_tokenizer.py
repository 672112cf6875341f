"""A tokenizer whose tokens are bytes: what a test expects of it can be written down by hand."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from photon_jax.errors import RequestError
from photon_jax.text.chat_template import ChatTemplate


class ByteTokenizer:
    """Has the interface of photon_jax's Tokenizer: ids 0 to 255 are bytes, 256 begins a text, 257 ends it.

    Its chat text is `role: content` on a line for each message, then `assistant: `.
    """

    bos_token_id = 256
    eos_token_ids = (257,)
    vocab_size = 258
    max_token_chars = 1
    has_chat_template = True
    chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
    )
    tool_template = chat_template
    special_tokens = {"bos_token": ("<bos>", 256), "eos_token": ("<eos>", 257)}  # noqa: RUF012
    num_stripped = 0

    def is_special(self, token_id: int) -> bool:
        return token_id in (256, 257)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in (256, 257):
            return (b"<bos>", b"<eos>")[token_id - 256]
        return bytes([token_id]) if 0 <= token_id < 256 else b""

    def joined_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> bytes:
        kept = [i for i in token_ids if not (skip_special_tokens and self.is_special(i))]
        return b"".join(map(self.token_bytes, kept))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            ids = list(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(f"the text holds a lone surrogate at character {error.start}") from error
        return [self.bos_token_id, *ids] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        pieces = []
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(f"token id {token_id} is outside the vocabulary, 0 to {self.vocab_size - 1}")
            if not (skip_special_tokens and self.is_special(token_id)):
                pieces.append(self.token_bytes(token_id))
        return b"".join(pieces).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        return ChatTemplate(self.chat_template).render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **template_kwargs
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        return self.encode(self.apply_chat_template(messages, **kwargs))
