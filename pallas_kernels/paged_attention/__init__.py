"""Decode attention over a paged KV cache."""

from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.reference import paged_attention_reference

__all__ = ["paged_attention", "paged_attention_reference"]
