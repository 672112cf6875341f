"""Interrupts and threads, as they happen in a notebook: the LLM stays usable and gives the same tokens."""

import os
import signal
import threading

import pytest
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
