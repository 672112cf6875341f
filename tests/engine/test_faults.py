"""Whose fault it is that a step failed."""

import pytest

from photon_jax.controls import LogitsProcessor
from photon_jax.engine.faults import find_fault
from photon_jax.errors import CheckpointError, RequestError
from photon_jax.request import Request, SamplingParams
from photon_jax.scheduler.plan import ScheduledSequence, StepPlan
from photon_jax.scheduler.sequence import SequenceState

ERROR = RuntimeError("Traceback\n  in a file\nKeyError: 'it'")


def _plan(name, *, samples=True, is_void=False, has_processor=True):
    """Returns a plan of one row, the request's id is the name."""

    def fn(state, logits, token, position):
        return state, logits

    fn.__name__ = name
    params = SamplingParams(max_tokens=2, logits_processor=LogitsProcessor(fn) if has_processor else None)
    request = Request(request_id=name, prompt_token_ids=(1, 2), params=params)
    seq = SequenceState(request=request, arrival=0, token_ids=[1, 2], max_num_slots=9, max_num_blocks=9)
    seq.admission = 2 if is_void else 1
    return StepPlan((ScheduledSequence(seq, 0, 2, int(samples), 1),))


@pytest.fixture
def blamed():
    """Returns a function that gives what each blamed request of the plans is told."""

    def messages(*plans):
        fault = find_fault(ERROR, plans, None)
        return None if fault is None else {name: str(fault.error_for(name)) for name in "abc" if fault.error_for(name)}

    return messages


def test_processors_of_all_steps_on_their_way_are_blamed_where_they_ran(blamed):
    told = blamed(_plan("a"), _plan("b", has_processor=False), _plan("c", samples=False))
    assert told == {"a": "logits_processor a failed while a step ran: KeyError: 'it'"}
    assert list(blamed(_plan("a"), _plan("b"))) == ["a", "b"]


def test_a_processor_of_a_request_that_has_ended_is_to_blame_and_nobody_is_told(blamed):
    assert blamed(_plan("a", is_void=True)) == {}


def test_a_step_without_processors_fails_through_the_device(blamed):
    assert blamed(_plan("a", has_processor=False), _plan("c", samples=False)) is None


def test_each_request_is_told_by_an_error_of_its_own():
    fault = find_fault(ERROR, [_plan("a")], "lm_head")
    assert isinstance(fault.error_for("a"), CheckpointError) and fault.error_for("b") is not fault.error_for("b")
    assert not isinstance(fault.error_for("a"), RequestError)
