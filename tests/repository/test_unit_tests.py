"""The fixture that keeps processes and waits out of this folder."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "act",
    [
        lambda: subprocess.run([sys.executable, "-c", "pass"]),
        lambda: os.system("true"),
        lambda: os.fork() or os._exit(0),
        lambda: time.sleep(0.001),
        lambda: asyncio.run(asyncio.sleep(0.001)),
    ],
    ids=["subprocess", "system", "fork", "sleep", "asyncio"],
)
def test_a_unit_test_that_starts_a_process_or_waits_fails(act: Callable[[], Any]) -> None:
    with pytest.raises(AssertionError, match="a unit test"):
        act()
    with ThreadPoolExecutor(1) as threads, pytest.raises(AssertionError, match="a unit test"):
        threads.submit(act).result()


def test_what_gives_way_without_waiting_is_allowed() -> None:
    time.sleep(0)
    assert asyncio.run(asyncio.sleep(0, "done")) == "done"
