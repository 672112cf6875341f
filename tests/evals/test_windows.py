"""Windows and order of what is scored."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_jax.errors import RequestError
from photon_jax.evals.windows import fit_window, sharing_order, strided_windows

IDS = st.lists(st.integers(0, 9), max_size=40)


@given(context=IDS, continuation=IDS, max_length=st.integers(1, 50))
def test_what_is_read_fits_and_the_continuation_is_whole(context, continuation, max_length):
    if len(continuation) > max_length:
        with pytest.raises(RequestError, match=f"the model's window is {max_length}"):
            fit_window(context, continuation, max_length)
        return
    kept, scored = fit_window(context, continuation, max_length)
    assert scored == continuation
    whole = (context + continuation)[-(max_length + 1) :]
    assert kept + scored == whole


@given(num_tokens=st.integers(0, 60), size=st.integers(2, 20), share=st.floats(0, 1))
def test_each_token_that_has_one_before_it_in_a_window_is_scored_once(num_tokens, size, share):
    stride = 1 + round(share * (size - 1))
    windows = list(strided_windows(range(num_tokens), size=size, stride=stride))
    scored = [token for _, continuation in windows for token in continuation]
    firsts = set(range(0, num_tokens, stride)) if stride == size else {0}
    assert scored == [token for token in range(num_tokens) if token not in firsts]
    for context, continuation in windows:
        assert context and context + continuation == list(range(context[0], continuation[-1] + 1))
        assert len(context) + len(continuation) <= size
        assert len(context) >= size - stride or context[0] == 0


def num_shared(ours, theirs):
    """Returns how many tokens two contexts begin with in common."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))))


@given(st.lists(st.tuples(IDS, IDS), max_size=12))
def test_each_context_follows_the_one_it_shares_most_with_and_its_longest_continuation_is_first(pairs):
    order = sharing_order(pairs)
    assert sorted(order) == list(range(len(pairs)))
    contexts = [pairs[place][0] for place in order]
    for index, context in enumerate(contexts[1:], start=1):
        shared = [num_shared(context, earlier) for earlier in contexts[:index]]
        assert shared[-1] == max(shared)
        if context == contexts[index - 1]:
            assert len(pairs[order[index]][1]) <= len(pairs[order[index - 1]][1])
