"""Scheduler: which tokens of which sequences each step computes, and what becomes of the results. Host only."""

import collections

import numpy as np

from photon_jax.cache.block_manager import BlockManager
from photon_jax.cache.layout import CacheLayout
from photon_jax.config import CacheConfig, SchedulerConfig
from photon_jax.errors import CapacityError, RequestError
from photon_jax.request import FinishReason, Request, TokenDelta
from photon_jax.scheduler.counters import SchedulerCounters
from photon_jax.scheduler.plan import ScheduledSequence, StepPlan, StepResult
from photon_jax.scheduler.sequence import SequenceState, SequenceStatus


class Scheduler:
    """A deterministic state machine: the same calls give the same plans.

    `schedule` alone takes blocks, and preempts; `apply`, `abort` and `finish` alone end sequences. Requests are served
    in the order of their arrival: no running sequence arrived after a waiting one, and the one to preempt is the
    running one that arrived last. So the first running sequence always advances, and every request ends.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        layout: CacheLayout,
        *,
        max_model_len: int,
        namespace: bytes = b"",
    ) -> None:
        self.counters = SchedulerCounters()
        self._config = config
        self._layout = layout
        self._max_model_len = max_model_len
        self._blocks = BlockManager(layout, enable_prefix_caching=cache.enable_prefix_caching, namespace=namespace)
        # both in the order of arrival
        self._waiting: collections.OrderedDict[str, SequenceState] = collections.OrderedDict()
        self._running: dict[str, SequenceState] = {}
        self._free_slots = list(range(config.max_num_seqs, 0, -1))  # the next one is at the end
        self._in_flight: StepPlan | None = None

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, the idle ones of the prefix cache among them."""
        return self._blocks.num_free

    @property
    def num_idle_blocks(self) -> int:
        """Blocks of the prefix cache that no sequence holds."""
        return self._blocks.num_idle

    def get(self, request_id: str) -> SequenceState | None:
        """Returns the state of a waiting or running request, None for any other."""
        return self._running.get(request_id) or self._waiting.get(request_id)

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """Returns the greatest max_tokens that a prompt of this length may ask for; below 1 if none.

        The last token sampled is never fed back, so it counts for max_model_len, yet takes no place in the cache.
        """
        return min(self._max_model_len, self._layout.max_tokens + 1) - num_prompt_tokens

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue.

        Raises:
          RequestError: it can never be served, or its id is taken.
          CapacityError: the queue is full.
        """
        num_slots = self._check(request)
        if len(self._waiting) >= self._config.max_waiting:
            raise CapacityError(
                f"the queue is full: {len(self._waiting)} requests wait and max_waiting is {self._config.max_waiting}; "
                "try again later or raise SchedulerConfig.max_waiting"
            )
        self._waiting[request.request_id] = SequenceState(
            request=request,
            arrival=self.counters.num_added,
            token_ids=list(request.prompt_token_ids),
            max_num_blocks=min(self._layout.blocks_for(num_slots), self._layout.num_usable_blocks),
        )
        self.counters.num_added += 1

    def _check(self, request: Request) -> int:
        """Returns how many tokens of the cache the request takes at its greatest length."""
        name, num_prompt = f"request {request.request_id!r}", len(request.prompt_token_ids)
        if self.get(request.request_id) is not None:
            raise RequestError(f"{name} is still being served; give each live request an id of its own")
        if num_prompt == 0:
            raise RequestError(f"{name} has an empty prompt; give at least one token")
        max_tokens, what = 0, f"prompt of {num_prompt} tokens"
        if not request.score:
            assert request.params.max_tokens is not None, f"{name} has no max_tokens"
            max_tokens = request.params.max_tokens
            if num_prompt + 1 > self._max_model_len:
                raise RequestError(
                    f"{name}: {what} leaves no room to generate, max_model_len is {self._max_model_len}; "
                    "shorten the prompt or raise EngineConfig.max_model_len"
                )
            what += f" and max_tokens {max_tokens}"
        if num_prompt + max_tokens > self._max_model_len:
            raise RequestError(
                f"{name}: {what} make {num_prompt + max_tokens} tokens, max_model_len is {self._max_model_len}; "
                "ask for fewer or raise EngineConfig.max_model_len"
            )
        num_slots = num_prompt + max(max_tokens - 1, 0)  # the last token sampled is never fed back
        if num_slots > self._layout.max_tokens:
            raise RequestError(
                f"{name}: {what} need a cache of {num_slots} tokens, the whole cache holds {self._layout.max_tokens} "
                f"({self._layout.num_usable_blocks} blocks of {self._layout.block_size}); "
                "ask for fewer, or raise CacheConfig.num_blocks or memory_fraction"
            )
        return num_slots

    def schedule(self) -> StepPlan:
        """Decides the next step, which must be applied before the next call; empty only if nothing is left to do."""
        assert self._in_flight is None, "schedule() was called again before apply()"
        rows, preempted = self._schedule_running(self._config.max_num_batched_tokens)
        if not preempted:
            num_tokens = sum(row.num_new_tokens for row in rows)
            rows += self._schedule_waiting(self._config.max_num_batched_tokens - num_tokens)
        rows.sort(key=lambda row: row.num_new_tokens > 1)  # decode rows first; the order is stable
        plan = StepPlan(tuple(rows), tuple(preempted))
        assert rows or not self.has_unfinished, f"{self.num_waiting} waiting, {self.num_running} running, empty plan"
        if rows:
            self._in_flight = plan
            self.counters.num_steps += 1
            self.counters.num_scheduled_tokens += plan.num_tokens
            self.counters.num_chunks += sum(row.num_new_tokens < row.seq.num_uncomputed_tokens for row in rows)
        return plan

    def _schedule_running(self, budget: int) -> tuple[list[ScheduledSequence], list[str]]:
        rows: list[ScheduledSequence] = []
        preempted: list[str] = []
        # decoding ones first, so that a long prompt never makes them wait; each kind in the order of arrival
        for seq in sorted(self._running.values(), key=lambda seq: seq.num_uncomputed_tokens > 1):
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted for one that arrived earlier
            if budget == 0:
                break
            num_new_tokens = min(seq.num_uncomputed_tokens, budget)
            preempted += self._grow(seq, seq.num_computed_tokens + num_new_tokens)
            if seq.status is SequenceStatus.RUNNING:
                rows.append(_make_row(seq, num_new_tokens))
                budget -= num_new_tokens
        assert all(row.seq.status is SequenceStatus.RUNNING for row in rows), "a scheduled sequence was preempted"
        return rows, preempted

    def _grow(self, seq: SequenceState, num_tokens: int) -> list[str]:
        """Gives `seq` the blocks for `num_tokens`; returns the ids preempted for them, maybe its own."""
        num_missing = self._layout.blocks_for(num_tokens) - len(seq.block_ids)
        preempted: list[str] = []
        if num_missing <= 0:
            return preempted
        assert seq.num_uncomputed_tokens == 1, f"{seq.request_id!r} was admitted without {num_missing} of its blocks"
        while not self._blocks.can_allocate(num_missing):
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            preempted.append(victim.request_id)
            if victim is seq:
                return preempted
        seq.block_ids += self._blocks.allocate(num_missing)
        return preempted

    def _preempt(self, seq: SequenceState) -> None:
        """Takes the blocks of `seq` and puts it before the waiting ones; its tokens stay, to be computed again."""
        self._stop_running(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        self._waiting[seq.request_id] = seq
        self._waiting.move_to_end(seq.request_id, last=False)
        self.counters.num_preemptions += 1

    def _stop_running(self, seq: SequenceState) -> None:
        # full blocks that the prefix cache keeps   become idle: a resume or another prompt may find them
        # the others, and the partial last block    free
        del self._running[seq.request_id]
        self._blocks.release(seq.block_ids)
        self._free_slots.append(seq.state_slot)
        seq.block_ids = []
        seq.num_computed_tokens = 0
        seq.num_offered_blocks = 0
        seq.state_slot = 0

    def _schedule_waiting(self, budget: int) -> list[ScheduledSequence]:
        rows: list[ScheduledSequence] = []
        # blocks that the next steps may want: one more for each running sequence that can grow. Admission leaves them
        # alone, so that a sequence is not admitted only to be preempted before it makes progress
        reserve = sum(seq.may_grow for seq in self._running.values())
        while self._waiting and budget > 0 and self._free_slots:
            seq = next(iter(self._waiting.values()))
            if not self._admit(seq, reserve):
                break
            num_new_tokens = min(seq.num_uncomputed_tokens, budget)
            rows.append(_make_row(seq, num_new_tokens))
            budget -= num_new_tokens
            reserve += seq.may_grow
        return rows

    def _admit(self, seq: SequenceState, reserve: int) -> bool:
        """Gives `seq` blocks for all its tokens, cached ones where they exist; returns False if too few are free."""
        # tokens [0, hits)   blocks shared with the prefix cache, at most up to the last token: one must be computed
        # tokens [hits, end) new blocks, the last one maybe partial
        hits: list[int] = []
        if not seq.request.score:  # a score request needs the logits at each of its tokens
            num_full = (seq.num_tokens - 1) // self._layout.block_size
            hits = self._blocks.find_cached(seq.block_digests, seq.token_ids, num_full)
        num_blocks = self._layout.blocks_for(seq.num_tokens)
        num_taken = num_blocks - len(hits) + self._blocks.count_idle(hits)
        if not self._blocks.can_allocate(num_taken + reserve + (num_blocks < seq.max_num_blocks)):
            return False
        del self._waiting[seq.request_id]
        self._running[seq.request_id] = seq
        self._blocks.share(hits)
        seq.block_ids = hits + self._blocks.allocate(num_blocks - len(hits))
        seq.status = SequenceStatus.RUNNING
        seq.state_slot = self._free_slots.pop()
        seq.num_offered_blocks = len(hits)
        seq.num_computed_tokens = len(hits) * self._layout.block_size
        self.counters.num_prefix_hit_tokens += seq.num_computed_tokens
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed_tokens
        return True

    def apply(self, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """Takes over what the step computed; returns what each request got. Rows ended since the plan are dropped."""
        if not plan.scheduled:
            return []
        assert plan is self._in_flight, "apply() wants the plan that schedule() returned last, once"
        assert len(result.token_ids) == len(plan.scheduled), f"{len(result.token_ids)} rows, not {len(plan.scheduled)}"
        self._in_flight = None
        deltas = []
        end = 0
        for row, item in enumerate(plan.scheduled):
            begin, end = end, end + item.num_new_tokens
            seq = item.seq
            if seq.status is SequenceStatus.FINISHED:
                continue
            assert seq.status is SequenceStatus.RUNNING, f"{seq.request_id!r} was preempted while its step ran"
            assert seq.num_computed_tokens == item.start, f"{seq.num_computed_tokens} computed, not {item.start}"
            seq.num_computed_tokens += item.num_new_tokens
            self._offer_full_blocks(seq)
            if seq.request.score:
                delta = self._take_scores(seq, item, result, begin)
            else:
                delta = self._take_token(seq, row, result) if item.samples else None
            if delta is not None:
                deltas.append(delta)
        return deltas

    def _offer_full_blocks(self, seq: SequenceState) -> None:
        num_full = seq.num_computed_tokens // self._layout.block_size
        if num_full > seq.num_offered_blocks:
            block_ids = seq.block_ids[:num_full]
            self._blocks.register(seq.block_digests, seq.token_ids, block_ids, seq.num_offered_blocks)
            seq.num_offered_blocks = num_full

    def _take_token(self, seq: SequenceState, row: int, result: StepResult) -> TokenDelta:
        token_id = int(result.token_ids[row])
        seq.token_ids.append(token_id)
        reason = self._finish_reason(seq, token_id)
        if reason is not None:
            self._end(seq, reason)
        return TokenDelta(
            request_id=seq.request_id,
            new_token_ids=(token_id,),
            logprobs=result.logprobs[row : row + 1].copy(),
            finish_reason=reason,
            stop_token_id=token_id if reason is FinishReason.STOP else None,
            num_cached_tokens=seq.num_cached_tokens,
        )

    def _finish_reason(self, seq: SequenceState, token_id: int) -> FinishReason | None:
        params, num_output = seq.request.params, seq.num_output_tokens
        if token_id in seq.request.stop_token_ids and num_output > params.min_tokens:
            return FinishReason.STOP
        assert params.max_tokens is not None, f"request {seq.request_id!r} has no max_tokens"
        # a sequence longer than the whole cache could never be continued; add() lets none get there
        if num_output >= params.max_tokens or self.max_new_tokens(seq.num_tokens) <= 0:
            return FinishReason.LENGTH
        return None

    def _take_scores(
        self, seq: SequenceState, item: ScheduledSequence, result: StepResult, begin: int
    ) -> TokenDelta | None:
        assert result.score_logprobs is not None, f"the step of {seq.request_id!r} gave no score_logprobs"
        assert result.score_is_greedy is not None, f"the step of {seq.request_id!r} gave no score_is_greedy"
        num_scores = seq.num_prompt_tokens - 1
        if seq.prompt_logprobs is None or seq.prompt_is_greedy is None:
            seq.prompt_logprobs = np.zeros(num_scores, np.float32)
            seq.prompt_is_greedy = np.zeros(num_scores, np.bool_)
        num_new = min(item.num_new_tokens, num_scores - item.start)  # nothing follows the last token
        new = slice(item.start, item.start + num_new)
        seq.prompt_logprobs[new] = result.score_logprobs[begin : begin + num_new]
        seq.prompt_is_greedy[new] = result.score_is_greedy[begin : begin + num_new]
        if seq.num_uncomputed_tokens > 0:
            return None
        self._end(seq, FinishReason.LENGTH)
        return TokenDelta(
            request_id=seq.request_id,
            new_token_ids=(),
            logprobs=np.zeros((0, 3), np.float32),
            finish_reason=FinishReason.LENGTH,
            prompt_logprobs=seq.prompt_logprobs,
            prompt_is_greedy=seq.prompt_is_greedy,
        )

    def _end(self, seq: SequenceState, reason: FinishReason) -> None:
        if seq.status is SequenceStatus.RUNNING:
            self._stop_running(seq)
        else:
            del self._waiting[seq.request_id]
        seq.status = SequenceStatus.FINISHED
        self.counters.num_stopped += reason is FinishReason.STOP
        self.counters.num_length_stopped += reason is FinishReason.LENGTH
        self.counters.num_aborted += reason is FinishReason.ABORT

    def abort(self, request_id: str) -> TokenDelta | None:
        """Ends a request in whatever state; its blocks are free at once. Does nothing for an unknown or ended one."""
        seq = self.get(request_id)
        if seq is None:
            return None
        self._end(seq, FinishReason.ABORT)
        return TokenDelta(
            request_id=request_id,
            new_token_ids=(),
            logprobs=np.zeros((0, 3), np.float32),
            finish_reason=FinishReason.ABORT,
            num_cached_tokens=seq.num_cached_tokens,
        )

    def finish(self, request_id: str) -> None:
        """Ends a request whose text met a stop string; its blocks are free at once."""
        seq = self.get(request_id)
        if seq is not None:
            self._end(seq, FinishReason.STOP)

    def set_namespace(self, namespace: bytes) -> None:
        """Makes the prefix cache forget what was computed so far, as new weights require; nothing may be running."""
        assert not self._running, f"{len(self._running)} sequences are running on the old cache"
        self._blocks.set_namespace(namespace)
        for seq in self._waiting.values():
            seq.block_digests = []

    def restart(self, namespace: bytes) -> None:
        """Puts running sequences back to waiting, as the loss of the cache requires; the prefix cache is forgotten."""
        self._in_flight = None
        for seq in reversed(list(self._running.values())):
            self._preempt(seq)
        self.set_namespace(namespace)

    def check_integrity(self) -> None:
        """Raises if a block, a slot, a counter or the order of the sequences is not as it must be."""
        waiting, running = list(self._waiting.values()), list(self._running.values())
        self._blocks.check_integrity(seq.block_ids for seq in running)
        config, counters = self._config, self.counters
        assert len(running) <= config.max_num_seqs, f"{len(running)} run, max_num_seqs is {config.max_num_seqs}"
        slots = sorted([*self._free_slots, *(seq.state_slot for seq in running)])
        assert slots == list(range(1, config.max_num_seqs + 1)), f"state slots, free and used: {slots}"
        order = [seq.arrival for seq in running + waiting]
        assert order == sorted(set(order)), f"running and waiting ones are out of order of arrival: {order}"
        num_live = counters.num_added - counters.num_finished
        assert num_live == len(order), f"{num_live} live by the counters, {len(running)} run and {len(waiting)} wait"
        for seq in waiting:
            clean = not seq.block_ids and seq.num_computed_tokens == 0 and seq.state_slot == 0
            assert clean and seq.status is SequenceStatus.WAITING, f"waiting, not clean: {seq}"
        for seq in running:
            assert seq.status is SequenceStatus.RUNNING, f"running, yet {seq.status}: {seq}"
            assert 0 <= seq.num_computed_tokens < seq.num_tokens, (
                f"{seq.num_computed_tokens} of {seq.num_tokens} tokens"
            )
            num_blocks = self._layout.blocks_for(seq.num_tokens)
            fits = num_blocks - 1 <= len(seq.block_ids) <= min(num_blocks, seq.max_num_blocks)
            assert fits, f"{len(seq.block_ids)} blocks for {seq.num_tokens} tokens, {seq.max_num_blocks} at most: {seq}"


def _make_row(seq: SequenceState, num_new_tokens: int) -> ScheduledSequence:
    start = seq.num_computed_tokens
    samples = start + num_new_tokens == seq.num_tokens and not seq.request.score
    return ScheduledSequence(seq, start, num_new_tokens, samples)
