import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_jax.text.stop import StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def run(stops, pieces, *, include_stop=False):
    """Returns the text let out, the stop string, and what each piece let out."""
    matcher = StopMatcher(stops, include_stop=include_stop)
    out = []
    for piece in pieces:
        match = matcher.push(piece)
        out.append(match.text)
        if match.stop is not None:
            return "".join(out), match.stop, out
    out.append(matcher.flush())
    return "".join(out), None, out


def expected(stops, text):
    """The stop string complete first, the longest of several, by looking at every end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))], max(found, key=len)
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "stop"),
    [
        pytest.param(["STOP"], ["go ST", "OP on"], "go ", "STOP", id="starts and ends inside tokens"),
        pytest.param(["STOP"], ["S", "T", "O", "P"], "", "STOP", id="over many tokens"),
        pytest.param(["STOP"], ["a STOP b STOP"], "a ", "STOP", id="twice in one token"),
        pytest.param(["STOP"], ["STOSTOP!"], "STO", "STOP", id="false start"),
        pytest.param(["aab"], ["aa", "ab"], "a", "aab", id="overlaps itself"),
        pytest.param(["ab", "abc"], ["xabc"], "x", "ab", id="prefix of another"),
        pytest.param(["abcd", "bc"], ["xab", "cd"], "xa", "bc", id="inside another"),
        pytest.param(["bc", "abc"], ["xabc"], "x", "abc", id="two end together"),
        pytest.param(["xyz", "zz"], ["xy", "zz"], "", "xyz", id="overlap each other"),
        pytest.param(["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n", id="line ends"),
        pytest.param(["🙂é"], ["ok 🙂", "é!"], "ok ", "🙂é", id="beyond ASCII"),
    ],
)
def test_text_ends_before_the_first_complete_stop_string(stops, pieces, text, stop):
    assert run(stops, pieces)[:2] == (text, stop)
    assert run(stops[::-1], pieces)[:2] == (text, stop)
    assert run(stops, pieces, include_stop=True)[:2] == (text + stop, stop)


@given(stops=STOPS, pieces=st.lists(st.text("abc", max_size=4), max_size=12), include=st.booleans())
@settings(max_examples=400)
def test_result_is_that_of_the_whole_text_however_it_is_cut(stops, pieces, include):
    text, stop = expected(stops, "".join(pieces))
    assert run(stops, pieces, include_stop=include)[:2] == (text + (stop or "") * include, stop)


@given(stops=STOPS, pieces=st.lists(st.text("abc", max_size=4), max_size=12))
@settings(max_examples=400)
def test_held_back_is_only_what_may_begin_a_stop_string(stops, pieces):
    matcher, seen, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        match = matcher.push(piece)
        seen, shown = seen + piece, shown + match.text
        if match.stop is not None:
            return
        held = max(n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n]))
        assert len(seen) - len(shown) == held
        assert seen.startswith(shown)


def test_text_held_back_is_released_when_no_match_is_possible():
    matcher = StopMatcher(["STOP"])
    assert matcher.push("go ST").text == "go "
    assert matcher.push("A").text == "STA"
    assert matcher.push("ST").text == ""
    assert matcher.flush() == "ST"
    assert matcher.flush() == ""


def test_nothing_is_held_back_without_stop_strings():
    assert StopMatcher([]).push("STOP").text == "STOP"
