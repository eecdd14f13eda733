"""Who asked for an erasure, so that whoever completes it says so."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the column. It has a default for workers of the release before, which go on beside this one."""
    op.add_column("erasures", sa.Column("actor", TEXT, nullable=False, server_default=""))


def downgrade() -> None:
    """Remove the column."""
    with op.batch_alter_table("erasures") as table:
        table.drop_column("actor")
