"""The scripts that make random files and measure starts, loads and scores: what they say of a tiny model is so."""

import json
import os
import re

import pytest
from helpers.scripts import run_script
from helpers.source_tree import ROOT
from helpers.tiny_checkpoint import write_checkpoint

from photon_jax.bench.shapes import SHAPES, draw_weights, shape_config
from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.params import num_bytes
from photon_jax.text.tokenizer import find_tokenizer

VOCAB_SIZE = 500
QUESTIONS = (
    {"question": "What does the quick brown fox jump over?", "choices": ["the dog", "the lazy dog", "numbers"]},
    {"question": "Which stop word ends the text?", "choices": ["STOP", "<END>"]},
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with a tokenizer of 420 tokens."""
    return write_checkpoint(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def model(source, tmp_path_factory):
    """A folder that make_random_checkpoint wrote: a tiny shape, with more tokens than the tokenizer has."""
    folder = tmp_path_factory.mktemp("made") / "tiny_model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", SHAPES["tiny"] | {"vocab_size": VOCAB_SIZE})
        run_script("make_random_checkpoint", patch, "--shape=tiny", f"--output={folder}", f"--tokenizer={source}")
    return folder


@pytest.fixture
def records(monkeypatch, capfd):
    """Returns a function that runs a script and gives its JSON lines."""

    def run(name, *arguments):
        capfd.readouterr()
        run_script(name, monkeypatch, *arguments)
        return [json.loads(line) for line in capfd.readouterr().out.splitlines()]

    return run


def test_random_files_are_those_of_the_shape_and_each_token_has_a_text_of_its_own(source, model):
    loaded = load_checkpoint(model, dtype="bfloat16")
    assert loaded.config.vocab_size == VOCAB_SIZE and loaded.config.num_layers == SHAPES["tiny"]["num_layers"]
    expected = draw_weights(shape_config("tiny", "bfloat16"))
    assert (loaded.params.layers[1].down_proj.weight == expected.layers[1].down_proj.weight).all()
    ours, theirs = find_tokenizer(model), find_tokenizer(source)
    text = "Zürich naïve café, 12345 and 007."
    assert ours.encode(text) == theirs.encode(text)
    assert len({ours.decode([token_id]) for token_id in range(420, VOCAB_SIZE)}) == VOCAB_SIZE - 420


def test_a_tokenizer_that_is_larger_than_the_shape_raises_its_vocabulary(source, tmp_path, monkeypatch):
    run_script("make_random_checkpoint", monkeypatch, "--shape=tiny", f"--output={tmp_path}", f"--tokenizer={source}")
    assert SHAPES["tiny"]["vocab_size"] == 256
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["vocab_size"] == 420


def test_the_bytes_of_a_load_as_int8_are_those_of_its_parameters(model, records):
    (record,) = records("measure_load", f"--model={model}", "--group_size=32", "--quantize_embedding")
    quantization = QuantizationConfig(group_size=32, has_embedding=True)
    loaded = load_checkpoint(model, dtype="bfloat16", quantization=quantization)
    assert record["params_bytes"] == num_bytes(loaded.params)
    assert (record["model"], record["group_size"], record["quantize_embedding"]) == ("tiny_model", 32, True)
    assert record["device_peak_bytes"] is None and record["host_peak_bytes"] >= 0


def test_scores_are_counted_with_the_tokens_that_the_prefix_cache_spared(model, records, tmp_path):
    quiz = tmp_path / "quiz.jsonl"
    quiz.write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    (record,) = records(
        "bench_score", f"--model={model}", f"--questions={quiz}", "--num_questions=3", "--repeats=1", "--linear=xla",
        "--max_num_seqs=2", "--max_num_batched_tokens=32", "--block_size=8", "--flops_per_s=1e5",
    )  # fmt: skip
    encode = find_tokenizer(model).encode
    rows = [(number, QUESTIONS[number % 2]) for number in (3, 4, 5)]  # those of the second run
    texts = [f"Question {n + 1}: {row['question']}\nAnswer: {choice}" for n, row in rows for choice in row["choices"]]
    num_tokens = sum(len(encode(text)) - 1 for text in texts)  # nothing is computed of a last token
    assert record["num_requests"] == len(texts) == 2 + 3 + 2
    assert record["num_computed_tokens"] + record["num_prefix_hit_tokens"] == num_tokens
    assert record["num_prefix_hit_tokens"] > 0 and record["num_prefix_hit_tokens"] % 8 == 0
    assert len(record["total_s_runs"]) == 2 and record["total_s_runs"][1] == record["total_s"]
    num_params = num_bytes(load_checkpoint(model, dtype="float32").params) // 4
    assert record["roofline_s"] == pytest.approx(2.0 * num_params * record["num_computed_tokens"] / 1e5, abs=1e-4)
    assert 0.0 <= record["padding_share"] < 1.0 and record["linear"] == "xla"


def test_a_warm_start_fetches_the_programs_that_a_cold_one_compiled(model, records, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    cold, warm = records(
        "bench_start", f"--model={model}", "--linear=xla", "--warmups=lazy", "--warm=1", "--max_num_seqs=2",
        "--max_num_batched_tokens=32", "--max_model_len=128",
    )  # fmt: skip
    assert (cold["compile_cache"], warm["compile_cache"]) == ("cold", "warm")
    assert cold["num_compiled"] == warm["num_fetched"] > 0 and cold["num_fetched"] == warm["num_compiled"] == 0
    assert cold["num_programs"] == warm["num_programs"] > 0
    for record in (cold, warm):
        assert (record["model"], record["warmup"], record["device"]) == ("tiny_model", "lazy", "cpu")
        parts = sum(record[name] for name in ("python_s", "import_s", "load_s", "engine_s", "first_request_s"))
        assert record["first_token_s"] == pytest.approx(parts, abs=0.05)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("bench_start", ["--warmups=lazy,warm"], "--warmups must be lazy, full or both .* got 'lazy,warm'"),
        ("bench_start", ["--warm=-1"], "--warm must be 0 or more, got -1"),
        ("bench_score", ["--questions={quiz}", "--num_questions=0"], "--num_questions must be more than 0, got 0"),
        ("bench_score", ["--questions={quiz}", "--repeats=0"], "--repeats must be more than 0, got 0"),
        ("bench_score", ["--questions={quiz}", "--flops_per_s=-1"], r"--flops_per_s must be more than 0, got -1\.0"),
        (
            "bench_score",
            ["--questions={quiz}"],
            r"--questions: line 2 of .*must have a question and choices",
        ),
        ("bench_score", ["--questions=/nowhere.jsonl"], r"--questions: .*/nowhere\.jsonl"),
        ("make_random_checkpoint", ["--output=out", "--tokenizer=/nowhere"], "--tokenizer: /nowhere is missing"),
        ("make_random_checkpoint", ["--output=out", "--tokenizer=a", "--shape=qwen3-8b"], "--shape: .*'qwen3-8b'"),
        ("measure_load", ["--model=/nowhere"], "no model at '/nowhere'"),
        ("measure_load", ["--model={model}", "--group_size=0"], "group_size must be at least 1, got 0"),
        ("measure_load", ["--model={model}", "--dtype=int3"], "dtype must be one of .*got 'int3'"),
    ],
)
def test_a_wrong_argument_is_named(name, arguments, message, model, tmp_path, monkeypatch, capsys):
    quiz = tmp_path / "quiz.jsonl"
    quiz.write_text(json.dumps(QUESTIONS[0]) + '\n{"question": "Why?"}\n', encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        run_script(name, monkeypatch, *(text.format(quiz=quiz, model=model) for text in arguments))
    assert stopped.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(message, error), error
