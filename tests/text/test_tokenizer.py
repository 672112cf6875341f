import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from helpers.byte_tokenizer import ByteTokenizer
from tokenizers import processors

from photon_jax.errors import CheckpointError, RequestError
from photon_jax.text.tokenizer import Tokenizer, find_tokenizer

BEGIN, END, TURN = 0, 1, 2
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt }}"
)
HI = [{"role": "user", "content": "hi"}]
NAMES = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


@pytest.fixture
def make(tmp_path, byte_level_json):
    """Returns a function that writes a tokenizer folder and reads it back."""

    def build(config=None, *, post_bos=False, files=None, backend=None):
        backend = backend or tokenizers.Tokenizer.from_str(byte_level_json)
        if post_bos:
            backend.post_processor = processors.TemplateProcessing(
                single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", BEGIN)]
            )
        (tmp_path / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        for name, text in (files or {}).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")
        return Tokenizer.from_pretrained(tmp_path)

    return build


def plain(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("add_bos_token", "post_bos", "begins"),
    [(None, False, False), (None, True, True), (True, False, True), (True, True, True), (False, True, False)],
)
def test_raw_prompt_gets_the_bos_that_the_tokenizer_adds_by_default(make, add_bos_token, post_bos, begins):
    tokenizer = make({**NAMES, "add_bos_token": add_bos_token}, post_bos=post_bos)
    assert tokenizer.encode("hi") == [BEGIN] * begins + plain(tokenizer, "hi")
    assert plain(tokenizer, "hi")[0] != BEGIN


@pytest.mark.parametrize("post_bos", [False, True])
def test_prompt_that_begins_with_bos_gets_no_second_one_and_a_warning(make, post_bos, caplog):
    tokenizer = make({**NAMES, "add_bos_token": True}, post_bos=post_bos)
    with caplog.at_level(logging.WARNING):
        assert tokenizer.encode("hi")[0] == BEGIN
        assert not caplog.records
        assert tokenizer.encode("<|begin|>hi") == [BEGIN, *plain(tokenizer, "hi")]
    assert "already begins with the BOS token" in caplog.text


def test_ids_without_special_tokens_are_those_of_the_text_alone(make):
    tokenizer = make({**NAMES, "add_bos_token": True}, post_bos=True)
    assert plain(tokenizer, "<|begin|>") == [BEGIN]
    assert plain(tokenizer, "") == []


@pytest.mark.parametrize("post_bos", [False, True])
@pytest.mark.parametrize("template", [CHAT, CHAT.removeprefix("{{ bos_token }}")])
def test_conversation_begins_with_exactly_one_bos(make, post_bos, template, caplog):
    tokenizer = make({**NAMES, "add_bos_token": True, "chat_template": template}, post_bos=post_bos)
    ids = tokenizer.encode_chat(HI)
    assert ids == [BEGIN, *plain(tokenizer, "user: hi<|end|>assistant:")]
    assert not caplog.records


def test_conversation_gets_no_bos_where_neither_template_nor_tokenizer_adds_one(make):
    tokenizer = make({**NAMES, "chat_template": CHAT.removeprefix("{{ bos_token }}")})
    assert BEGIN not in tokenizer.encode_chat(HI, add_generation_prompt=False)


def test_conversation_text_is_what_its_ids_are_made_of(make):
    tokenizer = make({**NAMES, "chat_template": CHAT})
    text = tokenizer.apply_chat_template(HI)
    assert text == "<|begin|>user: hi<|end|>assistant:"
    assert tokenizer.encode_chat(HI) == plain(tokenizer, text)


def test_conversation_without_a_template_names_the_remedy(make):
    tokenizer = make(NAMES)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"no chat template; give a prompt text.*chat_template\.jinja"):
        tokenizer.encode_chat(HI)


