"""Several decode steps a dispatch: also while others wait, as long as they cost those no place that could be theirs.

And mixed steps that fill the size that they are computed in.
"""

import pytest
from helpers.fake_runner import FakeRunner, expected_output, make_request, make_scheduler, run

STEPS = 8


def play(lengths, *, steps_ahead=0, **limits):
    """Runs requests of two tokens and so many more; returns (steps, rows, waiting) of each plan, and the outputs."""
    scheduler = make_scheduler(max_steps=STEPS, **limits)
    for index, length in enumerate(lengths):
        scheduler.add(make_request(str(index), [index, 7], max_tokens=length))
    plans = []

    def look(plan):
        if plan.scheduled:
            plans.append((plan.num_steps, len(plan.scheduled), scheduler.num_waiting))
        scheduler.check_integrity()

    return plans, run(scheduler, FakeRunner(scheduler._layout), steps_ahead=steps_ahead, after_step=look)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_several_steps_run_while_others_wait_for_a_place_that_none_can_give_up_meanwhile(steps_ahead):
    plans, outputs = play([1 + 2 * STEPS] * 4, max_num_seqs=2, steps_ahead=steps_ahead)
    assert plans == [(1, 2, 2), (STEPS, 2, 2), (STEPS, 2, 2), (1, 2, 0), (STEPS, 2, 0), (STEPS, 2, 0)]
    for name, output in outputs.items():
        assert output.token_ids == expected_output(make_request(name, [int(name), 7], max_tokens=1 + 2 * STEPS))[0]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_place_that_becomes_free_at_a_known_step_is_taken_in_the_step_after_its_results_are_known(steps_ahead):
    plans, _ = play([4, 1 + 2 * STEPS, 5], max_num_seqs=2, steps_ahead=steps_ahead)
    first = [num_steps for num_steps, _, num_waiting in plans if num_waiting]
    assert first == [1] * (4 + steps_ahead)


@pytest.mark.parametrize(("num_short", "num_steps"), [(1, STEPS), (2, 1)])
def test_one_place_of_sixteen_may_fall_idle_within_a_dispatch_and_two_may_not(num_short, num_steps):
    lengths = [2] * num_short + [1 + 3 * STEPS] * (16 - num_short) + [5]
    plans, _ = play(lengths, max_num_seqs=16, max_num_batched_tokens=64, num_blocks=400)
    assert plans[:2] == [(1, 16, 1), (num_steps, 16, 1)]


def test_several_steps_run_while_the_first_one_waiting_lacks_blocks():
    scheduler = make_scheduler(max_steps=STEPS, num_blocks=17, block_size=2, max_num_batched_tokens=64)
    for name, num_prompt in (("a", 2), ("b", 30)):
        scheduler.add(make_request(name, [7] * num_prompt, max_tokens=1 + 2 * STEPS if name == "a" else 2))
    runner, plans = FakeRunner(scheduler._layout), []
    run(scheduler, runner, after_step=lambda plan: plans.append((plan.num_steps, len(plan.scheduled))))
    assert plans == [(1, 1), (STEPS, 1), (STEPS, 1), (1, 1), (1, 1)]


def test_several_steps_run_while_new_ones_are_held_back():
    scheduler = make_scheduler(max_steps=STEPS)
    scheduler.add(make_request("a", [1], max_tokens=30))
    runner = FakeRunner(scheduler._layout)
    plan = scheduler.schedule()
    scheduler.apply(plan, runner.step(plan))
    scheduler.admits_new = False
    scheduler.add(make_request("b", [1], max_tokens=30))
    assert scheduler.schedule().num_steps == STEPS


def test_whoever_can_start_now_does_so_and_no_dispatch_runs_before():
    scheduler = make_scheduler(max_steps=STEPS)
    scheduler.add(make_request("a", [1], max_tokens=30))
    runner = FakeRunner(scheduler._layout)
    for num_rows in (1, 2):
        plan = scheduler.schedule()
        assert (plan.num_steps, len(plan.scheduled)) == (1, num_rows)
        scheduler.apply(plan, runner.step(plan))
        scheduler.add(make_request("b" * num_rows, [2], max_tokens=30))


@pytest.mark.parametrize(
    ("fields", "num_steps"),
    [
        ([{"stop": ["x"], "logprobs": 1}, {"temperature": 0.5, "logprobs": 1}], STEPS),
        ([{"logprobs": 5}, {}], STEPS),
        ([{"logprobs": 5}, {"temperature": 0.5}], 1),  # such steps have no programs for several
        ([{"temperature": 0.5, "logprobs": 2}], 1),
        ([{"prompt_logprobs": 0}], 1),
        ([{"bad_word_ids": ((3,),)}], 1),
    ],
)
def test_what_is_asked_for_decides_whether_several_steps_run(fields, num_steps):
    scheduler = make_scheduler(max_steps=STEPS)
    for index, each in enumerate(fields):
        scheduler.add(make_request(str(index), [1, 2], max_tokens=30, **each))
    plan = scheduler.schedule()
    scheduler.apply(plan, FakeRunner(scheduler._layout).step(plan))
    assert scheduler.schedule().num_steps == num_steps


