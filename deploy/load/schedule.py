"""When requests are to be sent. Law: nothing that a server does, or does not, moves the time of a later request.

So latency is counted from when a request was due (Gil Tene, "How NOT to Measure Latency"): a server that stalls for a
second shows in all the requests that were due in it, not in one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator


def arrivals(rate: float, seconds: float, *, process: int = 0, of: int = 1, burst: float = 0.0) -> Iterator[float]:
    """The times of one process' requests, in seconds from the start; the processes together make the constant rate.

    With `burst`, all requests of so many seconds are due at once, at the beginning of them.
    """
    for number in range(process, round(rate * seconds), of):
        at = number / rate
        yield at // burst * burst if burst else at


async def drive(
    due: Iterator[float], begin: float, send: Callable[[float], Awaitable[None]], *, stopped: asyncio.Event
) -> tuple[set[asyncio.Task[None]], float]:
    """Send each request when it is due, whatever became of those before, until `stopped`.

    `begin` is by time.monotonic(); `send` is given the time at which it was due. Returns the tasks that are not done
    yet, and the most seconds by which this process itself was late.
    """
    running: set[asyncio.Task[None]] = set()
    latest = 0.0
    for number, at in enumerate(due):
        wait = begin + at - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        elif number % 8 == 0:
            await asyncio.sleep(0)
        if stopped.is_set():
            break
        latest = max(latest, time.monotonic() - begin - at)
        task = asyncio.ensure_future(send(begin + at))
        running.add(task)
        task.add_done_callback(running.discard)
    return running, latest
