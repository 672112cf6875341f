"""Products of activations with int8 weights, or dense ones, for few rows."""

from pallas_kernels.int8_matmul.api import dense_matmul, fused_matmul, int8_matmul, limb_matmul_parts, matmul_parts
from pallas_kernels.int8_matmul.gate import silu_mul_limbs
from pallas_kernels.int8_matmul.reference import (
    dense_matmul_reference,
    fused_matmul_reference,
    int8_matmul_reference,
    limb_matmul_reference,
)

__all__ = [
    "dense_matmul",
    "dense_matmul_reference",
    "fused_matmul",
    "fused_matmul_reference",
    "int8_matmul",
    "int8_matmul_reference",
    "limb_matmul_parts",
    "limb_matmul_reference",
    "matmul_parts",
    "silu_mul_limbs",
]
