"""Hostile values at every door, 2,000 cases without a model and 50 with one: the right answer or a named error.

Never another exception, a hang, or a block that stays taken. The cases are the same in every run.
"""

import dataclasses
import math

import numpy as np
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.fake_runner import VOCAB_SIZE, FakeRunner, expected_output, make_scheduler
from helpers.golden_models import MODELS
from helpers.small_tokenizers import CORPUS, SPECIALS
from helpers.tiny_checkpoint import ENGINE_FIELDS, write_checkpoint
from helpers.tiny_checkpoint import VOCAB_SIZE as MODEL_VOCAB_SIZE
from helpers.tiny_model import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_jax import LLM, SamplingParams
from photon_jax.client.local_client import LocalClient
from photon_jax.client.prompts import as_list, encode_each, encode_prompt, params_for_each
from photon_jax.config import CacheConfig, EngineConfig, KernelConfig, SchedulerConfig, make_engine_config
from photon_jax.engine.engine import Engine
from photon_jax.errors import CheckpointError, ConfigError, RequestError
from photon_jax.models.config import ModelConfig, RopeConfig
from photon_jax.models.hf_config import config_from_hf
from photon_jax.text.tokenizer import Tokenizer

HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 600),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400]),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1e308]),
    st.text(max_size=4),
    st.sampled_from(["auto", "1", "float32", "int8", "\x00", "\ud800", "reference"]),
    st.binary(max_size=3),
    st.lists(st.integers(-2, 300), max_size=3),
    st.lists(st.text(max_size=2), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from([np.int64(3), np.float32(0.5), np.array([1, 2]), np.array("x"), object(), {1}, (), complex(1, 2)]),
)


def changes(*names):
    """Draws hostile values for a few of the names."""
    return st.dictionaries(st.sampled_from(names), HOSTILE, min_size=1, max_size=3)


def fields_of(*owners):
    held = {"cache", "scheduler", "kernels"}
    return [field.name for owner in owners for field in dataclasses.fields(owner) if field.name not in held]


# settings


OWNERS = (EngineConfig, CacheConfig, SchedulerConfig, KernelConfig)
OWN_FIELDS = {owner: [field.name for field in dataclasses.fields(owner)] for owner in OWNERS}


@given(st.sampled_from(OWNERS).flatmap(lambda owner: st.tuples(st.just(owner), changes(*OWN_FIELDS[owner]))))
@settings(max_examples=100)
def test_a_part_of_the_settings_is_made_or_a_config_error(owner_and_fields):
    owner, given_fields = owner_and_fields
    try:
        made = owner(**given_fields)
    except ConfigError as error:
        assert str(error)
        return
    assert hash(made) == hash(made)


@given(changes(*fields_of(EngineConfig, CacheConfig, SchedulerConfig, KernelConfig), "no_such_setting"))
@settings(max_examples=300)
def test_engine_settings_make_a_config_or_a_config_error(given_fields):
    try:
        config = make_engine_config(None, **given_fields)
    except ConfigError as error:
        assert str(error)
        return
    for part in (config, config.cache, config.scheduler, config.kernels):
        for name in set(given_fields) & set(fields_of(type(part))):
            if given_fields[name] is not None:
                assert getattr(part, name) == given_fields[name]
    assert hash(config) == hash(config)
    assert config.scheduler.max_num_batched_tokens >= config.scheduler.max_num_seqs >= 1


@given(changes(*fields_of(ModelConfig)), changes(*fields_of(RopeConfig)), st.booleans())
@settings(max_examples=200)
def test_a_model_config_is_whole_or_a_config_error(model_fields, rope_fields, has_rope):
    try:
        config = tiny_config(**({"rope": RopeConfig(**rope_fields)} if has_rope else {}) | model_fields)
    except ConfigError as error:
        assert str(error)
        return
    assert hash(config) == hash(config)
    assert config.qkv_size > 0 < config.num_groups


HF_CONFIGS = [model.config for model in MODELS]
HF_KEYS = sorted({key for config in HF_CONFIGS for key in config} | {"layer_types", "sliding_window", "num_experts"})
ROPE_KEYS = sorted({key for config in HF_CONFIGS for key in config.get("rope_scaling") or {}} | {"type", "rope_theta"})
JSON = HOSTILE.filter(lambda value: value is None or type(value) in (bool, int, float, str, list, dict))


