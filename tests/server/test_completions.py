"""/v1/completions by OpenAI's client: every parameter, whole and streamed; answers are those of the LLM alone."""

import asyncio
import copy
import json

import numpy as np
import openai
import pytest
from helpers.web_server import MODEL

from photon_jax import SamplingParams

GREEDY = {"temperature": 0.0, "max_tokens": 6}
PROMPTS = ["Once upon a time", "The end", "A"]


def alone(served, prompts, **params):
    """Returns what the LLM itself answers, a text for each sample of each prompt."""
    outputs = served.llm.generate(prompts, SamplingParams(**params), progress=False)
    return [completion.text for output in outputs for completion in output.outputs]


def ids_of(served, text):
    return served.llm.tokenizer.encode(text)


def check_strictly(answer, *, is_streamed):
    """Fails unless an answer is one of OpenAI's types to the letter.

    Two nulls are no part of them, though OpenAI's own server sends them: see `CompletionChoice`. There are no others.
    """
    filled = copy.deepcopy(answer)
    for choice in filled["choices"]:
        if is_streamed and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
        logprobs = choice["logprobs"]
        if logprobs is not None and logprobs["token_logprobs"][:1] == [None]:
            assert logprobs["text_offset"][0] == 0 and logprobs["top_logprobs"][0] is None
            logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
    openai.types.Completion.model_validate(filled, strict=True)


