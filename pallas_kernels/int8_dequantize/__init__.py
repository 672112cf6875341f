"""Int8 weights turned back into floating-point numbers, for products of many rows."""

from pallas_kernels.int8_dequantize.reference import int8_dequantize_reference
from pallas_kernels.int8_dequantize.triton import int8_dequantize

__all__ = ["int8_dequantize", "int8_dequantize_reference"]
