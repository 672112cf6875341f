"""Grammars: masks against brute force, forms of every kind, what is refused."""

import json
import random
import re

import jsonschema
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.grammars import COMPACT, mask_ids, random_schema, walk
from helpers.small_tokenizers import sentencepiece_fields, train_byte_level
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_jax.errors import RequestError
from photon_jax.structured_outputs import MAX_CHOICES, MAX_GRAMMAR_CHARS, MAX_SCHEMA_DEPTH, StructuredOutputs
from photon_jax.text.detokenizer import Detokenizer
from photon_jax.text.grammar import Grammars
from photon_jax.text.tokenizer import Tokenizer
from photon_jax.text.tokenizer_parts import TokenizerParts

EOS = 257
BYTES = Grammars(ByteTokenizer(), vocab_size=258, eos_token_ids=(EOS,))


class Words:
    """A vocabulary of the words of a list; the last two are a beginning and an end of sequence."""

    def __init__(self, words):
        self.words = [*words, b"<s>", b"</s>"]

    def token_bytes(self, token_id):
        return self.words[token_id] if token_id < len(self.words) else b""

    def is_special(self, token_id):
        return token_id >= len(self.words) - 2

    def encode(self, text, *, add_special_tokens=True):
        return [self.words.index(bytes([byte])) for byte in text.encode()]


def byte_level_tokenizer():
    parts = {"special_tokens": {}, "bos_token_id": 0, "eos_token_ids": (1,), "add_bos": False, "chat_templates": {}}
    return Tokenizer(TokenizerParts(backend=train_byte_level(), **parts))


