"""Structured outputs through the engine: valid texts of every kind, and how they go with the other parameters."""

import json
import re

import jsonschema
import numpy as np
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.grammars import COMPACT
from helpers.invariance import WORLD_FIELDS
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax import LLM, RequestError, SamplingParams, StructuredOutputs
from photon_jax.client.local_client import LocalClient
from photon_jax.client.submission import Prompt
from photon_jax.engine.metrics import CompileCounter

CONFIG = tiny_config()
PROMPT = "Answer:"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "json": ({"json": SCHEMA | COMPACT}, lambda text: jsonschema.validate(json.loads(text), SCHEMA)),
    "json_object": ({"json_object": True}, lambda text: json.loads(text).items()),
    "regex": ({"regex": "(ab|cd){2,5}x"}, lambda text: re.fullmatch("(ab|cd){2,5}x", text).group()),
    "choice": ({"choice": ["yes", "no", "yesterday"]}, ["yes", "no", "yesterday"].index),
    "grammar": ({"grammar": 'start: "(" start ")" | "x"'}, lambda text: re.fullmatch(r"\(*x\)*", text).group()),
}


@pytest.fixture(scope="module")
def llm():
    with LLM(params=tiny_params(CONFIG), config=CONFIG, tokenizer=ByteTokenizer(), **WORLD_FIELDS) as llm:
        yield llm


def run(llm, prompts, params):
    outputs = llm.generate(prompts, params, progress=False)
    scheduler = llm._engine().engine.scheduler
    scheduler.check_integrity()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    return outputs


def completions(llm, **fields):
    (output,) = run(llm, [PROMPT], SamplingParams(**({"max_tokens": 90, "seed": 1} | fields)))
    return output.outputs


@pytest.mark.parametrize("kind", FORMS)
def test_every_finished_text_has_its_form(llm, kind):
    form, check = FORMS[kind]
    outputs = completions(llm, n=24, structured_outputs=form)
    finished = [completion for completion in outputs if completion.finish_reason == "stop"]
    assert len(finished) >= 5 and len({completion.text for completion in finished}) >= 2
    for completion in finished:
        check(completion.text)
        assert completion.stop_reason is None
    assert {completion.finish_reason for completion in outputs} <= {"stop", "length"}


def test_the_params_come_back_with_the_output(llm):
    (output,) = run(llm, [PROMPT], SamplingParams(max_tokens=9, structured_outputs={"choice": ["a", "b"]}))
    assert output.sampling_params.structured_outputs == StructuredOutputs(choice=("a", "b"))


def test_greedy_takes_the_best_token_that_the_form_allows(llm):
    digits = [completions(llm, temperature=0.0, structured_outputs={"regex": "[0-9]{4}"})[0] for _ in range(2)]
    allowed = completions(llm, temperature=0.0, allowed_token_ids=range(48, 58), max_tokens=4)[0]
    assert digits[0].token_ids == digits[1].token_ids == allowed.token_ids
    assert (digits[0].finish_reason, allowed.finish_reason) == ("stop", "length")


def test_a_text_that_may_go_on_ends_where_the_model_says_so_and_ignore_eos_goes_on(llm):
    form = {"regex": "a*"}
    likely = {"logit_bias": {257: 3.0}, "structured_outputs": form, "n": 8}
    ended = completions(llm, **likely)
    assert {completion.finish_reason for completion in ended} == {"stop"}
    assert all(completion.token_ids == (97,) * len(completion.text) + (257,) for completion in ended)
    endless = completions(llm, ignore_eos=True, **likely)
    assert all((completion.text, completion.finish_reason) == ("a" * 90, "length") for completion in endless)
    late = completions(llm, min_tokens=20, **likely)
    assert all(len(completion.text) >= 20 and completion.finish_reason == "stop" for completion in late)
    full = completions(llm, ignore_eos=True, structured_outputs={"regex": "a{5}"}, min_tokens=50)
    assert (full[0].text, full[0].finish_reason) == ("a" * 5, "stop")


def test_stop_strings_and_max_tokens_cut_the_text(llm):
    form = {"regex": "(ab|cd){20}"}
    (whole,) = completions(llm, structured_outputs=form)
    place = whole.text.index("cd", 2)
    (cut,) = completions(llm, structured_outputs=form, stop="cd", min_tokens=2)
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text[:place], "stop", "cd")
    (short,) = completions(llm, structured_outputs=form, max_tokens=7)
    assert (short.text, short.finish_reason) == (whole.text[:7], "length")
    (exact,) = completions(llm, structured_outputs=form, max_tokens=40)
    assert (exact.text, exact.finish_reason) == (whole.text, "stop")


def test_log_probabilities_are_the_models_own_and_those_of_what_the_form_leaves(llm):
    (completion,) = completions(llm, structured_outputs={"regex": "[ab]cd[ef]"}, logprobs=3, logprobs_kind="sampling")
    logprobs = completion.logprobs
    assert len(logprobs.raw) == len(completion.token_ids) == 4
    assert (logprobs.raw < -0.1).all() and np.isfinite(logprobs.sampling).all()
    np.testing.assert_array_equal(logprobs.sampling[1:3], 0.0)
    assert set(logprobs.top_ids[0, :2].tolist()) == {97, 98}
    assert np.exp(logprobs.top_logprobs[0, :2]).sum() == pytest.approx(1.0, rel=1e-5)
    assert logprobs.top_logprobs[0, 2] == -np.inf
    assert logprobs.top_ids[1, 0] == 99


