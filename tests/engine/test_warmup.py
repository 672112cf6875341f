"""The warm-up compiles each program once, several at a time, tells how far it is, and ends with what failed."""

import threading

import pytest

from photon_jax.engine import warmup
from photon_jax.step_io import StepLayout

LAYOUTS = [
    StepLayout(num_tokens=size, num_rows=1, table_width=1, query_tile=1, row_tile=8, has_controls=size == 3)
    for size in (4, 3, 2, 1)
]


class Runner:
    """Compiles nothing; two at a time must meet."""

    def __init__(self, fails_at=None):
        self.compiled = []
        self.fails_at = fails_at
        self.num_states = 0
        self._both = threading.Barrier(2)

    def make_control_state(self):
        assert not self.compiled
        self.num_states += 1

    def compile(self, layout):
        if layout.num_tokens == self.fails_at:
            raise RuntimeError("out of memory")
        if self.fails_at is None:
            self._both.wait(timeout=60)
        self.compiled.append(layout)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.setattr(warmup, "num_threads", lambda: 2)


def test_programs_compile_side_by_side_and_each_is_told_of():
    runner, told = Runner(), []
    warmup.compile_all(runner, LAYOUTS, on_program=lambda *counts: told.append(counts))
    assert sorted(layout.num_tokens for layout in runner.compiled) == [1, 2, 3, 4]
    assert told == [(done, 4) for done in range(5)]
    assert runner.num_states == 1


def test_no_state_of_controls_is_made_where_no_program_has_it():
    runner = Runner()
    warmup.compile_all(runner, [LAYOUTS[0], LAYOUTS[2]])
    assert runner.num_states == 0


def test_what_failed_is_raised_and_the_rest_is_left():
    with pytest.raises(RuntimeError, match="out of memory"):
        warmup.compile_all(Runner(fails_at=4), LAYOUTS)
