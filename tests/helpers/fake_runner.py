"""FakeRunner: a model whose outputs are arithmetic, and which notices wrong keys and values. No JAX.

The next token is a fixed function of the last token and its position, so a test predicts whole outputs. The cache of
the runner holds in each slot a fingerprint of the prefix that ends there; a step whose sequence would attend to
anything else than its own prefix fails at once.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from photon_jax.cache.layout import NULL_BLOCK_ID, CacheLayout
from photon_jax.config import CacheConfig, SchedulerConfig
from photon_jax.outputs import FinishReason, PromptLogprobs, TokenDelta
from photon_jax.request import Request, SamplingParams
from photon_jax.scheduler.plan import StepPlan, StepResult
from photon_jax.scheduler.scheduler import Scheduler
from photon_jax.scheduler.sequence import SequenceState
from photon_jax.step_io import TOP_WIDTH

VOCAB_SIZE = 101
_PRIME = 2**61 - 1


def next_token(token_id: int, position: int) -> int:
    """Returns the token that follows `token_id` at `position`."""
    return (token_id * 31 + position * 7 + 11) % VOCAB_SIZE


def token_logprobs(token_id: int, position: int) -> np.ndarray:
    """Returns the f32[3] log-probabilities of the token sampled after `token_id` at `position`."""
    return -np.array([token_id + 1, position + 1, token_id + position + 1], np.float32) / 16


def score(token_id: int, position: int, target_id: int) -> tuple[float, bool]:
    """Returns log-probability and is-greedy of `target_id` after `token_id` at `position`."""
    value = (token_id * 13 + position * 5 + target_id * 3) % 127
    return -value / 8, value % 2 == 0


def top_tokens(token_id: int, position: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids i32[W] and log-probabilities f32[W] of the most likely tokens after `token_id` at `position`."""
    ids = (token_id * 3 + position * 11 + np.arange(TOP_WIDTH, dtype=np.int32) * 5) % VOCAB_SIZE
    return ids.astype(np.int32), -np.arange(TOP_WIDTH, dtype=np.float32) - token_id / 128


@dataclasses.dataclass(frozen=True)
class FakeGrammar:
    """Takes any tokens, and ends after a number of them."""

    num_tokens: int
    is_complete: bool = True

    def start(self) -> "FakeMatcher":
        return FakeMatcher(self)


class FakeMatcher:
    """Remembers what it took; there is no mask."""

    def __init__(self, grammar: FakeGrammar) -> None:
        self.token_ids: list[int] = []
        self.is_complete = grammar.is_complete
        self._num_tokens = grammar.num_tokens

    def consume(self, token_id: int) -> bool:
        assert len(self.token_ids) < self._num_tokens, "a token came after the end"
        self.token_ids.append(token_id)
        return len(self.token_ids) < self._num_tokens


def expected_output(request: Request) -> tuple[list[int], FinishReason]:
    """Returns the output tokens that a request must get when it runs to its end, and why it ends."""
    params, tokens = request.params, list(request.prompt_token_ids)
    for num_output in range(1, params.max_tokens + 1):
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
        if tokens[-1] in request.stop_token_ids and num_output > params.min_tokens:
            return tokens[len(request.prompt_token_ids) :], FinishReason.STOP
        if request.grammar is not None and num_output == request.grammar.num_tokens:
            reason = FinishReason.STOP if request.grammar.is_complete else FinishReason.ABORT
            return tokens[len(request.prompt_token_ids) :], reason
    return tokens[len(request.prompt_token_ids) :], FinishReason.LENGTH


def expected_logprobs(request: Request, num_output: int) -> np.ndarray:
    """Returns the f32[num_output 3] log-probabilities of a request's first output tokens."""
    tokens, rows = list(request.prompt_token_ids), []
    for _ in range(num_output):
        rows.append(token_logprobs(tokens[-1], len(tokens) - 1))
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
    return np.array(rows, np.float32).reshape(-1, 3)


