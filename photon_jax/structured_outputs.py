"""Structured outputs as a caller asks for them: the form that the text of an answer must have. Host only."""

import dataclasses
import json as json_text
from collections.abc import Mapping

from photon_jax.errors import RequestError

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_CHOICES = 4096
KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """The form that the text of an answer must have; exactly one field is given.

    Tokens that the form rules out are masked before sampling, so an answer that ends with "stop" has it; one that
    max_tokens or a stop string cuts is the beginning of such a text. An answer ends when its form is complete: at once
    where nothing could follow, else where the model puts an end-of-sequence id. Where no token of the vocabulary can go
    on, or a limit of llguidance is met, which compiles the forms, it ends with "abort". Small models can dawdle in
    strings and lists without a bound: give maxLength and maxItems.

    Attributes:
      json: JSON schema, as a dictionary or as text, of draft 2020-12. Properties come in the schema's order; between
        tokens there may be up to 16 characters of white space.
      json_object: whether any JSON object will do.
      regex: regular expression that the whole text matches, in the syntax of Rust's regex crate, without look-around.
      choice: texts of which the answer is one.
      grammar: context-free grammar in Lark's syntax as llguidance extends it, or in llama.cpp's GBNF.
    """

    json: str | Mapping[str, object] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise RequestError(f"json_object must be True or False, got {self.json_object!r:.100}")
        given = [name for name in KINDS if _is_given(getattr(self, name))]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}, got {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _as_schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _as_choices(self.choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise RequestError(f"{name} must be a non-empty text, got {value!r:.100}")
        size = sum(map(len, (self.json or "", self.regex or "", *(self.choice or ()), self.grammar or "")))
        if size > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"{given[0]} is {size} characters long, at most {MAX_GRAMMAR_CHARS} are allowed; give a shorter one"
            )

    @property
    def kind(self) -> str:
        """The field that is given."""
        return next(name for name in KINDS if _is_given(getattr(self, name)))


def _is_given(value: object) -> bool:
    return value is not None and value is not False


def as_structured_outputs(value: object) -> StructuredOutputs | None:
    """Returns structured_outputs given as such, or as a mapping of its fields, as JSON brings it.

    Raises:
      RequestError: it is neither, or a field is unknown.
    """
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(f"structured_outputs must be a StructuredOutputs or its fields, got {value!r:.100}")
    unknown = [name for name in value if name not in KINDS]
    if unknown:
        raise RequestError(f"structured_outputs has no {unknown[0]!r:.100}; its fields are {', '.join(KINDS)}")
    return StructuredOutputs(**value)


def _as_schema_text(schema: object) -> str:
    """Returns a JSON schema as text of its own."""
    try:
        parsed = json_text.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, Mapping):
            raise RequestError(f"json must be a JSON schema, an object; got {schema!r:.100}")
        _check_depth(parsed)
        return json_text.dumps(parsed, allow_nan=False)
    except RequestError:  # which is a ValueError too
        raise
    except RecursionError as error:
        raise RequestError(f"json is nested too deeply, {MAX_SCHEMA_DEPTH} levels at most; flatten it") from error
    except (ValueError, TypeError) as error:
        raise RequestError(f"json must be a JSON schema, an object; it is no JSON: {error}") from error


def _check_depth(schema: object) -> None:
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(f"json is nested more than {MAX_SCHEMA_DEPTH} levels deep; flatten it, or use $defs")
        inner: list[object] = []
        for value in level:
            if isinstance(value, Mapping):
                inner += [each for each in value.values() if isinstance(each, Mapping | list | tuple)]
            elif isinstance(value, list | tuple):
                inner += [each for each in value if isinstance(each, Mapping | list | tuple)]
        level = inner


def _as_choices(value: object) -> tuple[str, ...]:
    texts = tuple(value) if isinstance(value, list | tuple) else ()
    if not (1 <= len(texts) <= MAX_CHOICES and all(isinstance(text, str) and text for text in texts)):
        raise RequestError(f"choice must be a list of 1 to {MAX_CHOICES} non-empty texts, got {value!r:.100}")
    return tuple(dict.fromkeys(texts))
