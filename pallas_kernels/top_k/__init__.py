"""The greatest entries of each row, for rows of a vocabulary's length and few entries."""

from pallas_kernels.top_k.reference import top_k_reference
from pallas_kernels.top_k.triton import top_k

__all__ = ["top_k", "top_k_reference"]
