"""Our kernels where there is no GPU: every call of a kernel is interpreted."""

import pytest
from jax.experimental import pallas as pl


def interpret_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has all kernels interpreted that are traced from now on, until the test ends."""
    call = pl.pallas_call

    def interpret(*args, **kwargs):
        return call(*args, **kwargs | {"interpret": True})

    monkeypatch.setattr(pl, "pallas_call", interpret)
