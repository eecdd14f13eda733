"""Lets commits diverge: they are acknowledged, their server loses them, and the record goes on without them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from below import keys_of, redis_of, tiers

from distributed_state.cold.values import Kept
from distributed_state.values.journal import JournalEntry
from distributed_state.values.keys import RecordKeys

CAUSE = "failover"
# A store in which nothing is archived behind a test's back, and nobody remembers what was lost.
QUIET = {"archiver": False, "durability": "memory", "unarchived_bytes": 0}


@dataclass(frozen=True)
class Lost:
    """Entries of a partition that Redis lost and SQL lacks, as a replica that has them hands them over."""

    partition: int
    epoch: str
    entries: list[JournalEntry]

    def only(self, *versions: int) -> list[JournalEntry]:
        return [entry for entry in self.entries if entry.version in versions]


async def lose(store: Any, id: str, work: Callable[[], Awaitable[Any]], scope: str = "session") -> Lost:
    """Do this work on a record, and then let Redis lose it and begin another data id."""
    await store.admin.archive()
    home, keys = tiers(store), keys_of(store, id, scope)
    before = home.cold.cursor(keys.partition)
    await work()
    (journal,) = await home.warm.partitions.journals([(home.keys.partition(keys.partition), 0)], 1000)
    fresh = [e for e in journal.onward if before is None or e.offset > before.offset or before.epoch != journal.epoch]
    _forget_partition(store, keys)
    await home.start(keys.partition)
    return Lost(keys.partition, journal.epoch, fresh)


def _forget_partition(store: Any, keys: RecordKeys) -> None:
    with redis_of(store) as client:
        tag = keys.record[: keys.record.index(b"}") + 1]
        for key in [
            each
            for each in client.scan_iter(match=f"{tiers(store).keys.namespace}*", count=1000)
            if each.startswith(tag)
        ]:
            client.delete(key)
    tiers(store).hot.clear()
    tiers(store)._epochs.clear()


async def keep(store: Any, lost: Lost, entries: list[JournalEntry] | None = None, cause: str = CAUSE) -> list[Kept]:
    """Hand these entries over, as the recovery does."""
    cold = tiers(store).cold
    given = lost.entries if entries is None else entries
    return cold.branches.keep(lost.partition, lost.epoch, given, cause)
