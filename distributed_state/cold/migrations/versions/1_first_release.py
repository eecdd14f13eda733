"""The tables of the first release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create every table."""
    _of_the_namespace()
    _of_records()
    _leave_room()
    _of_each_record()
    _of_items()
    _of_blocks()
    _of_what_happened()
    _of_what_is_put_aside()
    _of_what_is_erased()


def _of_the_namespace() -> None:
    op.create_table(
        "namespaces",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("archive_id", TEXT, nullable=False),
        sa.Column("partitions", sa.Integer, nullable=False),
        sa.Column("layout", sa.Integer, nullable=False),
    )
    op.create_table(
        "cursors",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("ordinal", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", TEXT, nullable=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("event", TEXT, nullable=False),
        sa.Column("closed", sa.Boolean, nullable=False),
    )


def _of_records() -> None:
    op.create_table(
        "records",
        sa.Column("key", SERIAL, primary_key=True, autoincrement=True),
        sa.Column("namespace", TEXT, nullable=False),
        sa.Column("record", TEXT, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("scope", TEXT, nullable=False),
        sa.Column("owner", TEXT, nullable=True),
        sa.Column("epoch", TEXT, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("updated_ms", sa.BigInteger, nullable=False),
        sa.Column("listed_ms", sa.BigInteger, nullable=False),
        sa.Column("deleted", sa.Boolean, nullable=False),
        sa.Column("parent", TEXT, nullable=True),
        sa.Column("lifetime", TEXT, nullable=True),
        sqlite_autoincrement=True,
    )
    newest = ["scope", "deleted", "listed_ms", "key"]
    op.create_index("records_named", "records", ["namespace", "record"], unique=True)
    op.create_index("records_listed", "records", ["namespace", *newest])
    _index_some("records_owned", "records", "owner", ["namespace", "owner", *newest])
    _index_some("records_forked", "records", "parent", ["namespace", "parent"])
    _index_some("records_mortal", "records", "lifetime", ["namespace", "partition", "record"])
    op.create_table(
        "tags",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("tag", TEXT, primary_key=True),
        sa.Column("record", TEXT, primary_key=True),
    )
    op.create_index("tags_held", "tags", ["namespace", "record"])


def _leave_room() -> None:
    # Room for the next version of a row on the same page: an update that stays on its page does not change the indexes.
    if op.get_context().dialect.name == "postgresql":
        op.execute("ALTER TABLE records SET (fillfactor = 50)")
        op.execute("ALTER TABLE cursors SET (fillfactor = 50)")


def _of_each_record() -> None:
    op.create_table(
        "changes",
        sa.Column("record", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("time_ms", sa.BigInteger, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("epoch", TEXT, nullable=False),
        sa.Column("event", TEXT, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("actor", TEXT, nullable=False),
        sa.Column("label", TEXT, nullable=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    _index_some("changes_labels", "changes", "label", ["record", "version"])
    op.create_table(
        "messages",
        sa.Column("record", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "snapshots",
        sa.Column("record", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("epoch", TEXT, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "shares",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("source", TEXT, primary_key=True),
        sa.Column("record", TEXT, primary_key=True),
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("start", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("stop", sa.BigInteger, primary_key=True, autoincrement=False),
    )
    op.create_index("shares_held", "shares", ["namespace", "record"])


def _of_items() -> None:
    op.create_table(
        "items",
        sa.Column("record", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("collection", sa.LargeBinary, primary_key=True),
        sa.Column("key", sa.LargeBinary, primary_key=True),
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("origin", TEXT, nullable=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "layers",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("record", TEXT, primary_key=True),
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("place", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("source", TEXT, nullable=False),
        sa.Column("first", sa.BigInteger, nullable=False),
        sa.Column("last", sa.BigInteger, nullable=False),
    )
    op.create_index("layers_shown", "layers", ["namespace", "source"])


def _of_blocks() -> None:
    for table, first, last in (("change_blocks", "first", "last"), ("message_blocks", "start", "stop")):
        op.create_table(
            table,
            sa.Column("record", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column(last, sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column(first, sa.BigInteger, nullable=False),
            sa.Column("oldest_ms", sa.BigInteger, nullable=False),
            sa.Column("newest_ms", sa.BigInteger, nullable=False),
            sa.Column("count", sa.Integer, nullable=False),
            sa.Column("data", sa.LargeBinary, nullable=False),
        )


def _of_what_happened() -> None:
    op.create_table(
        "events",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", TEXT, primary_key=True),
        sa.Column("offset", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("id", TEXT, nullable=False),
        sa.Column("type", TEXT, nullable=False),
        sa.Column("subject", TEXT, nullable=False),
        sa.Column("time_ms", sa.BigInteger, nullable=False),
        sa.Column("actor", TEXT, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_index("events_by_subject", "events", ["namespace", "subject", "time_ms"])
    op.create_index("events_by_time", "events", ["namespace", "time_ms"])
    op.create_index("events_by_type", "events", ["namespace", "type", "time_ms"])


def _of_what_is_put_aside() -> None:
    op.create_table(
        "quarantine",
        sa.Column("id", SERIAL, primary_key=True, autoincrement=True),
        sa.Column("namespace", TEXT, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("epoch", TEXT, nullable=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("event", TEXT, nullable=False),
        sa.Column("record", TEXT, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.Column("time_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("quarantine_namespaces", "quarantine", ["namespace"])
    op.create_table(
        "branches",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("record", TEXT, primary_key=True),
        sa.Column("epoch", TEXT, primary_key=True),
        sa.Column("event", TEXT, primary_key=True),
        sa.Column("branch", TEXT, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("time_ms", sa.BigInteger, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("actor", TEXT, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.Column("cause", TEXT, nullable=False),
        sa.Column("kept_ms", sa.BigInteger, nullable=False),
        sa.Column("owner", TEXT, nullable=True),
        sa.Column("told", sa.Boolean, nullable=False),
    )


def _of_what_is_erased() -> None:
    op.create_table(
        "erasures",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("record", TEXT, primary_key=True),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("owner", TEXT, nullable=True),
        sa.Column("forks", sa.Boolean, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
    )


def _index_some(name: str, table: str, column: str, columns: list[str]) -> None:
    there = sa.text(f"{column} IS NOT NULL")
    op.create_index(name, table, columns, postgresql_where=there, sqlite_where=there)


def downgrade() -> None:
    """Refuse: it would remove every history."""
    raise NotImplementedError("the first release has nothing to go back to")
