"""When an epoch was minted, and whether it began in Redis."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2"


def upgrade() -> None:
    """Add the columns; NULL where nobody noted it, as workers of a release before this one go on to write."""
    op.add_column("cursors", sa.Column("minted_ms", sa.BigInteger, nullable=True))
    op.add_column("cursors", sa.Column("begun", sa.Boolean, nullable=True))


def downgrade() -> None:
    """Remove them."""
    op.drop_column("cursors", "begun")
    op.drop_column("cursors", "minted_ms")
