"""Scheduler: which tokens of which sequences each step computes, and what becomes of the results. Host only."""

import collections
import itertools

from photon_jax.cache.block_manager import BlockManager
from photon_jax.cache.layout import CacheLayout
from photon_jax.config import CacheConfig, SchedulerConfig
from photon_jax.errors import RequestError
from photon_jax.outputs import FinishReason, TokenDelta
from photon_jax.request import Request
from photon_jax.scheduler.counters import SchedulerCounters
from photon_jax.scheduler.dispatch import choose_num_steps, filling_budget, may_lack_blocks
from photon_jax.scheduler.integrity import check_sequences, check_slots
from photon_jax.scheduler.limits import Limits
from photon_jax.scheduler.plan import ScheduledSequence, StepPlan, StepResult, make_row
from photon_jax.scheduler.results import end_delta, take_tokens
from photon_jax.scheduler.scores import take_scores
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
        step_sizes: tuple[int, ...] = (),  # of mixed steps with their padding, those worth being filled; ascending
    ) -> None:
        self.counters = SchedulerCounters()
        self._config, self._layout, self._step_sizes = config, layout, step_sizes
        self.limits = Limits(config=config, layout=layout, max_model_len=max_model_len)
        self._blocks = BlockManager(layout, enable_prefix_caching=cache.enable_prefix_caching, namespace=namespace)
        # both in the order of arrival
        self._waiting: collections.OrderedDict[str, SequenceState] = collections.OrderedDict()
        self._running: dict[str, SequenceState] = {}
        self._free_slots = list(range(config.max_num_seqs, 0, -1))  # the next one is at the end
        self.admits_new = True  # False: only sequences that have begun are run, the others wait
        self._num_admissions = 0
        self._in_flight: collections.deque[StepPlan] = collections.deque()  # planned, not applied

    @property
    def max_num_seqs(self) -> int:
        """Sequences that may run at once."""
        return self._config.max_num_seqs

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
    def has_begun(self) -> bool:
        """Whether any sequence runs, or ran and was preempted."""
        return bool(self._running) or any(seq.num_preemptions for seq in self._waiting.values())

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, the idle ones of the prefix cache among them."""
        return self._blocks.num_free

    @property
    def num_idle_blocks(self) -> int:
        """Blocks of the prefix cache that no sequence holds."""
        return self._blocks.num_idle

    @property
    def running(self) -> list[SequenceState]:
        """The sequences that hold blocks, in the order of their arrival."""
        return list(self._running.values())

    def get(self, request_id: str) -> SequenceState | None:
        """Returns the state of a waiting or running request, None for any other."""
        return self._running.get(request_id) or self._waiting.get(request_id)

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue.

        Raises:
          RequestError: it can never be served, or its id is taken.
          CapacityError: the queue is full.
        """
        if self.get(request.request_id) is not None:
            raise RequestError(
                f"request {request.request_id!r} is still being served; give each live request an id of its own"
            )
        num_slots = self.limits.num_slots(request)
        self.limits.check_queue(len(self._waiting))
        self._waiting[request.request_id] = SequenceState(
            request=request,
            arrival=self.counters.num_added,
            token_ids=list(request.prompt_token_ids),
            max_num_slots=min(num_slots, self._layout.max_tokens),
            max_num_blocks=min(self._layout.blocks_for(num_slots), self._layout.num_usable_blocks),
        )
        self.counters.num_added += 1

    def schedule(self, *, several: bool = True) -> StepPlan:
        """Decides the next step, on the assumption that those before it end no sequence early.

        Their results need not be known: sequences advance as planned, and a row whose sequence turns out to have
        ended is dropped when its own results are applied. Plans are applied in the order in which they were made.

        Returns an empty plan if nothing is left to do, or nothing before earlier results are applied.

        Args:
          several: whether the plan may have several steps, see `choose_num_steps`.
        """
        running = list(self._running.values())
        num_free = self._blocks.num_free
        num_steps = 1
        if several and not self._can_admit():
            num_steps = choose_num_steps(running, self._config, self._layout, num_free, num_waiting=self.num_waiting)
        if self._in_flight and may_lack_blocks(running, num_steps, self._layout, num_free):
            return StepPlan(())  # results on their way may end a sequence: none is preempted before they are known
        rows, prompt_rows, preempted = self._schedule_running(running, num_steps)
        if not preempted and num_steps == 1:
            admitted = self._schedule_waiting(sum([row[2] for row in rows]))
            rows += admitted
            prompt_rows += admitted
        if prompt_rows:
            rows.sort(key=lambda row: row.num_new_tokens > 1)  # decode rows first; the order is stable
        plan = StepPlan(tuple(rows), tuple(preempted), num_steps, tuple(prompt_rows))
        may_be_empty = self._in_flight or not (self.has_unfinished if self.admits_new else self.has_begun)
        assert rows or may_be_empty, f"{self.num_waiting} wait, {self.num_running} run, empty plan"
        if rows:
            self._in_flight.append(plan)
            self._advance(plan)
        return plan

    def _schedule_running(
        self, running: list[SequenceState], num_steps: int
    ) -> tuple[list[ScheduledSequence], list[ScheduledSequence], list[str]]:
        """Returns the rows of running sequences, those of them that compute a prompt, and the ids preempted."""
        rows: list[ScheduledSequence] = []
        prompt_rows: list[ScheduledSequence] = []
        preempted: list[str] = []
        filled: list[tuple[SequenceState, int]] = []
        budget, size = self._config.max_num_batched_tokens, self._layout.block_size
        # decoding ones first, so that a long prompt never makes them wait; each kind in the order of arrival
        decoding, longer = [], []
        for seq in running:
            num_left = seq.num_uncomputed_tokens
            if num_left == 1:
                decoding.append(seq)
            elif num_left:
                longer.append((seq, num_left))
        for seq, num_left in itertools.chain(zip(decoding, itertools.repeat(1), strict=False), longer):
            if seq.admission == 0 or (seq.matcher is not None and seq.awaits_token):
                continue  # preempted for one that arrived earlier, or waiting for its next mask
            if budget == 0:
                break
            start = seq.num_computed_tokens
            if num_steps > 1:
                num_new_tokens = min(num_steps, seq.max_num_slots - start)
            else:
                num_new_tokens = num_left if num_left < budget else budget
                budget -= num_new_tokens
            end = start + num_new_tokens
            if end > len(seq.block_ids) * size:
                preempted += self._grow(seq, end)
                if seq.admission == 0:
                    continue
            row = make_row(seq, num_new_tokens, num_left, num_steps)
            rows.append(row)
            if start < seq.num_prompt_tokens:
                prompt_rows.append(row)
            if end // size > seq.num_offered_blocks:
                filled.append((seq, end))
        for seq, end in filled:
            self._offer_full_blocks(seq, end)
        assert not (preempted and any(row.is_void for row in rows)), "a scheduled sequence was preempted"
        return rows, prompt_rows, preempted

    def _advance(self, plan: StepPlan) -> None:
        self.counters.num_steps += plan.num_steps
        self.counters.num_scheduled_tokens += plan.num_tokens
        for seq, _, num_new_tokens, num_sampled, _ in plan.scheduled:
            seq.num_computed_tokens += num_new_tokens
            seq.num_tokens += num_sampled
            if not num_sampled:
                self.counters.num_chunks += seq.num_uncomputed_tokens > 0

    def _grow(self, seq: SequenceState, num_tokens: int) -> list[str]:
        """Gives `seq` the blocks for `num_tokens`; returns the ids preempted for them, maybe its own."""
        num_missing = self._layout.blocks_for(num_tokens) - len(seq.block_ids)
        preempted: list[str] = []
        if num_missing <= 0:
            return preempted
        assert seq.num_uncomputed_tokens == 1, f"{seq.request_id!r} was admitted without {num_missing} of its blocks"
        while not self._blocks.can_allocate(num_missing):
            assert not self._in_flight, f"{seq.request_id!r} would preempt others while results are on their way"
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
        seq.admission = 0
        seq.num_tokens = len(seq.token_ids)  # rows in flight are void: what they sample comes again, or is not wanted
        seq.num_computed_tokens = 0
        seq.num_offered_blocks = 0
        seq.state_slot = 0

    def _reserve(self) -> int:
        """Returns the blocks that the next steps may want: one more for each running sequence that can grow.

        Admission leaves them alone, so that a sequence is not admitted only to be preempted before it makes progress.
        """
        return sum([seq.may_grow for seq in self._running.values()])

    def _next_waiting(self) -> SequenceState | None:
        """Returns the first waiting one if there is a place for it, and it is not held back."""
        if not (self._waiting and self._free_slots):
            return None
        seq = next(iter(self._waiting.values()))
        return seq if self.admits_new or seq.num_preemptions else None

    def _can_admit(self) -> bool:
        """Whether one that waits could start now, if the step has tokens left for it."""
        seq = self._next_waiting()
        return seq is not None and self._find_room(seq, self._reserve()) is not None

    def _schedule_waiting(self, num_taken: int) -> list[ScheduledSequence]:
        rows: list[ScheduledSequence] = []
        most, num_places = self._config.max_num_batched_tokens, len(self._free_slots)
        budget = filling_budget(most, num_taken, self._waiting.values(), num_places, self._step_sizes)
        reserve = self._reserve() if budget > 0 and self._next_waiting() else 0
        while budget > 0 and (seq := self._next_waiting()) and self._admit(seq, reserve):
            num_new_tokens = min(seq.num_uncomputed_tokens, budget)
            rows.append(make_row(seq, num_new_tokens, seq.num_uncomputed_tokens, 1))
            self._offer_full_blocks(seq, seq.num_computed_tokens + num_new_tokens)
            budget -= num_new_tokens
            reserve += seq.may_grow
        return rows

    def _find_room(self, seq: SequenceState, reserve: int) -> tuple[list[int], int] | None:
        """Returns cached blocks for the first tokens of `seq`, and how many more it needs; None if too few are free."""
        # tokens [0, hits)   blocks shared with the prefix cache, at most up to the first token that must be computed
        # tokens [hits, end) new blocks, the last one maybe partial
        num_full = seq.first_needed // self._layout.block_size
        hits = self._blocks.find_cached(seq.block_digests, seq.token_ids, num_full)
        num_blocks = self._layout.blocks_for(min(seq.num_tokens, seq.max_num_slots))
        num_taken = num_blocks - len(hits) + self._blocks.count_idle(hits)
        has_room = self._blocks.can_allocate(num_taken + reserve + (num_blocks < seq.max_num_blocks))
        return (hits, num_blocks - len(hits)) if has_room else None

    def _admit(self, seq: SequenceState, reserve: int) -> bool:
        """Gives `seq` blocks for all its tokens, cached ones where they exist; returns False if too few are free."""
        room = self._find_room(seq, reserve)
        if room is None:
            return False
        hits, num_others = room
        del self._waiting[seq.request_id]
        self._running[seq.request_id] = seq
        self._blocks.share(hits)
        seq.block_ids = hits + self._blocks.allocate(num_others)
        seq.status = SequenceStatus.RUNNING
        seq.state_slot = self._free_slots.pop()
        self._num_admissions += 1
        seq.admission = self._num_admissions
        seq.num_offered_blocks = len(hits)
        seq.num_computed_tokens = len(hits) * self._layout.block_size
        self.counters.num_prefix_hit_tokens += seq.num_computed_tokens
        self.counters.num_prefix_query_tokens += seq.num_tokens
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed_tokens
        return True

    def apply(self, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """Takes over what the oldest plan's step computed; returns what each request got.

        Rows of sequences that ended or were preempted since are dropped.
        """
        if not plan.scheduled:
            return []
        assert self._in_flight and plan is self._in_flight[0], "apply() wants the plans of schedule() in order, once"
        num_rows = len(plan.scheduled)
        assert len(result.token_ids) == num_rows * plan.num_steps, f"{len(result.token_ids)} tokens, {num_rows} rows"
        self._in_flight.popleft()
        result = result.by_row(num_rows)
        token_ids = result.token_ids.tolist()
        deltas: list[TokenDelta] = []
        end = 0
        for row, (item, sampled, logprobs) in enumerate(
            zip(plan.scheduled, token_ids, list(result.logprobs), strict=True)
        ):
            seq, _, _, num_sampled, admission = item
            begin, end = end, end + (0 if seq.is_plain else len(item.scores))
            if seq.admission != admission:
                continue
            if not seq.is_plain and seq.request.wants_scores:
                take_scores(item, result, begin)
            if num_sampled:
                delta = take_tokens(item, result, row, sampled[:num_sampled], logprobs)
                deltas.append(delta)
                if delta.finish_reason is not None:
                    self._offer_full_blocks(seq, len(seq.token_ids) - 1)  # nothing is computed of the last token
                    self._end(seq, delta.finish_reason)
            elif seq.request.score and item.start + item.num_new_tokens == seq.max_num_slots:
                self._end(seq, FinishReason.LENGTH)
                deltas.append(end_delta(seq, FinishReason.LENGTH))
        return deltas

    def _offer_full_blocks(self, seq: SequenceState, num_tokens: int) -> None:
        """Offers the blocks that `num_tokens` tokens fill to the prefix cache, for rows of the same step too.

        A step writes the keys and values of all its tokens before any row attends to them, so samples of one prompt
        that start together share it. A block with a token that is not known yet has no name: it is offered later.
        """
        num_full = min(num_tokens, len(seq.token_ids)) // self._layout.block_size
        if num_full > seq.num_offered_blocks:
            block_ids = seq.block_ids[:num_full]
            self._blocks.register(seq.block_digests, seq.token_ids, block_ids, seq.num_offered_blocks)
            seq.num_offered_blocks = num_full

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
        return end_delta(seq, FinishReason.ABORT)

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
        self._in_flight.clear()
        for seq in reversed(list(self._running.values())):
            self._preempt(seq)
        self.set_namespace(namespace)

    def check_integrity(self) -> None:
        """Raises if a block, a slot, a counter or the order of the sequences is not as it must be."""
        waiting, running = list(self._waiting.values()), list(self._running.values())
        self._blocks.check_integrity(seq.block_ids for seq in running)
        check_sequences(running, waiting, self._in_flight, self._layout)
        check_slots([*self._free_slots, *(seq.state_slot for seq in running)], self._config.max_num_seqs)
        num_live, num_held = self.counters.num_added - self.counters.num_finished, len(running) + len(waiting)
        assert num_live == num_held, f"{num_live} live by the counters, {len(running)} run and {len(waiting)} wait"
