"""photon-lm-eval: the harness's own command line with our model in it."""

import json
import subprocess
import sys

import pytest
from helpers.eval_runs import TASKS_FOLDER
from helpers.tiny_checkpoint import write_checkpoint

from photon_jax.cli.lm_eval import with_model


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        (["ls", "tasks"], ["ls", "tasks"]),
        (["run", "--tasks", "a"], ["run", "--tasks", "a", "--model", "photon_jax"]),
        (["--tasks", "a"], ["run", "--tasks", "a", "--model", "photon_jax"]),
        (["--model", "hf", "--tasks", "a"], ["--model", "hf", "--tasks", "a"]),
        (["run", "--model=dummy"], ["run", "--model=dummy"]),
        (["run", "--config", "file.yaml"], ["run", "--config", "file.yaml"]),
        (["run", "--help"], ["run", "--help"]),
    ],
)
def test_the_model_is_ours_where_none_is_chosen(given, expected):
    assert with_model(given) == expected


def run(*arguments, code="from photon_jax.cli.lm_eval import run; run()"):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


def test_a_task_runs_from_the_command_line_with_chat_template_and_cache(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    fields = ("max_model_len=256", "block_size=16", "num_blocks=40", "max_num_seqs=4", "max_num_batched_tokens=32")
    done = run(
        *("run", "--model_args", f"pretrained={folder}", *fields, "--include_path", TASKS_FOLDER, "--limit", 2),
        *("--tasks", "photon_choice,photon_chat", "--apply_chat_template", "--output_path", tmp_path / "out"),
        *("--use_cache", tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "photon_choice" in done.stdout
    (results,) = (tmp_path / "out").rglob("results_*.json")
    record = json.loads(results.read_text(encoding="utf-8"))
    assert record["config"]["model"] == "photon_jax" and record["config"]["model_dtype"] == "float32"
    assert record["chat_template"].startswith("{{ bos_token }}")
    assert (tmp_path / "cache_rank0.db").exists()


def test_an_unknown_argument_is_one_line(tmp_path):
    done = run("run", "--model_args", "pretrain=x", "--include_path", TASKS_FOLDER, "--tasks", "photon_choice")
    assert done.returncode == 2
    assert "unknown engine setting 'pretrain'; the settings are attention, " in done.stderr.splitlines()[-1]


def test_without_the_harness_the_error_says_how_to_install_it():
    code = "import sys; sys.modules['lm_eval'] = None; from photon_jax.cli.lm_eval import run; run()"
    done = run("run", code=code)
    assert done.returncode == 2
    assert "pip install 'photon_jax[eval]'" in done.stderr
