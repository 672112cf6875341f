"""The scheduler admits, chunks, preempts and ends sequences within its limits."""

import time

import pytest
from helpers.fake_runner import (
    FakeRunner,
    check_plan,
    expected_output,
    expected_scores,
    make_request,
    make_scheduler,
    run,
)

from photon_jax.config import SchedulerConfig
from photon_jax.errors import CapacityError, ConfigError, RequestError
from photon_jax.outputs import FinishReason
from photon_jax.scheduler.sequence import SequenceStatus


def step(scheduler, runner):
    plan = scheduler.schedule()
    check_plan(plan, scheduler._config)
    deltas = scheduler.apply(plan, runner.step(plan))
    scheduler.check_integrity()
    return plan, deltas


def rows_of(plan):
    return [(item.seq.request_id, item.start, item.num_new_tokens, item.samples) for item in plan.scheduled]


def test_decode_rows_come_first_then_prompts_in_order_within_the_budget():
    scheduler, runner = make_scheduler(max_num_batched_tokens=10), FakeRunner(make_scheduler()._layout)
    for name, num_prompt in (("a", 6), ("b", 9), ("c", 3)):
        scheduler.add(make_request(name, [ord(name)] * num_prompt, max_tokens=5))
    assert rows_of(step(scheduler, runner)[0]) == [("a", 0, 6, True), ("b", 0, 4, False)]
    assert rows_of(step(scheduler, runner)[0]) == [("a", 6, 1, True), ("b", 4, 5, True), ("c", 0, 3, True)]
    assert rows_of(step(scheduler, runner)[0]) == [("a", 7, 1, True), ("b", 9, 1, True), ("c", 3, 1, True)]
    assert scheduler.counters.num_chunks == 1


def test_decode_rows_are_not_starved_by_a_long_prompt():
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=3)
    runner = FakeRunner(scheduler._layout)
    scheduler.add(make_request("short", [1], max_tokens=9))
    scheduler.add(make_request("long", range(20), max_tokens=2))
    step(scheduler, runner)
    for _ in range(8):
        plan, _ = step(scheduler, runner)
        assert plan.scheduled[0].seq.request_id == "short" and plan.num_tokens == 3


def test_plans_are_applied_in_order_and_once():
    scheduler = make_scheduler()
    runner = FakeRunner(scheduler._layout)
    scheduler.add(make_request("a", [1]))
    steps = []
    for _ in range(2):
        plan = scheduler.schedule()
        steps.append((plan, runner.step(plan)))
    with pytest.raises(AssertionError, match="in order, once"):
        scheduler.apply(*steps[1])
    for step in steps:
        scheduler.apply(*step)
        with pytest.raises(AssertionError, match="in order, once"):
            scheduler.apply(*step)


def test_an_idle_scheduler_plans_nothing_and_stays_usable():
    scheduler = make_scheduler()
    plan = scheduler.schedule()
    assert plan.scheduled == () and plan.num_tokens == 0
    assert scheduler.apply(plan, FakeRunner(scheduler._layout).step(plan)) == []
    assert not scheduler.has_unfinished and scheduler.counters.num_steps == 0
    scheduler.schedule()


def test_stop_id_ends_a_sequence_with_the_id_named_and_not_before_min_tokens():
    outputs, _ = expected_output(make_request("a", [5, 3], max_tokens=8))
    stop = outputs[2]
    assert stop not in outputs[:2]
    scheduler = make_scheduler()
    scheduler.add(make_request("stops", [5, 3], max_tokens=8, stop_token_ids=(stop,)))
    scheduler.add(make_request("waits", [5, 3], max_tokens=8, stop_token_ids=(stop,), min_tokens=3))
    scheduler.add(make_request("last", [5, 3], max_tokens=3, stop_token_ids=(stop,)))
    got = run(scheduler, FakeRunner(scheduler._layout))
    assert got["stops"].token_ids == outputs[:3] == got["last"].token_ids
    assert got["stops"].finish_reason is got["last"].finish_reason is FinishReason.STOP
    assert got["stops"].last.stop_token_id == stop
    assert got["waits"].token_ids == outputs[:8] and got["waits"].finish_reason is FinishReason.LENGTH
    assert got["waits"].last.stop_token_id is None


