"""What the built wheel holds and declares."""

import ast
import configparser
import email
import re
import sys
import tomllib
import zipfile

import pytest
from hatchling.builders.wheel import WheelBuilder
from helpers.source_tree import PACKAGES, ROOT, sources

DISTRIBUTIONS = {"absl": "absl-py", "orbax": "orbax-checkpoint"}  # where it differs from the name that is imported
# In the server, eval and bench extras, or brought by a package that is declared.
OPTIONAL = {
    *("fastapi", "uvicorn", "pydantic", "prometheus-client", "starlette", "typing-extensions"),
    *("aiohttp", "lm-eval", "ml-dtypes", "matplotlib"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_wheel_holds_every_module_and_data_file_and_nothing_else(wheel):
    kinds = ("**/*.py", "**/*.json", "**/py.typed", "CHANGELOG.md", "server/static/**/*.*")
    wanted = {
        str(path.relative_to(ROOT)) for package in PACKAGES for kind in kinds for path in (ROOT / package).glob(kind)
    }
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == wanted
    assert {"photon_jax/CHANGELOG.md", "photon_jax/py.typed", "pallas_kernels/py.typed"} <= held
    assert {
        f"photon_jax/server/static/{name}" for name in ("index.html", "app.js", "vendor/purify.LICENSE.txt")
    } <= held


def test_wheel_declares_name_version_python_and_licence(metadata):
    import photon_jax

    assert metadata["Name"] == "photon_jax"
    assert metadata["Version"] == photon_jax.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "MIT"
    assert set(metadata.get_all("Provides-Extra")) == {"cuda12", "cuda13", "server", "eval", "bench", "dev"}


def test_commands_point_at_functions(wheel):
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt"))
    groups = configparser.ConfigParser(delimiters="=")
    groups.read_string(wheel.read(name).decode())
    assert dict(groups["lm_eval.models"]) == {"photon_jax": "photon_jax.evals.lm_eval_model:PhotonLM"}
    commands = dict(groups["console_scripts"])
    assert set(commands) == {
        *("photon-generate", "photon-bench", "photon-convert", "photon-quantize"),
        *("photon-web-server", "photon_web_server", "photon-lm-eval", "photon-eval-perplexity"),
    }
    for target in commands.values():
        module, function = target.split(":")
        tree = ast.parse(wheel.read(module.replace(".", "/") + ".py"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_imported_library_is_declared(metadata):
    declared = {re.split(r"[<>=\[; ]", line)[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    tops = set()
    for source in sources(*PACKAGES):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import):
                tops |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                tops.add(str(node.module).split(".")[0])
    used = {
        DISTRIBUTIONS.get(top, top).replace("_", "-") for top in tops - set(sys.stdlib_module_names) - set(PACKAGES)
    }
    assert used <= declared | OPTIONAL


def test_torch_and_transformers_are_in_no_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    everything = [
        *project["dependencies"],
        *(line for lines in project["optional-dependencies"].values() for line in lines),
    ]
    assert not [line for line in everything if line.startswith(("torch", "transformers"))]
