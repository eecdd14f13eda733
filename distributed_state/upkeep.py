"""What concerns whole records and many of them: listing, export, import, purge, forget.

Law: nothing is removed before it is archived, and nothing half of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from distributed_state import codec, deadlines, lineage, record
from distributed_state.changes import Changes
from distributed_state.codec import Form
from distributed_state.errors import Conflict, CorruptState, InvalidValue, NotFound, StateError, WarmUnavailable
from distributed_state.keys import RecordKeys
from distributed_state.model import (
    DELETED,
    INITIALIZED,
    LIFETIME,
    NEXT,
    PHASE,
    SEGMENTS,
    START,
    Entry,
    Ref,
    Segment,
    SessionInfo,
    State,
    escape,
    is_state,
    is_value,
    pack,
    unescape,
    unpack,
)
from distributed_state.settings import Settings
from distributed_state.tiers import Tiers
from distributed_state.warm import DROP, Draft

FORMAT = "distributed_state/1"
_EVENT = re.compile(r"\w+\.\d+\.\w+", re.ASCII)


def tombstone(settings: Settings, form: Form, kind: str, *, expired: str = "") -> Draft:
    """The change that deletes a record, or ends a session that `expired` for this reason."""
    changes = Changes(settings, form)
    changes.clear(messages=True)
    changes.reserved(PHASE, None)
    changes.reserved(INITIALIZED, None)
    changes.reserved(DELETED, b"1")
    changes.lives(0, 0)
    if expired:
        changes.tell("session.expired", {"reason": expired})
    else:
        changes.tell("conversation.deleted", {})
    return changes.draft(kind)


async def listing(tiers: Tiers, scope: str, owner: str | None, limit: int, after: str | None) -> list[SessionInfo]:
    """One page of the index in SQL."""

    def page() -> Any:
        return tiers.cold.listing(scope, owner=owner, limit=limit, after=after)

    return [
        SessionInfo(
            id=unescape(row.id),
            user=None if row.owner is None else unescape(row.owner),
            version=row.version,
            created=row.created_ms / 1000,
            updated=row.updated_ms / 1000,
            deleted=row.deleted,
            cursor=row.cursor,
        )
        for row in await tiers.port.sql(page)
    ]


# Export and import: one JSON object a line. Bytes travel as text that keeps every one of them (surrogateescape).


async def export(tiers: Tiers, names: RecordKeys) -> list[str]:
    """The record as lines: a header, its state before the first kept change, shared messages, then every change."""
    await record.reach(tiers, names)
    return await tiers.port.sql(_export, tiers, names.ref)


def _export(tiers: Tiers, ref: Ref) -> list[str]:
    cold, text = tiers.cold, ref.text
    version = cold.version(text)
    if version is None:
        raise NotFound(f"{text[:200]}: there is nothing to export")
    entries = cold.history(text)
    base = None if entries and entries[0].version == 1 else cold.state_at(text, cold.oldest(text))
    if base is not None:
        entries = [entry for entry in entries if entry.version > base.version]
    runs: list[Segment] = [] if base is None else lineage.segments(text, base.fields)
    own: set[int] = set()
    for entry in entries:
        for kind, name, value in unpack(entry.data):
            if kind == b"m":
                own.add(int(name))
            elif kind == b"s" and name == SEGMENTS:
                runs += lineage.segments(text, {SEGMENTS: value})
    shared = {number: data for number, data in cold.messages(text, runs).items() if number not in own}
    head = {"format": FORMAT, "namespace": cold.namespace, "scope": ref.scope, "id": ref.id, "version": version}
    lines: list[dict[str, Any]] = [head | {"messages": len(shared), "changes": len(entries)}]
    if base is not None:
        lines.append(
            {"base": base.version, "epoch": base.epoch, "fields": {_text(k): _text(v) for k, v in base.fields.items()}}
        )
    lines += [{"message": number, "data": _text(data)} for number, data in sorted(shared.items())]
    for entry in entries:
        # Without its events: those belong to the stream of this store, and have their numbers in it.
        steps = (op for op in unpack(entry.data) if op.kind != b"e")
        ops = [[kind.decode(), _text(name), _text(value)] for kind, name, value in steps]
        lines.append(
            {
                "version": entry.version, "time_ms": entry.time_ms, "kind": entry.kind, "actor": unescape(entry.actor),
                "token": entry.token, "event": entry.event, "ops": ops,
            }
        )  # fmt: skip
    return [json.dumps(line, separators=(",", ":")) for line in lines]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _check(name: bytes, value: bytes | None) -> None:
    """Raise ValueError or CorruptState unless a state may hold this value, None for a deletion, under this name."""
    if not is_state(name):
        raise ValueError(f"field {name!r} is reserved")
    if value is None:
        return
    if is_value(name):
        key, value = codec.decode_key(name), deadlines.split(value)[1]
        if value[:1] != codec.SEALED:
            codec.decode(value, key)
    elif name == SEGMENTS:
        lineage.parse(value)
    elif name in (START, NEXT) and not value.isdigit():
        raise ValueError(f"{name!r} is {value!r}, not a number")


def _check_message(data: bytes, name: str = "message") -> None:
    if data[:1] != codec.SEALED:
        codec.decode_message(data, name)


class Import:
    """Exported lines, checked whole before anything is touched. `ref` is the record to be, `origin` the one it was."""

    def __init__(self, lines: Iterable[str], id: str | None) -> None:
        self.base: State | None = None
        self.shared: list[tuple[int, bytes]] = []
        self.entries: list[Entry] = []
        self.origin: Ref | None = None
        self.namespace: str | None = None
        self._expected = 0, 0
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    self._read(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError, CorruptState) as error:
                    raise InvalidValue(f"line {number}: is not of the export format ({error})") from error
        if self.origin is None:
            raise InvalidValue("line 1: the header is missing")
        self.ref: Ref = self.origin if id is None else Ref(self.origin.scope, id)
        found = len(self.shared), len(self.entries)
        if found != self._expected:
            raise InvalidValue(f"{found} messages and changes, the header says {self._expected}: the file is cut off")
        if self.base is None and not self.entries:
            raise InvalidValue("there is no change in it")

    def _read(self, row: dict[str, Any]) -> None:
        if self.origin is None:
            if row["format"] != FORMAT:
                raise ValueError(f"format {row['format']!r} is not {FORMAT}")
            self.namespace = None if row.get("namespace") is None else str(row["namespace"])
            self.origin, self._expected = Ref(row["scope"], row["id"]), (int(row["messages"]), int(row["changes"]))
        elif "base" in row:
            fields = {_bytes(name): _bytes(value) for name, value in row["fields"].items()}
            for name, value in fields.items():
                _check(name, value)
            self.base = State(str(row["epoch"]), int(row["base"]), fields)
        elif "message" in row:
            _check_message(_bytes(row["data"]))
            self.shared.append((int(row["message"]), _bytes(row["data"])))
        else:
            self._change(row)

    def _change(self, row: dict[str, Any]) -> None:
        before = self.entries[-1].version if self.entries else self.base.version if self.base else 0
        if row["version"] != before + 1:
            raise ValueError(f"version {row['version']} follows {before}")
        steps = (tuple(map(_bytes, step)) for step in row["ops"])
        data = pack((kind, name, value) for kind, name, value in steps if kind != b"e")
        for kind, name, value in unpack(data):
            if kind not in (b"s", b"d", b"c", b"m", b"w", b"l"):
                raise ValueError(f"step {kind!r} is unknown")
            if kind == b"m":
                _check_message(value, f"message {int(name)}")
            elif kind == b"w":
                _check(START, value)
            elif kind in (b"s", b"d"):
                _check(name, value if kind == b"s" else None)
        if not _EVENT.fullmatch(row["event"]):
            raise ValueError(f"event {row['event']!r} is none")
        self.entries.append(
            Entry(
                offset=0, event=row["event"], record="", version=int(row["version"]),
                time_ms=int(row["time_ms"]), kind=escape(str(row["kind"])), actor=escape(str(row["actor"])),
                token=int(row["token"]), data=data, total_bytes=0,
            )
        )  # fmt: skip

    def settle(self, form: Callable[[str], Form]) -> None:
        """Make the values what the record to be stores. Raises DecryptionFailed if a key for that is missing."""
        assert self.origin is not None
        target = form(self.ref.text)
        source = target.of(self.origin.text, self.namespace)
        moves = (source.namespace, source.record) != (target.namespace, target.record)
        writers: dict[int, str] = {}

        def settled(name: bytes, value: bytes) -> bytes:
            if name == SEGMENTS:
                for run in lineage.parse(value):
                    writers.update(dict.fromkeys(range(run.start, run.stop), run.source))
                # Else the same message would be read under one record here and under another there.
                return lineage.taken_over(value, target.record) if moves and target.seals else value
            return source.carry(value, codec.decode_key(name), target) if is_value(name) else value

        def written(data: bytes, writer: str) -> bytes:
            form = source.of(writer)
            return form.carry(data, codec.MESSAGE, target if moves else form)

        # Without its lifetime: a copy that was kept for long would end at once.
        if self.base is not None:
            fields = {name: settled(name, value) for name, value in self.base.fields.items() if name != LIFETIME}
            self.base = replace(self.base, fields=fields)
        for at, entry in enumerate(self.entries):
            ops = [
                op._replace(value=written(op.value, source.record) if op.kind == b"m" else settled(op.name, op.value))
                if op.kind in (b"s", b"m")
                else op
                for op in unpack(entry.data)
                if op.name != LIFETIME
            ]
            self.entries[at] = replace(entry, record=self.ref.text, data=pack(ops))
        self.shared = [(n, written(data, writers.get(n, source.record))) for n, data in self.shared]


async def import_(tiers: Tiers, given: Import) -> str:
    """Insert an exported record into SQL in one transaction; the next access brings it to Redis."""
    given.settle(tiers.form)
    ref, rows = given.ref, given.entries
    names = tiers.keys.of(ref)
    # Alone: nobody may create the record between the look and the transaction.
    async with tiers.lock(names, wait=10.0, ttl=30.0) as lease:
        entry = await record.read(tiers, names, fresh=True)
        if entry.version:
            raise Conflict(f"{ref.text[:200]}: exists already, at version {entry.version}", version=entry.version)
        if lease.lost:
            raise WarmUnavailable(f"{ref.text[:200]}: the lock was lost before the import began; nothing was changed")

        def adopt() -> None:
            tiers.cold.adopt(
                ref.text, partition=names.partition, epoch=entry.epoch, base=given.base,
                base_messages=given.shared, entries=rows,
            )  # fmt: skip

        await tiers.port.sql(adopt)
        # Whoever looked into SQL before, or keeps hot that there is nothing, must look again.
        version = rows[-1].version if rows else given.base.version if given.base else 0
        told = f"{entry.epoch} {version} {tiers.replica} -".encode()
        await tiers.port.exchange([(b"DEL", names.hydration), (b"SPUBLISH", names.channel, told)])
        tiers.hot.forget(ref.text)
    return ref.id


# Removing


async def purge(tiers: Tiers, older_than: float) -> dict[str, int]:
    """Remove old history and old events from SQL."""
    if isinstance(older_than, bool) or not isinstance(older_than, (int, float)) or not older_than >= 0:
        raise InvalidValue(f"older_than is a number of seconds from 0 on, not {older_than!r}")
    await tiers.archiver.drain()
    done = await tiers.port.sql(tiers.cold.purge, int((tiers.port.wall() - older_than) * 1000))
    return {"records": done.records, "changes": done.changes, "messages": done.messages, "events": done.events}


async def forget(tiers: Tiers, user: str) -> int:
    """Tombstones first, so that no tier brings anything back; then SQL, Redis, events, the journal's last entries."""
    owner = escape(Ref("user", user).id)
    await tiers.archiver.drain()
    texts: Sequence[str] = await tiers.port.sql(tiers.cold.owned, owner)
    records = [tiers.keys.of(Ref.parse(text)) for text in texts]
    versions: dict[RecordKeys, int] = {}
    for names in records:
        draft = tombstone(tiers.settings, tiers.form(names.ref.text), "forget")
        draft.deleted = "revive"
        versions[names] = (await record.commit(tiers, names, draft)).version
    for names in records:
        await record.reach(tiers, names)
    await tiers.port.sql(tiers.cold.erase, list(texts))
    calls = []
    for names, version in versions.items():
        told = f"{tiers.epoch(names.partition)} {version + 1} {tiers.replica} -"
        calls.append((DROP, [names.record, names.hydration, names.channel], [version, told]))
    for answer in await tiers.port.scripts(calls):
        if isinstance(answer, StateError):
            raise answer
    last = {names.text: version for names, version in versions.items()}
    for partition in {names.partition for names in records}:
        await tiers.stream.redact(tiers.keys.partition(partition), partial(_tells_of, last))
        # The journal keeps its last entry; a mark takes the place of the tombstone there.
        await tiers.warm.mark(tiers.keys.partition(partition), tiers.epoch(partition))
    await tiers.archiver.drain()
    for names in records:
        tiers.hot.forget(names.ref.text)
    return len(records)


def _tells_of(last: Mapping[bytes, int], head: bytes) -> bool:
    """Whether an event is about one of these records, but for their end, which every replica has to hear."""
    _, type, subject, _, version, _ = head.split(b"\n")
    return subject in last and (type != b"conversation.deleted" or int(version) != last[subject])