def test_max_tokens_ends_a_sequence_and_its_blocks_are_free_in_the_same_step():
    scheduler = make_scheduler(prefix=False)
    scheduler.add(make_request("a", range(7), max_tokens=2))
    runner = FakeRunner(scheduler._layout)
    step(scheduler, runner)
    assert scheduler.num_free_blocks == 62
    _, deltas = step(scheduler, runner)
    assert deltas[0].finish_reason is FinishReason.LENGTH
    assert scheduler.num_free_blocks == 64 and scheduler.get("a") is None


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "empty prompt; give at least one token"),
        (range(20), 1, "prompt of 20 tokens leaves no room to generate, max_model_len is 20"),
        (range(15), 6, "prompt of 15 tokens and max_tokens 6 make 21 tokens, max_model_len is 20"),
    ],
)
def test_requests_that_the_model_cannot_hold_are_refused(prompt, max_tokens, message):
    scheduler = make_scheduler(max_model_len=20)
    with pytest.raises(RequestError, match=message):
        scheduler.add(make_request("a", prompt, max_tokens))
    assert not scheduler.has_unfinished


def test_the_longest_request_that_the_model_holds_is_served():
    scheduler = make_scheduler(max_model_len=20)
    assert scheduler.limits.max_new_tokens(15) == 5
    scheduler.add(make_request("a", range(15), max_tokens=5))
    assert len(run(scheduler, FakeRunner(scheduler._layout))["a"].token_ids) == 5


def test_a_live_id_is_taken_and_an_ended_one_is_not():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    with pytest.raises(RequestError, match="'a' is still being served"):
        scheduler.add(make_request("a", [2]))
    step(scheduler, FakeRunner(scheduler._layout))
    with pytest.raises(RequestError, match="'a' is still being served"):
        scheduler.add(make_request("a", [2]))
    scheduler.abort("a")
    scheduler.add(make_request("a", [2]))


def test_a_full_queue_refuses_and_takes_again_once_there_is_room():
    scheduler = make_scheduler(max_waiting=2)
    for name in ("a", "b"):
        scheduler.add(make_request(name, [1]))
    with pytest.raises(CapacityError, match="2 requests wait and max_waiting is 2"):
        scheduler.add(make_request("c", [1]))
    scheduler.abort("a")
    scheduler.add(make_request("c", [1]))
    assert set(run(scheduler, FakeRunner(scheduler._layout))) == {"b", "c"}


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(17, 1), (10, 8), (1, 17)])
def test_request_larger_than_the_pool_is_refused_and_the_next_one_is_served(prompt_len, max_tokens):
    """Case 1."""
    scheduler = make_scheduler(num_blocks=5)  # 4 usable blocks, 16 tokens
    with pytest.raises(RequestError, match=r"need a cache of 17 tokens, the whole cache holds 16 \(4 blocks of 4\)"):
        scheduler.add(make_request("large", range(prompt_len), max_tokens))
    scheduler.add(make_request("short", [1, 2], max_tokens=3))
    assert list(run(scheduler, FakeRunner(scheduler._layout), max_steps=3)) == ["short"]


@pytest.mark.parametrize("prompt_len", [1, 10, 16])
def test_request_that_just_fits_the_pool_is_served(prompt_len):
    """Case 1: the last token is sampled but never stored, so 16 slots hold 17 tokens."""
    scheduler = make_scheduler(num_blocks=5)
    scheduler.add(make_request("exact", range(prompt_len), max_tokens=17 - prompt_len))
    scheduler.add(make_request("next", [1, 2], max_tokens=3))
    got = run(scheduler, FakeRunner(scheduler._layout), max_steps=40, after_step=lambda _: scheduler.check_integrity())
    assert len(got["exact"].token_ids) == 17 - prompt_len and len(got["next"].token_ids) == 3


