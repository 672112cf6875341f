"""Generation arguments of lm-evaluation-harness tasks as sampling parameters, and the answer in what was generated."""

import dataclasses
from collections.abc import Mapping, Sequence

from photon_jax.errors import RequestError
from photon_jax.evals.harness import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from photon_jax.request import SamplingParams
from photon_jax.text.tokenizer import Tokenizer

_PASSED_ON = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """How one request is generated and where its answer ends.

    Attributes:
      params: for the engine.
      until: texts that end the answer, the end-of-sequence token's own among them.
    """

    params: SamplingParams
    until: list[str]


def read_gen_kwargs(
    gen_kwargs: Mapping[str, object], *, eos: str | None, max_gen_toks: int, is_thinking: bool
) -> Generation:
    """Returns what a task's generation arguments mean.

    Args:
      eos: text of the end-of-sequence token.
      max_gen_toks: where the task does not say.
      is_thinking: whether the model thinks first: the task's texts may come up in that part, and don't end it.

    Raises:
      RequestError: an argument is unknown or out of range.
    """
    kwargs = dict(normalize_gen_kwargs(dict(gen_kwargs), max_gen_toks))
    until = handle_stop_sequences(kwargs.pop("until"), eos)
    num_tokens, is_random = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample")
    temperature = kwargs.pop("temperature", None)
    unknown = sorted(set(kwargs) - set(_PASSED_ON))
    if unknown:
        raise RequestError(
            f"generation arguments {', '.join(unknown)} are unknown; known are until, max_gen_toks, do_sample, "
            f"temperature, {', '.join(_PASSED_ON)}"
        )
    params = SamplingParams(
        max_tokens=num_tokens,
        temperature=temperature if is_random else 0.0,
        stop=() if is_thinking else tuple(text for text in until if text),
        skip_special_tokens=False,  # so that a special token's text can end the answer
        **kwargs,
    )
    return Generation(params=params, until=until)


def answer_of(
    token_ids: Sequence[int], until: list[str], tokenizer: Tokenizer, think_end_token: str | int | None
) -> str:
    """Returns the text of the answer: after the thinking part if there is one, up to the first text that ends it."""
    ids, think_end = [token_id for token_id in token_ids if token_id < tokenizer.vocab_size], None  # not padding's
    if isinstance(think_end_token, int):
        if think_end_token in ids:
            ids = ids[len(ids) - ids[::-1].index(think_end_token) :]
    else:
        think_end = think_end_token
    text = tokenizer.decode(ids)
    if think_end and think_end not in text:
        text = tokenizer.decode(ids, skip_special_tokens=False)  # the text that ends it may be a special token's
    if isinstance(think_end_token, int):
        text = text.lstrip()
    return str(postprocess_generated_text(text, until, think_end))
