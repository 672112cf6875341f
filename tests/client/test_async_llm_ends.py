"""AsyncLLM over a runner that computes by arithmetic: leaving, draining, closing, failing."""

import asyncio
import contextlib
import gc
import logging
import random
import threading

import pytest
from helpers.async_play import AsyncPlay, ask, in_thread, read, run, until
from helpers.fake_engine import LONG, MATE, expected, result

from photon_jax.client.submission import Prompt
from photon_jax.errors import CapacityError, EngineDeadError

MANY = 900  # tokens: more than come before a request is left


async def cancel(task):
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def close(engine):
    stream = engine.stream(*ask(LONG, MANY))
    await anext(stream)
    stream.close()
    stream.close()
    assert [update async for update in stream] == []


async def aclose(engine):
    async with contextlib.aclosing(engine.stream(*ask(LONG, MANY))) as stream:
        async for _ in stream:
            break


async def drop(engine):
    stream = engine.stream(*ask(LONG, MANY))
    await anext(stream)
    del stream


async def never_read(engine):
    engine.stream(*ask(LONG, MANY))


async def cancel_reader(engine):
    await cancel(asyncio.ensure_future(read(engine.stream(*ask(LONG, MANY)))))


async def fail_in_reader(engine):
    async def fail():
        async for _ in engine.stream(*ask(LONG, MANY)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    gc.collect()


async def cancel_whole(engine):
    await cancel(asyncio.ensure_future(engine.generate(*ask(LONG, MANY, n=2))))


async def cancel_score(engine):
    runner = engine.llm.client.engine._runner
    runner.hold()  # or all of it may be scored by then
    await cancel(asyncio.ensure_future(engine.score(Prompt(token_ids=LONG * 6))))
    runner.release()


@pytest.mark.parametrize(
    "leave", [close, aclose, drop, never_read, cancel_reader, fail_in_reader, cancel_whole, cancel_score]
)
@pytest.mark.parametrize("num_before", [0, 2])  # the places are free, or taken
def test_leaving_gives_the_blocks_back_and_nobody_else_notices(leave, num_before):
    play, ended = AsyncPlay(scheduler={"num_blocks": 513}), []

    async def main():
        async with play.open(on_finish=ended.append) as engine:
            mates = [asyncio.ensure_future(read(engine.stream(*ask(MATE, 60)))) for _ in range(num_before)]
            await asyncio.sleep(0)
            await leave(engine)
            await until(lambda: any(result(output)[1] == "abort" for output in ended))
            assert await asyncio.gather(*mates) == [expected(MATE, 60)] * num_before
            await until(lambda: not engine.stats().num_running)
            play.check_idle()
            assert await read(engine.stream(*ask(LONG, 4))) == expected(LONG, 4)

    run(main)
    play.check_idle()


def test_three_hundred_requests_left_at_random_moments_leave_balanced_books():
    scheduler = {"num_blocks": 21, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    play, rng, ends = AsyncPlay(scheduler=scheduler, steps_ahead=1), random.Random(3), []

    async def one(engine):
        prompt, max_tokens = LONG[: rng.randint(1, 30)], rng.randint(1, 40)
        if rng.random() < 0.3:
            task = asyncio.ensure_future(engine.generate(*ask(prompt, max_tokens, n=rng.choice([1, 1, 3]))))
        else:
            task = asyncio.ensure_future(read(engine.stream(*ask(prompt, max_tokens))))
        await asyncio.wait([task], timeout=rng.choice([0, 0.001, 0.01, 0.03, 1.0]))
        task.cancel()
        try:
            found = await task
        except asyncio.CancelledError:
            ends.append("left")
            return
        wanted = expected(prompt, max_tokens)
        assert found == wanted if isinstance(found, tuple) else result(found) == wanted
        ends.append("whole")

    async def go_on(engine):
        while ends.count("left") < 300:
            await one(engine)

    async def main():
        async with play.open() as engine:
            await asyncio.gather(*(go_on(engine) for _ in range(12)))
            await until(lambda: not engine.stats().num_running and not engine.stats().num_waiting)
            play.check_idle()
            assert await read(engine.stream(*ask(LONG, 4))) == expected(LONG, 4)

    run(main)
    play.check_idle()
    counters = play.scheduler.counters
    assert ends.count("whole") > 20, "all were left early"
    assert counters.num_aborted > 100 and counters.num_preemptions > 10 and counters.num_prefix_hit_tokens > 100


# the end of the engine


def test_draining_lets_the_live_ones_end_and_takes_no_others():
    play = AsyncPlay()

    async def main():
        async with play.open() as engine:
            streams = [asyncio.ensure_future(read(engine.stream(*ask(LONG, 20)))) for _ in range(4)]
            await asyncio.sleep(0)
            drained = asyncio.ensure_future(engine.drain(60.0))
            await asyncio.sleep(0)
            with pytest.raises(CapacityError, match="takes no more requests"):
                engine.stream(*ask(MATE))
            assert not engine.stats().is_ready
            assert await asyncio.gather(*streams) == [expected(LONG, 20)] * 4
            assert await drained

    run(main)
    play.check_idle()


def test_draining_aborts_what_is_left_when_the_time_is_over():
    play = AsyncPlay()
    play.runner.hold()

    async def main():
        async with play.open() as engine:
            streams = [asyncio.ensure_future(read(engine.stream(*ask(LONG, 200)))) for _ in range(4)]
            await in_thread(play.runner.wait_for_a_step)
            drained = asyncio.ensure_future(engine.drain(0.05))
            await asyncio.sleep(0.1)
            play.runner.release()
            assert not await drained
            play.check_idle()
            assert {reason for _, reason in await asyncio.gather(*streams)} == {"abort"}

    run(main)
    play.check_idle()


def test_closing_ends_what_is_open_and_refuses_more():
    play = AsyncPlay()
    play.runner.hold()

    async def main():
        engine = play.open()
        streams = [asyncio.ensure_future(read(engine.stream(*ask(LONG, 200)))) for _ in range(4)]
        whole = asyncio.ensure_future(engine.generate(*ask(LONG, 200)))
        scored = asyncio.ensure_future(engine.score(Prompt(token_ids=LONG * 6)))
        await in_thread(play.runner.wait_for_a_step)
        closed = asyncio.ensure_future(in_thread(engine.close))
        await until(lambda: not engine.stats().is_ready)
        play.runner.release()
        await closed
        engine.close()
        assert {reason for _, reason in await asyncio.gather(*streams)} == {"abort"}
        assert result(await whole)[1] == "abort"
        with pytest.raises(EngineDeadError, match="closed before it had scored"):
            await scored
        with pytest.raises(EngineDeadError, match="this AsyncLLM is closed"):
            engine.stream(*ask(MATE))
        assert engine.error is None

    run(main)
    play.check_idle()
    (submission,) = play.submit(MATE, max_tokens=4)  # what it served is open still
    play.client.run([submission])
    assert result(submission.output()) == expected(MATE, 4)


def test_a_failure_of_the_engine_is_said_to_all_with_its_cause(caplog):
    play, fault = AsyncPlay(), RuntimeError("out of memory")
    play.runner.hold()

    async def main():
        async with play.open() as engine:
            waiting = [asyncio.ensure_future(read(engine.stream(*ask(LONG, 200)))) for _ in range(4)]
            waiting.append(asyncio.ensure_future(engine.generate(*ask(LONG, 200, n=2))))
            waiting.append(asyncio.ensure_future(engine.score(Prompt(token_ids=LONG))))
            unread = engine.stream(*ask(LONG, 200))
            await in_thread(play.runner.wait_for_a_step)
            play.runner.fault = fault
            play.runner.release()
            errors = await asyncio.gather(*waiting, return_exceptions=True)
            for call in (lambda: read(unread), lambda: engine.generate(*ask(MATE)), lambda: drained_stream(engine)):
                with pytest.raises(EngineDeadError) as caught:
                    await call()
                errors.append(caught.value)
            assert len({id(error) for error in errors}) == 9
            for error in errors:
                assert isinstance(error, EngineDeadError) and error.__cause__ is fault
                assert "serves no more: RuntimeError('out of memory')" in str(error)
            assert engine.error is fault and not engine.stats().is_ready
            assert not await engine.drain(1.0)

    async def drained_stream(engine):
        engine.stream(*ask(MATE))

    with caplog.at_level(logging.ERROR):
        run(main)
    assert "no request is served any longer" in caplog.text and "out of memory" in caplog.text
    play.check_idle()


def test_books_that_cannot_be_trusted_end_it_too(monkeypatch):
    play = AsyncPlay()
    play.runner.hold()

    async def main():
        async with play.open() as engine:
            task = asyncio.ensure_future(read(engine.stream(*ask(LONG, 200))))
            await in_thread(play.runner.wait_for_a_step)
            monkeypatch.setattr(play.scheduler, "schedule", lambda **_: 1 // 0)
            monkeypatch.setattr(play.scheduler, "abort", lambda _: 1 // 0)
            play.runner.release()
            with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                await task

    run(main)


def test_one_event_loop_after_the_other_is_served():
    play = AsyncPlay()
    engine = play.open()
    for num_tokens in (4, 9):

        async def main(num_tokens=num_tokens):
            streams = [read(engine.stream(*ask(LONG, num_tokens))) for _ in range(3)]
            assert await asyncio.gather(*streams) == [expected(LONG, num_tokens)] * 3

        asyncio.run(main())
    engine.close()
    play.check_idle()


def test_requests_of_an_event_loop_that_is_gone_are_aborted():
    play = AsyncPlay()
    engine = play.open()

    async def leave_open():
        play.runner.hold()
        streams = [engine.stream(*ask(LONG, 200)) for _ in range(3)]
        await in_thread(play.runner.wait_for_a_step)
        return streams

    async def go_on():
        play.runner.release()
        assert await read(engine.stream(*ask(MATE, 9))) == expected(MATE, 9)
        await until(lambda: not engine.stats().num_running and not engine.stats().num_waiting)

    streams = asyncio.run(leave_open())
    asyncio.run(go_on())
    assert {stream.output().outputs[0].finish_reason for stream in streams} == {"abort"}
    play.check_idle()
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "photon-engine"]
