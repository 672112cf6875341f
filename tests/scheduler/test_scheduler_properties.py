"""Random traffic over random pools: every request gets its own tokens, and the books balance after every event.

A play is one scheduler under random arrivals, aborts and stops. The planted faults at the end show that the property
would notice each kind of mistake.
"""

import dataclasses
import random

import numpy as np
import pytest
from helpers.fake_runner import (
    VOCAB_SIZE,
    Collector,
    FakeRunner,
    check_plan,
    expected_logprobs,
    expected_output,
    expected_scores,
    make_request,
    make_scheduler,
)

from photon_jax.cache.block_manager import BlockManager
from photon_jax.cache.prefix_cache import PrefixCache
from photon_jax.errors import RequestError
from photon_jax.request import FinishReason, Request
from photon_jax.scheduler.scheduler import Scheduler

NUM_SEEDS = 300
MAX_STEPS = 3000


@dataclasses.dataclass
class Met:
    """What the plays met; a property that met little has shown little."""

    requests: int = 0
    refused: int = 0
    preemptions: int = 0  # for want of blocks
    forced_preemptions: int = 0  # at a random moment, which reaches every point of a sequence's life
    chunks: int = 0
    hits: int = 0
    stopped: int = 0
    aborted: int = 0
    aborted_in_flight: int = 0
    scores: int = 0
    preempted_scores: int = 0


