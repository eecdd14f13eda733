"""Keeps what diverged and tells of it. Law: SQL has a branch before anybody hears of it, and one event is published.

The event is published by whoever keeps the branch or, if that process dies in between, by a replica that archives its
partition: its id follows from the branch, so that two who try write one.

Design: section 14.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence

from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Branched, Kept
from distributed_state.errors import StateError
from distributed_state.port import Port
from distributed_state.values import codec
from distributed_state.values.journal import JournalEntry
from distributed_state.values.keys import Keys
from distributed_state.warm.stream import Stream

log = logging.getLogger(__name__)
_LOOK_SECONDS = 15.0
_CLOCKS_MS = 600_000  # how far the clock of the process that kept a branch may be ahead of Redis'


class Branches:
    """The branches of a namespace, as one replica keeps them. `count` is how many SQL has; None: not asked yet."""

    def __init__(self, port: Port, cold: ColdStore, stream: Stream, keys: Keys) -> None:
        self._port = port
        self._cold = cold
        self._stream = stream
        self._keys = keys
        self._look_at = 0.0
        self.commits = 0
        self.count: int | None = None

    async def keep(self, partition: int, epoch: str, entries: Iterable[JournalEntry], cause: str) -> list[Kept]:
        """Keep commits of a closed epoch that their records do not continue, and publish it; what was new.

        Harmless for what is kept or archived already, and for what was erased. The partition has an epoch again: else
        the event is published later. Raises ColdUnavailable, and then nothing is kept.
        """
        kept = await self._port.sql(self._cold.branches.keep, partition, epoch, list(entries), cause)
        self.noted(kept)
        await self.tell({each.record for each in kept})
        return kept

    def noted(self, kept: Iterable[Kept]) -> None:
        """Count what somebody kept in a transaction of their own, once that is committed."""
        for each in kept:
            about = each.record[:200]
            log.warning(
                "%s: %d commits are kept in branch %s", about, each.commits, each.branch, extra={"record": about}
            )
            self.commits += each.commits

    async def tell(self, records: Iterable[str]) -> None:
        """Publish `conversation.diverged` about each branch of these records, unless that was done."""
        for record in sorted(records):
            for branch in await self._port.sql(self._cold.branches.of, record):
                if not branch.told:
                    try:
                        await self._publish(branch)
                    except StateError as error:
                        text = "%s: branch %s is not published yet: %s"
                        log.warning(text, record[:200], branch.id, error, extra={"record": record[:200]})

    async def _publish(self, branch: Branched) -> None:
        data = {"branch": branch.id, "base": branch.base, "commits": len(branch.versions), "cause": branch.cause}
        keys = self._keys.partition(branch.partition)
        text = f"{self._keys.namespace}\0{branch.record}\0{branch.id}"
        writer = "d" + hashlib.sha256(text.encode()).hexdigest()[:15]
        since_ms = branch.kept_ms - _CLOCKS_MS
        encoded = codec.encode(data, "data")
        if await self._stream.emit_once(keys, writer, since_ms, "conversation.diverged", branch.record, encoded):
            await self._port.sql(self._cold.branches.told, branch.record, branch.id)

    async def look_after(self, partitions: Sequence[int]) -> None:
        """Now and then: count the branches, and publish what nobody has of those in these partitions."""
        now = self._port.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        self.count, untold = await self._port.sql(self._cold.branches.survey, partitions)
        await self.tell(untold)
