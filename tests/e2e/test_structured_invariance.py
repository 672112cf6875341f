"""A request with a grammar gets its own bits in any company, and its company keeps theirs."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.grammars import COMPACT, random_schema
from helpers.invariance import STOP_IDS, Tally, World, run_schedule, without_extras

from photon_jax.engine.token_masks import TokenMasks
from photon_jax.request import Request, SamplingParams
from photon_jax.structured_outputs import StructuredOutputs
from photon_jax.text.grammar import Grammars

NUM_SCHEDULES = 40
NUM_REQUESTS = 24
REGEX, GRAMMAR = "[a-z]{2,12}(, [a-z]{2,12})*\\.", 'start: "(" start ")" | /[0-9]+/'


def form_of(rng):
    """Returns a form and the check of its texts."""
    kind = rng.randrange(5)
    schema = random_schema(rng, depth=2)
    if kind == 0:
        return {"json": schema | COMPACT}, lambda text: jsonschema.validate(json.loads(text), schema)
    if kind == 1:
        return {"json": {"type": "array", "items": {"type": "integer"}}}, json.loads
    if kind == 2:
        return {"regex": REGEX}, lambda text: re.fullmatch(REGEX, text).group()
    if kind == 3:
        return {"grammar": GRAMMAR}, lambda text: re.fullmatch(r"(\(*)[0-9]+(\)*)", text).group()
    choices = ("yes, of course", "yesterday", "no", "none of them")
    return {"choice": choices}, choices.index


def make_requests(plain):
    """Returns requests with grammars that share the prompts of others, and what checks the texts of each."""
    grammars, requests, checks = Grammars(ByteTokenizer(), vocab_size=258, eos_token_ids=(257,)), [], {}
    for index, other in enumerate(plain):
        rng = random.Random(index)
        form, checks[f"g{index}"] = form_of(rng)
        controls = {"repetition_penalty": 1.1, "logit_bias": {97: 1.0}, "bad_words": ((97, 98), (120,))}
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
            top_k=rng.choice([0, 5]),
            max_tokens=rng.choice([15, 30, 45]),
            min_tokens=rng.choice([0, 0, 9]),
            structured_outputs=StructuredOutputs(**form),
            **(controls if index % 3 == 0 else {}),
        ).resolve({})
        banned = [word[0] for word in params.bad_words if len(word) == 1]
        grammar = grammars.grammar(
            params.structured_outputs, stop_ids=STOP_IDS, min_tokens=params.min_tokens, banned_ids=banned
        )
        fields = {"bad_word_ids": params.bad_words, "seed": (rng.randrange(3), 0), "stop_token_ids": STOP_IDS}
        ids = other.prompt_token_ids
        requests.append(Request(request_id=f"g{index}", prompt_token_ids=ids, params=params, grammar=grammar, **fields))
    return requests, checks


@pytest.fixture(scope="module")
def scene():
    """Returns a world of as many plain requests as ones with grammars, and the checks."""
    world = World(num_requests=NUM_REQUESTS)
    plain = [without_extras(request) for request in world.requests]
    requests, checks = make_requests(plain)
    return world.with_requests(plain + requests), checks


def test_requests_with_grammars_and_others_do_not_depend_on_their_company(scene):
    world, _ = scene
    tally = Tally()
    for seed in range(NUM_SCHEDULES):
        run_schedule(world, seed, tally)
    assert tally.with_preemption >= 0.4 * NUM_SCHEDULES, tally
    assert tally.with_chunks >= 0.4 * NUM_SCHEDULES, tally
    assert tally.with_prefix_hits >= 0.4 * NUM_SCHEDULES, tally
    assert tally.with_overlap >= 0.3 * NUM_SCHEDULES, tally
    assert tally.aborts >= 0.3 * NUM_SCHEDULES, tally


def test_all_that_ends_well_has_its_form(scene):
    world, checks = scene
    num_complete = 0
    for request in world.requests:
        if request.grammar is not None:
            result = world.alone(request)
            assert result.finish in ("stop", "length")
            if result.finish == "stop" and result.token_ids[-1] != STOP_IDS[1]:
                ids = [token_id for token_id in result.token_ids if token_id != 257]
                checks[request.request_id](bytes(ids).decode())
                num_complete += 1
    assert num_complete >= 0.5 * NUM_REQUESTS


def expect_red(world):
    with pytest.raises(AssertionError):
        for seed in range(60):
            run_schedule(world, seed, Tally())


def test_masks_of_the_row_before_turn_it_red(scene, monkeypatch):
    world, _ = scene
    for request in world.requests:
        world.alone(request)
    upload = TokenMasks.upload
    monkeypatch.setattr(TokenMasks, "upload", lambda self, *args: np.roll(upload(self, *args), 1, axis=0))
    expect_red(world)
