"""Add the tokens that sessions used, by day and model.

Workers of the release before write no tokens. If one of them archives a newer worker's turn, that turn's tokens are in
the session's own sums, but not in this table.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "usage",
        sa.Column("record", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("model", TEXT, primary_key=True),
        sa.Column("calls", sa.BigInteger, nullable=False),
        sa.Column("input_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
    )
    op.create_index("usage_by_day", "usage", ["day"])


def downgrade() -> None:
    """Remove the table: sums by user and by day are lost, those of sessions are not."""
    op.drop_table("usage")
