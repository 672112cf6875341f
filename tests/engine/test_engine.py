"""The loop by itself: an empty step, steps on their way, and steps that break off."""

import types

import pytest
from helpers.fake_runner import Collector, FakeRunner, expected_output, make_request, make_scheduler

from photon_jax.engine.engine import Engine
from photon_jax.errors import EngineDeadError


class Runner:
    """A fake runner behind the engine's interface; `failing` names the calls that break off."""

    allows_several = True

    def __init__(self, scheduler, failing=()):
        self.failing = set(failing)
        self.calls = []
        self._layout = scheduler._layout
        self.reset()

    def launch(self, plan):
        self._note("launch")
        return types.SimpleNamespace(result=self._runner.step(plan))

    def collect(self, handle):
        self._note("collect")
        return handle.result

    def reset(self):
        self._runner = FakeRunner(self._layout)

    def deleted_leaf(self):
        return None

    def calls_out(self, processor):
        return True

    def _note(self, name):
        self.calls.append(name)
        if (name, self.calls.count(name)) in self.failing:
            raise RuntimeError("out of memory")


REQUESTS = [make_request("a", (1, 2, 3), max_tokens=9), make_request("b", range(20), max_tokens=6)]


def start(steps_ahead=1, failing=(), max_steps=1, requests=REQUESTS):
    scheduler = make_scheduler(max_steps=max_steps)
    runner = Runner(scheduler, failing)
    for request in requests:
        scheduler.add(request)
    return Engine(scheduler, runner, steps_ahead=steps_ahead), runner


def finish(engine, collector=None):
    collector = collector or Collector()
    while engine.scheduler.has_unfinished:
        collector.take(engine.step())
        engine.scheduler.check_integrity()
    for request in REQUESTS:
        out = collector.outputs[request.request_id]
        assert (out.token_ids, out.finish_reason) == expected_output(request)
    return collector


def test_a_step_with_nothing_to_do_asks_nothing_of_the_runner():
    engine, runner = start(requests=[])
    assert engine.step() == engine.drain() == []
    assert runner.calls == []


def test_without_steps_ahead_each_step_is_collected_before_the_next():
    engine, runner = start(steps_ahead=0)
    finish(engine)
    assert runner.calls == ["launch", "collect"] * (len(runner.calls) // 2)


@pytest.mark.parametrize("max_steps", [1, 4])
def test_a_step_is_launched_before_the_one_ahead_of_it_is_collected(max_steps):
    engine, runner = start(max_steps=max_steps)
    assert engine.step() == []
    finish(engine)
    calls = "".join(name[0] for name in runner.calls)
    assert calls.startswith("llclc") and "ll" not in calls[2:], calls


def test_draining_takes_what_is_on_its_way_and_launches_nothing():
    engine, runner = start(requests=REQUESTS[:1])
    assert engine.step() == []
    (delta,) = engine.drain()
    assert delta.new_token_ids == (expected_output(REQUESTS[0])[0][0],)
    assert engine.drain() == [] and runner.calls == ["launch", "collect"]


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("call", ["launch", "collect"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_after_a_failure_on_the_device_requests_go_on_to_the_same_tokens(steps_ahead, call, count):
    engine, _ = start(steps_ahead, failing=[(call, count)])
    collector = Collector()
    with pytest.raises(RuntimeError, match="out of memory"):
        for _ in range(50):
            collector.take(engine.step())
    assert engine.scheduler.num_running == 0 and engine.scheduler.num_waiting == 2
    engine.scheduler.check_integrity()
    finish(engine, collector)


def test_a_request_that_ended_leaves_nothing_of_the_step_too_many():
    tokens, _ = expected_output(REQUESTS[0])
    stop = next(token for index, token in enumerate(tokens) if index >= 3 and token not in tokens[:index])
    request = make_request("stops", REQUESTS[0].prompt_token_ids, max_tokens=9, stop_token_ids=(stop,))
    engine, runner = start(requests=[request])
    collector = Collector()
    while engine.scheduler.has_unfinished:
        collector.take(engine.step())
    assert collector.outputs["stops"].token_ids == expected_output(request)[0]
    assert engine.step() == [] and runner.calls.count("launch") == len(expected_output(request)[0]) + 1
    scheduler = engine.scheduler
    assert scheduler.num_free_blocks == 64
    num_stored = len(request.prompt_token_ids) + len(expected_output(request)[0]) - 1
    assert scheduler.num_idle_blocks == num_stored // 4, "only blocks of its own tokens are cached"


def test_failure_while_the_host_plans_is_the_engines_end(monkeypatch):
    engine, _ = start()
    monkeypatch.setattr(engine.scheduler, "schedule", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    with pytest.raises(EngineDeadError, match="make a new engine"):
        engine.step()


def test_the_clock_tells_work_from_waiting():
    engine, runner = start()
    finish(engine)
    assert engine.clock.num_dispatches == runner.calls.count("launch")
    assert engine.clock.work_s > 0.0 and engine.clock.wait_s >= 0.0
