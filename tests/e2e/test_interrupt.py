"""Interrupts and threads, as they happen in a notebook: the LLM stays usable and gives the same tokens."""

import os
import signal
import threading

import pytest
from helpers.interrupts import interrupt_at
from helpers.tiny_checkpoint import ENGINE_FIELDS, write_checkpoint

import photon_jax

PARAMS = photon_jax.SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4] * 25, [5, 6], [7] * 9]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with photon_jax.LLM(write_checkpoint(tmp_path_factory.mktemp("model")), **ENGINE_FIELDS) as opened:
        yield opened


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def interrupts_reach_python():
    """A process that a shell starts in the background ignores SIGINT, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts_reach_python")
@pytest.mark.parametrize("step", [1, 4])
def test_ctrl_c_in_the_middle_of_a_step_leaves_the_llm_usable(llm, monkeypatch, step):
    expected = tokens_of(llm.generate(PROMPTS, PARAMS, progress=False))
    runner, calls = llm._started.runner, []
    collect = runner.collect

    def interrupted_collect(handle):
        calls.append(handle)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return collect(handle)

    monkeypatch.setattr(runner, "collect", interrupted_collect)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS, progress=False)
    scheduler = llm._started.engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.has_unfinished
    assert tokens_of(llm.generate(PROMPTS, PARAMS, progress=False)) == expected


@pytest.mark.usefixtures("interrupts_reach_python")
@pytest.mark.parametrize("door", ["generate", "stream", "score"])
def test_ctrl_c_at_any_line_of_a_door_leaves_the_llm_as_a_fresh_one(llm, door):
    expected = answers(llm, door)
    _, num_lines = interrupt_at(-1, lambda: answers(llm, door))
    for line in range(1, num_lines, 97):  # a part of them all
        assert interrupt_at(line, lambda: answers(llm, door)) is None
        scheduler = llm._started.engine.scheduler
        scheduler.check_integrity()
        assert not scheduler.has_unfinished
        assert scheduler.num_free_blocks == ENGINE_FIELDS["num_blocks"] - 1
    assert answers(llm, door) == expected


def answers(llm, door):
    """Returns what a door gives for the prompts, as plain values."""
    if door == "generate":
        return tokens_of(llm.generate(PROMPTS, PARAMS, progress=False))
    if door == "stream":
        return tokens_of([*llm.stream(PROMPTS[1], PARAMS)])
    return [(each.logprobs.tolist(), each.is_greedy.tolist()) for each in llm.score(PROMPTS, progress=False)]


@pytest.fixture
def break_off(llm, monkeypatch):
    """Returns a function that lets the runner fail once, before or after its n-th launch or collection."""

    def arm(method, *, is_after, step, fault):
        real, calls = getattr(llm._started.runner, method), []

        def broken(argument):
            calls.append(argument)
            if len(calls) == step and not is_after:
                raise fault
            value = real(argument)
            if len(calls) == step:
                raise fault
            return value

        monkeypatch.setattr(llm._started.runner, method, broken)

    return arm


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), RuntimeError("the device failed")])
@pytest.mark.parametrize(("method", "is_after"), [("launch", False), ("launch", True), ("collect", False)])
@pytest.mark.parametrize("door", ["generate", "stream", "score"])
def test_a_step_that_breaks_off_loses_no_buffer_at_any_door(llm, break_off, door, method, is_after, fault):
    expected = answers(llm, door)
    break_off(method, is_after=is_after, step=2, fault=fault)  # after a launch the cache is given away
    with pytest.raises(type(fault)):
        answers(llm, door)
    scheduler = llm._started.engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.has_unfinished
    assert scheduler.num_free_blocks == ENGINE_FIELDS["num_blocks"] - 1
    assert answers(llm, door) == expected


@pytest.mark.parametrize("method", ["launch", "collect"])
def test_a_stream_goes_on_to_the_same_tokens_when_a_score_beside_it_is_interrupted(llm, break_off, method):
    expected = answers(llm, "stream")
    stream = llm.stream(PROMPTS[1], PARAMS)
    seen = tokens_of([next(stream) for _ in range(3)])
    break_off(method, is_after=method == "launch", step=1, fault=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.score(PROMPTS, progress=False)
    assert (seen + tokens_of(stream))[-1] == expected[-1]
    llm._started.engine.scheduler.check_integrity()


def test_threads_share_one_llm(llm):
    expected = tokens_of(llm.generate(PROMPTS, PARAMS, progress=False))
    results = {}

    def work(index):
        results[index] = tokens_of(llm.generate([PROMPTS[index]], PARAMS, progress=False))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[index][0] for index in range(len(PROMPTS))] == expected
