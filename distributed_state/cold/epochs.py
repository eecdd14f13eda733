"""The epochs of a partition: those known to SQL, how far each is archived, and which of them began.

Law: an epoch is minted in SQL first. If a worker dies before it writes the epoch to Redis, the epoch never begins:
nothing was acknowledged under it, so its end is not a loss. SQL also notes that an epoch begins before Redis gets it:
otherwise, after a crash in between or an outage of SQL, a loss of commits acknowledged under it would not be reported.

Design: section 14.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, bindparam, delete, exc, exists, func, insert, or_, select, update

from distributed_state.cold.engine import Sql
from distributed_state.cold.record_index import ERASED, LISTED_MS, hashed
from distributed_state.cold.tables import cursors, erasures, events, records
from distributed_state.cold.values import Cursor, Minted
from distributed_state.values import chance
from distributed_state.values.model import SCOPES

REPAIRED = -1  # in place of the time of minting: a repair brought the whole epoch to SQL before the next one began
_KEPT = 16  # ended epochs of a partition


def newest(sql: Sql, partition: int | None = None) -> dict[int, Cursor]:
    """How far each partition, or this one, was archived in its newest epoch; partitions without one are left out."""
    rows = sql.execute(_cursors(partition is None), {"namespace": sql.namespace, "partition": partition})
    return {row.partition: Cursor(*row) for row in rows}


def cursor(sql: Sql, partition: int) -> Cursor | None:
    """How far a partition was archived in its newest epoch; None if it has not had one yet."""
    return newest(sql, partition).get(partition)


@cache
def _cursors(every: bool) -> Select[Any]:
    """Built once: building takes longer than executing, and each read of history executes it first."""
    c = cursors.c
    query = select(c.partition, c.epoch, c.ordinal, c.offset, c.event).where(c.namespace == bindparam("namespace"))
    if not every:
        query = query.where(c.partition == bindparam("partition"))
    # In this order the newest epoch of a partition comes last, and stays in the dict.
    return query.order_by(c.ordinal)


def mint(sql: Sql, partition: int, after: Cursor | None) -> Cursor | None:
    """Start a new epoch and close the older ones, if the archive is still at `after`; else return None.

    From then on nothing is archived under an older epoch.
    """
    c = cursors.c
    here = and_(c.namespace == sql.namespace, c.partition == partition)
    # The lock waits for an archive() under way; a later archive() finds its epoch closed.
    found = sql.execute(select(c.ordinal, c.epoch, c.offset, c.event).where(here).with_for_update()).all()
    number, *at = max(found) if found else (0, None, 0, "")
    # The event is compared too: a caller that compared the journal must have seen everything that is archived.
    if at != ([after.epoch, after.offset, after.event] if after else [None, 0, ""]):
        return None
    ended = last_event(sql, partition, after.epoch) if after else 0
    new = Cursor(partition, f"{number + 1}-{chance.token_hex(4)}", number + 1, 0, "", ended)
    row = {"namespace": sql.namespace, "partition": partition, "ordinal": new.ordinal, "epoch": new.epoch}
    # An epoch that another worker minted since the query above stays open: its row makes the insert below fail.
    sql.execute(update(cursors).where(here, c.ordinal <= number).values(closed=True))
    # An embedded store begins an epoch with each start. Redis may still have an ended one: the last that archived
    # anything, if the workers that minted the next ones died before they wrote them to Redis.
    used = max((row.ordinal for row in found if row.offset), default=0)
    sql.execute(delete(cursors).where(here, c.ordinal <= number - _KEPT, c.ordinal != used))
    try:
        with sql.begin_nested():
            row |= {"offset": 0, "event": "", "closed": False, "minted_ms": now_ms(sql), "begun": False}
            sql.execute(insert(cursors), row)
    except exc.IntegrityError:
        # Another worker minted an epoch since the query above, and closed the same rows.
        return None
    return new


def begin(sql: Sql, partition: int, epoch: str) -> None:
    """Note that an epoch is being written to Redis."""
    sql.execute(update(cursors).where(_here(sql, partition, epoch)).values(begun=True))


def begin_complete(sql: Sql, partition: int, epoch: str) -> None:
    """Like `begin`, for an epoch at whose start nothing was missing in Redis: `minted_since` leaves it out."""
    sql.execute(update(cursors).where(_here(sql, partition, epoch)).values(begun=True, minted_ms=None))


def never_begun(sql: Sql, partition: int, epoch: str) -> None:
    """Note that Redis did not accept the epoch."""
    sql.execute(update(cursors).where(_here(sql, partition, epoch)).values(begun=False))


def any_begun(sql: Sql, partition: int) -> bool:
    """Whether an epoch of the partition began, or may have: older releases did not note that."""
    c = cursors.c
    began = or_(c.begun.is_not(False), c.offset > 0)
    query = select(c.ordinal).where(c.namespace == sql.namespace, c.partition == partition, began).limit(1)
    return sql.execute(query).first() is not None


def last_begun(sql: Sql, partition: int, epoch: str) -> Cursor | None:
    """How far an epoch was archived; None if entries of a later one are archived."""
    c = cursors.c
    query = select(c.partition, c.epoch, c.ordinal, c.offset, c.event).where(c.namespace == sql.namespace)
    rows = sql.execute(query.where(c.partition == partition).order_by(c.ordinal.desc())).all()
    for row in rows:
        if row.epoch == epoch:
            return Cursor(*row)
        if row.offset:
            break
    return None


def last_events(sql: Sql) -> dict[int, tuple[int, int | None]]:
    """How many epochs of each partition were used, and the last lifecycle event of the newest one, if it is open."""
    c, e = cursors.c, events.c
    last = select(func.max(e.offset)).where(e.namespace == c.namespace, e.partition == c.partition, e.epoch == c.epoch)
    query = select(c.partition, c.ordinal, c.offset, last.scalar_subquery())
    rows = sql.execute(query.where(c.namespace == sql.namespace, c.closed.is_(False))).all()
    # An epoch without archived entries may have been minted just now and not begun yet: the previous one is closed.
    return {at: (ordinal, last or 0) if offset else (ordinal - 1, None) for at, ordinal, offset, last in rows}


def last_event(sql: Sql, partition: int, epoch: str) -> int:
    """The number of the last lifecycle event of an epoch, 0 without one."""
    e = events.c
    query = select(func.max(e.offset)).where(e.namespace == sql.namespace, e.partition == partition, e.epoch == epoch)
    return sql.execute(query).scalar() or 0


def is_repaired(sql: Sql, partition: int, epoch: str) -> bool:
    """Whether a repair brought a whole epoch to SQL before it ended, so that nothing was lost with it."""
    query = select(cursors.c.ordinal).where(_here(sql, partition, epoch), cursors.c.minted_ms == REPAIRED)
    return sql.execute(query).first() is not None


def minted_since(sql: Sql, seconds: float) -> Minted:
    """The partitions where an epoch began within the last seconds after another one, because Redis lost data.

    An epoch that never began does not count: its worker died, and the next epoch counts, if anything was lost.
    """
    c, earlier = cursors.c, cursors.alias("earlier")
    now = now_ms(sql)
    had_begun = exists().where(
        earlier.c.namespace == c.namespace,
        earlier.c.partition == c.partition,
        earlier.c.ordinal < c.ordinal,
        or_(earlier.c.begun.is_not(False), earlier.c.offset > 0),
    )
    began = and_(c.minted_ms >= now - int(seconds * 1000), c.begun.is_not(False))
    late = and_(c.namespace == sql.namespace, began, had_begun)
    partitions, last = sql.execute(select(func.count(c.partition.distinct()), func.max(c.minted_ms)).where(late)).one()
    return Minted(int(partitions), max(0.0, (now - last) / 1000) if last is not None else 0.0)


def _here(sql: Sql, partition: int, epoch: str) -> ColumnElement[bool]:
    c = cursors.c
    return and_(c.namespace == sql.namespace, c.partition == partition, c.epoch == epoch)


# Redis came back with other data: changes since a time, and the position that a repair reached


@dataclass(frozen=True, slots=True)
class Changed:
    """Records of a partition that changed, and the hashes of erased ones (`record_index.hashed`)."""

    records: list[str]
    erased: set[str]


def changed_since(sql: Sql, partition: int, since_ms: int) -> Changed:
    """The records of a partition that changed since then, by the clocks of Redis, and the erased ones."""
    r = records.c

    def found(scope: str) -> list[str]:
        rows: list[str] = []
        for deleted in (False, True):  # in the order of the index
            here: list[ColumnElement[Any]] = [r.namespace == sql.namespace, r.scope == scope, r.deleted.is_(deleted)]
            here += [r.listed_ms > since_ms - LISTED_MS, r.updated_ms >= since_ms, r.partition == partition]
            rows += sql.execute(select(r.record).where(*here)).scalars()
        return rows

    pending = select(erasures.c.record).where(erasures.c.namespace == sql.namespace, erasures.c.partition == partition)
    erased = {hashed(sql.namespace, record) for record in sql.execute(pending).scalars()}
    return Changed([record for scope in SCOPES for record in found(scope)], erased | set(found(ERASED)))


def reach(sql: Sql, after: Cursor | None, to: Cursor) -> bool:
    """Note that a repair brought SQL up to `to`, if its cursor is still at `after`."""
    if not is_at(sql, to.partition, after):
        return False
    c = cursors.c
    here = and_(c.namespace == sql.namespace, c.partition == to.partition)
    if after is not None and after.epoch == to.epoch:
        at = update(cursors).where(here, c.epoch == to.epoch)
        sql.execute(at.values(offset=to.offset, event=to.event, minted_ms=REPAIRED))
        return True
    sql.execute(update(cursors).where(here).values(closed=True))
    row = {"namespace": sql.namespace, "partition": to.partition, "ordinal": to.ordinal, "epoch": to.epoch}
    row |= {"offset": to.offset, "event": to.event, "closed": False, "minted_ms": REPAIRED, "begun": True}
    sql.execute(insert(cursors), row)
    return True


def is_at(sql: Sql, partition: int, after: Cursor | None) -> bool:
    """Whether the partition's cursor is exactly here; it is locked until the transaction ends."""
    c = cursors.c
    here = and_(c.namespace == sql.namespace, c.partition == partition)
    query = select(c.ordinal, c.epoch, c.offset, c.event).where(here).with_for_update()
    newest = max(sql.execute(query).all(), default=None)
    return newest == ((after.ordinal, after.epoch, after.offset, after.event) if after else None)


# The database's clock


def clock_us(sql: Sql) -> int:
    """The database's clock, in microseconds since 1970."""
    if sql.postgresql:
        return int(sql.execute(select(func.extract("epoch", func.clock_timestamp()) * 1_000_000)).scalar_one())
    julian = sql.execute(select(func.julianday("now"))).scalar_one()
    return int((julian - 2440587.5) * 86_400_000_000)


def now_ms(sql: Sql) -> int:
    """The database's clock, in milliseconds since 1970."""
    return clock_us(sql) // 1000


def ordinal(epoch: str) -> int:
    """The number of an epoch within its partition, with which its name begins."""
    number = epoch.partition("-")[0]
    return int(number) if number.isdecimal() else 0
