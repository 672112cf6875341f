"""The demo model through the harness: every number and text is that of lm-eval's own hf backend, in float32."""

import json
import math

import numpy as np
import pytest
from helpers.eval_runs import GOLDEN_PATH, RUNS, evaluate, variant_of

from photon_jax import LLM
from photon_jax.checkpoint.demo import demo_model_path
from photon_jax.checkpoint.load import open_checkpoint
from photon_jax.evals.lm_eval_model import PhotonLM
from photon_jax.text.gguf_tokenizer import read_gguf_fields
from photon_jax.text.tokenizer import Tokenizer

GOLDEN = json.loads(GOLDEN_PATH.read_text(encoding="utf-8"))
FIELDS = {"max_model_len": 768, "block_size": 8, "num_blocks": 300, "progress": False}


@pytest.fixture(scope="module")
def models(request):
    """Returns an LLM for each variant of the tokenizer; they share the weights."""
    path = request.config.getoption("--demo_model") or str(demo_model_path())
    parts = read_gguf_fields(open_checkpoint(path, dtype="float32").tokenizer_source)
    found = {"plain": LLM(path, dtype="float32", **FIELDS)}
    first = found["plain"]
    for variant in ("no_bos", "adds_bos"):
        tokenizer = Tokenizer(variant_of(parts, variant))
        found[variant] = LLM(params=first.params, config=first.config, tokenizer=tokenizer, **FIELDS)
    yield found
    for llm in reversed(found.values()):
        llm.close()


def test_the_golden_file_holds_each_task_of_each_run():
    assert {name: list(tasks) for name, tasks in GOLDEN.items()} == {name: list(r.limits) for name, r in RUNS.items()}


@pytest.mark.parametrize(("name", "task"), [(name, task) for name, run in RUNS.items() for task in run.limits])
def test_a_task_gives_what_the_hf_backend_gives(models, name, task):
    run, golden = RUNS[name], GOLDEN[name][task]
    model = PhotonLM(models[run.variant], max_length=run.max_length)
    found = evaluate(model, task, run.limits[task], apply_chat_template=run.has_chat_template)
    assert len(found["samples"]) == len(golden["samples"]) >= 2
    for ours, theirs in zip(found["samples"], golden["samples"], strict=True):
        check_requests(task, ours, theirs)
    assert found["metrics"].keys() == golden["metrics"].keys()
    for metric, value in golden["metrics"].items():
        is_perplexity = "perplexity" in metric
        assert found["metrics"][metric] == pytest.approx(value, rel=1e-4 if is_perplexity else 0, abs=0), metric


def check_requests(task, ours, theirs):
    if task in ("photon_generate", "photon_chat"):
        assert ours == theirs
    elif task == "photon_rolling":
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-3)
    else:
        for (logprob, is_greedy), (expected, expected_is_greedy) in zip(ours, theirs, strict=True):
            assert math.isclose(logprob, expected, rel_tol=0, abs_tol=1e-3) and is_greedy == expected_is_greedy
        assert np.argmax([each[0] for each in ours]) == np.argmax([each[0] for each in theirs])
