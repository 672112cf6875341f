"""What is left out of a run is counted and named."""

import os
import shutil
import subprocess
import sys

from helpers.source_tree import ROOT


def test_tests_of_the_page_are_said_to_be_not_run_where_there_is_no_browser(tmp_path):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  browser: one\n  gpu: another\n", encoding="utf-8")
    lines = ("import pytest", "@pytest.mark.browser", "def test_a(): assert False", "def test_b(): pass")
    (tmp_path / "test_c.py").write_text("\n".join(lines), encoding="utf-8")
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
