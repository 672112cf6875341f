"""Rotary embedding of new tokens, and their keys and values into the paged cache, in one kernel."""

from pallas_kernels.rope_append.reference import rope_append_reference
from pallas_kernels.rope_append.triton import rope_append

__all__ = ["rope_append", "rope_append_reference"]
