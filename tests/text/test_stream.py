import pytest
from helpers.byte_tokenizer import ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_jax.errors import RequestError
from photon_jax.request import SamplingParams
from photon_jax.text.stream import TextDelta, TextStream

BYTES = ByteTokenizer()


def stream(tokenizer=BYTES, **params):
    return TextStream(tokenizer, SamplingParams(**params))


def test_text_and_token_count_end_at_the_token_that_completed_the_stop_string():
    text = stream(stop="END")
    delta = text.push(b"go END and on", False)
    assert delta == TextDelta(text="go ", stop_reason="END", num_tokens=6)
    assert text.text == "go "


def test_token_that_runs_past_the_stop_string_is_kept_and_its_rest_is_not(byte_level):
    ids = byte_level.encode("ab the quick")
    whole = next(index for index, token_id in enumerate(ids) if byte_level.decode([token_id]) == " the")
    text = stream(byte_level, stop=" th")
    assert text.push(ids, True) == TextDelta(text="ab", stop_reason=" th", num_tokens=whole + 1)


@given(
    content=st.text("abS🙂", max_size=12).map(str.encode),
    cuts=st.sets(st.integers(1, 40)),
    stop=st.lists(st.text("abS🙂", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 8),
    include=st.booleans(),
)
@settings(max_examples=400)
def test_result_does_not_depend_on_how_many_tokens_come_at_once(content, cuts, stop, min_tokens, include):
    options = {"stop": stop, "min_tokens": min_tokens, "include_stop_str_in_output": include}
    one, many = stream(**options), stream(**options)
    for index in range(len(content)):
        single = one.push(content[index : index + 1], index == len(content) - 1)
    ends = [*sorted(cut for cut in cuts if cut < len(content)), len(content)]
    shown, start = "", 0
    for end in ends:
        delta = many.push(content[start:end], end == len(content))
        shown, start = shown + delta.text, end
    assert one.text == many.text == shown
    if content:
        assert (single.stop_reason, single.num_tokens) == (delta.stop_reason, delta.num_tokens)
        if delta.stop_reason is None:
            assert (shown, delta.num_tokens) == (content.decode(), len(content))
        else:
            assert content[: delta.num_tokens].decode().endswith(delta.stop_reason)
            assert delta.num_tokens > min_tokens


def test_tokens_after_the_end_change_nothing():
    for text in (stream(stop="END"), stream()):
        last = text.push(b"go END", True)
        late = text.push(b" more END", True)
        assert late == TextDelta(text="", stop_reason=last.stop_reason, num_tokens=last.num_tokens)
        assert text.text == last.text


def test_text_held_back_comes_out_when_the_sequence_finishes():
    text = stream(stop="END")
    assert text.push(b"go EN", False).text == "go "
    assert text.push(b"", True) == TextDelta(text="EN", stop_reason=None, num_tokens=5)


def test_stop_string_completed_by_the_last_token_wins_over_the_length():
    assert stream(stop="END").push(b"END", True).stop_reason == "END"


def test_incomplete_character_is_flushed_at_the_end_and_may_complete_a_stop_string():
    half = "🙂".encode()[:2]
    text = stream()
    assert text.push(half, False).text == ""
    assert text.push(b"", True).text == "\ufffd"
    assert stream(stop="\ufffd").push(b"a" + half, True) == TextDelta(text="a", stop_reason="\ufffd", num_tokens=3)


def test_stop_string_can_stay_at_the_end_of_the_text():
    text = stream(stop=["END"], include_stop_str_in_output=True)
    assert text.push(b"go END!", False) == TextDelta(text="go END", stop_reason="END", num_tokens=6)


def test_text_of_the_first_min_tokens_tokens_does_not_match():
    text = stream(stop=["ab"], min_tokens=3)
    assert text.push(b"aba", False) == TextDelta(text="aba", stop_reason=None, num_tokens=3)
    assert text.push(b"b", False).stop_reason is None
    assert text.push(b"ab", False) == TextDelta(text="", stop_reason="ab", num_tokens=6)
    assert text.text == "abab"


def test_stop_text_in_the_prompt_does_not_count(byte_level):
    prompt, output = "say STOP", " the end"
    ids = byte_level.encode(prompt + output)[len(byte_level.encode(prompt)) :]
    text = stream(byte_level, stop=["STOP", "STOP the"])
    assert text.push(ids, True).stop_reason is None
    assert text.text == output


def test_special_tokens_are_left_out_and_can_be_shown():
    assert stream().push([256, 65, 257], True).text == "A"
    assert stream(skip_special_tokens=False).push([256, 65, 257], True).text == "<bos>A<eos>"


def test_text_of_the_id_that_ended_the_sequence_is_left_out_but_counted():
    assert stream().push(b"ab.", True, ended_by_stop_id=True) == TextDelta(text="ab", stop_reason=None, num_tokens=3)
    kept = stream(include_stop_str_in_output=True)
    assert kept.push(b"ab.", True, ended_by_stop_id=True).text == "ab."


def test_without_a_tokenizer_tokens_are_counted_and_text_is_empty():
    text = stream(None)
    assert text.push([5, 6], False) == TextDelta(text="", stop_reason=None, num_tokens=2)
    assert text.push([7], True) == TextDelta(text="", stop_reason=None, num_tokens=3)
    assert text.text == ""


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(RequestError, match=r"stop strings \['x'\] need a tokenizer.*stop_token_ids"):
        stream(None, stop="x")
