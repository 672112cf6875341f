import json
import shutil

import numpy as np
import pytest
from helpers.gguf_files import architecture, gguf_fields, gguf_tensors, write_gguf
from helpers.golden_models import MODELS
from helpers.same_params import assert_same_params
from helpers.small_tokenizers import sentencepiece_fields
from helpers.tiny_checkpoint import ENGINE_FIELDS, write_checkpoint

from photon_jax import LLM, CheckpointError, SamplingParams
from photon_jax.checkpoint.load import load_checkpoint, open_checkpoint
from photon_jax.convert import convert
from photon_jax.describe import describe_checkpoint
from photon_jax.text.tokenizer import find_tokenizer

PROMPTS = ["The quick brown fox", [5, 9, 300]]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0)


def answers(model):
    with LLM(model, **ENGINE_FIELDS) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, progress=False)
        chat = llm.chat([{"role": "user", "content": "hi"}], PARAMS, progress=False)
        return [
            (output.outputs[0].text, output.outputs[0].token_ids, output.outputs[0].logprobs.raw.tobytes())
            for output in outputs + chat
        ], chat[0].sampling_params


def test_a_converted_folder_answers_as_the_original_does_and_needs_nothing_of_it(tmp_path):
    original = write_checkpoint(tmp_path / "original", generation_config={"top_k": 7, "eos_token_id": [1, 4]})
    expected, card = answers(original), describe_checkpoint(original)
    converted = convert(original, tmp_path / "made" / "converted", progress=False)
    assert converted.config.dtype == "float32"
    shutil.rmtree(original)
    moved = shutil.move(tmp_path / "made" / "converted", tmp_path / "moved")
    assert answers(moved) == expected
    assert expected[1].top_k == 7
    made = describe_checkpoint(moved)
    for name in ("num_parameters", "eos_token_ids", "special_tokens", "generation_defaults", "memory_bytes"):
        assert getattr(made, name) == getattr(card, name), name


def test_the_dtype_is_the_models_own_or_the_one_asked_for(tmp_path):
    original = write_checkpoint(tmp_path / "original", tokenizer_config=None)
    half = convert(original, tmp_path / "half", dtype="bfloat16", progress=False)
    assert_same_params(load_checkpoint(tmp_path / "half", dtype="bfloat16").params, half.params)
    again = convert(tmp_path / "half", tmp_path / "again", progress=False)
    assert again.config.dtype == "bfloat16"
    assert_same_params(again.params, load_checkpoint(original, dtype="bfloat16").params)


def test_a_gguf_file_is_converted_with_its_tokenizer(tmp_path):
    model = next(model for model in MODELS if model.name == "llama_untied")
    fields = {**gguf_fields(model), **sentencepiece_fields()}
    num_tokens = len(fields["tokenizer.ggml.tokens"])
    fields[f"{architecture(model)}.vocab_size"] = num_tokens
    table = np.random.default_rng(0).standard_normal((num_tokens, model.config["hidden_size"])).astype(np.float32)
    tensors = {**gguf_tensors(model), "token_embd.weight": table, "output.weight": table}
    write_gguf(tmp_path / "model.gguf", architecture(model), fields, tensors, "Q8_0")
    converted = convert(tmp_path / "model.gguf", tmp_path / "converted", progress=False)
    assert converted.config.dtype == "float32"  # of quantized tensors
    assert_same_params(load_checkpoint(tmp_path / "converted", dtype="float32").params, converted.params)
    ours, expected = (
        find_tokenizer(open_checkpoint(path, dtype="float32").tokenizer_source)
        for path in (tmp_path / "converted", tmp_path / "model.gguf")
    )
    assert ours.encode("the quick  fox") == expected.encode("the quick  fox")
    assert ours.special_tokens == expected.special_tokens


def test_a_target_that_is_taken_is_refused_before_the_model_is_read(tmp_path):
    original = write_checkpoint(tmp_path / "original")
    with pytest.raises(CheckpointError, match="is no checkpoint of photon_jax"):
        convert("/no/such/model", original, overwrite=True)
    convert(original, tmp_path / "converted", progress=False)
    with pytest.raises(CheckpointError, match="set overwrite"):
        convert("/no/such/model", tmp_path / "converted")
    convert(original, tmp_path / "converted", dtype="float16", overwrite=True, progress=False)
    assert open_checkpoint(tmp_path / "converted", dtype="float32").config.checkpoint_dtype == "float16"


def test_progress_goes_to_standard_error(tmp_path, capsys):
    convert(write_checkpoint(tmp_path / "original"), tmp_path / "converted")
    shown = capsys.readouterr()
    assert shown.out == "" and "loading" in shown.err and f"writing 0 MiB to {tmp_path / 'converted'}" in shown.err
    assert json.loads((tmp_path / "converted" / "photon_checkpoint.json").read_text())["config"]["num_layers"] == 2
