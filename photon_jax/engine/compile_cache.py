"""The persistent compile cache: programs that were compiled once are read from disk by the next process."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_process_settings = threading.RLock()  # JAX has one set of these settings for all threads


@contextlib.contextmanager
def compile_cache(directory: str | Path | None) -> Iterator[None]:
    """Keeps what is compiled inside in a folder, however quickly it compiled, and takes from it what is there.

    On a GPU XLA's choices of algorithms are kept beside the programs, so that a process that finds them computes the
    same bits. JAX knows one such folder for the whole process: its settings are changed inside, and put back at the
    end. What another thread compiles meanwhile goes to this folder too. None changes nothing.
    """
    if directory is None:
        yield
        return
    wanted = {
        "jax_compilation_cache_dir": os.path.expanduser(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with _process_settings:
        before = {name: jax.config.values[name] for name in wanted}
        if before == wanted:
            yield
            return
        try:
            _set(wanted)
            yield
        finally:
            _set(before)


def _set(values: dict[str, object]) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it looks at the settings at its first use alone
