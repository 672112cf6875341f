"""An int8 KV cache behind every door: it is what is read, it is shown, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_checkpoint import ENGINE_FIELDS, checkpoint_config

from photon_jax import LLM, ConfigError, SamplingParams
from photon_jax.models.decoder import forward
from photon_jax.models.params import random_params

CONFIG = checkpoint_config()
PROMPTS = [np.random.default_rng(i).integers(3, CONFIG.vocab_size, 5 + 20 * i).tolist() for i in range(4)]
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=4, ignore_eos=True, logprobs=0)


def draw(seed):
    return random_params(CONFIG, jax.random.key(seed))


def make(seed=0, **fields):
    return LLM(params=draw(seed), config=CONFIG, **(ENGINE_FIELDS | {"kv_dtype": "int8"} | fields))


@pytest.fixture(scope="module")
def llm():
    with make() as opened:
        yield opened


def bits(outputs):
    return [(sample.token_ids, sample.logprobs.raw.tobytes()) for output in outputs for sample in output.outputs]


def test_scores_are_those_of_a_forward_on_rounded_keys_and_values(llm):
    prompt = PROMPTS[3]
    (score,) = llm.score([prompt], progress=False)

    def expected(kv_dtype):
        logits = forward(llm.params, CONFIG, jnp.asarray([prompt]), kv_dtype=kv_dtype)[0]
        return np.asarray(jax.nn.log_softmax(logits))[np.arange(len(prompt) - 1), prompt[1:]]

    np.testing.assert_allclose(score.logprobs, expected("int8"), rtol=0.0, atol=1e-4)
    assert np.abs(score.logprobs - expected("auto")).max() > 1e-3


def test_prefix_hits_and_company_change_no_bit(llm):
    expected = [bits(llm.generate([prompt], PARAMS, progress=False))[0] for prompt in PROMPTS]
    metrics = llm.metrics()
    assert bits(llm.generate(PROMPTS, PARAMS, progress=False)) == expected
    assert llm.metrics().num_prefix_hit_tokens > metrics.num_prefix_hit_tokens


def test_samples_of_one_prompt_are_the_same_in_company(llm):
    params = SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=7, ignore_eos=True, logprobs=0)
    several = bits(llm.generate([PROMPTS[2]], params, progress=False))
    assert len(set(several)) == 3
    in_company = llm.generate(PROMPTS, params, progress=False)
    assert bits(in_company)[6:9] == several


def test_new_weights_answer_as_a_new_engine_does(llm):
    with make(seed=1) as other:
        expected = bits(other.generate(PROMPTS, PARAMS, progress=False))
    with make() as replaced:
        before = bits(replaced.generate(PROMPTS, PARAMS, progress=False))
        replaced.update_params(draw(1))
        assert bits(replaced.generate(PROMPTS, PARAMS, progress=False)) == expected != before


def test_a_step_that_breaks_off_makes_the_same_kind_of_cache_anew(llm, monkeypatch):
    expected = bits(llm.generate(PROMPTS, PARAMS, progress=False))
    runner, calls = llm._started.runner, []
    launch = runner.launch

    def broken(plan):
        calls.append(plan)
        handle = launch(plan)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return handle

    monkeypatch.setattr(runner, "launch", broken)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS, progress=False)
    assert runner.cache.k.dtype == jnp.int8 and runner.cache.k_scale is not None
    assert bits(llm.generate(PROMPTS, PARAMS, progress=False)) == expected


def test_what_it_takes_is_shown(llm):
    per_token = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * (CONFIG.head_dim + 4)
    assert llm.describe().kv_bytes_per_token == llm.metrics().kv_bytes_per_token == per_token
    ledger = llm._started.memory_ledger()
    assert ledger.cache_bytes == ENGINE_FIELDS["num_blocks"] * ENGINE_FIELDS["block_size"] * per_token
    assert "MiB of int8" in llm.memory_report()
    assert f"{per_token} bytes a token, int8" in str(llm.describe())


def test_other_kinds_are_refused():
    with pytest.raises(ConfigError, match="kv_dtype must be one of auto, int8, got 'fp8'"):
        make(kv_dtype="fp8")
