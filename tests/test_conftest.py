"""What is left out of a run is counted and named; what a run compiles is its own; what lowers for a GPU is marked."""

import ast
import os
import shutil
import subprocess
import sys

import jax
import pytest
from helpers.source_tree import ROOT

TESTS = """
import os, pathlib, pytest

@pytest.mark.browser
def test_a():
    assert False

@pytest.mark.newer_jax
@pytest.mark.parametrize("word", ["one two"])
def test_with_a_newer_jax(word):
    import jax
    assert jax.__version_info__ >= (0, 11)

@pytest.mark.lowers
def test_with_any_jax():
    pass

@pytest.mark.lowers
@pytest.mark.gpu
def test_not_asked_for():
    pass

def test_b():
    programs = os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert os.listdir(programs) == []
    pathlib.Path(__file__).with_name("programs").write_text(programs)
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist=loadfile")])
def test_a_run_names_what_it_leaves_out_and_leaves_no_programs_behind(tmp_path, workers):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    markers = "".join(f"  {name}: one\n" for name in ("browser", "gpu", "lowers", "newer_jax"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{markers}", encoding="utf-8")
    (tmp_path / "test_c.py").write_text(TESTS, encoding="utf-8")
    listed = tmp_path / "list"
    options = ("-p", "no:cacheprovider", "-m", "not gpu", f"--newer_jax_list={listed}", *workers)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    is_old = jax.__version_info__ < (0, 11)
    assert "NOT RUN: 1 tests of the page" in run.stdout
    assert (f"NOT RUN: 1 tests with jax {jax.__version__}: they need 0.11 or later" in run.stdout) == is_old
    assert f"{2 if is_old else 3} passed" in run.stdout
    assert listed.read_text() == "test_c.py::test_with_a_newer_jax[one two]\ntest_c.py::test_with_any_jax\n"
    programs = (tmp_path / "programs").read_text()
    assert programs != os.environ.get("JAX_COMPILATION_CACHE_DIR") and not os.path.exists(programs)


def reach(functions, target):
    """Returns the names of the functions that use a name, themselves or through one another."""
    found, names = set(), {target}
    while names:
        names = {
            function.name
            for function in functions
            if function.name not in found
            and any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(function))
        }
        found |= names
    return found


def test_every_test_that_lowers_for_a_gpu_is_marked_so_that_a_newer_jax_runs_it():
    num_marked = 0
    for path in (ROOT / "tests").rglob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        if "import lower_for_cuda" not in source:
            continue
        tree = ast.parse(source)
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        lowering = reach(functions, "lower_for_cuda")
        for function in functions:
            if function.name in lowering and function.name.startswith("test_"):
                marks = {ast.unparse(each).removeprefix("pytest.mark.") for each in function.decorator_list}
                assert marks & {"lowers", "newer_jax"}, f"{path.name}: {function.name} has neither mark"
                num_marked += 1
    assert num_marked > 20
