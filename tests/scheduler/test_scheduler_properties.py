"""Random traffic over random pools: every request gets its own tokens, and the books balance after every event.

The planted faults at the end show that the property would notice each kind of mistake.
"""

import dataclasses

import pytest
from helpers.scheduler_play import Met, Play

from photon_jax.cache.block_manager import BlockManager
from photon_jax.cache.prefix_cache import PrefixCache
from photon_jax.request import SamplingParams
from photon_jax.scheduler import scheduler
from photon_jax.scheduler.scheduler import Scheduler
from photon_jax.scheduler.sequence import SequenceState

NUM_SEEDS = 300


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

    def offer(self, seq, num_tokens):
        original(self, seq, min(num_tokens + 1, seq.num_tokens))

    monkeypatch.setattr(Scheduler, "_offer_full_blocks", offer)


def let_score_requests_read_the_cache(monkeypatch):
    """Score requests that skip tokens which others computed, and so miss their log-probabilities."""
    original = Scheduler._admit

    def admit(self, seq, reserve):
        request = seq.request
        seq.request = dataclasses.replace(request, score=False, params=SamplingParams(max_tokens=1))
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


def apply_void_rows(monkeypatch):
    """Results of a step that ran before a preemption, taken over after it."""
    original = Scheduler.apply

    def apply(self, plan, result):
        live = [row._replace(admission=row.seq.admission) if row.seq.admission else row for row in plan.scheduled]
        object.__setattr__(plan, "scheduled", tuple(live))
        return original(self, plan, result)

    monkeypatch.setattr(Scheduler, "apply", apply)


def plan_past_the_last_token(monkeypatch):
    """A sequence that is planned again though the steps on their way bring it to max_tokens."""
    rest = property(lambda seq: seq.num_tokens - seq.num_computed_tokens)
    monkeypatch.setattr(SequenceState, "num_uncomputed_tokens", rest)


def preempt_before_results_are_known(monkeypatch):
    """Blocks taken from others though results on their way might have freed some."""
    monkeypatch.setattr(scheduler, "may_lack_blocks", lambda *arguments: False)


def plan_before_the_mask_is_known(monkeypatch):
    """A sequence with a grammar that is planned again while its last token is on its way."""
    monkeypatch.setattr(SequenceState, "awaits_token", property(lambda seq: False))


def forget_the_matcher_at_resume(monkeypatch):
    """A matcher that begins anew where its sequence goes on."""
    original = Scheduler._preempt

    def preempt(self, seq):
        original(self, seq)
        seq.matcher = None if seq.request.grammar is None else seq.request.grammar.start()

    monkeypatch.setattr(Scheduler, "_preempt", preempt)


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
    apply_void_rows,
    plan_past_the_last_token,
    preempt_before_results_are_known,
    plan_before_the_mask_is_known,
    forget_the_matcher_at_resume,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_turns_the_property_red(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(NUM_SEEDS):
            Play(seed).run()
