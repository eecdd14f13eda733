"""A user's coroutine, run for a blocking caller. Law: a thread that lasts keeps one loop to its end.

Design: section 16.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar, cast

T = TypeVar("T")
_here = threading.local()


def run(work: Awaitable[T], *, lasting: bool) -> T:
    """Wait for it in the caller's context. `lasting`: on the loop that this thread keeps until `close`."""

    async def whole() -> T:
        return await work

    context = copy_context()
    if _in_event_loop():
        # That loop waits for us, so it cannot run anything meanwhile.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(context.run, asyncio.run, whole()).result()
    if not lasting:
        return context.run(asyncio.run, whole())
    if getattr(_here, "runner", None) is None:
        _here.runner = asyncio.Runner()
    return cast(T, _here.runner.run(whole(), context=context))


def close() -> None:
    """End the loop that this thread keeps, if it has one."""
    if getattr(_here, "runner", None) is not None:
        _here.runner.close()


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
