"""The life of a server's process: it answers while it loads, and its end cuts nothing off without a reason."""

import signal
import socket
import threading
import time

import httpx
import pytest
from helpers.web_process import completion, events_of, fake_server

from photon_jax.errors import ConfigError
from photon_jax.server.lifecycle import listen, serve
from photon_jax.server.state import ServerSettings, ServerState


def stream(server, results, **fields):
    """Reads a stream to its end and appends its finish reasons and whether it was whole."""
    body = completion(stream=True, **fields)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        events, is_done = events_of(response.iter_lines())
    results.append(([event["choices"][0]["finish_reason"] for event in events if "choices" in event], is_done, events))


def start_streams(server, count, **fields):
    """Returns running streams, each with tokens already, and where their results will be."""
    results = []
    threads = [
        threading.Thread(target=stream, args=(server, results), kwargs={"prompt": (1, 2, k), **fields})
        for k in range(count)
    ]
    for thread in threads:
        thread.start()
    while True:
        slots = httpx.get(f"{server.url}/api/stats").json()["slots"]
        if len(slots) == count and all(slot["num_output_tokens"] > 2 for slot in slots):
            return threads, results
        time.sleep(0.01)


def test_it_answers_while_the_model_loads_and_says_how_far_it_is(tmp_path):
    gate = tmp_path / "gate"
    with fake_server(load="late", gate=str(gate)) as server:
        while "reading" not in httpx.get(f"{server.url}/api/health").json()["message"]:
            time.sleep(0.01)
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503 and health.headers["retry-after"] == "1"
        assert health.json()["phase"] == "loading"
        assert health.json()["message"] == "reading weights: 1.0 of 4.0 MiB"
        assert httpx.get(f"{server.url}/live").status_code == 200
        assert httpx.get(f"{server.url}/api/stats").json()["num_blocks"] == 0
        refused = httpx.post(f"{server.url}/v1/completions", json=completion())
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert "still loading" in refused.json()["error"]["message"]
        gate.touch()
        server.wait_until_ready()
        assert httpx.get(f"{server.url}/health").json()["phase"] == "ready"
        answer = httpx.post(f"{server.url}/v1/completions", json=completion())
        assert answer.json()["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("error", ["CheckpointError", "ConfigError"])
def test_a_model_that_cannot_be_loaded_ends_the_process_with_its_error(error):
    with fake_server(load=error) as server:
        assert server.exit_code() == 2
    assert server.log[-1] == f"{error}: the model is no good"


def test_a_port_that_is_taken_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        state = ServerState(model_name="fake", settings=ServerSettings(port=port))
        with pytest.raises(ConfigError, match=f"can't listen on port {port} of host 127.0.0.1"):
            serve(state, lambda on_progress: pytest.fail("the model is loaded"))


def test_small_pieces_of_a_stream_do_not_wait_for_each_other():
    with listen(ServerSettings(port=0)) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_certificate_that_cannot_be_used_is_an_error_that_names_it(tmp_path, content):
    path = tmp_path / "cert.pem"
    if content is not None:
        path.write_text(content)
    settings = ServerSettings(port=0, tls_cert=str(path), tls_key=str(path))
    with pytest.raises(ConfigError, match=r"tls_cert .*cert.pem"):
        serve(ServerState(model_name="fake", settings=settings), lambda on_progress: pytest.fail("the model is loaded"))


def test_an_interrupt_while_it_loads_ends_it(tmp_path):
    with fake_server(load="late", gate=str(tmp_path / "never")) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.exit_code() == 0


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones():
    with fake_server(step_s=0.02) as server:
        server.wait_until_ready()
        threads, results = start_streams(server, 6, max_tokens=60)
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{server.url}/health").status_code == 200:
            time.sleep(0.01)
        assert httpx.get(f"{server.url}/api/health").json()["phase"] == "draining"
        refused = httpx.post(f"{server.url}/v1/completions", json=completion())
        assert refused.status_code == 503 and "retry-after" in refused.headers
        for thread in threads:
            thread.join()
        assert server.exit_code() == 0
    assert "closed" in server.log
    assert len(results) == 6
    for reasons, is_done, events in results:
        assert is_done and reasons[-1] == "length"
        assert set(reasons[:-1]) <= {None}
        assert len(events) > 1


def test_what_is_not_finished_in_time_ends_with_a_reason():
    with fake_server(step_s=0.02, settings={"drain_s": 0.2}) as server:
        server.wait_until_ready()
        threads, results = start_streams(server, 4, max_tokens=900)
        whole = []
        ask = threading.Thread(
            target=lambda: whole.append(
                httpx.post(f"{server.url}/v1/completions", json=completion(max_tokens=900), timeout=60)
            )
        )
        ask.start()
        while httpx.get(f"{server.url}/api/stats").json()["num_running"] < 5:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        for thread in (*threads, ask):
            thread.join()
        assert server.exit_code() == 0
    assert len(results) == 4
    for _, _, events in results:
        last = events[-1]
        assert "error" in last or last["choices"][0]["finish_reason"] is not None
    assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "aborted"
    assert not [line for line in server.log if "failed" in line or "Traceback" in line], "an end is no fault"


def test_a_second_signal_ends_it_at_once():
    with fake_server(step_s=0.05) as server:
        server.wait_until_ready()
        threads, _ = start_streams_that_break(server)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("a second signal ends at once")
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 128 + signal.SIGTERM
        for thread in threads:
            thread.join()


def start_streams_that_break(server):
    """Returns a stream that may end in the middle."""
    broken = []

    def read():
        try:
            stream(server, [], max_tokens=900)
        except httpx.HTTPError as error:
            broken.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    while httpx.get(f"{server.url}/api/stats").json()["num_running"] < 1:
        time.sleep(0.01)
    return [thread], broken


def test_a_failed_engine_is_told_to_all_and_the_process_stays(tmp_path):
    gate = tmp_path / "gate"
    with fake_server(step_s=0.01, gate=str(gate)) as server:
        server.wait_until_ready()
        threads, results = start_streams(server, 2, max_tokens=900)
        gate.touch()
        for thread in threads:
            thread.join()
        for _, _, events in results:
            assert events[-1]["error"]["code"] == "engine_dead"
        while httpx.get(f"{server.url}/health").json()["phase"] != "dead":
            time.sleep(0.01)
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert httpx.get(f"{server.url}/live").status_code == 503
        assert "log has the reason" in httpx.get(f"{server.url}/api/health").json()["message"]
        refused = httpx.post(f"{server.url}/v1/completions", json=completion())
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
        assert any("fell off the bus" in line for line in server.log)
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0


def test_a_watcher_of_the_stats_does_not_hold_up_the_end():
    with fake_server() as server:
        server.wait_until_ready()
        phases = []

        def watch():
            with httpx.stream("GET", f"{server.url}/api/stats?stream=true", timeout=60) as response:
                phases.extend(event["phase"] for event in events_of(response.iter_lines())[0])

        watcher = threading.Thread(target=watch)
        watcher.start()
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        watcher.join()
        assert server.exit_code() == 0
    assert phases[0] == "ready" and phases[-1] == "draining"
