"""Work that Ctrl-C must not stop halfway. Law: it runs to its end, whether or not the caller still waits for it.

Design: section 16.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar, cast

T = TypeVar("T")


class UninterruptibleThread:
    """A thread for what Ctrl-C must not stop halfway; Python raises that in the main thread only.

    The main thread waits in a SimpleQueue, which waits in C. A Future's wait is Python code: interrupted at a bad
    moment it leaves a lock behind, and raises RuntimeError instead of KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self._closed = False
        self._calls: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], SimpleQueue[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="distributed-state-uninterruptible", daemon=True).start()

    def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call in order, to the end, even if the caller leaves with an interrupt."""
        if self._closed or threading.current_thread() is not threading.main_thread():
            return call(*arguments)
        outcome: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()
        self._calls.put((call, arguments, outcome))
        result, error = outcome.get()
        if error is not None:
            raise error
        return cast(T, result)

    def close(self) -> None:
        """End the thread once everything before has been done."""
        self._closed = True
        self._calls.put(None)

    def _serve(self) -> None:
        while work := self._calls.get():
            call, arguments, outcome = work
            try:
                outcome.put((call(*arguments), None))
            except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
                outcome.put((None, error))