def expected_scores(prompt: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probabilities and is-greedy flags of a prompt's tokens after the first."""
    pairs = [score(token, position, prompt[position + 1]) for position, token in enumerate(prompt[:-1])]
    return np.array([p[0] for p in pairs], np.float32), np.array([p[1] for p in pairs], np.bool_)


def expected_tops(tokens: Sequence[int], num_top: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids i32[n k] and log-probabilities f32[n k] of the most likely tokens after each token but the last."""
    rows = [top_tokens(token, position) for position, token in enumerate(tokens[:-1])]
    ids = np.array([row[0][:num_top] for row in rows], np.int32).reshape(len(rows), num_top)
    return ids, np.array([row[1][:num_top] for row in rows], np.float32).reshape(len(rows), num_top)


def make_request(request_id: str, prompt: Sequence[int], max_tokens: int = 4, **fields: object) -> Request:
    """Returns a request; the fields of its params go there, the others to the request."""
    given = {
        name: fields.pop(name)
        for name in ("temperature", "min_tokens", "logprobs", "prompt_logprobs", "stop")
        if name in fields
    }
    params = SamplingParams(max_tokens=max_tokens, **given)
    return Request(request_id=request_id, prompt_token_ids=tuple(prompt), params=params, **fields)


def make_scheduler(
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_waiting: int = 100_000,
    max_model_len: int = 1000,
    max_steps: int = 1,
    prefix: bool = True,
    step_sizes: tuple[int, ...] = (),
) -> Scheduler:
    """Returns a scheduler over a small pool; `num_blocks` counts the null block."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting=max_waiting,
        max_steps_per_dispatch=max_steps,
    )
    cache = CacheConfig(block_size=block_size, num_blocks=num_blocks, enable_prefix_caching=prefix)
    layout = CacheLayout(num_blocks=num_blocks, block_size=block_size)
    return Scheduler(config, cache, layout, max_model_len=max_model_len, step_sizes=step_sizes)


class FakeRunner:
    """Computes steps by arithmetic.

    Attributes:
      num_computed_tokens: tokens computed so far, those computed again included.
    """

    def __init__(self, layout: CacheLayout, *, check_cache: bool = True) -> None:
        self.num_computed_tokens = 0
        self._layout = layout
        self._check_cache = check_cache
        self._slots = np.full(layout.num_blocks * layout.block_size, -1, np.int64)
        self._prints: dict[SequenceState, list[int]] = {}
        self._sampled: dict[SequenceState, dict[int, int]] = {}  # position -> token, as the device has them
        self._ended: set[int] = set()  # admissions whose sequence met a stop id

    def step(self, plan: StepPlan) -> StepResult:
        """Returns what the step gives, rows that don't sample and tokens that nobody scores filled with poison.

        It computes at once, as a device does that never looks at the host: tokens that the host does not know yet come
        from the steps before, and what a sequence became meanwhile does not matter.
        """
        self.num_computed_tokens += plan.num_tokens
        num_rows = len(plan.scheduled)
        entries = num_rows * plan.num_steps
        token_ids, logprobs = np.full(entries, -12345, np.int32), np.full((entries, 3), np.nan, np.float32)
        top_ids, top_logprobs = _poison(entries)
        for item in plan.scheduled:
            if item.admission in self._ended and self._check_cache:  # the one step too many computes anything
                self._slots[self._slot_mapping(item.seq, item.start + item.num_new_tokens)[item.start :]] = -7
            if item.seq.matcher is not None and item.samples:
                known = item.seq.matcher.token_ids
                assert known == item.seq.token_ids[item.seq.num_prompt_tokens :], "the matcher took other tokens"
                end = item.start + item.num_new_tokens
                assert end == len(item.seq.token_ids), f"{item.seq.request_id} samples before its mask is known"
        for index in range(plan.num_steps):
            rows = [row for row, item in enumerate(plan.scheduled) if index < item.num_new_tokens]
            live = [row for row in rows if plan.scheduled[row].admission not in self._ended]
            self._compute([_sub_row(plan, row, index) for row in live])
            for row in live:
                item, entry = plan.scheduled[row], index * num_rows + row
                if not item.samples:
                    continue
                position = _sub_row(plan, row, index)[2] - 1
                token_id = self._token(item.seq, position)
                token_ids[entry] = new = next_token(token_id, position)
                logprobs[entry] = token_logprobs(token_id, position)
                top_ids[entry], top_logprobs[entry] = top_tokens(token_id, position)
                self._sampled.setdefault(item.seq, {})[position + 1] = new
                request = item.seq.request
                num_output = position + 2 - len(request.prompt_token_ids)
                if new in request.stop_token_ids and num_output > request.params.min_tokens:
                    self._ended.add(item.admission)
        return self._result(plan, StepResult(token_ids, logprobs, top_ids, top_logprobs))

    def _result(self, plan: StepPlan, result: StepResult) -> StepResult:
        has_top = any(item.wants_top for item in plan.scheduled)
        if not has_top:
            assert result.top_ids is not None and result.top_logprobs is not None
            result = dataclasses.replace(result, top_ids=result.top_ids[:, :1], top_logprobs=result.top_logprobs[:, :1])
        if any(item.scores for item in plan.scheduled):
            scores = self._scores(plan)
            kept = scores if has_top else {name: scores[name] for name in ("score_logprobs", "score_is_greedy")}
            result = dataclasses.replace(result, **kept)
        return result

    def _token(self, seq: SequenceState, position: int) -> int:
        known = seq.token_ids
        return known[position] if position < len(known) else self._sampled[seq][position]

    def _compute(self, rows: Sequence[tuple[SequenceState, int, int]]) -> None:
        """Writes the keys of each row (sequence, start, end), and then reads all that it attends to."""
        if not self._check_cache:
            return
        for seq, start, end in rows:
            self._slots[self._slot_mapping(seq, end)[start:]] = self._fingerprints(seq, end)[start:]
        for seq, _, end in rows:
            wrong = np.flatnonzero(self._slots[self._slot_mapping(seq, end)] != self._fingerprints(seq, end))
            assert not wrong.size, f"{seq.request_id} reads keys of another prefix at positions {wrong[:8]}"

    def _scores(self, plan: StepPlan) -> dict[str, np.ndarray]:
        logprobs, is_greedy = np.full(plan.num_tokens, np.nan, np.float32), np.zeros(plan.num_tokens, np.bool_)
        top_ids, top_logprobs = _poison(plan.num_tokens)
        begin = 0
        for item in plan.scheduled:
            tokens = item.seq.token_ids
            for position in item.scores:
                idx = begin + position - item.scores.start
                logprobs[idx], is_greedy[idx] = score(tokens[position], position, tokens[position + 1])
                top_ids[idx], top_logprobs[idx] = top_tokens(tokens[position], position)
            begin += len(item.scores)
        return {
            "score_logprobs": logprobs,
            "score_is_greedy": is_greedy,
            "score_top_ids": top_ids,
            "score_top_logprobs": top_logprobs,
        }

    def _slot_mapping(self, seq: SequenceState, end: int) -> np.ndarray:
        assert NULL_BLOCK_ID not in seq.block_ids, f"{seq.request_id} holds the null block"
        blocks = np.array(seq.block_ids, np.int64)[:, None] * self._layout.block_size
        slots = (blocks + np.arange(self._layout.block_size)).ravel()
        assert end <= len(slots), f"{seq.request_id}: {end} tokens, {len(slots)} slots"
        return slots[:end]

    def _fingerprints(self, seq: SequenceState, end: int) -> np.ndarray:
        prints = self._prints.setdefault(seq, [])
        for position in range(len(prints), end):
            token_id = self._token(seq, position)
            prints.append(((prints[-1] if prints else 17) * 1_000_003 + token_id + 1) % _PRIME)
        return np.array(prints[:end], np.int64)


def _sub_row(plan: StepPlan, row: int, index: int) -> tuple[SequenceState, int, int]:
    """Returns sequence, first position and end of what a row computes in one of the plan's steps."""
    item = plan.scheduled[row]
    if plan.num_steps > 1:
        return item.seq, item.start + index, item.start + index + 1
    return item.seq, item.start, item.start + item.num_new_tokens


def _poison(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((count, TOP_WIDTH), -12345, np.int32), np.full((count, TOP_WIDTH), np.nan, np.float32)


@dataclasses.dataclass
class Collected:
    """What a request got so far."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    top_ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    top_logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    scores: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    last: TokenDelta | None = None


class Collector:
    """Sorts deltas by request; nothing may come after a request's end."""

    def __init__(self) -> None:
        self.outputs: dict[str, Collected] = {}

    def take(self, deltas: Sequence[TokenDelta]) -> None:
        """Adds deltas to the outputs."""
        for delta in deltas:
            out = self.outputs.setdefault(delta.request_id, Collected())
            assert out.finish_reason is None, f"{delta.request_id} got more after its end"
            assert len(delta.new_token_ids) == len(delta.logprobs)
            out.token_ids += delta.new_token_ids
            out.logprobs += list(delta.logprobs)
            if delta.top_ids is not None:
                out.top_ids += list(delta.top_ids)
                out.top_logprobs += list(delta.top_logprobs)
            if delta.scores is not None:
                assert out.scores is None, f"{delta.request_id} got its scores twice"
                out.scores = delta.scores
            out.finish_reason, out.last = delta.finish_reason, delta


def check_plan(plan: StepPlan, config: SchedulerConfig) -> None:
    """Fails unless a plan keeps to the limits and its rows are as the input builder expects them."""
    if plan.num_steps == 1:
        assert plan.num_tokens <= config.max_num_batched_tokens, f"{plan.num_tokens} tokens in one step"
    assert len(plan.scheduled) <= config.max_num_seqs, f"{len(plan.scheduled)} rows in one step"
    ids = [item.seq.request_id for item in plan.scheduled]
    assert len(set(ids)) == len(ids), f"a sequence has two rows: {ids}"
    assert plan.num_steps in (1, config.max_steps_per_dispatch)
    is_chunk = [item.num_new_tokens > 1 for item in plan.scheduled]
    assert plan.num_steps > 1 or is_chunk == sorted(is_chunk), "decode rows must come first"
    for item in plan.scheduled:
        before = item.seq.num_tokens - item.num_sampled
        end = item.start + item.num_new_tokens
        if plan.num_steps > 1:
            assert item.start == before - 1 and 1 <= item.num_sampled == item.num_new_tokens <= plan.num_steps
        else:
            assert item.num_new_tokens >= 1 and end <= before, f"row of {item.num_new_tokens} tokens to {end}"
            assert item.num_sampled == (end == before and not item.seq.request.score)


def run(
    scheduler: Scheduler,
    runner: FakeRunner,
    *,
    max_steps: int = 10_000,
    steps_ahead: int = 0,
    after_step: Callable[[StepPlan], None] | None = None,
) -> dict[str, Collected]:
    """Steps until nothing is left; returns the outputs by request id."""
    collector, num_steps = Collector(), 0
    in_flight: collections.deque[tuple[StepPlan, StepResult]] = collections.deque()
    while scheduler.has_unfinished:
        assert num_steps < max_steps, (
            f"{scheduler.num_running} run, {scheduler.num_waiting} wait after {num_steps} steps"
        )
        plan = scheduler.schedule()
        check_plan(plan, scheduler._config)
        if plan.scheduled:
            in_flight.append((plan, runner.step(plan)))
        if not plan.scheduled or len(in_flight) > steps_ahead:
            collector.take(scheduler.apply(*in_flight.popleft()))
        if after_step is not None:
            after_step(plan)
        num_steps += 1
    return collector.outputs
