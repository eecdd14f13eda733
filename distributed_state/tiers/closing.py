"""Ends what was begun. Law: every step is tried, whatever befell the one before.

Design: section 14.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from distributed_state.errors import StateError
from distributed_state.port import Port, Signal, waited
from distributed_state.settings import Settings
from distributed_state.tiers.archiver import Archiver
from distributed_state.tiers.memory import Memory
from distributed_state.warm.clock import ServerClock

log = logging.getLogger(__name__)
Step = Callable[[], Awaitable[None] | None]
_LOOK_EVERY = 0.05  # seconds


class LastArchiving:
    """Has what this process wrote archived before its store closes, in `close_timeout` seconds at most.

    In a thread of its own: a server that does not answer may hold that up, and not the one who closes.
    """

    def __init__(self, port: Port, archiver: Archiver, memory: Memory, clock: ServerClock, settings: Settings) -> None:
        self._port = port
        self._archiver = archiver
        self._memory = memory
        self._clock = clock
        self._settings = settings
        self._left: dict[int, tuple[str, int]] = {}
        self._why = ""

    async def finish(self) -> None:
        """Wait until it is archived, or the time is over; then log how much is not."""
        seconds = self._settings.close_timeout
        self._left = self._memory.written()
        if not seconds or not self._left:
            return
        self._why = f"close_timeout={seconds:g} is over"
        over, began = self._port.signal(), self._port.monotonic()
        job = self._port.spawn(partial(self._run, over), "distributed-state-last-archiving")
        try:
            await over.wait(seconds)
        finally:
            job.ask()
        if self._left:
            if (account := waited.present()) is not None:
                account.add(began)  # or a Redis that does not answer would be waited for again by the next steps
            count = f"up to {len(self._memory)} commits" if self._memory.remembers else "commits"
            text = "close: %s of this process in %d partitions are in Redis and not archived yet: %s"
            log.warning(text, count, len(self._left), self._why)

    async def _run(self, over: Signal) -> None:
        try:
            with waited.call():  # in a thread of its own it is no part of the call that closes
                await self._memory.look()  # lets go of what is archived, and keeps what was lost with an epoch
                await self._archive()
                await self._memory.look()
        except StateError as error:
            self._why = str(error)
        finally:
            over.set()

    async def _archive(self) -> None:
        self._left = await self._archiver.unreached(self._memory.written())
        if self._left and self._settings.archiver:
            # Also where another worker archives: two at once are harmless, and the other one may be slow, or dead.
            await self._archiver.drain(self._left)
            self._left = await self._archiver.unreached(self._left)
        while self._left:
            await self._clock.know()
            if not await self._archiver.anybody(self._clock.now()):
                self._why = "no worker archives now"
                return
            await self._port.sleep(_LOOK_EVERY)
            self._left = await self._archiver.unreached(self._left)


async def try_each(steps: Iterable[Step]) -> None:
    """Take each step; what ends more than a step, as a cancellation does, is raised after the last one."""
    failed: BaseException | None = None
    for step in steps:
        try:
            waits = step()
            if waits is not None:
                await waits
        except StateError as error:
            log.warning("close: %s", error)
        except BaseException as error:  # noqa: BLE001 - what is not ended would go on for good
            failed = failed or error
    if failed is not None:
        raise failed