class Play:
    """One scheduler under random traffic, checked after every event."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.met = Met()
        block_size, max_num_seqs = rng.choice([1, 2, 4, 8]), rng.randint(1, 8)
        self.num_blocks = 1 + rng.randint(24, 72) // block_size
        self.scheduler = make_scheduler(
            num_blocks=self.num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(max_num_seqs, rng.choice([1, 2, 3, 7, 16, 64])),
            max_model_len=rng.choice([24, 60]),
            prefix=rng.random() < 0.8,
        )
        self.runner = FakeRunner(self.scheduler._layout)
        self.collector = Collector()
        self.requests: dict[str, Request] = {}
        self.ended_early: set[str] = set()
        self.stems = [[rng.randrange(VOCAB_SIZE) for _ in range(30)] for _ in range(3)]

    def run(self) -> Met:
        num_left, rate = self.rng.randint(5, 25), self.rng.choice([0.2, 0.7])
        for _ in range(MAX_STEPS):
            while num_left and self.rng.random() < rate:
                num_left -= 1
                self.arrive(num_left)
            if self.rng.random() < 0.06:
                self.end_one()
            if self.rng.random() < 0.04:
                self.preempt_last()
            self.step()
            if not num_left and not self.scheduler.has_unfinished:
                break
        else:
            raise AssertionError(f"not done after {MAX_STEPS} steps")
        self.check_end()
        counters = self.scheduler.counters
        self.met.preemptions = counters.num_preemptions - self.met.forced_preemptions
        self.met.chunks = counters.num_chunks
        self.met.hits, self.met.stopped = counters.num_prefix_hit_tokens, counters.num_stopped
        return self.met

    def arrive(self, idx: int) -> None:
        rng = self.rng
        stem = rng.choice(self.stems)[: rng.randint(0, rng.choice([3, 3, 24]))]
        prompt = stem + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 6))]
        max_tokens = rng.randint(1, 24)
        request = make_request(
            str(idx),
            prompt,
            max_tokens,
            min_tokens=rng.randint(0, min(4, max_tokens)),
            stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 8]))),
            score=rng.random() < 0.15,
        )
        try:
            self.scheduler.add(request)
        except RequestError:
            self.met.refused += 1
        else:
            self.requests[request.request_id] = request
            self.met.requests += 1
            self.met.scores += request.score
        self.scheduler.check_integrity()

    def end_one(self) -> bool:
        if not self.requests:
            return False
        name = self.rng.choice(sorted(self.requests))
        is_live = self.scheduler.get(name) is not None
        if self.rng.random() < 0.7:
            delta = self.scheduler.abort(name)
            assert (delta is not None) == is_live
            if delta is not None:
                self.collector.take([delta])
                self.met.aborted += 1
        else:
            self.scheduler.finish(name)
        if is_live:
            self.ended_early.add(name)
        assert self.scheduler.get(name) is None
        self.scheduler.check_integrity()
        return is_live

    def preempt_last(self) -> None:
        if self.scheduler.num_running:
            seq = next(reversed(self.scheduler._running.values()))
            self.met.forced_preemptions += 1
            self.met.preempted_scores += seq.request.score
            self.scheduler._preempt(seq)
            self.scheduler.check_integrity()

    def step(self) -> None:
        plan = self.scheduler.schedule()
        check_plan(plan, self.scheduler._config)
        self.scheduler.check_integrity()
        result = self.runner.step(plan)
        dropped: set[str] = set()
        if self.rng.random() < 0.05 and self.end_one():
            dropped = self.ended_early & {item.seq.request_id for item in plan.scheduled}
            self.met.aborted_in_flight += len(dropped)
        deltas = self.scheduler.apply(plan, result)
        assert not dropped & {delta.request_id for delta in deltas}
        self.collector.take(deltas)
        self.scheduler.check_integrity()
        assert self.scheduler.num_running <= self.scheduler._config.max_num_seqs

    def check_end(self) -> None:
        scheduler = self.scheduler
        assert scheduler.num_free_blocks == self.num_blocks - 1, "blocks are held though nothing runs"
        scheduler._blocks.check_integrity([])
        assert scheduler.counters.num_added == scheduler.counters.num_finished == self.met.requests
        for name, request in self.requests.items():
            out = self.collector.outputs.get(name)
            if request.score and name not in self.ended_early:
                logprobs, is_greedy = expected_scores(request.prompt_token_ids)
                assert out.token_ids == [] and out.finish_reason is FinishReason.LENGTH
                assert out.last.prompt_logprobs.tolist() == logprobs.tolist(), f"scores of {name}"
                assert out.last.prompt_is_greedy.tolist() == is_greedy.tolist(), f"scores of {name}"
                continue
            tokens, reason = expected_output(request)
            if name in self.ended_early:
                got = out.token_ids if out is not None else []
                assert got == tokens[: len(got)], f"tokens of {name}, which was ended"
                continue
            assert (out.token_ids, out.finish_reason) == (tokens, reason), f"tokens of {name}"
            want = expected_logprobs(request, len(tokens))
            assert np.array(out.logprobs).tolist() == want.tolist(), f"logprobs of {name}"


def test_every_request_gets_its_own_tokens_and_the_books_balance():
    """Cases 3, 5, 7 and 8 under random traffic."""
    total = Met()
    for seed in range(NUM_SEEDS):
        met = dataclasses.asdict(Play(seed).run())
        total = Met(**{name: value + met[name] for name, value in dataclasses.asdict(total).items()})
    too_few = {name: value for name, value in dataclasses.asdict(total).items() if value < 20}
    assert not too_few, f"met too little to show anything: {too_few}"


def test_the_same_traffic_gives_the_same_plans():
    def record(seed: int) -> list[object]:
        play, seen = Play(seed), []
        step = play.runner.step

        def spy(plan):
            seen.append([(i.seq.request_id, i.start, i.num_new_tokens, tuple(i.seq.block_ids)) for i in plan.scheduled])
            return step(plan)

        play.runner.step = spy
        play.run()
        return seen

    for seed in range(5):
        assert record(seed) == record(seed)


def keep_blocks_of_preempted(monkeypatch):
    """A forgotten release: preempted sequences lose their list, and the blocks stay held."""
    original = Scheduler._preempt

    def preempt(self, seq):
        lost, seq.block_ids = seq.block_ids, seq.block_ids[:-1]
        assert lost
        original(self, seq)

    monkeypatch.setattr(Scheduler, "_preempt", preempt)


def release_twice(monkeypatch):
    """A double free at the end of a sequence."""
    original = Scheduler._end

    def end(self, seq, reason):
        blocks = list(seq.block_ids)
        original(self, seq, reason)
        self._blocks.release(blocks)

    monkeypatch.setattr(Scheduler, "_end", end)


def drop_last_token_at_resume(monkeypatch):
    """An off-by-one at resume: the token sampled last is forgotten, so it comes twice."""
    original = Scheduler._preempt

    def preempt(self, seq):
        original(self, seq)
        if seq.num_output_tokens:
            seq.token_ids.pop()

    monkeypatch.setattr(Scheduler, "_preempt", preempt)


def resume_from_the_old_length(monkeypatch):
    """A resume that believes the first token of its new block computed."""
    original = Scheduler._admit

    def admit(self, seq, reserve):
        admitted = original(self, seq, reserve)
        if admitted and seq.num_preemptions and seq.num_uncomputed_tokens > 1:
            seq.num_computed_tokens += 1
        return admitted

    monkeypatch.setattr(Scheduler, "_admit", admit)


def hash_without_parent(monkeypatch):
    """A key of the block's own tokens and place, whatever comes before them."""

    def extend_chain(self, chain, token_ids, num_blocks):
        size = self._block_size
        for start in range(len(chain) * size, num_blocks * size, size):
            chain.append(repr((start, token_ids[start : start + size][-1])).encode())

    monkeypatch.setattr(PrefixCache, "extend_chain", extend_chain)


