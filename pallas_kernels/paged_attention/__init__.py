"""Decode attention over a paged KV cache, to which it appends the new tokens."""

from pallas_kernels.paged_attention.api import append_attention
from pallas_kernels.paged_attention.reference import append_attention_reference, paged_attention_reference

__all__ = ["append_attention", "append_attention_reference", "paged_attention_reference"]
