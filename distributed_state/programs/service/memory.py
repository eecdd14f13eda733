"""How this process takes memory from the system. Law: what is large goes back when it is free.

glibc learns from each large block that is freed to keep the next ones, and has an arena for each thread: after bodies
and answers of a megabyte each, a worker kept 150 MB more than it used.
"""

from __future__ import annotations

import ctypes

_TRIM, _MAP, _ARENAS = -1, -3, -8  # of mallopt(3)
_LARGE = 256 * 1024


def give_back() -> None:
    """Have large blocks mapped each by itself. Without glibc this does nothing."""
    try:
        tell = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    tell(_MAP, _LARGE)
    tell(_TRIM, _LARGE)
    tell(_ARENAS, 2)
