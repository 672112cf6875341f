"""Reasoning of a chat: told apart from the content, whole and in pieces, and given back to the template."""

import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.web_server import MODEL, script_llm, serving, tiny_llm

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.reasoning_content }}\n{% endfor %}"
    "{# <think> ... </think> #}"
)
TEXT = "<think>\nOne and one.\n</think>\n\nTwo."
MESSAGES = [{"role": "user", "content": "1 + 1?"}]


class Served:
    def __init__(self, client):
        self.client = client

    def ask(self, *, messages=MESSAGES, **fields):
        fields = {"temperature": 0.0} | fields
        return self.client.chat.completions.create(model=MODEL, messages=messages, **fields)


@pytest.fixture(scope="module")
def thinker():
    pieces = [TEXT[at : at + 4] for at in range(0, len(TEXT), 4)]
    with serving(script_llm(pieces, chat_template=TEMPLATE)) as served, served.client() as client:
        yield Served(client)


def test_a_whole_answer_has_its_reasoning_apart(thinker):
    (choice,) = thinker.ask().choices
    assert (choice.message.content, choice.message.model_extra["reasoning"]) == ("Two.", "One and one.")
    assert choice.finish_reason == "stop"


def test_reasoning_is_streamed_before_the_content(thinker):
    deltas = [choice.delta for chunk in thinker.ask(stream=True) for choice in chunk.choices]
    reasoning = [(delta.model_extra or {}).get("reasoning") or "" for delta in deltas]
    content = [delta.content or "" for delta in deltas]
    assert ("".join(reasoning), "".join(content)) == ("One and one.", "Two.")
    assert sum(map(bool, reasoning)) > 1
    # on a busy machine the end of the one comes in the same piece as the start of the other
    assert max(index for index, text in enumerate(reasoning) if text) <= content.index(next(filter(None, content)))


def test_an_answer_that_is_cut_while_it_reasons_has_no_content(thinker):
    (choice,) = thinker.ask(max_tokens=4).choices
    assert (choice.message.content, choice.message.model_extra["reasoning"]) == ("", "One and ")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_earlier_answers_reaches_the_template(thinker, name):
    answer = {"role": "assistant", "content": "Two."}
    without = thinker.ask(messages=[*MESSAGES, answer, *MESSAGES], max_tokens=1).usage.prompt_tokens
    answer = {**answer, name: "One and one, which is two."}
    assert thinker.ask(messages=[*MESSAGES, answer, *MESSAGES], max_tokens=1).usage.prompt_tokens > without


def test_a_model_whose_template_knows_no_reasoning_has_none():
    with serving(script_llm([TEXT])) as served, served.client() as client:
        assert Served(client).ask().choices[0].message.content == TEXT


class ThinkTokenizer(ByteTokenizer):
    chat_template = tool_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}<think>{{ '</think>' if enable_thinking is false }}"
    )


def test_an_answer_is_reasoning_where_the_prompt_opens_it_and_content_where_it_closes_it():
    body = {"allowed_token_ids": [65, 66]}
    with serving(tiny_llm(tokenizer=ThinkTokenizer())) as served, served.client() as client:
        opened = Served(client).ask(max_tokens=4, extra_body=body).choices[0].message
        body["chat_template_kwargs"] = {"enable_thinking": False}
        closed = Served(client).ask(max_tokens=4, extra_body=body).choices[0].message
        form = Served(client).ask(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}).choices[0].message
    assert (opened.content, len(opened.model_extra["reasoning"])) == ("", 4)
    assert (len(closed.content), closed.model_extra.get("reasoning")) == (4, None)
    assert form.content in ("yes", "no")  # an answer of a given form is all content
