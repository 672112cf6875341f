import builtins
import json
import os
import subprocess
import sys

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.errors
import huggingface_hub.utils
import pytest
from helpers.tiny_checkpoint import write_checkpoint

from photon_jax.checkpoint.hub import find_model
from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.errors import CheckpointError, ConfigError

COMMIT, OLDER = "a" * 40, "b" * 40


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A cache of the hub with two revisions of org/tiny, as downloads leave it; no network is asked."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "models--org--tiny"
    write_checkpoint(repo / "snapshots" / COMMIT)
    (repo / "snapshots" / OLDER).mkdir()
    for name, commit in (("main", COMMIT), ("v1", OLDER)):
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / name).write_text(commit)
    return repo / "snapshots"


def test_an_id_is_found_in_the_cache_without_a_network(hub_cache):
    assert find_model("org/tiny") == hub_cache / COMMIT
    assert find_model("org/tiny@v1") == hub_cache / OLDER
    assert find_model(f"org/tiny@{OLDER}") == hub_cache / OLDER
    assert load_checkpoint("org/tiny", dtype="float32").path == hub_cache / COMMIT


def test_the_cache_can_be_named(tmp_path, hub_cache):
    with pytest.raises(CheckpointError):
        find_model("org/tiny", cache_dir=tmp_path / "other")


def test_what_is_asked_of_the_hub_is_what_loading_reads(monkeypatch, tmp_path):
    asked = {}

    def snapshot_download(repo, **arguments):
        asked.update(arguments, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_model("org/name@refs/pr/3") == tmp_path
    assert (asked["repo"], asked["revision"]) == ("org/name", "refs/pr/3")
    names = [
        *("config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"),
        *("model.safetensors", "model-00001-of-00002.safetensors", "chat_template.jinja"),
        "additional_chat_templates/tools.jinja",
    ]
    left = ["consolidated.safetensors", "pytorch_model.bin", "onnx/config.json", "original/model.safetensors", "a.gguf"]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects([*names, *left], **patterns)) == names


def test_a_path_that_exists_comes_before_an_id_and_a_tilde_is_the_home_folder(hub_cache, tmp_path, monkeypatch):
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(find_model("org/tiny")) == os.path.join("org", "tiny")
    assert find_model("~/org/tiny") == tmp_path / "org" / "tiny"


@pytest.mark.parametrize("name", ["nothing-here", "/no/such/model", "~/none", "a/b/c", "no good/name", "../x"])
def test_what_is_neither_a_path_nor_an_id_says_where_it_was_looked_for(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="doesn't exist, and it is no Hugging Face id") as caught:
        find_model(name)
    assert str(tmp_path / "none" if name == "~/none" else tmp_path / name) in str(caught.value)


def test_an_empty_name_is_an_error_and_not_the_folder_one_is_in():
    with pytest.raises(CheckpointError, match="the model's name is empty; give 'demo'"):
        find_model("")


@pytest.mark.parametrize("name", ["org/absent", "org/tiny@absent", "org--x/y"])
def test_an_id_that_the_hub_does_not_give_names_path_id_and_cause(hub_cache, name):
    with pytest.raises(CheckpointError, match=f"{os.path.join(os.getcwd(), name)} doesn't exist, and the Hugging Face"):
        find_model(name)


def test_a_connection_that_fails_in_any_way_is_a_checkpoint_error(monkeypatch):
    class BrokenProxyError(huggingface_hub.errors.HfHubHTTPError.__bases__[0]):
        pass

    def fail(*_, **__):
        raise BrokenProxyError("the proxy is broken")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="BrokenProxyError: the proxy is broken"):
        find_model("org/name")


def test_without_the_hubs_package_an_id_is_a_config_error_and_a_path_still_loads(monkeypatch, tmp_path):
    real = builtins.__import__

    def without_hub(name, *arguments):
        if name == "huggingface_hub":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_hub)
    with pytest.raises(ConfigError, match="pip install huggingface_hub"):
        find_model("org/name")
    assert find_model(tmp_path) == tmp_path


def test_the_hubs_own_switch_for_no_network_is_obeyed(tmp_path, hub_cache):
    code = "from photon_jax.checkpoint.hub import find_model; print(find_model('org/tiny'))"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(hub_cache / COMMIT)
    assert json.loads((hub_cache / COMMIT / "config.json").read_text())["architectures"]
