"""Names of devices as file-name-safe strings."""

import re

import jax


def device_name(device: jax.Device | None = None) -> str:
    """Returns the kind of a device (the default one if none is given), such as `nvidia_h200` or `cpu`."""
    kind = (device or jax.devices()[0]).device_kind
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")
