"""Names that tell requests apart."""

import random


def random_id() -> str:
    """Returns 32 hexadecimal digits. They are no secret, and come without a system call.

    In such a call the event loop lets other threads run, and may wait for milliseconds until it goes on.
    """
    return f"{random.getrandbits(128):032x}"
