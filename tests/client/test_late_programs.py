"""Programs that are compiled while requests run: those go on, and who needs the programs waits for them."""

import asyncio
import threading

import pytest
from helpers.async_play import AsyncPlay, ask, read, run, until
from helpers.fake_engine import LONG, MATE, expected, result

LAYOUT = "a step with the most likely tokens"


class LatePlay(AsyncPlay):
    """A play in which a batch with log-probabilities needs a program that takes until a test lets it be there."""

    def __init__(self):
        super().__init__()
        self.compiled = []
        self.goes_on = threading.Event()
        self.runner.uncompiled_for = self.uncompiled_for
        self.runner.compile = self.compile

    def uncompiled_for(self, requests, num_prompt_tokens):
        self.asked = (len(requests), num_prompt_tokens)
        return [LAYOUT] if any(each.params.logprobs for each in requests) and not self.compiled else []

    def compile(self, layout):
        assert threading.current_thread().name.startswith("photon-compile")
        assert self.goes_on.wait(60)
        self.compiled.append(layout)


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
            await until(lambda: engine.stats().num_waiting >= 2)
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


def test_what_is_not_computed_yet_is_told_of(play):
    async def main():
        async with play.open() as engine:
            stream = engine.stream(*ask(LONG, 220))
            while not (await anext(stream)).deltas:
                pass
            await engine.generate(*ask(MATE, 4, n=2))
            assert play.asked == (3, 2 * len(MATE))
            stream.close()

    run(main)


def test_a_request_that_is_alone_waits_for_its_own_programs_alone(play):
    async def main():
        async with play.open() as engine:
            assert result(await engine.generate(*ask(MATE, 4, logprobs=1))) == expected(MATE, 4)
            assert not play.compiled

    run(main)


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
        await until(lambda: engine.stats().num_waiting >= 3)
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
