"""AsyncLLM over a runner that computes by arithmetic: results, waiting, leaving, ends."""

import asyncio
import threading

import numpy as np
import pytest
from helpers.async_play import AsyncPlay, ask, in_thread, read, run, until
from helpers.byte_tokenizer import ByteTokenizer
from helpers.fake_engine import LONG, MATE, expected, result
from helpers.fake_runner import VOCAB_SIZE, expected_logprobs, expected_scores, make_request

from photon_jax.client.submission import Prompt, Sample
from photon_jax.client.updates import UpdateReader
from photon_jax.errors import CapacityError, ConfigError, RequestError
from photon_jax.request import Request, SamplingParams

# results


def test_streams_and_whole_results_come_together():
    play = AsyncPlay()
    prompts = [LONG, MATE, (7,), LONG[5:], LONG, MATE]

    async def main():
        async with play.open() as engine:
            streams = [read(engine.stream(*ask(p, 9 - i))) for i, p in enumerate(prompts)]
            wholes = [engine.generate(*ask(p, 9 - i)) for i, p in enumerate(prompts)]
            outputs = await asyncio.gather(*streams, *wholes)
        wanted = [expected(p, 9 - i) for i, p in enumerate(prompts)]
        assert outputs[:6] == wanted
        assert [result(output) for output in outputs[6:]] == wanted

    run(main)
    play.check_idle()


def test_a_stream_looks_once_for_each_update_and_makes_no_tables_that_nobody_asked_for(monkeypatch):
    play, looks, tables = AsyncPlay(), [], []
    take, logprobs = UpdateReader.take, Sample.logprobs
    monkeypatch.setattr(UpdateReader, "take", lambda self: looks.append(take(self)) or looks[-1])
    monkeypatch.setattr(Sample, "logprobs", lambda self, count: tables.append(count) or logprobs(self, count))
    play.runner.hold()

    async def main():
        async with play.open() as engine:
            stream = engine.stream(*ask(MATE, 6))
            for _ in range(6):
                waiting = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                play.runner.allow()
                await waiting
            assert await anext(stream, None) is None
            play.runner.release()

    run(main)
    assert not tables and len(looks) == 6 and all(looks)


def test_each_step_is_an_update_for_a_reader_that_keeps_up():
    play = AsyncPlay()
    play.runner.hold()

    async def main():
        async with play.open() as engine:
            stream = engine.stream(*ask(LONG, 3, logprobs=2, prompt_logprobs=1))
            updates = []
            for _ in range(6):
                waiting = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                play.runner.allow()
                updates.append(await waiting)
            assert await anext(stream, None) is None
            play.runner.release()
        tokens, reason = expected(LONG, 3)
        assert [u.num_computed_tokens for u in updates] == [8, 16, 24, 30, 30, 30]
        assert {u.num_prompt_tokens for u in updates} == {30}
        assert [[d.token_ids for d in u.deltas] for u in updates] == [[], [], [], *([(t,)] for t in tokens)]
        assert [d.finish_reason for u in updates for d in u.deltas] == [None, None, reason]
        assert [u.prompt_logprobs is not None for u in updates] == [False, False, False, True, False, False]
        np.testing.assert_array_equal(updates[3].prompt_logprobs.logprobs, expected_scores(LONG)[0])
        whole = stream.output().outputs[0]
        for name in ("raw", "tempered", "sampling", "top_ids", "top_logprobs"):
            parts = [getattr(u.deltas[0].logprobs, name) for u in updates[3:]]
            np.testing.assert_array_equal(np.concatenate(parts), getattr(whole.logprobs, name))
        rows = expected_logprobs(Request(request_id="", prompt_token_ids=LONG, params=SamplingParams()), 3)
        np.testing.assert_array_equal(whole.logprobs.raw, rows[:, 0])

    run(main)
    play.check_idle()


def test_samples_of_one_prompt_stream_by_index_and_end_each():
    play = AsyncPlay()

    async def main():
        async with play.open() as engine:
            whole = await engine.generate(*ask(MATE, 4, n=3))
            stream = engine.stream(*ask(MATE, 4, n=3))
            seen = {index: ([], []) for index in range(3)}
            async for update in stream:
                assert [d.index for d in update.deltas] == sorted({d.index for d in update.deltas})
                for delta in update.deltas:
                    seen[delta.index][0].extend(delta.token_ids)
                    seen[delta.index][1].append(delta.finish_reason)
        for index in range(3):
            tokens, reasons = seen[index]
            assert (tuple(tokens), reasons[-1]) == result(whole, index) == expected(MATE, 4)
            assert not any(reasons[:-1])

    run(main)
    play.check_idle()


def test_text_deltas_joined_are_the_text_up_to_the_stop_string():
    tokens, _ = expected(MATE, 12)
    text = bytes(tokens).decode()
    play = AsyncPlay(ByteTokenizer())

    async def main():
        async with play.open() as engine:
            stream = engine.stream(*ask(MATE, 12, stop=text[5:8], logprobs=0))
            deltas = [delta async for update in stream for delta in update.deltas]
        assert "".join(delta.text for delta in deltas) == text[:5]
        assert sum([delta.token_ids for delta in deltas], ()) == tokens[:8]
        assert sum(len(delta.logprobs.raw) for delta in deltas) == 8
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", text[5:8])
        assert stream.output().outputs[0].text == text[:5]

    run(main)
    play.check_idle()


