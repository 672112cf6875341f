"""The shell scripts: what they install, and when they leave the network alone."""

import os
import shutil
import subprocess

import pytest
from helpers.source_tree import ROOT

# Stands for a Python: makes an environment that holds itself, and writes down every pip command.
STUB_PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
  "-m venv") mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  "-m pip") echo "$*" >> "$PIP_LOG"; if [ -n "${PIP_FAILS:-}" ]; then exit 1; fi ;;
  "--version "*) echo "Python 3.stub" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout with make_venv.sh and a package of one file."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "make_venv.sh", tmp_path / "scripts")
    for name in ("pyproject.toml", "README.md", "LICENSE", "photon_jax/a.py", "pallas_kernels/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one\n", encoding="utf-8")
    stub = tmp_path / "stub python"
    stub.write_text(STUB_PYTHON, encoding="utf-8")
    stub.chmod(0o755)
    return tmp_path


def make_venv(checkout, *extras, python=None, **variables):
    """Returns the finished process and the pip commands that it ran."""
    log = checkout / "pip.log"
    log.write_text("", encoding="utf-8")
    done = subprocess.run(
        ["bash", str(checkout / "scripts" / "make_venv.sh"), *extras],
        env={"PATH": os.environ["PATH"], "HOME": str(checkout), "PIP_LOG": str(log)}
        | {"PHOTON_PYTHON": str(python or checkout / "stub python")}
        | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return done, log.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("path", [".ci/run", "scripts/make_venv.sh", "scripts/quickstart.sh", "scripts/test.sh"])
def test_scripts_are_executable_and_parse(path):
    assert os.access(ROOT / path, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / path)], check=True)


def test_the_second_run_installs_nothing(checkout):
    done, commands = make_venv(checkout, "dev")
    assert done.returncode == 0 and done.stdout.strip() == str(checkout / ".venv")
    assert [command.split()[-1] for command in commands] == ["setuptools>=77", f"{checkout}[dev]", str(checkout)]
    done, commands = make_venv(checkout, "dev")
    assert (done.returncode, done.stdout.strip(), commands) == (0, str(checkout / ".venv"), [])


def test_a_changed_source_reinstalls_the_package_without_a_network(checkout):
    make_venv(checkout)
    (checkout / "photon_jax" / "a.py").write_text("two\n", encoding="utf-8")
    _, commands = make_venv(checkout)
    (command,) = commands
    assert {"--no-index", "--no-deps", "--no-build-isolation", "--force-reinstall"} <= set(command.split())


def test_changed_requirements_and_other_extras_install_the_dependencies_again(checkout):
    make_venv(checkout)
    (checkout / "pyproject.toml").write_text("two\n", encoding="utf-8")
    assert len(make_venv(checkout)[1]) == 3
    assert len(make_venv(checkout, "dev")[1]) == 3
    assert not make_venv(checkout)[1]


def test_a_failed_install_is_tried_again(checkout):
    done, _ = make_venv(checkout, PIP_FAILS="1")
    assert done.returncode != 0
    done, commands = make_venv(checkout)
    assert done.returncode == 0 and len(commands) == 3


def launcher(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)
    return path


def test_a_python_that_pyenv_keeps_off_the_path_is_found_beside_its_shim(checkout):
    shim = launcher(checkout / "pyenv" / "shims" / "python3.77", "#!/bin/sh\nexit 127\n")
    launcher(checkout / "pyenv" / "versions" / "3.77.1" / "bin" / "python3.77", STUB_PYTHON)
    variables = {"PATH": f"{shim.parent}:{os.environ['PATH']}"}
    done, commands = make_venv(checkout, python="python3.77", **variables)
    assert done.returncode == 0 and len(commands) == 3
    done, _ = make_venv(checkout, python="python3.78", **variables, PHOTON_VENV=str(checkout / "other"))
    assert done.returncode == 1 and "looked for python3.78" in done.stderr


