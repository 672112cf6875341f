"""Finite weights: a NaN or an infinity in a checkpoint turns every output into noise, so loading looks for them."""

import ml_dtypes
import numpy as np

from photon_jax.errors import CheckpointError

# dtype -> (signed and unsigned integers of its size, bits of +infinity)
_BITS: dict[np.dtype, tuple[type[np.signedinteger], type[np.unsignedinteger], int]] = {
    np.dtype(np.float64): (np.int64, np.uint64, 0x7FF0_0000_0000_0000),
    np.dtype(np.float32): (np.int32, np.uint32, 0x7F80_0000),
    np.dtype(np.float16): (np.int16, np.uint16, 0x7C00),
    np.dtype(ml_dtypes.bfloat16): (np.int16, np.uint16, 0x7F80),
}


def is_finite(tensor: np.ndarray) -> bool:
    """Returns whether no element is NaN or infinite; makes no copy.

    Read as integers, finite floats lie below the bits of infinity: positive ones among the signed integers, negative
    ones, whose sign bit is the highest, among the unsigned. Two maxima run at the speed of memory.
    """
    if tensor.size == 0:
        return True
    signed, unsigned, infinity = _BITS[tensor.dtype]
    sign_bit = int(np.iinfo(signed).max) + 1
    return int(tensor.view(signed).max()) < infinity and int(tensor.view(unsigned).max()) < sign_bit + infinity


def check_finite(name: str, tensor: np.ndarray) -> None:
    """Raises CheckpointError, with the tensor's name and how many elements are wrong, unless all are finite."""
    if is_finite(tensor):
        return
    num_bad = tensor.size - int(np.count_nonzero(np.isfinite(tensor)))
    raise CheckpointError(
        f"tensor {name} has {num_bad} of {tensor.size} elements that are NaN or infinite; "
        "the file is damaged or its training diverged: fetch it again or use another checkpoint"
    )
