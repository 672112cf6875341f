"""The step on its device: donated buffers are reused, the cache is never copied, nothing compiles twice."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax.config import make_engine_config
from photon_jax.engine.engine import Engine
from photon_jax.engine.metrics import CompileCounter
from photon_jax.engine.runner import ModelRunner
from photon_jax.engine.start import start_engine
from photon_jax.request import Request, SamplingParams
from photon_jax.structured_outputs import StructuredOutputs
from photon_jax.text.grammar import Grammars

GRAMMAR = Grammars(ByteTokenizer(), vocab_size=258).grammar(StructuredOutputs(regex="[a-z]{9}"))
SETTINGS = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 16, "num_blocks": 999, "max_model_len": 200}


def start(**settings):
    config = tiny_config()
    return start_engine(tiny_params(config), config, make_engine_config(None, **(SETTINGS | settings)))


@pytest.fixture(scope="module")
def programs():
    """By layout, what the full warm-up of `started` compiled."""
    return {}


@pytest.fixture(scope="module")
def started(programs):
    compile_layout = ModelRunner.compile

    def compile_and_keep(self, layout):
        programs[layout] = compile_layout(self, layout)
        return programs[layout]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "compile", compile_and_keep)
        return start(warmup="full")


def run(started, requests):
    for request in requests:
        started.engine.scheduler.add(request)
    while started.engine.scheduler.has_unfinished:
        started.engine.step()


def request_of(name, prompt_len, **params):
    ids = tuple(np.random.default_rng(prompt_len).integers(258, size=prompt_len).tolist())
    fields = {name: params.pop(name) for name in ("score", "score_start", "grammar") if name in params}
    resolved = SamplingParams(**({"max_tokens": 6} | params)).resolve({})
    return Request(request_id=name, prompt_token_ids=ids, params=resolved, stop_token_ids=(257, 5), **fields)


def every_kind_of_request(tag):
    return [
        request_of(f"{tag}greedy", 3, temperature=0.0),
        request_of(f"{tag}plain", 70),
        request_of(f"{tag}top-k", 16, top_k=3),
        request_of(f"{tag}top-p", 17, top_p=0.5, seed=3),
        request_of(f"{tag}min-p", 31, min_p=0.2, temperature=0.3),
        request_of(f"{tag}all", 33, top_k=9, top_p=0.9, min_p=0.01, temperature=1.7, min_tokens=4),
        request_of(f"{tag}score", 40, score=True, max_tokens=1),
        request_of(f"{tag}continuation", 41, score=True, score_start=40, max_tokens=1),
        request_of(f"{tag}penalties", 5, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=-0.5),
        request_of(f"{tag}bias", 37, logit_bias={3: 1.0}, logprobs=2),
        request_of(f"{tag}allowed", 18, allowed_token_ids=range(100), temperature=0.0, min_tokens=2),
        request_of(f"{tag}logprobs", 3, logprobs=2, logprobs_kind="sampling", top_k=4),
        request_of(f"{tag}prompt logprobs", 35, prompt_logprobs=3, temperature=0.0),
        request_of(f"{tag}prompt and logprobs", 34, prompt_logprobs=20, logprobs=20),
        request_of(f"{tag}form", 6, grammar=GRAMMAR),
        request_of(f"{tag}form and logprobs", 36, grammar=GRAMMAR, logprobs=2, presence_penalty=0.5),
        request_of(f"{tag}again", 70),
        request_of(f"{tag}one", 1),
    ]


def has_room_for_a_copy(compiled: jax.stages.Compiled, cache: jax.Array) -> bool:
    """Returns whether a program's temporary memory could hold a second array of the cache's size."""
    return compiled.memory_analysis().temp_size_in_bytes >= cache.nbytes


def check_no_copies(cache, programs):
    for layout, compiled in programs.items():
        memory = compiled.memory_analysis()
        sizes = f"{layout}: cache of 2 x {cache.k.nbytes} bytes, {memory}"
        assert not has_room_for_a_copy(compiled, cache.k), sizes
        assert memory.alias_size_in_bytes >= cache.nbytes, sizes


def compile_largest(started):
    """Returns the plain programs, and the largest ones, those with scores, likeliest tokens and controls included."""
    buckets = started.runner.buckets
    largest = [layout for layout in buckets.layouts() if layout.num_tokens == buckets.mixed_tokens[-1]]
    return {layout: started.runner.compile(layout) for layout in dict.fromkeys(buckets.plain_layouts() + largest)}


def test_no_program_copies_the_cache_and_all_alias_it(started, programs):
    assert programs.keys() == set(started.runner.buckets.layouts())
    check_no_copies(started.runner.cache, programs)


def test_no_program_copies_an_int8_cache_and_all_alias_it():
    """The layers alone touch the cache, what comes after them is compiled in its fullest form and its least."""
    started = start(kv_dtype="int8", num_blocks=1999)
    assert len(jax.tree.leaves(started.runner.cache)) == 4
    layouts = started.runner.buckets.layouts()
    fullest = next(layout for layout in layouts if layout.has_scores and layout.has_top and layout.has_controls)
    chosen = [*started.runner.buckets.plain_layouts(), fullest]
    check_no_copies(started.runner.cache, {layout: started.runner.compile(layout) for layout in chosen})


def test_the_search_for_copies_finds_one(started):
    cache = started.runner.cache.k

    def write_and_compare(k):
        new = k.at[0, 0].set(1.0)
        return new, (new * k[::-1]).sum()

    assert has_room_for_a_copy(jax.jit(write_and_compare, donate_argnums=0).lower(cache).compile(), cache)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")])
def test_gpu_programs_do_not_copy_the_cache(dtype, kv_dtype):
    """The cache is larger than the workspace that XLA gives a matrix product, some 32 MiB."""
    config = tiny_config(dtype=dtype, num_layers=4, head_dim=64, hidden_size=256)
    settings = SETTINGS | {"block_size": 64, "num_blocks": 2000, "dtype": dtype, "kv_dtype": kv_dtype}
    started = start_engine(tiny_params(config), config, make_engine_config(None, **settings))
    check_no_copies(started.runner.cache, compile_largest(started))


def test_a_step_writes_into_the_buffers_that_it_was_given(started):
    run(started, [request_of("first", 20)])
    cache = started.runner.cache
    before = cache.k.unsafe_buffer_pointer(), cache.v.unsafe_buffer_pointer()
    run(started, [request_of("second", 20)])
    after = started.runner.cache
    assert (after.k.unsafe_buffer_pointer(), after.v.unsafe_buffer_pointer()) == before
    assert cache.k.is_deleted()


def test_nothing_compiles_after_a_full_warm_up(started):
    with CompileCounter() as counter:
        run(started, every_kind_of_request("a"))
    assert counter.num_compiles == 0
    counters = started.engine.scheduler.counters
    assert counters.num_chunks > 0 and counters.num_prefix_hit_tokens > 0


def test_a_lazy_engine_compiles_what_it_meets(started):
    lazy = start(warmup="lazy", max_model_len=199)  # programs of its own, though equal to those of the other engine
    with CompileCounter() as counter:
        run(lazy, [request_of("plain", 3), request_of("penalties", 5, repetition_penalty=1.2)])
    assert counter.num_compiles > 0


def test_each_step_copies_one_array_to_the_host(started, monkeypatch):
    copies = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda array: copies.append(array.shape) or device_get(array))
    for name in ("__int__", "__float__", "__bool__", "__index__", "item", "tolist"):
        monkeypatch.delattr(type(started.runner.cache.k), name)
    steps = started.engine.scheduler.counters.num_steps
    run(started, every_kind_of_request("c"))
    assert len(copies) == started.engine.scheduler.counters.num_steps - steps
    assert all(len(shape) == 1 for shape in copies)


@pytest.mark.gpu
def test_gpu_steps_run_under_a_transfer_guard(started):
    for request in every_kind_of_request("d"):
        started.engine.scheduler.add(request)
    while started.engine.scheduler.has_unfinished:
        plan = started.engine.scheduler.schedule()
        with jax.transfer_guard_device_to_host("disallow"):
            handle = started.runner.launch(plan)
        started.engine.scheduler.apply(plan, started.runner.collect(handle))


def test_what_is_compiled_beside_the_steps_makes_the_control_state_without_compiling(started, monkeypatch):
    ours = started.runner
    runner = ModelRunner(ours.params, ours.config, ours._cache_layout, ours.buckets, max_num_seqs=3)
    monkeypatch.setattr(runner, "compile", lambda layout: None)
    runner.compile_late(next(layout for layout in ours.buckets.layouts() if layout.has_controls))
    with CompileCounter() as counter:
        runner.make_control_state()
    assert counter.num_compiles == 0


def bits_of(started, runner):
    """Returns what requests of every kind get from a runner: token ids and the bits of all log-probabilities."""
    scheduler, found = started.new_scheduler(), {}
    engine = Engine(scheduler, runner)
    for request in every_kind_of_request("l"):
        scheduler.add(request)
    while scheduler.has_unfinished:
        for delta in engine.step():
            tops = [array.tobytes() for array in (delta.top_ids, delta.top_logprobs) if array is not None]
            scores = [] if delta.scores is None else [delta.scores.logprobs.tobytes(), delta.scores.top_ids.tobytes()]
            got = (delta.new_token_ids, delta.logprobs.tobytes(), *tops, *scores)
            found.setdefault(delta.request_id, []).append(got)
    return found


def test_steps_come_in_larger_programs_while_theirs_are_compiled_and_give_the_same_bits(started):
    ours = started.runner
    plain = ours.buckets.plain_layouts()[0]
    fullest = dataclasses.replace(plain, has_scores=True, has_top=True, has_controls=True)
    runner = ModelRunner(ours.params, ours.config, ours._cache_layout, ours.buckets, max_num_seqs=2)
    runner.launched.layouts |= {plain, fullest}
    assert runner.announce([layout for layout in ours.buckets.layouts() if layout not in (plain, fullest)])
    assert bits_of(started, runner) == bits_of(started, ours)
    assert runner.launched.layouts == {plain, fullest}
    runner.announce([])
    bits_of(started, runner)
    assert len(runner.launched.layouts) > 2, "a program that nobody compiles is compiled when a step needs it"


def test_a_program_of_several_steps_that_is_compiled_keeps_dispatches_single(started):
    runner, several = started.runner, dataclasses.replace(started.runner.buckets.plain_layouts()[-1], num_steps=4)
    try:
        assert runner.allows_several and runner.announce([several]), "steps can do without"
        assert not runner.allows_several
    finally:
        runner.announce([])
