"""What is left out of a run is counted and named; what a run compiles is its own."""

import os
import shutil
import subprocess
import sys

from helpers.source_tree import ROOT

TESTS = """
import os, pathlib, pytest

@pytest.mark.browser
def test_a():
    assert False

def test_b():
    programs = os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert os.listdir(programs) == []
    pathlib.Path(__file__).with_name("programs").write_text(programs)
"""


def test_a_run_names_what_it_leaves_out_and_leaves_no_programs_behind(tmp_path):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  browser: one\n  gpu: another\n", encoding="utf-8")
    (tmp_path / "test_c.py").write_text(TESTS, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "NOT RUN: 1 tests of the page" in run.stdout and "1 passed, 1 deselected" in run.stdout
    programs = (tmp_path / "programs").read_text()
    assert programs != os.environ.get("JAX_COMPILATION_CACHE_DIR") and not os.path.exists(programs)
