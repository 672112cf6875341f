"""/api/stats, /api/health, /version and the old /api/chat."""

import json

import httpx
import pytest
from helpers.web_process import completion, events_of
from helpers.web_server import MODEL

import photon_jax
from photon_jax.server.rates import WINDOW_S, Rates


def stats_of(served):
    return httpx.get(f"{served.url}/api/stats").json()


def test_stats_show_the_running_sequences_and_their_blocks(served):
    idle = stats_of(served)
    assert idle["phase"] == "ready" and idle["model"] == MODEL and idle["slots"] == []
    assert idle["num_free_blocks"] == idle["num_blocks"] > 0
    body = completion(prompt=range(30), max_tokens=200, ignore_eos=True, n=2, stream=True)
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as response:
        while True:
            busy = stats_of(served)
            if len(busy["slots"]) == 2 and all(slot["num_output_tokens"] > 3 for slot in busy["slots"]):
                break
        assert busy["num_running"] == 2 and busy["num_waiting"] == 0
        assert busy["num_free_blocks"] < busy["num_blocks"]
        for slot in busy["slots"]:
            assert slot["num_tokens"] >= 30 + slot["num_output_tokens"]
        assert len({slot["request_id"] for slot in busy["slots"]}) == 2
        assert busy["num_output_tokens"] > idle["num_output_tokens"]
        assert busy["output_tokens_per_s"] > 0 and busy["steps_per_s"] > 0
        response.close()
    while (after := stats_of(served))["num_running"]:
        pass
    assert after["num_free_blocks"] == after["num_blocks"]
    assert after["num_finished"]["abort"] == idle["num_finished"]["abort"] + 2


def test_a_stream_of_stats_shows_the_same_fields_again_and_again(served):
    lines = []
    with httpx.stream("GET", f"{served.url}/api/stats?stream=true") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            lines.append(line)
            if len(events_of(lines)[0]) == 3:
                break
    events, _ = events_of(lines)
    assert all(event.keys() == stats_of(served).keys() for event in events)
    assert events[0]["uptime_s"] < events[1]["uptime_s"] < events[2]["uptime_s"]


def test_health_and_version(served):
    health = httpx.get(f"{served.url}/health")
    assert health.status_code == 200 and health.json()["phase"] == "ready"
    assert httpx.get(f"{served.url}/api/health").json()["model"] == MODEL
    assert httpx.get(f"{served.url}/version").json() == {"version": photon_jax.__version__}


def test_the_old_chat_answers_as_the_new_one_does(served):
    fields = {"max_tokens": 6, "temperature": 0}
    old = httpx.post(f"{served.url}/api/chat", json={"message": "Hello", "session_id": "s", **fields}, timeout=60)
    assert old.status_code == 200, old.text
    messages = [{"role": "user", "content": "Hello"}]
    new = httpx.post(f"{served.url}/v1/chat/completions", json={"messages": messages, **fields}, timeout=60).json()
    assert old.json()["response"] == new["choices"][0]["message"]["content"]
    assert old.json()["tokens"] == new["usage"]["completion_tokens"]
    assert 0 < old.json()["duration_ms"] < 60_000


@pytest.mark.parametrize(
    "body",
    [{}, {"message": ""}, {"message": 5}, {"message": "x", "max_tokens": 0}, {"message": "x", "max_tokens": 10**6}],
)
def test_the_old_chat_refuses_by_name(served, body):
    response = httpx.post(
        f"{served.url}/api/chat", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["message"]


class FakeStats:
    def __init__(self, prompt, output, steps):
        self.num_prompt_tokens, self.num_output_tokens, self.num_steps = prompt, output, steps


def test_rates_are_those_of_the_last_seconds():
    now = 100.0
    rates = Rates(lambda: now)
    assert rates.look(FakeStats(0, 0, 0)) == (0.0, 0.0, 0.0, 0.0)
    now += 1.0
    assert rates.look(FakeStats(100, 10, 5)) == (1.0, 100.0, 10.0, 5.0)
    now += 1.0
    assert rates.look(FakeStats(100, 40, 10)) == (2.0, 50.0, 20.0, 5.0)
    now += WINDOW_S  # what was before doesn't count any longer
    assert rates.look(FakeStats(100, 46, 16)) == (WINDOW_S, 0.0, 2.0, 2.0)


def test_rates_remember_little_however_often_one_looks():
    now = 0.0
    rates = Rates(lambda: now)
    for step in range(10_000):
        now = step / 1000
        rates.look(FakeStats(step, step, step))
    assert len(rates._samples) < 40
    assert rates.look(FakeStats(step, step, step)).steps_per_s == pytest.approx(1000, rel=0.01)
