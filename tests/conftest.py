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
NEWER_JAX = (0, 11)  # what tests marked newer_jax need


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run on the GPU, with the tests marked gpu")
    parser.addoption("--demo_model", help="GGUF file of the demo model; unset: fetched and cached")
    parser.addoption("--newer_jax_list", help="file to write the ids of the tests to that a newer jax is to run")


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


@pytest.hookimpl(trylast=True)  # what is left out is counted of what was asked for
def pytest_collection_modifyitems(config, items):
    config.not_run = {}
    is_first = getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0"
    if config.getoption("--newer_jax_list") and is_first:
        ids = [item.nodeid for item in items if "lowers" in item.keywords or "newer_jax" in item.keywords]
        Path(config.getoption("--newer_jax_list")).write_text("".join(f"{each}\n" for each in ids), encoding="utf-8")
    if not config.getoption("--gpu"):
        leave_out(config, items, "gpu")
    if shutil.which("chromium") is None:
        leave_out(config, items, "browser", "of the page: there is no chromium on the path")
    version = importlib.metadata.version("jax")
    if tuple(map(int, version.split(".")[:2])) < NEWER_JAX:
        leave_out(config, items, "newer_jax", f"with jax {version}: they need {'.'.join(map(str, NEWER_JAX))} or later")
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.parent.name not in LONG_FIRST)  # no worker waits for another's long file


def leave_out(config, items, mark, why=None):
    """Takes the tests with a mark out of the run; where there is a reason to tell, the end of the run tells it."""
    left_out = [item for item in items if mark in item.keywords]
    items[:] = [item for item in items if mark not in item.keywords]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        if why is not None:
            config.not_run[why] = len(left_out)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_run"] = getattr(session.config, "not_run", {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    told = getattr(node, "workeroutput", {}).get("not_run", {})  # all workers collect the same
    node.config.not_run = getattr(node.config, "not_run", {}) | told


def pytest_terminal_summary(terminalreporter, config):
    for why, num_tests in getattr(config, "not_run", {}).items():
        terminalreporter.write_line(f"NOT RUN: {num_tests} tests {why}")


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """Forgets compiled programs after a module when they hold many memory maps: XLA crashes when it gets no more."""
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and len(maps.read_bytes().splitlines()) > MAX_MEMORY_MAPS:
        sys.modules["jax"].clear_caches()
        gc.collect()
