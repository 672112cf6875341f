"""Processors are checked before a request of theirs is taken."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from photon_jax.controls import LogitsProcessor
from photon_jax.engine.processors import calls_out, check_processor
from photon_jax.errors import RequestError


def leave(state, logits, token, position):
    return state, logits


@pytest.mark.parametrize(
    "state",
    [2**70, 2**31, -(2**31) - 1, np.array([2**40]), np.uint64(2**63), 1e300, np.array([1e300]), np.zeros(2, ">f4")],
)
def test_a_first_state_that_the_device_cannot_hold_is_refused(state):
    with pytest.raises(RequestError, match="which the device can't; it has numbers of 32 bits"):
        check_processor(LogitsProcessor(leave, {"count": state}), 17)


@pytest.mark.parametrize(
    "state",
    [
        *(3, 2**31 - 1, 0.1, -np.inf, np.nan, True, np.float64(1e30), np.zeros((2, 3), np.int64), ()),
        *(jnp.ones(2, jnp.bfloat16), np.ones(2, ml_dtypes.bfloat16), np.ones(2, np.int8)),
    ],
)
def test_a_first_state_of_numbers_that_fit_is_taken(state):
    check_processor(LogitsProcessor(leave, state), 17)


def fail(state, logits, token, position):
    raise KeyError("of the caller")


def branch(state, logits, token, position):
    return state, logits if position > 3 else -logits


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (fail, r"logits_processor fail can't be compiled: KeyError: 'of the caller'"),
        (branch, "branch can't be compiled: TracerBoolConversionError: Attempted boolean conversion"),
        (lambda: None, "<lambda> can't be compiled: TypeError: .* takes 0 positional arguments"),
    ],
)
def test_a_function_that_raises_is_refused_with_what_it_raised_as_the_cause(fn, message):
    with pytest.raises(RequestError, match=message) as caught:
        check_processor(LogitsProcessor(fn), 17)
    assert type(caught.value.__cause__).__name__ in message


def call_back(state, logits, token, position):
    return jax.pure_callback(lambda *values: values, (state, logits), state, logits)


def print_sometimes(state, logits, token, position):
    def show(logits):
        jax.debug.print("{}", token)
        return logits

    return state, jax.lax.cond(position > 3, show, lambda logits: logits, logits)


def sort(state, logits, token, position):
    return state, jax.lax.fori_loop(0, 3, lambda index, values: jnp.sort(values), logits)


def test_which_processors_can_fail_is_seen_through_branches_and_loops():
    assert [calls_out(LogitsProcessor(fn), 17) for fn in (leave, sort, call_back, print_sometimes)] == [
        *(False, False, True, True)
    ]
