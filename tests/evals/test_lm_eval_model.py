"""The harness's model class on a tiny random checkpoint: what it makes of requests, in whatever order and company."""

import random
import sqlite3

import lm_eval.api.model
import numpy as np
import pytest
from helpers.eval_runs import evaluate
from helpers.tiny_checkpoint import BEGIN, END, ENGINE_FIELDS, TOKENIZER_CONFIG, chain_params, checkpoint_config
from helpers.tiny_checkpoint import write_checkpoint as write
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from photon_jax import LLM, CheckpointError, ConfigError, RequestError, SamplingParams
from photon_jax.evals.generation import answer_of
from photon_jax.evals.lm_eval_model import PhotonLM

MANY = {**ENGINE_FIELDS, "max_num_seqs": 16, "max_num_batched_tokens": 64}
TEXTS = (
    "The quick brown fox",
    "Zürich naïve café",
    "Numbers 12345, 3.14",
    "def f(x):\n    return",
    "",
    "日本語 ",
    "a\n\n",
)
ENDINGS = (" jumps over", "x", " the lazy dog.", "é", " ", "\n", " ** 2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **ENGINE_FIELDS) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(llm):
    return PhotonLM(llm, max_length=48)


def instances(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=0, metadata=("some_task", index, 1))
        for index, args in enumerate(arguments)
    ]


PAIRS = [(text, ending) for text in TEXTS for ending in ENDINGS] + [("fox " * 40, " end"), ("a", " fox" * 20)]
PROMPTS = [(text, {"until": ["\n"], "max_gen_toks": 5}) for text in TEXTS[:4]]


def answers(model, kind, arguments):
    return getattr(model, kind)(instances(kind, arguments), disable_tqdm=True)


# registration


def test_the_class_is_registered_beside_the_harnesss_own():
    assert get_model("photon_jax") is PhotonLM
    assert get_model("dummy") is not None


def test_arguments_as_the_command_line_gives_them_are_accepted(folder):
    fields = {name: value for name, value in ENGINE_FIELDS.items() if name != "progress"}
    model = PhotonLM.create_from_arg_obj(
        {"pretrained": str(folder), **fields}, {"batch_size": "4", "max_batch_size": None, "device": "cuda:0"}
    )
    assert (model.max_length, model.rank, model.world_size, model.max_gen_toks) == (256, 0, 1, 256)
    model.llm.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "demo", "pretrained": "demo"}, "model or pretrained, not both"),
        ({"model": "demo", "max_tokens": 3}, "unknown engine setting 'max_tokens'"),
        ({"enable_thinking": True}, "needs think_end_token"),
        ({"enable_thinking": "maybe"}, "enable_thinking must be true or false, got 'maybe'"),
        ({"think_end_token": ""}, "think_end_token must be a text or a token id, got ''"),
        ({"max_length": 0}, "max_length must be a whole number of at least 1, got 0"),
        ({"max_length": 64.5}, "max_length must be a whole number of at least 1, got 64.5"),
        ({"max_gen_toks": "many"}, "max_gen_toks must be a whole number of at least 1, got 'many'"),
        ({"prefix_token_id": "<s>"}, "prefix_token_id must be a token id, got '<s>'"),
        ({"add_bos_token": "maybe"}, "add_bos_token must be true or false, got 'maybe'"),
        ({"chat_template_args": "x"}, "chat_template_args must be an object; on the command line .* got 'x'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        PhotonLM(**{"model": "/no/such/model", **arguments})  # said before anything is loaded


@pytest.mark.parametrize("name", ["model", "pretrained"])
def test_an_empty_name_is_not_the_demo_model(name):
    with pytest.raises(CheckpointError, match="the model's name is empty; give 'demo'"):
        PhotonLM(**{name: ""}, progress=False)


def test_a_window_beyond_the_engines_or_settings_for_an_llm_that_is_there_are_refused(llm):
    with pytest.raises(ConfigError, match="max_length must be at most 256"):
        PhotonLM(llm, max_length=257)
    for name in ("prefix_token_id", "think_end_token"):
        with pytest.raises(ConfigError, match=f"{name} must be a token id of the tokenizer, 0 to 419, got 420"):
            PhotonLM(llm, **{name: 420})
    with pytest.raises(ConfigError, match="give it block_size when it is made"):
        PhotonLM(llm, block_size=16)


# tokens


def test_the_prefix_is_bos_where_there_is_one_and_else_eos(llm, tmp_path):
    assert PhotonLM(llm).prefix_token_id == BEGIN
    assert PhotonLM(llm, prefix_token_id=7).prefix_token_id == 7
    bare = {key: value for key, value in TOKENIZER_CONFIG.items() if "bos" not in key} | {"chat_template": "{{ 1 }}"}
    with LLM(write(tmp_path / "bare", tokenizer_config=bare), **ENGINE_FIELDS) as other:
        model = PhotonLM(other, max_length=48)
        assert (model.tokenizer.bos_token_id, model.prefix_token_id, model.eot_token_id) == (None, END, END)
        assert answers(model, "loglikelihood", [*PAIRS[:3], ("", "fox")])
        assert answers(model, "loglikelihood_rolling", [("The quick brown fox " * 9,)])
        assert answers(model, "generate_until", PROMPTS[:1])


def test_a_text_gets_one_bos_and_none_where_it_brings_its_own(model, llm):
    plain = llm.tokenizer.encode("fox", add_special_tokens=False)
    assert model.tok_encode("fox") == [BEGIN, *plain]
    assert model.tok_encode("<|begin|>fox") == [BEGIN, *plain]
    assert model.tok_encode("fox", add_special_tokens=False) == plain
    assert PhotonLM(llm, add_bos_token=False).tok_encode("fox") == plain
    chat = model.apply_chat_template([{"role": "user", "content": "fox"}])
    assert model.tok_encode(chat).count(BEGIN) == 1
    prefilled = model.apply_chat_template(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], False
    )
    assert prefilled.endswith("assistant: b")
    assert model.chat_template(True) == TOKENIZER_CONFIG["chat_template"]


