"""A request can be ended in every state: its blocks come back at once and nobody else notices."""

import pytest
from helpers.fake_runner import Collector, FakeRunner, expected_output, make_request, make_scheduler

from photon_jax.outputs import FinishReason
from photon_jax.scheduler.sequence import SequenceStatus

MATE = make_request("mate", [4, 5, 6], max_tokens=12)
LONG = make_request("long", range(30), max_tokens=12)


class Play:
    """A scheduler with a runner, stepped by hand."""

    def __init__(self, *, num_steps: int = 0, **fields: int) -> None:
        self.scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8, **fields)
        self.runner = FakeRunner(self.scheduler._layout)
        self.collector = Collector()
        self.scheduler.add(MATE)
        self.scheduler.add(LONG)
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.collector.take(self.scheduler.apply(plan, self.runner.step(plan)))
        self.scheduler.check_integrity()

    def finish_and_check(self) -> None:
        while self.scheduler.has_unfinished:
            self.step()
        out = self.collector.outputs["mate"]
        assert (out.token_ids, out.finish_reason) == expected_output(MATE)
        assert self.scheduler.num_free_blocks == 64


def waiting() -> Play:
    return Play()


def between_chunks() -> Play:
    play = Play(num_steps=2)
    assert 0 < play.scheduler.get("long").num_computed_tokens < 30
    return play


def decoding() -> Play:
    play = Play(num_steps=7)
    assert play.scheduler.get("long").num_output_tokens >= 2
    return play


def preempted() -> Play:
    play = Play(num_steps=7)
    play.scheduler._preempt(play.scheduler.get("long"))
    assert play.scheduler.get("long").status is SequenceStatus.WAITING
    return play


@pytest.mark.parametrize("state", [waiting, between_chunks, decoding, preempted])
@pytest.mark.parametrize("end", ["abort", "finish"])
def test_request_ended_in_any_state_gives_its_blocks_back_at_once(state, end):
    """Case 9."""
    play = state()
    mate = play.scheduler.get("mate")
    delta = getattr(play.scheduler, end)("long")
    assert play.scheduler.get("long") is None
    assert 64 - play.scheduler.num_free_blocks == len(mate.block_ids)
    play.scheduler.check_integrity()
    if end == "abort":
        assert (
            delta.finish_reason is FinishReason.ABORT and delta.new_token_ids == () and delta.logprobs.shape == (0, 3)
        )
        assert play.scheduler.counters.num_aborted == 1
    else:
        assert delta is None and play.scheduler.counters.num_stopped == 1
    assert play.scheduler.abort("long") is None
    play.scheduler.finish("long")
    assert play.scheduler.counters.num_aborted + play.scheduler.counters.num_stopped == 1
    play.finish_and_check()


def test_request_aborted_while_its_step_runs_is_dropped_from_the_result():
    """Case 9."""
    for num_steps in range(8):
        play = Play(num_steps=num_steps)
        plan = play.scheduler.schedule()
        result = play.runner.step(plan)
        assert play.scheduler.abort("long").finish_reason is FinishReason.ABORT
        deltas = play.scheduler.apply(plan, result)
        assert [delta.request_id for delta in deltas] == ["mate"]
        play.collector.take(deltas)
        play.finish_and_check()


def test_id_used_again_while_the_step_of_its_aborted_owner_runs_is_another_request():
    """Case 9."""
    play = Play(num_steps=5)
    plan = play.scheduler.schedule()
    result = play.runner.step(plan)
    play.scheduler.abort("long")
    again = make_request("long", [1, 2], max_tokens=3)
    play.scheduler.add(again)
    play.collector.outputs.pop("long", None)
    play.collector.take(play.scheduler.apply(plan, result))
    assert "long" not in play.collector.outputs
    play.finish_and_check()
    assert play.collector.outputs["long"].token_ids == expected_output(again)[0]


def test_finished_and_unknown_requests_are_left_alone():
    """Case 9."""
    play = Play()
    play.finish_and_check()
    for name in ("long", "mate", "nobody"):
        assert play.scheduler.abort(name) is None
        play.scheduler.finish(name)
    play.scheduler.check_integrity()
    assert play.scheduler.counters.num_finished == play.scheduler.counters.num_length_stopped == 2


def test_all_requests_aborted_leave_an_idle_scheduler_that_serves_again():
    """Case 9."""
    play = Play(num_steps=3)
    for name in ("mate", "long"):
        play.scheduler.abort(name)
    assert not play.scheduler.has_unfinished and play.scheduler.num_free_blocks == 64
    play.collector = Collector()
    play.scheduler.add(MATE)
    play.finish_and_check()
