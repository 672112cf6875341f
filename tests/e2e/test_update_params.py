"""Weights in hand and weights that are replaced: LLM(params=...) and update_params."""

import contextlib
import dataclasses
import gc
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_checkpoint import BEGIN, ENGINE_FIELDS, checkpoint_config, small_tokenizer, write_checkpoint

from photon_jax import LLM, CheckpointError, ConfigError, EngineConfig, SamplingParams
from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.checkpoint.orbax_io import save_checkpoint
from photon_jax.engine.metrics import CompileCounter
from photon_jax.models.params import random_params
from photon_jax.text.tokenizer import Tokenizer

CONFIG = checkpoint_config()
PROMPTS = [np.random.default_rng(i).integers(3, CONFIG.vocab_size, 5 + 8 * i).tolist() for i in range(6)]
PARAMS = [
    SamplingParams(max_tokens=3 + 2 * i, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=0)
    for i in range(6)
]


def draw(seed):
    return random_params(CONFIG, jax.random.key(seed))


@pytest.fixture(scope="module")
def weights():
    """Two sets of weights; a set has the number of the versions, even or odd, that it serves here."""
    return draw(0), draw(1)


@pytest.fixture(scope="module")
def expected(weights):
    """The bits of each prompt's output under each set, from new engines."""
    return [[bits(output) for output in make(params).generate(PROMPTS, PARAMS, progress=False)] for params in weights]


def make(params, **fields):
    return LLM(params=params, config=CONFIG, **(ENGINE_FIELDS | fields))


def bits(output):
    (completion,) = output.outputs
    return completion.token_ids, completion.logprobs.raw.tobytes(), completion.logprobs.sampling.tobytes()


def versions(outputs):
    return [completion.weights_version for output in outputs for completion in output.outputs]


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


# params in hand


def test_given_params_serve_as_a_checkpoint_does_and_are_left_alone(tmp_path, weights, expected):
    params = weights[0]
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]
    with make(params) as llm:
        assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(llm.params)] == before
        assert [bits(output) for output in llm.generate(PROMPTS, PARAMS, progress=False)] == expected[0]
        assert llm.describe().num_parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    with LLM(write_checkpoint(tmp_path, params=params), **ENGINE_FIELDS) as llm:
        assert [bits(output) for output in llm.generate(PROMPTS, PARAMS, progress=False)] == expected[0]


def test_given_params_may_come_with_a_tokenizer(tmp_path, weights):
    tokenizer = Tokenizer.from_pretrained(write_checkpoint(tmp_path))
    with make(weights[0], tokenizer=tokenizer) as llm:
        (output,) = llm.generate("The fox", SamplingParams(max_tokens=2), progress=False)
        assert output.prompt_token_ids == (BEGIN, *small_tokenizer().encode("The fox").ids)
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)
        assert llm.tokenizer is tokenizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": None}, "not one of the two alone"),
        ({"config": None}, "not one of the two alone"),
        ({"model": "demo"}, "give a model, or params and their config"),
        ({"config": EngineConfig()}, "config must be the ModelConfig of the params"),
        ({"dtype": "bfloat16"}, "served as they are, in float32, got dtype='bfloat16'"),
        ({"quantization": "int8", "group_size": 32}, "quantize them before"),
    ],
)
def test_params_that_come_with_too_little_or_too_much_are_refused(weights, arguments, message):
    with pytest.raises(ConfigError, match=message):
        LLM(**(ENGINE_FIELDS | {"params": weights[0], "config": CONFIG} | arguments))


def test_params_that_do_not_fit_their_config_are_refused(weights):
    with pytest.raises(CheckpointError, match=r"leaf \.lm_head, float32\[432 64\], expected none"):
        LLM(params=weights[0], config=dataclasses.replace(CONFIG, tie_word_embeddings=True), **ENGINE_FIELDS)


# replacing them


@contextlib.contextmanager
def make_warm(params, **fields):
    with make(params, **fields) as llm:
        runner = llm._started.runner
        for layout in runner.buckets.plain_layouts():
            runner.compile(layout)
        yield llm


@pytest.fixture(scope="module")
def llm(weights):
    with make_warm(weights[0]) as llm:
        yield llm


