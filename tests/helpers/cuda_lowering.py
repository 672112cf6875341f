"""Lowering for a CUDA device on a machine without one: finds layout and support errors of a kernel."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh


def lower_for_cuda(function, *arguments, device="NVIDIA H200", num_cores=132):
    """Returns the lowered text; tests that call this are marked lowers, or newer_jax."""
    abstract = AbstractDevice(device, num_cores, "cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
