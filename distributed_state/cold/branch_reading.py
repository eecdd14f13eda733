"""Reads branches, and removes them. Law: a state is folded from versions without a gap, and nothing in it is invented.

A branch begins behind the last version that its record had under the branch's epoch or one before it, as SQL has it.

Design: section 14.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, and_, delete, func, select, update

from distributed_state.cold import blocks
from distributed_state.cold.bulk import among, chunks
from distributed_state.cold.history import states
from distributed_state.cold.record_index import key_of
from distributed_state.cold.tables import branches, changes, snapshots
from distributed_state.cold.values import Branched, BranchState
from distributed_state.errors import NotFound
from distributed_state.values.journal import JournalEntry, State, fold, unpack
from distributed_state.values.model import NEXT


def ordinal(epoch: str) -> int:
    """Which of its partition an epoch is: its name begins with it."""
    number = epoch.partition("-")[0]
    return int(number) if number.isdecimal() else 0


def of_record(connection: Connection, namespace: str, record: str) -> list[Branched]:
    """The branches of a record, the oldest epoch first."""
    b = branches.c
    names = (b.branch, b.partition, b.epoch, b.version, b.offset, b.time_ms, b.kept_ms, b.cause, b.actor, b.told)
    rows = connection.execute(select(*names).where(b.namespace == namespace, b.record == record)).all()
    found = []
    for id, group in groupby(sorted(rows, key=lambda row: (row.branch, row.version)), key=lambda row: row.branch):
        own = list(group)
        versions = tuple(row.version for row in own)
        base = _base(connection, namespace, record, versions[0], own[0].epoch, own[0].offset)
        found.append(
            Branched(
                record=record,
                partition=own[0].partition,
                id=id,
                epoch=own[0].epoch,
                base=base,
                versions=versions,
                missing=gaps(base, versions),
                first_ms=min(row.time_ms for row in own),
                last_ms=max(row.time_ms for row in own),
                kept_ms=min(row.kept_ms for row in own),
                cause=own[0].cause,
                actors=tuple(sorted({row.actor for row in own if row.actor})),
                told=all(row.told for row in own),
            )
        )
    return sorted(found, key=lambda each: (ordinal(each.epoch), len(each.id), each.id))


def gaps(base: int, versions: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The runs of versions behind `base` that are not among these, which ascend."""
    found = []
    at = base
    for version in versions:
        if version > at + 1:
            found.append((at + 1, version - 1))
        at = version
    return tuple(found)


def _base(connection: Connection, namespace: str, record: str, first: int, epoch: str, offset: int) -> int:
    """The last version before `first`, at this offset, that was not written in a later life; 0 if there is none.

    Nor later in the same life: then Redis had gone back to an older SQL, and it is of the other line.
    """
    found = 0
    key = key_of(namespace, record)
    for rows in blocks.downwards(connection, key, first - 1):
        known = (row for row in rows if ordinal(row.epoch) <= ordinal(epoch))
        found = max((row.version for row in known if row.epoch != epoch or row.offset < offset), default=0)
        if found:
            break
    c = changes.c
    later = select(c.version).where(c.record == key, c.version < first, c.epoch == epoch, c.offset > offset)
    for t in (changes.c, snapshots.c):
        query = select(t.epoch, func.max(t.version)).where(t.record == key, t.version.not_in(later))
        for theirs, version in connection.execute(query.where(t.version < first).group_by(t.epoch)):
            if ordinal(theirs) <= ordinal(epoch):
                found = max(found, version)
    return found


def one(connection: Connection, namespace: str, record: str, branch: str) -> Branched:
    """A branch by its id. Raises NotFound that names those there are."""
    found = {each.id: each for each in of_record(connection, namespace, record)}
    if branch not in found:
        there = f"it has {', '.join(found)}" if found else "it has none"
        raise NotFound(f"{record[:200]}: no branch {branch[:80]!r}; {there}")
    return found[branch]


def records_with(connection: Connection, namespace: str, after: str, limit: int) -> list[str]:
    """The records that have branches, those after `after`, in order of their texts."""
    b = branches.c
    query = select(b.record).where(b.namespace == namespace, b.record > after).distinct()
    return list(connection.execute(query.order_by(b.record).limit(limit)).scalars())


def entries(connection: Connection, namespace: str, record: str, branch: str) -> list[JournalEntry]:
    """The commits of a branch, by version."""
    b = branches.c
    names = (b.offset, b.event, b.record, b.version, b.time_ms, b.kind, b.actor, b.token, b.data)
    query = select(*names).where(b.namespace == namespace, b.record == record, b.branch == branch)
    return [JournalEntry(*row, total_bytes=0) for row in connection.execute(query.order_by(b.version))]


