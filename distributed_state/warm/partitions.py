"""The scripts about partitions: their start, their journals and how far these are archived, and the records in Redis.

Law: each script gets the epoch and the entry that it acts on, so that it changes nothing under another data id.

With its epoch a partition receives the ids of all records that SQL has, its known ids. Without them Redis cannot
distinguish a record that never existed from one that is archived and evicted, and the first write of an id asks SQL.
The scripts that create or import a record add its id. Known ids are stored in the partition's `meta` and end with the
epoch. They are complete, or absent.

Design: sections 9, 10, 14.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed_state.errors import StateError
from distributed_state.port import Words
from distributed_state.settings import Settings
from distributed_state.values.journal import Happened, Journal, JournalEntry, KeptItems, Loaded, State, unbroken
from distributed_state.values.keys import PartitionKeys, RecordKeys
from distributed_state.values.model import is_state
from distributed_state.warm.answers import PartitionState
from distributed_state.warm.scripts import (
    DISCARD,
    INSTALL,
    MARK,
    MARK_ARCHIVED,
    MINT,
    RENAME,
    RESERVE,
    TAIL,
    TRIM,
    RetryingClient,
)

log = logging.getLogger(__name__)
_MINTING_MS = 2000  # a replica that starts a partition and does not renew its right for this long has died or stopped
_PAGE = 256
_SCAN_PAGE = 1000
_COMMITTED = re.compile(rb"(?:^|;)[^; ]+ \d+ (\d+)")  # the time in seconds, as commit.lua keeps it with the op ids
_OPS = (b"#ops", *(b"#ops%d" % piece for piece in range(1, 16)))  # in one field or in pieces: see op_pieces.lua
# The encoding of known ids: see known_ids.lua.
_FULL = 4092
_DIGITS = 6
_FACTOR = 65599
_PRIME = 268435399


@dataclass(frozen=True, slots=True)
class Beginning:
    """The arguments of a new epoch. `continued`: the stream of events is kept.

    Otherwise it begins again, and `ended` is the last event of the previous epoch that SQL has. Fencing tokens are
    above `floor`. `texts`: those of all records that SQL has, None if that is not known.
    """

    epoch: str
    continued: bool
    ended: int
    floor: int
    texts: Sequence[str] | None


class Partitions:
    """The partitions, as seen by one replica."""

    def __init__(self, client: RetryingClient, settings: Settings, replica: str, count: itertools.count[int]) -> None:
        self._client = client
        self._settings = settings
        self._replica = replica
        self._count = count
        self._ttl_ms = b"%d" % int(settings.warm_ttl * 1000)

    async def request_right(self, keys: PartitionKeys, token: str, over: str = "") -> tuple[str, str]:
        """Request the right to start a partition; return 'ok', 'busy' or 'live', and the epoch that Redis has.

        The epoch `over` is to be ended, so it does not count as live although it has the present data id.
        """
        word, *epoch = await self._client.script(MINT, [keys.meta], [token, _MINTING_MS, over, "0"])
        return word.decode(), epoch[0].decode() if epoch else ""

    async def renew_right(self, keys: PartitionKeys, token: str) -> bool:
        """Extend the right to start the partition; False if this token no longer has it."""
        return _word(await self._client.script(MINT, [keys.meta], [token, _MINTING_MS, "", "1"])) == "ok"

    async def keep_right(self, keys: PartitionKeys, token: str) -> None:
        """Extend the right repeatedly, until the job is asked to end: a background job of a recovery."""
        while True:
            await self._client.port.sleep(_MINTING_MS / 5000)
            try:
                await self._client.port.script(MINT, [keys.meta], [token, _MINTING_MS, "", "1"])
            except StateError as error:
                log.debug("partition %d: the right to start it could not be renewed: %s", keys.partition, error)

    async def install(self, keys: PartitionKeys, token: str, seen: str, new: Beginning) -> str:
        """Start a partition under an epoch; return 'ok', 'live' or 'lost'. `seen` is the previous epoch."""
        known = None if new.texts is None else packed_ids(new.texts)
        names = [keys.meta, keys.journal, keys.events]
        arguments: list[Any] = [
            token,
            seen,
            new.epoch,
            int(new.continued),
            new.ended,
            new.floor,
            int(known is not None),
        ]
        answer = await self._client.script(INSTALL, names, arguments + (known or []))
        # If a reply was lost, the script was sent again, and found the epoch that it had started itself.
        return "ok" if answer[1:] == [new.epoch.encode()] else _word(answer)

    async def reserve(self, keys: RecordKeys, epoch: str) -> bool:
        """Note that a record is about to be imported into SQL; False if the partition is not under this epoch."""
        return _word(await self._client.script(RESERVE, [keys.meta], [epoch, keys.text])) == "ok"

    async def rename(self, keys: PartitionKeys, epoch: str, former: str) -> bool:
        """Replace the noted data id `former` with the server's; False if the notes changed meanwhile."""
        return _word(await self._client.script(RENAME, [keys.meta], [epoch, former])) == "ok"

    async def discard(self, keys: PartitionKeys, token: str, seen: str, records: Sequence[RecordKeys]) -> bool:
        """Delete records from Redis; False if this token no longer has the right to start the partition."""
        calls = [(DISCARD, [keys.meta, each.record, each.hydration, each.items], [token, seen]) for each in records]
        answers = await self._client.scripts(calls)
        for answer in answers:
            if isinstance(answer, StateError):
                raise answer
        return all(_word(answer) == "ok" for answer in answers)

    async def mark(self, keys: PartitionKeys, epoch: str) -> bool:
        """Write a journal entry that changes nothing; False if the partition is not under this epoch."""
        event = f"{self._replica}.{next(self._count)}.mark"
        return _word(await self._client.script(MARK, [keys.journal, keys.meta], [epoch, event])) == "ok"

    async def states(self, partitions: Sequence[PartitionKeys]) -> dict[int, PartitionState]:
        """Return how far each partition is written and archived."""
        return self._states(partitions, await self._client.commands(self._asked(partitions)))

    async def reachable_states(self, partitions: Sequence[PartitionKeys]) -> dict[int, PartitionState]:
        """Like `states`, but tried once, without those whose server is down. Raises WarmUnavailable if all are."""
        return self._states(partitions, await self._client.port.exchange(self._asked(partitions)))

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
            epoch, *numbers, data_id, proved = (answer or b" 0 0 0 0  ").split(b" ")
            offset, written, archived, archived_bytes = map(int, numbers)
            waiting = written - archived_bytes
            states[keys.partition] = PartitionState(
                epoch.decode(), offset, archived, waiting, data_id.decode(), int(proved or 0)
            )
        return states

    async def tail(self, keys: PartitionKeys | RecordKeys) -> tuple[str, int, str] | None:
        """Return epoch, offset and event of the last entry of a journal; None if the partition has no epoch."""
        answer = await self._client.script(TAIL, [keys.journal, keys.meta], [])
        if answer[0] != b"ok":
            return None
        return answer[1].decode(), int(answer[2]), answer[3].decode()

    async def journals(self, places: Sequence[tuple[PartitionKeys, int]], count: int) -> list[Journal]:
        """Return the journals of partitions around an offset each, at most `count` entries on either side of it."""
        commands: list[Words] = []
        for keys, offset in places:
            commands += [
                (b"HGET", keys.meta, b"journal"),
                (b"XRANGE", keys.journal, b"-", b"%d-0" % max(0, offset - 1), b"COUNT", count),
                (b"XRANGE", keys.journal, b"%d-0" % offset, b"+", b"COUNT", count),
                (b"HGET", keys.meta, b"epoch"),
            ]
        answers = await self._client.commands(commands)
        return [self._journal(answers[at * 4 : at * 4 + 4]) for at in range(len(places))]

    async def entries(self, keys: PartitionKeys, after: int, count: int) -> list[JournalEntry]:
        """Return entries of a journal after an offset, at most `count`, under any data id."""
        rows = await self._client.command(b"XRANGE", keys.journal, b"%d-0" % (after + 1), b"+", b"COUNT", count)
        return [JournalEntry.read(*row) for row in rows]

    async def newest(self, asked: Sequence[tuple[PartitionKeys, int, int]]) -> list[list[Any]]:
        """Return the newest entries of journals, each after an offset, at most `count`, newest first and not parsed."""
        commands: list[Words] = [
            (b"XREVRANGE", keys.journal, b"+", b"%d-0" % (after + 1), b"COUNT", count) for keys, after, count in asked
        ]
        return await self._client.commands(commands) if commands else []

    def _journal(self, answers: Sequence[Any]) -> Journal:
        written, before, onward, after = answers
        # Entries read between two equal epochs belong to that epoch, because epochs are never used twice.
        if written is None or not written.startswith(b"%b " % after):
            return Journal("", 0, [], [])
        epoch, end, *_ = written.split(b" ")
        entries = [[JournalEntry.read(*row) for row in rows] for rows in (before, onward)]
        return Journal(epoch.decode(), int(end), entries[0], unbroken(entries[1]))

    async def find(self, keys: PartitionKeys | RecordKeys, event: str) -> tuple[str, JournalEntry | None]:
        """Return the epoch and the journal entry of this event; None if the journal does not have it."""
        head = b"%b\n" % event.encode()
        until = b"+"
        rows: list[Any] = [None] * _PAGE
        while len(rows) == _PAGE:
            written, rows = await self._client.commands(
                [(b"HGET", keys.meta, b"epoch"), (b"XREVRANGE", keys.journal, until, b"-", b"COUNT", _PAGE)]
            )
            for identity, pairs in rows:
                if pairs[1].startswith(head):
                    return (written or b"").decode(), JournalEntry.read(identity, pairs)
            until = b"(" + rows[-1][0] if rows else until
        return "", None

    async def mark_archived(
        self, calls: Sequence[tuple[PartitionKeys, str, JournalEntry, Sequence[tuple[RecordKeys, int, int]]]]
    ) -> list[Any]:
        """Note that records are archived up to a version and a message, if the given entry is in the journal.

        Each call is for one partition under an epoch; its entry is at or after those that its records note.
        """
        recent = self._settings.recent_messages
        return await self._client.scripts(
            [
                (
                    MARK_ARCHIVED,
                    [keys.record, partition.journal, partition.meta, keys.items],
                    [epoch, last.offset, last.event, version, self._ttl_ms, messages, recent],
                )
                for partition, epoch, last, records in calls
                for keys, version, messages in records
            ]
        )

    async def trim(self, calls: Sequence[tuple[PartitionKeys, str, JournalEntry]]) -> list[Any]:
        """Drop journal entries before the given one, which is archived, if it is in the journal."""
        return await self._client.scripts(
            [
                (TRIM, [keys.journal, keys.meta], [epoch, last.offset, last.event, last.total_bytes])
                for keys, epoch, last in calls
            ]
        )

    # The records of a partition in Redis, found by SCAN: slow, and only for recovery

    async def records_page(self, keys: PartitionKeys, cursor: int) -> tuple[int, list[str]]:
        """Return the cursor of the next page, 0 after the last, and texts of the partition's records in Redis.

        Other keys of a record, such as its lock, are among them, and some come twice.
        """
        prefix = keys.meta.removesuffix(b"meta") + b"r:"
        pattern = b"".join(b"\\" + bytes([each]) if each in b"*?[]\\^-" else bytes([each]) for each in prefix)
        words = (b"SCAN", cursor, b"match", pattern + b"*", b"COUNT", _SCAN_PAGE)
        port = self._client.port
        following, found = await self._client.retry(port.command_with, port.node_of(keys.meta), *words)
        return int(following), [key.removeprefix(prefix).decode() for key in found]

    async def loaded(self, epoch: str, records: Sequence[RecordKeys]) -> dict[str, Loaded]:
        """Return the records that Redis has, under any data id, with all their messages there.

        `time_ms` is the time of the last commit, to the second; 0 if that is no longer kept.
        """
        found = {}
        answers = await self._client.commands([(b"HGETALL", each.record) for each in records])
        for keys, pairs in zip(records, answers, strict=True):
            kept = dict(zip(pairs[::2], pairs[1::2], strict=True))
            if b"#v" in kept:
                messages = [(int(name[2:]), kept[name]) for name in kept if name[:2] == b"#m" and name[2:].isdigit()]
                fields = {name: value for name, value in kept.items() if is_state(name)}
                ops = b"".join(kept.get(each, b"") for each in _OPS)
                newest = max((int(each) * 1000 for each in _COMMITTED.findall(ops)), default=0)
                state = State(epoch, int(kept[b"#v"]), fields)
                found[keys.ref.text] = Loaded(state, sorted(messages), int(kept.get(b"#t", b"0")) or newest)
        return found

    async def items(self, records: Sequence[RecordKeys]) -> dict[str, KeptItems]:
        """Return the items of records that Redis has, under any data id: see item_window.lua."""
        commands = [each for keys in records for each in ((b"HGETALL", keys.items), (b"HGET", keys.record, b"#kv"))]
        answers = await self._client.commands(commands)
        return {
            keys.ref.text: _window(dict(zip(pairs[::2], pairs[1::2], strict=True)), int(last or b"0"))
            for keys, pairs, last in zip(records, answers[::2], answers[1::2], strict=True)
        }

    async def events(self, keys: PartitionKeys, epoch: str, after: int, count: int) -> list[Happened]:
        """Return events of a partition's stream after an offset, at most `count`, under any data id."""
        rows = await self._client.command(b"XRANGE", keys.events, b"%d-0" % (after + 1), b"+", b"COUNT", count)
        found = []
        for identity, (_, head, _, data) in rows:
            id, type, subject, time, version, actor = head.decode().split("\n")
            seconds, micros = time.split()
            time_ms = int(seconds) * 1000 + int(micros) // 1000
            offset = int(identity[:-2])
            found.append(Happened(keys.partition, epoch, offset, id, type, subject, time_ms, actor, int(version), data))
        return found


