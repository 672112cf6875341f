"""Builds a tokenizer from the metadata of a GGUF file."""

import dataclasses
import enum
import logging
from collections.abc import Mapping

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from photon_jax.errors import CheckpointError
from photon_jax.text.tokenizer_parts import TokenizerParts, TokenizersFault, mark_special

_logger = logging.getLogger(__name__)

_KEY = "tokenizer.ggml."
_SPACE = "\u2581"  # SentencePiece's mark of a space


class _TokenType(enum.IntEnum):
    """The kinds of token that GGUF tells apart."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Splitting:
    """How a byte-level vocabulary cuts text into words before it merges bytes.

    Attributes:
      digits: None for the GPT-2 rule, which keeps numbers whole; else the pattern of one number's piece in the newer
        rule, which also keeps a word with the one sign before it and a line's end with the signs before that.
      single_digits: whether each digit is cut off first; with the GPT-2 rule.
      nfc: whether text is brought to Unicode's composed form first.
      whole_words: whether a word that is in the vocabulary is taken as it is, merges or not.
      add_bos: whether encoding begins with BOS when the file does not say.
    """

    digits: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        if self.digits is None:
            plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            if not self.single_digits:
                return plain
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
        alternatives = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            self.digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
        split = pre_tokenizers.Split(Regex("|".join(alternatives)), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = _Splitting()
_SINGLE_DIGITS = _Splitting(single_digits=True)
_LLAMA3 = _Splitting(digits=r"\p{N}{1,3}", whole_words=True, add_bos=True)
_SPLITTINGS: Mapping[str, _Splitting] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Splitting(digits=r"\p{N}", nfc=True),
}


class _Fields:
    """Typed look-ups in the metadata; each key is named without its common beginning."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def strings(self, key: str) -> list[str]:
        value = self._fields.get(_KEY + key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"GGUF field {_KEY}{key} must be a list of strings, got {type(value).__name__}")
        return value

    def numbers(self, key: str, length: int) -> list[float]:
        value = self._fields.get(_KEY + key)
        if not isinstance(value, list) or len(value) != length:
            got = len(value) if isinstance(value, list) else type(value).__name__
            raise CheckpointError(f"GGUF field {_KEY}{key} must be a list of {length} numbers, got {got}")
        wrong = next((item for item in value if not isinstance(item, int | float)), None)
        if wrong is not None:
            raise CheckpointError(f"GGUF field {_KEY}{key} must be a list of numbers, got {wrong!r:.100} in it")
        return value

    def token_id(self, key: str, num_tokens: int) -> int | None:
        value = self._fields.get(_KEY + key)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < num_tokens:
            raise CheckpointError(f"GGUF field {_KEY}{key} must be a token id below {num_tokens}, got {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._fields.get(_KEY + key)
        return default if value is None else bool(value)

    def text(self, key: str, default: str) -> str:
        return str(self._fields.get(_KEY + key, default))


def read_gguf_fields(fields: Mapping[str, object]) -> TokenizerParts:
    """Returns the parts of the tokenizer that a GGUF file's metadata describes.

    Args:
      fields: metadata by key, as plain Python values.

    Raises:
      CheckpointError: the tokenizer is of a kind that can't be made exactly, or a field is missing or wrong.
    """
    given = _Fields(fields)
    kind = given.text("model", "absent")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"the GGUF tokenizer is of kind {kind!r}; supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece "
            "BPE); put a tokenizer.json beside the file instead"
        )
    tokens = given.strings("tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"GGUF field {_KEY}tokens holds the same token twice; the file is damaged")
    types = _token_types(given.numbers("token_type", len(tokens)))
    build = _byte_level if kind == "gpt2" else _sentencepiece
    with TokenizersFault(f"the GGUF field {_KEY}*"):
        backend, add_bos = build(given, tokens, types)
    _add_tokens(backend, tokens, types)
    names = {"bos": "bos", "eos": "eos", "eot": "eot", "unk": "unknown", "pad": "padding"}
    ids = {name: given.token_id(f"{key}_token_id", len(tokens)) for name, key in names.items()}
    known = {name: token_id for name, token_id in ids.items() if token_id is not None}
    mark_special(backend, [tokens[known[name]] for name in ("bos", "eos", "eot") if name in known])
    return TokenizerParts(
        backend=backend,
        special_tokens={f"{name}_token": tokens[token_id] for name, token_id in known.items()},
        bos_token_id=known.get("bos"),
        eos_token_ids=tuple(dict.fromkeys(known[name] for name in ("eos", "eot") if name in known)),
        add_bos=given.flag("add_bos_token", add_bos),
        chat_templates=_chat_templates(fields),
    )


def _token_types(values: list[float]) -> list[_TokenType]:
    known = {int(kind): kind for kind in _TokenType}
    for index, value in enumerate(values):
        if value not in known:
            raise CheckpointError(f"GGUF field {_KEY}token_type[{index}] must be 1 to 6, got {value!r}")
    return [known[int(value)] for value in values]


def _chat_templates(fields: Mapping[str, object]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {name.removeprefix(key + "."): text for name, text in fields.items() if name.startswith(key + ".")}
    return {name: str(text) for name, text in {"default": fields.get(key), **named}.items() if text is not None}


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[_TokenType]) -> None:
    """Makes control and user-defined tokens match as a whole, before any other rule."""
    pairs = list(zip(tokens, types, strict=True))
    control = [text for text, kind in pairs if kind is _TokenType.CONTROL]
    user = [text for text, kind in pairs if kind is _TokenType.USER_DEFINED]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in user])


