"""A database that was away when its store was opened. Law: before it was looked at, nothing is read or written there.

Whether its tables are of this release, and whether it is the one that belongs to this Redis, is found out by the first
who needs it once it is there; the others wait for that a moment, and then are told that it is away.

Design: section 9.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from distributed_state.errors import ColdUnavailable

log = logging.getLogger(__name__)
_WAIT_SECONDS = 1.0


class Opening:
    """What has to be found out about a database before it is used. Without `prove` that was done."""

    def __init__(self, prove: Callable[[], None] | None = None) -> None:
        self._prove = prove
        self.forget()

    def forget(self) -> None:
        """In a forked child: nobody else is at it here."""
        self._lock = threading.Lock()
        self._here = threading.local()

    def require(self, name: str) -> None:
        """Look at the database, unless somebody did.

        Raises ColdUnavailable while it is away, and ConfigurationError, each time, if it is not the right one.
        """
        if self._prove is None or getattr(self._here, "proving", False):
            return
        if not self._lock.acquire(timeout=_WAIT_SECONDS):
            raise ColdUnavailable(f"{name}: was away when the store was opened, and is being looked at")
        try:
            if self._prove is not None:
                self._here.proving = True
                self._prove()
                self._prove = None
                log.warning("%s: is there; it was away when the store was opened", name)
        finally:
            self._here.proving = False
            self._lock.release()
