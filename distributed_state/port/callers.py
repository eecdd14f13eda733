"""Who calls: a task of an event loop, or blocking code. Law: blocking code is that inside a running loop, too.

A port that serves both looks here at each call. That a loop runs in this thread says nothing: a coroutine may call a
blocking method, which must not suspend, and the loop waits until it has returned.

Design: section 16.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Here(threading.local):
    held_up: asyncio.AbstractEventLoop | None = None  # by blocking code that runs now


_here = _Here()
# The loop of this thread, None if there is none: the public one raises then, which takes as long as a hot read.
running = asyncio._get_running_loop  # noqa: SLF001 - documented for who makes event loops


def loop() -> asyncio.AbstractEventLoop | None:
    """The event loop whose task calls, None if it is blocking code."""
    found = running()
    return None if found is None or found is _here.held_up else found


def held_up() -> asyncio.AbstractEventLoop | None:
    """The event loop that waits until the caller, which is blocking code, has returned; None if none does."""
    found = running()
    return found if found is _here.held_up else None


def owner() -> object:
    """The running task or thread. A task is its own also where it calls a blocking method."""
    found = running()
    return (None if found is None else asyncio.current_task(found)) or threading.current_thread()


def ended(owner: object) -> bool:
    """Whether such a task or thread has ended, or has no loop any more that could run it."""
    if isinstance(owner, asyncio.Task):
        return owner.done() or owner.get_loop().is_closed()
    return isinstance(owner, threading.Thread) and not owner.is_alive()


@contextmanager
def blocking() -> Iterator[None]:
    """Inside, this thread is blocking code, whatever loop runs in it."""
    before = _here.held_up
    _here.held_up = running()
    try:
        yield
    finally:
        _here.held_up = before


def hold_up(found: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop | None:
    """The same in two steps, for who is called often: what it returns is to be given back to it in the end."""
    before = _here.held_up
    _here.held_up = found
    return before
