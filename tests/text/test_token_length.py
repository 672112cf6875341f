"""The most characters that a token can stand for: certain, or not told."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from photon_jax.text.token_length import MAX_COMPOSED, max_token_chars

TEXTS = ["the quick brown fox  jumps over", "    the lazy dog", "the the the the"] * 4


def byte_level(normalizer=None, pre_tokenizer=None):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_special_tokens([AddedToken("<|a long special token|>", special=True)])
    return backend


@pytest.fixture(scope="module")
def plain():
    return byte_level()


@given(st.text(max_size=60) | st.text(" the", max_size=200) | st.just("<|a long special token|>" * 9))
def test_no_text_has_more_characters_than_its_tokens_allow(plain, text):
    assert max_token_chars(plain) == len("<|a long special token|>")
    assert len(text) <= max_token_chars(plain) * len(plain.encode(text).ids)


@given(st.text(max_size=60) | st.text("\u03b1\u0313\u0300\u0345e\u0301", max_size=100))
def test_composed_characters_count_as_many_as_they_may_be_made_of(text):
    backend = NFC
    assert max_token_chars(backend) == MAX_COMPOSED * len("<|a long special token|>")
    assert len(text) <= max_token_chars(backend) * len(backend.encode(text).ids)


NFC = byte_level(normalizers.NFC())
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(
    "backend",
    [
        byte_level(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), BYTES])),
        byte_level(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES])),
        byte_level(normalizers.Strip()),
        byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        byte_level(normalizers.Replace(Regex(" +"), " ")),
        byte_level(normalizers.Replace("a", "")),
        tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        tokenizers.Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
        tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
    ],
)
def test_nothing_is_told_where_characters_may_be_dropped(backend):
    assert max_token_chars(backend) is None


def test_nothing_is_told_where_a_token_strips_its_neighbors_or_the_text_is_truncated():
    backend = byte_level()
    backend.enable_truncation(5)
    assert max_token_chars(backend) is None
    backend.no_truncation()
    assert max_token_chars(backend) is not None
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert max_token_chars(backend) is None


def test_spaces_that_are_written_otherwise_are_not_dropped():
    backend = byte_level(
        normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace("ab", "_")]),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.Split(Regex("x+"), "isolated"), BYTES]),
    )
    assert max_token_chars(backend) == 2 * len("<|a long special token|>")
