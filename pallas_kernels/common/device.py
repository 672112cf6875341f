"""Names of devices as file-name-safe strings."""

import re

import jax


def device_name(device: jax.Device | None = None) -> str:
    """Returns the kind of a device (the default one if none is given), such as `nvidia_h200` or `cpu`."""
    kind = (device or jax.devices()[0]).device_kind
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")


def has_mosaic(device: jax.Device | None = None) -> bool:
    """Returns whether our Mosaic kernels run on a device (the default one if none is given): on Hopper, and with a JAX
    of at least 0.11, the oldest that they were measured with."""
    capability = getattr(device or jax.devices()[0], "compute_capability", "")
    return capability == "9.0" and jax.__version_info__ >= (0, 11)
