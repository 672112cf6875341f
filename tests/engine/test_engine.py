"""The loop by itself: an empty step, and a step that breaks off while the host plans."""

import pytest
from helpers.fake_runner import make_request, make_scheduler

from photon_jax.engine.engine import Engine
from photon_jax.errors import EngineDeadError


def test_a_step_with_nothing_to_do_asks_nothing_of_the_runner():
    assert Engine(make_scheduler(), runner=None).step() == []


def test_failure_while_the_host_plans_is_the_engines_end(monkeypatch):
    scheduler = make_scheduler()
    engine = Engine(scheduler, runner=None)
    monkeypatch.setattr(scheduler, "schedule", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    with pytest.raises(EngineDeadError, match="make a new engine"):
        engine.step()


def test_failure_while_the_device_works_puts_the_running_ones_back(monkeypatch):
    class Broken:
        num_resets = 0

        def launch(self, plan):
            raise RuntimeError("out of memory")

        def collect(self, handle):
            raise AssertionError("nothing was launched")

        def reset(self):
            self.num_resets += 1

    scheduler, runner = make_scheduler(), Broken()
    scheduler.add(make_request("a", (1, 2, 3)))
    with pytest.raises(RuntimeError, match="out of memory"):
        Engine(scheduler, runner).step()
    assert (runner.num_resets, scheduler.num_running, scheduler.num_waiting) == (1, 0, 1)
    scheduler.check_integrity()
