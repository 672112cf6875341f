"""A sequence whose blocks were taken resumes as if nothing had happened, and waits until it can make progress."""

import random

import numpy as np
import pytest
from helpers.fake_runner import (
    Collector,
    FakeRunner,
    check_plan,
    expected_logprobs,
    expected_output,
    make_request,
    make_scheduler,
    run,
)

from photon_jax.scheduler.sequence import SequenceStatus

PROMPT = tuple((5 * i + 1) % 50 for i in range(13))


@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "no_prefix"])
@pytest.mark.parametrize("budget", [3, 5, 64], ids=["chunks_of_3", "chunks_of_5", "whole"])
def test_preempted_sequence_resumes_with_the_same_tokens_from_every_point(budget, prefix):
    """Case 3: blocks of 4, prompt of 13, 10 outputs: each point is before, at or after a boundary, or mid chunk."""
    request = make_request("a", PROMPT, max_tokens=10)
    points = 0
    for point in range(1, 100):
        scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=budget, prefix=prefix)
        runner, collector = FakeRunner(scheduler._layout), Collector()
        scheduler.add(request)
        scheduler.add(make_request("mate", [3], max_tokens=20))
        for _ in range(point):
            plan = scheduler.schedule()
            collector.take(scheduler.apply(plan, runner.step(plan)))
        seq = scheduler.get("a")
        if seq is None:
            break
        if seq.status is not SequenceStatus.RUNNING:
            continue
        points += 1
        for name in ("mate", "a") if scheduler.get("mate").status is SequenceStatus.RUNNING else ("a",):
            scheduler._preempt(scheduler.get(name))
        scheduler.check_integrity()
        while scheduler.has_unfinished:
            plan = scheduler.schedule()
            check_plan(plan, scheduler._config)
            collector.take(scheduler.apply(plan, runner.step(plan)))
            scheduler.check_integrity()
        out = collector.outputs["a"]
        assert (out.token_ids, out.finish_reason) == expected_output(request)
        assert np.array(out.logprobs).tolist() == expected_logprobs(request, 10).tolist()
        assert seq.num_preemptions == 1
    assert points >= 9


@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "no_prefix"])
def test_sequences_that_preempt_each_other_get_the_tokens_that_they_get_alone(prefix):
    """Case 3, preempted by the growth of others."""
    scheduler = make_scheduler(num_blocks=9, max_num_seqs=4, prefix=prefix)
    requests = [make_request(str(i), [i] * 3, max_tokens=22) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    got = run(scheduler, FakeRunner(scheduler._layout), after_step=lambda _: scheduler.check_integrity())
    assert scheduler.counters.num_preemptions >= 2
    for request in requests:
        assert (got[request.request_id].token_ids, got[request.request_id].finish_reason) == expected_output(request)


def test_the_sequence_that_arrived_last_is_preempted_to_the_front_of_the_queue():
    scheduler = make_scheduler(num_blocks=7, block_size=4, max_num_seqs=3)
    runner = FakeRunner(scheduler._layout)
    for name in ("a", "b", "c"):
        scheduler.add(make_request(name, [ord(name)] * 4, max_tokens=12))
    scheduler.add(make_request("d", [9], max_tokens=1))
    preempted = []
    while not preempted:
        plan = scheduler.schedule()
        preempted += plan.preempted
        scheduler.apply(plan, runner.step(plan))
    assert preempted == ["c"]
    assert list(scheduler._waiting) == ["c", "d"] and list(scheduler._running) == ["a", "b"]


def test_resumed_sequence_computes_all_but_what_the_prefix_cache_kept():
    """Case 5."""
    scheduler = make_scheduler(max_num_batched_tokens=64)
    runner = FakeRunner(scheduler._layout)
    scheduler.add(make_request("a", PROMPT, max_tokens=10))
    for _ in range(6):
        plan = scheduler.schedule()
        scheduler.apply(plan, runner.step(plan))
    seq = scheduler.get("a")
    assert seq.num_tokens == 19 and seq.num_computed_tokens == 18  # 4 full blocks are hashed
    scheduler._preempt(seq)
    plan = scheduler.schedule()
    assert [(item.start, item.num_new_tokens) for item in plan.scheduled] == [(16, 3)]
    scheduler.apply(plan, runner.step(plan))
    assert scheduler.counters.num_prefix_hit_tokens == 16
    assert seq.num_cached_tokens == 0, "the statistic speaks of the first admission"


@pytest.mark.parametrize("num_cached", range(0, 29, 4))
def test_prefix_hits_leave_their_budget_to_the_next_prompt(num_cached):
    """Case 5: the lookup comes before the budget is dealt."""
    scheduler = make_scheduler(max_num_batched_tokens=32)
    runner = FakeRunner(scheduler._layout)
    tokens = [(3 * i) % 40 for i in range(29)]
    if num_cached:
        scheduler.add(make_request("before", tokens[:num_cached], max_tokens=1))
        run(scheduler, runner)
    scheduler.add(make_request("a", tokens))
    scheduler.add(make_request("b", [77] * 50))
    plan = scheduler.schedule()
    rows = {item.seq.request_id: (item.start, item.num_new_tokens) for item in plan.scheduled}
    assert rows == {"a": (num_cached, 29 - num_cached), "b": (0, 3 + num_cached)}


def test_resumed_prompt_waits_until_all_its_blocks_are_there():
    """Case 6: what was preempted in the middle of its chunks is not admitted to be preempted again."""
    scheduler = make_scheduler(num_blocks=9, block_size=4, max_num_seqs=2, max_num_batched_tokens=4, prefix=False)
    runner = FakeRunner(scheduler._layout)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=22))
    scheduler.add(make_request("b", range(24), max_tokens=1))
    preempted = []
    run(scheduler, runner, after_step=lambda plan: preempted.extend(plan.preempted))
    assert preempted == ["b"]
    assert runner.num_computed_tokens <= 3 + 21 + 24 + 24


