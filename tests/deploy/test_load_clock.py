"""Load that is sent by the clock: when a request was due counts, not when there was time to send it."""

from __future__ import annotations

import asyncio
import time

from deploy.load.measures import Recorder
from deploy.load.schedule import arrivals, drive


def stalled(*, waiting: bool) -> Recorder:
    """100 requests in a second to a server that stalls for half of it. `waiting` sends one after the other."""

    async def run() -> Recorder:
        begin = time.monotonic()
        recorder, lock = Recorder(begin), asyncio.Lock()

        async def send(due: float) -> None:
            sent = time.monotonic()
            async with lock:  # a server that serves one at a time
                if 0.2 < time.monotonic() - begin < 0.3:
                    await asyncio.sleep(0.5)
            recorder.answer(sent if waiting else due, time.monotonic())

        if waiting:
            for at in arrivals(100, 1):
                await asyncio.sleep(max(begin + at - time.monotonic(), 0))
                await send(begin + at)
        else:
            running, _ = await drive(arrivals(100, 1), begin, send, stopped=asyncio.Event())
            await asyncio.gather(*running)
        return recorder

    return asyncio.run(run())


def test_a_stall_shows_in_all_requests_that_were_due_in_it() -> None:
    recorder = stalled(waiting=False)
    assert recorder.answered == 100
    # About 50 of 100 were due while it stood still, and they waited from 0 to 0.5 s.
    assert recorder.histogram.get_value_at_percentile(90) > 300_000
    assert recorder.histogram.get_value_at_percentile(70) > 100_000


def test_a_generator_that_waits_for_answers_would_hide_it() -> None:
    """The negative control: the same server, measured as closed loops measure."""
    assert stalled(waiting=True).histogram.get_value_at_percentile(90) < 100_000


def test_a_schedule_can_be_ended_early() -> None:
    async def run() -> int:
        stopped, sent = asyncio.Event(), 0

        async def send(due: float) -> None:
            nonlocal sent
            sent += 1
            if sent == 5:
                stopped.set()

        await drive(arrivals(500, 10), time.monotonic(), send, stopped=stopped)
        return sent

    assert asyncio.run(run()) < 20