def _word(answer: list[Any]) -> str:
    return str(answer[0].decode())


def packed_ids(texts: Iterable[str]) -> list[bytes] | None:
    """Return the fields of meta that hold these known ids, and their values, in turn; None if they are too many."""
    found: dict[bytes, list[bytes]] = {}
    for text in texts:
        number = 0
        for byte in text.encode():
            number = (number * _FACTOR + byte) % _PRIME
        digits = b"%07x" % number
        found.setdefault(b"k" + digits[_DIGITS:], []).append(digits[:_DIGITS])
    if any(len(marks) * _DIGITS >= _FULL for marks in found.values()):
        return None
    return [word for field, marks in found.items() for word in (field, b"".join(marks))]


def _window(kept: dict[bytes, bytes], last: int) -> KeptItems:
    """Return the items of a window; `last` is the version at which an item changed last."""
    held = {name[1:]: value.split(b" ", 2) for name, value in kept.items() if name[:1] == b":"}
    items = {name: (int(version), frame) for name, (_, version, frame) in held.items()}
    floor = int(kept.get(b"#f", b"0"))
    if max((floor, *(version for version, _ in items.values()))) < last:
        return KeptItems({}, last)  # the window was evicted, or is older than the record's present state
    # A window is complete from its layer's beginning if no item was removed from it and it never lacked one.
    whole = kept.get(b"#d", b"1") == b"1" and kept.get(b"#u") != b"2"
    return KeptItems(items, 0 if whole else floor)
