"""Threads that tasks lend what blocks to. Law: none of these pools is asyncio's own, which a user's work may fill.

Design: section 16.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


class Pools:
    """A pool for each kind of work, as each may be held up by what does not hold up the others."""

    def __init__(self) -> None:
        self.sql = ThreadPoolExecutor(max_workers=4, thread_name_prefix="distributed-state-sql")
        self.handlers = ThreadPoolExecutor(max_workers=64, thread_name_prefix="distributed-state-handler")
        self.looks = ThreadPoolExecutor(max_workers=1, thread_name_prefix="distributed-state-look")
        # All that ask SQL are together fewer than the connections to it, of which the background needs some.
        self.passes = ThreadPoolExecutor(max_workers=4, thread_name_prefix="distributed-state-pass")
        self.starts = ThreadPoolExecutor(max_workers=4, thread_name_prefix="distributed-state-start")

    def close(self) -> threading.Thread:
        """Begin nothing more. The thread ends when what asks SQL has: its connections must not outlive the archive."""
        self.handlers.shutdown(wait=False)
        self.looks.shutdown(wait=False)
        ending = threading.Thread(target=self._end, name="distributed-state-closing", daemon=True)
        ending.start()
        return ending

    def _end(self) -> None:
        self.passes.shutdown()
        self.starts.shutdown()
        self.sql.shutdown()
