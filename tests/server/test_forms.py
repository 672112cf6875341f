"""Forms of answers by OpenAI's client: response_format, structured_outputs and .parse(); what can't be is refused."""

import concurrent.futures
import json
import re
import threading
from typing import Literal

import openai
import pydantic
import pytest
from helpers.web_server import MODEL, TIMEOUT_S, wait_until

from photon_jax.server.state import NUM_FORM_THREADS

MESSAGES = [{"role": "user", "content": "Go"}]


class Step(pydantic.BaseModel):
    kind: Literal["add", "done"]
    sure: bool | None


class Solution(pydantic.BaseModel):
    steps: list[Step] = pydantic.Field(min_length=1, max_length=2)
    answer: Literal["yes", "né"]


# a model with random weights would not come to an end of white space
NO_SPACES = {str(byte): -100 for byte in b" \t\r\n"}


def ask(client, **fields):
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, **fields).choices[0]


def structured(client, **form):
    return ask(client, max_tokens=60, extra_body={"structured_outputs": form})


@pytest.mark.parametrize("seed", range(3))
def test_a_nested_model_is_parsed(client, seed):
    fields = {"messages": MESSAGES, "response_format": Solution, "seed": seed, "logit_bias": NO_SPACES}
    (choice,) = client.chat.completions.parse(model=MODEL, **fields).choices
    assert isinstance(choice.message.parsed, Solution)
    assert choice.finish_reason == "stop"
    with client.chat.completions.stream(model=MODEL, **fields) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed


def test_an_answer_has_the_form_of_its_schema(client):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "sure": {"type": "boolean"}},
        "required": ["kind", "sure"],
        "additionalProperties": False,
    }
    for form in ({"json": schema}, {"json": json.dumps(schema)}):
        choice = ask(client, max_tokens=80, logit_bias=NO_SPACES, extra_body={"structured_outputs": form})
        assert choice.finish_reason == "stop"
        assert set(json.loads(choice.message.content)) == {"kind", "sure"}
    wanted = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}
    choice = ask(client, max_tokens=80, logit_bias=NO_SPACES, response_format=wanted)
    assert set(json.loads(choice.message.content)) == {"kind", "sure"}


def test_any_object_will_do_for_json_object(client):
    fields = {"max_tokens": 60, "response_format": {"type": "json_object"}, "logit_bias": {"125": 100}}
    assert ask(client, **fields).message.content == "{}"


def test_plain_text_is_no_form(client):
    assert ask(client, max_tokens=3, response_format={"type": "text"}).finish_reason == "length"


def test_a_regex_a_choice_and_a_grammar_are_kept_to(client):
    assert re.fullmatch(r"[a-c]{3}-\d", structured(client, regex=r"[a-c]{3}-\d").message.content)
    assert structured(client, choice=["yes", "no"]).message.content in ("yes", "no")
    assert structured(client, grammar='start: ("a" | "b")~4').message.content.strip("ab") == ""


def test_a_completion_has_a_form_too(client):
    body = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], seed=1, extra_body=body)
    assert {choice.text for choice in answer.choices} <= {"yes", "no"}


def test_log_probabilities_of_tokens_that_are_ruled_out_are_numbers(client):
    body = {"structured_outputs": {"choice": ["yes", "no"]}, "logprobs_kind": "sampling"}
    choice = ask(client, max_tokens=9, logprobs=True, top_logprobs=5, extra_body=body)
    values = [top.logprob for entry in choice.logprobs.content for top in entry.top_logprobs]
    assert -9999.0 in values
    assert all(-9999.0 <= value <= 0.0 for value in values)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {
                "structured_outputs": {
                    "regex": "(",
                }
            },
            "regex",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"structured_outputs": {}}, "exactly one"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "leave one of them out"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"guided_regex": "a"}, "structured_outputs.regex"),
    ],
)
def test_a_form_that_can_not_be_is_refused(client, fields, told):
    with pytest.raises(openai.BadRequestError, match=told):
        ask(client, extra_body=fields)


def test_a_schema_that_nests_too_deeply_is_refused(client):
    schema = {"type": "object"}
    for _ in range(40):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(openai.BadRequestError, match="deep"):
        structured(client, json=schema)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_form_that_grows_beyond_what_can_be_followed_is_the_requests_own_fault(client, is_streamed):
    rules = [f'r{index}: "b" "c{index}"' for index in range(2100)]  # after an "a" more may come than llguidance follows
    grammar = "\n".join(['start: "a" r', "r: " + " | ".join(f"r{index}" for index in range(2100)), *rules])
    fields = {"max_tokens": 9, "stream": is_streamed, "extra_body": {"structured_outputs": {"grammar": grammar}}}
    with pytest.raises(openai.APIError, match="give a simpler one") as caught:
        for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields):
            assert chunk.choices[0].delta.content in ("", "a", None)
    assert caught.value.type == "invalid_request_error"
    assert is_streamed or caught.value.status_code == 400, "a client would send a 503 again, to no avail"


def test_forms_that_take_long_to_compile_keep_no_other_request_waiting(served, client, monkeypatch):
    from photon_jax.server import chat

    goes_on, compiles = threading.Event(), chat.compile_form

    def compile_slowly(engine, asked):
        if asked.params.structured_outputs is not None:
            assert goes_on.wait(TIMEOUT_S)
        compiles(engine, asked)

    monkeypatch.setattr(chat, "compile_form", compile_slowly)
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        try:
            slow = [pool.submit(structured, client, choice=["yes", f"no{index}"]) for index in range(40)]
            wait_until(lambda: served.state.forms._work_queue.qsize() == 40 - NUM_FORM_THREADS)
            assert ask(client, max_tokens=3).finish_reason == "length"
        finally:
            goes_on.set()
        assert all(each.result().finish_reason == "stop" for each in slow)
