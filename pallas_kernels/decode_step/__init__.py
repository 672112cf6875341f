"""A whole decode step from the kernels alone, to measure what they are worth together."""
