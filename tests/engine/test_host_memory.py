"""A process that serves for long stays as small as it was."""

import subprocess
import sys

from helpers.source_tree import ROOT


def test_the_host_memory_of_a_process_stays_flat_over_many_requests():
    command = [sys.executable, str(ROOT / "scripts" / "check_memory.py"), "--requests=100000"]
    path = f"{ROOT}:{ROOT / 'tests'}"
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