def state_at(connection: Connection, namespace: str, record: str, branch: str, version: int | None) -> BranchState:
    """The state of a branch at a version, or at the last that can be folded. Raises NotFound."""
    found = one(connection, namespace, record, branch)
    where = f"{record[:200]}, branch {branch}"
    state = states(connection, namespace, {record: found.base}).get(record) if found.base else State("", 0, {})
    if state is None or state.version != found.base:
        raise NotFound(f"{where}: version {found.base}, which it begins behind, cannot be read any more")
    fields = state.fields
    first_message = int(fields.get(NEXT, b"0"))
    messages: dict[int, bytes] = {}
    at = found.base
    for entry in entries(connection, namespace, record, branch):
        if entry.version != at + 1 or (version is not None and entry.version > version):
            break
        steps = unpack(entry.data)
        fold(fields, steps)
        messages.update((int(step.name), step.value) for step in steps if step.kind == b"m")
        at = entry.version
    if at == found.base or (version is not None and at != version):
        lost = ", ".join(f"{first} to {last}" for first, last in found.missing) or "none"
        wanted = "its state" if version is None else f"version {version}"
        span = (
            f"it has {found.versions[0]} to {found.versions[-1]} behind version {found.base}, of which {lost} are lost"
        )
        raise NotFound(f"{where}: {wanted} cannot be made of what is left: {span}")
    return BranchState(State(found.epoch, at, fields), found.base, first_message, messages)


def heads(connection: Connection, namespace: str, records: Iterable[str]) -> dict[str, Mapping[Any, Any]]:
    """The partitions of those of the records that have branches, whether or not they have anything else."""
    b = branches.c
    found: dict[str, Mapping[Any, Any]] = {}
    for chunk in chunks(sorted(records), 500):
        query = select(b.record, b.partition).where(b.namespace == namespace, among(connection, b.record, chunk))
        found.update((record, {"partition": partition}) for record, partition in connection.execute(query.distinct()))
    return found


def owned(connection: Connection, namespace: str, user: str) -> set[str]:
    """The records of which a branch says that they are a user's."""
    b = branches.c
    return set(connection.execute(select(b.record).where(b.namespace == namespace, b.owner == user)).scalars())


def bases(connection: Connection, namespace: str, records: Iterable[str]) -> dict[str, int]:
    """Of those of the records that have branches, the oldest version that one of these begins behind."""
    some = heads(connection, namespace, records)
    return {record: min(each.base for each in of_record(connection, namespace, record)) for record in some}


def drop(connection: Connection, namespace: str, record: str, branch: str) -> int:
    """Remove a branch; how many commits it had. Raises NotFound."""
    found = one(connection, namespace, record, branch)
    connection.execute(delete(branches).where(_is(namespace, record, branch)))
    return len(found.versions)


def erase(connection: Connection, namespace: str, records: Iterable[str]) -> None:
    """Remove every branch of these records."""
    b = branches.c
    connection.execute(delete(branches).where(b.namespace == namespace, among(connection, b.record, list(records))))


def purge(connection: Connection, namespace: str, before_ms: int, limit: int) -> int:
    """Remove some branches whose newest commit is older than this, `limit` at most; how many commits those had."""
    b = branches.c
    old = select(b.record, b.branch).where(b.namespace == namespace).group_by(b.record, b.branch)
    removed = 0
    for record, branch in connection.execute(old.having(func.max(b.time_ms) < before_ms).limit(limit)).all():
        removed += connection.execute(delete(branches).where(_is(namespace, record, branch))).rowcount
    return removed


def told(connection: Connection, namespace: str, record: str, branch: str) -> None:
    """Note that an event was published about a branch."""
    connection.execute(update(branches).where(_is(namespace, record, branch)).values(told=True))


def survey(connection: Connection, namespace: str, partitions: Iterable[int]) -> tuple[int, list[str]]:
    """How many branches there are, and the records of these partitions about whose branches no event was published."""
    b = branches.c
    each = select(b.record, b.branch).where(b.namespace == namespace).distinct().subquery()
    count = int(connection.execute(select(func.count()).select_from(each)).scalar_one())
    if not count:
        return 0, []
    query = select(b.record).where(b.namespace == namespace, b.partition.in_(list(partitions)), b.told.is_(False))
    return count, sorted(set(connection.execute(query).scalars()))


def _is(namespace: str, record: str, branch: str) -> Any:
    return and_(branches.c.namespace == namespace, branches.c.record == record, branches.c.branch == branch)
