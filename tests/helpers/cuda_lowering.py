"""Lowering for a CUDA device on a machine without one: finds layout and support errors of a kernel."""

import jax
from jax.sharding import AbstractMesh


def lower_for_cuda(function, *arguments, device="NVIDIA H200", num_cores=132):
    """Returns the lowered text, or None after saying NOT RUN where this JAX can't describe a device it hasn't."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        print(f"NOT RUN: jax {jax.__version__} has no AbstractDevice to lower for {device}")
        return None
    abstract = jax.sharding.AbstractDevice(device, num_cores, "cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