# log-likelihoods


def test_log_likelihoods_are_sums_of_scores_of_the_joint_text(model, llm):
    ((logprob, is_greedy),) = answers(model, "loglikelihood", [("The quick ", "brown fox")])
    whole, context = model.tok_encode("The quick brown fox"), model.tok_encode("The quick")
    (score,) = llm.score([context], [whole[len(context) :]], progress=False)
    assert (logprob, is_greedy) == (score.sum, score.is_all_greedy)


@pytest.mark.parametrize(
    ("continuation", "num_scored"),
    [("<|begin|>fox", "fox"), ("fox", "fox"), ("x", "x"), ("<|begin|>", ""), ("", "")],
)
def test_an_empty_context_is_the_prefix_once(model, llm, continuation, num_scored):
    ids = llm.tokenizer.encode(num_scored, add_special_tokens=False)
    ((logprob, is_greedy),) = answers(model, "loglikelihood", [("", continuation)])
    expected = llm.score([[BEGIN]], [ids], progress=False)[0] if ids else None
    assert (logprob, is_greedy) == ((expected.sum, expected.is_all_greedy) if ids else (0.0, True))


def test_a_long_context_is_cut_at_its_start_so_that_the_window_is_full(model, llm):
    ids, ending = model.tok_encode("fox " * 40 + "end"), 3
    ((logprob, _),) = model._loglikelihood_tokens([(None, ids[:-ending], ids[-ending:])], disable_tqdm=True)
    (score,) = llm.score([ids[-49:-ending]], [ids[-ending:]], progress=False)
    assert logprob == score.sum


def test_a_continuation_may_fill_the_window_and_no_more(model, llm):
    ids = [5 + i % 7 for i in range(49)]
    ((logprob, _),) = model._loglikelihood_tokens([(None, [9, 9, 9], ids[:48])], disable_tqdm=True)
    assert logprob == llm.score([[9]], [ids[:48]], progress=False)[0].sum
    long = instances("loglikelihood", [("a", "b"), ("", "jumps " * 60)])
    with pytest.raises(
        RequestError, match=r"task some_task, document 1: the continuation has .* the model's window is 48"
    ):
        model.loglikelihood(long, disable_tqdm=True)


def test_a_continuation_that_melts_into_its_context_is_named(model, monkeypatch):
    monkeypatch.setattr(model, "_encode_pair", lambda *_: ([5, 6], []))
    with pytest.raises(RequestError, match="task some_task, document 0: the continuation 'x' has no token of its own"):
        answers(model, "loglikelihood", [("a", "x")])


