"""All chance in the core: names that nobody else has, and waits that spread callers out.

Law: no other module of the core draws. So a run of the simulator, which seeds this, is a function of its seed.

Keys, tokens of access and nonces of encryption are not drawn here: a secret must never come from a seed.

Design: section 16.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

source: random.Random = random.SystemRandom()


def token_hex(size: int) -> str:
    """A name of so many random bytes, as hexadecimal digits.

    >>> len(token_hex(4))
    8
    """
    return source.randbytes(size).hex()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from a seed inside, in all threads of this process."""
    global source
    before, source = source, random.Random(seed)
    try:
        yield
    finally:
        source = before