@pytest.fixture
def served(llm, weights):
    """The LLM under the first set of weights, and at an even version."""
    while llm.update_params(weights[0]) % 2:
        pass
    return llm


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_hundred_updates_under_load_compile_nothing_leak_nothing_and_mix_nothing(weights, expected, steps_ahead):
    with make_warm(weights[0], steps_ahead=steps_ahead) as llm:
        check_updates_under_load(llm, weights, expected)


def check_updates_under_load(served, weights, expected):
    outputs = []
    is_done = threading.Event()

    def generate_until_done():
        while not is_done.is_set():
            outputs.extend(enumerate(served.generate(PROMPTS, PARAMS, progress=False)))

    served.generate(PROMPTS, PARAMS, progress=False)
    first, before = served.weights_version, live_bytes()
    load = threading.Thread(target=generate_until_done)
    with CompileCounter() as counter:
        load.start()
        for count in range(1, 101):
            assert served.update_params(weights[count % 2]) == first + count
            num_seen = len(outputs)
            while count % 3 == 0 and len(outputs) < num_seen + 2 * len(PROMPTS):  # the second batch begins after this
                time.sleep(0.001)
        is_done.set()
        load.join()
    assert counter.num_compiles == 0
    for index, output in outputs:
        (version,) = versions([output])
        assert bits(output) == expected[version % 2][index], (index, version)
    met = {version for _, output in outputs for version in versions([output])}
    assert len(met) >= 25 and {version % 2 for version in met} == {0, 1}, met
    assert live_bytes() <= before
    served._started.engine.scheduler.check_integrity()


def test_running_requests_end_on_the_old_weights_and_waiting_ones_begin_on_the_new(served, weights, expected):
    version = served.weights_version
    streams = [served.stream(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    for stream in streams[:4]:  # as many as can run at once
        next(stream)
    assert served.update_params(weights[1]) == version + 1
    outputs = [list(stream)[-1] for stream in streams]
    assert versions(outputs) == [version] * 4 + [version + 1] * 2
    assert [bits(output) for output in outputs] == expected[0][:4] + expected[1][4:]
    assert served.params is served._started.runner.params


def test_samples_and_scores_carry_the_version_too(served, weights):
    version = served.update_params(weights[1])
    (output,) = served.generate([PROMPTS[0]], SamplingParams(n=2, max_tokens=2, seed=1), progress=False)
    assert versions([output]) == [version, version]
    assert next(served.stream(PROMPTS[0])).outputs[0].weights_version in (None, version)
    (scored,) = served.score([PROMPTS[1]], progress=False)
    with make(weights[1]) as fresh:
        (expected,) = fresh.score([PROMPTS[1]], progress=False)
    assert scored.weights_version == version and expected.weights_version == 0
    assert scored.logprobs.tobytes() == expected.logprobs.tobytes()


def test_preempted_requests_end_on_the_old_weights(served, weights):
    prompts = [np.random.default_rng(i).integers(3, CONFIG.vocab_size, 115).tolist() for i in range(4)]
    params = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True)
    version = served.weights_version
    alone = [served.generate([prompt], params, progress=False)[0].outputs[0].token_ids for prompt in prompts]
    streams = [served.stream(prompt, params) for prompt in prompts]
    for stream in streams:
        next(stream), next(stream)
    assert served.update_params(weights[1]) == version + 1
    outputs = [list(stream)[-1] for stream in streams]
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert versions(outputs) == [version] * 4
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_the_prefix_cache_holds_nothing_of_the_old_weights(served, weights, expected):
    served.generate(PROMPTS, PARAMS, progress=False)
    served.update_params(weights[1])
    outputs = served.generate(PROMPTS, PARAMS, progress=False)
    assert [output.num_cached_tokens for output in outputs] == [0] * 6
    assert [bits(output) for output in outputs] == expected[1]
    assert served.generate(PROMPTS[5:], PARAMS[5:], progress=False)[0].num_cached_tokens > 0


def placements(params, folder):
    """The same weights as users may hold them."""
    save_checkpoint(folder, params, CONFIG)
    yield "restored by Orbax", load_checkpoint(folder, dtype="float32").params
    device = jax.devices()[0]
    mesh = jax.sharding.Mesh([device], ("x",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    yield "numpy", jax.tree.map(np.array, params)
    yield "committed", jax.device_put(params, device)
    yield "on a mesh", jax.device_put(params, replicated)
    yield "of a jitted step", jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 1, tree))(params)
    yield "weakly typed", dataclasses.replace(params, final_norm=weakly_typed(params.final_norm))


def weakly_typed(leaf):
    weak = jax.jit(lambda x: jnp.full(x.shape, 1.0))(leaf)
    assert weak.weak_type
    return weak


def every_option(params):
    """The same requests with all options that change the step."""
    options = {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "min_tokens": 2, "logprobs": 3, "repetition_penalty": 1.1}
    controls = {"logit_bias": {7: 1.0}, "prompt_logprobs": 2}
    return [dataclasses.replace(each, **options, **controls) for each in params]


def test_weights_may_be_held_in_any_way_and_nothing_compiles(served, weights, tmp_path):
    served.generate(PROMPTS, every_option(PARAMS), progress=False)
    for name, params in placements(weights[1], tmp_path / "saved"):
        with make(params) as fresh:
            expected = [bits(output) for output in fresh.generate(PROMPTS, PARAMS, progress=False)]
        with CompileCounter() as counter:
            served.update_params(params)
            outputs = served.generate(PROMPTS, PARAMS, progress=False)
            served.generate(PROMPTS, every_option(PARAMS), progress=False)
        assert counter.num_compiles == 0, name
        assert [bits(output) for output in outputs] == expected, name


def test_arrays_on_the_device_are_shared_and_numpy_ones_copied(served, weights):
    served.update_params(weights[1])
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(weights[1])]
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(served.params)] == pointers
    held = jax.tree.map(np.array, weights[1])
    served.update_params(held)
    for leaf in jax.tree.leaves(held):
        leaf[...] = 7
    np.testing.assert_array_equal(np.asarray(served.params.embedding), np.asarray(weights[1].embedding))


