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


def test_a_python_that_does_not_do_is_named(checkout):
    done, commands = make_venv(checkout, python="/bin/false")
    assert done.returncode == 1 and not commands
    assert "needs Python 3.11" in done.stderr and "/bin/false" in done.stderr and "PHOTON_PYTHON" in done.stderr