def test_requirements_of_ones_own_replace_those_of_the_package(checkout):
    wanted = {"PHOTON_REQUIREMENTS": "jax==1.2 pytest>=9,<10"}
    done, (dependencies, package) = make_venv(checkout, **wanted)
    assert done.returncode == 0 and "--no-deps" in package
    assert dependencies.split()[-3:] == ["hatchling>=1.27", "jax==1.2", "pytest>=9,<10"]
    assert not make_venv(checkout, **wanted)[1]
    assert len(make_venv(checkout, PHOTON_REQUIREMENTS="jax==1.3")[1]) == 2


# Stands for the tools of an environment: write down how they were called; pytest leaves a list for a newer jax.
STUB_TOOL = """#!/usr/bin/env bash
echo "$(basename "$(dirname "$(dirname "$0")")") $(basename "$0") $*" >> "$TOOL_LOG"
for argument in "$@"; do
  case "$argument" in --newer_jax_list=*) printf "$NEWER_IDS" > "${argument#*=}"; exit "${PYTEST_STATUS:-0}" ;; esac
done
"""
STUB_MAKE_VENV = """#!/usr/bin/env bash
case "${PHOTON_REQUIREMENTS:-}" in
  jax==0.11.*) if [ -n "${NO_NEWER_PYTHON:-}" ]; then echo "no $PHOTON_PYTHON" >&2; exit 1; fi; echo "$VENVS/newer" ;;
  *) echo "$VENVS/first" ;;
esac
"""


@pytest.fixture
def run_tests(tmp_path):
    """Runs test.sh with stubs of all that it calls; returns the finished process and the calls of pytest."""
    shutil.copy(ROOT / "scripts" / "test.sh", launcher(tmp_path / "scripts" / "make_venv.sh", STUB_MAKE_VENV).parent)
    for name in ("first", "newer"):
        for tool in ("ruff", "mypy", "pytest"):
            launcher(tmp_path / name / "bin" / tool, STUB_TOOL)
    path = f"{launcher(tmp_path / 'path' / 'chromium', STUB_TOOL).parent}:{os.environ['PATH']}"
    log = tmp_path / "tools.log"

    def run(*arguments, ids="", **variables):
        log.write_text("", encoding="utf-8")
        done = subprocess.run(
            ["bash", str(tmp_path / "scripts" / "test.sh"), *arguments],
            env={"PATH": path, "TOOL_LOG": str(log), "VENVS": str(tmp_path), "NEWER_IDS": ids} | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        return done, [line for line in log.read_text(encoding="utf-8").splitlines() if " pytest " in line]

    return run


def test_tests_for_a_newer_jax_run_in_an_environment_of_their_own(run_tests):
    done, (first, newer) = run_tests("tests/kernels", "-x", ids="a::b\nc::d[e f]\n")
    assert done.returncode == 0 and "NOT RUN" not in done.stdout
    assert first.startswith("first pytest") and first.endswith("tests/kernels -x")
    assert newer.startswith("newer pytest") and newer.split()[-1].startswith("@")
    done, calls = run_tests("tests/scheduler")
    assert done.returncode == 0 and len(calls) == 1, "none of those that were asked for"
    done, calls = run_tests(ids="a::b\n", PYTEST_STATUS="5")
    assert done.returncode == 0 and len(calls) == 2, "no other was asked for"


def test_without_a_newer_python_its_tests_are_counted_and_failures_stay_failures(run_tests):
    done, calls = run_tests(ids="a::b\nc::d\n", NO_NEWER_PYTHON="1")
    assert done.returncode == 0 and len(calls) == 1
    assert "NOT RUN: 2 tests with jax 0.11" in done.stdout and "no python3.12" in done.stderr
    done, calls = run_tests(ids="a::b\n", PYTEST_STATUS="1")
    assert done.returncode == 1 and len(calls) == 1
    assert run_tests(PYTEST_STATUS="5")[0].returncode == 5


def test_a_python_that_does_not_do_is_named(checkout):
    done, commands = make_venv(checkout, python="/bin/false")
    assert done.returncode == 1 and not commands
    assert "needs Python 3.11" in done.stderr and "/bin/false" in done.stderr and "PHOTON_PYTHON" in done.stderr
