"""Online runs: requests leave at their times, and latencies are those of the deliveries."""

import asyncio
import json
import math

import pytest

from photon_jax.bench.online import Timeline, describe_online, run_online, timelines_s, tokens_so_far, url_sender
from photon_jax.bench.workloads import Workload
from photon_jax.client.async_llm import AsyncLLM
from photon_jax.errors import ConfigError, EngineDeadError

WORKLOAD = Workload(prompts=((1, 2), (3,), (4, 5, 6)), output_lens=(2, 3, 1))


def test_latencies_follow_from_the_deliveries():
    first = Timeline(sent_at=10.0, deliveries=[(10.5, 1), (10.7, 2), (10.8, 1)])
    second = Timeline(sent_at=11.0, deliveries=[(12.0, 4)])
    record = describe_online([first, second, Timeline(sent_at=10.2)], rate=3.0)
    assert (record["rate"], record["num_served"], record["total_s"]) == (3.0, 2, 2.0)
    assert record["output_tokens_per_s"] == 4.0 and record["requests_per_s"] == 1.0
    assert record["ttft_s_quantiles"]["p50"] == 0.75 and record["ttft_s_quantiles"]["p100"] == 1.0
    assert set(record["itl_s_quantiles"].values()) == {0.1}  # two tokens in 0.2 s, one in 0.1
    assert record["delivery_s_quantiles"]["p100"] == 0.2
    assert record["total_s_quantiles"]["p50"] == 0.9
    assert timelines_s([first, second]) == 2.0


def test_an_engine_that_may_compile_nothing_later_is_served_after_a_full_warmup_alone(llm):
    assert llm.started.config.strict_compile and llm.started.config.warmup == "lazy"
    with pytest.raises(ConfigError, match='strict_compile needs warmup="full" to serve requests'):
        AsyncLLM(llm)


def test_no_token_at_all_is_an_error():
    with pytest.raises(EngineDeadError, match="no request got a token"):
        describe_online([Timeline(sent_at=0.0)], rate=1.0)


def test_each_request_is_sent_once_and_its_deliveries_are_timed_in_order():
    sent = []

    async def send(prompt, output_len):
        sent.append((prompt, output_len))
        yield 0  # progress of the prompt is no delivery
        for _ in range(output_len):
            await asyncio.sleep(0)
            yield 1

    timelines = asyncio.run(run_online(send, WORKLOAD, rate=1000.0))
    assert sorted(sent) == sorted(zip(WORKLOAD.prompts, WORKLOAD.output_lens, strict=True))
    assert [len(each.deliveries) for each in timelines] == [2, 3, 1]
    for each in timelines:
        times = [each.sent_at, *(time for time, _ in each.deliveries)]
        assert times == sorted(times)


def test_no_more_requests_are_on_their_way_than_allowed_and_each_counts_from_when_it_was_sent():
    running, most = 0, []

    async def send(prompt, output_len):
        nonlocal running
        running += 1
        most.append(running)
        for _ in range(output_len):
            await asyncio.sleep(0.001)
            yield 1
        running -= 1

    timelines = asyncio.run(run_online(send, WORKLOAD, rate=math.inf, max_concurrency=1))
    assert most == [1, 1, 1]
    sent = sorted(each.sent_at for each in timelines)
    ended = sorted(each.deliveries[-1][0] for each in timelines)
    assert all(end <= later for end, later in zip(ended, sent[1:], strict=False))


async def answer(reader, writer, status, asked):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length"))
    asked.append((head.split()[1], json.loads(await reader.readexactly(length))))
    events = [{"choices": [{"delta": {"role": "assistant"}}]}]
    events += [{"choices": [{"delta": {"content": "word"}}]}] * asked[-1][1]["max_tokens"] + [{"choices": []}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    writer.write(f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    await writer.drain()
    writer.close()


async def ask_a_server(status, asked):
    server = await asyncio.start_server(lambda reader, writer: answer(reader, writer, status, asked), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with url_sender(f"http://127.0.0.1:{port}/v1/", "name") as send:
            return await run_online(send, WORKLOAD, rate=1000.0)


def test_a_server_is_asked_for_a_streamed_chat_of_as_many_words_and_each_text_counts():
    asked = []
    timelines = asyncio.run(ask_a_server(200, asked))
    assert [len(each.deliveries) for each in timelines] == [2, 3, 1]
    assert {path for path, _ in asked} == {"/v1/chat/completions"}
    bodies = [body for _, body in asked]
    assert sorted(len(body["messages"][0]["content"].split()) for body in bodies) == [1, 2, 3]
    assert all(body["stream"] and body["model"] == "name" and body["ignore_eos"] for body in bodies)
    assert all(body["stream_options"]["continuous_usage_stats"] for body in bodies)


def test_an_event_brings_as_many_tokens_as_its_usage_tells_else_one_for_its_text():
    deltas = ({"role": "assistant"}, {"content": "a b"}, {}, {"content": "c"})
    counted = []
    for so_far in ([0, 2, 3, 7], [None] * 4):
        num_tokens, brought = 0, []
        for delta, count in zip(deltas, so_far, strict=True):
            usage = None if count is None else {"completion_tokens": count}
            now = tokens_so_far({"choices": [{"delta": delta}], "usage": usage}, num_tokens)
            brought.append(now - num_tokens)
            num_tokens = now
        # the usage of the whole, without a choice, is no delivery
        assert tokens_so_far({"choices": [], "usage": {"completion_tokens": 9}}, num_tokens) == num_tokens
        counted.append(brought)
    assert counted == [[0, 2, 1, 4], [0, 1, 0, 1]]


def test_requests_that_come_at_once_have_no_rate():
    async def send(prompt, output_len):
        yield 1

    record = describe_online(asyncio.run(run_online(send, WORKLOAD, rate=math.inf)), rate=math.inf)
    assert (record["rate"], record["num_served"]) == (None, 3)
    assert json.dumps(record, allow_nan=False)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/v1", "127.0.0.1:1", "http://127.0.0.1:x/v1", "ftp://127.0.0.1:1/v1"]
)
def test_an_address_where_nothing_answers_is_an_error_that_names_it(url):
    async def ask():
        async with url_sender(url, "name") as send:
            await run_online(send, WORKLOAD, rate=math.inf)

    with pytest.raises(ConfigError, match=r"can't be measured: \S") as caught:
        asyncio.run(ask())
    assert f"--url={url} " in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_stream_of_events_is_an_error_that_names_the_address():
    async def ask():
        async def broken(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: {no JSON\n\n")
            writer.close()

        async with await asyncio.start_server(broken, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with url_sender(f"http://127.0.0.1:{port}/v1", "name") as send:
                await run_online(send, WORKLOAD, rate=math.inf)

    with pytest.raises(ConfigError, match=r"--url=http://127.0.0.1:\d+/v1 can't be measured"):
        asyncio.run(ask())


def test_a_server_that_refuses_is_an_error_with_its_answer():
    with pytest.raises(ConfigError, match="answered 500: data: "):
        asyncio.run(ask_a_server(500, []))
