"""/v1/chat/completions by OpenAI's client: every parameter, whole and streamed; answers are those of the LLM alone."""

import asyncio
import json
import math

import openai
import pytest
from helpers.web_server import MODEL

from photon_jax import SamplingParams

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How are you?"}]
GREEDY = {"temperature": 0.0, "max_tokens": 6}


def alone(served, messages=MESSAGES, **params):
    """Returns what the LLM itself answers."""
    ids = served.llm.tokenizer.encode_chat(messages)
    return served.llm.generate(ids, SamplingParams(**params), progress=False)[0]


def create(client, *, messages=MESSAGES, **fields):
    names = ("temperature", "max_tokens", "max_completion_tokens", "top_p", "n", "stop", "seed", "logprobs")
    names += ("top_logprobs", "presence_penalty", "frequency_penalty", "logit_bias", "response_format", "tools")
    names += ("tool_choice", "stream", "stream_options", "user", "metadata")
    known = {name: fields.pop(name) for name in names if name in fields}
    return client.chat.completions.create(model=MODEL, messages=messages, extra_body=fields, **known)


def joined(chunks, index=0):
    """Returns the text and the finish reason of one choice of a stream."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    assert len(reasons) == 1
    assert choices[-1].finish_reason, "something came after the end"
    return "".join(choice.delta.content or "" for choice in choices), reasons[0]


def events_of(served, body, path="/v1/chat/completions"):
    """Returns the events of a stream as they are on the wire."""
    answer = served.post(path, {"stream": True, "messages": MESSAGES, **body})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.text.endswith("\n\n")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_an_answer_is_that_of_the_llm_alone(served, client):
    answer = create(client, **GREEDY)
    output = alone(served, **GREEDY)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", output.outputs[0].text)
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(output.prompt_token_ids), 6)
    assert usage.total_tokens == usage.prompt_tokens + 6


def test_a_stream_has_a_role_then_text_then_an_end_then_the_usage(served, client):
    chunks = list(create(client, **GREEDY, stream=True, stream_options={"include_usage": True}))
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert joined(chunks) == (alone(served, **GREEDY).outputs[0].text, "length")
    assert chunks[-1].choices == []
    usage = create(client, **GREEDY).usage
    assert (chunks[-1].usage.completion_tokens, chunks[-1].usage.prompt_tokens) == (6, usage.prompt_tokens)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_a_stream_without_usage_ends_with_its_last_choice(served):
    events = events_of(served, GREEDY)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in event for event in events)


def test_each_chunk_has_the_usage_so_far_when_asked_for(served):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [event["usage"]["completion_tokens"] for event in events_of(served, {**GREEDY, "stream_options": options})]
    assert counts == sorted(counts)
    assert counts[-1] == 6


@pytest.mark.parametrize("is_streamed", [False, True])
def test_n_samples_are_those_of_the_llm_alone(served, client, is_streamed):
    params = {"n": 3, "seed": 5, "max_tokens": 6, "temperature": 0.8}
    texts = [completion.text for completion in alone(served, **params).outputs]
    answer = create(client, **params, stream=is_streamed)
    if is_streamed:
        chunks = list(answer)
        found = [joined(chunks, index)[0] for index in range(3)]
    else:
        found = [choice.message.content for choice in answer.choices]
    assert found == texts
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.5, "seed": 1},
        {"top_k": 3, "seed": 1},
        {"min_p": 0.2, "seed": 1},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "temperature": 0.0},
        {"repetition_penalty": 5.0, "temperature": 0.0},
        {"allowed_token_ids": [65, 66, 67], "seed": 1},
        {"ignore_eos": True, "min_tokens": 5, "seed": 1},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
    ],
)
def test_sampling_fields_mean_what_they_mean_in_sampling_params(served, client, fields):
    output = alone(served, max_tokens=8, **fields)
    assert create(client, max_tokens=8, **fields).choices[0].message.content == output.outputs[0].text


def test_all_tokens_are_kept_by_a_top_k_of_minus_one(served, client):
    assert create(client, max_tokens=8, seed=1, top_k=-1).choices[0].message.content == (
        alone(served, max_tokens=8, seed=1).outputs[0].text
    )


def test_logit_bias_has_ids_as_strings(client):
    answer = create(client, max_tokens=4, temperature=0.0, logit_bias={"65": 100})
    assert answer.choices[0].message.content == "AAAA"


def test_bad_words_do_not_come(client):
    fields = {"max_tokens": 4, "temperature": 0.0, "allowed_token_ids": [65, 66]}
    first = create(client, **fields).choices[0].message.content[0]
    answer = create(client, **fields, bad_words=[first])
    assert first not in answer.choices[0].message.content


def test_max_completion_tokens_counts_before_max_tokens(client):
    assert create(client, max_completion_tokens=3, max_tokens=9, seed=1).usage.completion_tokens == 3


def test_without_max_tokens_the_rest_of_the_context_is_used(served, client):
    answer = create(client, seed=1, ignore_eos=True)
    assert answer.usage.total_tokens == served.state.engine.max_model_len
    assert answer.choices[0].finish_reason == "length"


def test_the_end_of_the_sequence_ends_an_answer(client):
    answer = create(client, max_tokens=4, logit_bias={"257": 100})
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("stop", ["B", ["x", "B"]])
def test_a_stop_string_ends_an_answer_before_itself(client, stop, is_streamed):
    fields = {"max_tokens": 30, "allowed_token_ids": [65, 66, 67], "seed": 3, "stop": stop}
    if is_streamed:
        *chunks, usage_chunk = list(create(client, **fields, stream=True, stream_options={"include_usage": True}))
        text, reason = joined(chunks)
        last, usage = chunks[-1].choices[0], usage_chunk.usage
    else:
        answer = create(client, **fields)
        last, usage = answer.choices[0], answer.usage
        text, reason = last.message.content, last.finish_reason
    assert "B" not in text
    assert (reason, last.model_extra["stop_reason"]) == ("stop", "B")
    assert usage.completion_tokens == len(text) + 1, "a token for each byte, the stop string's too, and none after it"


def test_the_stop_string_stays_when_it_is_included(client):
    fields = {"max_tokens": 30, "allowed_token_ids": [65, 66, 67], "seed": 3, "stop": "B"}
    assert create(client, **fields, include_stop_str_in_output=True).choices[0].message.content.endswith("B")


def test_a_stop_token_ends_an_answer(client):
    answer = create(client, max_tokens=30, allowed_token_ids=[65, 66, 67], seed=3, stop_token_ids=[66])
    assert answer.choices[0].model_extra["stop_reason"] == 66
    assert "B" not in answer.choices[0].message.content


def test_special_tokens_stay_in_the_text_when_they_are_not_skipped(client):
    fields = {"max_tokens": 2, "ignore_eos": True, "logit_bias": {"256": 100}}
    assert create(client, **fields).choices[0].message.content == ""
    assert create(client, **fields, skip_special_tokens=False).choices[0].message.content == "<bos><bos>"


# log-probabilities


@pytest.mark.parametrize("is_streamed", [False, True])
def test_log_probabilities_have_tokens_bytes_and_the_likeliest(served, client, is_streamed):
    params = {"max_tokens": 8, "seed": 4, "ignore_eos": True}
    completion = alone(served, **params, logprobs=3).outputs[0]
    answer = create(client, **params, logprobs=True, top_logprobs=3, stream=is_streamed)
    if is_streamed:
        entries = [
            e for chunk in answer for choice in chunk.choices if choice.logprobs for e in choice.logprobs.content
        ]
    else:
        entries = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in entries] == [
        list(served.llm.tokenizer.token_bytes(token_id)) for token_id in completion.token_ids
    ]
    assert [entry.token for entry in entries] == [bytes(entry.bytes).decode("utf-8", "replace") for entry in entries]
    assert [entry.logprob for entry in entries] == completion.logprobs.raw.tolist()
    tops = [[top.logprob for top in entry.top_logprobs] for entry in entries]
    assert tops == completion.logprobs.top_logprobs.tolist()
    ids = [[top.bytes for top in entry.top_logprobs] for entry in entries]
    assert ids == [[list(served.llm.tokenizer.token_bytes(i)) for i in row] for row in completion.logprobs.top_ids]


def test_log_probabilities_alone_come_without_the_likeliest(client):
    answer = create(client, **GREEDY, logprobs=True)
    assert [entry.top_logprobs for entry in answer.choices[0].logprobs.content] == [[]] * 6


def test_impossible_tokens_have_the_floor_as_their_log_probability(client):
    fields = {"max_tokens": 3, "allowed_token_ids": [65, 66], "logprobs": True, "top_logprobs": 4}
    answer = create(client, **fields, logprobs_kind="sampling", seed=1)
    for entry in answer.choices[0].logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert values[2:] == [-9999.0, -9999.0]
        assert math.isclose(sum(map(math.exp, values[:2])), 1.0, rel_tol=1e-5)


def test_tokens_are_written_as_ids_when_asked_for(client):
    answer = create(client, max_tokens=2, logit_bias={"65": 100}, logprobs=True, return_tokens_as_token_ids=True)
    assert [entry.token for entry in answer.choices[0].logprobs.content] == ["token_id:65"] * 2


def test_token_ids_come_when_asked_for(served, client):
    completion = alone(served, **GREEDY)
    answer = create(client, **GREEDY, return_token_ids=True)
    assert answer.model_extra["prompt_token_ids"] == list(completion.prompt_token_ids)
    assert answer.choices[0].model_extra["token_ids"] == list(completion.outputs[0].token_ids)
    events = events_of(served, {**GREEDY, "return_token_ids": True})
    assert events[0]["prompt_token_ids"] == list(completion.prompt_token_ids)
    ids = [i for event in events for choice in event["choices"] for i in choice.get("token_ids", ())]
    assert ids == list(completion.outputs[0].token_ids)


def test_prompt_log_probabilities_are_by_token_id_and_null_first(served, client):
    output = alone(served, **GREEDY, prompt_logprobs=2)
    found = create(client, **GREEDY, prompt_logprobs=2).model_extra["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == len(output.prompt_token_ids)
    for place, (token_id, entry) in enumerate(zip(output.prompt_token_ids[1:], found[1:], strict=True)):
        assert entry[str(token_id)]["logprob"] == float(output.prompt_logprobs.logprobs[place])
        best = str(output.prompt_logprobs.top_ids[place][0])
        assert entry[best]["rank"] == 1
        assert entry[best]["decoded_token"] == served.llm.tokenizer.token_bytes(int(best)).decode("utf-8", "replace")


# prompts


def test_content_may_be_a_list_of_parts(client):
    parts = [{"role": "user", "content": [{"type": "text", "text": "How are "}, {"type": "text", "text": "you?"}]}]
    whole = [{"role": "user", "content": "How are you?"}]
    answers = [create(client, messages=messages, **GREEDY) for messages in (parts, whole)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_the_developer_is_the_system(served, client):
    messages = [{"role": "developer", "content": "Be brief."}, MESSAGES[1]]
    assert create(client, messages=messages, **GREEDY).usage.prompt_tokens == len(
        served.llm.tokenizer.encode_chat(MESSAGES)
    )


def test_the_generation_prompt_can_be_left_out(client):
    whole = create(client, **GREEDY).usage.prompt_tokens
    assert create(client, **GREEDY, add_generation_prompt=False).usage.prompt_tokens == whole - len("assistant: ")


def test_the_final_message_is_continued(served, client):
    messages = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    answer = create(client, messages=messages, **GREEDY, continue_final_message=True, return_token_ids=True)
    prompt = served.llm.tokenizer.encode("system: Be brief.\nuser: How are you?\nassistant: I am")
    assert answer.model_extra["prompt_token_ids"] == prompt


def test_prompt_tokens_of_the_cache_are_counted(client):
    messages = [{"role": "user", "content": "a text that fills more than one block of the cache, and then some more"}]
    answers = [create(client, messages=messages, **GREEDY) for _ in range(2)]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert cached[0] == 0
    assert cached[1] >= 64


def test_progress_is_told_while_the_prompt_is_computed(served):
    messages = [{"role": "user", "content": "progress " * 15}]
    body = {"messages": messages, "max_tokens": 2, "return_progress": True}
    events = events_of(served, body)
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert len(told) > 1, "the prompt is longer than a step"
    assert told[-1]["processed"] == told[-1]["total"]
    assert [each["processed"] for each in told] == sorted(each["processed"] for each in told)
    begin = next(index for index, event in enumerate(events) if event["choices"])
    assert all("prompt_progress" not in event for event in events[begin:])


# other doors of the client


def test_the_asynchronous_client_gets_the_same(served):
    async def run():
        async with served.client(openai.AsyncOpenAI) as client:
            answer = await create(client, **GREEDY)
            stream = await create(client, **GREEDY, stream=True)
            return answer.choices[0].message.content, joined([chunk async for chunk in stream])

    text, streamed = asyncio.run(run())
    assert (text, "length") == streamed == (alone(served, **GREEDY).outputs[0].text, "length")


def test_the_stream_helper_of_the_client_puts_an_answer_together(client):
    fields = {"max_tokens": 40, "seed": 3, "stop": "B", "extra_body": {"allowed_token_ids": [65, 66, 67]}}
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, **fields) as stream:
        completion = stream.get_final_completion()
    assert completion.choices[0].finish_reason == "stop"
    assert set(completion.choices[0].message.content) <= {"A", "C"}


def test_many_at_once_get_what_each_gets_alone(served):
    conversations = [[{"role": "user", "content": f"Number {index}"}] for index in range(12)]
    wanted = [alone(served, messages, max_tokens=6, seed=1).outputs[0].text for messages in conversations]

    async def run():
        async with served.client(openai.AsyncOpenAI) as client:
            calls = [create(client, messages=messages, max_tokens=6, seed=1) for messages in conversations]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    assert asyncio.run(run()) == wanted
    assert served.num_held_blocks() == 0
