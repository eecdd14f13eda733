"""Threads for functions of the user. Law: a call has one outcome, and a thread that hangs holds nobody up."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import Any

import pytest
from below import until

from distributed_state.port import asyncio as port

_said: ContextVar[str] = ContextVar("said", default="")


def alive() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "distributed-state-handler"}


async def test_a_call_returns_or_raises_as_the_function_does_and_keeps_the_context() -> None:
    threads = port.UsersThreads()
    _said.set("here")

    def failing() -> None:
        raise ZeroDivisionError

    def stopping() -> None:
        raise StopIteration

    assert await threads.call(_said.get) == "here"
    assert (await threads.call(threading.current_thread)).daemon
    with pytest.raises(ZeroDivisionError):
        await threads.call(failing)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.call(stopping)
    threads.close()


async def test_threads_are_used_again_and_end_when_they_are_closed_or_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    before = alive()
    threads, go = port.UsersThreads(), threading.Event()
    calls = [asyncio.ensure_future(threads.call(go.wait)) for _ in range(100)]
    await until(lambda: len(alive() - before) == 100)
    go.set()
    assert await asyncio.gather(*calls) == [True] * 100
    await until(lambda: len(threads._free) == 100)
    used = await threads.call(threading.current_thread)
    assert used in alive() - before
    threads.close()
    await until(lambda: not alive() - before)
    assert await threads.call(lambda: 1) == 1
    await until(lambda: not alive() - before)
    monkeypatch.setattr(port, "_IDLE_SECONDS", 0.01)
    assert await port.UsersThreads().call(lambda: 2) == 2
    await until(lambda: not alive() - before)


async def test_a_caller_that_is_cancelled_does_not_wait_for_a_function_that_hangs() -> None:
    threads, go, began = port.UsersThreads(), threading.Event(), threading.Event()

    def hang() -> Any:
        began.set()
        return go.wait()

    call = asyncio.ensure_future(threads.call(hang))
    await until(began.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await threads.call(lambda: 1) == 1
    threads.close()
    go.set()