def test_template_variables_reach_the_template(make):
    tokenizer = make({**NAMES, "chat_template": "{{ enable_thinking }}{{ tools[0].name }}"})
    assert tokenizer.apply_chat_template(HI, tools=[{"name": "f"}], enable_thinking=False) == "Falsef"


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": "T"}, {}),
        ({"chat_template": [{"name": "default", "template": "T"}, {"name": "rag", "template": "R"}]}, {}),
        ({}, {"chat_template.jinja": "T"}),
        ({"chat_template": "old"}, {"chat_template.jinja": "T"}),
        ({}, {"chat_template.json": '{"chat_template": "T"}'}),
        ({"chat_template": "T"}, {"additional_chat_templates/tool_use.jinja": "U"}),
    ],
)
def test_chat_template_is_found_wherever_checkpoints_keep_it(make, config, files):
    tokenizer = make({**NAMES, **config}, files=files)
    assert tokenizer.apply_chat_template(HI) == "T"
    expected = "U" if "additional_chat_templates/tool_use.jinja" in files else "T"
    assert tokenizer.apply_chat_template(HI, tools=[{"name": "f"}]) == expected


@pytest.mark.parametrize(
    ("config", "eos"),
    [
        ({"eos_token": "<|end|>"}, (END,)),
        ({"eos_token": {"content": "<|turn|>", "lstrip": False}}, (TURN,)),
        ({"eos_token": "<|end|>", "eot_token": "<|turn|>"}, (END, TURN)),
        ({"eos_token": "<|end|>", "eot_token": "<|end|>"}, (END,)),
        ({}, ()),
    ],
)
def test_stop_ids_are_those_that_the_tokenizer_declares(make, config, eos):
    tokenizer = make(config)
    assert tokenizer.eos_token_ids == eos
    assert tokenizer.bos_token_id is None


def test_special_tokens_map_fills_what_the_configuration_leaves_out(make):
    fallback = json.dumps({"bos_token": "<|turn|>", "eos_token": {"content": "<|end|>"}})
    tokenizer = make({"bos_token": "<|begin|>", "eos_token": None}, files={"special_tokens_map.json": fallback})
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BEGIN, (END,))


def test_declared_token_that_the_vocabulary_lacks_is_ignored_with_a_warning(make, caplog):
    tokenizer = make({"bos_token": "[BOS]", "eos_token": "<|end|>"})
    assert tokenizer.bos_token_id is None
    assert "bos_token '[BOS]'" in caplog.text


def test_declared_tokens_count_as_special(make):
    tokenizer = make({"additional_special_tokens": ["Z"], "eos_token": "<|end|>"})
    ids = plain(tokenizer, "a Z<|end|>")
    assert tokenizer.decode(ids) == "a "
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a Z<|end|>"


def test_tokens_that_only_the_configuration_lists_are_added(make):
    entry = {"content": "<|tool|>", "special": True}
    tokenizer = make({"added_tokens_decoder": {"0": {"content": "<|begin|>"}, "420": entry}})
    assert plain(tokenizer, "<|tool|>") == [420]
    assert tokenizer.vocab_size == 421
    with pytest.raises(CheckpointError, match=r"'<\|tool\|>' has id 500 .* but 420 by tokenizer\.json"):
        make({"added_tokens_decoder": {"500": entry}})


def test_limits_and_padding_of_the_file_do_not_touch_prompts(make, byte_level_json):
    backend = tokenizers.Tokenizer.from_str(byte_level_json)
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = make(backend=backend)
    assert tokenizer.decode(tokenizer.encode("a long text of many words")) == "a long text of many words"
    assert len(tokenizer.encode("a")) == 1


@pytest.mark.parametrize("make_tokenizer", [lambda t: t, lambda t: ByteTokenizer()], ids=["real", "bytes"])
def test_texts_and_ids_outside_the_vocabulary_are_refused(byte_level, make_tokenizer):
    tokenizer = make_tokenizer(byte_level)
    with pytest.raises(RequestError, match=r"lone surrogate.* at character 2"):
        tokenizer.encode("ab\ud83d")
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(RequestError, match=f"token id {token_id} .*outside the.* vocabulary"):
            tokenizer.decode([5, token_id])


def test_prompt_must_be_a_string(byte_level):
    with pytest.raises(RequestError, match="a prompt text must be a str, got bytes"):
        byte_level.encode(b"hi")


