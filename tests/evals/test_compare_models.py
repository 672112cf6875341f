"""The script that compares settings: a table of one run, beside what the library says of the same texts."""

import dataclasses
import json
from importlib.util import find_spec

import pytest
from helpers.scripts import load_script, run_script
from helpers.tiny_checkpoint import checkpoint_config, write_checkpoint
from helpers.tiny_model import tiny_params

from photon_jax.quantization.report import compare_on_text, text_windows
from photon_jax.text.tokenizer import find_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog. Zürich naïve café, 12345 and 007.\n" * 6
XLA = "linear=xla attention=xla"


def run(monkeypatch, capsys, *arguments):
    run_script("compare_models", monkeypatch, *arguments)
    return capsys.readouterr().out


def test_one_run_compares_settings_with_the_first_and_can_be_read_again(tmp_path, monkeypatch, capsys):
    config = checkpoint_config(num_layers=1)
    before = tiny_params(config)
    after = dataclasses.replace(before, lm_head=0.9 * before.lm_head + 0.1 * before.embedding)
    model = write_checkpoint(tmp_path / "before", params=before, config=config)
    other = write_checkpoint(tmp_path / "after", params=after, config=config)
    text, found = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text(TEXT, encoding="utf-8")
    shown = run(
        monkeypatch, capsys, f"--model={model}", f"--text={text}", "--window=32", "--max_windows=2",
        "--prompt_tokens=8", "--max_tokens=4", f"--json={found}", f"--setting=first: dtype=float32 {XLA}",
        f"--setting=other: model={other} dtype=float32 {XLA}", f"--setting=again: dtype=float32 {XLA}",
    )  # fmt: skip
    first, changed, again = json.loads(found.read_text(encoding="utf-8"))["records"]
    assert {**again, "setting": "first"} == first
    assert (first["mean_kl"], first["top1_agreement"], first["engine_top1_agreement"]) == (0.0, 1.0, 1.0)
    assert first["greedy_equal_tokens"] == [4, 4] and first["greedy_equal_to_the_end"] == 2
    windows = text_windows(find_tokenizer(model).encode(TEXT), size=32)
    expected = compare_on_text(before, after, config, windows[:: -(-len(windows) // 2)])
    assert changed["num_tokens"] == expected.num_tokens == 2 * 31
    assert changed["mean_kl"] == pytest.approx(expected.mean_kl, rel=1e-3) and changed["mean_kl"] > 0.0
    assert changed["top1_agreement"] == changed["engine_top1_agreement"] == pytest.approx(expected.top1_agreement)
    assert changed["engine_perplexity"] == pytest.approx(expected.perplexity_after, rel=1e-5)
    assert changed["engine_perplexity_change"] == pytest.approx(expected.perplexity_loss, abs=1e-5)
    table = shown[shown.index("| setting |") :]
    assert table in run(monkeypatch, capsys, f"--read={found}")
    assert [line.split(" | ")[0] for line in table.splitlines()[2:5]] == ["| first", "| other", "| again"]


def test_the_settings_of_the_table_have_names_of_their_own_and_start_with_the_exact_one():
    script = load_script("compare_models")
    settings = [script.parse_setting(text) for text in (*script.TABLE, *script.GPU_TABLE)]
    assert len({name for name, _ in settings}) == len(settings) == 12
    assert settings[0] == ("float32", {"dtype": "float32", "linear": "xla", "attention": "xla"})
    assert script.parse_setting("a: group_size=64 int8_activations=true")[1] == {
        "group_size": 64,
        "int8_activations": True,
    }


@pytest.mark.parametrize(
    ("argument", "message"),
    [("--text=/no/such/file", "--text=/no/such/file is no file"), ("--plot=a.png", "pip install matplotlib")],
)
def test_what_can_not_be_read_or_drawn_is_said_before_anything_is_measured(monkeypatch, capsys, argument, message):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, f"--text={__file__}", argument)
    assert message in capsys.readouterr().err