def test_scores_are_those_of_the_arithmetic():
    play = AsyncPlay()

    async def main():
        async with play.open() as engine:
            scored, part = await asyncio.gather(
                engine.score(Prompt(token_ids=LONG)), engine.score(Prompt(token_ids=LONG, score_start=10))
            )
        np.testing.assert_array_equal(scored.logprobs, expected_scores(LONG)[0])
        np.testing.assert_array_equal(part.logprobs, expected_scores(LONG)[0][9:])

    run(main)
    play.check_idle()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": (5, 6, 7), "score_start": 0}, "score_start must be from 1 to the prompt's 3 tokens, got 0"),
        ({"token_ids": (5, 6, 7), "score_start": -1}, "score_start must be from 1 to the prompt's 3 tokens, got -1"),
        ({"token_ids": (5, 6, 7), "score_start": 1.5}, "score_start must be from 1 to the prompt's 3 tokens, got 1.5"),
        ({"token_ids": (5, 6, 7), "score_start": 4}, "score_start must be from 1 to the prompt's 3 tokens, got 4"),
        ({"token_ids": (5, 1.5)}, "prompt_token_ids holds 1.5"),
        ({"token_ids": ("a",)}, "prompt_token_ids holds 'a'"),
    ],
)
def test_a_prompt_that_makes_no_sense_is_refused_and_the_engine_serves_on(fields, message):
    play = AsyncPlay()

    async def main():
        async with play.open() as engine:
            with pytest.raises(RequestError, match=message):
                await engine.score(Prompt(**fields))
            await engine.score(Prompt(token_ids=LONG))

    run(main)
    play.check_idle()


def test_callers_of_the_same_llm_in_other_threads_take_their_turns():
    play = AsyncPlay(steps_ahead=1)

    def call_directly(offset):
        submissions = play.submit(*(LONG[offset + i :] for i in range(5)), max_tokens=9)
        play.client.run(submissions)
        return [result(submission.output()) for submission in submissions]

    async def main():
        async with play.open() as engine:
            streams = [read(engine.stream(*ask(LONG[i:], 9))) for i in range(20)]
            direct = [in_thread(call_directly, offset) for offset in (0, 5)]
            outputs = await asyncio.gather(*streams, *direct)
        assert outputs[:20] == [expected(LONG[i:], 9) for i in range(20)]
        assert outputs[20] + outputs[21] == [expected(LONG[i:], 9) for i in range(10)]

    before = threading.active_count()
    asyncio.run(main())
    assert threading.active_count() == before
    play.check_idle()


def test_every_end_is_reported_once_with_its_output():
    play, ended = AsyncPlay(), []

    async def main():
        async with play.open(on_finish=ended.append) as engine:
            await asyncio.gather(*(engine.generate(*ask(MATE, 4), request_id=f"whole {i}") for i in range(3)))
            assert await read(engine.stream(*ask(LONG, 4), request_id="read")) == expected(LONG, 4)
            unread = engine.stream(*ask(LONG, 4), request_id="unread")
            await until(lambda: len(ended) == 5)
            play.runner.hold()  # or it may have ended before it is left
            engine.stream(*ask(LONG, 200), request_id="left").close()
            play.runner.release()
            await until(lambda: len(ended) == 6)
            unread.close()
        reasons = {output.request_id: output.outputs[0].finish_reason for output in ended}
        assert reasons == {f"whole {i}": "length" for i in range(3)} | {
            "read": "length",
            "unread": "length",
            "left": "abort",
        }
        assert len(ended) == 6

    run(main)


# what is refused


def test_a_request_that_cannot_be_served_is_refused_at_the_call():
    play = AsyncPlay(scheduler={"max_model_len": 100})

    async def main():
        async with play.open() as engine:
            assert engine.max_model_len == 100
            with pytest.raises(RequestError, match="max_model_len"):
                engine.stream(*ask(LONG, 71))
            with pytest.raises(RequestError, match=f"prompt_token_ids holds {VOCAB_SIZE}"):
                engine.stream(*ask((VOCAB_SIZE,)))
            with pytest.raises(RequestError, match="need a tokenizer"):
                engine.stream(*ask(MATE, stop="x"))
            with pytest.raises(RequestError, match="empty prompt"):
                await engine.score(Prompt(token_ids=()))
            play.runner.hold()
            stream = engine.stream(*ask(LONG, 70), request_id="mine")
            with pytest.raises(RequestError, match="'mine' is still being served"):
                engine.stream(*ask(MATE), request_id="mine")
            play.runner.release()
            assert await read(stream) == expected(LONG, 70)
            assert await read(engine.stream(*ask(MATE), request_id="mine")) == expected(MATE, 8)

    run(main)
    play.check_idle()


