"""Brings in a record with its history. Law: it comes whole or not at all, and never over one that is there.

Design: section 11.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

from sqlalchemy import Connection, exc, select

from distributed_state.cold import bulk, record_index, record_items, tables
from distributed_state.cold.archive import insert_parsed
from distributed_state.cold.entries import Parsed, parent_record, parse, phase_text
from distributed_state.cold.epochs import ordinal
from distributed_state.cold.history import snapshot_row
from distributed_state.cold.record_index import hashed, keys, lock, put
from distributed_state.cold.record_items import OlderItem
from distributed_state.errors import ColdUnavailable, Conflict, CorruptState, InvalidValue, UnknownStep
from distributed_state.values import message_ranges
from distributed_state.values.journal import JournalEntry, State, fold
from distributed_state.values.model import DELETED, OWNER, PARENT, PHASE, SEGMENTS


class Imported(TypedDict):
    """What comes in: the oldest state and its messages and items, then the changes after it."""

    partition: int
    epoch: str
    base: State | None
    base_messages: Sequence[tuple[int, bytes]]
    entries: Sequence[JournalEntry]
    items: NotRequired[Sequence[OlderItem]]


def adopt(
    connection: Connection,
    namespace: str,
    record: str,
    *,
    partition: int,
    epoch: str,
    base: State | None,
    base_messages: Sequence[tuple[int, bytes]],
    entries: Sequence[JournalEntry],
    items: Sequence[OlderItem] = (),
    snapshot_every: int,
) -> None:
    """Insert the base as a snapshot, then the changes after it. Raises Conflict if the record exists."""
    if base is None and not entries:
        raise InvalidValue(f"{record}: neither a state nor a change to import")
    first = base.version if base else entries[0].version
    _refuse_existing(connection, namespace, record, first)
    parsed = [_parsed(entry, record, partition, epoch) for entry in entries]
    try:
        with connection.begin_nested():
            kept = _keep_states(epoch, base, parsed, snapshot_every)
            put(connection, [_head(namespace, record, partition, kept[-1], parsed)])
            key = keys(connection, namespace, [record])[record]
            bulk.add(connection, tables.snapshots, [snapshot_row(key, state) for state in kept])
            bulk.add(connection, tables.messages, [(key, seq, first, data) for seq, data in base_messages])
            insert_parsed(connection, namespace, parsed, {record: key})
            record_items.bring(connection, namespace, record, key, items, parsed)
            _share(connection, namespace, record, base)
            record_index.replace_tags(connection, namespace, record, kept[-1].fields)
    except exc.IntegrityError as error:
        raise Conflict(f"{record}: a part of it is already in the archive") from error
    _refuse_newer_epoch(connection, namespace, partition, epoch)


def _refuse_newer_epoch(connection: Connection, namespace: str, partition: int, epoch: str) -> None:
    """Not under an epoch that began meanwhile: Redis was told which names there are, and this is not among them."""
    c = tables.cursors.c
    here = select(c.epoch).where(c.namespace == namespace, c.partition == partition, c.ordinal > ordinal(epoch))
    # The rows that the next epoch would change, held until the record is there; at the end, as archivers wait for them.
    held = select(c.ordinal).where(c.namespace == namespace, c.partition == partition).with_for_update(read=True)
    connection.execute(held).all()
    if newer := connection.execute(here).scalar():
        raise ColdUnavailable(f"partition {partition} began epoch {newer} meanwhile; nothing was changed")


def _refuse_existing(connection: Connection, namespace: str, record: str, first: int) -> None:
    stone = hashed(namespace, record)
    found = lock(connection, namespace, [record, stone])
    if record in found:
        version = found[record]["version"]
        raise Conflict(f"{record} exists already, at version {version}", version=version)
    if stone in found and found[stone]["version"] >= first:
        version = found[stone]["version"]
        raise Conflict(f"{record} was erased at version {version}; version {first} may not come again", version=version)


def _parsed(entry: JournalEntry, record: str, partition: int, epoch: str) -> Parsed:
    if entry.record != record:
        raise InvalidValue(f"{record}: an entry of {entry.record} among its changes")
    try:
        return parse(entry, partition, epoch)
    except (ValueError, CorruptState, UnknownStep) as error:
        raise InvalidValue(f"{record} version {entry.version}: {error}") from error


def _keep_states(epoch: str, base: State | None, parsed: Sequence[Parsed], every: int) -> list[State]:
    """The states to keep as snapshots: the base, every so many changes, and the last."""
    fields = dict(base.fields) if base else {}
    kept = [State(epoch, base.version, dict(fields))] if base else []
    for number, item in enumerate(parsed, 1):
        fold(fields, item.ops)
        if number % every == 0 or item is parsed[-1]:
            kept.append(State(epoch, item.entry.version, dict(fields)))
    return kept


def _share(connection: Connection, namespace: str, record: str, base: State | None) -> None:
    runs = message_ranges.parse(base.fields.get(SEGMENTS, b"[]")) if base else []
    held = {(namespace, run.source, record, base.version, run.start, run.stop) for run in runs} if base else set()
    bulk.add(connection, tables.shares, list(held))


def _head(namespace: str, record: str, partition: int, state: State, parsed: Sequence[Parsed]) -> dict[str, Any]:
    now = int(time.time() * 1000)
    owner = state.fields.get(OWNER)
    parent = state.fields.get(PARENT)
    row: dict[str, Any] = {"namespace": namespace, "record": record, "partition": partition}
    row |= {"scope": record.partition(":")[0], "epoch": state.epoch, "version": state.version}
    row |= {"deleted": DELETED in state.fields, "lifetime": None}
    phase = state.fields.get(PHASE)
    row |= {"phase": None if phase is None else phase_text(phase)}
    row |= {"size": sum(map(len, state.fields.values())) + sum(len(item.entry.data) for item in parsed)}
    row |= {"owner": owner.decode() if owner is not None else None}
    row |= {"parent": parent_record(parent) if parent is not None else None}
    row |= {"created_ms": parsed[0].entry.time_ms if parsed else now}
    updated_ms = parsed[-1].entry.time_ms if parsed else now
    return row | {"updated_ms": updated_ms, "listed_ms": updated_ms}
