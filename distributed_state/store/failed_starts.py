"""Replicas that could not start, as each notes in Redis. Law: of a host its newest note counts, and a start ends it.

Who has a wrong password of SQL, or finds tables of a newer release, has no beat and no metrics that anybody would miss;
its own log is all that says why. So it leaves a note where the fleet's instruments look. Without Redis it cannot.

Design: section 27.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from distributed_state.errors import CorruptState, StateError, WarmUnavailable
from distributed_state.port import Port
from distributed_state.settings import Settings
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import codec
from distributed_state.values.keys import Keys
from distributed_state.warm.presence import release

log = logging.getLogger(__name__)
_KEPT = 600.0  # seconds: a container that fails again and again is started every five minutes
_LETTERS = 300


@dataclass(frozen=True, slots=True)
class FailedStart:
    """A process that could not open the store, `ago` seconds ago by the server's clock."""

    host: str
    pid: int
    version: str
    ago: float
    why: str


class Noting:
    """Notes why a store could not be opened inside `async with`, if Redis can be reached and it would be a replica."""

    def __init__(self, port: Port, settings: Settings, keys: Keys) -> None:
        self._port = port
        self._keys = keys  # the number of their partitions may still change
        self._active = settings.beat > 0 and settings.url is not None

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._active or not (error is None or isinstance(error, StateError)):
            return
        if isinstance(error, WarmUnavailable):
            return
        try:
            if error is None:
                await self._port.command(b"HDEL", self._keys.failed_starts, platform.node())
            else:
                await self._note(str(error))
        except StateError as failure:
            log.debug("what became of this start is not noted: %s", failure)  # it is not what the caller is to learn

    async def _note(self, why: str) -> None:
        key = self._keys.failed_starts
        seconds, _ = await self._port.command_with(self._port.node_of(key), b"TIME")
        card = {"pid": os.getpid(), "version": release(), "time": int(seconds), "why": why[:_LETTERS]}
        # A container has another name each time: while one fails every few minutes, the hash as a whole never expires.
        words = await self._port.command(b"HGETALL", key)
        over = [host for host, note in _pairs(words) if _read("", note, float(seconds)) is None]
        await self._port.exchange(
            [
                (b"HDEL", key, platform.node(), *over),
                (b"HSET", key, platform.node(), codec.encode(card, "start")),
                (b"PEXPIRE", key, int(_KEPT * 1000)),
            ]
        )


async def lately(tiers: Tiers) -> list[FailedStart]:
    """The hosts where a replica could not start, and none has since."""
    words = await tiers.port.command(b"HGETALL", tiers.keys.failed_starts)
    now = tiers.clock.now()
    found = (_read(host.decode(), note, now) for host, note in _pairs(words))
    return [each for each in found if each is not None]


def _pairs(words: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(words[::2], words[1::2], strict=True)


def _read(host: str, card: bytes, now: float) -> FailedStart | None:
    """A host's note; None if that is too long ago, or cannot be read."""
    try:
        stated = codec.decode(card, "start")
        ago = max(0.0, now - stated["time"])
        if ago >= _KEPT:
            return None
        return FailedStart(host, int(stated["pid"]), str(stated["version"]), ago, str(stated["why"]))
    except (CorruptState, KeyError, TypeError, ValueError) as error:
        log.debug("the note of host %s cannot be read: %s", host, error)
        return None
