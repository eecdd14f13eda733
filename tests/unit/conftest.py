"""What a unit test may not do: start a process, wait. Law: it is refused where it is done, in whichever thread."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.spawn", "os.system"}
watching = False


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Python's own audit events: nobody who starts a process gets by them."""
    if watching and event in STARTS:
        raise AssertionError(f"a unit test starts no process and waits for nothing, and this is {event}{arguments}")


sys.addaudithook(refuse)  # for good: a hook cannot be taken away


@pytest.fixture(autouse=True)
def nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests of processes and of time are in tests/integration."""
    global watching
    sleep = asyncio.sleep

    async def no_sleep(delay: float, *result: Any) -> Any:
        assert delay <= 0, f"a unit test waits for nothing, and this is asyncio.sleep({delay})"
        return await sleep(0, *result)

    def no_pause(seconds: float) -> None:
        assert seconds <= 0, f"a unit test waits for nothing, and this is time.sleep({seconds})"

    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    monkeypatch.setattr(time, "sleep", no_pause)
    watching = True
    yield
    watching = False