def test_sequence_that_outgrows_the_pool_ends_with_its_tokens_and_the_next_one_is_served(monkeypatch):
    """Case 2."""
    scheduler = make_scheduler(num_blocks=5)
    monkeypatch.setattr("photon_jax.scheduler.limits.Limits.num_slots", lambda *_: 100)
    scheduler.add(make_request("grows", range(10), max_tokens=50))
    runner = FakeRunner(scheduler._layout)
    got = run(scheduler, runner, max_steps=20, after_step=lambda _: scheduler.check_integrity())
    tokens, _ = expected_output(make_request("a", range(10), max_tokens=50))
    assert got["grows"].token_ids == tokens[:7]
    assert got["grows"].finish_reason is FinishReason.LENGTH and scheduler.num_free_blocks == 4
    monkeypatch.undo()
    scheduler.add(make_request("next", [1, 2], max_tokens=3))
    assert len(run(scheduler, runner)["next"].token_ids) == 3


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
@pytest.mark.parametrize("max_num_batched_tokens", [8, 11, 64])
def test_no_chunk_is_larger_than_the_budget(max_num_seqs, max_num_batched_tokens):
    """Case 10, the part of the configuration."""
    scheduler = make_scheduler(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    for idx in range(6):
        scheduler.add(make_request(str(idx), range(idx, 20 * idx + 5)))
    largest = 0

    def look(plan):
        nonlocal largest
        largest = max(largest, plan.num_tokens)

    run(scheduler, FakeRunner(scheduler._layout), after_step=look)
    assert largest == max_num_batched_tokens


def test_a_budget_below_the_number_of_sequences_is_refused_at_the_start():
    """Case 10, the part of the configuration."""
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7)


@pytest.mark.parametrize("num_prompt", [1, 2, 9, 12, 13])
def test_score_request_gets_the_log_probabilities_of_its_own_tokens_once(num_prompt):
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=5, max_model_len=13)
    prompt = [(7 * i) % 50 for i in range(num_prompt)]
    for name in ("first", "again"):
        scheduler.add(make_request(name, prompt, score=True))
    scheduler.add(make_request("mate", range(6), max_tokens=7))
    got = run(scheduler, FakeRunner(scheduler._layout), after_step=lambda _: scheduler.check_integrity())
    logprobs, is_greedy = expected_scores(prompt)
    for name in ("first", "again"):
        assert got[name].token_ids == [] and got[name].finish_reason is FinishReason.LENGTH
        assert got[name].scores.logprobs.tolist() == logprobs.tolist()
        assert got[name].scores.is_greedy.tolist() == is_greedy.tolist()
        assert got[name].last.num_cached_tokens == 0
    assert got["mate"].token_ids == expected_output(make_request("mate", range(6), max_tokens=7))[0]
    assert scheduler.counters.num_prefix_hit_tokens == 0


def test_score_request_longer_than_the_model_is_refused_and_its_max_tokens_is_ignored():
    scheduler = make_scheduler(max_model_len=13)
    with pytest.raises(RequestError, match="prompt of 15 tokens make 15 tokens, max_model_len is 13"):
        scheduler.add(make_request("a", range(15), score=True))
    scheduler.add(make_request("b", range(14), max_tokens=500, score=True))  # the last one is scored, and not read
    assert list(run(scheduler, FakeRunner(scheduler._layout))) == ["b"]


def test_score_request_fills_the_prefix_cache_that_it_does_not_read():
    scheduler = make_scheduler()
    runner = FakeRunner(scheduler._layout)
    scheduler.add(make_request("score", range(12), score=True))
    run(scheduler, runner)
    scheduler.add(make_request("generate", range(12)))
    assert run(scheduler, runner)["generate"].last.num_cached_tokens == 8