@given(
    st.sampled_from(HF_CONFIGS),
    st.dictionaries(st.sampled_from(HF_KEYS), JSON, max_size=2),
    st.dictionaries(st.sampled_from(ROPE_KEYS), JSON, max_size=2),
    st.sets(st.sampled_from(HF_KEYS), max_size=1),
)
@settings(max_examples=400)
def test_a_configuration_file_is_read_or_refused(config, top, rope, left_out):
    values = {**config, **top}
    if rope:
        values["rope_scaling"] = {**(config.get("rope_scaling") or {}), **rope}
    try:
        read = config_from_hf({key: value for key, value in values.items() if key not in left_out})
    except CheckpointError as error:
        assert str(error)
        return
    assert isinstance(read, ModelConfig)
    assert hash(read) == hash(read)


# requests


PARAM_FIELDS = fields_of(SamplingParams)


@given(changes(*PARAM_FIELDS))
@settings(max_examples=300)
def test_sampling_parameters_are_made_or_refused(given_fields):
    try:
        params = SamplingParams(**given_fields)
    except RequestError as error:
        assert str(error)
        return
    resolved = params.resolve({})
    assert 0 < resolved.top_p <= 1 and resolved.temperature >= 0 and resolved.n >= 1
    assert params.resolve({}) == resolved


VALID_PROMPTS = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40), min_size=1, max_size=4)
PROMPTS = st.one_of(
    HOSTILE,
    st.lists(st.one_of(HOSTILE, st.lists(st.integers(-1, VOCAB_SIZE), max_size=40), st.text(max_size=5)), max_size=3),
    *[VALID_PROMPTS] * 4,
)
VALID_PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 3),
    temperature=st.sampled_from([None, 0.0, 1e-6, 1.0, 1e6]),
    max_tokens=st.one_of(st.integers(1, 12), st.sampled_from([None, 100, 2**31 - 1])),
    stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE), max_size=3),
    stop=st.lists(st.sampled_from(["a", "\x00", "~~"]), max_size=2),
    seed=st.sampled_from([None, 0, -1, 2**64 - 1]),
    logprobs=st.sampled_from([None, 0, 1, 3]),
    ignore_eos=st.booleans(),
)


class Launched:
    """FakeRunner behind the engine's interface."""

    allows_several = True

    def __init__(self, layout):
        self.layout = layout
        self.reset()

    def launch(self, plan):
        return self.fake.step(plan)

    def collect(self, result):
        return result

    def reset(self):
        self.fake = FakeRunner(self.layout)


class SmallTokenizer(ByteTokenizer):
    """Text whose ids the fake model has: others than ASCII are refused by the client."""

    def encode(self, text, **options):
        return [token_id for token_id in super().encode(text, **options) if token_id < 256]


@given(PROMPTS, st.one_of(*[VALID_PARAMS] * 4, HOSTILE), st.booleans(), st.integers(0, 6))
@settings(max_examples=400)
def test_prompts_are_answered_or_refused_and_every_block_comes_back(prompts, params, is_stream, num_taken):
    scheduler = make_scheduler(num_blocks=40, max_num_seqs=3, max_num_batched_tokens=8, max_model_len=100)
    num_free = scheduler.num_free_blocks
    tokenizer = SmallTokenizer()
    client = LocalClient(
        Engine(scheduler, Launched(scheduler._layout)), tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=(7,)
    )
    try:
        listed = encode_each(as_list(prompts), lambda prompt: encode_prompt(prompt, tokenizer))
        submissions = client.submit_all(listed, params_for_each(params, len(listed)), score=False)
    except RequestError as error:
        assert str(error)
    else:
        if is_stream and submissions:
            stream = client.iterate(submissions[0])
            for _, _ in zip(range(num_taken), stream, strict=False):
                scheduler.check_integrity()
            stream.close()
        client.run(submissions[is_stream:])
        for submission in submissions[is_stream:]:
            check_answer(submission)
    scheduler.check_integrity()
    assert not scheduler.has_unfinished
    assert scheduler.num_free_blocks == num_free


