"""Products of activations with int8 or dense weights in one form for any number of rows."""

from pallas_kernels.uniform_matmul.reference import uniform_gated_reference, uniform_parts_reference
from pallas_kernels.uniform_matmul.triton import uniform_gated, uniform_parts

__all__ = ["uniform_gated", "uniform_gated_reference", "uniform_parts", "uniform_parts_reference"]
