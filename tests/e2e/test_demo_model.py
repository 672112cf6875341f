"""The demo model, real weights: its greedy tokens and log-probabilities are those of Hugging Face transformers."""

import json
from pathlib import Path

import numpy as np
import pytest

import photon_jax
from photon_jax.checkpoint.demo import demo_model_path
from photon_jax.engine import start

GOLDEN = json.loads((Path(__file__).parents[1] / "models/golden/smollm2.json").read_text())


@pytest.fixture(scope="session")
def demo_path(request):
    return request.config.getoption("--demo_model") or str(demo_model_path())


@pytest.fixture(autouse=True)
def nothing_ahead(monkeypatch):
    """Programs of thirty layers take seconds each: only those are compiled that the requests here meet."""
    monkeypatch.setattr(start, "programs_ahead", lambda buckets, config: [])


def open_llm(path, **fields):
    return photon_jax.LLM(path, progress=False, num_blocks=80, max_model_len=512, max_num_seqs=20, **fields)


def check_greedy_tokens(llm):
    prompts = [case["prompt_token_ids"] for case in GOLDEN["generations"]]
    params = photon_jax.SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate(prompts, params, progress=False)
    assert len(outputs) == 20
    for case, output in zip(GOLDEN["generations"], outputs, strict=True):
        assert min(case["gaps"]) > 2e-3
        assert list(output.outputs[0].token_ids) == case["output_token_ids"], case["prompt"]
        assert llm.tokenizer.encode(case["prompt"]) == case["prompt_token_ids"]


def mean_logprob_difference(llm):
    scored = GOLDEN["scored"]
    assert len(scored["token_ids"]) >= 300
    (score,) = llm.score([scored["token_ids"]], progress=False)
    return float(np.abs(score.logprobs - np.asarray(scored["logprobs"], np.float32)).mean())


def test_greedy_tokens_and_scores_in_float32_equal_transformers(demo_path):
    with open_llm(demo_path, dtype="float32") as llm:
        check_greedy_tokens(llm)
        assert mean_logprob_difference(llm) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_in_sixteen_bits_are_close_to_transformers_in_float32(demo_path, dtype):
    with open_llm(demo_path, dtype=dtype) as llm:
        assert mean_logprob_difference(llm) < 2e-2


@pytest.mark.gpu
def test_gpu_greedy_tokens_in_float32_equal_the_cpus(demo_path):
    with open_llm(demo_path, dtype="float32") as llm:
        check_greedy_tokens(llm)
        assert mean_logprob_difference(llm) < 1e-3


@pytest.mark.gpu
def test_gpu_scores_in_bfloat16_are_close(demo_path):
    with open_llm(demo_path, dtype="bfloat16") as llm:
        assert mean_logprob_difference(llm) < 2e-2


@pytest.mark.gpu
def test_gpu_greedy_tokens_with_the_triton_attention_kernel_equal_the_cpus(demo_path):
    with open_llm(demo_path, dtype="float32", attention="triton") as llm:
        check_greedy_tokens(llm)
