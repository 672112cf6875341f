"""Calls in the text of answers: both formats, whole and in pieces, well formed and not."""

import itertools
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_jax.errors import ConfigError
from photon_jax.text.call_reader import CallReader
from photon_jax.text.json_scan import JsonScanner
from photon_jax.text.tool_calls import (
    HERMES,
    LLAMA3_JSON,
    ToolCallParser,
    find_tool_format,
    new_call_id,
    split_tool_calls,
)


def whole(text, form):
    """Returns content, and name and arguments of the calls, of a whole answer."""
    content, calls = split_tool_calls(text, form)
    assert len({call.id for call in calls}) == len(calls)
    return content, [(call.name, call.arguments) for call in calls]


def streamed(pieces, form):
    """Returns content, and name and arguments of the calls, put together from deltas."""
    parser = ToolCallParser(form)
    content, calls = "", []
    for delta in [*map(parser.push, pieces), parser.flush()]:
        content += delta.content
        for call in delta.tool_calls:
            if call.name is None:
                assert call.id is None and call.index == len(calls) - 1 and call.arguments
                calls[-1][1] += call.arguments
            else:
                assert call.id and call.index == len(calls)
                calls.append([call.name, call.arguments])
    return content, [tuple(call) for call in calls]


ONE = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "x"]}}\n</tool_call>'
LLAMA_ONE = '{"name": "f", "parameters": {"a": 1}}'
GOOD = [
    (HERMES, ONE, "", [("f", '{"a": [1, "x"]}')]),
    (HERMES, f"Let me look.\n\n{ONE}\n", "Let me look.", [("f", '{"a": [1, "x"]}')]),
    (HERMES, f"{ONE}\n{ONE.replace('f', 'g')} Done.", "Done.", [("f", '{"a": [1, "x"]}'), ("g", '{"a": [1, "x"]}')]),
    (HERMES, ONE.removesuffix("</tool_call>"), "", [("f", '{"a": [1, "x"]}')]),
    (HERMES, ONE.removesuffix("call>"), "", [("f", '{"a": [1, "x"]}')]),
    (HERMES, '<tool_call>{"arguments": {"b": {}}, "id": 3, "name": "f"}</tool_call>', "", [("f", '{"b": {}}')]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HERMES, r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, r'<tool_call>{"name": "\u00e9", "arguments": {"s": "</tool_call>\n"}}</tool_call>', "", [
        ("é", r'{"s": "</tool_call>\n"}')
    ]),
    (HERMES, f"<tool_call>{ONE}", "<tool_call>", [("f", '{"a": [1, "x"]}')]),
    (LLAMA3_JSON, LLAMA_ONE, "", [("f", '{"a": 1}')]),
    (LLAMA3_JSON, f"\n\n<|python_tag|>{LLAMA_ONE}", "", [("f", '{"a": 1}')]),
    (LLAMA3_JSON, f"I call. <|python_tag|>{LLAMA_ONE}", "I call.", [("f", '{"a": 1}')]),
    (LLAMA3_JSON, f"{LLAMA_ONE}; {LLAMA_ONE.replace('f', 'g')}", "", [("f", '{"a": 1}'), ("g", '{"a": 1}')]),
    (LLAMA3_JSON, f"{LLAMA_ONE}\n{LLAMA_ONE}", "", [("f", '{"a": 1}')] * 2),
    (LLAMA3_JSON, '{"type": "function", "name": "f", "arguments": {}}', "", [("f", "{}")]),
    (LLAMA3_JSON, f"{LLAMA_ONE}\n\n{{}} is empty.", "{} is empty.", [("f", '{"a": 1}')]),
    (LLAMA3_JSON, f"{LLAMA_ONE} And so on.", "And so on.", [("f", '{"a": 1}')]),
]  # fmt: skip
NO_CALLS = [
    (HERMES, "a < b, <tool_ is no call, and <tools> neither"),
    (HERMES, " \n"),
    (HERMES, "ends with the begin of one\n<tool_cal"),
    (HERMES, LLAMA_ONE),
    (HERMES, "<tool_call>f(a=1)</tool_call>"),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    (HERMES, r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    (HERMES, "<tool_call>{}</tool_call>"),
    (HERMES, "<tool_call>{'name': 'f'}</tool_call>"),
    (HERMES, "<tool_call>"),
    (HERMES, '<tool_call>{"name": "f", '),
    (LLAMA3_JSON, '{"answer": {"name": "f"}}'),
    (LLAMA3_JSON, '{"name": "Ann"}'),
    (LLAMA3_JSON, '{"name": "Ann", "age": 5}'),
    (LLAMA3_JSON, f"See: {LLAMA_ONE}"),
    (LLAMA3_JSON, "<|python_tag|>print(1)"),
    (LLAMA3_JSON, "Plain text; with {braces}."),
    (LLAMA3_JSON, "{"),
]
BROKEN = [
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call> y', '{"a": ', "}}</tool_call> y"),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "cut', '{"a": "cut', ""),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}} and more', "{}", "} and more"),
    (LLAMA3_JSON, '{"name": "f", "parameters": {"a": 01}}', '{"a": 01', "}}"),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), GOOD)
