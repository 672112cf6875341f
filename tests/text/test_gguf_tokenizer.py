import itertools
import json
from pathlib import Path

import pytest
import tokenizers
from helpers.small_tokenizers import CORPUS, SPECIALS, sentencepiece_fields
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_jax.errors import CheckpointError
from photon_jax.text.gguf_tokenizer import read_gguf_fields
from photon_jax.text.tokenizer import Tokenizer

WORDS = json.loads((Path(__file__).parent / "golden" / "words.json").read_text(encoding="utf-8"))["words"]
TEXTS = WORDS["texts"]


def byte_level_fields(backend_json, **changes):
    """Returns GGUF metadata with the vocabulary and merges of a tokenizer.json."""
    model = json.loads(backend_json)["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    fields.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return {key: value for key, value in fields.items() if value is not None}


@given(text=st.text(max_size=30) | st.sampled_from([*CORPUS, *TEXTS, *SPECIALS]))
@settings(max_examples=200)
def test_gguf_tokenizer_is_that_of_the_tokenizer_json_it_was_made_from(text, byte_level, byte_level_json, gguf_twin):
    ids = gguf_twin.encode(text)
    assert ids == tokenizers.Tokenizer.from_str(byte_level_json).encode(text).ids == byte_level.encode(text)
    assert gguf_twin.decode(ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def gguf_twin(byte_level_json):
    return Tokenizer.from_gguf(byte_level_fields(byte_level_json))


@pytest.mark.parametrize("rule", WORDS["words"])
def test_text_is_cut_into_words_as_transformers_does(rule, byte_level_json):
    backend = read_gguf_fields(byte_level_fields(byte_level_json, pre=rule)).backend
    normal = backend.normalizer.normalize_str if backend.normalizer else str
    cut = [[word for word, _ in backend.pre_tokenizer.pre_tokenize_str(normal(text))] for text in TEXTS]
    assert cut == WORDS["words"][rule]


@pytest.mark.parametrize(("rule", "single"), [("llama-bpe", True), ("qwen2", False)])
def test_word_in_the_vocabulary_is_taken_whole_where_the_rule_says_so(rule, single, byte_level_json):
    fields = byte_level_fields(byte_level_json, pre=rule, add_bos_token=False)
    tokens = [*fields["tokenizer.ggml.tokens"], "xqzx"]
    types = [*fields["tokenizer.ggml.token_type"], 1]
    fields.update({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    assert (Tokenizer.from_gguf(fields).encode("xqzx") == [len(tokens) - 1]) is single


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"add_bos_token": True}, True),
        ({"add_bos_token": False, "pre": "llama-bpe"}, False),
        ({"add_bos_token": None, "pre": "llama-bpe"}, True),
        ({"add_bos_token": None}, False),
        ({"add_bos_token": True, "bos_token_id": None}, False),
    ],
)
def test_bos_is_added_as_the_file_says_else_as_its_kind_does(changes, begins, byte_level_json):
    tokenizer = Tokenizer.from_gguf(byte_level_fields(byte_level_json, **changes))
    assert tokenizer.encode("hi")[:1] == [0] if begins else tokenizer.encode("hi")[0] > 2


def test_stop_ids_are_end_of_text_and_end_of_turn(byte_level_json):
    assert Tokenizer.from_gguf(byte_level_fields(byte_level_json)).eos_token_ids == (1,)
    assert Tokenizer.from_gguf(byte_level_fields(byte_level_json, eot_token_id=2)).eos_token_ids == (1, 2)
    assert Tokenizer.from_gguf(byte_level_fields(byte_level_json, eot_token_id=1)).eos_token_ids == (1,)
    assert Tokenizer.from_gguf(byte_level_fields(byte_level_json, eos_token_id=None)).eos_token_ids == ()


def test_control_tokens_are_special_and_user_defined_ones_are_not(byte_level_json):
    fields = byte_level_fields(byte_level_json)
    types = [4 if index == 2 else kind for index, kind in enumerate(fields["tokenizer.ggml.token_type"])]
    tokenizer = Tokenizer.from_gguf({**fields, "tokenizer.ggml.token_type": types})
    ids = tokenizer.encode("a<|turn|>b<|end|>")
    assert (2 in ids, 1 in ids) == (True, True)
    assert tokenizer.decode(ids) == "a<|turn|>b"


