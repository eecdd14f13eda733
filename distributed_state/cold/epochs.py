"""Which epochs of a partition SQL knows, when they were minted, and which of them began. Law: it only reads and notes.

Minting is in SQL first. Whoever dies before Redis is told leaves an epoch that never began: under it nobody can have
been acknowledged anything, so that its end is no loss. That it begins is in SQL before Redis is told, too: noted behind
that, a worker that dies in between, or SQL that is away, would make a silent loss of all that was acknowledged since.

Design: section 14.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, and_, exists, func, or_, select, update

from distributed_state.cold.tables import cursors, events
from distributed_state.cold.values import Cursor, Minted

REPAIRED = -1  # instead of when an epoch was minted: a repair brought SQL all of it, and the next one begins


def clock_us(connection: Connection) -> int:
    """The database's clock, in microseconds since 1970."""
    if connection.dialect.name == "postgresql":
        return int(connection.execute(select(func.extract("epoch", func.clock_timestamp()) * 1_000_000)).scalar_one())
    julian = connection.execute(select(func.julianday("now"))).scalar_one()
    return int((julian - 2440587.5) * 86_400_000_000)


def now_ms(connection: Connection) -> int:
    """The same, in milliseconds."""
    return clock_us(connection) // 1000


def last_begun(connection: Connection, namespace: str, partition: int, epoch: str) -> Cursor | None:
    """How far an epoch was archived, if nothing was of any that was minted after it."""
    c = cursors.c
    query = select(c.partition, c.epoch, c.ordinal, c.offset, c.event).where(c.namespace == namespace)
    rows = connection.execute(query.where(c.partition == partition).order_by(c.ordinal.desc())).all()
    for row in rows:
        if row.epoch == epoch:
            return Cursor(*row)
        if row.offset:
            break
    return None


def last_events(connection: Connection, namespace: str) -> dict[int, tuple[int, int | None]]:
    """How many epochs of each partition were used, and the last lifecycle event of the last one, if it is open."""
    c, e = cursors.c, events.c
    last = select(func.max(e.offset)).where(e.namespace == c.namespace, e.partition == c.partition, e.epoch == c.epoch)
    query = select(c.partition, c.ordinal, c.offset, last.scalar_subquery())
    rows = connection.execute(query.where(c.namespace == namespace, c.closed.is_(False))).all()
    # One that nothing was archived of may have been minted just now, and yet begin: the one before is closed.
    return {at: (ordinal, last or 0) if offset else (ordinal - 1, None) for at, ordinal, offset, last in rows}


def last_event(connection: Connection, namespace: str, partition: int, epoch: str) -> int:
    """The number of the last lifecycle event of an epoch, 0 if it has none."""
    e = events.c
    query = select(func.max(e.offset)).where(e.namespace == namespace, e.partition == partition, e.epoch == epoch)
    return connection.execute(query).scalar() or 0


def is_repaired(connection: Connection, namespace: str, partition: int, epoch: str) -> bool:
    """Whether a repair brought SQL all of an epoch, which was to end then: nothing was lost with it."""
    query = select(cursors.c.ordinal).where(_here(namespace, partition, epoch), cursors.c.minted_ms == REPAIRED)
    return connection.execute(query).first() is not None


def begin(connection: Connection, namespace: str, partition: int, epoch: str) -> None:
    """Note that Redis is told of an epoch now."""
    connection.execute(update(cursors).where(_here(namespace, partition, epoch)).values(begun=True))


def begin_repaired(connection: Connection, namespace: str, partition: int, epoch: str) -> None:
    """As `begin`, for an epoch that a repair of SQL begins: Redis lost nothing, so `minted_since` leaves it out."""
    connection.execute(update(cursors).where(_here(namespace, partition, epoch)).values(begun=True, minted_ms=None))


def never_begun(connection: Connection, namespace: str, partition: int, epoch: str) -> None:
    """Note that Redis did not take it."""
    connection.execute(update(cursors).where(_here(namespace, partition, epoch)).values(begun=False))


def _here(namespace: str, partition: int, epoch: str) -> ColumnElement[bool]:
    c = cursors.c
    return and_(c.namespace == namespace, c.partition == partition, c.epoch == epoch)


def any_begun(connection: Connection, namespace: str, partition: int) -> bool:
    """Whether an epoch of the partition began, as far as anybody noted: one of an older release may have."""
    c = cursors.c
    began = or_(c.begun.is_not(False), c.offset > 0)
    query = select(c.ordinal).where(c.namespace == namespace, c.partition == partition, began).limit(1)
    return connection.execute(query).first() is not None


def minted_since(connection: Connection, namespace: str, seconds: float) -> Minted:
    """The partitions that began another epoch within the last seconds, behind one that had begun, but for repairs.

    One that never began counts for nothing: whoever minted it died, and the next one counts, if anything was lost.
    """
    c, earlier = cursors.c, cursors.alias("earlier")
    now = now_ms(connection)
    had_begun = exists().where(
        earlier.c.namespace == c.namespace,
        earlier.c.partition == c.partition,
        earlier.c.ordinal < c.ordinal,
        or_(earlier.c.begun.is_not(False), earlier.c.offset > 0),
    )
    began = and_(c.minted_ms >= now - int(seconds * 1000), c.begun.is_not(False))
    late = and_(c.namespace == namespace, began, had_begun)
    partitions, last = connection.execute(
        select(func.count(c.partition.distinct()), func.max(c.minted_ms)).where(late)
    ).one()
    return Minted(int(partitions), max(0.0, (now - last) / 1000) if last is not None else 0.0)
