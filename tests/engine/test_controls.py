"""Processors are checked before a request of theirs is taken."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from photon_jax.controls import LogitsProcessor
from photon_jax.engine.controls import check_processor
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
