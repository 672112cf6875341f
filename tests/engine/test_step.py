"""The step: tokens that continue come from the state, samples go to their slots, scores are those of the forward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax.cache.kv_cache import KVCache, init_kv_cache
from photon_jax.cache.layout import CacheLayout
from photon_jax.config import KernelConfig
from photon_jax.engine.step import BatchState, StepConfig, init_batch_state, jit_step
from photon_jax.models.decoder import forward
from photon_jax.step_io import StepLayout, host_views, input_fields, output_fields, packed_size

LAYOUT = StepLayout(num_tokens=8, num_rows=8, table_width=4, query_tile=1, row_tile=8)
CACHE = CacheLayout(num_blocks=6, block_size=16)
CONFIG = StepConfig(
    model=tiny_config(), kernels=KernelConfig(linear="reference", attention="reference"), max_model_len=64
)
NUM_SLOTS = 4
PROMPT = (17, 203, 5, 99, 140, 31)


def make_buffer(*rows, layout=LAYOUT, num_scores=0, **fields):
    """Returns a packed buffer for rows of (tokens, first position, block, slot, continues)."""
    buffer = np.zeros(packed_size(input_fields(layout)), np.int32)
    views = host_views(buffer, input_fields(layout))
    start = 0
    for row, (tokens, first, block, slot, continues) in enumerate(rows):
        span = slice(start, start + len(tokens))
        views["token_ids"][span] = tokens
        views["positions"][span] = np.arange(first, first + len(tokens))
        views["slot_mapping"][span] = block * CACHE.block_size + views["positions"][span]
        views["item_rows"][span], views["item_lens"][span] = row, 1
        views["item_starts"][span] = np.arange(start, start + len(tokens))
        views["block_tables"][row, 0] = block
        start += len(tokens)
        views["logits_indices"][row] = start - 1
        views["state_slots"][row], views["continues"][row] = slot, continues
    views["top_p"][:] = 1.0
    views["counts"][:] = (start, len(rows), start, num_scores)
    for name, values in fields.items():
        views[name][: len(values)] = values
    return buffer


def run(cache, state, buffer, layout=LAYOUT, config=CONFIG):
    """Returns the results on the host, and the new cache and state."""
    outputs, cache, state, _ = jit_step(tiny_params(), cache, state, jnp.asarray(buffer), layout=layout, config=config)
    return host_views(np.array(outputs), output_fields(layout)), cache, state


def fresh():
    return init_kv_cache(CONFIG.model, CACHE), init_batch_state(NUM_SLOTS)


def copy(cache, state):
    """A step takes its cache and state over; two steps from one point need two copies."""
    return KVCache(k=cache.k.copy(), v=cache.v.copy()), BatchState(last_token=state.last_token.copy())


@pytest.fixture(scope="module")
def logits():
    """Returns what the plain forward gives at each position of the prompt, f32[T V]."""
    return np.asarray(forward(tiny_params(), CONFIG.model, jnp.asarray([PROMPT]))[0])


@pytest.fixture(scope="module")
def decoding():
    """Returns cache and state after the prompt was computed in slot 3, and the token sampled there."""
    views, cache, state = run(*fresh(), make_buffer((PROMPT, 0, 2, 3, 0)))
    return cache, state, int(views["token_ids"][0])


def test_sampled_token_is_the_forward_argmax_and_goes_to_its_slot(decoding, logits):
    _, state, token = decoding
    assert token == logits[-1].argmax()
    np.testing.assert_array_equal(state.last_token[1:], [0, 0, token, 0])


def test_a_continuing_row_takes_its_token_from_the_state(decoding):
    *point, token = decoding
    results = []
    for written, continues in ((token, 0), (0, 1), (250, 1)):
        views, cache, _ = run(*copy(*point), make_buffer(((written,), len(PROMPT), 2, 3, continues)))
        written_keys = np.asarray(cache.k[:, 2])
        results.append((int(views["token_ids"][0]), views["logprobs"][0].tobytes(), written_keys.tobytes()))
    assert results[0] == results[1] == results[2]
    ignored, *_ = run(*copy(*point), make_buffer(((250,), len(PROMPT), 2, 3, 0)))
    assert ignored["logprobs"][0].tobytes() != results[0][1]


def test_each_continuing_row_has_its_own_slot(decoding):
    cache, _, _ = decoding
    state = BatchState(last_token=jnp.asarray([200, 11, 22, 33, 44], jnp.int32))
    rows = [((0,), 0, 1, 4, 1), ((7, 8), 0, 3, 2, 0), ((0,), 0, 4, 1, 1)]
    views, *_ = run(*copy(cache, state), make_buffer(*rows))
    explicit = [((44,), 0, 1, 4, 0), ((7, 8), 0, 3, 2, 0), ((11,), 0, 4, 1, 0)]
    expected, *_ = run(*copy(cache, state), make_buffer(*explicit))
    for name in ("token_ids", "logprobs"):
        np.testing.assert_array_equal(views[name][:3], expected[name][:3], err_msg=name)


def test_rows_that_do_not_sample_and_padding_leave_every_slot_alone(decoding):
    cache, _, _ = decoding
    state = BatchState(last_token=jnp.asarray([0, 11, 22, 33, 44], jnp.int32))
    _, _, after = run(*copy(cache, state), make_buffer(((1, 2), 0, 1, 0, 0), ((3,), 0, 3, 2, 0)))
    np.testing.assert_array_equal(np.asarray(after.last_token)[[1, 3, 4]], [11, 33, 44])


def test_only_the_blocks_of_its_rows_and_the_null_block_change(decoding):
    cache, state, _ = decoding
    before = np.asarray(cache.k).copy()
    _, after, _ = run(*copy(cache, state), make_buffer(((1, 2), 3, 4, 1, 0)))
    after = np.asarray(after.k)
    changed = {(block, offset) for _, block, _, offset, _ in np.argwhere(after != before).tolist()}
    assert changed >= {(4, 3), (4, 4)}
    assert changed <= {(4, 3), (4, 4), (0, 0)}


def test_scores_are_those_of_the_forward_also_in_two_chunks(logits):
    layout = dataclasses.replace(LAYOUT, has_scores=True)
    targets = np.asarray([*PROMPT[1:], int(logits[-1].argmax())])
    cache, state = fresh()
    found = []
    for begin, end in ((0, 4), (4, 6)):
        fields = {"score_indices": np.arange(end - begin), "target_ids": targets[begin:end]}
        buffer = make_buffer((PROMPT[begin:end], begin, 2, 0, 0), layout=layout, num_scores=end - begin, **fields)
        views, cache, state = run(cache, state, buffer, layout)
        found.append((views["score_logprobs"][: end - begin], views["score_is_greedy"][: end - begin]))
    logprobs, is_greedy = (np.concatenate(parts) for parts in zip(*found, strict=True))
    expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(6), targets]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(is_greedy, logits.argmax(axis=1) == targets)
    assert is_greedy[-1] == 1


def test_the_old_cache_and_state_are_taken_over():
    cache, state = fresh()
    run(cache, state, make_buffer(((1,), 0, 1, 1, 0)))
    assert cache.k.is_deleted()
    assert cache.v.is_deleted()
    assert state.last_token.is_deleted()


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("linear", ["reference", "xla"])
def test_a_step_that_only_scores_samples_nothing(linear, samples, logits):
    layout = dataclasses.replace(LAYOUT, has_scores=True)
    config = dataclasses.replace(CONFIG, kernels=dataclasses.replace(CONFIG.kernels, linear=linear))
    fields = {"score_indices": range(5), "target_ids": PROMPT[1:], "counts": (6, int(samples), 6, 5)}
    buffer = make_buffer((PROMPT, 0, 2, 3 * samples, 0), layout=layout, **fields)
    views, _, state = run(*fresh(), buffer, layout, config)
    token = int(logits[-1].argmax()) * samples
    assert (views["token_ids"][0], state.last_token[3]) == (token, token)
    assert (views["logprobs"][0] != 0.0).any() == samples
    np.testing.assert_array_equal(views["score_is_greedy"][:5], logits[:-1].argmax(axis=1) == PROMPT[1:])
