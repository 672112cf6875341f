"""Root-mean-square normalization of rows, in one kernel that also adds the parts of a split product to them."""

from pallas_kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference
from pallas_kernels.rms_norm.triton import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "add_rms_norm_reference", "rms_norm", "rms_norm_reference"]
