"""Finds out which task or thread calls, and whether the body of a `with` still runs. Law: the end of a body is noticed.

A caller is a task of an event loop, or blocking code; a port that serves both checks here at each call. A running loop
in this thread does not prove that the caller is a task: a coroutine may call a blocking method, which must not suspend
and blocks the loop until it has returned.

A signal handler may raise at any moment: before the first line of `__enter__`, after its last one, or in place of
`__exit__`. So it is not certain that `__exit__` runs at the end. But the `with` statement looks up `__exit__` before it
calls `__enter__`, and drops its reference after it has called `__exit__`, or when its frame ends. An object that is
made for this look-up, and referenced nowhere else, lives exactly as long as the body. The object is a `partial`,
because its call has no frame: a traceback would keep the frame, and the object with it.

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
    held_up: asyncio.AbstractEventLoop | None = None  # the loop that is blocked by blocking code now


_here = _Here()
# The loop of this thread, or None. The public function raises instead, which takes as long as a hot read.
running = asyncio._get_running_loop  # noqa: SLF001 - documented for implementers of event loops


def loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop whose task calls, None for blocking code."""
    found = running()
    return None if found is None or found is _here.held_up else found


def held_up() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that is blocked until the caller, blocking code, has returned; None if there is none."""
    found = running()
    return found if found is _here.held_up else None


def owner() -> object:
    """Return the running task or thread; the task also where it calls a blocking method."""
    found = running()
    return (None if found is None else asyncio.current_task(found)) or threading.current_thread()


def ended(owner: object) -> bool:
    """Whether this task or thread has ended, or its loop, which could run it, is closed."""
    if isinstance(owner, asyncio.Task):
        return owner.done() or owner.get_loop().is_closed()
    return isinstance(owner, threading.Thread) and not owner.is_alive()


@contextmanager
def blocking() -> Iterator[None]:
    """Let this thread count as blocking code inside the block, even if a loop runs in it."""
    before = _here.held_up
    _here.held_up = running()
    try:
        yield
    finally:
        _here.held_up = before


def hold_up(found: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop | None:
    """Like `blocking`, in two calls, as it is called often: pass the returned value to the second call."""
    before = _here.held_up
    _here.held_up = found
    return before


class Interruptions:
    """Interruptions of blocking code that it has not noticed yet. `check` raises those of the caller's context.

    The bodies of a context are known to who made their guards, and a thread serves many contexts one after the other.
    So a port only counts, and while any is pending its calls ask.
    """

    def __init__(self) -> None:
        self.pending = 0
        self.check: Callable[[], None] = lambda: None
        self._mutex = threading.Lock()

    def count(self, more: int) -> None:
        """Count interruptions that were made, or less by one that was noticed."""
        with self._mutex:
            self.pending += more


interruptions = Interruptions()

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Token = Callable[[], object]  # a weak reference: None once it is gone


def _nobody() -> object:
    """Return None: the token of a body that has ended."""
    return None


class Body:
    """Whether the `with` that holds a resource still runs. A body that was entered by hand counts as running."""

    def __init__(self) -> None:
        self._offered: Token = _nobody
        self.token: Token | None = None

    def offer(self, token: Token) -> None:
        """Note that a `with` looked up `__exit__` and may enter; its body has ended when the token is dead."""
        self._offered = token

    def begin(self) -> None:
        """Enter, by the `with` that was offered last, or by hand."""
        self.token = None if self._offered() is None else self._offered

    def leave(self) -> None:
        """End the body."""
        self.token = _nobody

    def leave_by_hand(self) -> None:
        """End the body if it was entered by hand; a `with` calls `leave` itself."""
        if self.token is None:
            self.token = _nobody

    @property
    def there(self) -> bool:
        """Whether the body has not ended."""
        token = self.token
        if token is None:
            return True
        # No variable holds what the token names: the traceback of an interruption here would keep that. A traceback may
        # also keep a coroutine that has ended, which has no frame.
        return token() is not None and getattr(token(), "cr_frame", token) is not None

    def held_by(self, owner: object) -> bool:
        """Whether the body has not ended, and the task or thread that entered it still exists.

        A `with` may outlive its thread: in a generator that another thread continues. FastAPI has such dependencies.
        """
        outlives = self.token is not None and isinstance(owner, threading.Thread)
        return self.there and (outlives or not ended(owner))


def leaving(path: str) -> Callable[[F], F]:
    """Decorate an `__exit__` or `__aexit__` so that looking it up is noted in the `Body` at this path of attributes."""

    def decorate(leave: F) -> F:
        whole = one_call(leave) if inspect.iscoroutinefunction(leave) else leave  # `bounded` does not find it
        return cast(F, _Leaving(whole, path))  # for a `with` it is one

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
    """Begin to leave; the statement drops its reference to `leave` before it awaits the result."""
    work = leave(holder, *error)
    if body.token is tokens[0]:
        # From here on the body ends when this coroutine does. An assignment cannot be interrupted; a call could.
        body.token = ref(work)
    return work