def chunks_of(served, body):
    """Returns the chunks of a stream as they are on the wire, each of which is checked."""
    answer = served.post("/v1/completions", {"stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    for chunk in chunks:
        check_strictly(chunk, is_streamed=True)
    return chunks


def choices_of(chunks, index):
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def text_of(chunks, index=0):
    return "".join(choice["text"] for choice in choices_of(chunks, index))


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("is_list", [False, True])
def test_each_form_of_a_prompt_gets_the_answer_of_the_llm_alone(served, client, as_ids, is_list):
    prompts = PROMPTS if is_list else PROMPTS[:1]
    wanted = alone(served, prompts, **GREEDY)
    given = [ids_of(served, text) for text in prompts] if as_ids else prompts
    answer = client.completions.create(model=MODEL, prompt=given if is_list else given[0], **GREEDY)
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == list(range(len(prompts)))
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.prompt_tokens == sum(len(ids_of(served, text)) for text in prompts)
    assert answer.usage.completion_tokens == 6 * len(prompts)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_n_samples_of_each_prompt_come_in_the_order_of_the_prompts(served, client, is_streamed):
    params = {"n": 2, "seed": 3, "max_tokens": 5}
    wanted = alone(served, PROMPTS, **params)
    if is_streamed:
        chunks = chunks_of(served, {"prompt": PROMPTS, **params})
        assert [text_of(chunks, index) for index in range(6)] == wanted
        ends = [choice for index in range(6) for choice in choices_of(chunks, index) if choice["finish_reason"]]
        assert len(ends) == 6
    else:
        answer = client.completions.create(model=MODEL, prompt=PROMPTS, **params)
        assert [choice.text for choice in answer.choices] == wanted


def test_sixteen_tokens_come_when_no_number_is_given(client):
    answer = client.completions.create(model=MODEL, prompt="A", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_no_special_tokens_are_added_when_none_are_wanted(served, client):
    answer = client.completions.create(model=MODEL, prompt="Abc", extra_body={"add_special_tokens": False}, **GREEDY)
    assert answer.usage.prompt_tokens == 3
    assert answer.choices[0].text == alone(served, [list(b"Abc")], **GREEDY)[0]


def test_a_stream_ends_with_the_usage_of_all_prompts(served):
    chunks = chunks_of(served, {"prompt": PROMPTS, **GREEDY, "stream_options": {"include_usage": True}})
    assert [text_of(chunks, index) for index in range(3)] == alone(served, PROMPTS, **GREEDY)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 18
    assert chunks[-1]["usage"]["prompt_tokens"] == sum(len(ids_of(served, text)) for text in PROMPTS)


def test_an_echo_comes_before_the_text(served, client):
    answer = client.completions.create(model=MODEL, prompt="Once", echo=True, **GREEDY)
    assert answer.choices[0].text == "Once" + alone(served, ["Once"], **GREEDY)[0]
    ids = ids_of(served, "Once")
    by_ids = client.completions.create(model=MODEL, prompt=ids, echo=True, **GREEDY)
    assert by_ids.choices[0].text == answer.choices[0].text
    assert text_of(chunks_of(served, {"prompt": "Once", "echo": True, **GREEDY})) == answer.choices[0].text


# log-probabilities


def logprobs_of(served, body):
    """Returns the log-probabilities of a whole answer, which is checked."""
    answer = served.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    check_strictly(answer.json(), is_streamed=False)
    return answer.json()["choices"][0]["logprobs"]


def test_the_two_nulls_reach_openais_client_as_none_when_it_checks_as_it_does_by_default(served):
    with served.client(_strict_response_validation=False) as client:
        chunks = list(client.completions.create(model=MODEL, prompt="Once", stream=True, max_tokens=3))
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        echo = client.completions.create(model=MODEL, prompt="Once", echo=True, logprobs=1, max_tokens=1)
        first, *others = zip(
            echo.choices[0].logprobs.token_logprobs, echo.choices[0].logprobs.top_logprobs, strict=True
        )
        assert first == (None, None) and not any(None in each for each in others)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_every_answer_is_of_openais_types_to_the_letter(served, is_streamed):
    everything = {
        "prompt": ["Once", "The end"],
        "n": 2,
        "max_tokens": 3,
        "logprobs": 2,
        "echo": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    for body in (everything, {"prompt": "Once", "max_tokens": 3}, {"prompt": "Once", "echo": True, "max_tokens": 0}):
        if is_streamed:
            options = {"include_usage": True, "continuous_usage_stats": True}
            chunks = chunks_of(served, {**body, "stream_options": options, "return_progress": True})
            assert len(chunks) > 2 and all(chunk["usage"] for chunk in chunks)
        else:
            logprobs_of(served, body)


def test_log_probabilities_are_those_of_the_llm(served, client):
    params = {"max_tokens": 8, "seed": 2, "ignore_eos": True}
    ids = ids_of(served, "Once")
    completion = served.llm.generate(ids, SamplingParams(**params, logprobs=2), progress=False)[0].outputs[0]
    answer = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=8, seed=2, logprobs=2, extra_body={"ignore_eos": True}
    )
    found = answer.choices[0].logprobs
    assert found.token_logprobs == completion.logprobs.raw.tolist()
    for place, tops in enumerate(found.top_logprobs):
        values = {*completion.logprobs.top_logprobs[place].tolist(), found.token_logprobs[place]}
        assert sorted(tops.values()) == sorted(values)
        assert len(tops) == len({*completion.logprobs.top_ids[place].tolist(), completion.token_ids[place]})


def test_offsets_are_where_a_token_begins_in_the_text(served, client):
    fields = {"max_tokens": 6, "temperature": 0.0, "logprobs": 0, "extra_body": {"allowed_token_ids": [65, 66]}}
    answer = client.completions.create(model=MODEL, prompt="né", **fields, echo=False)
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    echoed = logprobs_of(served, {"prompt": "né!", "echo": True, "logprobs": 0, **GREEDY, "allowed_token_ids": [65]})
    assert echoed["tokens"] == ["<bos>", "n", "\ufffd", "\ufffd", "!", *"AAAAAA"]
    assert echoed["text_offset"] == [0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8]  # BOS adds no text, two bytes one character


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_echo_with_log_probabilities_scores_the_prompt(served, max_tokens, is_streamed):
    ids = ids_of(served, "Once upon a time")
    (score,) = served.llm.score([ids], progress=False)
    body = {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0.0}
    if is_streamed:
        chunks = choices_of(chunks_of(served, body), 0)
        text = "".join(choice["text"] for choice in chunks)
        parts = [choice["logprobs"] for choice in chunks if choice["logprobs"]]
        found = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        assert chunks[-1]["finish_reason"] == "length"
    else:
        choice = served.post("/v1/completions", body).json()["choices"][0]
        text, found = choice["text"], choice["logprobs"]
        assert choice["finish_reason"] == "length"
    assert text.startswith("Once upon a time")
    assert len(found["tokens"]) == len(ids) + max_tokens
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    assert found["token_logprobs"][1 : len(ids)] == score.logprobs.tolist()
    is_greedy = [
        value == max(tops.values())
        for value, tops in zip(found["token_logprobs"][1 : len(ids)], found["top_logprobs"][1 : len(ids)], strict=True)
    ]
    assert is_greedy == score.is_greedy.tolist()


def test_a_score_of_a_prompt_counts_no_output(client):
    result = client.completions.create(model=MODEL, prompt="Once", echo=True, max_tokens=0)
    assert (result.choices[0].text, result.usage.completion_tokens) == ("Once", 0)


def test_tokens_with_equal_texts_do_not_fall_together(served):
    body = {"prompt": "A", "max_tokens": 4, "logprobs": 20, "seed": 1}
    for tops in logprobs_of(served, body)["top_logprobs"]:
        assert 20 <= len(tops) <= 21, "one of the tokens has taken the place of another"
    for tops in logprobs_of(served, {**body, "return_tokens_as_token_ids": True})["top_logprobs"]:
        assert all(key.startswith("token_id:") for key in tops)


def test_token_ids_and_prompt_log_probabilities_come_with_each_choice(served, client):
    ids = [ids_of(served, text) for text in PROMPTS]
    body = {"return_token_ids": True, "prompt_logprobs": 1}
    answer = client.completions.create(model=MODEL, prompt=ids, extra_body=body, **GREEDY)
    scores = served.llm.score(ids, progress=False)
    for choice, prompt_ids, score in zip(answer.choices, ids, scores, strict=True):
        extra = choice.model_extra
        assert extra["prompt_token_ids"] == prompt_ids
        assert bytes(extra["token_ids"]).decode("utf-8", "replace") == choice.text
        own = [entry[str(i)]["logprob"] for i, entry in zip(prompt_ids[1:], extra["prompt_logprobs"][1:], strict=True)]
        assert np.array_equal(np.float32(own), score.logprobs)


def test_the_asynchronous_client_gets_the_same(served):
    async def run():
        async with served.client(openai.AsyncOpenAI) as client:
            answer = await client.completions.create(model=MODEL, prompt=PROMPTS, **GREEDY)
            return [choice.text for choice in answer.choices]

    assert asyncio.run(run()) == alone(served, PROMPTS, **GREEDY)


def test_progress_of_each_prompt_is_told(served):
    chunks = chunks_of(served, {"prompt": ["x" * 70, "y" * 70], "max_tokens": 1, "return_progress": True})
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert [each["processed"] for each in told].count(71) == 2
