"""Forced tool calls: whatever comes is calls that the parsers find, with arguments that fit."""

import json
import random

import jsonschema
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.grammars import COMPACT, walk

from photon_jax.errors import RequestError
from photon_jax.structured_outputs import StructuredOutputs
from photon_jax.text.grammar import Grammars
from photon_jax.text.tool_calls import FORMATS, HERMES, LLAMA3_JSON, split_tool_calls
from photon_jax.text.tool_grammar import force_tool_calls

EOS = 257
GRAMMARS = Grammars(ByteTokenizer(), vocab_size=258, eos_token_ids=(EOS,))
SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Paris", 'Köln "am Rhein"', "a::=b"]}},
    },
    'say "hi"\\ü': {"type": "object", "properties": {"loud": {"type": "boolean"}}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "description": "does it"}}
    for name, schema in SCHEMAS.items()
]


def answers(wanted, count=40):
    grammar, texts = GRAMMARS.grammar(wanted, stop_ids=(EOS,)), []
    for seed in range(count):
        ids, is_complete = walk(grammar.start(), random.Random(seed), stop_ids=(EOS,), max_tokens=900)
        if is_complete:
            texts.append(bytes(ids).decode())
    return texts


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("is_parallel", [False, True])
def test_every_answer_is_calls_whose_arguments_fit(form, is_parallel):
    names, counts = set(), set()
    for text in answers(force_tool_calls(form, TOOLS, is_parallel=is_parallel)):
        content, calls = split_tool_calls(text, form)
        assert content == "" and calls
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            names.add(call.name)
        counts.add(len(calls))
    assert names == set(SCHEMAS)
    assert (counts == {1}) != is_parallel


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_function_is_called_once(form, name):
    texts = answers(force_tool_calls(form, TOOLS, name=name), count=20)
    assert len(texts) >= 15
    assert [[call.name for call in split_tool_calls(text, form)[1]] for text in texts] == [[name]] * len(texts)


def test_calls_are_written_as_the_models_were_taught():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"const": {"a": 1}} | COMPACT}}]
    hermes, llama = (
        set(answers(force_tool_calls(form, tools, is_parallel=False), count=3)) for form in (HERMES, LLAMA3_JSON)
    )
    assert hermes == {'<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'}
    assert llama == {'{"name": "f", "parameters": {"a":1}}'}


def test_a_function_without_parameters_takes_none():
    found = answers(force_tool_calls(LLAMA3_JSON, [{"type": "function", "function": {"name": "f"}}]), count=5)
    assert found
    assert {json.loads(split_tool_calls(text, LLAMA3_JSON)[1][0].arguments) == {} for text in found} == {True}


def test_a_function_whose_parameters_say_nothing_takes_any_object():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    (text,) = answers(force_tool_calls(LLAMA3_JSON, [tool]), count=40)[:1]
    assert isinstance(json.loads(split_tool_calls(text, LLAMA3_JSON)[1][0].arguments), dict)


@pytest.mark.parametrize(
    ("tools", "name", "match"),
    [
        ([], None, "there are no tools"),
        (TOOLS, "other", "tool_choice names 'other', which is not among the tools"),
        ([{"type": "function"}], None, r"tools\[0\] must be a function with a name"),
        ([{"function": {"name": 5}}], None, r"tools\[0\] must be a function with a name"),
        ([{"function": {"name": "f", "parameters": [1]}}], None, "the parameters of 'f' must be a JSON schema"),
        ([{"function": {"name": "f", "parameters": {"a": {1}}}}], None, "the parameters of 'f' must be a JSON schema"),
    ],
)
def test_tools_that_can_not_be_called_are_refused(tools, name, match):
    with pytest.raises(RequestError, match=match):
        force_tool_calls(HERMES, tools, name=name)


def test_parameters_that_do_not_compile_are_refused_with_the_reason():
    tools = [{"function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "foo"}}}}}]
    with pytest.raises(RequestError, match="Invalid type: foo"):
        GRAMMARS.grammar(force_tool_calls(HERMES, tools))
    assert isinstance(force_tool_calls(HERMES, tools), StructuredOutputs)
