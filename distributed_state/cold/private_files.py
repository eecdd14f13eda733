"""Files that hold users' data. Law: one that is made here is its owner's alone, and one that is there is left as it is.

The mode is given when the file is made, never changed afterwards: there is no moment in which others could open it.

Design: section 19.
"""

from __future__ import annotations

import os
from contextlib import suppress

_OWNERS_ALONE = 0o600


def opener(path: str, flags: int) -> int:
    """Open a file for `open(path, "w", opener=opener)`: a new one is readable for its owner alone."""
    return os.open(path, flags, _OWNERS_ALONE)


def create(path: str) -> None:
    """Make an empty file unless something is there. That it cannot be made is left to whoever opens it."""
    # Never opened if it is there: to close it would give up the locks that this process has on it, SQLite's too.
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    with suppress(OSError):
        # What a link names: O_EXCL refuses the link itself, and SQLite would make the file that it leads to.
        os.close(os.open(os.path.realpath(path), flags, _OWNERS_ALONE))
