"""What is shown of an archive: quarantined entries, forks of a record, and facts for a doctor. Law: it only reads.

Design: section 9.
"""

from __future__ import annotations

from sqlalchemy import Connection, Table, func, select

from distributed_state.cold import change_reading, epochs, opening
from distributed_state.cold.tables import branches, cursors, erasures, quarantine, records
from distributed_state.cold.values import RESOLVED, Quarantined
from distributed_state.values.journal import unpack
from distributed_state.values.model import PARENT

_CONNECTIONS = """
select (select count(*) from pg_stat_activity where backend_type = 'client backend'), setting
from pg_settings where name = 'max_connections'
"""
RECENT = 600.0  # seconds for which an epoch that began is news
MINTED = "epochs minted lately"
NEWEST = "newest quarantined"
NONE_MINTED = "none began behind another one lately"
_COUNTED = {"records": records, "cursors": cursors, "erasures": erasures}


def quarantined(connection: Connection, namespace: str) -> list[Quarantined]:
    """The entries that could not be archived, or that a newer epoch replaced, oldest first."""
    q = quarantine.c
    names = [q.id, q.partition, q.epoch, q.offset, q.event, q.record, q.version, q.reason, q.data, q.time_ms]
    rows = connection.execute(select(*names).where(q.namespace == namespace).order_by(q.id))
    return [Quarantined(*row) for row in rows]


def refusal(connection: Connection, namespace: str, event: str) -> str:
    """Why the entry of this event is in quarantine; "" if it is not."""
    q = quarantine.c
    found = connection.execute(select(q.reason).where(q.namespace == namespace, q.event == event)).scalar()
    return str(found or "")


def newest_quarantined(connection: Connection, namespace: str) -> tuple[str, int, str] | None:
    """The entry that came into quarantine last: its record, version and the reason."""
    q = quarantine.c
    query = select(q.record, q.version, q.reason).where(q.namespace == namespace).order_by(q.id.desc()).limit(1)
    row = connection.execute(query).first()
    return None if row is None else (row.record, row.version, row.reason)


def forked(connection: Connection, namespace: str, source: str, limit: int) -> list[tuple[str, int | None, int, bool]]:
    """The records that were forked from one, the newest first: the version of it, when that was, whether deleted."""
    r = records.c
    query = select(r.record, r.created_ms, r.deleted).where(r.namespace == namespace, r.parent == source)
    found = []
    for record, created_ms, deleted in connection.execute(query.order_by(r.key.desc()).limit(limit)):
        rows = change_reading.outlines(connection, namespace, record, 0, 2, 1)
        names = {name: value for row in rows for _, name, value in unpack(row.data)}
        version = names.get(PARENT, b"").rpartition(b"@")[2]
        found.append((record, int(version) if version.isdigit() else None, created_ms, deleted))
    return found


def count(connection: Connection, namespace: str, table: Table) -> int:
    """How many rows of this table the namespace has."""
    query = select(func.count()).select_from(table).where(table.c.namespace == namespace)
    return int(connection.execute(query).scalar_one())


def count_quarantined(connection: Connection, namespace: str) -> int:
    """How many entries are in quarantine, without those of which nothing is lost."""
    q = quarantine.c
    query = select(func.count()).where(q.namespace == namespace, q.reason != RESOLVED)
    return int(connection.execute(query).scalar_one())


def connections(connection: Connection) -> tuple[int, int] | None:
    """How many connections the server has, and how many it allows; None for a file."""
    if connection.dialect.name != "postgresql":
        return None
    used, most = connection.exec_driver_sql(_CONNECTIONS).one()
    return int(used), int(most)


def facts(connection: Connection, namespace: str) -> dict[str, str]:
    """Facts about the server and the namespace's tables, by name."""
    version = connection.dialect.server_version_info or ()
    found = {
        "server version": ".".join(str(part) for part in version),
        "revision": str(opening.revision(connection)),
    }
    found |= {name: str(count(connection, namespace, table)) for name, table in _COUNTED.items()}
    found["quarantined"] = str(count_quarantined(connection, namespace))
    b = branches.c
    records_of = select(func.count(b.record.distinct())).where(b.namespace == namespace)
    minted = epochs.minted_since(connection, namespace, RECENT)
    lately = f"{minted.partitions} partitions began another one within ten minutes, the last {minted.ago:.0f} s ago"
    found[MINTED] = lately if minted.partitions else NONE_MINTED
    if newest := newest_quarantined(connection, namespace):
        found[NEWEST] = f"{newest[0][:200]} version {newest[1]}: {newest[2][:500]}"
    found["branched records"] = str(connection.execute(records_of).scalar_one())
    if connection.dialect.name == "postgresql":
        used, most = connections(connection) or (0, 0)
        found |= {"connections": str(used), "most connections": str(most)}
    if connection.dialect.name == "sqlite":
        found["journal mode"] = str(connection.exec_driver_sql("PRAGMA journal_mode").scalar())
    return found
