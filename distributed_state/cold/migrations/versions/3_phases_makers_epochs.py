"""The phase and size of each record, by which it is found; who made a token, or erases; epochs that began.

Nothing is computed for what is there: that would read the whole archive, while workers wait. Each commit brings phase
and size; who made a token that is there is not known. Of an epoch NULL is what nobody noted, as workers of a release
before this one go on to write; they ask for erasures in nobody's name, which is the column's default.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the columns, which rewrites no row, and the index of rows that have a phase: there is none yet."""
    op.add_column("access_tokens", sa.Column("made_by", TEXT, nullable=True))
    op.add_column("records", sa.Column("phase", TEXT, nullable=True))
    op.add_column("records", sa.Column("size", sa.BigInteger, nullable=True))
    op.add_column("cursors", sa.Column("minted_ms", sa.BigInteger, nullable=True))
    op.add_column("cursors", sa.Column("begun", sa.Boolean, nullable=True))
    op.add_column("erasures", sa.Column("actor", TEXT, nullable=False, server_default=""))
    there = sa.text("phase IS NOT NULL")
    columns = ["namespace", "phase", "scope", "deleted", "listed_ms", "key"]
    op.create_index("records_phased", "records", columns, postgresql_where=there, sqlite_where=there)


def downgrade() -> None:
    """Remove them: a token is refused alone then, without those that it made."""
    op.drop_index("records_phased", "records")
    op.drop_column("erasures", "actor")
    op.drop_column("cursors", "begun")
    op.drop_column("cursors", "minted_ms")
    op.drop_column("records", "size")
    op.drop_column("records", "phase")
    op.drop_column("access_tokens", "made_by")
