"""JSON as the server sends it: compact, as UTF-8, whatever strings a request brought into it."""

import json
from typing import Any

from pydantic import TypeAdapter
from starlette.responses import Response

_ANY: TypeAdapter[Any] = TypeAdapter(Any)  # five times as fast as the other
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def json_bytes(value: Any) -> bytes:
    """Returns a value as JSON; a lone surrogate, which UTF-8 can't hold, becomes a question mark."""
    try:
        return _ANY.dump_json(value)
    except ValueError:
        return _ENCODER.encode(value).encode("utf-8", "replace")


class JsonAnswer(Response):
    """A JSON value as a whole answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Returns the body."""
        return json_bytes(content)
