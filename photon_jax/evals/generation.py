"""Generation arguments of lm-evaluation-harness tasks as sampling parameters, and the answer in what was generated."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from photon_jax.errors import RequestError
from photon_jax.evals.harness import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from photon_jax.request import SamplingParams
from photon_jax.text.tokenizer import Tokenizer

# of the hf backend, as tasks write them out -> the one value of each that changes nothing
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}
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
    kwargs = _normalized(gen_kwargs, max_gen_toks)
    until = handle_stop_sequences(kwargs.pop("until"), eos)
    num_tokens, is_random = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample")
    temperature = kwargs.pop("temperature", None)
    for name, value in _NEUTRAL.items():
        if name in kwargs and kwargs.pop(name) != value:
            raise RequestError(
                f"generation argument {name} must be {value}, got {gen_kwargs[name]!r:.100}; there is no beam search, "
                "and one answer a request: leave it out"
            )
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


def for_repeat(generation: Generation, number: int) -> Generation:
    """Returns how the number-th answer, from 0, to one request is generated: a seed would give the same one again."""
    seed = generation.params.seed
    if seed is None or number == 0:
        return generation
    return dataclasses.replace(generation, params=dataclasses.replace(generation.params, seed=seed + number))


def _normalized(gen_kwargs: Mapping[str, object], max_gen_toks: int) -> dict[str, Any]:
    """Returns the arguments under the harness's own names; an `until` that is null is none."""
    given = {name: value for name, value in gen_kwargs.items() if name != "until" or value is not None}
    try:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(given, max_gen_toks))
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"generation arguments hold what is no number: {error}; max_gen_toks must be a whole number, temperature "
            f"a number, got {dict(gen_kwargs)!r:.200}"
        ) from error
    if not all(isinstance(text, str) for text in kwargs["until"]):
        raise RequestError(f"generation argument until must be a text or a list of texts, got {given['until']!r:.100}")
    if kwargs["max_gen_toks"] < 1:
        raise RequestError(f"generation argument max_gen_toks must be at least 1, got {kwargs['max_gen_toks']}")
    return kwargs


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
