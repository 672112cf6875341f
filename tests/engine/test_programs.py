"""Programs that are compiled after the warm-up: an error that names what changed where strictness is asked for."""

import dataclasses
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax.config import make_engine_config
from photon_jax.engine.programs import TraceWatch, describe_changes, signature
from photon_jax.engine.start import start_engine
from photon_jax.errors import ConfigError
from photon_jax.request import Request, SamplingParams

SETTINGS = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "block_size": 16, "num_blocks": 9, "max_model_len": 64}


def changes(old, new):
    return describe_changes(signature({"x": old}), signature({"x": new}))


def test_a_changed_leaf_is_named_with_what_changed():
    assert changes({"a": jnp.zeros(3)}, {"a": jnp.zeros(4)}) == "x['a']: shape (4,), compiled for (3,)"
    assert changes([jnp.zeros(2)], [jnp.zeros(2, jnp.int32)]) == "x[0]: dtype int32, compiled for float32"
    assert changes(jnp.zeros(()), jax.jit(lambda: 1.0)()) == "x: weak type True, compiled for False"
    assert changes([jnp.zeros(2)], []) == "x[0]: missing"
    assert changes([], [jnp.zeros(2)]) == "x[0]: not there when it was compiled"
    assert changes(jnp.zeros(2), jnp.ones(2)).startswith("no argument")


def test_many_changes_are_counted_and_not_all_listed():
    text = changes([jnp.zeros(2)] * 5, [jnp.zeros(3)] * 5)
    assert text.count("shape") == 3 and text.endswith(", and 2 more")


def test_a_watch_sees_traces_and_no_calls_of_known_programs():
    program, x = jax.jit(lambda x: x * 3.5), np.zeros(3, np.float32)
    with TraceWatch() as first:
        program(x)
    with TraceWatch() as second:
        program(x)
    assert first.has_traced and not second.has_traced


@pytest.fixture(scope="module")
def started():
    return start_engine(tiny_params(), tiny_config(), make_engine_config(None, strict_compile=True, **SETTINGS))


def run(started, name, **params):
    resolved = SamplingParams(**({"max_tokens": 3} | params)).resolve({})
    started.engine.scheduler.add(Request(request_id=name, prompt_token_ids=(1, 2, 3), params=resolved))
    while started.engine.scheduler.has_unfinished:
        started.engine.step()


def test_a_plain_request_needs_nothing_beyond_a_lazy_warm_up(started):
    run(started, "greedy", temperature=0.0)
    run(started, "random", temperature=0.8)


def test_a_step_that_was_not_compiled_ahead_is_refused_before_it_runs(started):
    with pytest.raises(ConfigError, match=r'has_top=True.* was not compiled ahead; .* warmup="full"'):
        run(started, "logprobs", logprobs=2)
    started.engine.scheduler.abort("logprobs")


CHANGE = r"state.last_token: shape \(5,\), compiled for \(2,\)"


def change_state(runner):
    runner.state = dataclasses.replace(runner.state, last_token=jnp.zeros(5, jnp.int32))


def test_an_argument_of_another_kind_is_named_and_the_engine_goes_on(started):
    change_state(started.runner)
    with pytest.raises(ConfigError, match=f"strict_compile: a step of .* was traced again; {CHANGE}"):
        run(started, "changed")
    run(started, "unchanged")


def test_without_strictness_a_line_in_the_log_says_both(started, caplog, monkeypatch):
    runner = started.runner
    monkeypatch.setattr(runner, "_is_strict", False)
    runner.launched.layouts.clear()
    with caplog.at_level(logging.INFO, "photon_jax.engine.runner"):
        run(started, "new")
    assert caplog.messages and all("was not compiled ahead" in message for message in caplog.messages)
    caplog.clear()
    change_state(runner)
    run(started, "changed")
    assert caplog.messages and all(re.search(CHANGE, message) for message in caplog.messages)
    runner.reset()
