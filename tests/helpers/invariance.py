"""Random schedules of an engine on the tiny model, each request compared bit by bit with the same request alone."""

import collections
import copy
import dataclasses

import jax.numpy as jnp
import numpy as np
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import CacheConfig, KernelConfig, KVDType, SchedulerConfig
from photon_jax.controls import LogitsProcessor
from photon_jax.engine.buckets import padded_buckets, tiled_buckets
from photon_jax.engine.engine import Engine
from photon_jax.engine.runner import ModelRunner
from photon_jax.engine.step import StepConfig
from photon_jax.engine.tile_check import choose_tiles
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import Params
from photon_jax.request import Request, SamplingParams
from photon_jax.scheduler.scheduler import Scheduler

BLOCK_SIZE = 4
MAX_MODEL_LEN = 160
MAX_NUM_SEQS = 6
MAX_NUM_BATCHED_TOKENS = 64
NUM_BLOCKS = 193
STOP_IDS = (257, 11)
# of an LLM whose programs are those of a World
WORLD_FIELDS = {
    "block_size": BLOCK_SIZE,
    "num_blocks": NUM_BLOCKS,
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
    "max_model_len": MAX_MODEL_LEN,
    "progress": False,
}


@dataclasses.dataclass
class Result:
    """What one request got: tokens with three log-probabilities each and the likeliest tokens; scores."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[bytes] = dataclasses.field(default_factory=list)
    tops: list[bytes] = dataclasses.field(default_factory=list)
    scores: list[bytes] | None = None
    finish: str | None = None

    def is_prefix_of(self, whole: "Result") -> bool:
        count = len(self.token_ids)
        is_scored = self.scores in (None, whole.scores)
        return is_scored and all(
            getattr(self, name) == getattr(whole, name)[:count] for name in ("token_ids", "logprobs", "tops")
        )


@dataclasses.dataclass
class Tally:
    """What the schedules met."""

    schedules: int = 0
    with_preemption: int = 0
    with_chunks: int = 0
    with_prefix_hits: int = 0
    with_overlap: int = 0
    with_multi_steps: int = 0
    aborts: int = 0
    requests: int = 0
    token_buckets: collections.Counter = dataclasses.field(default_factory=collections.Counter)


class World:
    """One model and one set of programs; schedulers with smaller limits share them."""

    def __init__(
        self,
        num_requests: int = 60,
        seed: int = 0,
        config: ModelConfig | None = None,
        params: Params | None = None,
        kv_dtype: KVDType = "auto",
        kernels: KernelConfig | None = None,
    ) -> None:
        """Takes the reference ops unless kernels are given, and then programs of two sizes of each kind."""
        self.config = config or tiny_config()
        self.params = params or tiny_params(self.config)
        self.step_config = StepConfig(
            model=self.config,
            kernels=kernels or KernelConfig().resolve("cpu", head_dim=16),
            max_model_len=MAX_MODEL_LEN,
            kv_dtype=kv_dtype,
        )
        self.layout = CacheLayout(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        limits = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS)
        # what is rare comes in a dozen kinds: one size of each
        if kernels is None:
            self.tiles = choose_tiles(self.params, self.step_config, BLOCK_SIZE)
            buckets = tiled_buckets(limits, self.layout, max_model_len=MAX_MODEL_LEN, tiles=self.tiles)
            self.buckets = dataclasses.replace(
                buckets, rare_rows=buckets.rare_rows[-1:], rare_tokens=buckets.rare_tokens[-1:]
            )
        else:
            buckets = padded_buckets(limits, self.layout, max_model_len=MAX_MODEL_LEN)
            sizes = {"decode_rows": (1, MAX_NUM_SEQS), "mixed_tokens": (32, MAX_NUM_BATCHED_TOKENS)}
            one_size = {name: getattr(buckets, name)[-1:] for name in ("rare_rows", "rare_tokens", "table_widths")}
            self.buckets = dataclasses.replace(buckets, **sizes, **one_size)
        self.most_steps = (1, 4)  # a dispatch may run
        self.requests = make_requests(np.random.default_rng(seed), num_requests)
        self._alone: dict[str, Result] = {}

    def with_requests(self, requests: list[Request]) -> "World":
        """Returns a world of the same model and programs with other requests."""
        other = copy.copy(self)
        other.requests, other._alone = requests, {}
        return other

    def alone(self, request: Request) -> Result:
        """Returns what the request gets by itself, one token a step: in the smallest bucket."""
        if request.request_id not in self._alone:
            engine, _ = self.engine(num_blocks=NUM_BLOCKS, max_num_seqs=1, budget=1, prefix_caching=False)
            results = collections.defaultdict(Result)
            engine.scheduler.add(request)
            while engine.scheduler.has_unfinished:
                take(engine.step(), results)
            self._alone[request.request_id] = results[request.request_id]
        return self._alone[request.request_id]

    def engine(
        self,
        *,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        prefix_caching: bool,
        steps_ahead: int = 0,
        max_steps: int = 1,
    ):
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_steps_per_dispatch=max_steps),
            CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, enable_prefix_caching=prefix_caching),
            CacheLayout(num_blocks=num_blocks, block_size=BLOCK_SIZE),
            max_model_len=MAX_MODEL_LEN,
        )
        runner = ModelRunner(self.params, self.step_config, self.layout, self.buckets, max_num_seqs=MAX_NUM_SEQS)
        return Engine(scheduler, runner, steps_ahead=steps_ahead), runner


def make_requests(rng: np.random.Generator, count: int) -> list[Request]:
    """Returns requests that share prefixes, of every kind of sampling, some of them score requests."""
    prefixes = [tuple(rng.integers(256, size=48).tolist()) for _ in range(2)]
    prefixes.append((*prefixes[1][:BLOCK_SIZE], *prefixes[0][: 48 - BLOCK_SIZE]))  # its blocks, one place further on
    requests = []
    for index in range(count):
        controls = make_controls(rng) if rng.random() < 0.5 else {}
        shared = prefixes[rng.integers(3)][: rng.choice([0, 8, 16, 48], p=[0.2, 0.3, 0.3, 0.2])]
        prompt = (*shared, *rng.integers(256, size=rng.integers(1, 16)).tolist())
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.3])),
            top_p=float(rng.choice([1.0, 0.8])),
            top_k=int(rng.choice([0, 5])),
            min_p=float(rng.choice([0.0, 0.05])),
            max_tokens=int(rng.choice([1, 20, 35, 45])),
            min_tokens=int(rng.integers(2)),
            logprobs=(None, 1, 3, 20)[rng.integers(4)],
            prompt_logprobs=(None, 0, 7)[rng.choice(3, p=[0.8, 0.1, 0.1])],
            logprobs_kind=("raw", "tempered", "sampling")[rng.integers(3)],
            **controls,
        )
        requests.append(
            Request(
                request_id=f"r{index}",
                prompt_token_ids=prompt,
                params=params,
                stop_token_ids=STOP_IDS,
                seed=(int(rng.integers(3)), 0),
                score=bool(rng.random() < 0.15),
                score_start=int(rng.integers(1, len(prompt) + 1)) if rng.random() < 0.7 else 1,
                bad_word_ids=tuple(params.bad_words),
            )
        )
    return requests


def remember(state, logits, token, position):
    """A logits processor that moves away from what it saw before, last of all a token at a place."""
    ids = jnp.arange(logits.shape[0])
    new_logits = jnp.where(ids == state["last"], logits - 1.0, logits) - 0.25 * state["mean"]
    return {"last": (token + position) % logits.shape[0], "mean": 0.5 * state["mean"] + 0.5 * logits}, new_logits


def make_controls(rng: np.random.Generator) -> dict[str, object]:
    """Returns sampling parameters that change the logits; few allowed tokens make bad words likely."""
    few = rng.choice(256, size=8, replace=False).tolist()
    is_few = rng.random() < 0.3
    ids = few if is_few else rng.choice(256, size=40, replace=False).tolist()
    words = tuple(tuple(rng.choice(ids, size=rng.integers(1, 4)).tolist()) for _ in range(12))
    state = {"last": np.int32(-1), "mean": np.zeros(258, np.float32)}
    choices = {
        "repetition_penalty": float(rng.choice([0.8, 1.3])),
        "presence_penalty": float(rng.choice([-0.5, 0.6])),
        "frequency_penalty": float(rng.choice([-0.2, 0.4])),
        "logit_bias": {token: float(rng.normal()) for token in ids},
        "bad_words": tuple(word for word in words if len(word) > 1 or not is_few),
        "logits_processor": LogitsProcessor(remember, state),
    }
    chosen = {name: value for name, value in choices.items() if rng.random() < 0.4}
    return chosen | ({"allowed_token_ids": few} if is_few else {})


def without_extras(request: Request) -> Request:
    """Returns the request without scores, most likely tokens and controls."""
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens")
    params = SamplingParams(**{name: getattr(request.params, name) for name in names}).resolve({})
    return dataclasses.replace(request, params=params, score=False, bad_word_ids=())


def take(deltas, results) -> None:
    for delta in deltas:
        result = results[delta.request_id]
        result.token_ids += delta.new_token_ids
        result.logprobs += [row.tobytes() for row in delta.logprobs]
        if delta.top_ids is not None:
            pairs = zip(delta.top_ids, delta.top_logprobs, strict=True)
            result.tops += [ids.tobytes() + values.tobytes() for ids, values in pairs]
        if delta.scores is not None:
            assert result.scores is None, f"{delta.request_id} got its scores twice"
            result.scores = [getattr(delta.scores, field.name).tobytes() for field in dataclasses.fields(delta.scores)]
        if delta.finish_reason is not None:
            result.finish = delta.finish_reason.value


def run_schedule(world: World, seed: int, tally: Tally) -> None:
    """Runs one random schedule; raises AssertionError where a request's bits or the books are wrong."""
    rng = np.random.default_rng(seed)
    chosen = [world.requests[i] for i in rng.choice(len(world.requests), size=rng.integers(4, 9), replace=False)]
    needed = max(len(r.prompt_token_ids) + (0 if r.score else r.params.max_tokens) for r in chosen)
    num_blocks = 1 + -(-needed // BLOCK_SIZE) + int(rng.choice([0, 2, 4, 7, 60], p=[0.05, 0.25, 0.35, 0.32, 0.03]))
    max_num_seqs = int(rng.integers(3, MAX_NUM_SEQS + 1))
    engine, runner = world.engine(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        budget=int(rng.choice([max_num_seqs, 8, 17, 33, MAX_NUM_BATCHED_TOKENS])),
        prefix_caching=bool(rng.random() < 0.85),
        steps_ahead=int(rng.integers(2)),
        max_steps=int(rng.choice(world.most_steps)),
    )
    results = collections.defaultdict(Result)
    arrivals = sorted(int(step) for step in rng.integers(0, 10, size=len(chosen)))
    aborts = {int(rng.integers(1, 40)): request.request_id for request in chosen if rng.random() < 0.15}
    aborted = set()
    overlap = multi_steps = False
    step, waiting = 0, list(zip(arrivals, chosen, strict=True))
    while waiting or engine.scheduler.has_unfinished:
        while waiting and (waiting[0][0] <= step or not engine.scheduler.has_unfinished):
            engine.scheduler.add(waiting.pop(0)[1])
        if step in aborts and engine.scheduler.abort(aborts[step]) is not None:
            aborted.add(aborts[step])
        take(engine.step(), results)
        overlap |= any(seq.num_pending for seq in engine.scheduler._running.values())
        multi_steps |= engine.last_plan.num_steps > 1
        if engine.last_plan.scheduled:
            tally.token_buckets[runner.buckets.choose(engine.last_plan).num_tokens] += 1
        engine.scheduler.check_integrity()
        step += 1
        assert step < 3000, f"schedule {seed} does not end"
    check_results(world, chosen, results, aborted, seed)
    scheduler = engine.scheduler
    assert scheduler.num_free_blocks == num_blocks - 1, f"schedule {seed} leaks blocks"
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    counters = scheduler.counters
    tally.schedules += 1
    tally.with_preemption += counters.num_preemptions > 0
    tally.with_chunks += counters.num_chunks > 0
    tally.with_prefix_hits += counters.num_prefix_hit_tokens > 0
    tally.with_overlap += overlap
    tally.with_multi_steps += multi_steps
    tally.aborts += len(aborted)
    tally.requests += len(chosen)


def check_results(world, chosen, results, aborted, seed) -> None:
    for request in chosen:
        expected, result = world.alone(request), results[request.request_id]
        where = f"schedule {seed}, {request.request_id}"
        assert result.is_prefix_of(expected), f"{where}: {result.token_ids} is not {expected.token_ids}, bit by bit"
        if request.request_id not in aborted:
            assert result == expected, f"{where}: {result} is not {expected}"
