"""What quantizing costs: an error table by matrix, and on a text perplexity, divergence and agreement with the model
that was quantized."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from photon_jax.errors import CheckpointError
from photon_jax.models.config import ModelConfig, QuantizationConfig
from photon_jax.models.decoder import forward
from photon_jax.models.params import Params
from photon_jax.quantization.int8 import Q_MAX, QuantizedLinear, dequantize, group_inputs
from photon_jax.quantization.weights import find_matrix, matrices

REPORT_NAME = "quantization_report.json"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatrixError:
    """How far one matrix is from what it was.

    Attributes:
      relative_error: root of the squared error over the squared weights.
      worst_group: the largest relative error of a group.
      clipped_share: share of the weights that lie beyond the largest value of their group by more than half a scale.
    """

    name: str
    relative_error: float
    worst_group: float
    clipped_share: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextLoss:
    """What a text says about a quantized model beside the one that it was made of.

    Attributes:
      num_tokens: that were predicted.
      perplexity_before, perplexity_after: of the text.
      mean_kl: divergence of the next-token distributions, after from before, in nats a token.
      top1_agreement: share of the positions where both have the same likeliest token.
    """

    num_tokens: int
    perplexity_before: float
    perplexity_after: float
    mean_kl: float
    top1_agreement: float

    @property
    def perplexity_loss(self) -> float:
        """Returns by what share the perplexity rose."""
        return self.perplexity_after / self.perplexity_before - 1.0

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity_before:.4f} before, {self.perplexity_after:.4f} after "
            f"({self.perplexity_loss:+.3%}) over {self.num_tokens} tokens; mean KL {self.mean_kl:.6f} nats; "
            f"same likeliest token at {self.top1_agreement:.2%}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationReport:
    """What quantizing a model cost.

    Attributes:
      is_calibrated: whether scales were searched for with a text.
      matrices: the error of each matrix, beside the weights after scaling.
      text_loss: what the evaluation text says; None without one.
    """

    is_calibrated: bool
    matrices: tuple[MatrixError, ...]
    text_loss: TextLoss | None

    def to_json(self) -> bytes:
        """Returns the numbers as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    def __str__(self) -> str:
        worst = max(self.matrices, key=lambda matrix: matrix.relative_error)
        how = "scales searched for with a text" if self.is_calibrated else "plain rounding"
        errors = f"{how}; relative error at most {worst.relative_error:.3%} ({worst.name})"
        return errors if self.text_loss is None else f"{errors}; {self.text_loss}"


def read_report(folder: Path) -> QuantizationReport | None:
    """Returns the report of an int8 checkpoint, None where the folder holds none.

    Raises:
      CheckpointError: the file is damaged.
    """
    path = folder / REPORT_NAME
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        text_loss = fields["text_loss"]
        return QuantizationReport(
            is_calibrated=fields["is_calibrated"],
            matrices=tuple(MatrixError(**matrix) for matrix in fields["matrices"]),
            text_loss=None if text_loss is None else TextLoss(**text_loss),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}; quantize again or remove it") from error


def matrix_errors(dense: Params, quantized: Params, quantization: QuantizationConfig) -> list[MatrixError]:
    """Returns the error of each matrix.

    Args:
      dense: what `quantize_params` was given.
      quantized: what it returned.
      quantization: likewise.
    """
    errors = []
    for name, weight in matrices(dense, quantization):
        layer = find_matrix(quantized, name)
        assert isinstance(layer, QuantizedLinear), f"{name} is int8"
        numbers = jax.device_get(_matrix_error(weight, layer))
        errors.append(MatrixError(name=name, **{key: float(value) for key, value in numbers.items()}))
    return errors


@jax.jit
def _matrix_error(weight: jax.Array, layer: QuantizedLinear) -> dict[str, jax.Array]:
    weight = weight.astype(jnp.float32)
    error = weight - dequantize(layer.q, layer.scale, group_size=layer.group_size)
    squared_error, squared = (
        group_inputs(jnp.square(array), layer.group_size).sum(axis=-1) for array in (error, weight)
    )
    beyond = jnp.abs(group_inputs(weight, layer.group_size)) > jnp.expand_dims(layer.scale, -1) * (Q_MAX + 0.5)
    return {
        "relative_error": _root_share(squared_error.sum(), squared.sum()),
        "worst_group": _root_share(squared_error, squared).max(),
        "clipped_share": beyond.sum().astype(jnp.float32) / weight.size,
    }


def _root_share(part: jax.Array, whole: jax.Array) -> jax.Array:
    return jnp.sqrt(part / jnp.where(whole > 0.0, whole, 1.0))


def error_table(errors: Sequence[MatrixError]) -> str:
    """Returns a table to print, one line a matrix."""
    width = max(len("matrix"), *(len(error.name) for error in errors))
    lines = [f"{'matrix':{width}}  relative error  worst group  clipped"]
    for error in errors:
        lines.append(
            f"{error.name:{width}}  {error.relative_error:14.4%}  {error.worst_group:11.4%}  {error.clipped_share:7.4%}"
        )
    return "\n".join(lines)


def text_windows(token_ids: Sequence[int], *, size: int, num_windows: int | None = None) -> list[np.ndarray]:
    """Returns the whole windows of a text, without overlap: i32[size] each."""
    ids = np.asarray(token_ids, np.int32)
    count = len(ids) // size if num_windows is None else min(num_windows, len(ids) // size)
    return list(ids[: count * size].reshape(count, size))


def compare_on_text(
    before: Params,
    after: Params,
    config: ModelConfig,
    windows: Sequence[np.ndarray],
    *,
    on_window: Callable[[], None] | None = None,
) -> TextLoss:
    """Returns what the text says; the first token of each window is not predicted.

    Args:
      before, after: parameters of one model, dense or quantized.
      config: of the model.
      windows: token ids i32[T] of pieces of the text, each read from position 0, all of one length.
      on_window: called after each.
    """
    totals = np.zeros(4)
    for window in windows:
        totals += np.asarray(_compare_window(before, after, jnp.asarray(window), config=config), np.float64)
        if on_window is not None:
            on_window()
    num_tokens = sum(len(window) - 1 for window in windows)
    loss_before, loss_after, divergence, agreement = totals / num_tokens
    return TextLoss(
        num_tokens=num_tokens,
        perplexity_before=math.exp(loss_before),
        perplexity_after=math.exp(loss_after),
        mean_kl=float(divergence),
        top1_agreement=float(agreement),
    )


@functools.partial(jax.jit, static_argnames=("config",))
def _compare_window(before: Params, after: Params, window: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Returns the sums over a window of both losses, the divergence and the agreement, f32[4]."""
    inputs, targets = jnp.expand_dims(window[:-1], 0), jnp.expand_dims(window[1:], 1)
    ours, theirs = (
        jax.nn.log_softmax(forward(params, config, inputs).squeeze(0), axis=-1) for params in (before, after)
    )
    losses = [-jnp.take_along_axis(logprobs, targets, axis=-1).sum() for logprobs in (ours, theirs)]
    divergence = (jnp.exp(ours) * (ours - theirs)).sum()
    agreement = (ours.argmax(axis=-1) == theirs.argmax(axis=-1)).sum().astype(jnp.float32)
    return jnp.stack([*losses, divergence, agreement])