def text_of(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    return "".join([*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()])


def texts_of(grammars, wanted, *, count=30, tokenizer=None, stop_ids=(EOS,), max_tokens=400):
    """Returns the complete texts of random walks."""
    grammar, texts = grammars.grammar(wanted, stop_ids=stop_ids), []
    for seed in range(count):
        ids, is_complete = walk(grammar.start(), random.Random(seed), stop_ids=stop_ids, max_tokens=max_tokens)
        if is_complete:
            texts.append(text_of(tokenizer or ByteTokenizer(), ids))
    return texts


@pytest.mark.parametrize("vocab_size", [258, 287, 288, 289, 320])
def test_masks_of_bytes_are_those_of_brute_force(vocab_size):
    """Also where the model's vocabulary is padded, and where its end is the end of a word of bits."""
    grammars = Grammars(ByteTokenizer(), vocab_size=vocab_size, eos_token_ids=(EOS,))
    choices = ["to", "tone", "tonight", "ten", "äh", "ähren", "</s>", "🙂"]
    grammar = grammars.grammar(StructuredOutputs(choice=choices), stop_ids=(EOS,))
    texts = [text.encode() for text in choices]
    prefixes = {text[:length] for text in texts for length in range(len(text) + 1)}
    for prefix in sorted(prefixes):
        expected = {text[len(prefix)] for text in texts if text.startswith(prefix) and text != prefix}
        matcher = grammar.start()
        is_open = [matcher.consume(byte) for byte in prefix]
        assert matcher.is_complete == (prefix in texts), prefix
        assert matcher.is_open == bool(expected), prefix
        assert all(is_open[:-1]) and is_open[-1:] in ([], [matcher.is_open]), prefix
        if expected:
            assert mask_ids(matcher.mask) == expected | ({EOS} if prefix in texts else set()), prefix


@pytest.mark.parametrize("seed", range(20))
def test_masks_of_longer_tokens_are_those_of_brute_force_where_the_next_byte_is_not_forced(seed):
    """Where it is, the mask holds the one token with which the tokenizer would write the text on."""
    rng = random.Random(seed)
    words = {bytes(rng.choices(b"abc", k=rng.randint(2, 4))) for _ in range(30)}
    vocabulary = Words([b"a", b"b", b"c", *sorted(words)])
    vocab_size = len(vocabulary.words) + 3
    end = len(vocabulary.words) - 1
    choices = sorted({bytes(rng.choices(b"abc", k=rng.randint(1, 9))) for _ in range(12)})
    wanted = StructuredOutputs(choice=[text.decode() for text in choices])
    grammar = Grammars(vocabulary, vocab_size=vocab_size, eos_token_ids=(end,)).grammar(wanted, stop_ids=(end,))
    num_exact = 0
    for _ in range(60):
        matcher, text = grammar.start(), b""
        while matcher.is_open:
            rest = [choice[len(text) :] for choice in choices if choice.startswith(text)]
            expected = {
                token_id
                for token_id, word in enumerate(vocabulary.words[:-2])
                if any(tail.startswith(word) for tail in rest)
            } | ({end} if text in choices else set())
            found = mask_ids(matcher.mask)
            if len({tail[:1] for tail in rest}) > 1:
                assert found == expected, text
                num_exact += 1
            else:
                assert found and found <= expected, text
            token_id = rng.choice(sorted(found))
            if token_id == end:
                break
            text += vocabulary.words[token_id]
            matcher.consume(token_id)
        assert text in choices and matcher.is_complete
    assert num_exact > 60


@pytest.mark.parametrize(
    ("regex", "max_tokens"),
    [("(ab|cd){2,5}x", 20), (r"\d{3}-[A-Z]+", 40), ("[^\\n]{1,20}\n", 60), ("a/b|\"q'\\\\", 9), ("[äß🙂]+", 40)],
)
def test_every_text_matches_its_regex(regex, max_tokens):
    texts = texts_of(BYTES, StructuredOutputs(regex=regex), max_tokens=max_tokens)
    assert len(texts) >= 15
    assert all(re.fullmatch(regex, text) for text in texts), texts


def test_every_choice_can_come_and_nothing_else():
    choices = ('say "hi"\\', "tab\tnew\nline", "\x00\x1f\x7f\u2028", "/x/ | y", "🙂é", "%json {}", "yes", "yesterday")
    assert set(texts_of(BYTES, StructuredOutputs(choice=choices), count=120)) == set(choices)


@pytest.mark.parametrize("grammar", ['start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'])
def test_every_text_is_of_its_grammar(grammar):
    texts = texts_of(BYTES, StructuredOutputs(grammar=grammar))
    assert len({text for text in texts if re.fullmatch(r"(\(*)x(\)*)", text)}) >= 5
    assert all(text.count("(") == text.count(")") for text in texts)


def test_any_json_object_will_do():
    texts = texts_of(BYTES, StructuredOutputs(json_object=True), count=40, max_tokens=600)
    assert len(texts) >= 15
    assert all(isinstance(json.loads(text), dict) for text in texts)


@pytest.mark.parametrize("kind", ["bytes", "byte level", "sentencepiece"])
def test_every_text_validates_against_its_random_schema(kind):
    if kind == "bytes":
        tokenizer, vocab_size, end = ByteTokenizer(), 258, EOS
    else:
        is_bytes = kind == "byte level"
        tokenizer = byte_level_tokenizer() if is_bytes else Tokenizer.from_gguf(sentencepiece_fields())
        vocab_size, end = tokenizer.vocab_size + 7, tokenizer.eos_token_ids[0]
    grammars = Grammars(tokenizer, vocab_size=vocab_size, eos_token_ids=(end,))
    num_complete = 0
    for seed in range(40):
        schema = random_schema(random.Random(seed))
        wanted = StructuredOutputs(json=schema | (COMPACT if seed % 2 else {}))
        for text in texts_of(grammars, wanted, count=4, tokenizer=tokenizer, stop_ids=(end,), max_tokens=500):
            jsonschema.validate(json.loads(text), schema)
            num_complete += 1
    assert num_complete >= 120


def test_a_schema_may_be_given_as_text_and_keeps_the_order_of_its_properties():
    schema = {"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}}, "required": ["z", "a"]} | COMPACT
    schema["additionalProperties"] = False
    assert StructuredOutputs(json=json.dumps(schema)) == StructuredOutputs(json=schema)
    assert set(texts_of(BYTES, StructuredOutputs(json=schema))) == {'{"z":1,"a":2}'}


def test_white_space_in_json_comes_to_an_end():
    matcher, count = BYTES.grammar(StructuredOutputs(json={"const": {"a": 1}}), stop_ids=(EOS,)).start(), 0
    matcher.consume(ord("{"))
    while ord(" ") in mask_ids(matcher.mask):
        matcher.consume(ord(" "))
        count += 1
    assert count == 16
    assert mask_ids(matcher.mask) == {ord('"')}


def test_special_tokens_come_only_where_a_grammar_names_them():
    grammar = BYTES.grammar(StructuredOutputs(regex="(.|\\n)*"), stop_ids=(EOS,))
    assert not {256} & mask_ids(grammar.start().mask)
    tokenizer = Words([b"a", b"<", b"s", b">"])
    grammars = Grammars(tokenizer, vocab_size=6, eos_token_ids=(5,))
    matcher = grammars.grammar(StructuredOutputs(grammar='start: "a" (<s> | "<s>")'), stop_ids=(5,)).start()
    matcher.consume(0)
    assert mask_ids(matcher.mask) == {1, 4}
    assert not matcher.consume(4) and matcher.is_complete


def test_stop_ids_come_exactly_where_the_text_may_end_and_not_before_min_tokens():
    grammar = BYTES.grammar(StructuredOutputs(regex="ab*"), stop_ids=(EOS, ord("z")), min_tokens=3)
    matcher, found = grammar.start(), []
    for byte in b"abbbb":
        found.append(mask_ids(matcher.mask))
        matcher.consume(byte)
    assert found == [{97}, {98}, {98}, {98, ord("z"), EOS}, {98, ord("z"), EOS}]


def test_a_text_to_which_nothing_can_be_added_is_at_its_end_even_before_min_tokens():
    matcher = BYTES.grammar(StructuredOutputs(choice=["ab"]), stop_ids=(), min_tokens=9).start()
    assert matcher.consume(97)
    assert not matcher.consume(98)
    assert matcher.is_complete


def test_a_text_that_the_vocabulary_can_not_write_on_is_at_an_end_that_is_not_complete():
    grammars = Grammars(Words([b"a", b"b"]), vocab_size=4, eos_token_ids=(3,))
    matcher = grammars.grammar(StructuredOutputs(regex="a(z|ä)"), stop_ids=(3,)).start()
    assert not matcher.consume(0)
    assert not matcher.is_complete


def test_banned_tokens_come_only_where_nothing_else_may():
    grammar = BYTES.grammar(StructuredOutputs(choice=["ab", "cb", "c"]), stop_ids=(EOS,), banned_ids=(97, 98, 255))
    matcher = grammar.start()
    assert mask_ids(matcher.mask) == {99}
    matcher.consume(99)
    assert mask_ids(matcher.mask) == {EOS}
    only = BYTES.grammar(StructuredOutputs(choice=["ab"]), stop_ids=(EOS,), banned_ids=(97,)).start()
    assert mask_ids(only.mask) == {97}


def test_the_samples_of_a_request_do_not_share_their_places():
    grammar = BYTES.grammar(StructuredOutputs(choice=["ab", "cd"]), stop_ids=(EOS,))
    first, second = grammar.start(), grammar.start()
    first.consume(97)
    assert mask_ids(second.mask) == {97, 99}
    second.consume(99)
    assert (mask_ids(first.mask), mask_ids(second.mask)) == ({98}, {100})


def test_a_tokenizer_is_read_once_and_a_form_compiled_once():
    calls = []

    class Counting(ByteTokenizer):
        def token_bytes(self, token_id):
            calls.append(token_id)
            return super().token_bytes(token_id)

    grammars = Grammars(Counting(), vocab_size=258, eos_token_ids=(EOS,))
    assert not calls
    states = [grammars.grammar(StructuredOutputs(regex=regex)).state for regex in ("a", "b", "a")]
    assert len(calls) == 258
    assert states[0] is states[2] and states[0] is not states[1]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, got none"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json_object": 1}, "json_object must be True or False"),
        ({"json": 5}, "^json must be a JSON schema, an object; got 5"),
        ({"json": "[1]"}, "^json must be a JSON schema, an object; got '\\[1\\]'"),
        ({"json": "{"}, "it is no JSON: Expecting"),
        ({"json": {"const": {1, 2}}}, "it is no JSON"),
        ({"json": {"const": float("nan")}}, "it is no JSON"),
        ({"json": "[" * 100_000}, "nested"),
        ({"json": '{"not":' * (MAX_SCHEMA_DEPTH + 1) + "{}" + "}" * (MAX_SCHEMA_DEPTH + 1)}, "levels deep; flatten"),
        ({"json": {"const": "x" * MAX_GRAMMAR_CHARS}}, "characters long, at most"),
        ({"regex": ""}, "regex must be a non-empty text"),
        ({"regex": 5}, "regex must be a non-empty text"),
        ({"grammar": ["a"]}, "grammar must be a non-empty text"),
        ({"choice": []}, "choice must be a list of 1 to"),
        ({"choice": "abc"}, "choice must be a list of 1 to"),
        ({"choice": ["a", ""]}, "non-empty texts"),
        ({"choice": ["a", 5]}, "non-empty texts"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice must be a list of 1 to"),
    ],
)
def test_forms_that_can_not_be_meant_are_refused(fields, match):
    with pytest.raises(RequestError, match=match):
        StructuredOutputs(**fields)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"json": {"type": "foo"}}, "json is not valid.*Invalid type: foo"),
        ({"json": {"$ref": "#/$defs/x"}}, "Pointer '/\\$defs/x' does not exist"),
        ({"json": {"$ref": "https://example.org/x.json"}}, "json is not valid"),
        ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: \\["not"\\]'),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
        ({"json": {"type": "string", "pattern": "(?!a)b"}}, "look-around"),
        ({"json": {"const": "\ud800"}}, "json is not valid"),
        ({"regex": "(ab"}, "regex is not valid.*unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "leaves no token to begin a text with"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"grammar": "root ::= ("}, "grammar is not valid"),
        ({"grammar": "{"}, "grammar is not valid"),
    ],
)
def test_forms_that_do_not_compile_are_refused_with_the_reason(fields, match):
    with pytest.raises(RequestError, match=re.compile(match, re.DOTALL)):
        BYTES.grammar(StructuredOutputs(**fields), stop_ids=(EOS,))


KEYS = ("type", "properties", "items", "required", "enum", "anyOf", "$ref", "pattern", "minimum", "maxLength", "format")
NOISE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(KEYS),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(KEYS), NOISE, max_size=5))
def test_any_schema_compiles_or_is_refused(schema):
    compile_or_refuse(json=schema)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(min_size=1, max_size=20) | st.text(alphabet="ab()[]{}|*+?\\d^$.,19-", min_size=1, max_size=20))
def test_any_text_compiles_or_is_refused(text):
    for kind in ("regex", "grammar", "json"):
        compile_or_refuse(**{kind: text})
    compile_or_refuse(grammar=f"start: {text}")


def compile_or_refuse(**fields):
    try:
        grammar = BYTES.grammar(StructuredOutputs(**fields), stop_ids=(EOS,))
    except RequestError as error:
        assert len(str(error)) > 20
    else:
        assert mask_ids(grammar.start().mask)
