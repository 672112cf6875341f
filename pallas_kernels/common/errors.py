"""The error that a kernel raises for what its backend can't do."""


class KernelUnsupportedError(NotImplementedError):
    """A backend can't compute these shapes or dtypes on this device; the reference can."""
