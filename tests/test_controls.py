"""What sampling controls may be: each wrong value is an error that names it."""

import math

import numpy as np
import pytest
from helpers.byte_tokenizer import ByteTokenizer

from photon_jax.controls import LogitsProcessor, bad_word_ids, check_a_token_is_left, logit_bias_from_json
from photon_jax.errors import RequestError
from photon_jax.request import Request, SamplingParams


def keep(state, logits, token, position):
    return state, logits


class Unhashable:
    __hash__ = None

    def __call__(self, *_):
        return None


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("repetition_penalty", 0.0, "repetition_penalty must be above 0"),
        ("repetition_penalty", 1e-40, r"repetition_penalty must be a finite number in \[1e-06, "),
        ("temperature", 1e-40, "temperature must be 0, which is greedy, or at least 1.2e-38, got 1e-40"),
        ("repetition_penalty", -1.0, "repetition_penalty must be a finite number"),
        ("repetition_penalty", math.nan, "repetition_penalty must be a finite number"),
        ("repetition_penalty", "1", "repetition_penalty must be a finite number"),
        ("presence_penalty", 2.1, r"presence_penalty must be a finite number in \[-2.0, 2.0\], got 2.1"),
        ("presence_penalty", None, "presence_penalty must be a number, got None"),
        ("frequency_penalty", -2.1, r"frequency_penalty must be a finite number in \[-2.0, 2.0\], got -2.1"),
        ("frequency_penalty", True, "frequency_penalty must be a finite number"),
        ("logit_bias", [5], "logit_bias must map token ids to numbers"),
        ("logit_bias", {"5": 1.0}, "logit_bias must have token ids of at least 0 as its keys, got '5'"),
        ("logit_bias", {-1: 1.0}, "logit_bias must have token ids"),
        ("logit_bias", {True: 1.0}, "logit_bias must have token ids"),
        ("logit_bias", {5: 100.5}, r"logit_bias of token 5 must be a number in \[-100, 100\], got 100.5"),
        ("logit_bias", {5: math.nan}, "logit_bias of token 5"),
        ("logit_bias", {5: -math.inf}, "logit_bias of token 5 .* use allowed_token_ids or bad_words"),
        ("logit_bias", dict.fromkeys(range(301), 0.0), "logit_bias holds 301 token ids, at most 300"),
        ("allowed_token_ids", [], "allowed_token_ids is empty"),
        ("allowed_token_ids", [None], "allowed_token_ids must be token ids of at least 0, got None"),
        ("allowed_token_ids", np.array(5), "allowed_token_ids must be a list"),
        ("allowed_token_ids", 5, "allowed_token_ids must be a list"),
        ("allowed_token_ids", "ab", "allowed_token_ids must be a list"),
        ("allowed_token_ids", [3, -1], "allowed_token_ids must be token ids of at least 0, got -1"),
        ("allowed_token_ids", [3, 1.0], "allowed_token_ids must be token ids of at least 0, got 1.0"),
        ("bad_words", "word", "bad_words must be a list"),
        ("bad_words", 5, "bad_words must be a list"),
        ("bad_words", [" "], "bad_words holds ' '"),
        ("bad_words", [""], "bad_words holds ''"),
        ("bad_words", [[]], r"bad_words holds \[\]"),
        ("bad_words", [5], "bad_words holds 5"),
        ("bad_words", [[1, -1]], "bad_words holds"),
        ("bad_words", [list(range(17))], "list of 1 to 16 token ids"),
        ("bad_words", ["a"] * 65, "bad_words holds 65 words, at most 64"),
        ("logits_processor", 5, "logits_processor must be a hashable function"),
        ("logits_processor", LogitsProcessor(None), "logits_processor must be a hashable function"),
        ("logits_processor", Unhashable(), "logits_processor must be a hashable function"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_its_field(field, value, match):
    with pytest.raises(RequestError, match=match):
        SamplingParams(**{field: value})


def test_a_number_too_long_to_be_written_is_an_error_that_says_so():
    huge = 10**5000
    for fields in ({"seed": huge}, {"temperature": huge}, {"logit_bias": {1: huge}}, {"logit_bias": {-huge: 1}}):
        with pytest.raises(RequestError, match=f"{next(iter(fields))} .*too many digits to show"):
            SamplingParams(**fields)


def test_values_are_taken_over_in_one_form():
    bias = {np.int64(5): np.float32(0.5), 3: 2}
    words = ["a", [np.int32(1), 2]]
    params = SamplingParams(
        logit_bias=bias, allowed_token_ids=np.asarray([7, 3, 7]), bad_words=words, logits_processor=keep
    )
    bias[9], words[0] = 1.0, "b"
    assert params.logit_bias == {5: 0.5, 3: 2.0}
    assert params.allowed_token_ids == (3, 7)
    assert params.bad_words == ("a", (1, 2))
    assert (params.processor.fn, params.processor.init_state) == (keep, ())
    again = params.resolve({})
    assert again.processor is params.processor
    assert again.logit_bias == params.logit_bias
    assert isinstance(hash(params), int)


def test_repetition_penalty_is_taken_from_the_defaults_unless_it_is_given():
    assert SamplingParams().resolve({}).repetition_penalty == 1.0
    assert SamplingParams().resolve({"repetition_penalty": 1.2}).repetition_penalty == 1.2
    assert SamplingParams(repetition_penalty=1.0).resolve({"repetition_penalty": 1.2}).repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, False),
        ({"repetition_penalty": 1.0, "logit_bias": {}, "temperature": 0.5, "top_k": 3, "min_tokens": 2}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"logit_bias": {1: 1.0}}, True),
        ({"allowed_token_ids": [1]}, True),
        ({"bad_words": [[1]]}, True),
        ({"logits_processor": keep}, True),
    ],
)
def test_a_request_knows_whether_it_has_controls(params, expected):
    params = SamplingParams(**params).resolve({})
    fields = {"request_id": "r", "prompt_token_ids": (1,), "params": params, "bad_word_ids": params.bad_words}
    assert Request(**fields).has_controls is expected
    assert not Request(**fields, score=True).has_controls


def test_bad_words_are_tokenized_with_and_without_a_space():
    ids = bad_word_ids((" hi", (5, 6), "x", (120,)), ByteTokenizer())
    assert ids == ((104, 105), (32, 104, 105), (5, 6), (120,), (32, 120))


def test_bad_words_that_cannot_be_tokenized_are_errors():
    with pytest.raises(RequestError, match="'hi', but there is no tokenizer; give its token ids"):
        bad_word_ids(("hi",), None)
    with pytest.raises(RequestError, match="the bad word 'abcdefghijklmnop' is 17 tokens long"):
        bad_word_ids(("abcdefghijklmnop",), ByteTokenizer())


def test_controls_that_leave_no_token_are_errors():
    check_a_token_is_left((3, 4), ((3,), (4, 5)), (), 9)
    check_a_token_is_left(None, ((3,),), (0, 1), 9)
    with pytest.raises(RequestError, match="bad_words rule out each of allowed_token_ids"):
        check_a_token_is_left((3, 4), ((3,), (4,)), (), 9)
    with pytest.raises(RequestError, match="of allowed_token_ids only stop ids are left"):
        check_a_token_is_left((3, 4), ((3,),), (4,), 9)


def test_keys_of_a_logit_bias_from_json_become_token_ids():
    assert logit_bias_from_json({"5": 1.5, "12": -3}) == {5: 1.5, 12: -3}
    assert logit_bias_from_json({"x": 1}) == {"x": 1}  # which SamplingParams refuses
    assert logit_bias_from_json([1]) == [1]