def test_calls_are_found_whole_and_in_pieces(form, text, content, calls):
    assert whole(text, form) == (content, calls)
    assert streamed(text, form) == (content, calls)
    assert streamed([text], form) == (content, calls)


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_is_content_to_the_letter(form, text):
    assert whole(text, form) == (text, [])
    assert streamed(text, form) == (text, [])


@pytest.mark.parametrize(("form", "text", "arguments", "content"), BROKEN)
def test_of_a_call_that_breaks_off_what_came_stays_a_call_whole_and_in_pieces(form, text, arguments, content):
    assert whole(text, form) == streamed(text, form) == streamed([text], form) == (content, [("f", arguments)])


def test_after_a_call_that_broke_off_the_next_one_has_an_index_of_its_own():
    broken = '<tool_call>{"name": "f", "arguments": {"a": x}}</tool_call>'
    assert streamed([broken + ONE], HERMES) == ("x}}</tool_call>", [("f", '{"a": '), ("f", '{"a": [1, "x"]}')])


def test_arguments_stream_while_they_come():
    parser = ToolCallParser(HERMES, make_id=lambda: "id")
    told = [parser.push(piece).tool_calls for piece in ('<tool_call>{"name": "f", "arg', 'uments": {"a', '": 1', "}}")]
    seen = [[(call.index, call.id, call.name, call.arguments) for call in calls] for calls in told]
    assert seen == [[], [(0, "id", "f", '{"a')], [(0, None, None, '": 1')], [(0, None, None, "}")]]


def test_plain_text_is_shown_at_once():
    parser = ToolCallParser(HERMES)
    assert [parser.push(piece).content for piece in ("a b", " < c", "<t", "<tool", "x")] == [
        "a b",
        " < c",
        "",
        "<t",
        "<toolx",
    ]
    bare = ToolCallParser(LLAMA3_JSON)
    assert [bare.push(piece).content for piece in ('{"answer', '": ', '{"name')] == [
        "",
        '{"answer":',
        ' {"name',
    ]


PARTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", ONE, LLAMA_ONE, '{"name": "f", ', '"arguments": {', "}", "{"),
    *(" ", "\n", ";", '"', "\\", "text", "<", '"name"', ":", ",", "1", "-", "e", "null", "é"),
]


@given(st.sampled_from([HERMES, LLAMA3_JSON]), st.lists(st.sampled_from(PARTS), max_size=14), st.data())
def test_pieces_give_what_the_whole_gives_however_it_is_cut(form, parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    expected = whole(text, form)
    assert streamed(pieces, form) == streamed(text, form) == expected
    if not expected[1]:
        assert expected[0] == text, "something was lost"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.text(min_size=1), st.dictionaries(st.text(), JSON), st.sampled_from([HERMES, LLAMA3_JSON]), st.booleans())
def test_any_call_comes_back_as_it_was_written(name, arguments, form, ensure_ascii):
    call = json.dumps({"name": name, form.arguments_key: arguments}, ensure_ascii=ensure_ascii)
    text = call if form.is_bare else f"{form.opening}\n{call}\n{form.closing}"
    content, [(found, told)] = whole(text, form)
    assert (content, found, json.loads(told)) == ("", name, arguments)
    assert streamed(text, form) == ("", [(name, told)])


@given(
    st.one_of(
        st.lists(st.sampled_from('{}[]",:0123456789.-+eEtrufalsn\\ "'), max_size=12).map("".join), JSON.map(json.dumps)
    )
)
def test_the_scanner_agrees_with_pythons_json(text):
    scanner, status, num_taken = JsonScanner(), "open", 0
    for char in text + "\n":
        status = scanner.push(char)
        num_taken += status in ("open", "done")
        if status != "open":
            break
    rest = text[num_taken:].strip(" \n\t\r")
    try:
        json.loads(text)
        assert status in ("done", "over") and not rest
    except ValueError:
        assert status in ("open", "wrong") or rest


def test_deep_and_long_answers_take_linear_time():
    begin = time.process_time()
    for text in (
        "<tool_call>" * 20_000,
        '{"name": ' + "[" * 100_000,
        '{"name": "f", "parameters": ' + '{"a":' * 50_000,
        "<" * 100_000,
    ):
        for form in (HERMES, LLAMA3_JSON):
            content, calls = whole(text, form)
            assert (content, calls) == (text, []) or (content, calls[0][1]) == ("", '{"a":' * 50_000)
    assert CallReader(is_strict=True).push("{") == "open"
    assert time.process_time() - begin < 30


def test_the_format_is_seen_in_the_template_or_named():
    qwen = "return a json object within <tool_call></tool_call> tags"
    llama = '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary}{% endif %}'
    assert [find_tool_format(text) for text in (qwen, llama, "{{ messages }}", None)] == [
        HERMES,
        LLAMA3_JSON,
        None,
        None,
    ]
    assert find_tool_format(qwen, "llama3_json") is LLAMA3_JSON
    assert find_tool_format(None, "hermes") is HERMES
    assert find_tool_format(qwen, "none") is None
    with pytest.raises(ConfigError, match="no tool format 'xml'; give auto, none, hermes or llama3_json"):
        find_tool_format(qwen, "xml")


def test_ids_differ():
    assert len({new_call_id() for _ in range(100)}) == 100
