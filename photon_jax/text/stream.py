"""TextStream: the text of one sequence as its tokens arrive, ended by stop strings. Host only."""

import dataclasses
from collections.abc import Sequence

from photon_jax.errors import RequestError
from photon_jax.request import SamplingParams
from photon_jax.text.detokenizer import Detokenizer, TokenTexts
from photon_jax.text.stop import StopMatcher


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """What one push added to a sequence's text.

    Attributes:
      text: new text that may be shown; what is shown is never taken back.
      stop_reason: the stop string that ended the sequence; None if none did so far.
      num_tokens: how many of all output tokens so far are kept: all of them, or, once a stop string matched, those up
        to and with the token that completed it. Ids, log-probabilities and usage are to be cut there.
    """

    text: str
    stop_reason: str | None
    num_tokens: int


class TextStream:
    """Turns the output tokens of one sequence into text and watches it for stop strings.

    Attributes:
      has_stops: whether there are stop strings to watch for.
      text: all the text so far, the deltas joined.
    """

    def __init__(self, tokenizer: TokenTexts | None, params: SamplingParams) -> None:
        """Prepares a stream; prompt text plays no part in it.

        Args:
          tokenizer: None for a checkpoint without one: the text is then empty.
          params: its stop, include_stop_str_in_output, min_tokens and skip_special_tokens are used.

        Raises:
          RequestError: stop strings are given without a tokenizer.
        """
        if tokenizer is None and params.stop:
            raise RequestError(
                f"stop strings {list(params.stop)!r} need a tokenizer and the checkpoint has none; use stop_token_ids"
            )
        self._detokenizer = (
            None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        )
        self._matcher = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self.has_stops = bool(params.stop)
        self.text = ""
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._stop_reason: str | None = None
        self._ended = False

    def push(self, token_ids: Sequence[int], finished: bool, *, ended_by_stop_id: bool = False) -> TextDelta:
        """Returns what the next tokens add to the text.

        After a stop string matched, or after `finished`, further tokens change nothing.

        Args:
          token_ids: output tokens since the last push; may be empty.
          finished: whether the sequence ends with them, so that no text is to be held back any longer.
          ended_by_stop_id: whether the last of token_ids is the stop or end-of-sequence id that ended the sequence:
            the token counts, its text is left out unless include_stop_str_in_output.
        """
        if self._ended:
            return TextDelta(text="", stop_reason=self._stop_reason, num_tokens=self._num_tokens)
        shown = self._texts(token_ids, ended_by_stop_id and not self._keep_stop)
        if finished and not self._ended:
            if self._detokenizer is not None:
                shown.append(self._watch(self._detokenizer.flush()))
            if not self._ended:
                shown.append(self._matcher.flush())
            self._ended = True
        text = "".join(shown)
        self.text += text
        return TextDelta(text=text, stop_reason=self._stop_reason, num_tokens=self._num_tokens)

    def _texts(self, token_ids: Sequence[int], hides_last: bool) -> list[str]:
        """Returns what the tokens, up to one that completes a stop string, let out; they are counted."""
        if self._detokenizer is None:
            self._num_tokens += len(token_ids)
            return []
        with_text = token_ids[: len(token_ids) - hides_last]
        if not self.has_stops:  # nothing depends on which token brought what
            self._num_tokens += len(token_ids)
            return [self._detokenizer.push(with_text)]
        if len(with_text) > 1 and self._num_tokens >= self._min_tokens:  # most tokens complete no stop string
            saved = self._detokenizer.save(), self._matcher.save()
            match = self._matcher.push(self._detokenizer.push(with_text))
            if match.stop is None:
                self._num_tokens += len(token_ids)
                return [match.text]
            self._detokenizer.restore(saved[0])
            self._matcher.restore(saved[1])
        shown = []
        for token_id in with_text:
            self._num_tokens += 1
            shown.append(self._watch(self._detokenizer.push([token_id])))
            if self._ended:
                return shown
        self._num_tokens += hides_last
        return shown

    def _watch(self, text: str) -> str:
        """Returns what the stop strings let out of the text of the latest token."""
        if self._num_tokens <= self._min_tokens:
            return text
        match = self._matcher.push(text)
        if match.stop is not None:
            self._stop_reason, self._ended = match.stop, True
        return match.text
