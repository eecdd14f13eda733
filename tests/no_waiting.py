"""Tests marked `unit` start no process and do not wait. Law: an attempt fails where it is made, in any thread."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.spawn", "os.system"}
_watching = False


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to start a process; the interpreter reports each start as an audit event."""
    if _watching and event in STARTS:
        raise AssertionError(f"a unit test starts no process and waits for nothing, and this is {event}{arguments}")


sys.addaudithook(_refuse)  # for good: a hook cannot be removed


@contextmanager
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse processes and waits until the `with` block ends."""
    global _watching
    sleep = asyncio.sleep

    async def no_sleep(delay: float, *result: Any) -> Any:
        assert delay <= 0, f"a unit test waits for nothing, and this is asyncio.sleep({delay})"
        return await sleep(0, *result)

    def no_pause(seconds: float) -> None:
        assert seconds <= 0, f"a unit test waits for nothing, and this is time.sleep({seconds})"

    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    monkeypatch.setattr(time, "sleep", no_pause)
    _watching = True
    yield
    _watching = False