def check_answer(submission):
    """Compares with the arithmetic that the fake model does."""
    for sample in submission.samples:
        tokens, reason = expected_output(sample.request)
        if submission.params.stop:
            assert sample.token_ids == tokens[: sample.num_tokens]
        else:
            assert (sample.token_ids, sample.finish_reason) == (tokens, reason.value)


# text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_pretrained(folder)


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
LOOK_ALIKES = st.sampled_from([*SPECIALS, "<|begin|", "|end|>", "<|END|>", "<|beg\u200bin|>", "<|end|><|end|>", "\x00"])
TEXTS = st.one_of(
    ANY_TEXT,
    st.lists(st.one_of(LOOK_ALIKES, ANY_TEXT, st.sampled_from(CORPUS)), max_size=6).map("".join),
    st.builds(lambda piece, count: piece * count, LOOK_ALIKES | ANY_TEXT, st.sampled_from([1, 1000, 10_000])),
)
CONTENTS = st.one_of(
    *[TEXTS] * 4, HOSTILE, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=2)
)
ROLES = st.sampled_from(["user", "assistant", "system", "", "\ud800"])
MESSAGES = st.one_of(
    HOSTILE,
    st.lists(st.fixed_dictionaries({"role": ROLES, "content": CONTENTS}), min_size=1, max_size=3),
    st.lists(
        st.one_of(
            st.fixed_dictionaries({"role": ROLES, "content": CONTENTS}),
            st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), HOSTILE),
        ),
        max_size=3,
    ),
)


@given(TEXTS)
@settings(max_examples=200)
def test_any_text_is_encoded_and_comes_back_or_is_refused(tokenizer, text):
    try:
        ids = tokenizer.encode(text, add_special_tokens=False)
    except RequestError as error:
        assert any(0xD800 <= ord(character) <= 0xDFFF for character in text), str(error)
        return
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(MESSAGES)
@settings(max_examples=100)
def test_a_conversation_is_encoded_or_refused(tokenizer, messages):
    try:
        ids = tokenizer.encode_chat(messages)
    except RequestError as error:
        assert str(error)
        return
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)


# with a model


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **ENGINE_FIELDS) as opened:
        yield opened


MODEL_PROMPTS = st.lists(
    st.one_of(
        st.lists(st.integers(0, MODEL_VOCAB_SIZE - 1), min_size=1, max_size=40),
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
        HOSTILE,
    ),
    min_size=1,
    max_size=3,
)
MODEL_PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 2),
    temperature=st.sampled_from([0.0, 1e-6, 1.0, 1e6]),
    top_k=st.sampled_from([0, 1, 5, 2**31 - 1]),
    top_p=st.sampled_from([1e-9, 0.5, 1.0]),
    max_tokens=st.integers(1, 5),
    min_tokens=st.integers(0, 1),
    stop=st.sampled_from([(), ("e",)]),
    seed=st.sampled_from([0, -1, 2**64 - 1]),
    logprobs=st.sampled_from([None, 0]),
)


@given(MODEL_PROMPTS, MODEL_PARAMS, st.sampled_from(["generate", "stream", "score"]), st.integers(0, 3))
@settings(max_examples=50)
def test_a_model_answers_as_it_does_alone_or_refuses_and_every_block_comes_back(llm, prompts, params, door, num_taken):
    scheduler = llm._started.engine.scheduler
    try:
        if door == "generate":
            outputs = llm.generate(prompts, params, progress=False)
            (alone,) = llm.generate(as_list(prompts)[-1:], params, progress=False)
            assert [each.token_ids for each in outputs[-1].outputs] == [each.token_ids for each in alone.outputs]
        elif door == "stream":
            stream = llm.stream(prompts[0], params)
            for _, _ in zip(range(num_taken), stream, strict=False):
                scheduler.check_integrity()
            stream.close()
        else:
            for each in llm.score(prompts, progress=False):
                assert np.isfinite(each.logprobs).all() and (each.logprobs <= 0).all()
    except RequestError as error:
        assert str(error)
    scheduler.check_integrity()
    assert not scheduler.has_unfinished
    assert scheduler.num_free_blocks == ENGINE_FIELDS["num_blocks"] - 1
