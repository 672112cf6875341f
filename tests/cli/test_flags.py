import dataclasses

import pytest
from absl import flags

from photon_jax.cli.flags import (
    define_engine_flags,
    define_sampling_flags,
    engine_config_from_flags,
    errors_name_flags,
    field_help,
    sampling_params_from_flags,
)
from photon_jax.config import CacheConfig, EngineConfig, KernelConfig, SchedulerConfig
from photon_jax.errors import ConfigError, RequestError
from photon_jax.request import CODE_FIELDS, SamplingParams
from photon_jax.structured_outputs import StructuredOutputs

HELD = {"cache", "scheduler", "kernels", "structured_outputs"} | CODE_FIELDS
OWNERS = (EngineConfig, CacheConfig, SchedulerConfig, KernelConfig, SamplingParams, StructuredOutputs)


def parse(*arguments):
    flag_values = flags.FlagValues()
    define_engine_flags(flag_values)
    define_sampling_flags(flag_values)
    flag_values(["prog", *arguments])
    return flag_values


@pytest.mark.parametrize("owner", OWNERS)
def test_every_field_has_a_flag_with_its_default_and_help(owner):
    flag_values = parse()
    for field in dataclasses.fields(owner):
        if field.name in HELD or not field.metadata.get("has_flag", True):
            continue
        flag = flag_values[field.name]
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        assert flag.default == default, field.name
        assert len(field_help(owner)[field.name]) > 10, field.name
        assert field_help(owner)[field.name] in flag.help, field.name


def test_no_flags_give_the_default_configs():
    flag_values = parse()
    assert engine_config_from_flags(flag_values) == EngineConfig()
    assert sampling_params_from_flags(flag_values) == SamplingParams()


def test_engine_flags_reach_the_config_that_owns_the_field():
    config = engine_config_from_flags(
        parse("--dtype=bfloat16", "--num_blocks=9", "--max_num_seqs=3", "--attention=xla", "--noenable_prefix_caching")
    )
    assert (config.dtype, config.cache.num_blocks, config.scheduler.max_num_seqs) == ("bfloat16", 9, 3)
    assert config.kernels.attention == "xla"
    assert not config.cache.enable_prefix_caching


def test_one_given_limit_moves_the_other_as_in_the_library():
    assert engine_config_from_flags(parse("--max_num_batched_tokens=16")).scheduler.max_num_seqs == 16
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        engine_config_from_flags(parse("--max_num_batched_tokens=16", "--max_num_seqs=32"))


def test_sampling_flags_reach_the_params_and_repeated_ones_keep_commas():
    params = sampling_params_from_flags(
        parse("--temperature=0", "--stop=a,b", "--stop=\n", "--stop_token_ids=7", "--stop_token_ids=8", "--seed=5")
    )
    assert params == SamplingParams(temperature=0.0, stop=("a,b", "\n"), stop_token_ids=(7, 8), seed=5)


def test_control_flags_reach_the_params():
    given = parse(
        *("--repetition_penalty=1.2", "--presence_penalty=-0.5", "--frequency_penalty=2", '--logit_bias={"5": -1.5}'),
        *("--allowed_token_ids=5", "--allowed_token_ids=7", "--bad_words=a, b", "--bad_words=c"),
    )
    expected = SamplingParams(
        repetition_penalty=1.2,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
        logit_bias={5: -1.5},
        allowed_token_ids=(5, 7),
        bad_words=("a, b", "c"),
    )
    assert sampling_params_from_flags(given) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (['--json={"type": "object"}'], StructuredOutputs(json={"type": "object"})),
        (["--json_object"], StructuredOutputs(json_object=True)),
        (["--regex=[a-z]{3,5}, x"], StructuredOutputs(regex="[a-z]{3,5}, x")),
        (["--choice=yes, please", "--choice=no"], StructuredOutputs(choice=("yes, please", "no"))),
        (['--grammar=start: "a" | "b"'], StructuredOutputs(grammar='start: "a" | "b"')),
    ],
)
def test_flags_of_structured_outputs_reach_the_params(arguments, expected):
    assert sampling_params_from_flags(parse(*arguments)) == SamplingParams(structured_outputs=expected)


def test_structured_outputs_that_do_not_fit_name_their_flags():
    with pytest.raises(RequestError, match=r"^--json must be a JSON schema"):
        sampling_params_from_flags(parse("--json=5"))
    with pytest.raises(RequestError, match=r"exactly one of json, --json_object, .*, got json and regex"):
        sampling_params_from_flags(parse("--json={}", "--regex=a"))


@pytest.mark.parametrize("text", ["5", "{5: 1}", '{"x": 1}', '{"5": 101}'])
def test_a_logit_bias_that_is_no_json_of_token_ids_is_an_error(text):
    with pytest.raises(RequestError, match=r"^--logit_bias "):
        sampling_params_from_flags(parse(f"--logit_bias={text}"))


def test_log_probability_flags_reach_the_params():
    params = sampling_params_from_flags(parse("--logprobs=3", "--prompt_logprobs=0", "--logprobs_kind=sampling"))
    assert (params.logprobs, params.prompt_logprobs, params.logprobs_kind) == (3, 0, "sampling")


def test_a_value_out_of_range_is_the_librarys_own_error():
    with pytest.raises(RequestError, match=r"^--top_p must be"):
        sampling_params_from_flags(parse("--top_p=1.5"))
    with pytest.raises(ConfigError, match=r"^--block_size must be a power of two"):
        engine_config_from_flags(parse("--block_size=3"))


def test_errors_name_flags_and_leave_other_words_alone():
    with pytest.raises(
        ConfigError, match=r"^--max_num_batched_tokens \(9\) must be at least --max_num_seqs \(10\): each"
    ):
        engine_config_from_flags(parse("--max_num_seqs=10", "--max_num_batched_tokens=9"))
    with pytest.raises(RequestError, match=r"^--n must be an integer"):
        sampling_params_from_flags(parse("--n=0"))
    with pytest.raises(
        RequestError, match=r"^--top_p must be above 0, got 0; for greedy decoding set --temperature=0$"
    ):
        sampling_params_from_flags(parse("--top_p=0"))
    with (
        pytest.raises(
            ConfigError, match=r"^the seed of a stop, --dtype='x'; --block_size, --num_blocks=2 and block_sizes$"
        ),
        errors_name_flags(),
    ):
        raise ConfigError("the seed of a stop, dtype='x'; block_size, --num_blocks=2 and block_sizes")


def test_a_value_outside_a_closed_set_names_the_choices():
    with pytest.raises(flags.IllegalFlagValueError, match="float32"):
        parse("--dtype=float8")


def test_flags_come_from_a_file_and_later_ones_win(tmp_path):
    path = tmp_path / "run.flags"
    path.write_text("# a comment\n--temperature=0.5\n--block_size=32\n", encoding="utf-8")
    flag_values = parse(f"--flagfile={path}", "--temperature=0")
    assert sampling_params_from_flags(flag_values).temperature == 0.0
    assert engine_config_from_flags(flag_values).cache.block_size == 32
