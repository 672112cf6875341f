"""The scripts that measure and make things, run within the test's process."""

import importlib.util
import sys
from types import ModuleType

from helpers.source_tree import ROOT


def load_script(name: str) -> ModuleType:
    """Returns scripts/NAME.py as a module of its own."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(name: str, monkeypatch, *arguments: str) -> None:
    """Runs a script with these arguments."""
    script = load_script(name)
    monkeypatch.setattr(sys, "argv", [script.__file__, *arguments])
    script.main()