def test_recomputed_tokens_stay_few_in_a_tight_pool():
    """Case 6: computed tokens to useful ones, without the prefix cache, over many random tight pools."""
    rng, preemptions, worst = random.Random(6), 0, 1.0
    for _ in range(40):
        scheduler = make_scheduler(
            num_blocks=rng.randint(9, 17), max_num_seqs=6, max_num_batched_tokens=rng.choice([6, 10, 32]), prefix=False
        )
        runner = FakeRunner(scheduler._layout)
        useful = 0
        for idx in range(30):
            num_prompt, max_tokens = rng.randint(1, 16), rng.randint(1, 16)
            scheduler.add(make_request(str(idx), [idx] * num_prompt, max_tokens))
            useful += num_prompt + max_tokens - 1
        run(scheduler, runner)
        preemptions += scheduler.counters.num_preemptions
        assert runner.num_computed_tokens == scheduler.counters.num_scheduled_tokens
        worst = max(worst, runner.num_computed_tokens / useful)
    assert preemptions >= 100
    assert worst < 1.4, f"{worst:.2f} tokens computed for each useful one"


def test_preempted_sequence_gives_its_running_place_to_others():
    """Case 8."""
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=64)
    runner = FakeRunner(scheduler._layout)
    for name in ("a", "b", "c"):
        scheduler.add(make_request(name, [1, 2, 3], max_tokens=9))
    plan = scheduler.schedule()
    scheduler.apply(plan, runner.step(plan))
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    scheduler._preempt(scheduler.get("b"))
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    scheduler.abort("b")
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    plan = scheduler.schedule()
    assert [item.seq.request_id for item in plan.scheduled] == ["a", "c"]
    assert scheduler.num_running == 2 and scheduler.num_waiting == 0


@pytest.mark.parametrize("num_prompt", [22, 23, 24, 25])
def test_fully_cached_prompt_of_three_chunks_computes_its_end_only(num_prompt):
    """Case 13: reuse goes as far as the last token, which is always computed, and not one chunk only."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    runner, prompt = FakeRunner(scheduler._layout), [(3 * i) % 40 for i in range(num_prompt)]
    scheduler.add(make_request("first", prompt, max_tokens=4))
    first = run(scheduler, runner)["first"]
    assert scheduler.counters.num_chunks >= 2
    scheduler.add(make_request("again", prompt, max_tokens=4))
    plan = scheduler.schedule()
    reused = (num_prompt - 1) // 4 * 4
    assert [(item.start, item.num_new_tokens) for item in plan.scheduled] == [(reused, num_prompt - reused)]
    scheduler.apply(plan, runner.step(plan))
    again = run(scheduler, runner)["again"]
    assert again.last.num_cached_tokens == reused
    assert again.token_ids == first.token_ids[1:]


def test_new_namespace_makes_cached_prefixes_unknown():
    """Case 14, the part of the scheduler: blocks that old weights computed are not found under new ones."""
    scheduler = make_scheduler()
    runner = FakeRunner(scheduler._layout)
    scheduler.add(make_request("old", PROMPT))
    run(scheduler, runner)
    scheduler.add(make_request("waits", PROMPT))
    scheduler.set_namespace(b"weights 2")
    assert run(scheduler, runner)["waits"].last.num_cached_tokens == 0
    scheduler.add(make_request("new", PROMPT))
    assert run(scheduler, runner)["new"].last.num_cached_tokens == 12
    scheduler.add(make_request("running", PROMPT))
    scheduler.schedule()
    with pytest.raises(AssertionError, match="1 sequences are running on the old cache"):
        scheduler.set_namespace(b"weights 3")