def changed(params):
    weight = params.layers[1].o_proj.weight
    layer = params.layers[1]

    def with_weight(value):
        new = dataclasses.replace(layer, o_proj=dataclasses.replace(layer.o_proj, weight=value))
        return dataclasses.replace(params, layers=(params.layers[0], new))

    deleted = jnp.copy(weight)
    deleted.delete()
    yield with_weight(weight.T), r"leaf \.layers\[1\]\.o_proj\.weight is float32\[64 96\], expected float32\[96 64\]"
    yield with_weight(weight.astype(jnp.bfloat16)), r"o_proj\.weight is bfloat16\[96 64\], expected float32\[96 64\]"
    yield with_weight(None), r"no leaf \.layers\[1\]\.o_proj\.weight, expected float32\[96 64\] there"
    yield with_weight(0.5), r"o_proj\.weight is a builtins\.float, .* expected float32\[96 64\]"
    yield with_weight(deleted), r"o_proj\.weight is a deleted float32\[96 64\] \(donated"
    yield dataclasses.replace(params, layers=(*params.layers, layer)), r"have a leaf \.layers\[2\].*expected none there"
    yield dataclasses.replace(params, layers=list(params.layers)), "a tree of another structure"
    yield {"embedding": params.embedding}, r"have no leaf \.embedding"
    yield jax.eval_shape(lambda: params), r"leaf \.embedding is an abstract float32\[432 64\]"


def test_weights_that_do_not_fit_are_refused_by_leaf_and_the_old_ones_serve_on(served, weights, expected):
    version = served.weights_version
    for params, message in changed(weights[1]):
        with pytest.raises(CheckpointError, match=message):
            served.update_params(params)
    assert served.weights_version == version
    assert [bits(output) for output in served.generate(PROMPTS, PARAMS, progress=False)] == expected[0]


def test_an_update_that_is_interrupted_lets_waiting_requests_go_on(served, weights, monkeypatch):
    stream = served.stream(PROMPTS[0], SamplingParams(max_tokens=30, ignore_eos=True))
    next(stream), next(stream)

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(served._started.engine, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            served.update_params(weights[1])
    outputs = served.generate(PROMPTS, PARAMS, progress=False)
    assert set(versions(outputs)) == {served.weights_version}
    assert len(list(stream)[-1].outputs[0].token_ids) == 30


def test_closing_deletes_only_what_the_llm_loaded(tmp_path, weights):
    folder = write_checkpoint(tmp_path, params=weights[0])
    loaded = LLM(folder, **ENGINE_FIELDS)
    own = loaded.params
    loaded.close()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(own))
    loaded = LLM(folder, **ENGINE_FIELDS)
    kept = loaded.params
    loaded.update_params(weights[1])
    loaded.close()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((kept, weights)))
