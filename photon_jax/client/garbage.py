"""What Python's collector of garbage looks at while requests run. Host only."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """Keeps the collector from walking through all that is there at the begin, which takes longer than many steps.

    What is made inside is collected as ever, and at the end all is as before. Where two overlap, the one that ends
    first ends both, which costs time alone.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
