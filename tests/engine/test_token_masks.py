"""Token masks: a row has its matcher's, where it samples; masks that rule nothing out are uploaded once."""

import numpy as np
from helpers.byte_tokenizer import ByteTokenizer
from helpers.fake_runner import make_request
from helpers.grammars import mask_ids

from photon_jax.engine.token_masks import TokenMasks
from photon_jax.scheduler.plan import ScheduledSequence, StepPlan
from photon_jax.scheduler.sequence import SequenceState
from photon_jax.structured_outputs import StructuredOutputs
from photon_jax.text.grammar import Grammars

GRAMMARS = Grammars(ByteTokenizer(), vocab_size=258)


def row_of(regex, *, samples=True):
    grammar = None if regex is None else GRAMMARS.grammar(StructuredOutputs(regex=regex))
    request = make_request(str(regex), [1, 2, 3], grammar=grammar)
    seq = SequenceState(request=request, arrival=0, token_ids=[1, 2, 3], max_num_slots=9, max_num_blocks=3)
    return ScheduledSequence(seq, 0, 3, int(samples), 1)


def test_rows_that_sample_with_a_grammar_have_its_mask_and_all_others_any_token():
    masks = TokenMasks(vocab_size=258)
    plan = StepPlan((row_of("[ab]c"), row_of(None), row_of("x", samples=False), row_of("yz")))
    found = np.asarray(masks.upload(plan, 6))
    assert (found.shape, found.dtype) == (masks.shape(6).shape, masks.shape(6).dtype) == ((6, 9), np.int32)
    assert [mask_ids(row) for row in found[[0, 3]]] == [{97, 98}, {121}]
    assert (found[[1, 2, 4, 5]] == -1).all()


def test_masks_that_rule_nothing_out_are_uploaded_once():
    masks = TokenMasks(vocab_size=258)
    plain = StepPlan((row_of(None), row_of("x", samples=False)))
    first = masks.upload(plain, 4)
    assert first is masks.upload(plain, 4) and (np.asarray(first) == -1).all()
    assert masks.upload(plain, 8).shape == (8, 9)
    masks.upload(StepPlan((row_of("x"),)), 4)
    assert first is masks.upload(plain, 4) and (np.asarray(first) == -1).all()
