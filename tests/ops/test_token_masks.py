"""Token masks in the step: rows sample what their bits allow, in the distribution of the other controls."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.controls_reference import as_row, controlled_logits, draw_controlled, make_controls, make_sequence
from helpers.grammars import mask_of
from helpers.sampling_reference import chi_square, chi_square_bound, draw, logits_of, sampling_distribution

WIDTH, NUM_DRAWS = 16, 4096
PROMPT, OUTPUT = (4, 9, 4, 30, 1), (9, 2, 2, 17, 29, 2)
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {2: 3.0, 5: 20.0}}


def model(vocab_size):
    rng = np.random.default_rng(vocab_size)
    head = rng.standard_normal((vocab_size, WIDTH)).astype(np.float32) / 2.0
    return rng.standard_normal((16, WIDTH)).astype(np.float32), head


@pytest.mark.parametrize("vocab_size", [32, 33, 50])
def test_draws_follow_the_distribution_of_the_allowed_tokens(vocab_size):
    """Bit 31 is the sign of its word; the last word may have bits to spare, whatever they are."""
    hidden, head = model(vocab_size)
    allowed = [0, 2, 7, 17, 29, 30, *range(31, vocab_size, 2), vocab_size - 1]
    mask = mask_of(allowed, vocab_size) | ~mask_of(range(vocab_size), vocab_size)
    controls = make_controls(make_sequence(PROMPT, OUTPUT, **PENALTIES), vocab_size=vocab_size)
    seeds = np.stack([np.arange(NUM_DRAWS), np.full(NUM_DRAWS, 7)], axis=1)
    rows = np.repeat(hidden[:1], NUM_DRAWS, axis=0)
    fields = {"temperature": 1.2, "top_k": 12, "seeds": seeds}
    token_ids, logprobs, _ = draw_controlled(rows, head, controls, tile=None, token_masks=mask[None], **fields)
    logits = controlled_logits(
        logits_of(hidden, head)[0], prompt=PROMPT, output=OUTPUT, allowed_token_ids=allowed, **PENALTIES
    )
    expected = sampling_distribution(as_row(logits, vocab_size), temperature=1.2, top_k=12)
    wanted = np.asarray([expected.get(token, 0.0) * NUM_DRAWS for token in range(vocab_size)])
    counts = np.bincount(token_ids, minlength=vocab_size)
    assert counts[wanted == 0.0].sum() == 0
    statistic, degrees = chi_square(counts, wanted)
    assert statistic < chi_square_bound(degrees), (statistic, degrees)
    np.testing.assert_allclose(logprobs[:, 2], np.log([expected[t] for t in token_ids.tolist()]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tile", [2, 8])
def test_each_row_has_its_own_mask_and_others_keep_their_bits(tile, temperature):
    vocab_size = 50
    hidden, head = model(vocab_size)
    fields = {"temperature": temperature, "top_p": 0.9, "seeds": np.stack([np.arange(16), np.full(16, 3)], axis=1)}
    plain = draw(hidden, head, **fields)
    controls = make_controls(make_sequence(PROMPT, OUTPUT), vocab_size=vocab_size)
    masks = np.stack([mask_of([row, row + 1, row + 30], vocab_size) for row in range(16)])
    slots = np.arange(16) % 2
    token_ids, logprobs, _ = draw_controlled(
        hidden, head, controls, slots=slots, tile=tile, token_masks=masks, **fields
    )
    np.testing.assert_array_equal(token_ids[::2], plain[0][::2])
    np.testing.assert_array_equal(logprobs[::2], plain[1][::2])
    for row in range(1, 16, 2):
        allowed = [row, row + 1, row + 30]
        assert token_ids[row] in allowed
        if temperature == 0.0:
            assert token_ids[row] == max(allowed, key=lambda token: logits_of(hidden, head)[row, token])


def rule_out_seven(state, logits, token, position):
    return state, logits.at[7].set(-jnp.inf)


def test_a_processor_or_bad_words_that_leave_nothing_of_a_mask_are_dropped():
    vocab_size = 50
    hidden, head = model(vocab_size)
    controls = make_controls(
        make_sequence(PROMPT, OUTPUT, bad_words=[(29, 2, 8)]),
        vocab_size=vocab_size,
        processors=(rule_out_seven,),
        states=((),),
    )
    for allowed, expected in (([7], {7}), ([8], {8}), ([7, 9], {9}), ([8, 9], {9})):
        mask = mask_of(allowed, vocab_size)[None]
        token_ids, _, _ = draw_controlled(
            hidden, head, controls, processor_ids=1, temperature=2.0, token_masks=mask, seeds=np.ones((16, 2))
        )
        assert set(token_ids.tolist()) == expected