def test_bytes_of_a_token_need_not_be_whole_characters(byte_level, byte_fallback):
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode("🙂", add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        assert joined.removeprefix(b" ") == "🙂".encode()
        assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""


def test_threads_share_a_tokenizer(byte_level):
    texts = [f"the text {number} 🙂 " * 20 for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: byte_level.decode(byte_level.encode(text)), texts)) == texts


def test_folder_without_a_tokenizer_is_allowed(tmp_path, byte_level_folder, caplog):
    assert find_tokenizer(tmp_path) is None
    assert "prompts must be token ids" in caplog.text
    assert find_tokenizer(byte_level_folder).vocab_size == 420
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing; save the tokenizer in the fast format"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json can't be used as a tokenizer"),
        ("tokenizer.json", '{"model": 5}', r"tokenizer\.json can't be used as a tokenizer"),
        ("tokenizer_config.json", "{,}", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json must hold a JSON object, got list"),
        ("tokenizer_config.json", '{"eos_token": 5}', "eos_token .* must be a string or hold one, got 5"),
        ("tokenizer_config.json", '{"eos_token": {"text": "</s>"}}', "eos_token .* must be a string or hold one"),
        ("tokenizer_config.json", r'{"pad_token": "\ud800"}', r"pad_token .* is no Unicode text: '\\ud800'"),
        ("tokenizer_config.json", '{"add_bos_token": "yes"}', "add_bos_token .* must be true or false, got 'yes'"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', r"added_tokens_decoder .* got \[1\]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"a": {}}}', "added_tokens_decoder .* must map token ids"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": 6}}', r"added_tokens_decoder\[5\] .* got 6"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"5": {"content": 6}}}',
            r"decoder\[5\] .* got \{'content': 6\}",
        ),
        ("tokenizer_config.json", '{"additional_special_tokens": 5}', "additional_special_tokens .* got 5"),
        ("tokenizer_config.json", '{"additional_special_tokens": "<|end|>"}', "additional_special_tokens .* a list or"),
        ("tokenizer_config.json", '{"extra_special_tokens": [5]}', "extra_special_tokens .* got 5"),
        ("tokenizer_config.json", "[" * 100_000, r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", '{"chat_template": "' + "{% if a %}" * 300 + '"}', "not valid Jinja"),
        ("tokenizer_config.json", '{"chat_template": "' + "{{" + "(" * 5000 + '"}', "not valid Jinja"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat template .* must be a string or a list .* got int"),
        ("chat_template.jinja", "{% if", "'default' is not valid Jinja"),
    ],
)
def test_damaged_file_is_named(make, tmp_path, name, text, error):
    make()
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=error):
        Tokenizer.from_pretrained(tmp_path)


def test_file_that_is_not_text_is_named(make, tmp_path):
    make()
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not UTF-8"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("decoder", [tokenizers.decoders.WordPiece(), None])
def test_decoder_that_can_not_work_token_by_token_is_refused(make, byte_level_json, decoder):
    backend = tokenizers.Tokenizer.from_str(byte_level_json)
    backend.decoder = decoder
    with pytest.raises(CheckpointError, match=r"decoder is (WordPiece|absent); supported are ByteLevel"):
        make(backend=backend)


def test_other_threads_run_while_a_long_text_is_encoded(make):
    tokenizer, turns, is_done = make(), [], threading.Event()

    def take_turns():
        while not is_done.wait(0.002):
            turns.append(1)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(take_turns)
        num_before = len(turns)
        ids = tokenizer.encode("ab " * 400_000)
        num_turns = len(turns) - num_before
        is_done.set()
    assert len(ids) > 400_000
    assert num_turns >= 3, "the text stopped them"


@pytest.mark.parametrize("count", [1, 200, 1000])
def test_short_and_long_texts_are_encoded_alike(byte_level, count, monkeypatch):
    text = "Ein Satz, ärgerlich 🙂 lang. " * count
    ids = byte_level.encode(text)
    for limit in (0, len(text)):
        monkeypatch.setattr("photon_jax.text.tokenizer.SHORT_TEXT", limit)
        assert byte_level.encode(text) == ids
    assert byte_level.decode(ids) == text
