"""Add when each session is served next by its handler."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "4"
down_revision = "3"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the column, which rewrites no row, and the index of sessions with a handler, which is empty at first."""
    op.add_column("records", sa.Column("due", TEXT, nullable=True))
    there = sa.text("due IS NOT NULL")
    columns = ["namespace", "partition", "due", "record"]
    op.create_index("records_due", "records", columns, postgresql_where=there, sqlite_where=there)


def downgrade() -> None:
    """Remove the column: until its next commit, a session that left Redis is not served."""
    op.drop_index("records_due", "records")
    op.drop_column("records", "due")
