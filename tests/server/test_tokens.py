"""/v1/models, /tokenize, /detokenize and /tokenizer_info."""

import openai
import pytest
from helpers.web_server import MODEL


def test_the_one_model_is_listed_and_found_by_its_name(served, client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert model.model_extra["max_model_len"] == served.state.engine.max_model_len
    assert client.models.retrieve(MODEL) == model  # though its name holds a slash
    with pytest.raises(openai.NotFoundError, match="other"):
        client.models.retrieve("other")


def test_models_are_told_while_the_model_loads(served):
    engine, served.state.engine = served.state.engine, None
    try:
        answer = served.get("/v1/models").json()
    finally:
        served.state.engine = engine
    assert "max_model_len" not in answer["data"][0]


def test_a_prompt_is_tokenized_with_what_the_tokenizer_adds_or_without(served):
    answer = served.post("/tokenize", {"prompt": "né"}).json()
    max_len = served.state.engine.max_model_len
    assert answer == {"count": 4, "max_model_len": max_len, "tokens": [256, 110, 195, 169]}
    bare = {"model": MODEL, "prompt": "né", "add_special_tokens": False, "return_token_strs": True}
    assert served.post("/tokenize", bare).json() == {
        "count": 3,
        "max_model_len": max_len,
        "tokens": [110, 195, 169],
        "token_strs": ["n", "\ufffd", "\ufffd"],
    }


def test_a_conversation_is_tokenized_as_a_chat_would_be(served, client):
    messages = [{"role": "user", "content": "Hello"}]
    tokens = served.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert tokens == served.llm.tokenizer.encode_chat(messages)
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert chat.model_extra["prompt_token_ids"] == tokens
    shorter = served.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert len(shorter) == len(tokens) - len("assistant: ")


def test_a_prompt_and_messages_do_not_go_together(served):
    for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}):
        answer = served.post("/tokenize", body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "give either prompt or messages")


def test_ids_become_their_text_with_special_tokens(served):
    assert served.post("/detokenize", {"tokens": [256, 110, 195, 169, 257]}).json() == {"prompt": "<bos>né<eos>"}
    answer = served.post("/detokenize", {"tokens": [258]})
    assert answer.status_code == 400
    assert "258" in answer.json()["error"]["message"]


def test_the_tokenizer_tells_its_special_tokens_and_its_template(served):
    answer = served.get("/tokenizer_info").json()
    assert (answer["bos_token"], answer["eos_token"], answer["pad_token"]) == ("<bos>", "<eos>", None)
    assert answer["add_bos_token"] is True
    assert answer["chat_template"] == served.llm.tokenizer.chat_template
    assert answer["model_max_length"] == served.state.engine.max_model_len
