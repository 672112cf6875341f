import datetime
import enum
import json
from pathlib import Path

import pytest

from photon_jax.errors import CheckpointError, RequestError
from photon_jax.text.chat_template import ChatTemplate

GOLDEN = json.loads((Path(__file__).parent / "golden" / "chats.json").read_text(encoding="utf-8"))["chats"]
ECHO = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("case", GOLDEN, ids=[str(index) for index in range(len(GOLDEN))])
def test_conversation_renders_as_transformers_does(case):
    template = ChatTemplate(case["template"], special_tokens=case["special_tokens"])
    assert template.render(case["messages"], **case["options"]) == case["text"]


def test_rendering_leaves_the_messages_as_they_were():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    with pytest.raises(RequestError, match="append"):
        ChatTemplate("{{ messages.append(1) }}").render(messages)
    assert ChatTemplate(ECHO).render(messages) == "user=a;"
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_text_parts_are_joined_and_values_of_none_left_out():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate(ECHO).render([{"role": "user", "content": parts, "name": None}]) == "user=ab;"


def test_calls_without_content_have_an_empty_one():
    for call in ({"content": None}, {}):
        message = {"role": "assistant", "tool_calls": [{"id": "1", "name": None}], **call}
        template = ChatTemplate("{{ messages[0].content == '' }} {{ '</think>' in messages[0].content }}")
        assert template.render([message]) == "True False"


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "messages is empty"),
        ("hi", "must be a list of role and content dicts, got str"),
        ({"role": "user", "content": "hi"}, "must be a list of role and content dicts, got dict"),
        (["hi"], r"messages\[0\] must be a dict with role and content, got str"),
        ([*USER, {"content": "x"}], r"messages\[1\] needs a role such as 'user', got None"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "assistant", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a string or a list of text parts, got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'; only text"),
        ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\].extra must be JSON data.*got object"),
    ],
)
def test_messages_of_another_form_are_refused(messages, error):
    with pytest.raises(RequestError, match=error):
        ChatTemplate(ECHO).render(messages)


def test_template_that_refuses_gives_its_own_message():
    with pytest.raises(RequestError, match="refuses the conversation: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(USER)


@pytest.mark.parametrize(
    "expression", ["'a' + 1", "nothing.at.all", "1 // 0", "[][3].x", "messages | tojson(indent={})"]
)
def test_expression_that_fails_is_an_error_of_the_request(expression):
    with pytest.raises(RequestError, match="the chat template refuses the conversation"):
        ChatTemplate("{{ " + expression + " }}").render(USER)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.items() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ dict.__init__ }}{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_template_can_not_reach_python_internals(attack):
    with pytest.raises(RequestError):
        ChatTemplate(attack).render(USER)


def test_values_of_richer_types_reach_the_template_as_plain_data():
    class Role(enum.StrEnum):
        USER = "user"

    assert ChatTemplate(ECHO).render([{"role": Role.USER, "content": "x"}]) == "user=x;"


def test_date_comes_from_the_clock_unless_given():
    template = ChatTemplate("{{ date_string if date_string is defined else strftime_now('%Y') }}")
    assert template.render(USER, date_string="then") == "then"
    assert abs(int(template.render(USER)) - datetime.datetime.now().year) <= 1


def test_tool_template_is_used_when_tools_are_given():
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].name }}"})
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[{"name": "add"}]) == "add"
    with pytest.raises(RequestError, match="tools must be a list of JSON schemas"):
        template.render(USER, tools="add")


def test_templates_without_a_default_name_what_there_is():
    with pytest.raises(RequestError, match=r"\['rag'\]; none is named 'default'"):
        ChatTemplate({"rag": "x"}).render(USER)


def test_final_message_is_continued_where_it_ends():
    template = ChatTemplate("{% for m in messages %}<{{ m.content }}>{% endfor %}{{ 'go' if add_generation_prompt }}")
    talk = [*USER, {"role": "assistant", "content": "So, "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert template.render(talk, **options) == "<hi><So, "
    trimming = ChatTemplate("{{ messages[-1].content | trim }}!")
    assert trimming.render(talk, **options) == "So,"
    with pytest.raises(RequestError, match="leaves out the final message"):
        ChatTemplate("x").render(talk, **options)
    with pytest.raises(RequestError, match="only one can be"):
        template.render(talk, continue_final_message=True)


def test_invalid_template_is_an_error_of_the_checkpoint():
    with pytest.raises(CheckpointError, match=r"'default' is not valid Jinja, line 2: .*endfor"):
        ChatTemplate("{% for m in messages %}\n{% endif %}")