def test_scores_of_a_continuation_reuse_the_blocks_before_its_prompts_last_token():
    scheduler = make_scheduler(max_num_batched_tokens=64)
    runner, prompt = FakeRunner(scheduler._layout), [(7 * i) % 50 for i in range(14)]
    for start in (1, 8, 9, 14):  # blocks of 4: the token before the first scored one must be computed
        scheduler.add(make_request(f"from {start}", prompt, score=True, score_start=start))
    plan = scheduler.schedule()
    assert [(item.start, item.num_new_tokens) for item in plan.scheduled] == [(12, 1), (0, 13), (4, 9), (8, 5)]
    scheduler.apply(plan, runner.step(plan))
    assert not scheduler.has_unfinished


def test_equal_prompts_of_one_step_share_the_blocks_that_it_fills():
    scheduler = make_scheduler(max_num_batched_tokens=64)
    runner, prompt = FakeRunner(scheduler._layout), [(7 * i) % 50 for i in range(14)]
    for name in ("a", "b", "c"):
        scheduler.add(make_request(name, prompt))
    plan = scheduler.schedule()
    assert [(item.start, item.num_new_tokens) for item in plan.scheduled] == [(0, 14), (12, 2), (12, 2)]
    assert len({tuple(item.seq.block_ids[:3]) for item in plan.scheduled}) == 1
    assert len({item.seq.block_ids[3] for item in plan.scheduled}) == 3
    scheduler.apply(plan, runner.step(plan))
    scheduler.check_integrity()
    tokens, _ = expected_output(make_request("a", prompt))
    assert [out.token_ids for out in run(scheduler, runner).values()] == [tokens[1:]] * 3


def test_score_request_preempted_between_chunks_gives_one_complete_result():
    """Case 16, the part of the scheduler."""
    scheduler = make_scheduler(max_num_batched_tokens=5)
    runner, prompt = FakeRunner(scheduler._layout), [(11 * i) % 50 for i in range(18)]
    scheduler.add(make_request("score", prompt, score=True))
    for _ in range(2):
        assert step(scheduler, runner)[1] == []
    scheduler._preempt(scheduler.get("score"))
    got = run(scheduler, runner)["score"]
    assert got.scores.logprobs.tolist() == expected_scores(prompt)[0].tolist()
    assert runner.num_computed_tokens == 10 + (17 - 8)  # two full blocks were kept, and their scores


def test_state_slots_are_unique_while_running_and_given_back():
    scheduler = make_scheduler(max_num_seqs=2)
    for idx in range(4):
        scheduler.add(make_request(str(idx), [idx], max_tokens=2 + idx))

    def look(plan):
        slots = [item.seq.state_slot for item in plan.scheduled if item.seq.status is SequenceStatus.RUNNING]
        assert len(set(slots)) == len(slots) and set(slots) <= {1, 2}

    run(scheduler, FakeRunner(scheduler._layout), after_step=look)
    assert sorted(scheduler._free_slots) == [1, 2]


def test_a_hundred_thousand_waiting_requests_are_served_and_aborted_quickly():
    scheduler = make_scheduler(num_blocks=2049, max_num_seqs=256, max_num_batched_tokens=2048, prefix=False)
    begin_s = time.process_time()
    for idx in range(100_000):
        scheduler.add(make_request(str(idx), (idx % 97, 1, 2), max_tokens=1))
    with pytest.raises(CapacityError):
        scheduler.add(make_request("one more", [1]))
    for idx in range(99_999, 20_000, -2):
        assert scheduler.abort(str(idx)) is not None
    assert scheduler.num_waiting == 60_000
    run(scheduler, FakeRunner(scheduler._layout, check_cache=False))
    assert scheduler.counters.num_length_stopped == 60_000
    assert scheduler.num_waiting == scheduler.num_running == 0
    assert time.process_time() - begin_s < 30  # about 3 s; a queue with a linear operation takes minutes