def _byte_level(given: _Fields, tokens: list[str], types: list[_TokenType]) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns a byte-level BPE tokenizer and whether its kind begins with BOS."""
    pre = given.text("pre", "default")
    if pre not in _SPLITTINGS:
        raise CheckpointError(
            f"the GGUF tokenizer splits words by the rule {pre!r} ({_KEY}pre); supported are "
            f"{', '.join(sorted(_SPLITTINGS))}; put a tokenizer.json beside the file instead"
        )
    if pre == "default":
        _logger.warning("the GGUF file does not say how its tokenizer splits words (%spre); GPT-2's rule is used", _KEY)
    splitting = _SPLITTINGS[pre]
    merges: list[tuple[str, str]] = []
    for merge in given.strings("merges"):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(f"GGUF field {_KEY}merges must hold two pieces and a space each, got {merge!r}")
        merges.append((left, right))
    vocabulary = {text: token_id for token_id, text in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitting.whole_words))
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splitting.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, splitting.add_bos


def _sentencepiece(given: _Fields, tokens: list[str], types: list[_TokenType]) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns a SentencePiece BPE tokenizer and that its kind begins with BOS."""
    scores = given.numbers("scores", len(tokens))
    vocabulary = {text: token_id for token_id, text in enumerate(tokens)}
    if any(f"<0x{byte:02X}>" not in vocabulary for byte in range(256)):
        raise CheckpointError(
            "the GGUF tokenizer of kind 'llama' lacks byte tokens <0x00> to <0xFF>; put a tokenizer.json beside it"
        )
    unknown = next((text for text, kind in zip(tokens, types, strict=True) if kind is _TokenType.UNKNOWN), None)
    merges = _merges_from_scores(tokens, types, scores)
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    mark_space = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if given.flag("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), mark_space])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = mark_space
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _merges_from_scores(tokens: list[str], types: list[_TokenType], scores: list[float]) -> list[tuple[str, str]]:
    """Returns the pairs to merge, first the one whose result has the best score.

    SentencePiece merges, at each turn, the neighbours whose joined piece has the best score, the leftmost of equals;
    every way to cut a piece in two that are pieces themselves is such a pair. Of one piece's cuts the one with the
    longer left side comes first, as merging from the left makes it.
    """
    usable = (_TokenType.NORMAL, _TokenType.USER_DEFINED)
    pieces = {text: token_id for token_id, text in enumerate(tokens) if types[token_id] in usable}
    merges: list[tuple[str, str]] = []
    for text in sorted(pieces, key=lambda piece: (-scores[pieces[piece]], pieces[piece])):
        cuts = ((text[:cut], text[cut:]) for cut in range(len(text) - 1, 0, -1))
        merges.extend((left, right) for left, right in cuts if left in pieces and right in pieces)
    return merges
