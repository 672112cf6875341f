"""The persistent compile cache: programs that were compiled once are read from disk by the next process."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

Settings = dict[str, object]


@dataclasses.dataclass(frozen=True, slots=True)
class _Change:
    """Settings of JAX that were changed, those before, and the threads that use them."""

    settings: Settings
    before: Settings
    threads: list[int]


_changes: list[_Change] = []  # JAX has one set of these settings for all threads; the last change holds
_condition = threading.Condition()  # guards it


@contextlib.contextmanager
def compile_cache(directory: str | Path | None) -> Iterator[None]:
    """Keeps what is compiled inside in a folder, however quickly it compiled, and takes from it what is there.

    On a GPU XLA's choices of algorithms are kept beside the programs, so that a process that finds them computes the
    same bits. JAX knows one such folder for the whole process: its settings are changed inside, and put back at the
    end. Threads with the same folder are inside together, those with different ones take turns. What another thread
    compiles meanwhile goes to this folder too. None changes nothing.
    """
    if directory is None:
        yield
        return
    _enter(
        {
            "jax_compilation_cache_dir": os.path.expanduser(directory),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
    )
    try:
        yield
    finally:
        _leave()


def _enter(settings: Settings) -> None:
    thread = threading.get_ident()
    with _condition:
        while _changes and _changes[-1].settings != settings and thread not in _changes[-1].threads:
            _condition.wait()
        if not _changes or _changes[-1].settings != settings:
            before = {name: jax.config.values[name] for name in settings}
            _set(before, settings)
            _changes.append(_Change(settings, before, []))
        _changes[-1].threads.append(thread)


def _leave() -> None:
    thread = threading.get_ident()
    with _condition:
        next(change for change in reversed(_changes) if thread in change.threads).threads.remove(thread)
        while _changes and not _changes[-1].threads:
            change = _changes.pop()
            _set(change.settings, change.before)
        _condition.notify_all()


def _set(before: Settings, values: Settings) -> None:
    if values == before:
        return
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it looks at the settings at its first use alone
