"""Steps that fail through what a caller brought: its requests get a named error, the others their tokens."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_checkpoint import ENGINE_FIELDS, checkpoint_config
from helpers.tiny_model import tiny_params

import photon_jax
from photon_jax.client.async_llm import AsyncLLM
from photon_jax.client.submission import Prompt
from photon_jax.errors import CheckpointError, RequestError

PROMPT = [1, 2, 3]
FIELDS = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
PARAMS = photon_jax.SamplingParams(**FIELDS)


def breaks_at_position_8(state, logits, token, position):
    def check(position, logits):
        if position >= 8:
            raise ZeroDivisionError("of the processor")
        return logits

    return state, jax.pure_callback(check, jax.ShapeDtypeStruct(logits.shape, logits.dtype), position, logits)


def doubles(state, logits, token, position):
    return state, 2.0 * logits


DOUBLED = photon_jax.SamplingParams(**FIELDS, logits_processor=doubles)  # of the same best tokens
BREAKING = photon_jax.SamplingParams(**FIELDS, logits_processor=breaks_at_position_8)


@pytest.fixture
def llm():
    params = jax.tree.map(jnp.copy, tiny_params(checkpoint_config()))
    with photon_jax.LLM(params=params, config=checkpoint_config(), **ENGINE_FIELDS) as opened:
        yield opened
        opened.started.engine.scheduler.check_integrity()
        assert not opened.started.engine.scheduler.has_unfinished


def tokens(output):
    return output.outputs[0].token_ids


def test_a_processor_that_raises_while_it_runs_is_named_and_other_requests_go_on(llm):
    (alone,) = llm.generate(PROMPT, PARAMS, progress=False)
    stream = llm.stream(PROMPT, DOUBLED)  # a processor that can't fail is not blamed for one that did
    with pytest.raises(RequestError, match=r"prompt 1: logits_processor breaks_at_position_8 failed.*of the processor"):
        llm.generate([PROMPT, PROMPT], [PARAMS, BREAKING], progress=False)
    breaking = llm.stream(PROMPT, BREAKING)
    with pytest.raises(RequestError, match="breaks_at_position_8") as caught:
        list(breaking)
    assert "ZeroDivisionError" in str(caught.value.__cause__)
    assert tokens([*stream][-1]) == tokens(alone)

    async def main():
        async with AsyncLLM(llm) as engine:
            prompt = Prompt(token_ids=tuple(PROMPT))
            good, bad = engine.generate(prompt, PARAMS), engine.generate(prompt, BREAKING)
            output, error = await asyncio.gather(good, bad, return_exceptions=True)
            assert tokens(output) == tokens(alone) and isinstance(error, RequestError)
            with pytest.raises(RequestError, match="breaks_at_position_8"):
                _ = [update async for update in engine.stream(prompt, BREAKING)]
            assert tokens(await engine.generate(prompt, PARAMS)) == tokens(alone)

    asyncio.run(main())


def test_deleted_weights_end_what_runs_and_good_ones_serve_again(llm):
    (alone,) = llm.generate(PROMPT, PARAMS, progress=False)
    copies = jax.tree.map(jnp.copy, llm.params)
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    llm.params.layers[1].input_norm.delete()
    for door in (
        lambda: llm.generate([PROMPT, PROMPT], PARAMS, progress=False),
        lambda: llm.score(PROMPT, progress=False),
    ):
        with pytest.raises(CheckpointError, match=r"^the weights were deleted: leaf \.layers\[1\]\.input_norm"):
            door()
    with pytest.raises(CheckpointError, match="deleted"):
        list(stream)
    with pytest.raises(CheckpointError, match=r"input_norm is a deleted float32\[64\]"):
        llm.update_params(llm.params)
    assert llm.update_params(copies) == 1
    assert tokens(llm.generate(PROMPT, PARAMS, progress=False)[0]) == tokens(alone)


def test_new_weights_come_though_the_old_ones_were_deleted_under_a_request(llm):
    (alone,) = llm.generate(PROMPT, PARAMS, progress=False)
    copies = jax.tree.map(jnp.copy, llm.params)
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    next(stream)
    for leaf in jax.tree.leaves(llm.params):
        leaf.delete()
    assert llm.update_params(copies) == 1
    with pytest.raises(CheckpointError, match="deleted"):
        list(stream)
    assert tokens(llm.generate(PROMPT, PARAMS, progress=False)[0]) == tokens(alone)


def test_weights_that_give_nan_end_requests_by_name_and_good_ones_serve_again(llm):
    (alone,) = llm.generate(PROMPT, PARAMS, progress=False)
    copies = jax.tree.map(jnp.copy, llm.params)
    layer = llm.params.layers[1]
    down_proj = dataclasses.replace(layer.down_proj, weight=layer.down_proj.weight.at[5, 6].set(jnp.nan))
    layers = (llm.params.layers[0], dataclasses.replace(layer, down_proj=down_proj))
    llm.update_params(dataclasses.replace(llm.params, layers=layers))
    for door in (
        lambda: llm.generate(PROMPT, PARAMS, progress=False),
        lambda: llm.score(PROMPT, progress=False),
        lambda: list(llm.stream(PROMPT, PARAMS)),
    ):
        with pytest.raises(CheckpointError, match=r"log-probabilities are NaN: its weights hold NaN.*check the check"):
            door()
    llm.update_params(copies)
    assert tokens(llm.generate(PROMPT, PARAMS, progress=False)[0]) == tokens(alone)


def test_requests_that_do_not_meet_a_nan_get_the_same_bits_beside_one_that_does(llm):
    params = dataclasses.replace(PARAMS, logprobs=0)
    (alone,) = llm.generate(PROMPT, params, progress=False)
    unused = next(token for token in range(4, 99) if token not in tokens(alone))
    llm.update_params(dataclasses.replace(llm.params, embedding=llm.params.embedding.at[unused].set(jnp.inf)))
    stream = llm.stream(PROMPT, params)
    next(stream)
    with pytest.raises(CheckpointError, match=r"^prompt 1: the model's log-probabilities are NaN"):
        llm.generate([PROMPT, [*PROMPT, unused]], PARAMS, progress=False)
    with pytest.raises(CheckpointError, match=r"^prompt 2: the model's log-probabilities are NaN"):  # its second of two
        llm.score([PROMPT, PROMPT, PROMPT], [[[5], [6]], [[7]], [[8], [unused, 9]]], progress=False)
    last = [*stream][-1]
    assert tokens(last) == tokens(alone)
    np.testing.assert_array_equal(last.outputs[0].logprobs.raw, alone.outputs[0].logprobs.raw)