def test_single_steps_can_be_asked_for():
    scheduler = make_scheduler(max_steps=STEPS)
    scheduler.add(make_request("a", [1], max_tokens=30))
    runner = FakeRunner(scheduler._layout)
    plan = scheduler.schedule()
    scheduler.apply(plan, runner.step(plan))
    assert scheduler.schedule(several=False).num_steps == 1
    assert scheduler.schedule().num_steps == STEPS


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_stop_id_in_the_middle_of_a_dispatch_costs_who_waits_no_more_than_the_bound(steps_ahead):
    for prompt in range(10):
        scheduler = make_scheduler(max_steps=STEPS, max_num_seqs=1)
        tokens, _ = expected_output(make_request("a", [prompt], max_tokens=60))
        at = next(i for i in range(2, 30) if tokens[i] not in tokens[:i])
        scheduler.add(make_request("a", [prompt], max_tokens=60, stop_token_ids=(tokens[at],)))
        scheduler.add(make_request("b", [1], max_tokens=4))
        begins = []

        def look(plan, scheduler=scheduler, begins=begins):
            if any(item.seq.request_id == "b" for item in plan.scheduled) and not begins:
                begins.append(scheduler.counters.num_steps - 1)

        outputs = run(scheduler, FakeRunner(scheduler._layout), steps_ahead=steps_ahead, after_step=look)
        assert len(outputs["a"].token_ids) == at + 1
        num_late = begins[0] - (at + 1)  # steps that began after the one which gave the stop id
        assert num_late <= (steps_ahead + 1) * STEPS, f"{num_late} steps late"


def row_counts(prompts, sizes, *, max_num_seqs=2, max_num_batched_tokens=16, max_tokens=2, **limits):
    """Returns the tokens of each row of each plan, and the outputs."""
    limits |= {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    scheduler, plans = make_scheduler(step_sizes=sizes, **limits), []
    for index, prompt in enumerate(prompts):
        scheduler.add(make_request(str(index), prompt, max_tokens=max_tokens))

    def look(plan):
        plans.append([item.num_new_tokens for item in plan.scheduled])
        scheduler.check_integrity()

    return plans, run(scheduler, FakeRunner(scheduler._layout), after_step=look)


def test_a_step_with_prompts_fills_a_size_while_others_wait_and_the_next_one_has_the_rest():
    prompts = [[index, 1, 2, 3, 4] for index in range(6)]
    plans, outputs = row_counts(prompts, (4, 8, 16))
    assert plans[:4] == [[5, 3], [1, 2], [1, 3], [2, 2]]  # one ends in the second step, and one in the third
    for name, output in outputs.items():
        assert output.token_ids == expected_output(make_request(name, prompts[int(name)], max_tokens=2))[0]


@pytest.mark.parametrize(
    ("num_prompts", "sizes", "limits", "expected"),
    [
        (3, (), {}, [5, 5]),  # no size is worth it
        (3, (16,), {}, [5, 5]),  # none is filled
        (2, (8,), {}, [5, 5]),  # nobody waits behind
        (3, (8,), {"max_num_batched_tokens": 9}, [5, 4]),  # all that a step may have is wanted
        (3, (2, 9, 12), {"max_num_seqs": 1}, [2]),
        (9, (4, 8, 13), {"max_num_seqs": 3}, [5, 5, 3]),
    ],
)
def test_a_step_is_cut_only_where_enough_wait_and_a_size_is_filled(num_prompts, sizes, limits, expected):
    plans, _ = row_counts([[index, 1, 2, 3, 4] for index in range(num_prompts)], sizes, **limits)
    assert plans[0] == expected


def test_a_size_that_running_sequences_exceed_is_not_filled():
    plans, _ = row_counts([[index, 1, 2, 3, 4] for index in range(4)], (2,), max_num_seqs=3)
    assert plans[:2] == [[2], [3, 5, 5]]


def test_samples_of_a_prompt_that_is_cut_share_its_blocks():
    prompt = [5, 1, 2, 3, 4, 6, 7, 8]
    plans, outputs = row_counts([prompt] * 6, (7, 64), max_num_batched_tokens=64, max_num_seqs=3)
    assert plans[:2] == [[7], [1, 4, 2]]
    for name, output in outputs.items():
        assert output.token_ids == expected_output(make_request(name, prompt, max_tokens=2))[0]
