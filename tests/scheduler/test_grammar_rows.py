"""A sequence with a grammar is planned when its last token is known, and nobody waits for it."""

import pytest
from helpers.fake_runner import FakeGrammar, FakeRunner, expected_output, make_request, make_scheduler, run

from photon_jax.outputs import FinishReason


def rows_by_plan(scheduler, **settings):
    plans = []
    outputs = run(
        scheduler,
        FakeRunner(scheduler._layout),
        after_step=lambda plan: plans.append([item.seq.request_id for item in plan.scheduled]),
        **settings,
    )
    return plans, outputs


def test_it_takes_every_second_step_where_steps_overlap_and_the_others_take_each():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], max_tokens=6, grammar=FakeGrammar(99)))
    scheduler.add(make_request("b", [1, 2], max_tokens=6))
    plans, _ = rows_by_plan(scheduler, steps_ahead=1)
    assert plans[:6] == [["a", "b"], ["b"], ["a", "b"], ["b"], ["a", "b"], ["b"]]


def test_alone_it_takes_turns_with_the_host():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], max_tokens=3, grammar=FakeGrammar(99)))
    plans, _ = rows_by_plan(scheduler, steps_ahead=1)
    assert plans == [["a"], [], ["a"], [], ["a"], []]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_no_dispatch_runs_several_steps_while_it_runs(steps_ahead):
    scheduler, num_steps = make_scheduler(max_steps=4), []
    scheduler.add(make_request("a", [1], max_tokens=8, grammar=FakeGrammar(3)))
    scheduler.add(make_request("b", [2], max_tokens=20))

    def look(plan):
        if scheduler.get("a") is not None:
            num_steps.append(plan.num_steps)

    outputs = run(scheduler, FakeRunner(scheduler._layout), steps_ahead=steps_ahead, after_step=look)
    assert set(num_steps) == {1}
    assert len(outputs["a"].token_ids) == 3


@pytest.mark.parametrize("is_complete", [True, False])
def test_the_end_of_its_grammar_ends_it_well_or_not(is_complete):
    scheduler = make_scheduler()
    request = make_request("a", [1, 2], max_tokens=9, grammar=FakeGrammar(4, is_complete))
    scheduler.add(request)
    out = run(scheduler, FakeRunner(scheduler._layout))["a"]
    assert (out.token_ids, out.finish_reason) == expected_output(request)
    assert out.finish_reason is (FinishReason.STOP if is_complete else FinishReason.ABORT)
    assert out.last.stop_token_id is None
    scheduler.check_integrity()


def test_a_grammar_that_ends_with_the_last_token_allowed_ends_it_well():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], max_tokens=4, grammar=FakeGrammar(4)))
    assert run(scheduler, FakeRunner(scheduler._layout))["a"].finish_reason is FinishReason.STOP


def test_a_score_request_has_no_use_for_a_grammar():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(9), score=True, grammar=FakeGrammar(1)))
    assert run(scheduler, FakeRunner(scheduler._layout))["a"].finish_reason is FinishReason.LENGTH
