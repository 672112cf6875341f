"""Checks of a body before it is parsed, against a count that is made character by character."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_jax.server import json_checks
from photon_jax.server.json_checks import MAX_DEPTH, MAX_NUMBER_LENGTH, check_json

TEXTS = st.text(st.sampled_from('ab"\\[]{},:0 Nan\n\u00e9\U0001f642'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


def depth_of(value):
    if isinstance(value, list | dict):
        return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)
    return 0


def is_taken(body):
    try:
        check_json(body)
    except ValueError:
        return False
    return True


@given(VALUES, st.booleans(), st.integers(1, 4))
def test_values_pass_up_to_the_greatest_depth(value, is_ascii, max_depth):
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_checks, "MAX_DEPTH", max_depth)
        assert is_taken(body) == (depth_of(value) <= max_depth)


@given(st.binary(max_size=60) | st.text(st.sampled_from('"\\[]{}aN')).map(str.encode))
def test_any_bytes_are_taken_or_refused_by_the_same_error(body):
    is_taken(body)


@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"a":', b"}")])
def test_the_greatest_depth_is_taken_and_one_more_is_not(brackets):
    begin, end = brackets
    assert is_taken(begin * MAX_DEPTH + b"1" + end * MAX_DEPTH)
    assert not is_taken(begin * (MAX_DEPTH + 1) + b"1" + end * (MAX_DEPTH + 1))


def test_the_longest_number_is_taken_and_a_longer_one_is_not():
    assert is_taken(b"[%s, 1]" % (b"7" * MAX_NUMBER_LENGTH))
    assert not is_taken(b"[%s, 1]" % (b"7" * (MAX_NUMBER_LENGTH + 1)))


def test_values_are_counted_wherever_they_are(monkeypatch):
    monkeypatch.setattr(json_checks, "MAX_VALUES", 10)
    assert is_taken(b"[1,2,3,4,5,6,7,8,9,10]")
    for body in (
        b"[1,2,3,4,5,6,7,8,9,10,11]",
        b"[[],[],[],[],[],[]]",
        b'["a","a","a","a","a","a","a","a","a","a","a"]',
    ):
        assert not is_taken(body)
    assert is_taken(json.dumps(",,,,,,,,,,,,[[[[[[[[[[[").encode())


def test_an_open_text_hides_the_rest_which_the_parser_refuses():
    body = b'["' + b"[" * 1000
    assert is_taken(body)
    with pytest.raises(json.JSONDecodeError):
        json.loads(body)
