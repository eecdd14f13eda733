"""The table of branches: commits that were acknowledged and that their record does not continue."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Create the table; what diverged before is in the quarantine."""
    op.create_table(
        "branches",
        sa.Column("namespace", TEXT, primary_key=True),
        sa.Column("record", TEXT, primary_key=True),
        sa.Column("epoch", TEXT, primary_key=True),
        sa.Column("event", TEXT, primary_key=True),
        sa.Column("branch", TEXT, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("time_ms", sa.BigInteger, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("actor", TEXT, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.Column("cause", TEXT, nullable=False),
        sa.Column("kept_ms", sa.BigInteger, nullable=False),
        sa.Column("owner", TEXT, nullable=True),
        sa.Column("told", sa.Boolean, nullable=False),
    )


def downgrade() -> None:
    """Refuse: it would remove what was acknowledged and is nowhere else."""
    raise NotImplementedError("branches are kept; restore a backup to go back")
