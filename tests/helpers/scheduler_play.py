"""A play: one scheduler under random arrivals, aborts, stops and preemptions, checked after every event."""

import collections
import dataclasses
import random

import numpy as np
from helpers.fake_runner import (
    VOCAB_SIZE,
    Collector,
    FakeGrammar,
    FakeRunner,
    check_plan,
    expected_logprobs,
    expected_output,
    expected_scores,
    expected_tops,
    make_request,
    make_scheduler,
)

from photon_jax.errors import RequestError
from photon_jax.outputs import FinishReason
from photon_jax.request import Request

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
    preempted_in_flight: int = 0
    restarts: int = 0
    drains: int = 0  # plans that were put off until results were known
    multi_steps: int = 0  # plans of several steps
    overlaps: int = 0  # plans made while a sequence had tokens that were not known
    scores: int = 0
    preempted_scores: int = 0
    prompt_logprobs: int = 0
    grammars: int = 0
    held_back: int = 0  # plans without a running sequence whose grammar waited for its token, beside others that ran


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
            max_steps=rng.choice([1, 4]),
            prefix=rng.random() < 0.8,
            step_sizes=(4, 6, 9, 13) if seed % 2 else (),
        )
        self.runner = FakeRunner(self.scheduler._layout)
        self.steps_ahead = rng.choice([0, 1])
        self.in_flight = collections.deque()
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
            if self.rng.random() < 0.005:
                self.restart()
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
            score_start=rng.randint(1, max(len(prompt), 1)),
            logprobs=rng.choice([None, None, 1, 3, 20]),
            prompt_logprobs=rng.choice([None, None, None, 0, 5]),
            grammar=FakeGrammar(rng.randint(1, 20), rng.random() < 0.8) if rng.random() < 0.25 else None,
        )
        try:
            self.scheduler.add(request)
        except RequestError:
            self.met.refused += 1
        else:
            self.requests[request.request_id] = request
            self.met.requests += 1
            self.met.scores += request.score
            self.met.prompt_logprobs += request.wants_scores and not request.score
            self.met.grammars += request.grammar is not None and not request.score
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
            self.met.preempted_scores += seq.request.wants_scores and seq.num_scored > 0
            self.met.preempted_in_flight += seq.num_pending > 0
            self.scheduler._preempt(seq)
            self.scheduler.check_integrity()

    def restart(self) -> None:
        """The device failed: the cache and all that was on its way are gone."""
        self.in_flight.clear()
        self.runner = FakeRunner(self.scheduler._layout)
        self.met.restarts += self.scheduler.num_running > 0
        self.met.forced_preemptions += self.scheduler.num_running
        self.scheduler.restart(b"%d" % self.rng.randrange(2**30))
        self.scheduler.check_integrity()

    def step(self) -> None:
        self.met.overlaps += any(seq.num_pending for seq in self.scheduler._running.values())
        is_awaited = any(seq.awaits_token for seq in self.scheduler._running.values())
        plan = self.scheduler.schedule()
        self.met.held_back += is_awaited and bool(plan.scheduled)
        check_plan(plan, self.scheduler._config)
        self.scheduler.check_integrity()
        self.met.multi_steps += plan.num_steps > 1
        if plan.scheduled:
            self.in_flight.append((plan, self.runner.step(plan)))
        elif self.scheduler.num_running:
            self.met.drains += 1
        if plan.scheduled and len(self.in_flight) <= self.steps_ahead:
            return
        if not self.in_flight:
            return
        plan, result = self.in_flight.popleft()
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
            if name not in self.ended_early:
                self.check_scores(request, out)
            if request.score and name not in self.ended_early:
                assert out.token_ids == [] and out.finish_reason is FinishReason.LENGTH
                continue
            tokens, reason = expected_output(request)
            if name in self.ended_early:
                got = out.token_ids if out is not None else []
                assert got == tokens[: len(got)], f"tokens of {name}, which was ended"
                continue
            assert (out.token_ids, out.finish_reason) == (tokens, reason), f"tokens of {name}"
            want = expected_logprobs(request, len(tokens))
            assert np.array(out.logprobs).tolist() == want.tolist(), f"logprobs of {name}"
            num_top = request.params.logprobs or 0
            ids, values = expected_tops([*request.prompt_token_ids, *tokens], num_top)
            span = slice(-len(tokens), None) if num_top else slice(0)
            assert np.array(out.top_ids).tolist() == ids[span].tolist(), f"top ids of {name}"
            assert np.array(out.top_logprobs).tolist() == values[span].tolist(), f"top logprobs of {name}"

    @staticmethod
    def check_scores(request, out) -> None:
        if not request.wants_scores:
            assert out.scores is None, f"{request.request_id} got scores that it did not want"
            return
        kept = slice(request.score_start - 1, None)
        tops = expected_tops(request.prompt_token_ids, request.params.prompt_logprobs or 0)
        found = (out.scores.logprobs, out.scores.is_greedy, out.scores.top_ids, out.scores.top_logprobs)
        for ours, expected in zip(found, (*expected_scores(request.prompt_token_ids), *tops), strict=True):
            assert ours.tolist() == expected[kept].tolist(), f"scores of {request.request_id}"