def test_more_than_may_wait_is_refused_until_one_has_ended():
    play = AsyncPlay()
    play.runner.hold()

    async def main():
        async with play.open(max_queue=3) as engine:
            streams = [engine.stream(*ask(MATE, 9 if i else 2)) for i in range(5)]
            with pytest.raises(CapacityError, match="5 sequences run or wait, 5 may"):
                engine.stream(*ask(MATE))
            play.runner.allow(2)
            assert await read(streams[0]) == expected(MATE, 2)
            with pytest.raises(CapacityError, match="queue is full"):
                engine.stream(*ask(MATE, n=2))
            with pytest.raises(RequestError, match="n asks for 6 samples"):
                engine.stream(*ask(MATE, n=6))
            streams.append(engine.stream(*ask(MATE, 9)))
            play.runner.release()
            assert await asyncio.gather(*map(read, streams[1:])) == [expected(MATE, 9)] * 5

    run(main)
    play.check_idle()


@pytest.mark.parametrize("max_queue", [-1, True, "many"])
def test_a_queue_of_no_length_is_refused(max_queue):
    with pytest.raises(ConfigError, match="max_queue must be an integer of at least 0"):
        AsyncPlay().open(max_queue=max_queue)


def test_a_place_or_an_id_that_somebody_else_took_meanwhile_is_said_to_the_reader():
    play = AsyncPlay(scheduler={"max_waiting": 4})
    play.runner.hold()

    async def main():
        async with play.open() as engine:
            first = engine.stream(*ask(MATE))
            await in_thread(play.runner.wait_for_a_step)
            same, late = engine.stream(*ask(MATE), request_id="taken"), engine.generate(*ask(MATE, n=2))
            late = asyncio.ensure_future(late)
            await asyncio.sleep(0)  # both are in the inbox now
            for name in ("taken-0", "b", "c"):
                play.scheduler.add(make_request(name, MATE, 8))
            play.runner.release()
            with pytest.raises(RequestError, match="'taken-0' is still being served"):
                await read(same)
            with pytest.raises(CapacityError, match="the queue is full: 4 requests wait"):
                await late
            assert await read(first) == expected(MATE, 8)
            await until(lambda: engine.stats().num_finished["abort"] == 1)  # the first of the two samples

    run(main)
    for name in ("taken-0", "b", "c"):
        play.scheduler.abort(name)
    play.check_idle()


# the event loop never waits


def test_nothing_waits_for_the_step_that_runs():
    play = AsyncPlay()
    play.runner.hold()

    async def main():
        async with play.open() as engine:
            first = engine.stream(*ask(LONG, 4))
            await in_thread(play.runner.wait_for_a_step)  # and it stays in it
            second, third = engine.stream(*ask(MATE, 4)), engine.stream(*ask(MATE, 4))
            with pytest.raises(RequestError):
                engine.stream(*ask((VOCAB_SIZE,)))
            third.close()
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.is_ready) == (1, 1, True)
            assert [slot.request_id for slot in stats.slots] == [f"{first.request_id}-0"]
            play.runner.release()
            assert await asyncio.gather(read(first), read(second)) == [expected(LONG, 4), expected(MATE, 4)]

    run(main)
    play.check_idle()


def test_a_slow_reader_stalls_nobody_and_finds_all_of_its_own_at_once():
    play = AsyncPlay()

    async def main():
        loop, calls = asyncio.get_running_loop(), []
        call_soon = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: calls.append(args) or call_soon(*args)
        async with play.open() as engine:
            slow = engine.stream(*ask(LONG, 200))
            assert await read(engine.stream(*ask(MATE, 4))) == expected(MATE, 4)
            before = len(calls)
            await until(lambda: engine.stats().num_running == 0)
            assert len(calls) - before <= 2, "each step told the event loop, though the reader had not looked"
            updates = [update async for update in slow]
        tokens = sum([delta.token_ids for update in updates for delta in update.deltas], ())
        assert (tokens, updates[-1].deltas[0].finish_reason) == expected(LONG, 200)
        assert len(updates) <= 2

    run(main)


def test_statistics_count_what_was_done():
    play = AsyncPlay()

    async def main():
        async with play.open() as engine:
            for _ in range(2):
                await engine.generate(*ask(LONG, 4))
            await engine.generate(*ask(MATE, 40, stop_token_ids=[expected(MATE, 3)[0][2]]))
            play.runner.hold()  # or it may have ended before it is left
            engine.stream(*ask(MATE, 200)).close()
            play.runner.release()
            await until(lambda: not engine.stats().num_running and not engine.stats().num_waiting)
            stats = engine.stats()
        assert (stats.max_num_seqs, stats.num_blocks) == (2, play.num_blocks)
        assert stats.num_finished == {"stop": 1, "length": 2, "abort": stats.num_finished["abort"]}
        assert stats.num_output_tokens - 11 <= 200 and stats.num_prompt_tokens in (63, 66)
        assert stats.num_prefix_hit_tokens >= 28 and stats.num_prefix_query_tokens >= 63
        assert stats.num_free_blocks == play.num_blocks >= stats.num_cached_blocks > 0
        assert stats.num_steps > 8 and stats.slots == () and stats.num_preemptions == 0
        assert not engine.stats().is_ready

    run(main)
