"""Restores the hot entries of a subscription that ended. Law: a restored entry is as fresh as one that is read now.

Each entry is checked after its channel was confirmed again, and kept under that subscription. The server is asked in
batches whether copies that are aside are still current, and only changed records are read. Only one batch at a time is
under way, followed by a pause, so that this never occupies a process or a server.

Design: section 7.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.hot.cache import Hot, Loads
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import Job, Port
from distributed_state.values.keys import Keys
from distributed_state.values.model import Ref
from distributed_state.warm.client import Warm
from distributed_state.warm.link import Link
from distributed_state.warm.scripts import READ

log = logging.getLogger(__name__)
_BATCH = 128  # records that are checked at a time
_WHOLE = 32  # records that are read at a time
_LONGEST = 2.0  # seconds between two batches


class _Wanted(NamedTuple):
    """A record to check. The result of its load is `known`, unless the server has another state."""

    channel: bytes
    text: str
    partition: int
    cached: CachedRecord


class Refill:
    """Runs in the background while there are entries to restore.

    `see` receives the epochs of answers, `start` starts a partition.
    """

    def __init__(
        self,
        port: Port,
        warm: Warm,
        hot: Hot,
        link: Link,
        keys: Keys,
        see: Callable[[int, str], None],
        start: Callable[[int], Awaitable[None]],
    ) -> None:
        self._port = port
        self._warm = warm
        self._hot = hot
        self._link = link
        self._keys = keys
        self._see = see
        self._start = start
        self._mutex = port.mutex()
        self._channels: dict[bytes, None] = {}
        self._job: Job | None = None
        self._closed = False

    def confirmed(self, channel: bytes) -> None:
        """Note that every change of the record arrives from now on, and restore its copy if that was put aside."""
        if self._hot.aside(self._keys.text_of(channel)) is not None:
            self.add([channel])

    def add(self, channels: Iterable[bytes]) -> None:
        """Restore the records of these channels."""
        with self._mutex:
            if self._closed:
                return
            self._channels.update(dict.fromkeys(channels))
            if self._job is None and self._channels:
                self._job = self._port.spawn(self._run, "distributed-state-refill")

    async def close(self) -> None:
        """Stop."""
        with self._mutex:
            self._closed = True
            job = self._job
        if job is not None:
            await job.stop()

    async def _run(self) -> None:
        pause = 0.0
        while channels := self._next():
            began = self._port.monotonic()
            left = await self._bring_back(channels)
            took = self._port.monotonic() - began
            # Other work gets half of the time, or all of it while the server does not answer.
            pause = took if len(left) < len(channels) else max(2 * pause, 0.02)
            self.add(left)
            await self._port.sleep(min(pause, _LONGEST))

    def _next(self) -> list[bytes]:
        """The channels of the next batch; the job ends if there are none."""
        with self._mutex:
            channels = list(islice(self._channels, _BATCH))
            for each in channels:
                del self._channels[each]
            if not channels:
                self._job = None
            return channels

    async def _bring_back(self, channels: Sequence[bytes]) -> list[bytes]:
        """Restore the entries that can be restored now; returns the channels of the others.

        Entries that are lost again are left out, because their channels will be confirmed again.
        """
        stopped = list[int]()
        with Loads(self._hot) as loads:
            wanted, left = self._take_off(loads, channels)
            try:
                if wanted:
                    others = await self._ask(wanted, loads.loaded, stopped)
                    for at in range(0, len(others), _WHOLE):
                        await self._read(others[at : at + _WHOLE], loads.loaded)
            except StateError as error:
                log.debug("refilling Redis: %s", error)
        await self._start_all(stopped)
        return left + [each.channel for each in wanted if self._hot.aside(each.text) is not None]

    def _take_off(self, loads: Loads, channels: Sequence[bytes]) -> tuple[list[_Wanted], list[bytes]]:
        """Start a load for each record that is still aside; returns also the channels that others are loading."""
        wanted: list[_Wanted] = []
        left: list[bytes] = []
        for channel in channels:
            text = self._keys.text_of(channel)
            known = self._hot.aside(text)
            # Done before the server is asked, so that its answer is valid under this subscription.
            freshness = self._link.freshness(channel)
            if known is None or freshness is None:
                continue
            if loads.take_off(text, freshness=freshness, alone=False)[1]:
                wanted.append(_Wanted(channel, text, self._keys.partition_at(channel), known))
            else:
                left.append(channel)
        return wanted, left

    async def _ask(
        self, wanted: Sequence[_Wanted], found: dict[str, CachedRecord], stopped: list[int]
    ) -> list[_Wanted]:
        """Confirm unchanged entries and drop those that Redis no longer has; returns those to read."""
        groups: dict[int, list[_Wanted]] = {}
        for each in wanted:
            groups.setdefault(each.partition, []).append(each)
        calls = []
        for partition, group in groups.items():
            keys = [self._keys.partition(partition).meta]
            keys += [self._keys.record_of(each.channel) for each in group]
            calls.append((keys, [f"{each.cached.epoch} {each.cached.version}" for each in group]))
        others: list[_Wanted] = []
        for (partition, group), words in zip(groups.items(), await self._warm.unchanged(calls), strict=True):
            if isinstance(words, StateError):
                self._refused(group, words)
            elif not words:
                stopped.append(partition)
            else:
                if b"same" in words:
                    self._see(partition, group[words.index(b"same")].cached.epoch)
                for each, word in zip(group, words, strict=True):
                    if word == b"same":
                        found[each.text] = each.cached
                    elif word == b"other":
                        others.append(each)
                    else:
                        self._hot.let_go(each.text)
        return others

    async def _read(self, others: Sequence[_Wanted], found: dict[str, CachedRecord]) -> None:
        """Read these records."""
        calls = [(READ, *self._warm.read_call(self._keys.of(Ref.parse(each.text)), "", None)) for each in others]
        for each, answer in zip(others, await self._port.scripts(calls), strict=True):
            try:
                if isinstance(answer, StateError):
                    raise answer
                fields = self._warm.read_answer(answer)
                if isinstance(fields, list):
                    self._see(each.partition, fields[0])
                    entry = CachedRecord.read(each.cached.codec, fields[0], fields[1:])
                    entry.used = True  # like its predecessor, so that it is restored again after the next loss
                    found[each.text] = entry
                else:
                    self._hot.let_go(each.text)
            except StateError as error:
                self._refused([each], error)

    async def _start_all(self, partitions: Sequence[int]) -> None:
        try:
            for each in partitions:
                await self._start(each)
        except StateError as error:
            log.debug("refilling Redis: %s", error)

    def _refused(self, group: Sequence[_Wanted], error: StateError) -> None:
        """Retry later if the server was down; else drop the entries, and the next reader gets the error."""
        log.debug("refilling Redis: %s", error)
        if not isinstance(error, WarmUnavailable):
            for each in group:
                self._hot.let_go(each.text)
