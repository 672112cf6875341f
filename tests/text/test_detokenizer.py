import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_jax.text.detokenizer import Detokenizer
from photon_jax.text.tokenizer import Tokenizer

TEXTS = (
    "plain words, with signs!",
    "🙂 one face",
    "👩‍🚀👨‍👩‍👧‍👦🏳️‍🌈🇨🇭 joined and flags",
    "日本語のテキスト、你好世界",
    "안녕하세요 세계 각각 한글",
    "e\u0301 a\u0308 q\u0323\u0307 combining",
    "\U0010ffff\ud7ff\ue000 ends of the planes",
    "  two spaces lead",
    "\n\t\r\n\x00\x7f",
)


def deltas(tokenizer, ids, *, skip_special_tokens=True):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [detokenizer.push([token_id]) for token_id in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_characters_split_over_tokens_arrive_whole(kind, text, request):
    tokenizer = request.getfixturevalue(kind)
    pieces = deltas(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


def test_texts_of_this_file_do_split_characters_over_tokens(byte_level, byte_fallback):
    for tokenizer in (byte_level, byte_fallback):
        empty = sum(not piece for text in TEXTS for piece in deltas(tokenizer, tokenizer.encode(text))[:-1])
        assert empty > 20


@given(ids=st.lists(st.integers(0, 419), max_size=60), skip=st.booleans())
@settings(max_examples=300)
def test_deltas_of_any_byte_level_ids_join_to_the_decoded_text(ids, skip, byte_level, byte_level_json):
    backend = tokenizers.Tokenizer.from_str(byte_level_json)
    pieces = deltas(byte_level, ids, skip_special_tokens=skip)
    assert "".join(pieces) == backend.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == byte_level.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(3, 258) | st.integers(259, 400), max_size=60), skip=st.booleans())
@settings(max_examples=300)
def test_deltas_of_any_byte_fallback_ids_join_to_the_decoded_text(ids, skip, byte_fallback):
    ids = [min(token_id, byte_fallback.vocab_size - 1) for token_id in ids]
    assert "".join(deltas(byte_fallback, ids, skip_special_tokens=skip)) == byte_fallback.decode(
        ids, skip_special_tokens=skip
    )


@given(text=st.text(max_size=40))
@settings(max_examples=200)
def test_any_text_comes_back_through_byte_fallback(text, byte_fallback):
    text = text.replace("\u2581", "")  # SentencePiece's own mark of a space
    pieces = deltas(byte_fallback, byte_fallback.encode(text))
    assert "".join(pieces) == text
    assert ("\ufffd" in "".join(pieces)) == ("\ufffd" in text)


@given(ids=st.lists(st.integers(0, 419), max_size=60))
@settings(max_examples=200)
def test_what_was_emitted_stays_the_beginning_of_the_text(ids, byte_level):
    text, emitted = byte_level.decode(ids), ""
    for piece in deltas(byte_level, ids):
        emitted += piece
        assert text.startswith(emitted)
    assert emitted == text


def test_incomplete_tail_is_flushed_once(byte_level):
    ids = byte_level.encode("a🙂")
    detokenizer = Detokenizer(byte_level)
    pieces = [detokenizer.push([token_id]) for token_id in ids[:-1]]
    assert "".join(pieces) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_bytes_that_can_not_continue_become_a_replacement_at_once(byte_fallback):
    first, letter = 3 + 0xF0, byte_fallback.encode("x")[-1]
    assert deltas(byte_fallback, [first, letter, letter])[:2] == [
        "",
        "\ufffd" + byte_fallback.decode([letter, letter])[:1],
    ]


def test_special_tokens_inside_a_character_do_not_break_it(byte_level):
    ids = byte_level.encode("🙂")
    assert len(ids) > 1
    assert "".join(deltas(byte_level, [ids[0], 1, *ids[1:], 2])) == "🙂"
    assert "".join(deltas(byte_level, [*ids, 2], skip_special_tokens=False)) == "🙂<|turn|>"


def test_leading_space_is_cut_once_and_only_at_the_start(byte_fallback):
    ids = byte_fallback.encode("the  the the", add_special_tokens=False)
    assert byte_fallback.decode(ids) == "the  the the"
    assert "".join(deltas(byte_fallback, [*ids, *ids])) == "the  the the the  the the"


def test_id_without_a_token_adds_no_text(byte_level):
    assert deltas(byte_level, [byte_level.vocab_size + 5, 10**6]) == ["", "", ""]


def test_each_token_is_looked_at_once_however_long_the_run():
    class Counting(Tokenizer):
        def __init__(self):
            self.num_calls = 0

        num_stripped = 1

        def joined_bytes(self, token_ids, *, skip_special_tokens):
            self.num_calls += len(token_ids)
            return bytes(token_ids)

    tokenizer = Counting()
    pieces = deltas(tokenizer, list("é".encode()) * 5000)
    assert tokenizer.num_calls == 10_000
    assert "".join(pieces) == "é" * 5000
