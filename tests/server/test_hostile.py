"""Requests that mean harm, or are broken: each gets its error, and a well-behaved one beside them never notices."""

import json
import random
import socket
import threading
import time

import httpx
import pytest
from helpers.crowd import ask, undisturbed
from helpers.web_process import completion, error_of, fake_server, read_all, status_of

NUM_FUZZED = 1000
DOORS = {  # each with a body that is served
    "/v1/completions": {"prompt": [1, 2], "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "!"}], "max_tokens": 5},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2]},
    "/api/chat": {"message": "!", "max_tokens": 5},
}
GOOD = completion(prompt=(4, 5, 6), max_tokens=25)
NASTY = (
    *(None, True, 0, -1, 1, 1.5, 10**30, -(10**30), 1e308, "", "x", "\x00", "\ud800", "9" * 300, [], {}, [[]], [{}]),
    *([None], [1, 2, 3], [-1], [10**30], ["a", 1], {"a": 1}, {"type": "json_schema"}, {"type": "text"}, "🙂" * 50),
    *([[1], [2]], {"1": 5}, {"1": "x"}, {"-1": 1}, [["a"]], [{"role": "user"}], [{"role": "user", "content": "x"}]),
)
FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("n", "stop", "seed", "stream", "stream_options", "logprobs", "top_logprobs", "presence_penalty", "logit_bias"),
    *("frequency_penalty", "repetition_penalty", "response_format", "tools", "tool_choice", "echo", "suffix", "tokens"),
    *("ignore_eos", "min_tokens", "stop_token_ids", "prompt_logprobs", "structured_outputs", "bad_words", "message"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "allowed_token_ids", "unheard_of"),
)


@pytest.fixture(scope="module")
def server():
    settings = {"client_timeout_s": 2.0, "max_body_bytes": 1_000_000}
    with fake_server(settings=settings, step_s=0.0, scheduler={"max_model_len": 40}) as server:
        yield server.wait_until_ready()


def fuzzed(rng):
    """Returns a door and a body: a good one with nasty values in it, or with its bytes damaged, or both."""
    door = rng.choice(list(DOORS))
    body = dict(DOORS[door])
    for _ in range(rng.randrange(4)):
        body[rng.choice(FIELDS)] = rng.choice(NASTY)
    content = bytearray(json.dumps(body).encode())
    if rng.random() < 0.4:
        for _ in range(rng.randrange(1, 6)):
            place = rng.randrange(len(content))
            content[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
    return door, bytes(content[: rng.randrange(len(content))] if rng.random() < 0.1 else content)


def test_a_thousand_fuzzed_bodies_are_served_or_refused_by_name(server):
    rng = random.Random(1)
    statuses = {door: set() for door in DOORS}
    with undisturbed(server.url, GOOD), httpx.Client(base_url=server.url, timeout=120) as client:
        for _ in range(NUM_FUZZED):
            door, content = fuzzed(rng)
            response = client.post(door, content=content, headers={"content-type": "application/json"})
            statuses[door].add(response.status_code)
            assert response.status_code in (200, 400, 404), (door, content, response.text)
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
                assert len(response.content) < 4_000
    assert all(seen >= {200, 400} for seen in statuses.values())


def test_a_body_of_a_hundred_megabytes_is_refused(server):
    def parts():
        for _ in range(100):
            yield b"x" * 10**6

    with undisturbed(server.url, GOOD):
        for content in (b"x" * 10**8, parts()):
            response = httpx.post(
                f"{server.url}/v1/completions",
                content=content,
                headers={"content-type": "application/json"},
                timeout=120,
            )
            assert response.status_code == 413 and response.json()["error"]["type"] == "invalid_request_error"


def test_a_flood_of_headers_is_refused(server):
    floods = (
        b"".join(b"x-%d: y\r\n" % number for number in range(300)) + b"\r\n",
        b"".join(b"x-%d: %s\r\n" % (number, b"y" * 500) for number in range(10_000)),
        b"x: " + b"y" * 2_000_000,
    )
    with undisturbed(server.url, GOOD):
        for flood in floods:
            connection = server.raw(b"GET /version HTTP/1.1\r\nhost: x\r\n")
            try:
                connection.sendall(flood)
                answer = read_all(connection)
            except ConnectionError:  # it was closed before all of it was sent
                connection.close()
                continue
            assert status_of(answer) in (400, 431) and error_of(answer)


def test_many_that_send_byte_by_byte_are_cut_off_while_others_are_served(server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n"
    answers = []

    def dribble(number):
        data = head if number % 2 else b"POST /v1/completions HTTP/1.1\r\nx: "
        with server.raw(data) as connection:
            connection.settimeout(0.2)
            while True:
                try:
                    connection.sendall(b" ")
                    answers.append(connection.recv(65536))
                except TimeoutError:
                    continue
                except ConnectionError as error:
                    answers.append(error)
                return

    with undisturbed(server.url, GOOD):
        threads = [threading.Thread(target=dribble, args=(number,)) for number in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    told = [answer for answer in answers if isinstance(answer, bytes)]
    assert len(answers) == 60 and {status_of(answer) for answer in told} == {408}


def test_hundreds_of_idle_connections_are_let_go(server):
    with undisturbed(server.url, GOOD):
        idle = [server.raw() for _ in range(300)]
        assert ask(server.url, GOOD)
        assert [read_all(connection) for connection in idle] == [b""] * 300


def test_memory_is_bounded_whatever_the_bodies_hold(server):
    def resident():
        with open(f"/proc/{server.process.pid}/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    bodies = (
        b'{"prompt":' + b"[" * 400_000 + b"]" * 400_000 + b"}",
        b'{"messages":[' + b"{}," * 300_000 + b"{}]}",
        b'{"messages":[' + b'"a",' * 240_000 + b'"a"]}',
        b'{"prompt":"' + b"\\u0041" * 160_000 + b'"}',
        b'{"prompt":[' + b"7," * 490_000 + b"7]}",
        b'{"stop":["' + b"a" * 900_000 + b'"],"prompt":[1]}',
    )
    with httpx.Client(base_url=server.url, timeout=120) as client:

        def send_all():
            for body in bodies:
                answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
                assert answer.status_code in (200, 400), answer.text[:500]
                assert len(answer.content) < 4_000

        with undisturbed(server.url, GOOD):
            send_all()
            before = resident()
            for _ in range(3):
                send_all()
            assert resident() - before < 50 * 2**20


def test_pipelined_requests_are_answered_in_their_order(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * 50)
        answer, deadline = b"", time.monotonic() + 60
        while answer.count(b'"version"') < 50:
            assert time.monotonic() < deadline
            answer += connection.recv(65536)
    assert answer.count(b"HTTP/1.1 200 OK") == 50
