"""Token masks: which tokens each row of a step may sample, where sequences have a grammar."""

import jax
import jax.numpy as jnp
import numpy as np

from photon_jax.scheduler.plan import StepPlan

ANY_TOKEN = -1  # 32 bits that are 1


class TokenMasks:
    """Puts the masks of a step's rows on the device; they are a second upload, in steps that have some."""

    def __init__(self, *, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._open: dict[int, jax.Array] = {}  # by number of rows: masks that rule nothing out, uploaded once

    def shape(self, num_rows: int) -> jax.ShapeDtypeStruct:
        """Returns shape and dtype of the masks of so many rows."""
        return jax.ShapeDtypeStruct((num_rows, self._num_words), jnp.int32)

    def upload(self, plan: StepPlan, num_rows: int) -> jax.Array:
        """Returns i32[num_rows ceil(V/32)], bit t % 32 of word t // 32 is 1 where the row may sample token t."""
        matchers = [(row, item.seq.matcher) for row, item in enumerate(plan.scheduled) if item.samples]
        if all(matcher is None for _, matcher in matchers):
            if num_rows not in self._open:
                self._open[num_rows] = jax.device_put(self._any_token(num_rows))
            return self._open[num_rows]
        masks = self._any_token(num_rows)
        for row, matcher in matchers:
            if matcher is not None:
                masks[row] = matcher.mask
        uploaded: jax.Array = jax.device_put(masks)
        return uploaded

    def _any_token(self, num_rows: int) -> np.ndarray:
        return np.full((num_rows, self._num_words), ANY_TOKEN, np.int32)
