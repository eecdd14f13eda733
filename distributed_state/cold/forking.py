"""fork() and SQLite. Law: no child inherits an open SQLite database.

SQLite notes in the process what its connections have locked in a file, and fork() copies the notes without the locks.
So a child whose parent was in the middle of a transaction found the database locked for ever; and one whose parent
was not believed in a lock on the file that it did not have: its parent might take the write-ahead log away under it.

A fork waits until no transaction is under way, closes what is open, and lets the next ones begin when it is done; they
connect anew.

Design: section 9.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Protocol

log = logging.getLogger(__name__)
_PATIENCE = 10.0  # seconds for the transactions that are under way
_here = threading.local()


class Pool(Protocol):
    """What keeps connections."""

    def dispose(self) -> None:
        """Close those that nobody uses now."""
        ...


class ForkGate:
    """A `with` block of it is a transaction, which a fork waits for. A block inside another one is a part of that."""

    def __init__(self) -> None:
        self.forks = 0  # that are under way, or wait
        self._transactions = 0
        self._changed = threading.Condition()
        self._pools: weakref.WeakSet[Pool] = weakref.WeakSet()

    def watch(self, pool: Pool) -> None:
        """Close what this one keeps before each fork."""
        self._pools.add(pool)

    def __enter__(self) -> None:
        depth = getattr(_here, "depth", 0)
        if not depth:
            with self._changed:
                self._changed.wait_for(lambda: not self.forks)
                self._transactions += 1
        _here.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        _here.depth -= 1
        if not _here.depth:
            with self._changed:
                self._transactions -= 1
                self._changed.notify_all()

    def before(self) -> None:
        """A fork is to happen in this thread."""
        own = getattr(_here, "depth", 0) > 0
        with self._changed:
            self.forks += 1
            if not self._changed.wait_for(lambda: self._transactions <= own, _PATIENCE):
                log.warning("forked in the middle of a transaction of SQLite: the child may find the database locked")
        for pool in list(self._pools):
            pool.dispose()

    def after_in_parent(self) -> None:
        """It happened, or failed."""
        with self._changed:
            self.forks -= 1
            self._changed.notify_all()

    def after_in_child(self) -> None:
        """Nobody else is here, and locks may be held by who is not."""
        self._changed = threading.Condition()
        self.forks = 0
        self._transactions = int(getattr(_here, "depth", 0) > 0)


GATE = ForkGate()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=GATE.before, after_in_parent=GATE.after_in_parent, after_in_child=GATE.after_in_child)
