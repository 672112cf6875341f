"""FakeRunner: a model whose outputs are arithmetic, and which notices wrong keys and values. No JAX.

The next token is a fixed function of the last token and its position, so a test predicts whole outputs. The cache of
the runner holds in each slot a fingerprint of the prefix that ends there; a step whose sequence would attend to
anything else than its own prefix fails at once.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from photon_jax.cache.layout import NULL_BLOCK_ID, CacheLayout
from photon_jax.config import CacheConfig, SchedulerConfig
from photon_jax.request import FinishReason, Request, SamplingParams, TokenDelta
from photon_jax.scheduler.plan import ScheduledSequence, StepPlan, StepResult
from photon_jax.scheduler.scheduler import Scheduler
from photon_jax.scheduler.sequence import SequenceState

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


def expected_output(request: Request) -> tuple[list[int], FinishReason]:
    """Returns the output tokens that a request must get when it runs to its end, and why it ends."""
    params, tokens = request.params, list(request.prompt_token_ids)
    for num_output in range(1, params.max_tokens + 1):
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
        if tokens[-1] in request.stop_token_ids and num_output > params.min_tokens:
            return tokens[len(request.prompt_token_ids) :], FinishReason.STOP
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


def make_request(request_id: str, prompt: Sequence[int], max_tokens: int = 4, **fields: object) -> Request:
    """Returns a request; `min_tokens` goes to its params, the other fields to the request."""
    params = SamplingParams(max_tokens=max_tokens, min_tokens=fields.pop("min_tokens", 0))
    return Request(request_id=request_id, prompt_token_ids=tuple(prompt), params=params, **fields)


def make_scheduler(
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_waiting: int = 100_000,
    max_model_len: int = 1000,
    prefix: bool = True,
) -> Scheduler:
    """Returns a scheduler over a small pool; `num_blocks` counts the null block."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_waiting=max_waiting
    )
    cache = CacheConfig(block_size=block_size, num_blocks=num_blocks, enable_prefix_caching=prefix)
    layout = CacheLayout(num_blocks=num_blocks, block_size=block_size)
    return Scheduler(config, cache, layout, max_model_len=max_model_len)


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

    def step(self, plan: StepPlan) -> StepResult:
        """Returns what the step gives, rows that don't sample and tokens that nobody scores filled with poison."""
        self.num_computed_tokens += plan.num_tokens
        if self._check_cache:
            for item in plan.scheduled:
                self._write(item)
            for item in plan.scheduled:
                self._verify(item)
        num_rows = len(plan.scheduled)
        token_ids = np.full(num_rows, -12345, np.int32)
        logprobs = np.full((num_rows, 3), np.nan, np.float32)
        for row, item in enumerate(plan.scheduled):
            if item.samples:
                position = item.start + item.num_new_tokens - 1
                token_ids[row] = next_token(item.seq.token_ids[position], position)
                logprobs[row] = token_logprobs(item.seq.token_ids[position], position)
        if not any(item.seq.request.score for item in plan.scheduled):
            return StepResult(token_ids, logprobs)
        return StepResult(token_ids, logprobs, *self._scores(plan))

    def _scores(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        logprobs, is_greedy = np.full(plan.num_tokens, np.nan, np.float32), np.zeros(plan.num_tokens, np.bool_)
        idx = 0
        for item in plan.scheduled:
            tokens = item.seq.token_ids
            for position in range(item.start, item.start + item.num_new_tokens):
                if item.seq.request.score and position + 1 < len(tokens):
                    logprobs[idx], is_greedy[idx] = score(tokens[position], position, tokens[position + 1])
                idx += 1
        return logprobs, is_greedy

    def _slot_mapping(self, item: ScheduledSequence) -> np.ndarray:
        assert NULL_BLOCK_ID not in item.seq.block_ids, f"{item.seq.request_id} holds the null block"
        blocks = np.array(item.seq.block_ids, np.int64)[:, None] * self._layout.block_size
        slots = (blocks + np.arange(self._layout.block_size)).ravel()
        context_len = item.start + item.num_new_tokens
        assert context_len <= len(slots), f"{item.seq.request_id}: {context_len} tokens, {len(slots)} slots"
        return slots[:context_len]

    def _fingerprints(self, item: ScheduledSequence) -> np.ndarray:
        prints = self._prints.setdefault(item.seq, [])
        for token_id in item.seq.token_ids[len(prints) :]:
            prints.append(((prints[-1] if prints else 17) * 1_000_003 + token_id + 1) % _PRIME)
        return np.array(prints[: item.start + item.num_new_tokens], np.int64)

    def _write(self, item: ScheduledSequence) -> None:
        self._slots[self._slot_mapping(item)[item.start :]] = self._fingerprints(item)[item.start :]

    def _verify(self, item: ScheduledSequence) -> None:
        wrong = np.flatnonzero(self._slots[self._slot_mapping(item)] != self._fingerprints(item))
        assert not wrong.size, f"{item.seq.request_id} reads keys of another prefix at positions {wrong[:8]}"


@dataclasses.dataclass
class Collected:
    """What a request got so far."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
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
            assert len(delta.new_token_ids) == len(delta.logprobs) <= 1
            out.token_ids += delta.new_token_ids
            out.logprobs += list(delta.logprobs)
            out.finish_reason, out.last = delta.finish_reason, delta


def check_plan(plan: StepPlan, config: SchedulerConfig) -> None:
    """Fails unless a plan keeps to the limits and its rows are as the input builder expects them."""
    assert plan.num_tokens <= config.max_num_batched_tokens, f"{plan.num_tokens} tokens in one step"
    assert len(plan.scheduled) <= config.max_num_seqs, f"{len(plan.scheduled)} rows in one step"
    ids = [item.seq.request_id for item in plan.scheduled]
    assert len(set(ids)) == len(ids), f"a sequence has two rows: {ids}"
    is_chunk = [item.num_new_tokens > 1 for item in plan.scheduled]
    assert is_chunk == sorted(is_chunk), "decode rows must come first"
    for item in plan.scheduled:
        end = item.start + item.num_new_tokens
        assert item.num_new_tokens >= 1 and end <= item.seq.num_tokens, f"row of {item.num_new_tokens} tokens to {end}"
        assert item.samples == (end == item.seq.num_tokens and not item.seq.request.score)


def run(
    scheduler: Scheduler,
    runner: FakeRunner,
    *,
    max_steps: int = 10_000,
    after_step: Callable[[StepPlan], None] | None = None,
) -> dict[str, Collected]:
    """Steps until nothing is left; returns the outputs by request id."""
    collector, num_steps = Collector(), 0
    while scheduler.has_unfinished:
        assert num_steps < max_steps, (
            f"{scheduler.num_running} run, {scheduler.num_waiting} wait after {num_steps} steps"
        )
        plan = scheduler.schedule()
        check_plan(plan, scheduler._config)
        collector.take(scheduler.apply(plan, runner.step(plan)))
        if after_step is not None:
            after_step(plan)
        num_steps += 1
    return collector.outputs
