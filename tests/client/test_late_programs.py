"""Programs that are compiled while requests run: those go on in larger ones, and who can't do without them waits."""

import asyncio
import random
import threading
import time

import pytest
from helpers.async_play import AsyncPlay, ask, read, run, until
from helpers.fake_engine import LONG, MATE, expected, result

from photon_jax.cache.layout import CacheLayout
from photon_jax.client import late_programs
from photon_jax.config import SchedulerConfig
from photon_jax.engine.buckets import TileChoice, padded_buckets, tiled_buckets
from photon_jax.engine.foresight import Crowd
from photon_jax.engine.stand_ins import are_enough, compile_order, find_stand_in

LAYOUT = "a step with the most likely tokens"


class LatePlay(AsyncPlay):
    """A play in which a batch with log-probabilities needs a program that takes until a test lets it be there."""

    def __init__(self):
        super().__init__()
        self.compiled = []
        self.has_begun, self.goes_on = threading.Event(), threading.Event()
        self.runner.uncompiled_for = self.uncompiled_for
        self.runner.compile = self.compile

    def uncompiled_for(self, requests, num_prompt_tokens):
        self.asked = (len(requests), num_prompt_tokens)
        return [LAYOUT] if any(each.params.logprobs for each in requests) and not self.compiled else []

    def compile(self, layout):
        assert threading.current_thread().name.startswith("photon-compile")
        self.has_begun.set()
        assert self.goes_on.wait(60)
        self.compiled.append(layout)


async def step_until(play, condition):
    """Lets held steps go on one by one, slowly, until something has come about: a long stream is not over before."""
    while not condition():
        play.runner.allow()
        await asyncio.sleep(0.005)


async def generate(play, engine, *prompt):
    """Has a prompt answered while the steps are held."""
    answer = asyncio.ensure_future(engine.generate(*prompt))
    await step_until(play, answer.done)
    return answer.result()


async def begin(play, engine):
    """Returns a stream of 220 tokens that has its first; its steps are held."""
    play.runner.hold()
    stream = engine.stream(*ask(LONG, 220))
    has_deltas = False
    while not has_deltas:
        update = asyncio.ensure_future(anext(stream))
        await step_until(play, update.done)
        has_deltas = bool(update.result().deltas)
    return stream


def end(play, stream):
    stream.close()
    play.runner.release()


@pytest.fixture
def play():
    play = LatePlay()
    yield play
    play.goes_on.set()
    play.check_idle()


def test_a_stream_goes_on_while_a_program_is_compiled_for_another(play):
    async def main():
        async with play.open() as engine:
            play.runner.hold()
            stream = engine.stream(*ask(LONG, 30))
            late = asyncio.ensure_future(engine.generate(*ask(MATE, 4, logprobs=1, n=2)))
            await until(lambda: engine.stats().num_waiting >= 2 and play.has_begun.is_set())
            play.runner.release()
            assert await read(stream) == expected(LONG, 30)
            assert engine.stats().num_waiting == 2 and not engine.stats().slots
            # whoever needs nothing new is served before it
            assert result(await engine.generate(*ask(MATE, 5))) == expected(MATE, 5)
            assert not late.done()
            play.goes_on.set()
            assert result(await late, 1) == expected(MATE, 4)
            assert play.compiled == [LAYOUT]

    run(main)


def test_the_engine_sleeps_while_all_that_is_left_waits_for_a_program(play, monkeypatch):
    idle_steps, step = [], play.client.step
    monkeypatch.setattr(play.client, "step", lambda: idle_steps.append(not play.scheduler.has_unfinished) or step())

    async def main():
        async with play.open() as engine:
            stream = engine.stream(*ask(LONG, 30))
            late = asyncio.ensure_future(engine.generate(*ask(MATE, 4, logprobs=1)))
            await until(play.has_begun.is_set)
            assert await read(stream) == expected(LONG, 30)
            await asyncio.sleep(0.05)  # in which one that did not sleep would make a thousand
            assert sum(idle_steps) < 10
            assert result(await engine.generate(*ask(MATE, 5))) == expected(MATE, 5)
            assert not late.done()
            play.goes_on.set()
            assert result(await late) == expected(MATE, 4)

    run(main)


def test_what_is_not_computed_yet_is_told_of(play):
    async def main():
        async with play.open() as engine:
            stream = await begin(play, engine)
            await generate(play, engine, *ask(MATE, 4, n=2))
            assert play.asked == (3, 2 * len(MATE))
            end(play, stream)

    run(main)