@pytest.mark.parametrize("num_chars", [0, 1, 30, 400])
def test_rolling_windows_score_each_token_of_a_text_once(model, num_chars):
    text = ("The quick brown fox jumps over the lazy dog. " * 10)[:num_chars]
    windows = list(model._rolling_windows(text))
    assert [token for _, scored in windows for token in scored] == (model.tok_encode(text) if text else [BEGIN])
    assert all(context and len(context) + len(scored) <= 49 for context, scored in windows)
    (total,) = answers(model, "loglikelihood_rolling", [(text,)])
    assert isinstance(total, float)
    alone = [model._loglikelihood_tokens([(None, *window)], disable_tqdm=True)[0][0] for window in windows]
    assert total == sum(alone)


# company


@pytest.mark.parametrize("seed", [1, 2])
def test_order_and_batch_size_change_no_bit(model, folder, seed):
    with LLM(folder, **(MANY if seed == 1 else {**ENGINE_FIELDS, "max_num_seqs": 1})) as llm:
        other = PhotonLM(llm, max_length=48)
        for kind, arguments in (("loglikelihood", PAIRS), ("loglikelihood_rolling", [(t * 20,) for t in TEXTS[:4]])):
            order = random.Random(seed).sample(range(len(arguments)), len(arguments))
            shuffled = answers(other, kind, [arguments[place] for place in order])
            assert [shuffled[order.index(place)] for place in range(len(order))] == answers(model, kind, arguments)
        assert answers(other, "generate_until", PROMPTS[::-1])[::-1] == answers(model, "generate_until", PROMPTS)


def test_the_examples_of_each_few_shot_task_are_computed_once_though_the_cache_holds_one_tasks_alone(llm):
    heads = [[1 + head] * 208 for head in range(3)]  # 13 blocks each, of 39
    questions = [[10 + question, *range(20, 20 + question)] for question in range(6)]
    contexts = [head + question for question in questions for head in heads]
    before = llm.metrics().num_tokens
    PhotonLM(llm)._loglikelihood_tokens(
        [(None, context, [choice]) for context in contexts for choice in (5, 6)], disable_tqdm=True
    )
    num_computed = llm.metrics().num_tokens - before
    num_own = 2 * sum(len(context) - len(heads[0]) for context in contexts)
    assert num_computed <= sum(map(len, heads)) + num_own


