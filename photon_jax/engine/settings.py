"""Settings of JAX under which everything of an engine is traced."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def pinned_settings() -> Iterator[None]:
    """Holds the settings of JAX that would change a step's results, whatever the process has set for itself."""
    with jax.enable_x64(False), jax.threefry_partitionable(True):
        yield
