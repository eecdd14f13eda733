"""Forks that are being made. Law: noted at their source before that is read, and until they are committed.

So whoever erases the source, and has noted that in SQL, knows which forks may have read it before: it waits for them,
and takes what they made along. One that begins later finds the note in SQL. A fork has a limited time, after which it
commits nothing; an erasure waits no longer than that for one whose process has died.

Design: section 15.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Self

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Words
from distributed_state.settings import Settings
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.keys import RecordKeys

log = logging.getLogger(__name__)
_PAUSE = 0.02
_LONGEST = 0.25


def _seconds(settings: Settings) -> float:
    """For how long a fork is waited for: as long to read its source as to be committed, however often that is tried."""
    return 2 * (settings.retry_for + settings.timeout)


class ForkUnderWay:
    """Inside `async with` the target may be made from the source. `over`: whoever erases that did not wait for it."""

    def __init__(self, tiers: Tiers, source: RecordKeys, target: RecordKeys) -> None:
        self._tiers = tiers
        self._source = source
        self._target = target
        self._began = tiers.port.monotonic()
        self.over = False

    async def __aenter__(self) -> Self:
        tiers, key = self._tiers, self._source.forks
        await tiers.clock.know()
        seconds = _seconds(tiers.settings)
        until = b"%d" % int((tiers.clock.now() + seconds) * 1000)
        lasts = b"%d" % int(seconds * 2000 + 1)
        await tiers.warm.commands([(b"HSET", key, self._target.text, until), (b"PEXPIRE", key, lasts)])
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            self.over = not await self._tiers.warm.command(b"HDEL", self._source.forks, self._target.text)
        except StateError as error:
            log.info("the note of a fork of %s ends by itself: %s", self._source.ref.text[:200], error)

    def require_time(self) -> None:
        """Raise WarmUnavailable unless it may still be committed."""
        took = self._tiers.port.monotonic() - self._began
        if took > _seconds(self._tiers.settings) / 2:
            raise WarmUnavailable(f"reading what is to be forked took {took:.0f} s; nothing was written")


async def made(tiers: Tiers, sources: Sequence[RecordKeys]) -> set[str]:
    """The records that are being made now of these, or were until a process died."""
    answers = await tiers.warm.commands([(b"HKEYS", each.forks) for each in sources])
    return {name.decode() for names in answers for name in names}


async def ended(tiers: Tiers, sources: Sequence[RecordKeys]) -> set[str]:
    """Wait until no fork is being made that may have read one of these before; the records that they made."""
    found: set[str] = set()
    asked = list(sources)
    pause = _PAUSE
    while asked:
        answers = await tiers.warm.commands([(b"HGETALL", each.forks) for each in asked])
        await tiers.clock.know()
        now_ms = tiers.clock.now() * 1000
        left = []
        for each, pairs in zip(asked, answers, strict=True):
            under_way = dict(zip(pairs[::2], pairs[1::2], strict=True))
            found.update(name.decode() for name in under_way)
            if any(int(until) > now_ms for until in under_way.values()):
                left.append(each)
        asked = left
        if asked:
            await tiers.port.sleep(pause)
            pause = min(2 * pause, _LONGEST)
    forgotten: list[Words] = [(b"DEL", each.forks) for each in sources]
    await tiers.warm.commands(forgotten)
    return found