def test_bad_words_and_processors_choose_among_what_the_form_leaves(llm):
    form = {"choice": ["ab", "cb", "cd"]}
    texts = {each.text for each in completions(llm, structured_outputs=form, bad_words=[[97], [99, 98]], n=8)}
    assert texts == {"cd"}
    texts = {each.text for each in completions(llm, structured_outputs={"choice": ["ab"]}, bad_words=[[97], [98]])}
    assert texts == {"ab"}
    texts = {each.text for each in completions(llm, structured_outputs=form, logits_processor=want_a, n=8)}
    assert texts == {"ab"}


def want_a(state, logits, token, position):
    return state, logits.at[97].set(1e4)


def test_a_request_is_the_same_alone_and_in_company(llm):
    params = [
        SamplingParams(max_tokens=90, seed=seed, structured_outputs=form, logprobs=0)
        for seed, (form, _) in enumerate(FORMS.values())
    ]
    params += [SamplingParams(max_tokens=30, seed=seed, logprobs=0) for seed in range(4)]
    together = run(llm, [PROMPT] * len(params), params)
    for output, each in zip(together, params, strict=True):
        alone = run(llm, [PROMPT], each)[0].outputs[0]
        assert output.outputs[0].token_ids == alone.token_ids
        np.testing.assert_array_equal(output.outputs[0].logprobs.sampling, alone.logprobs.sampling)


def test_prompts_share_the_prefix_cache(llm):
    params = SamplingParams(max_tokens=90, seed=4, structured_outputs=FORMS["json"][0])
    first, second = (run(llm, ["A prompt that is longer than a block of sixteen"], params)[0] for _ in range(2))
    assert first.num_cached_tokens == 0 and second.num_cached_tokens >= 32
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_a_stream_that_is_closed_gives_its_blocks_back(llm):
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=90, structured_outputs={"regex": "a{60}"}))
    texts = [next(stream).outputs[0].text for _ in range(3)]
    assert texts == ["a", "aa", "aaa"]
    stream.close()
    scheduler = llm._engine().engine.scheduler
    scheduler.check_integrity()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_steps_that_break_off_change_no_token(llm, monkeypatch):
    params = [SamplingParams(max_tokens=90, seed=seed, structured_outputs=FORMS["json"][0]) for seed in range(3)]
    expected = [output.outputs[0].token_ids for output in run(llm, [PROMPT] * 3, params)]
    runner, calls = llm._engine().runner, []
    collect = runner.collect

    def failing(handle):
        calls.append(handle)
        if len(calls) in (2, 9, 10, 25):
            raise KeyboardInterrupt
        return collect(handle)

    monkeypatch.setattr(runner, "collect", failing)
    submissions = llm._client.submit_all([llm._encode(PROMPT)] * 3, params, score=False)
    while not all(submission.is_finished for submission in submissions):
        try:
            llm._client.step()
        except KeyboardInterrupt:
            llm._engine().engine.scheduler.check_integrity()
    assert len(calls) > 25
    assert [submission.output().outputs[0].token_ids for submission in submissions] == expected


def test_other_requests_run_the_programs_that_they_ran_before(llm):
    params = SamplingParams(max_tokens=9, seed=3)
    before = run(llm, [PROMPT], params)[0].outputs[0].token_ids
    completions(llm, structured_outputs={"regex": "a{3}"})
    layouts = set(llm._engine().runner.launched.layouts)
    with CompileCounter() as counter:
        completions(llm, structured_outputs=FORMS["json"][0])
        assert run(llm, [PROMPT], params)[0].outputs[0].token_ids == before
    assert counter.num_compiles == 0
    assert llm._engine().runner.launched.layouts == layouts


@pytest.mark.parametrize(
    ("form", "match"),
    [
        ({"json": {"type": "foo"}}, "prompt 1: json is not valid.*Invalid type: foo"),
        ({"regex": "(a"}, "prompt 1: regex is not valid"),
        ({"grammar": "start: other"}, "prompt 1: grammar is not valid"),
    ],
)
def test_a_form_that_does_not_compile_is_refused_before_anything_runs(llm, form, match):
    params = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, structured_outputs=form)]
    with pytest.raises(RequestError, match=re.compile(match, re.DOTALL)):
        llm.generate([PROMPT, PROMPT], params, progress=False)
    assert not llm._engine().engine.scheduler.has_unfinished


def test_a_form_needs_a_tokenizer_and_leaves_no_place_for_allowed_token_ids(llm):
    with pytest.raises(RequestError, match="structured_outputs and allowed_token_ids can't be combined"):
        SamplingParams(structured_outputs={"regex": "a"}, allowed_token_ids=[97])
    with pytest.raises(RequestError, match="structured_outputs has no 'schema'; its fields are json, json_object"):
        SamplingParams(structured_outputs={"schema": {}})
    with pytest.raises(RequestError, match="structured_outputs must be a StructuredOutputs or its fields, got 'a'"):
        SamplingParams(structured_outputs="a")
    client, params = LocalClient(llm._engine().engine, None, vocab_size=258), {"structured_outputs": {"regex": "a"}}
    with pytest.raises(RequestError, match="structured_outputs need a tokenizer"):
        client.submit_all([Prompt(token_ids=(1,))], [SamplingParams(**params)], score=False)
