"""Many clients at once, of whom some read slowly and some leave."""

import json
import random
import resource
import signal
import socket
import threading
import time

import httpx
import pytest
from helpers.crowd import ask, stream_all, text_and_reason, undisturbed
from helpers.web_process import completion, events_of, fake_server
from helpers.web_server import serving, tiny_llm

NUM_STREAMS = 200
NUM_DISCONNECTS = 1000
MAX_GROWTH = 200 * 2**20  # bytes


def wait_until_idle(url):
    """Waits until nothing runs or waits, and checks that all blocks are free."""
    while (stats := httpx.get(f"{url}/api/stats", timeout=60).json())["num_running"] or stats["num_waiting"]:
        time.sleep(0.02)
    assert stats["num_free_blocks"] == stats["num_blocks"]


def peak_bytes():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_two_hundred_streams_at_once_are_each_as_alone_in_bounded_memory():
    bodies = [
        completion(
            prompt=[(7 * k + i) % 250 for i in range(3 + k % 40)],
            max_tokens=4 + k % 12,
            temperature=k % 3 / 2,
            seed=k,
            ignore_eos=True,
        )
        for k in range(40)
    ]
    with serving(tiny_llm()) as served:
        alone = [ask(served.url, body) for body in bodies]
        before = peak_bytes()
        together = stream_all(served.url, bodies * (NUM_STREAMS // len(bodies)))
        assert together == alone * (NUM_STREAMS // len(bodies))
        assert peak_bytes() - before < MAX_GROWTH
        wait_until_idle(served.url)


@pytest.fixture(scope="module")
def server():
    with fake_server(step_s=0.002, send_buffer=4096) as server:
        yield server.wait_until_ready()


def send_slowly(server, body):
    """Returns a connection that asked for a stream, and takes almost nothing of it ahead of its reader."""
    content = json.dumps(body | {"stream": True}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(120)
    connection.connect(("127.0.0.1", server.port))
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def test_slow_readers_stall_nobody_and_miss_nothing(server):
    long = completion(prompt=(3, 1), max_tokens=300, logprobs=5)  # 200 kB, of which 72 fit in buffers
    quick = [completion(prompt=(5, k), max_tokens=20) for k in range(30)]
    expected, expected_quick = ask(server.url, long), [ask(server.url, body) for body in quick]
    slow = [send_slowly(server, long) for _ in range(4)]
    try:
        assert stream_all(server.url, quick) == expected_quick
        wait_until_idle(server.url)  # the engine has finished what nobody has read
        for connection in slow:
            raw = b""
            while part := connection.recv(65536):
                raw += part
            lines = [line for line in raw.decode().splitlines() if line.startswith("data:")]
            events, is_done = events_of(lines)
            assert is_done and text_and_reason(events) == expected
    finally:
        for connection in slow:
            connection.close()


def leave_at_random(server, rng):
    """Asks for something and leaves: in the middle of the request, before its answer, or after some of it."""
    body = completion(
        prompt=[rng.randrange(101) for _ in range(rng.randrange(1, 60))],
        max_tokens=rng.randrange(1, 200),
        stream=rng.random() < 0.7,
        n=rng.choice((1, 1, 2)),
    )
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    data = head.encode() + b"\r\n\r\n" + content
    if rng.random() < 0.2:
        data = data[: rng.randrange(len(data))]
    with server.raw(data) as connection:
        if rng.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close by a reset
        if rng.random() < 0.5:
            time.sleep(rng.random() / 50)
        connection.settimeout(rng.random() / 20 + 0.001)
        try:
            for _ in range(rng.randrange(4)):
                connection.recv(rng.randrange(1, 2000))
        except TimeoutError:
            return


def test_after_many_disconnects_at_random_moments_all_blocks_are_back(server):
    def leave(seed):
        rng = random.Random(seed)
        for _ in range(NUM_DISCONNECTS // 5):
            leave_at_random(server, rng)

    with undisturbed(server.url, completion(prompt=(9, 9, 9), max_tokens=30)):
        threads = [threading.Thread(target=leave, args=(seed,)) for seed in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    wait_until_idle(server.url)


def test_an_end_under_load_cuts_no_stream_off_without_a_reason():
    outcomes = []

    def read(server, number):
        body = completion(prompt=(1, number), max_tokens=20 + 10 * number, stream=number % 4 > 0)
        try:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
                if response.headers["content-type"].startswith("text/event-stream"):
                    events, is_done = events_of(response.iter_lines())
                    outcomes.append(
                        "error" if "error" in events[-1] else text_and_reason(events)[1] if is_done else None
                    )
                else:
                    answer = json.loads(response.read())
                    outcomes.append("error" if "error" in answer else answer["choices"][0]["finish_reason"])
        except httpx.HTTPError as error:
            outcomes.append(error)

    with fake_server(step_s=0.01, settings={"drain_s": 0.5}) as server:
        server.wait_until_ready()
        threads = [threading.Thread(target=read, args=(server, number)) for number in range(40)]
        for thread in threads:
            thread.start()
        while httpx.get(f"{server.url}/api/stats").json()["num_waiting"] < 20:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert server.exit_code() == 0
    assert set(outcomes) <= {"length", "abort", "error"}, outcomes
    assert len(outcomes) == 40 and "length" in outcomes and len(set(outcomes)) > 1
