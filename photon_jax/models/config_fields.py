"""Config fields: typed reads of a checkpoint's key-value configuration, with errors that name the key."""

import dataclasses
import sys
from collections.abc import Mapping

from photon_jax.errors import CheckpointError

MAX_INTEGER = 2**31 - 1
MAX_NUMBER = sys.float_info.max


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigFields:
    """A mapping read from a checkpoint; a null value counts as absent.

    Attributes:
      values: the keys and values as the file holds them.
      where: what the values were read from, for error messages.
    """

    values: Mapping[str, object]
    where: str

    def get(self, key: str) -> object:
        """Returns the value of `key`, or None when it is absent or null."""
        return self.values.get(key)

    def require(self, key: str) -> object:
        """Returns the value of `key`.

        Raises:
          CheckpointError: the key is absent or null.
        """
        value = self.values.get(key)
        if value is None:
            raise CheckpointError(f"{self.where} has no {key!r}, which this model needs")
        return value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """Returns an integer in [minimum, maximum]; the key is required when no default is given."""
        value = self.require(key) if default is None else self.get(key)
        if value is None:
            assert default is not None, f"required key {key} read as null"
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.wrong(key, f"an integer in [{minimum}, {maximum}]")
        return value

    def number(self, key: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        """Returns a finite number of at least `minimum` and not 0; required when no default is given."""
        value = self.require(key) if default is None else self.get(key)
        if value is None:
            assert default is not None, f"required key {key} read as null"
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not minimum <= value <= MAX_NUMBER or value == 0:  # type: ignore[operator]
            raise self.wrong(key, f"a number of at least {minimum:g}" if minimum else "a positive number")
        return float(value)  # type: ignore[arg-type]

    def number_within(self, key: str, low: float, high: float, *, is_open: bool) -> float:
        """Returns a number in [low, high], or in (low, high] when `is_open`; the key is required."""
        value = self.require(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (is_open and value == low):  # type: ignore[operator]
            raise self.wrong(key, f"a number in {'(' if is_open else '['}{low:g}, {high:g}]")
        return float(value)  # type: ignore[arg-type]

    def boolean(self, key: str, default: bool) -> bool:
        """Returns true or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Returns a string; the key is required when no default is given."""
        value = self.require(key) if default is None else self.get(key)
        if value is None:
            assert default is not None, f"required key {key} read as null"
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def section(self, key: str) -> "ConfigFields":
        """Returns the fields of a nested mapping, empty when the key is absent."""
        value = self.get(key)
        if value is None:
            return ConfigFields({}, f"{self.where} {key}")
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return ConfigFields(value, f"{self.where} {key}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Returns the token ids that an integer, a list of them, or nothing gives, each once."""
        value = self.get(key)
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= MAX_INTEGER:
                raise self.wrong(key, "a token id or a list of token ids")
        return tuple(dict.fromkeys(ids))

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """Returns the error that says what `key` should have held."""
        return CheckpointError(f"{self.where}: {key} must be {expected}, got {self.get(key)!r:.100}")