def test_samples_that_wait_for_a_place_are_told_of_too(play):
    async def main():
        async with play.open() as engine:
            play.runner.hold()
            stream = engine.stream(*ask(MATE, 220, n=3))
            play.runner.allow()
            while not (await anext(stream)).deltas:
                pass
            other = engine.stream(*ask(MATE, 4))
            assert play.asked == (4, 2 * len(MATE)), "two of three run, the third and the new one do not"
            play.runner.release()
            stream.close()
            other.close()

    run(main)


def test_a_request_that_is_alone_waits_for_its_own_programs_alone(play):
    async def main():
        async with play.open() as engine:
            assert result(await engine.generate(*ask(MATE, 4, logprobs=1))) == expected(MATE, 4)
            assert not play.compiled

    run(main)


def test_what_a_crowd_needed_is_compiled_on_for_the_one_that_is_left(play, monkeypatch):
    monkeypatch.setattr(late_programs, "num_threads", lambda: 1)
    left = ["first", "second"]
    play.runner.stands_in = lambda layouts: True
    play.runner.uncompiled_for = lambda requests, num_prompt_tokens: list(left) if requests else []

    def compile_when_told(layout):
        play.has_begun.set()
        assert play.goes_on.wait(60)
        left.remove(layout)

    play.runner.compile = compile_when_told

    async def main():
        async with play.open() as engine:
            stream = await begin(play, engine)
            assert result(await generate(play, engine, *ask(MATE, 4))) == expected(MATE, 4)
            assert play.has_begun.is_set() and left == ["first", "second"]
            play.goes_on.set()
            await step_until(play, lambda: not left)
            end(play, stream)

    run(main)


def test_nobody_waits_for_a_program_that_a_larger_one_stands_in_for(play):
    play.runner.stands_in = lambda layouts: True

    async def main():
        async with play.open() as engine:
            stream = engine.stream(*ask(LONG, 30))
            assert result(await engine.generate(*ask(MATE, 4, logprobs=1))) == expected(MATE, 4)
            assert await read(stream) == expected(LONG, 30)
            assert play.runner.announced == [LAYOUT] and not play.compiled and play.has_begun.is_set()
            play.goes_on.set()
            await until(lambda: play.compiled and not play.runner.announced)

    run(main)


def test_programs_are_compiled_on_all_cores_at_once_in_their_order(play, monkeypatch):
    monkeypatch.setattr(late_programs, "num_threads", lambda: 3)
    meeting, begun, left = threading.Barrier(3, timeout=60), [], list("abcde")

    def compile_with_others(layout):
        begun.append(layout)
        if layout in "abc":
            meeting.wait()
        left.remove(layout)

    play.runner.compile = compile_with_others
    play.runner.uncompiled_for = lambda requests, num_prompt_tokens: list(left) if len(requests) > 1 else []

    async def main():
        async with play.open() as engine:
            stream = await begin(play, engine)
            assert result(await generate(play, engine, *ask(MATE, 4))) == expected(MATE, 4)
            end(play, stream)

    run(main)
    assert set(begun[:3]) == set("abc") and sorted(begun) == list("abcde"), "each once, the first three together"


def test_no_dispatch_has_several_steps_while_a_program_for_that_is_compiled():
    play = AsyncPlay(scheduler={"max_steps": 4})
    num_steps, launch = [], play.runner.launch
    play.runner.launch = lambda plan: num_steps.append(plan.num_steps) or launch(plan)

    async def main():
        async with play.open() as engine:
            for play.runner.allows_several in (False, True):
                num_steps.append("next")
                await engine.generate(*ask(MATE, 9))

    run(main)
    assert num_steps == ["next", *[1] * 9, "next", 1, 4, 4]


def test_who_leaves_while_a_program_is_compiled_is_forgotten(play):
    async def main():
        async with play.open() as engine:
            stream = engine.stream(*ask(LONG, 220))
            left = [engine.stream(*ask(MATE, 4, logprobs=1)) for _ in range(2)]
            for each in left:
                each.close()
            await until(lambda: not engine.stats().num_waiting)
            play.goes_on.set()
            stream.close()

    run(main)
    assert len(play.compiled) <= 1, "a program was compiled for nobody"


def test_the_end_waits_for_no_program_but_the_one_that_is_compiled(play):
    async def main():
        engine = play.open()
        stream = engine.stream(*ask(LONG, 220))
        waits = [asyncio.ensure_future(engine.generate(*ask(MATE, 4, logprobs=1))) for _ in range(3)]
        await until(lambda: engine.stats().num_waiting >= 3 and play.has_begun.is_set())
        threading.Timer(0.1, play.goes_on.set).start()
        await asyncio.to_thread(engine.close)
        assert [result(output) for output in await asyncio.gather(*waits)] == [((), "abort")] * 3
        stream.close()

    asyncio.run(asyncio.wait_for(main(), 100))
    assert len(play.compiled) == 1


