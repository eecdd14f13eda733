"""By which token another one was made."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the column. Of tokens that are there it is not known."""
    op.add_column("access_tokens", sa.Column("made_by", TEXT, nullable=True))


def downgrade() -> None:
    """Remove the column: a token is refused alone then, without those that it made."""
    op.drop_column("access_tokens", "made_by")
