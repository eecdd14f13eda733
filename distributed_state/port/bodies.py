"""Who calls, and whether the body of its `with` still runs. Law: a body that is over is known to be.

A caller is a task of an event loop, or blocking code, and a port that serves both looks here at each call. That a loop
runs in this thread says nothing: a coroutine may call a blocking method, which must not suspend, and the loop waits
until it has returned.

A signal handler may raise at any moment: before the first line of `__enter__`, after its last one, in place of
`__exit__`. So nothing that we run at the end can be relied on. But the statement looks `__exit__` up before it calls
`__enter__`, and lets go of what it found when it has called it, or when its frame ends. An object that is made for this
look-up, and that nobody else keeps, lives exactly as long as the body. It is a `partial`, which is called without a
frame: a traceback keeps the frames that it shows, and with them what they hold.

Design: sections 8, 16.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar, cast
from weakref import ref

from distributed_state.port.waited import one_call


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


T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Token = Callable[[], object]  # a weak reference: None once it is gone


def _nobody() -> object:
    """The token of what nobody holds."""
    return None


class Body:
    """Knows whether the `with` for which something is held still runs. One that was taken by hand counts as running."""

    def __init__(self) -> None:
        self._offered: Token = _nobody
        self.token: Token | None = None

    def offer(self, token: Token) -> None:
        """A `with` may be about to enter; it is over when the token is gone."""
        self._offered = token

    def begin(self) -> None:
        """Enter: by the `with` that was offered last, or by hand."""
        self.token = None if self._offered() is None else self._offered

    def leave(self) -> None:
        """It is over."""
        self.token = _nobody

    def leave_by_hand(self) -> None:
        """It is over, unless a `with` is about to say so."""
        if self.token is None:
            self.token = _nobody

    @property
    def there(self) -> bool:
        """Whether it is not over."""
        if self.token is None:
            return True
        found = self.token()
        # A coroutine that has ended may be kept by a traceback.
        return found is not None and (not inspect.iscoroutine(found) or found.cr_frame is not None)

    def held_by(self, owner: object) -> bool:
        """Whether it is not over, and the task or thread that entered it is there.

        A `with` may outlive its thread: in a generator, which another thread continues. FastAPI has such dependencies.
        """
        outlives = self.token is not None and isinstance(owner, threading.Thread)
        return self.there and (outlives or not ended(owner))


def leaving(path: str) -> Callable[[F], F]:
    """Make an `__exit__` or `__aexit__` one whose look-up is noted in the `Body` at this path of attributes."""

    def decorate(leave: F) -> F:
        whole = one_call(leave) if inspect.iscoroutinefunction(leave) else leave  # `bounded` does not find it
        return cast(F, _Leaving(whole, path))  # to a `with` it is one

    return decorate


class _Leaving:
    def __init__(self, leave: Callable[..., Any], path: str) -> None:
        self._leave = leave
        self._suspends = inspect.iscoroutinefunction(leave)
        self._body: Callable[[object], Body] = attrgetter(path)
        self.__doc__ = leave.__doc__

    def __get__(self, holder: object, kind: type | None = None) -> Callable[..., Any]:
        if holder is None:
            return self._leave
        body = self._body(holder)
        if not self._suspends:
            leave = partial(self._leave, holder)
            body.offer(ref(leave))
            return leave
        tokens: list[Token] = []
        leave = partial(_begin, self._leave, holder, body, tokens)
        tokens.append(ref(leave))
        body.offer(tokens[0])
        return leave


def _begin(
    leave: Callable[..., Coroutine[Any, Any, T]], holder: object, body: Body, tokens: list[Token], *error: Any
) -> Coroutine[Any, Any, T]:
    """Begin to leave; the statement lets go of what it called before it awaits what that returned."""
    work = leave(holder, *error)
    if body.token is tokens[0]:
        # From here on it is over when this coroutine is. A store, and no call: nothing is interrupted before the end.
        body.token = ref(work)
    return work