def test_chat_templates_of_the_file_are_used(byte_level_json):
    fields = byte_level_fields(byte_level_json)
    tokenizer = Tokenizer.from_gguf(
        {
            **fields,
            "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
            "tokenizer.chat_template.tool_use": "tools",
        }
    )
    talk = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(talk) == "<|begin|>a<|end|>"
    assert tokenizer.apply_chat_template(talk, tools=[{"name": "f"}]) == "tools"
    assert not Tokenizer.from_gguf(fields).has_chat_template


def test_rule_that_the_file_leaves_out_is_gpt2s_with_a_warning(byte_level_json, gguf_twin, caplog):
    tokenizer = Tokenizer.from_gguf(byte_level_fields(byte_level_json, pre=None))
    assert "does not say how its tokenizer splits words" in caplog.text
    assert [tokenizer.encode(text) for text in TEXTS] == [gguf_twin.encode(text) for text in TEXTS]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "rwkv"}, "kind 'rwkv'; supported are 'gpt2' .* 'llama'"),
        ({"model": None}, "kind 'absent'"),
        ({"pre": "martian"}, r"rule 'martian' \(tokenizer\.ggml\.pre\); supported are .*smollm"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens must be a list of strings, got NoneType"),
        ({"tokens": ["a", "a"]}, "holds the same token twice"),
        ({"token_type": [1]}, r"token_type must be a list of 420 numbers, got 1"),
        ({"token_type": [9] * 420}, r"token_type\[0\] must be 1 to 6, got 9"),
        ({"merges": ["ab"]}, "merges must hold two pieces and a space each, got 'ab'"),
        ({"merges": ["a not-there"]}, "can't be used as a tokenizer"),
        ({"eos_token_id": 420}, "eos_token_id must be a token id below 420, got 420"),
    ],
)
def test_field_that_can_not_be_used_is_named(changes, error, byte_level_json):
    with pytest.raises(CheckpointError, match=error):
        Tokenizer.from_gguf(byte_level_fields(byte_level_json, **changes))


def merge_by_score(text, scores):
    """SentencePiece's rule written out: join the neighbours with the best piece, the leftmost of equals, till none."""
    pieces = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        pairs = [
            (-scores[left + right], at)
            for at, (left, right) in enumerate(itertools.pairwise(pieces))
            if left + right in scores
        ]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@given(text=st.text("the quickbrown fx12345", max_size=40) | st.text(" aeo🙂é\n", max_size=30))
@settings(max_examples=300)
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(text, byte_fallback):
    fields = sentencepiece_fields()
    tokens = fields["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens[259:], fields["tokenizer.ggml.scores"][259:], strict=True))
    expected = []
    for piece in merge_by_score(text, scores):
        known = piece in scores
        expected += [tokens.index(piece)] if known else [3 + byte for byte in piece.encode()]
    assert byte_fallback.encode(text) == [1, *expected]
    assert byte_fallback.decode([1, *expected]) == text


def test_sentencepiece_decodes_as_the_tokenizers_library_does():
    backend = read_gguf_fields(sentencepiece_fields()).backend
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields())
    for text in [*CORPUS, *TEXTS]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == backend.decode(ids) == text
        tail = ids[len(ids) // 2 :]
        while tail and (3 + 0x80) <= tail[0] < (3 + 0xC0):  # begin at a whole character
            tail = tail[1:]
        assert tokenizer.decode(tail) == backend.decode(tail)


def test_sentencepiece_without_space_prefix_keeps_the_text_as_it_is():
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields(add_space_prefix=False, add_bos_token=False))
    assert tokenizer.num_stripped == 0
    assert [tokenizer.decode(tokenizer.encode(text)) for text in ("the", " the")] == ["the", " the"]
    assert tokenizer.encode("the") != tokenizer.encode(" the")


def test_sentencepiece_without_byte_tokens_is_refused():
    tokens = sentencepiece_fields()["tokenizer.ggml.tokens"]
    tokens = ["<0x1F>x" if token == "<0x1F>" else token for token in tokens]
    with pytest.raises(CheckpointError, match="kind 'llama' lacks byte tokens"):
        Tokenizer.from_gguf(sentencepiece_fields(tokens=tokens))
