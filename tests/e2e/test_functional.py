"""generate(): weights in, outputs out, nothing left behind."""

import jax
import numpy as np
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.tiny_checkpoint import ENGINE_FIELDS, checkpoint_config, write_checkpoint
from helpers.tiny_model import tiny_params

import photon_jax
from photon_jax import LLM, RequestError, SamplingParams
from photon_jax.engine.metrics import CompileCounter

CONFIG = checkpoint_config()
# four sequences, the longest of 129 to 256 tokens: all batches here have one geometry, so they share programs
PROMPTS = [np.random.default_rng(0).integers(3, 256, 130).tolist(), [5, 6, 7], [8], [5, 6, 7]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
NOISY = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG)


def generate(params, prompts=PROMPTS, sampling_params=NOISY, **fields):
    return photon_jax.generate(params, CONFIG, prompts, sampling_params, progress=False, **fields)


def tokens(*args, **fields):
    return [completion.token_ids for output in generate(*args, **fields) for completion in output.outputs]


def test_results_are_those_of_an_llm_on_the_same_weights(params, tmp_path):
    outputs = generate(params, sampling_params=GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in PROMPTS]
    with LLM(write_checkpoint(tmp_path), **ENGINE_FIELDS) as llm:
        expected = llm.generate(PROMPTS, GREEDY, progress=False)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        np.testing.assert_array_equal(ours.outputs[0].logprobs.raw, theirs.outputs[0].logprobs.raw)
        assert ours.outputs[0].text == ""


def test_second_call_compiles_nothing_and_says_the_same(params):
    first = tokens(params)
    with CompileCounter() as counter:
        second = tokens(params)
        shorter = tokens(params, [PROMPTS[0][:-1], [9], [9, 10], [11] * 5], GREEDY)
    assert counter.num_compiles == 0
    assert first == second
    assert len(shorter) == 4


def test_weights_of_another_value_are_used_without_a_compile(params):
    first = tokens(params, sampling_params=GREEDY)
    with CompileCounter() as counter:
        other = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)[::-1].copy()), params)
        assert tokens(other, sampling_params=GREEDY) != first
        assert tokens(params, sampling_params=GREEDY) == first
    assert counter.num_compiles == 0


def test_weights_stay_the_callers_and_no_array_is_left_behind(params):
    generate(params)
    num_arrays = len(jax.live_arrays())
    generate(params)
    assert len(jax.live_arrays()) == num_arrays
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_key_decides_the_noise_of_requests_without_a_seed(params):
    base = tokens(params)
    assert base[1] != base[3]  # equal prompts, each with a seed of its own
    assert tokens(params, key=0) == tokens(params, key=np.int64(0)) == tokens(params, key=jax.random.key(0)) == base
    drawn = [base, tokens(params, key=1), tokens(params, key=1 << 32), tokens(params, key=-1)]
    drawn += [tokens(params, key=jax.random.key(9)), tokens(params, key=jax.random.split(jax.random.key(9))[0])]
    assert len({tuple(each) for each in drawn}) == len(drawn)
    assert tokens(params, key=jax.random.key(9)) == drawn[4]
    assert tokens(params, key=jax.random.PRNGKey(9)) == drawn[4]  # the older form of the same key
    assert tokens(params, key=np.int64(1)) == drawn[1]


def test_seed_of_a_request_beats_the_key(params):
    seeded = SamplingParams(max_tokens=8, ignore_eos=True, seed=4)
    base = tokens(params, sampling_params=seeded)
    assert base[1] == base[3]
    assert tokens(params, sampling_params=seeded, key=1) == base


def test_tokenizer_gives_text_and_its_ends(params):
    text = bytes(PROMPTS[0]).decode("latin-1")
    first = ByteTokenizer().encode(text)[:130]
    prompts = ["fox", first, [5], "fox"]
    outputs = generate(params, prompts, GREEDY, tokenizer=ByteTokenizer())
    assert outputs[0].prompt == "fox" and outputs[0].prompt_token_ids == (256, *b"fox")
    for output in outputs:
        ids = [token_id for token_id in output.outputs[0].token_ids if token_id < 258]
        assert output.outputs[0].text == ByteTokenizer().decode(ids)
    third = outputs[0].outputs[0].token_ids[2]

    class Ending(ByteTokenizer):
        eos_token_ids = (third,)

    ended = generate(params, prompts, SamplingParams(temperature=0.0, max_tokens=8), tokenizer=Ending())[0].outputs[0]
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] == third and len(ended.token_ids) <= 3


def test_samples_count_as_sequences_of_the_batch(params):
    fields = {"max_tokens": 8, "ignore_eos": True}
    outputs = generate(params, PROMPTS[:2], [SamplingParams(**fields), SamplingParams(n=3, **fields)])
    assert [len(output.outputs) for output in outputs] == [1, 3]
    assert len({completion.token_ids for completion in outputs[1].outputs}) == 3


@pytest.mark.parametrize(
    ("prompts", "sampling_params", "message"),
    [
        ("text", None, "no tokenizer; give token ids"),
        ([[5]], [NOISY, NOISY], "2 sampling_params for 1 prompts"),
        ([*PROMPTS[:3], [CONFIG.vocab_size]], NOISY, "prompt 3: prompt_token_ids holds 432"),
        ([*PROMPTS[:3], []], NOISY, "prompt 3: .*empty prompt"),
    ],
)
def test_wrong_request_is_refused(params, prompts, sampling_params, message):
    with pytest.raises(RequestError, match=message):
        generate(params, prompts, sampling_params)


def test_no_prompts_give_no_results_and_start_nothing(params):
    with CompileCounter() as counter:
        assert generate(params, []) == []
    assert counter.num_compiles == 0


def test_bar_is_shown_unless_it_is_switched_off(params, capsys):
    generate(params)
    assert capsys.readouterr() == ("", "")
    photon_jax.generate(params, CONFIG, PROMPTS, GREEDY)
    assert "4/4" in capsys.readouterr().err
