"""Text in and text out of LLM, with weights whose greedy continuation is written down by hand."""

import logging

import jax
import numpy as np
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.tiny_checkpoint import (
    BEGIN,
    END,
    ENGINE_FIELDS,
    TOKENIZER_CONFIG,
    TURN,
    chain_params,
    checkpoint_config,
    small_tokenizer,
    write_checkpoint,
)

from photon_jax import LLM, ConfigError, RequestError, SamplingParams
from photon_jax.client.prompts import as_list, encode_prompt, params_for_each
from photon_jax.describe import describe_checkpoint
from photon_jax.text.pieces import byte_level_alphabet

# ids that no text has: the model's vocabulary is padded beyond the tokenizer's
SAY_CHARACTERS, SAY_WORDS, SAY_TURN, SAY_DONE = 420, 421, 422, 423
CHARACTERS = "é日🙂안e\u0301"  # one token for each byte
WORDS = ["The", " do", "ps", "ST", "OP", " so", " end"]
DONE = 330  # an ordinary token, which generation_config makes an end
GREEDY = {"temperature": 0.0, "max_tokens": 40}


def piece_ids(*pieces):
    vocab = small_tokenizer().get_vocab()
    return [vocab[piece.replace(" ", "Ġ")] for piece in pieces]


def byte_ids(text):
    return piece_ids(*(byte_level_alphabet()[byte] for byte in text.encode()))


CHARACTER_IDS = (*byte_ids(CHARACTERS), END)
WORD_IDS = (*piece_ids(*WORDS), END)
CHAINS = [
    [SAY_CHARACTERS, *CHARACTER_IDS],
    [SAY_WORDS, *WORD_IDS],
    [SAY_TURN, *piece_ids("caf"), TURN, *piece_ids("um", "and"), END],
    [SAY_DONE, *piece_ids("op"), DONE, *piece_ids("qu", "we"), END],
]


@pytest.fixture(scope="module")
def make_llm(tmp_path_factory):
    """Returns a function that starts an LLM on a checkpoint of the chains."""
    params = chain_params(checkpoint_config(), CHAINS)
    started = []

    def make(*, tokenizer_config=TOKENIZER_CONFIG, generation_config=None, **fields):
        folder = write_checkpoint(
            tmp_path_factory.mktemp("chain"),
            params=params,
            tokenizer_config=tokenizer_config,
            generation_config=generation_config,
        )
        started.append(LLM(folder, **ENGINE_FIELDS, **fields))
        return started[-1]

    yield make
    for llm in started:
        llm.close()


@pytest.fixture(scope="module")
def llm(make_llm):
    return make_llm()


def complete(llm, *prompt, **params):
    (output,) = llm.generate(list(prompt), SamplingParams(**{**GREEDY, **params}), progress=False)
    return output.outputs[0]


def stream_texts(llm, *prompt, **params):
    outputs = list(llm.stream(list(prompt), SamplingParams(**{**GREEDY, **params})))
    return [output.outputs[0].text for output in outputs], outputs[-1].outputs[0]


# characters


def test_characters_that_span_tokens_come_whole_and_once(llm):
    texts, last = stream_texts(llm, SAY_CHARACTERS)
    assert last.text == CHARACTERS
    assert last.token_ids == CHARACTER_IDS
    assert not any("\ufffd" in text for text in texts)
    assert all(CHARACTERS.startswith(text) for text in texts)
    assert [len(text) for text in texts] == sorted(len(text) for text in texts)
    # a character is there as soon as its last byte is
    whole = [len(byte_part.decode(errors="ignore")) for byte_part in prefixes(CHARACTERS.encode())]
    assert [len(text) for text in texts[:-1]] == whole


def prefixes(data):
    return [data[: index + 1] for index in range(len(data))]


@pytest.mark.parametrize("max_tokens", range(1, len(CHARACTER_IDS)))
def test_character_that_the_end_cuts_is_flushed_once(llm, max_tokens):
    texts, last = stream_texts(llm, SAY_CHARACTERS, max_tokens=max_tokens)
    assert last.text == CHARACTERS.encode()[:max_tokens].decode(errors="replace")
    assert last.text == llm.tokenizer.decode(last.token_ids)
    assert not any("\ufffd" in text for text in texts[:-1])


