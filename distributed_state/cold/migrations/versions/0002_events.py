"""The table of lifecycle events, the lifetimes of records, and which records are being erased."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Create the table; what happened before is not in it. Nothing that is there has a lifetime."""
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
    op.add_column("records", sa.Column("lifetime", TEXT, nullable=True))
    op.create_index(
        "records_mortal",
        "records",
        ["namespace", "partition", "record"],
        postgresql_where=sa.text("lifetime IS NOT NULL"),
        sqlite_where=sa.text("lifetime IS NOT NULL"),
    )
    op.create_table(
        "erasures",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("record", TEXT, primary_key=True),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("owner", TEXT, nullable=True),
        sa.Column("forks", sa.Boolean, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    """Refuse: it would remove the audit trail."""
    raise NotImplementedError("events are kept; restore a backup to go back")
