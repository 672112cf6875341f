"""Test settings: the CPU unless --gpu is given, JAX's strict modes, repeatable property tests."""

import gc
import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

MAX_MEMORY_MAPS = 20_000  # of the 65,530 that Linux gives a process by default
LONG_FIRST = ("e2e", "server", "engine", "models")  # folders of the files that take longest


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run on the GPU, with the tests marked gpu")
    parser.addoption("--demo_model", help="GGUF file of the demo model; unset: fetched and cached")


def pytest_configure(config):
    # Set before anything imports JAX, and inherited by the processes that tests start.
    assert "jax" not in sys.modules, "JAX was imported before the test settings were made"
    if not config.getoption("--gpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"
        if not hasattr(config, "workerinput"):
            share_programs(config)
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    # Compile times make per-example deadlines meaningless; the same examples in every run make failures repeatable.
    hypothesis.settings.register_profile("photon", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("photon")


def share_programs(config):
    """Has all processes of this run share what they compile, which is most of their work, in a folder of the run."""
    folder = tempfile.TemporaryDirectory(prefix="photon_jax_programs_", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
    # Small programs too: keeping one takes 1 ms, fetching it 12 where compiling takes 60.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_report_header(config):
    platform = "as JAX finds it" if config.getoption("--gpu") else "cpu"
    return f"jax {importlib.metadata.version('jax')} on {platform}"


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--gpu"):
        leave_out(config, items, "gpu")
    if shutil.which("chromium") is None:
        config.num_without_browser = leave_out(config, items, "browser")
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.parent.name not in LONG_FIRST)  # no worker waits for another's long file


def leave_out(config, items, mark):
    """Takes the tests with a mark out of the run; returns how many there were."""
    left_out = [item for item in items if mark in item.keywords]
    items[:] = [item for item in items if mark not in item.keywords]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    return len(left_out)


def pytest_terminal_summary(terminalreporter, config):
    num_tests = getattr(config, "num_without_browser", 0)
    if num_tests:
        terminalreporter.write_line(f"NOT RUN: {num_tests} tests of the page: there is no chromium on the path")


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """Forgets compiled programs after a module when they hold many memory maps: XLA crashes when it gets no more."""
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and len(maps.read_bytes().splitlines()) > MAX_MEMORY_MAPS:
        sys.modules["jax"].clear_caches()
        gc.collect()