# generations


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """Returns a model that goes on after a token of "a" with: a b <|turn|> c d <|end|>."""
    config = checkpoint_config()
    with LLM(write(tmp_path_factory.mktemp("letters")), **ENGINE_FIELDS) as llm:
        ids = [llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcd"]
    links = [ids[0], ids[1], 2, ids[2], ids[3], END]
    folder = write(tmp_path_factory.mktemp("chain"), config=config, params=chain_params(config, [links]))
    with LLM(folder, **ENGINE_FIELDS) as llm:
        yield llm


@pytest.mark.parametrize(
    ("arguments", "gen_kwargs", "text"),
    [
        ({}, {}, "bcd"),
        ({}, {"until": ["c"]}, "b"),
        ({}, {"until": "d", "max_new_tokens": 9, "do_sample": False, "temperature": 0.7}, "bc"),
        ({}, {"until": ["<|turn|>"]}, "b"),
        ({}, {"max_gen_toks": 1}, "b"),
        ({}, {"until": None, "num_beams": 1, "use_cache": True}, "bcd"),  # tasks write them out for the hf backend
        ({}, {"until": ""}, "bcd"),
        ({"think_end_token": "<|turn|>"}, {"until": ["b"]}, "cd"),
        ({"think_end_token": "2"}, {"until": ["b", "d"]}, "c"),
        ({"think_end_token": 2}, {"until": ["b"]}, "cd"),
    ],
)
def test_an_answer_ends_at_the_first_text_that_ends_it(chain, arguments, gen_kwargs, text):
    model = PhotonLM(chain, max_length=40, max_gen_toks=20, **arguments)
    assert answers(model, "generate_until", [("a", gen_kwargs)]) == [text]


def test_repeats_of_a_request_with_a_seed_are_different_answers_and_the_same_in_each_run(model):
    drawn = {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0, "seed": 7}
    (request,) = instances("generate_until", [("The quick", drawn)])
    texts = model.generate_until([request] * 3, disable_tqdm=True)  # as the harness repeats it
    assert len(set(texts)) == 3
    assert model.generate_until([request] * 3, disable_tqdm=True) == texts
    assert model.generate_until([request], disable_tqdm=True) == texts[:1]


@pytest.mark.parametrize(
    ("gen_kwargs", "message"),
    [
        ({}, "an answer of 256 tokens leaves no room"),
        ({"penalty_alpha": 4}, "generation arguments penalty_alpha are unknown; known are until"),
        ({"num_beams": 4}, "generation argument num_beams must be 1, got 4"),
        ({"until": ["a", 3]}, r"generation argument until must be a text or a list of texts, got \['a', 3\]"),
        ({"max_gen_toks": 0}, "generation argument max_gen_toks must be at least 1, got 0"),
        ({"max_gen_toks": "few"}, "max_gen_toks must be a whole number, .* got {'max_gen_toks': 'few'}"),
        ({"temperature": "hot"}, "temperature a number, got {'temperature': 'hot'}"),
    ],
)
def test_generation_arguments_that_can_not_be_are_refused_with_their_document(llm, gen_kwargs, message):
    with pytest.raises(RequestError, match=f"task some_task, document 0: .*{message}"):
        answers(PhotonLM(llm, max_length=40), "generate_until", [("a", gen_kwargs)])


def test_thinking_about_log_likelihoods_is_refused(llm):
    model = PhotonLM(llm, enable_thinking=True, think_end_token="</think>", max_length=40)
    with pytest.raises(ConfigError, match="no log-likelihoods, which these tasks need: some_task"):
        answers(model, "loglikelihood", PAIRS[:1])


def test_a_long_prompt_is_cut_at_its_start(model, llm):
    (text,) = answers(model, "generate_until", [("fox " * 90, {"max_gen_toks": 8})])
    ids = model.tok_encode("fox " * 90)[-40:]
    (output,) = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=8), progress=False)
    assert text == answer_of(output.outputs[0].token_ids, ["<|end|>"], llm.tokenizer, None)


# cache


class Killed(Exception):
    pass


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling", "generate_until"])
def test_a_killed_run_goes_on_from_the_cache_with_the_same_numbers(model, llm, tmp_path, monkeypatch, kind):
    arguments = {
        "loglikelihood": PAIRS[:20],
        "loglikelihood_rolling": [(text * 20,) for text in TEXTS[:4]],
        "generate_until": PROMPTS,
    }[kind]
    expected, path = answers(model, kind, arguments), str(tmp_path / "cache.db")
    cached, hook = lm_eval.api.model.CachingLM(model, path), model.cache_hook
    kept = []

    def add_partial(attr, args, result):
        if len(kept) == 3:
            raise Killed
        kept.append(args)
        lm_eval.api.model.CacheHook.add_partial(hook, attr, args, result)

    monkeypatch.setattr(model.cache_hook, "add_partial", add_partial)
    with pytest.raises(Killed):
        getattr(cached, kind)(instances(kind, arguments))
    assert llm.metrics().num_steps and not llm._started.engine.scheduler.has_unfinished
    cached.dbdict.close()
    assert len(sqlite3.connect(path).execute("select * from unnamed").fetchall()) == 3
    again, asked = lm_eval.api.model.CachingLM(model, path), []
    monkeypatch.setattr(model.cache_hook, "add_partial", lambda attr, args, result: asked.append(args))
    assert [tuple(np.atleast_1d(each)) for each in getattr(again, kind)(instances(kind, arguments))] == [
        tuple(np.atleast_1d(each)) for each in expected
    ]
    assert len(asked) == len(arguments) - 3 and not set(map(repr, asked)) & set(map(repr, kept))
    again.dbdict.close()
    model.set_cache_hook(lm_eval.api.model.CacheHook(None))


def test_results_say_what_the_model_was(model):
    results = evaluate(model, "photon_letters", 2)
    assert results["metrics"].keys() == {"acc,none"}
    info = model.get_model_info()
    assert info["model_dtype"] == "float32" and len(info["model_sha"]) == 64
    assert info["model_quantization"] is None and info["model_num_parameters"] > 0