def test_special_tokens_count_and_are_shown_only_when_asked(llm):
    ids = (*piece_ids("caf"), TURN, *piece_ids("um", "and"), END)
    for skip, text in ((True, "cafumand"), (False, "caf<|turn|>umand<|end|>")):
        completion = complete(llm, SAY_TURN, ignore_eos=True, max_tokens=5, skip_special_tokens=skip)
        assert (completion.token_ids, completion.text) == (ids, text)


# stop strings


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens", "reason"),
    [
        ("sST", "The dop", 4, "sST"),  # begins and ends inside tokens
        ("OP", "The dopsST", 5, "OP"),  # one token
        (("STOP", "TO"), "The dopsS", 5, "TO"),  # one inside the other
        (("STOP", "ST"), "The dops", 4, "ST"),  # one begins the other
        (("dops so", "psSTOP e", "P s"), "The dopsSTO", 6, "P s"),  # two that nearly match
        ("T", "", 1, "T"),  # the first character
        (("end of", "endless"), "".join(WORDS), 8, None),  # held back to the end
        ("stop", "".join(WORDS), 8, None),
    ],
)
def test_text_ends_before_the_stop_string_and_nothing_of_it_was_shown(llm, stop, text, num_tokens, reason):
    texts, last = stream_texts(llm, SAY_WORDS, stop=stop, logprobs=0)
    assert (last.text, last.finish_reason, last.stop_reason) == (text, "stop", reason)
    assert last.token_ids == WORD_IDS[:num_tokens]
    assert len(last.logprobs.raw) == len(last.logprobs.tempered) == len(last.logprobs.sampling) == num_tokens
    assert all(text.startswith(shown) for shown in texts)


def test_held_back_text_is_shown_as_soon_as_no_stop_string_can_match(llm):
    texts, _ = stream_texts(llm, SAY_WORDS, stop="opsSTx")
    assert texts[:5] == ["The", "The d", "The d", "The d", "The dopsSTOP"]


def test_stop_string_stays_when_it_is_asked_for(llm):
    completion = complete(llm, SAY_WORDS, stop="sST", include_stop_str_in_output=True)
    assert (completion.text, completion.stop_reason) == ("The dopsST", "sST")
    assert completion.token_ids == WORD_IDS[:4]


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 2), (1, 2), (2, 8), (4, 8)])
def test_stop_string_before_min_tokens_does_not_count(llm, min_tokens, num_tokens):
    completion = complete(llm, SAY_WORDS, stop="do", min_tokens=min_tokens)
    assert completion.token_ids == WORD_IDS[:num_tokens]


def test_stop_string_in_the_prompt_does_not_count(llm):
    prompt = [*llm.tokenizer.encode("lazy The"), SAY_WORDS]
    assert complete(llm, *prompt, stop=["lazy", "lazy The", " TheT"]).text == "".join(WORDS)
    assert complete(llm, *prompt, stop=["The"]).text == ""


# what ends a sequence


@pytest.mark.parametrize("eos_token_id", [DONE, [DONE], [END, DONE]])
def test_every_end_of_config_generation_config_and_tokenizer_ends_a_sequence(make_llm, eos_token_id):
    llm = make_llm(
        tokenizer_config={**TOKENIZER_CONFIG, "eos_token": "<|turn|>"},
        generation_config={"eos_token_id": eos_token_id},
    )
    for say, end, text in ((SAY_WORDS, END, "".join(WORDS)), (SAY_TURN, TURN, "caf"), (SAY_DONE, DONE, "op")):
        completion = complete(llm, say)
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", None)
        assert completion.token_ids[-1] == end
        unstopped = complete(llm, say, ignore_eos=True, max_tokens=12)
        assert (unstopped.finish_reason, len(unstopped.token_ids)) == ("length", 12)
        chosen = complete(llm, say, ignore_eos=True, stop_token_ids=[end])
        assert (chosen.text, chosen.finish_reason, chosen.stop_reason) == (text, "stop", end)
    # nothing else does
    assert len(complete(llm, 20, max_tokens=12, min_tokens=3).token_ids) == 12


