"""Root-mean-square normalization of rows, in one kernel."""

from pallas_kernels.rms_norm.reference import rms_norm_reference
from pallas_kernels.rms_norm.triton import rms_norm

__all__ = ["rms_norm", "rms_norm_reference"]
