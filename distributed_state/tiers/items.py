"""Items across the tiers: Redis first, then SQL as of the version that Redis reported.

Law: a read never misses an item.

Redis has the newest items of a record, and all unarchived ones. An item that it lacks is in SQL or does not exist. SQL
is asked second: items that leave Redis in between are archived by then. If SQL is down, ColdUnavailable is raised.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from distributed_state.cold.record_items import FoundItems, FoundPage, ItemRow, Range
from distributed_state.errors import WarmUnavailable
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.read import ROUNDS, reach
from distributed_state.values.items import stamp_of
from distributed_state.values.journal import Operation, item_of, unpack
from distributed_state.values.keys import RecordKeys
from distributed_state.warm.answers import (
    Cold,
    Committed,
    Draft,
    HeldItem,
    ItemWindow,
    ListedItems,
    Uninitialised,
    UnknownItems,
)

PAGE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Listing:
    """Some items of a range in order; `upto`: there may be more items after this key; None: these are all."""

    epoch: str
    items: list[tuple[bytes, ItemRow]]
    upto: bytes | None


async def read(tiers: Tiers, keys: RecordKeys, wanted: Sequence[bytes]) -> tuple[str, dict[bytes, ItemRow]]:
    """The existing items among these, by collection, NUL and key, and the epoch of the answer."""
    text = keys.ref.text
    for _ in range(ROUNDS):
        answer = await tiers.warm.read_items(keys, wanted)
        if isinstance(answer, Uninitialised):
            await tiers.start(keys.partition)
            continue
        tiers.see(keys.partition, answer.epoch)
        if isinstance(answer, Cold):
            found = await tiers.port.sql(partial(tiers.cold.items, text, None, wanted))
            return answer.epoch, _present(found.rows) if found else {}
        rows = {name: _own(text, held) for name, held in answer.items.items() if held is not None}
        lacking = [name for name in wanted if name not in answer.items]
        if lacking:
            found = await tiers.port.sql(partial(tiers.cold.items, text, answer.version, lacking))
            if not await _holds(tiers, keys, answer, found):
                continue
            assert found is not None
            rows |= found.rows
        return answer.epoch, _present(rows)
    raise WarmUnavailable(f"{text[:200]}: changes faster than its items can be read")


async def _holds(tiers: Tiers, keys: RecordKeys, window: ItemWindow, found: FoundItems | FoundPage | None) -> bool:
    """Whether the answers of SQL and Redis agree: nothing was purged in between, and SQL has the present layer."""
    if found is not None and found.archived < window.since:
        await reach(tiers, keys)
        return False
    return found is not None


def _own(text: str, held: HeldItem) -> ItemRow:
    return ItemRow(text, held.version, held.frame)


def _present(rows: dict[bytes, ItemRow]) -> dict[bytes, ItemRow]:
    return {name: row for name, row in rows.items() if row.frame}


async def read_at(
    tiers: Tiers, keys: RecordKeys, version: int, wanted: Sequence[bytes]
) -> tuple[str, dict[bytes, ItemRow]]:
    """Like `read`, as of a version. Raises NotFound if the record cannot be read there."""
    await reach(tiers, keys)
    epoch = tiers.epoch(keys.partition)
    found = await tiers.port.sql(partial(tiers.cold.items, keys.ref.text, version, wanted, exact=True))
    return epoch, _present(found.rows) if found else {}


async def page(tiers: Tiers, keys: RecordKeys, wanted: Range, limit: int) -> Listing:
    """The first items of a range, at most `limit` and about a megabyte, with both tiers merged."""
    text = keys.ref.text
    for _ in range(ROUNDS):
        answer = await tiers.warm.list_items(
            keys, wanted.collection, wanted.prefix, wanted.after, wanted.before,
            reverse=wanted.reverse, limit=limit, size=PAGE_BYTES,
        )  # fmt: skip
        if isinstance(answer, Uninitialised):
            await tiers.start(keys.partition)
            continue
        tiers.see(keys.partition, answer.epoch)
        if isinstance(answer, Cold):
            found = await tiers.port.sql(partial(tiers.cold.list_items, text, None, wanted, limit, PAGE_BYTES))
            if found is None:
                continue
            return _of_sql(answer.epoch, found)
        mine = [(key, _own(text, held)) for key, held in answer.items.items()]
        if answer.whole:
            return Listing(answer.epoch, [row for row in mine if row[1].frame], mine[-1][0] if answer.more else None)
        asked = partial(tiers.cold.list_items, text, answer.version, wanted, limit, PAGE_BYTES, frozenset(answer.items))
        found = await tiers.port.sql(asked)
        if await _holds(tiers, keys, answer, found):
            assert found is not None
            return _merged(answer, mine, found, limit, reverse=wanted.reverse)
    raise WarmUnavailable(f"{text[:200]}: changes faster than its items can be listed")


async def page_at(tiers: Tiers, keys: RecordKeys, version: int, wanted: Range, limit: int) -> Listing:
    """Like `page`, as of a version. Raises NotFound if the record cannot be read there."""
    await reach(tiers, keys)
    epoch = tiers.epoch(keys.partition)
    asked = partial(tiers.cold.list_items, keys.ref.text, version, wanted, limit, PAGE_BYTES, exact=True)
    found = await tiers.port.sql(asked)
    return _of_sql(epoch, found) if found else Listing(epoch, [], None)


def _of_sql(epoch: str, found: FoundPage) -> Listing:
    return Listing(epoch, found.rows, found.rows[-1][0] if found.more else None)


def _merged(
    listed: ListedItems, mine: Sequence[tuple[bytes, ItemRow]], found: FoundPage, limit: int, *, reverse: bool
) -> Listing:
    """Both lists merged in order, up to the key to which both were read."""
    ends = [rows[-1][0] for rows, goes_on in ((mine, listed.more), (found.rows, found.more)) if goes_on]
    end = (max(ends) if reverse else min(ends)) if ends else None
    rows = sorted([*mine, *found.rows], key=lambda row: row[0], reverse=reverse)
    chosen: list[tuple[bytes, ItemRow]] = []
    size = 0
    for key, row in rows:
        if end is not None and (key < end if reverse else key > end):
            break
        if not row.frame:
            continue
        if len(chosen) == limit or (chosen and size + len(row.frame) > PAGE_BYTES):
            return Listing(listed.epoch, chosen, chosen[-1][0])
        size += len(row.frame)
        chosen.append((key, row))
    return Listing(listed.epoch, chosen, end)


async def sql_versions(tiers: Tiers, keys: RecordKeys, draft: Draft, asked: UnknownItems) -> list[Operation]:
    """SQL's versions of the items with expectations. commit.lua checks whether they are still valid."""
    text = keys.ref.text
    wanted = [
        name
        for operation, name, _ in (*draft.expected_items, *draft.operations)
        if operation in (b"A", b"P", b"M", b"n")
    ]
    collections = {item_of(name)[0] for name in wanted}
    for _ in range(ROUNDS):
        found = await tiers.port.sql(partial(tiers.cold.items, text, None, wanted, collections))
        if found is not None and found.archived >= asked.needed:
            break
        await reach(tiers, keys)
    else:
        raise WarmUnavailable(f"{text[:200]}: changes faster than its items can be read")
    place = b"%b %d " % (asked.epoch.encode(), found.archived)
    rows = _present(found.rows)
    stamps = {name: stamp_of(row.version, row.source, text) for name, row in rows.items()}
    versions: list[Operation] = [(b"V", name, place + stamps.get(name, b"-")) for name in dict.fromkeys(wanted)]
    return versions + [(b"G", collection, place + key) for collection, key in found.greatest.items()]


async def put_of(tiers: Tiers, keys: RecordKeys, done: Committed) -> list[bytes]:
    """Which of a change's items were put; read from SQL if Redis no longer has the results of conditional puts."""
    if done.results is not None:
        results = iter(done.results)
        flags = [next(results) if operation in (b"i", b"n") else 1 for operation, _, _ in done.operations]
        return [
            name
            for (operation, name, _), put in zip(done.operations, flags, strict=True)
            if put and operation in (b"p", b"n")
        ]
    await reach(tiers, keys)
    asked = partial(tiers.cold.history, keys.ref.text, after=done.version - 1, before=done.version + 1)
    return [name for row in await tiers.port.sql(asked) for operation, name, _ in unpack(row.data) if operation == b"p"]
