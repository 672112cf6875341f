"""Every failure has OpenAI's form and its status, in bounded length; the client raises the error that fits."""

import json
import logging

import openai
import pytest
from helpers.web_server import MODEL, serving, tiny_llm, wait_until

from photon_jax.errors import CapacityError, EngineDeadError
from photon_jax.server.errors import AbortedError, error_event, field_of, photon_error_response

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def error_of(answer, status=400):
    """Returns the error of an answer, of whose form every one is."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert len(answer.content) < 10_000
    return body["error"]


def has_logged(caplog, text):
    return any(record.exc_info and text in str(record.exc_info[1]) for record in caplog.records)


def chat(served, **fields):
    return served.post(CHAT, {"messages": MESSAGES, "max_tokens": 2, **fields})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "missing|JSON object"),
        (b"{", "not valid JSON"),
        (b'"text"', "JSON object"),
        (b"[]", "JSON object"),
        (b'{"messages": "\xff"}', "UTF-8"),
        (b"[" * 100_000, "nests"),
        (b'{"messages": [], "seed": ' + b"9" * 5000 + b"}", "more than 64 characters"),
    ],
)
def test_what_is_no_json_object_is_refused(served, content, told):
    answer = served.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert any(word in error["message"] for word in told.split("|"))


def test_a_body_of_another_type_is_refused_with_the_type_to_send(served):
    content = json.dumps({"messages": MESSAGES})
    answer = served.post(CHAT, content=content, headers={"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"messages": None}, "messages", "valid list"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"content": "Hi"}]}, "messages", "messages.0.role is missing"),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "surrogate"),
        ({"temperature": "hot"}, "temperature", 'got "hot"'),
        ({"temperature": -1}, "temperature", "[0.0"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "got 0"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be"),
        ({"max_completion_tokens": 3, "min_tokens": 5}, "min_tokens", "(5) is above"),
        ({"n": 0}, "n", "got 0"),
        ({"n": 10**6}, "n", "1000000"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be an integer in [0, 20]"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"stop": ["x"] * 65}, "stop", "64"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "'a'"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "999"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "got '999"),
        ({"logit_bias": {"\uff11": 1}}, "logit_bias", "got '\uff11'"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "301"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt", "=False"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "self"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs", "xml"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "json"),
        ({"response_format": schema_format({"type": "nothing"})}, "response_format", "json"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            "combined",
        ),
        ({"allowed_token_ids": [65], "bad_words": ["A"]}, "bad_words", "allow more"),
        ({"bad_words": ["a long sentence that is no word"]}, "bad_words", "tokens long"),
        ({"stop_token_ids": list(range(40))}, "stop_token_ids", "stop ids"),
        ({"stop_token_ids": [999]}, "stop_token_ids", "999"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "no format"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "name is missing"),
        ({"tool_choice": "perhaps"}, "tool_choice", "required"),
    ],
)
def test_a_wrong_field_is_named(served, fields, param, told):
    content = json.dumps({"messages": MESSAGES, "max_tokens": 2, **fields})  # httpx itself sends no lone surrogate
    error = error_of(served.post(CHAT, content=content, headers={"Content-Type": "application/json"}))
    assert told in error["message"]
    assert error["param"] == param
    assert error["code"] is None


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"prompt": None}, "prompt", ""),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "is empty"),
        ({"prompt": [1, "a"]}, "prompt", ""),
        ({"prompt": [999]}, "prompt", "the prompt holds 999"),
        ({"prompt": [[1], [999]]}, "prompt", "prompt 1"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "got -1"),
        ({"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens", "got -1"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": "a", "best_of": 3}, "best_of", "use n"),
        ({"prompt": ["a"] * 100, "n": 100}, "n", "1024"),
        ({"prompt": [[1], []]}, "prompt", "prompt 1"),
        ({"prompt": ["a", "b"], "logit_bias": {"999": 1}}, "logit_bias", "999"),
        ({"prompt": ["a", "b"], "stream": True, "logit_bias": {"999": 1}}, "logit_bias", "999"),
        ({"prompt": "\ud800"}, "prompt", "surrogate"),
        ({"prompt": "a", "echo": True, "logprobs": 21}, "logprobs", "logprobs must be"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "[0, 20]"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 1}, "prompt_logprobs", "echo"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(served, fields, param, told):
    content = json.dumps({"max_tokens": 2, **fields})
    error = error_of(served.post("/v1/completions", content=content, headers={"Content-Type": "application/json"}))
    assert told in error["message"] and "request" not in error["message"], "no client knows the engine's names"
    assert error["param"] == param


@pytest.mark.parametrize("fields", [{"echo": True}, {"echo": True, "stream": True}, {"prompt_logprobs": 1}])
def test_an_id_of_the_models_padding_is_refused_before_the_work_where_its_text_is_asked_for(
    served, monkeypatch, fields
):
    monkeypatch.setattr(served.llm.tokenizer, "vocab_size", 200)
    body = {"prompt": [65, 201], "max_tokens": 1}
    before = served.llm.metrics().num_tokens
    error = error_of(served.post("/v1/completions", body | fields))
    assert "the prompt holds 201, which has no text to give back; the ids 0 to 199 have one" in error["message"]
    assert (error["param"], served.llm.metrics().num_tokens) == ("prompt", before)
    assert served.post("/v1/completions", body | {"logit_bias": {"65": 100}}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/api/chat", {"message": "Hi", "temperature": -1}, "temperature"),
        ("/api/chat", {"message": "x" * 1_000}, "message"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        ("/v1/completions", {"prompt": ["a", "x" * 300]}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 300}, "prompt"),
    ],
)
def test_a_wrong_field_of_other_doors_is_named(served, path, body, param):
    assert error_of(served.post(path, body))["param"] == param


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("stop must be at most 64 non-empty strings, got ['top_p']", "stop"),
        ("prompt 3: allowed_token_ids holds 999", "allowed_token_ids"),
        ("prompt 3: something else", "prompt"),
        ("of allowed_token_ids only stop ids are left", "allowed_token_ids"),
        ("the parameters of 'max_tokens' must be a JSON schema", None),
        ("messages[0].content must be a string", "messages"),
        ("json is nested too deeply", None),
    ],
)
def test_the_field_of_a_message_is_the_one_it_names_first_and_never_the_callers_own_words(message, field):
    assert field_of(message) == field


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 2_000_000}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "x" * 2_000_000]}, "prompt"),
        ("/v1/chat/completions", {"messages": [*MESSAGES, {"role": "user", "content": "x" * 2_000_000}]}, "messages"),
        ("/api/chat", {"message": "x" * 2_000_000}, "message"),
    ],
)
def test_a_text_that_can_not_fit_is_refused_before_it_is_tokenized(served, monkeypatch, path, body, param):
    encoded = []
    monkeypatch.setattr(type(served.llm.tokenizer), "encode", lambda self, text, **_: encoded.append(len(text)) or [1])
    error = error_of(served.post(path, body))
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "256 tokens" in error["message"] and not [size for size in encoded if size > 1_000]


def test_a_field_that_would_change_the_answer_is_refused_unless_it_is_neutral(served):
    error = error_of(chat(served, web_search_options={}))
    assert (error["param"], error["code"]) == ("web_search_options", None)
    assert chat(served, modalities=["text"], audio=None, store=False, metadata={}).status_code == 200


def test_a_field_that_is_ignored_is_logged_once_with_the_reason(served, caplog):
    with caplog.at_level(logging.WARNING):
        for value in (0, 1, 1):
            assert chat(served, surprise=1, priority=value, reasoning_effort="low").status_code == 200
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "the request field 'surprise' is unknown and ignored; this is said once",
        "the request field 'reasoning_effort' has no effect: chat_template_kwargs holds what the model's template "
        "knows, such as enable_thinking; this is said once",
        "the request field 'priority' has no effect: requests are served in the order of their arrival; "
        "this is said once",
    ]


def test_a_long_conversation_is_told_with_both_numbers(served, client):
    error = error_of(chat(served, messages=[{"role": "user", "content": "x" * 230}], max_tokens=50))
    assert error["code"] == "context_length_exceeded"
    assert "256 tokens" in error["message"]
    assert "299" in error["message"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x" * 250, max_tokens=50)
    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_is_not_found(served, client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    for path in ("/v1/completions", "/tokenize", "/detokenize"):
        body = {"model": "other", "prompt": "a", "tokens": []}
        assert error_of(served.post(path, body), 404)["code"] == "model_not_found"


def test_unknown_paths_and_methods_have_the_form_too(served):
    error = error_of(served.get("/v1/nothing"), 404)
    assert (error["code"], error["message"]) == (
        "not_found", "this server has no GET /v1/nothing; /openapi.json lists what it has",
    )  # fmt: skip
    assert len(error_of(served.get(f"/{'x' * 4000}"), 404)["message"]) < 300
    answer = served.get(CHAT)
    error = error_of(answer, 405)
    assert error["code"] == "method_not_allowed" and f"no GET {CHAT};" in error["message"]
    assert answer.headers["allow"] == "POST"


def test_many_and_long_wrong_values_make_a_short_answer(served):
    messages = [{"role": 1, "content": "y" * 1_000}] * 5_000
    error = error_of(chat(served, messages=messages, temperature="z" * 100_000))
    assert "more" in error["message"]
    error = error_of(chat(served, **{"model": "m" * 100_000}), 404)
    assert len(error["message"]) < 500


@pytest.mark.parametrize("phase", ["loading", "draining"])
def test_a_server_that_is_not_ready_says_when_to_come_back(served, phase):
    served.state.phase = phase
    try:
        answer = chat(served)
    finally:
        served.state.phase = "ready"
    assert error_of(answer, 503)["code"] == "overloaded"
    assert int(answer.headers["retry-after"]) > 0


def test_a_full_queue_refuses_and_takes_again_later():
    with serving(tiny_llm(), max_queue=1) as served:
        client = served.client()
        body = {"model": MODEL, "prompt": ["a"] * 6, "max_tokens": 2}
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**body)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.InternalServerError):
            client.completions.create(**body, stream=True)
        wait_until(lambda: served.num_held_blocks() == 0)
        assert len(client.completions.create(**{**body, "prompt": ["a"] * 5}).choices) == 5


def test_a_client_is_told_whether_to_try_again():
    busy = photon_error_response(CapacityError("full"))
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
    cut = photon_error_response(AbortedError("the server ends"))
    assert (cut.status_code, json.loads(cut.body)["error"]["code"]) == (503, "aborted")
    dead = photon_error_response(EngineDeadError("it failed"))
    assert (dead.status_code, dead.headers["x-should-retry"]) == (503, "false")


def test_an_unforeseen_fault_is_logged_and_not_told(served, monkeypatch, caplog):
    monkeypatch.setattr(type(served.llm.tokenizer), "encode", lambda *_, **__: 1 / 0)
    answer = served.post("/v1/completions", {"prompt": "a"})
    error = error_of(answer, 500)
    assert (error["type"], "division" in error["message"]) == ("server_error", False)
    wait_until(lambda: has_logged(caplog, "division"))


@pytest.mark.parametrize(
    ("error", "level"), [(AbortedError("it ends"), "INFO"), (EngineDeadError("it failed"), "ERROR")]
)
def test_an_end_that_was_told_before_is_one_line_in_the_log(served, monkeypatch, caplog, error, level):
    from photon_jax.server import chat

    def fail(*_):
        raise error

    monkeypatch.setattr(chat, "compile_form", fail)
    with caplog.at_level(logging.INFO, "photon_jax"):
        answer = served.post(CHAT, {"messages": MESSAGES})
    assert answer.status_code == 503
    (record,) = [record for record in caplog.records if str(error) in record.getMessage()]
    assert (record.levelname, record.exc_info, "\n" in record.getMessage()) == (level, None, False)


def test_a_fault_in_a_stream_is_its_last_event(served, monkeypatch, caplog):
    from photon_jax.server import chat_answer

    monkeypatch.setattr(chat_answer, "make_progress", lambda _: 1 / 0)
    lines = chat(served, stream=True, return_progress=True).text.strip().split("\n\n")
    assert "division" not in lines[-1]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    assert has_logged(caplog, "division")
    wait_until(lambda: served.num_held_blocks() == 0)


def test_the_client_raises_on_an_error_in_a_stream(served, client, monkeypatch):
    from photon_jax.server import chat_answer

    def refuse(_):
        raise AbortedError("the server is about to end")

    monkeypatch.setattr(chat_answer, "make_progress", refuse)
    with pytest.raises(openai.APIError, match="about to end"):
        list(
            client.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True, extra_body={"return_progress": True}
            )
        )


def test_the_cause_of_a_known_error_is_told_in_a_stream():
    assert error_event(EngineDeadError("it failed"))["error"]["message"] == "it failed"
