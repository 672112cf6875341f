"""Tools by OpenAI's client: calls found in the text or forced, whole and in pieces, and a round trip."""

import json

import openai
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.web_server import MODEL, script_llm, serving, tiny_llm

TEMPLATE = (
    '{% if tools %}{{ tools | tojson }} Answer <tool_call>{{ \'{"name": ..., "arguments": ...}\' }}</tool_call>\n'
    "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}\n"
    "{% endfor %}"
)
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
ARGUMENTS = [{"city": "Köln", "days": 2}, {}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
SMALL_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Köln", "Bern"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "time", "parameters": {"type": "object", "additionalProperties": False}},
    },
]
MESSAGES = [{"role": "user", "content": "?"}]


def pieces_of(text, size=3):
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.fixture(scope="module")
def served():
    """Returns a server whose model says a word and then makes two calls."""
    with serving(script_llm(["Well,", " ", *pieces_of(CALLS)], chat_template=TEMPLATE)) as served:
        yield served


class ToolTokenizer(ByteTokenizer):
    """Shows the format of calls, and no tools, which are long in bytes."""

    chat_template = tool_template = (
        "{# <tool_call> #}{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )


@pytest.fixture(scope="module")
def random():
    """Returns a client of a server whose model says anything, unless it is forced to make calls."""
    with serving(tiny_llm(tokenizer=ToolTokenizer())) as served, served.client() as client:
        yield client


def create(client, **fields):
    fields = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0.0} | fields
    return client.chat.completions.create(model=MODEL, **fields)


def named(name):
    return {"type": "function", "function": {"name": name}}


def calls_of(message):
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_calls_are_found_in_the_text(client):
    (choice,) = create(client).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well,"
    assert calls_of(choice.message) == [("weather", ARGUMENTS[0]), ("time", ARGUMENTS[1])]
    assert {call.type for call in choice.message.tool_calls} == {"function"}
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_calls_are_streamed_in_pieces_by_their_index(client):
    deltas = [choice.delta for chunk in create(client, stream=True) for choice in chunk.choices]
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(delta.content or "" for delta in deltas) == "Well,"
    firsts = [call for call in pieces if call.id is not None]
    assert [(call.index, call.type, call.function.name) for call in firsts] == [
        (0, "function", "weather"),
        (1, "function", "time"),
    ]
    assert len([call for call in pieces if call.index == 0]) > 1, "the arguments came at once"
    for index in range(2):
        text = "".join(call.function.arguments or "" for call in pieces if call.index == index)
        assert json.loads(text) == ARGUMENTS[index]


def test_the_stream_helper_of_the_client_puts_calls_together(client):
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS, temperature=0.0) as stream:
        completion = stream.get_final_completion()
    assert completion.choices[0].finish_reason == "tool_calls"
    assert calls_of(completion.choices[0].message) == [("weather", ARGUMENTS[0]), ("time", ARGUMENTS[1])]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_first_call_alone_is_told_where_calls_are_not_parallel(client, is_streamed):
    answer = create(client, parallel_tool_calls=False, stream=is_streamed)
    if is_streamed:
        deltas = [choice.delta for chunk in answer for choice in chunk.choices]
        assert {call.index for delta in deltas for call in delta.tool_calls or ()} == {0}
    else:
        assert calls_of(answer.choices[0].message) == [("weather", ARGUMENTS[0])]


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}])
def test_text_is_not_searched_for_calls_where_none_may_come(client, fields):
    (choice,) = create(client, **fields).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content == f"Well, {CALLS}"


def test_tools_that_must_not_be_called_are_not_told_to_the_model(client):
    without = create(client, tools=openai.NOT_GIVEN, max_tokens=1).usage.prompt_tokens
    assert create(client, tool_choice="none", max_tokens=1).usage.prompt_tokens == without
    assert create(client, max_tokens=1).usage.prompt_tokens > without + 20


def both_ways(client, **fields):
    """Returns content, calls and finish reason of a whole answer, and of a streamed one put together."""
    (choice,) = create(client, **fields).choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    yield choice.message.content, calls, choice.finish_reason
    content, calls, reason = "", [], None
    for chunk in create(client, stream=True, **fields):
        (choice,) = chunk.choices
        content, reason = content + (choice.delta.content or ""), choice.finish_reason
        for call in choice.delta.tool_calls or ():
            name, arguments = calls.pop() if call.id is None else (call.function.name, "")
            calls.append((name, arguments + (call.function.arguments or "")))
    yield content or None, calls, reason


def test_of_a_call_that_is_cut_what_came_is_told_whole_and_streamed_alike(client):
    seen = []
    for max_tokens in (4, 12, 18, 24, 30, 40):
        whole, streamed = both_ways(client, max_tokens=max_tokens)
        assert whole == streamed
        seen.append(whole)
    assert {reason for *_, reason in seen} == {"length"}
    assert seen[1] == ('Well, <tool_call>\n{"name": "weather"', [], "length"), "there is no call without arguments"
    assert seen[2] == ("Well,", [("weather", '{"c')], "length")


# a model with random weights would not come to an end of white space
SHORT = {"temperature": 1.0, "logit_bias": {str(byte): -100 for byte in b" \t\r\n"}}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_is_required_comes_and_fits_the_schema(random, seed, is_streamed):
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed, **SHORT}
    if is_streamed:
        with random.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=SMALL_TOOLS, **fields) as stream:
            (choice,) = stream.get_final_completion().choices
    else:
        (choice,) = create(random, tools=SMALL_TOOLS, **fields).choices
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    ((name, arguments),) = calls_of(choice.message)
    assert (arguments == {}) if name == "time" else (arguments["city"] in ("Köln", "Bern"))


@pytest.mark.parametrize("name", ["weather", "time"])
def test_a_named_call_comes_once(random, name):
    (choice,) = create(random, tools=SMALL_TOOLS, tool_choice=named(name), seed=1, **SHORT).choices
    assert [call[0] for call in calls_of(choice.message)] == [name]
    assert choice.finish_reason == "tool_calls"


def test_a_round_trip_gives_the_model_its_calls_and_their_results(random):
    first = create(random, tools=SMALL_TOOLS, tool_choice=named("weather"), seed=1, **SHORT).choices[0].message
    call = first.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*MESSAGES, first.model_dump(exclude_none=True), result]
    answer = create(random, messages=messages, max_tokens=1, extra_body={"return_token_ids": True})
    prompt = bytes(i for i in answer.model_extra["prompt_token_ids"] if i < 256).decode()
    assert prompt.endswith("sunny")
    calls = json.loads(prompt[prompt.index("[") : prompt.rindex("]") + 1])
    assert calls[0]["id"] == call.id
    assert calls[0]["function"]["arguments"] == json.loads(call.function.arguments), "templates expect an object"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tool_choice": "required", "tools": openai.NOT_GIVEN}, "there are no tools"),
        ({"tool_choice": named("nothing")}, "nothing"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "leave one of them out"),
        ({"tools": [{"type": "retrieval"}]}, "function"),
    ],
)
def test_a_call_that_can_not_be_made_is_refused(client, fields, told):
    with pytest.raises(openai.BadRequestError, match=told):
        create(client, **fields)


def test_a_call_can_not_be_forced_where_the_template_shows_no_format():
    with serving(script_llm(["Well."])) as served:
        client = served.client()
        assert create(client).choices[0].message.content == "Well."
        with pytest.raises(openai.BadRequestError, match="shows no format"):
            create(client, tool_choice="required")
