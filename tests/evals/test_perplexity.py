"""Perplexity through the engine, and the command that prints it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_checkpoint import ENGINE_FIELDS, write_checkpoint

from photon_jax import LLM, ConfigError
from photon_jax.cli import eval_perplexity
from photon_jax.evals.perplexity import score_text
from photon_jax.quantization.report import compare_on_text, text_windows

TEXT = "The quick brown fox jumps over the lazy dog. Zürich naïve café, 12345 and 007.\n" * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **ENGINE_FIELDS) as llm:
        yield llm


def test_whole_windows_give_the_perplexity_of_the_plain_forward(llm):
    windows = text_windows(llm.tokenizer.encode(TEXT), size=64, num_windows=3)
    expected = compare_on_text(llm.params, llm.params, llm.config, windows)
    found = score_text(llm, TEXT, window=64, stride=64, max_windows=3, progress=False)
    assert (found.num_tokens, found.num_windows) == (expected.num_tokens, 3) == (3 * 63, 3)
    assert found.perplexity == pytest.approx(expected.perplexity_before, rel=1e-5)


def test_a_stride_scores_each_token_once_with_what_is_before_it(llm):
    ids = llm.tokenizer.encode(TEXT)[:100]
    text = llm.tokenizer.decode(ids)
    found = score_text(llm, text, window=40, stride=10, progress=False)
    (whole,) = llm.score([ids], progress=False)
    assert found.num_tokens == len(ids) - 1
    context, scored = ids[60:90], ids[90:100]
    (last,) = llm.score([context], [scored], progress=False)
    first = whole.logprobs[:39].sum(dtype=np.float64)
    middle = [llm.score([ids[s : s + 30]], [ids[s + 30 : s + 40]], progress=False)[0].sum for s in range(10, 60, 10)]
    assert found.log_likelihood == pytest.approx(math.fsum([first, *middle, last.sum]), abs=1e-6)
    assert 0.0 <= found.greedy_share <= 1.0


@pytest.mark.parametrize(
    ("text", "sizes", "message"),
    [
        (TEXT, {"window": 258, "stride": 5}, "window must be between 2 and 257"),
        (TEXT, {"window": 1, "stride": 1}, "window must be between 2 and 257"),
        (TEXT, {"window": 8, "stride": 9}, "stride must be between 1 and the window, 8"),
        ("", {"window": 8, "stride": 8}, "fewer than 2 tokens"),
    ],
)
def test_sizes_that_can_not_be_are_refused(llm, text, sizes, message):
    with pytest.raises(ConfigError, match=message):
        score_text(llm, text, **sizes, progress=False)


def test_the_command_prints_one_line_of_json(folder, tmp_path, capsys):
    from absl import flags

    (tmp_path / "prose.txt").write_text(TEXT, encoding="utf-8")
    values = flags.FlagValues()
    eval_perplexity.define_flags(values)
    fields = {name: value for name, value in ENGINE_FIELDS.items() if name != "progress"}
    arguments = {"model": folder, "text": tmp_path / "prose.txt", "window": 32, "compile_cache_dir": "", **fields}
    values(["photon-eval-perplexity", "--noprogress", *(f"--{name}={value}" for name, value in arguments.items())])
    eval_perplexity.main(values)
    record = json.loads(capsys.readouterr().out)
    assert (record["text"], record["window"], record["stride"], record["dtype"]) == ("prose.txt", 32, 32, "float32")
    assert record["perplexity"] == pytest.approx(math.exp(-record["log_likelihood"] / record["num_tokens"]))
    values.text = str(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match=r"--text=.*none.txt can't be read"):
        eval_perplexity.main(values)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path):
    bare = write_checkpoint(tmp_path, tokenizer_config=None)
    with LLM(bare, **ENGINE_FIELDS) as llm, pytest.raises(ConfigError, match="needs a tokenizer"):
        score_text(llm, TEXT, window=8, stride=8)
