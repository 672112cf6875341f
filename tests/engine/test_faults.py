"""Whose fault it is that a step failed."""

import functools

import numpy as np
import pytest

from photon_jax.controls import LogitsProcessor, ProcessorFailure
from photon_jax.engine.faults import find_fault, find_nan
from photon_jax.errors import CheckpointError, RequestError
from photon_jax.request import Request, SamplingParams
from photon_jax.scheduler.plan import ScheduledSequence, StepPlan, StepResult
from photon_jax.scheduler.sequence import SequenceState

ERROR = RuntimeError("Traceback\n  in a file\nKeyError: 'it'")


def _plan(name, *, samples=True, is_void=False, has_processor=True):
    """Returns a plan of one row, the request's id is the name."""
    processor = _processor(name) if has_processor else None
    params = SamplingParams(max_tokens=2, logits_processor=processor)
    request = Request(request_id=name, prompt_token_ids=(1, 2), params=params)
    seq = SequenceState(request=request, arrival=0, token_ids=[1, 2], max_num_slots=9, max_num_blocks=9)
    seq.admission = 2 if is_void else 1
    return StepPlan((ScheduledSequence(seq, 0, 2, int(samples), 1),))


@functools.cache
def _processor(name):
    def fn(state, logits, token, position):
        return state, logits

    fn.__name__ = name
    return LogitsProcessor(fn)


@pytest.fixture
def blamed():
    """Returns a function that gives what each blamed request of the plans is told."""

    def messages(*plans, error=ERROR, calls_out=lambda processor: True):
        fault = find_fault(error, plans, None, calls_out)
        return None if fault is None else {name: str(fault.error_for(name)) for name in "abc" if fault.error_for(name)}

    return messages


def test_processors_of_all_steps_on_their_way_are_blamed_where_they_ran(blamed):
    told = blamed(_plan("a"), _plan("b", has_processor=False), _plan("c", samples=False))
    assert told == {"a": "logits_processor a failed while a step ran: KeyError: 'it'"}


def test_processors_that_call_a_function_are_blamed_and_say_which_others_it_may_have_been(blamed):
    plans = _plan("a"), _plan("b"), _plan("c")
    failed = "failed while a step ran: KeyError: 'it'"
    assert blamed(*plans, calls_out=lambda processor: processor.name != "b") == {
        "a": f"logits_processor a, or another one of its step (c), {failed}",
        "c": f"logits_processor c, or another one of its step (a), {failed}",
    }
    assert blamed(*plans, calls_out=lambda processor: processor.name == "b") == {"b": f"logits_processor b {failed}"}
    assert list(blamed(*plans, calls_out=lambda processor: False)) == ["a", "b", "c"]


def test_a_processor_that_raises_while_it_is_traced_is_alone_to_blame(blamed):
    failure = ProcessorFailure(_processor("b").fn)
    failure.__cause__ = KeyError("it")
    told = {"b": "logits_processor b failed while a step was compiled: KeyError('it')"}
    assert blamed(_plan("a"), _plan("b"), error=failure) == told


def test_a_processor_of_a_request_that_has_ended_is_to_blame_and_nobody_is_told(blamed):
    assert blamed(_plan("a", is_void=True)) == {}


def test_a_step_without_processors_fails_through_the_device(blamed):
    assert blamed(_plan("a", has_processor=False), _plan("c", samples=False)) is None


def test_each_request_is_told_by_an_error_of_its_own():
    fault = find_fault(ERROR, [_plan("a")], "lm_head", lambda processor: True)
    assert isinstance(fault.error_for("a"), CheckpointError) and fault.error_for("b") is not fault.error_for("b")
    assert not isinstance(fault.error_for("a"), RequestError)


def _row(name, num_sampled=0, num_scores=0, is_void=False):
    """Returns a row of a request that scores the tokens of its prompt, or samples."""
    params = SamplingParams(max_tokens=9)
    ids = tuple(range(1, num_scores + 2))
    request = Request(request_id=name, prompt_token_ids=ids, params=params, score=num_scores > 0)
    seq = SequenceState(request=request, arrival=0, token_ids=list(ids), max_num_slots=9, max_num_blocks=9)
    seq.admission = 2 if is_void else 1
    row = ScheduledSequence(seq, 0, max(num_scores, num_sampled, 1), num_sampled, 1)
    assert len(row.scores) == num_scores
    return row


def _blamed_for_nan(rows, raw, scores=None, num_steps=1):
    logprobs = np.array([[value, np.nan, np.nan] for value in raw], np.float32)  # the other kinds are a processor's
    ids = np.zeros(len(raw), np.int32)
    result = StepResult(ids, logprobs, score_logprobs=None if scores is None else np.array(scores, np.float32))
    fault = find_nan(StepPlan(tuple(rows), num_steps=num_steps), result)
    if fault is None:
        return None
    assert isinstance(fault.error_for(next(iter(fault.messages))), CheckpointError)
    return list(fault.messages)


def test_nan_is_blamed_on_the_rows_that_are_told_of_it():
    nan = np.nan
    rows = [_row("a", 1), _row("b"), _row("c", 1), _row("d", 1, is_void=True)]
    assert _blamed_for_nan(rows, [-1, -2, -3, -4]) is None
    assert _blamed_for_nan(rows, [-1, nan, -3, nan]) is None, "nothing was sampled, or nobody waits for it"
    assert _blamed_for_nan(rows, [nan, nan, -3, nan]) == ["a"]
    rows = [_row("a", 3), _row("b", 1)]
    assert _blamed_for_nan(rows, [-1, -2, -3, nan, -4, nan], num_steps=3) is None, "b takes part in the first step"
    assert _blamed_for_nan(rows, [-1, nan, -3, -2, nan, nan], num_steps=3) == ["a", "b"]
    rows = [_row("a", num_scores=2), _row("b", 1), _row("c", num_scores=3)]
    assert _blamed_for_nan(rows, [nan, -1, nan], [-1, -2, -3, -4, -5, nan]) is None, "the last score means nothing"
    assert _blamed_for_nan(rows, [nan, -1, nan], [-1, -2, -3, nan, -5, nan]) == ["c"]
