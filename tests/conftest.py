"""Test settings: the CPU unless --gpu is given, JAX's strict modes, repeatable property tests."""

import gc
import importlib.metadata
import os
import sys
from pathlib import Path

import hypothesis
import pytest

MAX_MEMORY_MAPS = 20_000  # of the 65,530 that Linux gives a process by default


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run on the GPU, with the tests marked gpu")
    parser.addoption("--demo_model", help="GGUF file of the demo model; unset: fetched and cached")


def pytest_configure(config):
    # Set before anything imports JAX, and inherited by the processes that tests start.
    assert "jax" not in sys.modules, "JAX was imported before the test settings were made"
    if not config.getoption("--gpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    # Compile times make per-example deadlines meaningless; the same examples in every run make failures repeatable.
    hypothesis.settings.register_profile("photon", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("photon")


def pytest_report_header(config):
    platform = "as JAX finds it" if config.getoption("--gpu") else "cpu"
    return f"jax {importlib.metadata.version('jax')} on {platform}"


def pytest_collection_modifyitems(config, items):
    if config.getoption("--gpu"):
        return
    left_out = [item for item in items if "gpu" in item.keywords]
    items[:] = [item for item in items if "gpu" not in item.keywords]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """Forgets compiled programs after a module when they hold many memory maps: XLA crashes when it gets no more."""
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and len(maps.read_bytes().splitlines()) > MAX_MEMORY_MAPS:
        sys.modules["jax"].clear_caches()
        gc.collect()