def test_what_fails_to_compile_is_left_to_the_step_that_needs_it(play):
    def fail(layout):
        raise MemoryError

    play.runner.compile = fail

    async def main():
        async with play.open() as engine:
            stream = engine.stream(*ask(LONG, 220))
            assert result(await engine.generate(*ask(MATE, 4, logprobs=1))) == expected(MATE, 4)
            assert await read(stream) == expected(LONG, 220)

    run(main)


class CrowdPlay(AsyncPlay):
    """A play with all the programs of a real engine, in a cache so small that sequences are preempted.

    Attributes:
      compiled: the programs that are there.
      num_stalls: steps of several requests that had to wait for a program.
      num_stand_ins: steps that came in a larger one.
    """

    def __init__(self, make_buckets):
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
        cache = CacheLayout(num_blocks=45, block_size=4)
        super().__init__(scheduler={**limits, "block_size": 4, "num_blocks": 45, "max_model_len": 200, "max_steps": 4})
        self.compiled = set()
        self.num_stalls = self.num_stand_ins = 0
        buckets = make_buckets(SchedulerConfig(**limits, max_steps_per_dispatch=4), cache, max_model_len=200)
        launch = self.runner.launch

        def missing(requests, num_prompt_tokens):
            if not requests:
                return []
            crowd = Crowd.of(requests, num_prompt_tokens=num_prompt_tokens, cache=cache)
            left = [layout for layout in buckets.layouts() if layout not in self.compiled]
            return compile_order([layout for layout in left if crowd.may_need(layout, buckets)], list(self.compiled))

        def announce(layouts):
            self.runner.announced = layouts
            self.runner.allows_several = not any(layout.num_steps > 1 for layout in layouts)
            return are_enough(list(self.compiled), layouts)

        def launch_compiled(plan):
            layout, announced = buckets.choose(plan), self.runner.announced
            if layout not in self.compiled:
                is_there = layout in announced and find_stand_in(layout, list(self.compiled)) is not None
                is_alone = len({submission.request_id for submission, _ in self.client._live.values()}) == 1
                self.num_stand_ins += is_there
                self.num_stalls += not (is_there or is_alone)
                if not is_there:
                    self.compiled.add(layout)
            return launch(plan)

        def compile_slowly(layout):
            time.sleep(0.002)
            self.compiled.add(layout)

        self.runner.uncompiled_for, self.runner.announce = missing, announce
        self.runner.launch, self.runner.compile = launch_compiled, compile_slowly


def tiled(query_tile):
    """Returns what makes buckets, whose decode steps and mixed ones have layouts in common with query tiles of 1."""
    return lambda *limits, **lengths: tiled_buckets(*limits, **lengths, tiles=TileChoice((2, 8), query_tile))


async def read_or_leave(engine, rng):
    await asyncio.sleep(rng.random() / 20)
    kinds = ({"logprobs": 2}, {"prompt_logprobs": 0}, {"prompt_logprobs": 2}, {"presence_penalty": 0.5})
    fields = rng.choice(kinds) if rng.random() < 0.3 else {}
    prompt = [rng.randrange(50) for _ in range(rng.choice([3, 3, 10, 60]))]
    stream = engine.stream(*ask(prompt, rng.choice([3, 20, 60]), n=rng.choice([1, 1, 3]), **fields))
    async for _ in stream:
        if rng.random() < 0.002:
            stream.close()


@pytest.mark.parametrize("make_buckets", [padded_buckets, tiled(16), tiled(1)], ids=["padded", "tiled", "alike"])
def test_no_step_of_several_requests_waits_for_a_program_whatever_comes(make_buckets):
    num_preemptions = num_stand_ins = 0
    for seed in range(8):
        rng, play = random.Random(seed), CrowdPlay(make_buckets)

        async def main(rng=rng, play=play):
            async with play.open() as engine:
                await asyncio.gather(*(read_or_leave(engine, rng) for _ in range(12)))

        run(main)
        play.check_idle()
        assert not play.num_stalls, f"seed {seed}"
        num_preemptions += play.scheduler.counters.num_preemptions
        num_stand_ins += play.num_stand_ins
    assert num_preemptions > 0 and num_stand_ins > 0
