"""Test settings: the CPU unless --gpu is given, JAX's strict modes, repeatable property tests."""

import importlib.metadata
import os
import sys

import hypothesis


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
