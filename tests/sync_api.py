"""The sync API in the clothes of the asyncio one, so that a test is written once.

Law: what is awaited on the asyncio API is awaited here too. Each task of a test is a thread of its own here, so that
tests of concurrent tasks are tests of concurrent threads.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from distributed_state.tiers import ambient


class Worker(threading.Thread):
    """Runs the blocking calls of one task."""

    def __init__(self) -> None:
        super().__init__(name="sync-api", daemon=True)
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (item := self.calls.get()) is not None:
            loop, future, call = item
            try:
                outcome, settle = call(), _resolve
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever awaits
                outcome, settle = error, _fail
            try:
                loop.call_soon_threadsafe(settle, future, outcome)
            except RuntimeError:
                return  # the loop is closed: the test is over
            del item, future, call, outcome


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


_workers: weakref.WeakKeyDictionary[asyncio.Task[Any], Worker] = weakref.WeakKeyDictionary()


async def in_thread(call: Callable[[], Any]) -> Any:
    """Run a blocking call in the thread that stands for this task."""
    task = asyncio.current_task()
    assert task is not None
    worker = _workers.get(task)
    if worker is None:
        worker = _workers[task] = Worker()
        weakref.finalize(task, worker.calls.put, None)
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    actor, levels = ambient.actor(), ambient._levels.get()

    def as_the_task() -> Any:
        # A thread has a context of its own, and this one stands for the task.
        ambient._actor.set(actor)
        ambient._levels.set(levels)
        return call()

    worker.calls.put((loop, future, as_the_task))
    return await future


class Blocking:
    """A blocking object; what its asyncio counterpart has as `async def` is awaited."""

    def __init__(self, it: Any) -> None:
        object.__setattr__(self, "it", it)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.it, name, unwrap(value))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.it, name)
        if not callable(value) or isinstance(value, type):
            return wrap(value)
        counterpart = getattr(type(getattr(self.it, "_core", None)), name, None)
        if inspect.iscoroutinefunction(counterpart):

            async def call(*args: Any, **named: Any) -> Any:
                return wrap(await in_thread(lambda: value(*unwrap(args), **unwrap(named))))

            return call
        return lambda *args, **named: wrap(value(*unwrap(args), **unwrap(named)))

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        found = await in_thread(lambda: next(self.it, StopAsyncIteration))  # StopIteration cannot leave a future
        if found is StopAsyncIteration:
            raise StopAsyncIteration
        return found

    async def __aenter__(self) -> Any:
        return wrap(await in_thread(self.it.__enter__))

    async def __aexit__(self, *error: Any) -> Any:
        return await in_thread(lambda: self.it.__exit__(*error))

    def __getitem__(self, key: Any) -> Any:
        return wrap(self.it[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.it[key] = unwrap(value)

    def __delitem__(self, key: Any) -> None:
        del self.it[key]

    def __contains__(self, key: Any) -> bool:
        return key in self.it

    def __eq__(self, other: object) -> bool:
        return bool(self.it == unwrap(other))

    def __hash__(self) -> int:
        return hash(self.it)

    def __repr__(self) -> str:
        return f"Blocking({self.it!r})"


def core(it: Any) -> Any:
    """The asyncio object inside, for a test that has to look below an API."""
    return it.it._core if isinstance(it, Blocking) else it


def wrap(value: Any) -> Any:
    """Dress what comes out of the sync API, if it belongs to it."""
    if isinstance(value, list):
        return [wrap(item) for item in value] if any(_belongs(item) for item in value) else value
    return Blocking(value) if _belongs(value) else value


def unwrap(value: Any) -> Any:
    """Undress what goes in."""
    if isinstance(value, Blocking):
        return value.it
    if isinstance(value, (list, tuple)):
        return type(value)(unwrap(item) for item in value) if any(isinstance(v, Blocking) for v in value) else value
    if isinstance(value, dict):
        return {key: unwrap(item) for key, item in value.items()}
    return value


def _belongs(value: Any) -> bool:
    package, _, module = type(value).__module__.partition(".")
    return package == "distributed_state" and module.startswith("store.blocking")
