"""Reasoning before an answer: whole and in pieces, opened by the model or by its template."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_jax.text.reasoning import ReasoningSplitter, reasoning_start, shows_reasoning, split_reasoning

CASES = [
    ("before", "<think>\nI see.\n\nSo.\n</think>\n\nHello\n", "I see.\n\nSo.", "Hello\n"),
    ("before", "\n <think></think>Hello", "", "Hello"),
    ("before", "<think>\n\n</think>\n\n", "", ""),
    ("before", "Hello <think>x</think>", "", "Hello <think>x</think>"),
    ("before", "  <thinking>", "", "  <thinking>"),
    ("before", " \n", "", " \n"),
    ("before", "<thi", "", "<thi"),
    ("before", "<think>cut off\n</thi", "cut off\n</thi", ""),
    ("before", "", "", ""),
    ("inside", "\nI see.\n</think>\n\nHello</think>", "I see.", "Hello</think>"),
    ("inside", "<think>\nagain</think>x", "<think>\nagain", "x"),
    ("inside", "cut\n\n", "cut\n\n", ""),
    ("after", "<think>x</think>\nHello", "", "<think>x</think>\nHello"),
]


def streamed(pieces, start):
    splitter = ReasoningSplitter(start)
    deltas = [*map(splitter.push, pieces), splitter.flush()]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)


@pytest.mark.parametrize(("start", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content_are_told_apart_whole_and_in_pieces(start, text, reasoning, content):
    found = split_reasoning(text, start)
    assert (found.reasoning, found.content) == (reasoning, content)
    assert streamed(text, start) == (reasoning, content)


PARTS = ["<think>", "</think>", "<thi", "</t", "<", "\n", " ", "text", "nk>"]


@given(st.sampled_from(["before", "inside", "after"]), st.lists(st.sampled_from(PARTS), max_size=12), st.data())
def test_pieces_give_what_the_whole_gives_however_it_is_cut(start, parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    found = split_reasoning(text, start)
    assert streamed([text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])], start) == (
        found.reasoning,
        found.content,
    )
    if not found.reasoning and "</think>" not in text:
        assert found.content in (text, text.lstrip().removeprefix("<think>").lstrip("\n")), "something was lost"


def test_reasoning_is_shown_while_it_comes():
    splitter = ReasoningSplitter("before")
    shown = [splitter.push(piece) for piece in ("<think>", "\nI", " see.\n", "Yes", "</thin", "k>\n", "\nHello")]
    assert [delta.reasoning for delta in shown] == ["", "I", " see.", "\nYes", "", "", ""]
    assert [delta.content for delta in shown] == ["", "", "", "", "", "", "Hello"]


@pytest.mark.parametrize(
    ("prompt", "continued", "start"),
    [
        ("<|im_start|>assistant\n", "", "before"),
        ("<|im_start|>assistant\n<think>\n", "", "inside"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", "after"),
        ("user: what does <think> mean?\nassistant:", "", "before"),
        ("assistant\n<think>\nI see", "<think>\nI see", "inside"),
        ("assistant\n<think>\nI see\n</think>\n\nHel", "<think>I see</think>Hel", "after"),
        ("assistant\nHel", "Hel", "after"),
    ],
)
def test_the_prompt_shows_where_the_answer_begins(prompt, continued, start):
    assert reasoning_start(prompt, continued=continued) == start


def test_templates_show_whether_there_is_reasoning():
    assert shows_reasoning("{{ '<think>\n\n</think>\n\n' }}")
    assert not shows_reasoning("{{ messages }}") and not shows_reasoning(None)
