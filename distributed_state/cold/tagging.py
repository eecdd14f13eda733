"""The rows by which records are found by their tags. Law: they are the tags of the record's head, in order of its text.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import Connection, and_, delete, select

from distributed_state.cold import bulk
from distributed_state.cold.entries import Parsed
from distributed_state.cold.tables import tags
from distributed_state.values.model import TAG
from distributed_state.values.tags import tag_of


def note(connection: Connection, namespace: str, accepted: Iterable[Parsed]) -> None:
    """Follow what these entries do to the tags of their records, whose rows are locked."""
    last: dict[tuple[str, str], bool] = {}
    cleared: set[str] = set()
    for item in accepted:
        record = item.entry.record
        for tag, there in item.tags:
            if tag:
                last[record, tag] = there
            else:
                cleared.add(record)
                last = {place: there for place, there in last.items() if place[0] != record}
    t = tags.c
    gone = [{"r": record} for record in sorted(cleared)]
    bulk.remove(connection, tags, gone, lambda row: and_(t.namespace == namespace, t.record == row.r))
    # Those that are set, too: whether they were there before nobody has asked.
    touched = [{"r": record, "g": tag} for record, tag in sorted(last)]
    bulk.remove(
        connection, tags, touched, lambda row: and_(t.namespace == namespace, t.tag == row.g, t.record == row.r)
    )
    kept = sorted((tag, record) for (record, tag), there in last.items() if there)
    bulk.add(connection, tags, [(namespace, *place) for place in kept])


def replace(connection: Connection, namespace: str, record: str, fields: Mapping[bytes, bytes]) -> None:
    """Let the record have the tags of this state, and no others."""
    connection.execute(delete(tags).where(tags.c.namespace == namespace, tags.c.record == record))
    found = sorted(tag_of(name) for name in fields if name[: len(TAG)] == TAG)
    bulk.add(connection, tags, [(namespace, tag, record) for tag in found])


def held(connection: Connection, namespace: str, names: Iterable[str]) -> dict[str, set[str]]:
    """The tags of these records."""
    found: dict[str, set[str]] = {}
    for chunk in bulk.chunks(sorted(names), 5000):
        mine = and_(tags.c.namespace == namespace, bulk.among(connection, tags.c.record, chunk))
        for record, tag in connection.execute(select(tags.c.record, tags.c.tag).where(mine)):
            found.setdefault(record, set()).add(tag)
    return found