def test_end_of_one_place_alone_still_ends_a_sequence(llm):
    assert complete(llm, SAY_DONE).token_ids[-1] == END
    assert complete(llm, SAY_WORDS).finish_reason == "stop"


# sampling defaults


def test_generation_config_fills_what_is_not_given_and_the_values_used_come_back(make_llm):
    generation_config = {"temperature": 0.25, "top_p": 0.75, "top_k": None, "do_sample": True, "max_length": 5}
    reading = make_llm(generation_config={**generation_config, "repetition_penalty": 1.5})
    ignoring = make_llm(generation_config={**generation_config, "min_p": "wrong"}, use_generation_config=False)

    assert used(reading) == (0.25, 0.75, 0, 0.0, 1.5)
    assert used(reading, top_p=1.0, min_p=0.5) == (0.25, 1.0, 0, 0.5, 1.5)
    assert used(reading, temperature=0.0, top_k=3, repetition_penalty=1.0) == (0.0, 0.75, 3, 0.0, 1.0)
    assert used(ignoring) == (1.0, 1.0, 0, 0.0, 1.0)
    assert ignoring.describe().generation_defaults == {}


def used(llm, **given):
    """Returns the sampling parameters that came back, the same from each door."""
    params = SamplingParams(max_tokens=2, **given)
    (output,) = llm.generate([SAY_WORDS], params, progress=False)
    *_, streamed = llm.stream([SAY_WORDS], params)
    assert streamed.sampling_params == output.sampling_params
    found = output.sampling_params
    return found.temperature, found.top_p, found.top_k, found.min_p, found.repetition_penalty


def test_do_sample_false_is_greedy_unless_a_temperature_is_given(make_llm):
    llm = make_llm(generation_config={"do_sample": False, "temperature": 0.7, "top_k": 9})
    assert used(llm) == (0.0, 1.0, 9, 0.0, 1.0)
    assert used(llm, temperature=0.7, top_k=0) == (0.7, 1.0, 0, 0.0, 1.0)
    (output,) = llm.generate([SAY_WORDS], progress=False)
    assert output.outputs[0].token_ids == WORD_IDS
    assert llm.describe().generation_defaults == {"temperature": 0.0, "top_k": 9}


def test_a_model_that_runs_gives_the_card_of_its_folder(llm):
    card = llm.describe()
    assert card == describe_checkpoint(card.path, dtype="float32")
    resident = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
    assert sum(card.memory_bytes.values()) == resident


# prompts


def test_prompt_text_gets_one_bos_and_ids_are_used_as_they_are(llm, caplog):
    plain = llm.tokenizer.encode("The fox", add_special_tokens=False)
    params = SamplingParams(**GREEDY)

    def ids(prompt):
        return llm.generate(prompt, params, progress=False)[0].prompt_token_ids

    with caplog.at_level(logging.WARNING):
        assert ids("The fox") == (BEGIN, *plain)
        assert not caplog.messages
        assert ids("<|begin|>The fox") == (BEGIN, *plain)
        assert ["BOS" in message for message in caplog.messages] == [True]
    assert ids(plain) == tuple(plain)
    assert ids([BEGIN, BEGIN, *plain]) == (BEGIN, BEGIN, *plain)


def test_chat_has_one_bos_and_the_templates_text(llm):
    messages = [{"role": "user", "content": "The fox"}]
    (output,) = llm.chat(messages, SamplingParams(**GREEDY), progress=False)
    rest = llm.tokenizer.encode("user: The fox<|end|>assistant:", add_special_tokens=False)
    assert output.prompt_token_ids == (BEGIN, *rest)
    assert output.prompt is None
    both = llm.chat([messages, messages * 2], SamplingParams(**GREEDY), progress=False)
    assert [each.prompt_token_ids.count(BEGIN) for each in both] == [1, 1]
    assert both[0].outputs[0].token_ids == output.outputs[0].token_ids
    *_, last = llm.stream_chat(messages, SamplingParams(**GREEDY))
    assert (last.prompt_token_ids, last.outputs[0].text) == (output.prompt_token_ids, output.outputs[0].text)


