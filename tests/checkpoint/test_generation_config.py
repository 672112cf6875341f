"""Sampling defaults of generation_config.json: which keys count, and that wrong values are found at load."""

import json

import pytest
from helpers.golden_models import MODELS, write_hf_folder

from photon_jax.checkpoint.generation_config import read_sampling_defaults
from photon_jax.checkpoint.load import load_checkpoint, open_checkpoint
from photon_jax.errors import CheckpointError

TIED = next(model for model in MODELS if model.name == "llama_tied")


@pytest.fixture
def write(tmp_path):
    write_hf_folder(tmp_path, TIED)

    def write_generation_config(values):
        (tmp_path / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
        return tmp_path

    return write_generation_config


def test_sampling_keys_are_read_and_others_are_not():
    values = {"temperature": 0.6, "top_p": 1, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    others = {"eos_token_id": 3, "max_length": "long", "num_beams": 4, "_from_model_config": True, "cache": {}}
    read = read_sampling_defaults({**values, **others})
    assert read == {"temperature": 0.6, "top_p": 1.0, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    assert isinstance(read["top_p"], float)


def test_a_null_counts_as_absent():
    assert read_sampling_defaults(dict.fromkeys(("temperature", "top_k", "do_sample", "repetition_penalty"))) == {}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {"temperature": 0.0, "top_k": 5}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"temperature": 0.6}, {"temperature": 0.6}),
        ({"temperature": 0}, {"temperature": 0.0}),
    ],
)
def test_do_sample_false_is_greedy_whatever_the_temperature_beside_it(values, expected):
    assert read_sampling_defaults(values) == expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("temperature", "0.6", r"a number in \[0, 1e\+06\], got '0\.6'"),
        ("temperature", -0.1, r"a number in \[0, 1e\+06\], got -0\.1"),
        ("temperature", True, "a number"),
        ("temperature", float("nan"), "a number"),
        ("temperature", 10**400, "a number"),
        ("top_p", 0, r"a number in \(0, 1\], got 0"),
        ("top_p", 1.01, r"a number in \(0, 1\]"),
        ("top_p", [0.9], "a number"),
        ("top_k", -1, r"an integer in \[0, 2147483647\]"),
        ("top_k", 2**31, r"an integer in \[0, 2147483647\]"),
        ("top_k", 5.0, r"an integer in \[0, 2147483647\]"),
        ("min_p", 1.5, r"a number in \[0, 1\]"),
        ("repetition_penalty", 0.0, r"a number in \(0, 1e\+06\]"),
        ("repetition_penalty", float("inf"), "a number"),
        ("do_sample", "false", "true or false, got 'false'"),
        ("do_sample", 0, "true or false"),
    ],
)
def test_a_wrong_value_names_the_file_the_key_what_was_got_and_what_was_expected(write, key, value, expected):
    folder = write({key: value})
    for door in (load_checkpoint, open_checkpoint):
        with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key} must be {expected}"):
            door(folder, dtype="float32")


def test_values_that_are_not_wanted_are_not_checked_but_ends_count(write):
    folder = write({"temperature": "hot", "eos_token_id": [7, 2]})
    opened = open_checkpoint(folder, dtype="float32", use_generation_config=False)
    assert (opened.generation_config, opened.eos_token_ids) == ({}, (2, 7))
    write({"eos_token_id": "</s>"})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        open_checkpoint(folder, dtype="float32", use_generation_config=False)