def reuse_the_last_token_too(monkeypatch):
    """A lookup that may cover every token, so that none is left to compute."""
    original = BlockManager.find_cached

    def find_cached(self, chain, token_ids, num_blocks):
        return original(self, chain, token_ids, len(token_ids) // self._layout.block_size)

    monkeypatch.setattr(BlockManager, "find_cached", find_cached)


def share_without_reviving(monkeypatch):
    """Cached blocks that are held again, yet stay in the line of those to evict."""

    def share(self, block_ids):
        for block_id in block_ids:
            self._ref_count[block_id] += 1

    monkeypatch.setattr(BlockManager, "share", share)


def offer_blocks_too_early(monkeypatch):
    """Blocks cached one before they are full of computed tokens, keyed by what will come."""
    original = Scheduler._offer_full_blocks

    def offer(self, seq):
        seq.num_computed_tokens += 1
        try:
            if seq.num_computed_tokens <= seq.num_tokens:
                original(self, seq)
        finally:
            seq.num_computed_tokens -= 1

    monkeypatch.setattr(Scheduler, "_offer_full_blocks", offer)


def let_score_requests_read_the_cache(monkeypatch):
    """Score requests that skip tokens which others computed, and so miss their log-probabilities."""
    original = Scheduler._admit

    def admit(self, seq, reserve):
        request = seq.request
        seq.request = dataclasses.replace(request, score=False)
        try:
            return original(self, seq, reserve)
        finally:
            seq.request = request

    monkeypatch.setattr(Scheduler, "_admit", admit)


def forget_the_state_slot(monkeypatch):
    """A state slot that is not given back, but handed out anew."""
    original = Scheduler._stop_running

    def stop_running(self, seq):
        original(self, seq)
        self._free_slots[-1] = 1

    monkeypatch.setattr(Scheduler, "_stop_running", stop_running)


FAULTS = [
    keep_blocks_of_preempted,
    release_twice,
    drop_last_token_at_resume,
    resume_from_the_old_length,
    hash_without_parent,
    reuse_the_last_token_too,
    share_without_reviving,
    offer_blocks_too_early,
    let_score_requests_read_the_cache,
    forget_the_state_slot,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_turns_the_property_red(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(NUM_SEEDS):
            Play(seed).run()
