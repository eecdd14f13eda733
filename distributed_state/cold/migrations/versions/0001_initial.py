"""The tables of the first release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Create every table."""
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
    op.create_table(
        "changes",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("record", TEXT, primary_key=True),
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("epoch", TEXT, primary_key=True),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("event", TEXT, nullable=False),
        sa.Column("time_ms", sa.BigInteger, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("actor", TEXT, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("label", TEXT, nullable=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_index(
        "changes_labels",
        "changes",
        ["namespace", "record", "version"],
        postgresql_where=sa.text("label IS NOT NULL"),
        sqlite_where=sa.text("label IS NOT NULL"),
    )
    op.create_table(
        "messages",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("record", TEXT, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("epoch", TEXT, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "snapshots",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("record", TEXT, primary_key=True),
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("epoch", TEXT, primary_key=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "records",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("record", TEXT, primary_key=True),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("scope", TEXT, nullable=False),
        sa.Column("id", TEXT, nullable=False),
        sa.Column("owner", TEXT, nullable=True),
        sa.Column("epoch", TEXT, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("updated_ms", sa.BigInteger, nullable=False),
        sa.Column("deleted", sa.Boolean, nullable=False),
        sa.Column("parent", TEXT, nullable=True),
    )
    op.create_index("records_forked", "records", ["namespace", "parent"])
    op.create_index("records_listed", "records", ["namespace", "scope", "deleted", "updated_ms", "record"])
    op.create_index(
        "records_listed_by_owner", "records", ["namespace", "scope", "owner", "deleted", "updated_ms", "record"]
    )
    op.create_index("records_owned", "records", ["namespace", "owner"])
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
    op.create_table(
        "quarantine",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
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


def downgrade() -> None:
    """Refuse: it would remove every history."""
    raise NotImplementedError("the first release has nothing to go back to")
