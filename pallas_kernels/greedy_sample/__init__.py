"""The likeliest token of each row of logits, with some banned and with none, in one pass over them."""

from pallas_kernels.greedy_sample.reference import greedy_sample_reference
from pallas_kernels.greedy_sample.triton import greedy_sample

__all__ = ["greedy_sample", "greedy_sample_reference"]
