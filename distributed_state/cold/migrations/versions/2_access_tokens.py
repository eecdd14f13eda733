"""The tokens of the HTTP service's callers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = "1"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "access_tokens",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("id", TEXT, primary_key=True),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("prefix", TEXT, nullable=False),
        sa.Column("rights", TEXT, nullable=False),
        sa.Column("actor", TEXT, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger, nullable=True),
        sa.Column("revoked_ms", sa.BigInteger, nullable=True),
    )


def downgrade() -> None:
    """Remove the table: every caller needs a new token afterwards."""
    op.drop_table("access_tokens")
