"""Add each record's phase and size, each token's maker, each erasure's actor, and whether each epoch began.

Existing rows get no values: that would read the whole archive while workers wait. Each commit sets phase and size; the
makers of existing tokens stay unknown. An epoch has NULL if it was minted by a worker of an older release, which may
still run; erasures that such workers request have no actor, the column's default.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the columns, which rewrites no row, and the index of rows with a phase, which is empty at first."""
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
    """Remove the columns: revoking a token then no longer revokes the tokens made with it."""
    op.drop_index("records_phased", "records")
    op.drop_column("erasures", "actor")
    op.drop_column("cursors", "begun")
    op.drop_column("cursors", "minted_ms")
    op.drop_column("records", "size")
    op.drop_column("records", "phase")
    op.drop_column("access_tokens", "made_by")
