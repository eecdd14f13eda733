"""Signals of the operating system. Law: a handler only notifies; the handler that was there before is put back.

Design: section 16.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

HAS_RELOAD = hasattr(signal, "SIGHUP")  # not so on Windows


@contextmanager
def listening(handlers: Mapping[str, Callable[[], Any]]) -> Iterator[bool]:
    """Call these, by the signal's name, until `with` ends; False outside the main thread, which alone gets them."""
    ours = threading.current_thread() is threading.main_thread()
    before: dict[int, Any] = {}
    try:
        for name, call in handlers.items() if ours else ():
            number = getattr(signal, name, None)
            if number is not None:
                before[number] = signal.signal(number, lambda *_, call=call: call())
        yield ours
    finally:
        for number, handler in before.items():
            # None: it was set by C code, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
