"""Finds the state before the present one. Law: a rollback is no step, so what it took back is not met again.

Design: section 11.
"""

from __future__ import annotations

from sqlalchemy import Connection, and_, case, or_, select

from distributed_state.cold import blocks
from distributed_state.cold.history import oldest
from distributed_state.cold.record_index import key_of
from distributed_state.cold.tables import changes
from distributed_state.errors import NotFound
from distributed_state.values.journal import unpack
from distributed_state.values.model import RESTORED

_STILL = ("checkpoint", "switch", "lifetime")  # kinds of commits that change nothing of what a rollback restores


def step_back(connection: Connection, namespace: str, record: str, version: int, steps: int) -> int:
    """The version whose state is `steps` before that of `version`, on the way on which it came about.

    A rollback is no step: from it the way leads on from the version whose state it is, so what it took back is not met
    again. Nor is a commit that changes no state. Read are as many rows as steps, however long the history is.
    """
    at = version
    left = steps
    while left:
        # One more than steps: the first is where we stand.
        way = _way(connection, key_of(namespace, record), at, left + 1)
        back = next(((passed, source) for passed, row in enumerate(way) if (source := _source(*row))), None)
        if back is not None:
            left = left - back[0]
            at = back[1]
            continue
        found = [version for version, _ in way]
        if len(found) <= left and (first := oldest(connection, namespace, record)) <= at and first not in found:
            found.append(first)  # what a purge or an import left of the way here
        if len(found) <= left:
            there = steps - left + max(len(found) - 1, 0)
            raise NotFound(f"{record[:200]}: {steps} steps back from version {version} there is nothing, only {there}")
        return found[left]
    return at


def _way(connection: Connection, key: blocks.Key, last: int, count: int) -> list[tuple[int, bytes | None]]:
    """The newest changes of state up to a version, and of those that are rollbacks what they did."""
    c = changes.c
    kept = and_(c.record == key, c.version <= last, or_(c.kind.not_in(_STILL), c.version == 1))
    query = select(c.version, case((c.kind == "rollback", c.data)).label("data")).where(kept)
    found = [(int(row.version), row.data) for row in connection.execute(query.order_by(c.version.desc()).limit(count))]
    for rows in blocks.downwards(connection, key, last):
        if len(found) == count and found[-1][0] > rows[-1].version:
            break
        found += [
            (row.version, row.data if row.kind == "rollback" else None)
            for row in rows
            if row.kind not in _STILL or row.version == 1
        ]
        found = sorted(found, key=lambda each: -each[0])[:count]
    return found


def _source(version: int, data: bytes | None) -> int:
    """The version whose state a rollback is, 0 if this is none. A file that was imported may say anything."""
    marks = [op.value for op in unpack(data or b"") if op.name == RESTORED and op.value.isdigit()]
    source = int(marks[-1][:19]) if marks else 0
    return source if source < version else 0
