"""What of a context and a continuation fits into the model's window, and the order in which many are scored."""

from collections.abc import Iterator, Sequence

from photon_jax.errors import RequestError

Pair = tuple[list[int], list[int]]  # ids of a context, and of the continuation that is scored


def fit_window(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Pair:
    """Returns the context shortened at its start so that the model reads at most `max_length` tokens.

    It reads all but the last token, which is only scored. So does the hf backend of lm-evaluation-harness.

    Raises:
      RequestError: the continuation alone is longer than the window.
    """
    if len(continuation) > max_length:
        raise RequestError(
            f"the continuation has {len(continuation)} tokens, the model's window is {max_length}; score it as a "
            "rolling log-likelihood, or raise max_length"
        )
    room = max_length + 1 - len(continuation)
    return list(context[-room:]), list(continuation)


def strided_windows(token_ids: Sequence[int], *, size: int, stride: int) -> Iterator[Pair]:
    """Yields windows of a text: `size` tokens from each place that `stride` divides, fewer at the end.

    A token is scored in the first window that it is in, unless it is the window's own first, which has nothing before
    it. With a stride below the size that is the text's first token alone, and all tokens after the first window's have
    at least size - stride tokens before them.
    """
    scored = 0
    for start in range(0, len(token_ids), stride):
        begin, end = max(scored, start + 1), min(start + size, len(token_ids))
        if end > begin:
            yield list(token_ids[start:begin]), list(token_ids[begin:end])
        scored = end
        if end == len(token_ids):
            return


def sharing_order(pairs: Sequence[Pair]) -> list[int]:
    """Returns the places of the pairs in the order to score them in: by context, token by token.

    So a context comes right after the one that it shares the longest beginning with, and the examples of a few-shot
    task are still in the prefix cache when its next question needs them, however many tasks there are. Of one context
    the longest continuation is first.
    """

    def key(index: int) -> tuple[list[int], int, list[int]]:
        context, continuation = pairs[index]
        return context, -len(continuation), continuation

    return sorted(range(len(pairs)), key=key)
