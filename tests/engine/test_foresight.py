"""What a crowd of requests may need: every layout that its steps come in, and none of kinds that nobody asks for."""

import random

import pytest
from helpers.fake_runner import FakeRunner, make_request, make_scheduler, run

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import SchedulerConfig
from photon_jax.engine.buckets import TileChoice, padded_buckets, tiled_buckets
from photon_jax.engine.foresight import Crowd, Foresight
from photon_jax.engine.stand_ins import compile_order

LIMITS = {"max_num_seqs": 20, "max_num_batched_tokens": 64, "block_size": 4, "num_blocks": 4001, "max_steps": 4}
MAX_LEN = 300


def every_buckets():
    config = SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=64, max_steps_per_dispatch=4)
    layout = CacheLayout(num_blocks=LIMITS["num_blocks"], block_size=4)
    tiles = TileChoice((2, 8), query_tile=16)
    yield tiled_buckets(config, layout, max_model_len=MAX_LEN, tiles=tiles)
    yield padded_buckets(config, layout, max_model_len=MAX_LEN)


def draw_request(rng, index):
    fields = {}
    if rng.random() < 0.5:
        fields["temperature"] = rng.choice([0.0, 0.7])
    if rng.random() < 0.2:
        fields["logprobs"] = 2
    if rng.random() < 0.2:
        fields["prompt_logprobs"] = rng.choice([0, 3])
    if rng.random() < 0.2:
        fields["bad_word_ids"] = ((3,),)
    prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 60))]
    return make_request(str(index), prompt, max_tokens=rng.randrange(1, 20), **fields)


def crowd_of(requests, num_prompt_tokens=None, num_blocks=LIMITS["num_blocks"]):
    count = sum(len(each.prompt_token_ids) for each in requests) if num_prompt_tokens is None else num_prompt_tokens
    return Crowd.of(requests, num_prompt_tokens=count, cache=CacheLayout(num_blocks=num_blocks, block_size=4))


@pytest.mark.parametrize("seed", range(20))
def test_every_step_of_a_crowd_comes_in_a_layout_that_it_may_need(seed):
    rng = random.Random(seed)
    requests = [draw_request(rng, index) for index in range(rng.randrange(1, 24))]
    scheduler = make_scheduler(**LIMITS, max_model_len=MAX_LEN)
    for request in requests:
        scheduler.add(request)
    specs, plans = list(every_buckets()), []

    def choose(plan):
        plans.extend(spec.choose(plan) for spec in specs if plan.scheduled)

    launch = FakeRunner(scheduler._layout)
    step = launch.step
    launch.step = lambda plan: choose(plan) or step(plan)  # before the step: a sequence may have no blocks after it
    run(scheduler, launch)
    crowd = crowd_of(requests)
    needed = {layout for spec in specs for layout in spec.layouts() if crowd.may_need(layout, spec)}
    assert plans and set(plans) <= needed


def needed_by(requests, spec, num_prompt_tokens=None):
    crowd = crowd_of(requests, num_prompt_tokens)
    return [layout for layout in spec.layouts() if crowd.may_need(layout, spec)]


def test_programs_of_greedy_steps_and_of_others_are_needed_by_those_who_sample_so():
    *_, spec = every_buckets()
    greedy, random_one = make_request("0", [1] * 3, temperature=0.0), make_request("1", [1] * 3, temperature=0.5)
    kinds = [
        {each.is_greedy for each in needed_by(crowd, spec)}
        for crowd in ([greedy] * 2, [random_one] * 2, [greedy, random_one])
    ]
    assert kinds == [{True}, {False}, {False, True}]


@pytest.mark.parametrize("spec", list(every_buckets()), ids=["tiled", "padded"])
def test_kinds_and_sizes_that_nobody_asks_for_are_not_needed(spec):
    plain = make_request("0", [1] * 3)
    layouts = needed_by([plain] * 2, spec)
    assert layouts and not any(each.has_scores or each.has_top or each.has_controls for each in layouts)
    assert max(each.num_tokens for each in layouts) < 64
    likeliest_alone = needed_by([plain, make_request("1", [1] * 3, logprobs=1)], spec)
    assert likeliest_alone == layouts, "which every step returns"
    with_top = needed_by([plain, make_request("1", [1] * 3, logprobs=2)], spec)
    assert any(each.has_top for each in with_top) and not any(each.has_scores or each.has_controls for each in with_top)
    scored = needed_by([plain, make_request("1", [1] * 3, prompt_logprobs=1)], spec)
    assert not any(each.has_top and each.num_tokens == each.num_rows for each in scored), "decode steps have no prompt"
    # what is computed already takes a row, and no more
    assert needed_by([make_request("0", [1] * 50)] * 2, spec, 5) == [
        each for each in needed_by([make_request("0", [1] * 50)] * 2, spec) if each.num_tokens < 64
    ]


@pytest.mark.parametrize("spec", list(every_buckets()), ids=["tiled", "padded"])
def test_what_is_missing_is_the_same_whether_it_was_asked_before_or_not(spec):
    rng, cache = random.Random(7), CacheLayout(num_blocks=LIMITS["num_blocks"], block_size=4)
    asked, there, answers = Foresight(spec, cache), set(), set()
    for count in range(400):
        requests = [draw_request(rng, index) for index in range(rng.randrange(1, 24))]
        if rng.random() < 0.1:
            there.add(rng.choice(spec.layouts()))
        num_prompt_tokens = rng.randrange(100)
        missing = asked.missing(requests, num_prompt_tokens, there)
        needed = needed_by(requests, spec, num_prompt_tokens)
        assert missing == compile_order([layout for layout in needed if layout not in there], list(there)), count
        answers.add(tuple(missing))
        missing.clear()  # the caller's own
    assert len(answers) > 20


def test_where_all_is_compiled_or_nobody_asks_nothing_is_missing():
    spec, cache = next(every_buckets()), CacheLayout(num_blocks=LIMITS["num_blocks"], block_size=4)
    asked, requests = Foresight(spec, cache), [make_request("0", [1] * 3)]
    assert not asked.missing([], 0, set()) and asked.missing(requests, 3, set())
    assert not asked.missing(requests, 3, set(spec.layouts()))


def test_crowds_in_the_same_buckets_are_looked_at_once(monkeypatch):
    spec, cache = next(every_buckets()), CacheLayout(num_blocks=LIMITS["num_blocks"], block_size=4)
    looks, may_need = [], Crowd.may_need
    monkeypatch.setattr(Crowd, "may_need", lambda crowd, *args: looks.append(crowd) or may_need(crowd, *args))
    asked = Foresight(spec, cache)
    for count in range(200):
        asked.missing([make_request("0", [1] * (1 + count % 8))], 1 + count % 8, set())
    assert 0 < len(looks) < 10 * len(spec.layouts())
