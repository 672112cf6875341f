"""What callers may get wrong in the arguments of the doors: each is an error with a name, before anything runs."""

import pathlib

import jax
import numpy as np
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.fake_engine import Play
from helpers.tiny_model import tiny_config, tiny_params

import photon_jax
from photon_jax.client.prompts import as_list, encode_each, encode_prompt, params_for_each
from photon_jax.client.submission import Prompt
from photon_jax.convert import convert
from photon_jax.errors import CheckpointError, ConfigError, RequestError, naming_prompt


def encode(prompt):
    return encode_prompt(prompt, ByteTokenizer())


@pytest.mark.parametrize(
    "prompts", [b"text", bytearray(b"text"), {5, 6}, frozenset((5,)), {"prompt": "a"}, 3.5, object()]
)
def test_bytes_sets_and_other_things_are_no_prompts(prompts):
    with pytest.raises(RequestError, match="prompts are a text, token ids or a list of either, got"):
        as_list(prompts)
    with pytest.raises(RequestError, match="prompt 1: a prompt is a text or a list of token ids, got"):
        encode_each(as_list(["fine", prompts]), encode)


@pytest.mark.parametrize("prompts", [[True, 5], [[5, True]], [[False]]])
def test_true_and_false_are_no_token_ids(prompts):
    with pytest.raises(RequestError, match="a prompt is a text or a list of token ids, got"):
        encode_each(as_list(prompts), encode)


def test_the_prompt_that_is_wrong_is_named_and_kept_as_a_number():
    with pytest.raises(RequestError, match="prompt 2: a prompt is a text") as refused:
        encode_each(["a", [5], None, 7], encode)
    assert refused.value.prompt_index == 2
    with pytest.raises(RequestError, match=r"^a prompt is a text") as refused:
        encode_each([None], encode)
    assert refused.value.prompt_index == 0
    with pytest.raises(RequestError, match=r"^no prompt$") as refused:
        raise RequestError("no prompt")
    assert refused.value.prompt_index is None


def test_only_errors_about_requests_are_named():
    with pytest.raises(ConfigError, match=r"^x$"), naming_prompt(1, 2):
        raise ConfigError("x")


@pytest.mark.parametrize("params", [5, "n", {"n": 2}, object(), [None], [photon_jax.SamplingParams(), 5]])
def test_params_of_another_type_are_refused(params):
    with pytest.raises(RequestError, match="sampling_params"):
        params_for_each(params, 1)


@pytest.mark.parametrize("model", [123, b"demo", ["demo"], True])
def test_a_model_that_is_no_path_is_refused(model):
    with pytest.raises(ConfigError, match=r'model must be "demo", a folder, .* as a string or a Path, got'):
        photon_jax.LLM(model, progress=False)


@pytest.mark.parametrize("seed", [None, "1", 1.0, True])
def test_a_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(ConfigError, match="seed must be an integer, got"):
        photon_jax.LLM(pathlib.Path("nowhere"), seed=seed, progress=False)


@pytest.mark.parametrize("key", [None, "1", 1.5, True, np.zeros(2), np.zeros(0, np.uint32), jax.numpy.float32(1)])
def test_a_key_that_is_none_of_jaxs_is_refused(key):
    config = tiny_config()
    with pytest.raises(RequestError, match=r"key must be an int or a jax\.random\.key, got"):
        photon_jax.generate(tiny_params(config), config, [[1]], key=key, progress=False)


@pytest.mark.parametrize("field", ["json", "regex", "choice", "grammar", "json_object"])
def test_arrays_are_no_forms(field):
    with pytest.raises(RequestError, match=f"{field} must be"):
        photon_jax.SamplingParams(structured_outputs={field: np.array(["a", "b"])})


def test_paths_params_and_prompts_of_another_type_are_refused_by_name():
    with pytest.raises(ConfigError, match="folder must be a string or a Path, got None"):
        convert("demo", None)
    with pytest.raises(ConfigError, match="config must be the ModelConfig of the params, got None"):
        photon_jax.generate(tiny_params(), None, [1])
    with pytest.raises(CheckpointError, match=r"no leaf \.embedding"):
        photon_jax.generate(None, tiny_config(), [1])
    for prompt in (None, [1, 2], Prompt(token_ids=None)):
        with pytest.raises(RequestError, match="a prompt here is a Prompt of a tuple of token ids, got"):
            Play().client.prepare(prompt, photon_jax.SamplingParams(), score=False)
    with pytest.raises(RequestError, match="params must be SamplingParams, got 5"):
        Play().client.prepare(Prompt(token_ids=(1,)), 5, score=False)
