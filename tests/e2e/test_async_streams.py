"""AsyncLLM on a tiny random checkpoint: what streams bring is bit by bit what `generate` gives each request alone."""

import asyncio
import threading

import numpy as np
import pytest
from helpers.tiny_checkpoint import ENGINE_FIELDS, draw_ids, write_checkpoint

from photon_jax import LLM, EngineDeadError, SamplingParams
from photon_jax.client.async_llm import AsyncLLM
from photon_jax.client.submission import Prompt

KINDS = ("raw", "tempered", "sampling", "top_ids", "top_logprobs")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with LLM(write_checkpoint(tmp_path_factory.mktemp("random")), **ENGINE_FIELDS) as llm:
        yield llm


def draw_params(rng):
    """Returns params of every kind; each request is repeatable."""
    fields = {"max_tokens": int(rng.integers(1, 30)), "seed": int(rng.integers(1000)), "ignore_eos": True}
    if rng.random() < 0.4:
        fields["temperature"] = 0.0
    if rng.random() < 0.4:
        fields["top_k"] = 20
    if rng.random() < 0.3:
        fields["stop"] = ["e", "th"]
    if rng.random() < 0.3:
        fields["n"] = 2
    return SamplingParams(logprobs=int(rng.integers(0, 4)), **fields)


def joined(updates, index):
    """Returns text, tokens, log-probabilities and end of a sample, put together from its deltas."""
    deltas = [delta for update in updates for delta in update.deltas if delta.index == index]
    logprobs = {name: np.concatenate([getattr(delta.logprobs, name) for delta in deltas]) for name in KINDS}
    tokens = sum([delta.token_ids for delta in deltas], ())
    return "".join(delta.text for delta in deltas), tokens, logprobs, deltas[-1].finish_reason, deltas[-1].stop_reason


def check_equal(updates, alone):
    for completion in alone.outputs:
        text, tokens, logprobs, reason, stop_reason = joined(updates, completion.index)
        assert (text, tokens) == (completion.text, completion.token_ids)
        assert (reason, stop_reason) == (completion.finish_reason, completion.stop_reason)
        for name in KINDS:
            assert logprobs[name].tobytes() == getattr(completion.logprobs, name).tobytes(), name


def test_thirty_streams_at_once_bring_what_each_gets_alone(llm):
    rng = np.random.default_rng(5)
    shared = draw_ids(1, 40)
    prompts = [[*shared[: int(rng.integers(0, 40))], *draw_ids(i, int(rng.integers(1, 20)))] for i in range(30)]
    params = [draw_params(rng) for _ in prompts]
    alone = [llm.generate([p], each, progress=False)[0] for p, each in zip(prompts, params, strict=True)]

    async def read(engine, prompt, each, delay):
        await asyncio.sleep(delay)
        return [update async for update in engine.stream(Prompt(token_ids=tuple(prompt)), each)]

    async def main():
        async with AsyncLLM(llm) as engine:
            delays = rng.random(30) * 0.2
            return await asyncio.gather(*(read(engine, *each) for each in zip(prompts, params, delays, strict=True)))

    streams = asyncio.run(main())
    for updates, output in zip(streams, alone, strict=True):
        check_equal(updates, output)
    assert sum(len(updates) for updates in streams) > 100, "the updates came all at once"
    assert {output.outputs[0].finish_reason for output in alone} == {"stop", "length"}
    scheduler = llm.started.engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.has_unfinished


def test_the_llm_answers_directly_meanwhile_and_takes_new_weights(llm):
    prompts = [draw_ids(i, 10) for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params, progress=False)]

    async def main():
        async with AsyncLLM(llm) as engine:
            streams = [asyncio.ensure_future(engine.generate(Prompt(token_ids=tuple(p)), params)) for p in prompts]
            direct = asyncio.to_thread(llm.generate, prompts, params, progress=False)
            version = asyncio.to_thread(llm.update_params, llm.params)
            await asyncio.sleep(0)
            outputs, others, new = await asyncio.gather(asyncio.gather(*streams), direct, version)
            assert new == llm.weights_version
            return [output.outputs[0].token_ids for output in [*outputs, *others]]

    assert asyncio.run(main()) == alone * 2


def test_a_closed_llm_takes_nothing_more(tmp_path):
    before = threading.active_count()
    llm = LLM(write_checkpoint(tmp_path), **ENGINE_FIELDS)

    async def main():
        async with AsyncLLM(llm) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
            stream = engine.stream(Prompt(token_ids=(5, 6)), params)
            await anext(stream)
            await asyncio.to_thread(engine.close)
            llm.close()
            assert [d.finish_reason for update in [u async for u in stream] for d in update.deltas][-1] == "abort"
        with pytest.raises(EngineDeadError, match="this LLM is closed"):
            AsyncLLM(llm)

    asyncio.run(main())
    assert threading.active_count() == before


def test_programs_of_a_new_kind_are_compiled_beside_the_steps_that_run(llm, monkeypatch):
    """No step meets a program that is not there, and who comes gets what it gets alone."""
    met = []
    monkeypatch.setattr(llm.started.runner, "_note_new", met.append)
    ids, params = draw_ids(7, 9), SamplingParams(max_tokens=3, temperature=0.0, presence_penalty=0.5, ignore_eos=True)
    plain = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)

    async def run_until(is_done, engine):
        """Has a request run all the time: the next one comes before one ends."""
        stream, num_updates = engine.stream(Prompt(token_ids=tuple(draw_ids(8, 9))), plain), 0
        while num_updates == 0 or not is_done():
            await anext(stream)
            num_updates += 1
            if len(stream.output().outputs[0].token_ids) > 100:
                following = engine.stream(Prompt(token_ids=tuple(draw_ids(8, 9))), plain)
                stream.close()
                stream = following
        return num_updates

    async def main():
        async with AsyncLLM(llm) as engine:
            running = asyncio.ensure_future(run_until(lambda: late.done(), engine))
            await asyncio.sleep(0)
            late = asyncio.ensure_future(engine.generate(Prompt(token_ids=tuple(ids)), params))
            return await running, await late

    num_updates, output = asyncio.run(main())
    assert not met and num_updates > 3 + 2, "it did not go on"
    assert output.outputs[0].token_ids == llm.generate([ids], params, progress=False)[0].outputs[0].token_ids
