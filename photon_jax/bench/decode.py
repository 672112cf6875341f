"""Decode steps through the engine's own step program, on scrambled blocks, and their agreement with float32."""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from photon_jax.engine.input_builder import InputBuilder
from photon_jax.engine.start import StartedEngine
from photon_jax.models.config import ModelConfig
from photon_jax.models.decoder import forward
from photon_jax.models.params import Params
from photon_jax.request import Request, SamplingParams
from photon_jax.scheduler.plan import ScheduledSequence, StepPlan
from photon_jax.scheduler.sequence import SequenceState
from photon_jax.step_io import StepLayout, host_views, output_fields

TOLERANCE = 2e-2  # of the mean difference of log-probabilities to float32
CHECKED_TOKENS = 1024  # that the reference computes at once, prompts included; at least one whole sequence
PackedStep = tuple[StepLayout, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSpec:
    """Greedy rows of random prompts.

    Attributes:
      batch: rows.
      prompt_len: tokens in the cache before the first decode step.
      num_steps: decode steps, a multiple of those of a dispatch.
      repeats: timed runs of all the steps, after one that warms up.
    """

    batch: int
    prompt_len: int
    num_steps: int
    repeats: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRun:
    """What the steps of one batch took and gave.

    Attributes:
      step_s: median seconds of a decode step.
      step_s_runs: of each run.
      difference: mean |log-probability - the float32 reference's| over checked tokens, of the worst of the runs.
      num_checked: tokens that were compared.
      num_outcomes: different sequences of tokens that the runs gave; 1 where the device repeats itself.
      num_bytes: least that a step has to read: each weight once, and the keys and values of the mean context.
      tokens_per_s: output tokens.
    """

    step_s: float
    step_s_runs: tuple[float, ...]
    difference: float
    num_checked: int
    num_outcomes: int
    num_bytes: float
    tokens_per_s: float


class DecodeBench:
    """The steps of one batch, ready to be dispatched again and again.

    Attributes:
      sequences: the rows.
      decode_steps: layout and packed inputs of each decode dispatch.
    """

    def __init__(self, started: StartedEngine, spec: DecodeSpec) -> None:
        """Draws prompts and scrambled block tables, and packs the inputs of all steps."""
        self._runner, self._spec = started.runner, spec
        self.sequences = _draw_sequences(started, spec)
        max_num_seqs, budget = started.engine.scheduler.max_num_seqs, started.config.scheduler.max_num_batched_tokens
        builder = InputBuilder(block_size=started.layout.block_size, max_num_seqs=max_num_seqs)

        def pack(plan: StepPlan) -> PackedStep:
            layout = started.runner.buckets.choose(plan)
            return layout, builder.build(plan, layout)

        self._prefill_steps = [pack(plan) for plan in _prefill_plans(self.sequences, budget)]
        count = started.config.scheduler.max_steps_per_dispatch or 1
        self.decode_steps = [pack(plan) for plan in _decode_plans(self.sequences, spec.num_steps, count)]

    def run(self) -> DecodeRun:
        """Times the steps and compares their log-probabilities with the float32 model's."""
        spec, runner = self._spec, self._runner
        for layout, packed in self._prefill_steps:
            runner.dispatch(layout, packed)
        first_tokens = jnp.copy(runner.state.last_token)
        first_ids = np.asarray(first_tokens)[1 : spec.batch + 1]
        seconds, outcomes = [], {}
        for _ in range(spec.repeats + 1):
            runner.state = dataclasses.replace(runner.state, last_token=jnp.copy(first_tokens))
            runner.state.last_token.block_until_ready()
            begin = time.perf_counter()
            launched = [runner.dispatch(layout, packed)[0] for layout, packed in self.decode_steps]
            launched[-1].block_until_ready()
            seconds.append((time.perf_counter() - begin) / spec.num_steps)
            tokens, logprobs = self._read(launched)
            outcomes[tokens.tobytes(), logprobs.tobytes()] = tokens, logprobs
        checked = [self._difference(first_ids, *outcome) for outcome in outcomes.values()]
        step_s = statistics.median(seconds[1:])
        mean_context = spec.prompt_len + (spec.num_steps + 1) / 2
        return DecodeRun(
            step_s=step_s,
            step_s_runs=tuple(seconds[1:]),
            difference=max(checked),
            num_checked=len(np.unique(self._checked_rows)) * spec.num_steps,
            num_outcomes=len(outcomes),
            num_bytes=read_bytes(runner.params) + spec.batch * mean_context * runner.cache.bytes_per_token,
            tokens_per_s=spec.batch / step_s,
        )

    def _read(self, launched: Sequence[jax.Array]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sampled tokens i32[steps B] and their raw log-probabilities f32[steps B]."""
        tokens, logprobs = [], []
        for (layout, _), outputs in zip(self.decode_steps, jax.device_get(list(launched)), strict=True):
            for part in np.split(outputs, layout.num_steps):
                views = host_views(part, output_fields(layout))
                tokens.append(views["token_ids"][: self._spec.batch])
                logprobs.append(views["logprobs"][: self._spec.batch, 0])
        return np.stack(tokens), np.stack(logprobs)

    @property
    def _checked_rows(self) -> np.ndarray:
        """As many rows as the reference can take, spread over the batch; a small batch fills them more than once."""
        num_rows = CHECKED_TOKENS // (self._spec.prompt_len + self._spec.num_steps)
        return np.linspace(0, self._spec.batch - 1, max(1, num_rows)).astype(int)

    def _difference(self, first_ids: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> float:
        rows = self._checked_rows
        prompts = np.array([self.sequences[row].token_ids for row in rows])
        forced = np.concatenate([prompts, first_ids[rows, None], tokens[:, rows].T], axis=1)
        expected = reference_logprobs(self._runner.params, self._runner.config.model, forced)
        return float(np.abs(expected[:, -self._spec.num_steps :] - logprobs[:, rows].T).mean())


def time_prefill(started: StartedEngine, length: int, *, repeats: int, num_calls: int = 10) -> float:
    """Returns the median seconds of the step that computes one prompt whole, launched many times before one wait."""
    spec = DecodeSpec(batch=1, prompt_len=length, num_steps=1, repeats=1)
    (plan,) = _prefill_plans(_draw_sequences(started, spec), length)
    runner = started.runner
    layout = runner.buckets.choose(plan)
    builder = InputBuilder(block_size=started.layout.block_size, max_num_seqs=started.engine.scheduler.max_num_seqs)
    packed, seconds = builder.build(plan, layout), []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        for _ in range(num_calls):
            outputs, _ = runner.dispatch(layout, packed)
        outputs.block_until_ready()
        seconds.append((time.perf_counter() - begin) / num_calls)
    return statistics.median(seconds[1:])


def time_engine(started: StartedEngine, spec: DecodeSpec) -> tuple[float, float]:
    """Returns seconds of a decode step through scheduler and engine, and of the host's work in it, all rows running.

    The second of two rounds counts; the engine must be idle, and have room for all the rows.
    """
    engine, scheduler = started.engine, started.engine.scheduler
    params = SamplingParams(max_tokens=spec.num_steps, temperature=0.0).resolve({})
    for index in range(2):
        for seq in _draw_sequences(started, spec):
            name = f"{index}-{spec.batch}-{seq.request_id}"
            scheduler.add(dataclasses.replace(seq.request, request_id=name, params=params))
        while scheduler.num_waiting or not engine.last_plan.is_decode:
            engine.step()
        engine.drain()
        begin, work_s, first = time.perf_counter(), engine.clock.work_s, scheduler.counters.num_steps
        while scheduler.num_running == spec.batch and scheduler.counters.num_steps < first + spec.num_steps // 2:
            engine.step()
        engine.drain()
        count = max(scheduler.counters.num_steps - first, 1)
        step_s, host_s = (time.perf_counter() - begin) / count, (engine.clock.work_s - work_s) / count
        while scheduler.has_unfinished:
            engine.step()
    return step_s, host_s


def read_bytes(params: Params) -> int:
    """Returns the bytes of the weights that a decode step reads: all but an embedding that is not the head too."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves((params.layers, params.final_norm, params.head)))


def reference_logprobs(params: Params, config: ModelConfig, token_ids: np.ndarray) -> np.ndarray:
    """Returns the float32 model's log-probability f32[B T-1] of each token i32[B T] after the first.

    All layers in the plain forward of float32; int8 weights are dequantized to float32, other ones converted.
    """
    exact = jax.tree.map(lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, params)
    logits = forward(exact, dataclasses.replace(config, dtype="float32"), jnp.asarray(token_ids[:, :-1]))
    found = jnp.take_along_axis(logits, jnp.asarray(token_ids[:, 1:, None]), axis=2).squeeze(2)
    return np.asarray(found - jax.nn.logsumexp(logits, axis=2))


def _draw_sequences(started: StartedEngine, spec: DecodeSpec) -> list[SequenceState]:
    """Returns running sequences with random prompts, and blocks in random places of the pool."""
    rng, vocab_size = np.random.default_rng(spec.batch), started.runner.config.model.vocab_size
    num_blocks = started.layout.blocks_for(spec.prompt_len + spec.num_steps)
    pool = rng.permutation(np.arange(1, started.layout.num_blocks)).tolist()
    assert len(pool) >= spec.batch * num_blocks, f"{spec.batch} rows need {num_blocks} blocks each, got {len(pool)}"
    params = SamplingParams(max_tokens=spec.num_steps + 1, temperature=0.0).resolve({})
    sequences = []
    for index in range(spec.batch):
        ids = tuple(rng.integers(vocab_size, size=spec.prompt_len).tolist())
        sequences.append(
            SequenceState(
                request=Request(request_id=str(index), prompt_token_ids=ids, params=params),
                arrival=index,
                token_ids=list(ids),
                max_num_slots=spec.prompt_len + spec.num_steps,
                max_num_blocks=num_blocks,
                block_ids=pool[index * num_blocks : (index + 1) * num_blocks],
                admission=index + 1,
                state_slot=index + 1,
            )
        )
    return sequences


def _prefill_plans(sequences: Sequence[SequenceState], budget: int) -> list[StepPlan]:
    """Returns steps of at most `budget` tokens that compute all prompts, and sample a token after each."""
    plans, rows, left = [], [], budget
    for seq in sequences:
        start = 0
        while start < seq.num_prompt_tokens:
            count = min(left, seq.num_prompt_tokens - start)
            is_last = start + count == seq.num_prompt_tokens
            rows.append(ScheduledSequence(seq, start, count, int(is_last), seq.admission))
            start, left = start + count, left - count
            if not left:
                plans.append(StepPlan(tuple(rows)))
                rows, left = [], budget
    return [*plans, StepPlan(tuple(rows))] if rows else plans


def _decode_plans(sequences: Sequence[SequenceState], num_steps: int, steps_per_dispatch: int) -> list[StepPlan]:
    """Returns dispatches of all rows, one token a row and step."""
    assert num_steps % steps_per_dispatch == 0, f"{num_steps} steps are no multiple of {steps_per_dispatch}"
    return [
        StepPlan(
            tuple(
                ScheduledSequence(
                    seq, seq.num_prompt_tokens + index, steps_per_dispatch, steps_per_dispatch, seq.admission
                )
                for seq in sequences
            ),
            num_steps=steps_per_dispatch,
        )
        for index in range(0, num_steps, steps_per_dispatch)
    ]
