"""Sampling controls written with dictionaries in float64; draws of the sampler under controls."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from helpers.sampling_reference import head_params, run_sampler, sampling_inputs

from photon_jax.engine.controls import _control_row, _neutral_row
from photon_jax.ops.controls import Controls
from photon_jax.request import Request, SamplingParams
from photon_jax.scheduler.sequence import SequenceState


def controlled_logits(
    logits: Iterable[float],
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    allowed_token_ids: Iterable[int] | None = None,
    bad_words: Iterable[Sequence[int]] = (),
    banned: Iterable[int] = (),
) -> dict[int, float]:
    """Returns the logit of every token that may be sampled next; `banned` are stop ids before min_tokens."""
    scores = {token: float(logit) for token, logit in enumerate(logits)}
    for token in {*prompt, *output}:
        scores[token] = scores[token] / repetition_penalty if scores[token] > 0 else scores[token] * repetition_penalty
    for token, count in collections.Counter(output).items():
        scores[token] -= presence_penalty + frequency_penalty * count
    for token, bias in (logit_bias or {}).items():
        scores[token] += bias
    bad_words = [tuple(word) for word in bad_words]
    forbidden = {*banned, *(word[0] for word in bad_words if len(word) == 1)}
    allowed = set(scores if allowed_token_ids is None else allowed_token_ids) - forbidden
    scores = {token: score for token, score in scores.items() if token in allowed}
    ends = {word[-1] for word in bad_words if len(word) > 1 and tuple(output[1 - len(word) :]) == word[:-1]}
    rest = {token: score for token, score in scores.items() if token not in ends}
    return rest or scores


def as_row(scores: Mapping[int, float], vocab_size: int) -> np.ndarray:
    """Returns float64[V] logits with -inf at tokens that may not be sampled."""
    row = np.full(vocab_size, -np.inf)
    row[list(scores)] = list(scores.values())
    return row


def make_sequence(prompt: Sequence[int], output: Sequence[int], **params: object) -> SequenceState:
    """Returns a sequence as the engine has it; bad_words are lists of token ids."""
    resolved = SamplingParams(**params).resolve({})
    request = Request(
        request_id="r", prompt_token_ids=tuple(prompt), params=resolved, bad_word_ids=tuple(resolved.bad_words)
    )
    return SequenceState(
        request=request, arrival=0, token_ids=[*prompt, *output], max_num_slots=1000, max_num_blocks=10
    )


def make_controls(
    *sequences: SequenceState, vocab_size: int, processors: Sequence[object] = (), states: Sequence[object] = ()
) -> Controls:
    """Returns controls that hold sequence i in slot i + 1."""
    rows = [_neutral_row(vocab_size), *(_control_row(seq, vocab_size) for seq in sequences)]
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    any_token = jnp.full((1, -(-vocab_size // 32)), -1, jnp.int32)
    return Controls(state=state, processors=tuple(processors), processor_states=tuple(states), token_masks=any_token)


def draw_controlled(
    hidden: np.ndarray,
    head: np.ndarray,
    controls: Controls | None,
    *,
    slots: object = 1,
    processor_ids: object = 0,
    tile: int | None = 8,
    is_greedy: bool = False,
    token_masks: np.ndarray | None = None,
    **fields: object,
) -> tuple[np.ndarray, np.ndarray, tuple[object, ...]]:
    """Returns token_ids i32[B], logprobs f32[B 3] and processor states of hidden states f32[B D]."""
    count = len(hidden)
    inputs = sampling_inputs(count, **fields)._replace(
        control_slots=jnp.broadcast_to(jnp.asarray(slots, jnp.int32), count),
        processor_ids=jnp.broadcast_to(jnp.asarray(processor_ids, jnp.int32), count),
        logits_indices=jnp.arange(count, dtype=jnp.int32),
    )
    if controls is not None:
        masks = controls.token_masks if token_masks is None else jnp.asarray(token_masks)
        controls = dataclasses.replace(controls, token_masks=jnp.broadcast_to(masks, (count, masks.shape[1])))
    arrays = (jnp.asarray(hidden), inputs, head_params(head), jnp.int32(count), controls)
    token_ids, logprobs, _, _, states = run_sampler(*arrays, tile=tile, is_greedy=is_greedy)
    return np.asarray(token_ids), np.asarray(logprobs), jax.tree.map(np.asarray, states)