def test_chat_without_a_template_or_messages_says_so(make_llm, llm):
    with pytest.raises(RequestError, match="messages is empty"):
        llm.chat([])
    bare = make_llm(tokenizer_config={"bos_token": "<|begin|>"})
    with pytest.raises(RequestError, match="no chat template"):
        bare.chat([{"role": "user", "content": "hi"}])


def test_folder_without_a_tokenizer_serves_token_ids(make_llm, llm):
    bare = make_llm(tokenizer_config=None)
    assert bare.tokenizer is None
    (output,) = bare.generate([5, SAY_WORDS], SamplingParams(**GREEDY), progress=False)
    assert (output.outputs[0].token_ids, output.outputs[0].text) == (WORD_IDS, "")
    assert output.outputs[0].finish_reason == "stop"
    (ours,), (theirs,) = bare.score([5, 6, 7], progress=False), llm.score([5, 6, 7], progress=False)
    np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
    for refused, message in (
        (lambda: bare.generate("The fox"), "no tokenizer; give token ids"),
        (lambda: bare.stream("The fox"), "no tokenizer; give token ids"),
        (lambda: bare.chat([{"role": "user", "content": "hi"}]), "no tokenizer, so it has no chat template"),
        (lambda: bare.generate([5], SamplingParams(stop="x")), "need a tokenizer"),
    ):
        with pytest.raises(RequestError, match=message):
            refused()


ARRAY = np.array([5, 6], np.int32)


@pytest.mark.parametrize(
    ("prompts", "listed"),
    [
        ("ab", [(256, 97, 98)]),
        (["ab", "c"], [(256, 97, 98), (256, 99)]),
        ([5, 6], [(5, 6)]),
        ((5, 6), [(5, 6)]),
        (range(3), [(0, 1, 2)]),
        (ARRAY, [(5, 6)]),
        ([np.int64(5), np.uint8(6)], [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        ([(5,), "c", ARRAY], [(5,), (256, 99), (5, 6)]),
        ([ARRAY, ARRAY[:1]], [(5, 6), (5,)]),
        ([ARRAY[:1]], [(5,)]),
        (np.array([[5, 6], [7, 8]]), [(5, 6), (7, 8)]),
        ([], []),
        (np.array([], np.int32), []),
        ([[]], [()]),
    ],
)
def test_prompts_may_be_text_or_ids_or_a_list_of_either(prompts, listed):
    encoded = [encode_prompt(prompt, ByteTokenizer()) for prompt in as_list(prompts)]
    assert [prompt.token_ids for prompt in encoded] == listed
    assert all(type(token_id) is int for prompt in encoded for token_id in prompt.token_ids)


@pytest.mark.parametrize("prompts", [5, None, [None], [5.0, 6.0], [[5, "a"]], [[5.5]], [["ab", "c"]], np.array([0.5])])
def test_what_is_no_prompt_is_refused(prompts):
    with pytest.raises(RequestError, match="a text"):
        [encode_prompt(prompt, ByteTokenizer()) for prompt in as_list(prompts)]


def test_params_are_for_all_prompts_or_one_for_each():
    one, other = SamplingParams(n=2), SamplingParams(n=3)
    assert params_for_each(None, 2) == [SamplingParams()] * 2
    assert params_for_each(one, 2) == [one, one]
    assert params_for_each((one, other), 2) == [one, other]
    assert params_for_each([], 0) == []
    with pytest.raises(RequestError, match="1 sampling_params for 2 prompts"):
        params_for_each([one], 2)
    with pytest.raises(RequestError, match=r"got \{'n': 2\}"):
        params_for_each({"n": 2}, 1)


@pytest.mark.parametrize("door", ["generate", "score"])
@pytest.mark.parametrize(("name", "value"), [("progress", np.ones(2)), ("progress", None), ("on_output", [])])
def test_what_can_not_be_told_of_progress_is_refused_before_anything_runs(llm, door, name, value):
    with pytest.raises(RequestError, match=f"{name} must be "):
        getattr(llm, door)([[1, 2, 3]], **({"progress": False} | {name: value}))
    assert not llm.started.engine.scheduler.has_unfinished


def test_a_progress_that_is_no_function_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="progress must be True, False or a function"):
        LLM("nowhere", progress=np.ones(2))
