"""Pallas kernels of photon_jax. They import JAX alone and work without the engine."""

from pallas_kernels.common.errors import KernelUnsupportedError
from pallas_kernels.common.limbs import LimbRows, split_limbs_reference
from pallas_kernels.common.parts import add_parts
from pallas_kernels.greedy_sample import greedy_sample, greedy_sample_reference
from pallas_kernels.int8_dequantize import int8_dequantize, int8_dequantize_reference
from pallas_kernels.int8_matmul import (
    fused_matmul,
    fused_matmul_reference,
    int8_matmul,
    int8_matmul_reference,
    limb_matmul_parts,
    limb_matmul_reference,
    matmul_parts,
    silu_mul_limbs,
)
from pallas_kernels.paged_attention import (
    append_attention,
    append_attention_reference,
    paged_attention_reference,
)
from pallas_kernels.prefill_attention import prefill_attention, prefill_attention_reference
from pallas_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from pallas_kernels.rope_append import rope_append, rope_append_reference
from pallas_kernels.top_k import top_k, top_k_reference
from pallas_kernels.uniform_matmul import uniform_gated, uniform_gated_reference, uniform_parts, uniform_parts_reference

__all__ = [
    "KernelUnsupportedError",
    "LimbRows",
    "add_parts",
    "add_rms_norm",
    "add_rms_norm_reference",
    "append_attention",
    "append_attention_reference",
    "fused_matmul",
    "fused_matmul_reference",
    "greedy_sample",
    "greedy_sample_reference",
    "int8_dequantize",
    "int8_dequantize_reference",
    "int8_matmul",
    "int8_matmul_reference",
    "limb_matmul_parts",
    "limb_matmul_reference",
    "matmul_parts",
    "paged_attention_reference",
    "prefill_attention",
    "prefill_attention_reference",
    "rms_norm",
    "rms_norm_reference",
    "rope_append",
    "rope_append_reference",
    "silu_mul_limbs",
    "split_limbs_reference",
    "top_k",
    "top_k_reference",
    "uniform_gated",
    "uniform_gated_reference",
    "uniform_parts",
    "uniform_parts_reference",
]
