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

from photon_jax.config import KVDType
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

    @classmethod
    def none(cls, name: str) -> "MatrixError":
        """Returns that of a matrix that is what it was."""
        return cls(name=name, relative_error=0.0, worst_group=0.0, clipped_share=0.0)


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
        errors.append(matrix_error(name, weight, layer))
    return errors


def matrix_error(name: str, weight: jax.Array | np.ndarray, layer: QuantizedLinear) -> MatrixError:
    """Returns how far a layer is from the weights [O I] that it was made of."""
    numbers = jax.device_get(_matrix_error(weight, layer))
    return MatrixError(name=name, **{key: float(value) for key, value in numbers.items()})


@jax.jit
def _matrix_error(weight: jax.Array | np.ndarray, layer: QuantizedLinear) -> dict[str, jax.Array]:
    weight = jnp.asarray(weight, jnp.float32)
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
        ours, theirs = (window_logprobs(params, window, config) for params in (before, after))
        totals += compare_logprobs(ours, theirs, window)
        if on_window is not None:
            on_window()
    return text_loss(totals, windows)


def window_logprobs(
    params: Params, window: np.ndarray, config: ModelConfig, *, kv_dtype: KVDType = "auto"
) -> jax.Array:  # f32[T-1 V]
    """Returns the log-probabilities of the tokens after each token of a window i32[T] but the last."""
    logprobs: jax.Array = _logprobs(params, jnp.asarray(window), config=config, kv_dtype=kv_dtype)
    return logprobs


def compare_logprobs(
    before: jax.Array,  # f32[T-1 V]
    after: jax.Array,  # f32[T-1 V]
    window: np.ndarray,  # i32[T]
) -> np.ndarray:  # f64[4]
    """Returns the sums over a window of both losses, the divergence and the agreement."""
    return np.asarray(_compare(before, after, jnp.asarray(window)), np.float64)


def text_loss(totals: np.ndarray, windows: Sequence[np.ndarray]) -> TextLoss:
    """Returns what the sums of `compare_logprobs` over all windows come to."""
    num_tokens = sum(len(window) - 1 for window in windows)
    loss_before, loss_after, divergence, agreement = totals / num_tokens
    return TextLoss(
        num_tokens=num_tokens,
        perplexity_before=math.exp(loss_before),
        perplexity_after=math.exp(loss_after),
        mean_kl=float(divergence),
        top1_agreement=float(agreement),
    )


@functools.partial(jax.jit, static_argnames=("config", "kv_dtype"))
def _logprobs(params: Params, window: jax.Array, *, config: ModelConfig, kv_dtype: KVDType) -> jax.Array:
    logits = forward(params, config, jnp.expand_dims(window[:-1], 0), kv_dtype=kv_dtype).squeeze(0)
    logprobs: jax.Array = jax.nn.log_softmax(logits, axis=-1)
    return logprobs


@jax.jit
def _compare(before: jax.Array, after: jax.Array, window: jax.Array) -> jax.Array:
    targets = jnp.expand_dims(window[1:], 1)
    losses = [-jnp.take_along_axis(logprobs, targets, axis=-1).sum() for logprobs in (before, after)]
    divergence = (jnp.exp(before) * (before - after)).sum()
    agreement = (before.argmax(axis=-1) == after.argmax(axis=-1)).sum().astype(jnp.float32)
    return jnp.stack([*losses, divergence, agreement])
