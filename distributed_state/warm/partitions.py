"""The scripts about partitions: how one starts, its journal, and how far that is archived.

Law: each names the epoch and the entry that it acts on, so that it changes nothing in another life of Redis.

Design: sections 9, 14.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

from distributed_state.errors import StateError
from distributed_state.port import Words
from distributed_state.settings import Settings
from distributed_state.values.journal import Journal, JournalEntry, unbroken
from distributed_state.values.keys import PartitionKeys, RecordKeys
from distributed_state.warm.answers import PartitionState
from distributed_state.warm.names import listed
from distributed_state.warm.patience import Patience
from distributed_state.warm.scripts import DISCARD, INSTALL, MARK, MINT, RENAME, RESERVE, SETTLE, TAIL, TRIM

log = logging.getLogger(__name__)
_MINTING_MS = 2000  # whoever starts a partition and is not heard of for so long has died, or was stopped
_PAGE = 256


class Partitions:
    """The partitions, as seen by one replica."""

    def __init__(self, patience: Patience, settings: Settings, replica: str, count: itertools.count[int]) -> None:
        self._patience = patience
        self._settings = settings
        self._replica = replica
        self._count = count
        self._ttl_ms = b"%d" % int(settings.warm_ttl * 1000)

    async def mint(self, keys: PartitionKeys, token: str, over: str = "") -> tuple[str, str]:
        """Ask to start a partition: 'ok', 'busy' or 'live', and the epoch that it holds.

        The epoch `over` is to end, though it is of this life of the data.
        """
        word, *epoch = await self._patience.script(MINT, [keys.meta], [token, _MINTING_MS, over, "0"])
        return word.decode(), epoch[0].decode() if epoch else ""

    async def may(self, keys: PartitionKeys, token: str) -> bool:
        """Whether this token still has the right to start the partition, which it keeps for longer."""
        return _word(await self._patience.script(MINT, [keys.meta], [token, _MINTING_MS, "", "1"])) == "ok"

    async def keep(self, keys: PartitionKeys, token: str) -> None:
        """Go on starting a partition, whatever it waits for meanwhile: until the job is asked to end."""
        while True:
            await self._patience.port.sleep(_MINTING_MS / 5000)
            try:
                await self._patience.port.script(MINT, [keys.meta], [token, _MINTING_MS, "", "1"])
            except StateError as error:
                log.debug("partition %d: the right to start it was not renewed: %s", keys.partition, error)

    async def install(
        self, keys: PartitionKeys, token: str, seen: str, epoch: str, *,
        continued: bool, floor: int, texts: Sequence[str] | None,
    ) -> str:  # fmt: skip
        """Start a partition under an epoch: 'ok', 'live' or 'lost'.

        `seen` is the epoch before. `continued`: the stream of events goes on. Fencing tokens are above `floor`.
        `texts`: of all records that SQL has of it, None if that is not known.
        """
        known = None if texts is None else listed(texts)
        names = [keys.meta, keys.journal, keys.events]
        arguments: list[Any] = [token, seen, epoch, int(continued), floor, int(known is not None)]
        answer = await self._patience.script(INSTALL, names, arguments + (known or []))
        # Asked again because the answer was lost: the epoch that is live is ours.
        return "ok" if answer[1:] == [epoch.encode()] else _word(answer)

    async def reserve(self, names: RecordKeys, epoch: str) -> bool:
        """Note that a record is about to be brought into SQL; False if the partition is not under this epoch."""
        return _word(await self._patience.script(RESERVE, [names.meta], [epoch, names.text])) == "ok"

    async def rename(self, keys: PartitionKeys, epoch: str, life: str) -> bool:
        """Note that the life in which a partition was seen has another name now; False if it is seen otherwise."""
        return _word(await self._patience.script(RENAME, [keys.meta], [epoch, life])) == "ok"

    async def discard(self, keys: PartitionKeys, token: str, seen: str, records: Sequence[RecordKeys]) -> bool:
        """Take records out of Redis, if this is still who may recover the partition."""
        calls = [(DISCARD, [keys.meta, each.record, each.hydration, each.items], [token, seen]) for each in records]
        answers = await self._patience.scripts(calls)
        for answer in answers:
            if isinstance(answer, StateError):
                raise answer
        return all(_word(answer) == "ok" for answer in answers)

    async def mark(self, keys: PartitionKeys, epoch: str) -> bool:
        """Write a journal entry that changes nothing; False if the partition is not under this epoch."""
        event = f"{self._replica}.{next(self._count)}.mark"
        return _word(await self._patience.script(MARK, [keys.journal, keys.meta], [epoch, event])) == "ok"

    async def states(self, partitions: Sequence[PartitionKeys]) -> dict[int, PartitionState]:
        """How far each partition was written, and archived."""
        return self._states(partitions, await self._patience.commands(self._asked(partitions)))

    async def reachable_states(self, partitions: Sequence[PartitionKeys]) -> dict[int, PartitionState]:
        """The same at once, without those whose server is away. Raises WarmUnavailable if all are."""
        return self._states(partitions, await self._patience.port.exchange(self._asked(partitions)))

    @staticmethod
    def _asked(partitions: Sequence[PartitionKeys]) -> list[Words]:
        return [(b"HGET", keys.meta, b"journal") for keys in partitions]

    @staticmethod
    def _states(partitions: Sequence[PartitionKeys], answers: Sequence[Any]) -> dict[int, PartitionState]:
        states = {}
        for keys, answer in zip(partitions, answers, strict=True):
            if isinstance(answer, Exception):
                log.warning("partition %d: %s", keys.partition, answer)
                continue
            epoch, *numbers, life, proved = (answer or b" 0 0 0 0  ").split(b" ")
            offset, written, archived, settled = map(int, numbers)
            waiting = written - settled
            states[keys.partition] = PartitionState(
                epoch.decode(), offset, archived, waiting, life.decode(), int(proved or 0)
            )
        return states

    async def tail(self, keys: PartitionKeys | RecordKeys) -> tuple[str, int, str] | None:
        """Epoch, offset and event of the last entry of a journal; None if the partition holds no epoch."""
        answer = await self._patience.script(TAIL, [keys.journal, keys.meta], [])
        if answer[0] != b"ok":
            return None
        return answer[1].decode(), int(answer[2]), answer[3].decode()

    async def journals(self, places: Sequence[tuple[PartitionKeys, int]], count: int) -> list[Journal]:
        """The journals of partitions about an offset each, at most `count` entries on either side of it."""
        commands: list[Words] = []
        for keys, offset in places:
            commands += [
                (b"HGET", keys.meta, b"journal"),
                (b"XRANGE", keys.journal, b"-", b"%d-0" % max(0, offset - 1), b"COUNT", count),
                (b"XRANGE", keys.journal, b"%d-0" % offset, b"+", b"COUNT", count),
                (b"HGET", keys.meta, b"epoch"),
            ]
        answers = await self._patience.commands(commands)
        return [self._journal(answers[at * 4 : at * 4 + 4]) for at in range(len(places))]

    async def entries(self, keys: PartitionKeys, after: int, count: int) -> list[JournalEntry]:
        """Entries of a journal behind an offset, at most `count`, whatever life of the data it is of."""
        rows = await self._patience.command(b"XRANGE", keys.journal, b"%d-0" % (after + 1), b"+", b"COUNT", count)
        return [JournalEntry.read(*row) for row in rows]

    async def newest(self, asked: Sequence[tuple[PartitionKeys, int, int]]) -> list[list[Any]]:
        """Of journals, each behind an offset, the newest entries as Redis has them, at most `count` of each."""
        commands: list[Words] = [
            (b"XREVRANGE", keys.journal, b"+", b"%d-0" % (after + 1), b"COUNT", count) for keys, after, count in asked
        ]
        return await self._patience.commands(commands) if commands else []

    def _journal(self, answers: Sequence[Any]) -> Journal:
        written, before, onward, after = answers
        # Entries read between two equal epochs belong to that epoch: none ever comes back.
        if written is None or not written.startswith(b"%b " % after):
            return Journal("", 0, [], [])
        epoch, end, *_ = written.split(b" ")
        entries = [[JournalEntry.read(*row) for row in rows] for rows in (before, onward)]
        return Journal(epoch.decode(), int(end), entries[0], unbroken(entries[1]))

    async def find(self, keys: PartitionKeys | RecordKeys, event: str) -> tuple[str, JournalEntry | None]:
        """The entry of a journal that has this event, with the epoch; None if there is none, or not any more."""
        head = b"%b\n" % event.encode()
        until = b"+"
        rows: list[Any] = [None] * _PAGE
        while len(rows) == _PAGE:
            written, rows = await self._patience.commands(
                [(b"HGET", keys.meta, b"epoch"), (b"XREVRANGE", keys.journal, until, b"-", b"COUNT", _PAGE)]
            )
            for identity, pairs in rows:
                if pairs[1].startswith(head):
                    return (written or b"").decode(), JournalEntry.read(identity, pairs)
            until = b"(" + rows[-1][0] if rows else until
        return "", None

    async def settle(
        self, calls: Sequence[tuple[PartitionKeys, str, JournalEntry, Sequence[tuple[RecordKeys, int, int]]]]
    ) -> list[Any]:
        """Note in records (version, next message) that they are archived so far, if that entry is in the journal.

        Each call is of one partition under an epoch; its entry is at or after what its records note.
        """
        recent = self._settings.recent_messages
        return await self._patience.scripts(
            [
                (
                    SETTLE,
                    [names.record, keys.journal, keys.meta, names.items],
                    [epoch, last.offset, last.event, version, self._ttl_ms, messages, recent],
                )
                for keys, epoch, last, records in calls
                for names, version, messages in records
            ]
        )

    async def trim(self, calls: Sequence[tuple[PartitionKeys, str, JournalEntry]]) -> list[Any]:
        """Drop journal entries before the given one, which is archived, if it is in the journal."""
        return await self._patience.scripts(
            [
                (TRIM, [keys.journal, keys.meta], [epoch, last.offset, last.event, last.total_bytes])
                for keys, epoch, last in calls
            ]
        )


def _word(answer: list[Any]) -> str:
    return str(answer[0].decode())
