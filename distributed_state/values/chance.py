"""All randomness of the core: unique names, and waits that spread callers out.

Law: no other module of the core uses randomness. So a run of the simulator, which seeds this, depends on its seed
alone.

Keys, access tokens and nonces are not made here, because a secret must never depend on a seed.

Design: section 16.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

source: random.Random = random.SystemRandom()


def token_hex(size: int) -> str:
    """A name of `size` random bytes, as hexadecimal digits.

    >>> len(token_hex(4))
    8
    """
    return source.randbytes(size).hex()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Use a seed within this block, in all threads of this process."""
    global source
    before, source = source, random.Random(seed)
    try:
        yield
    finally:
        source = before
