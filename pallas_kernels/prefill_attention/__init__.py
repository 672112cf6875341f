"""Causal attention of ragged chunks over a paged KV cache."""

from pallas_kernels.prefill_attention.api import prefill_attention
from pallas_kernels.prefill_attention.reference import prefill_attention_reference

__all__ = ["prefill_attention", "prefill_attention_reference"]
