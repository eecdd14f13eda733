"""Copies of the package that are later releases, with migrations that this one lacks. Law: this tree is not changed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from below import ROOT

from distributed_state.cold.tables import REVISIONS

_MIGRATION = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = {revision!r}, {before!r}


def upgrade() -> None:
    {change}
"""
_CHANGES = {
    "next": "for table in ('records', 'quarantine'): op.add_column(table, sa.Column('of_the_next', sa.Integer))",
    "last": "op.drop_column('quarantine', 'of_the_next')",
}


def later_release(folder: Path, *steps: str) -> None:
    """Copy the package into a folder, as a later release.

    The step "next" adds a column to two tables; workers of that release need the one in the quarantine. The step "last"
    removes it: its workers, said to be of release 99, do without.
    """
    package = folder / "distributed_state"
    shutil.copytree(ROOT / "distributed_state", package, ignore=shutil.ignore_patterns("__pycache__"))
    before = REVISIONS[-1]
    for step in steps:
        made = _MIGRATION.format(revision=step, before=before, change=_CHANGES[step])
        (package / f"cold/migrations/versions/{step}.py").write_text(made)
        before = step
    tables = package / "cold/tables.py"
    written = tables.read_text()
    written = replaced(r"^REVISIONS = .*$", f"REVISIONS = {(*REVISIONS, *steps)!r}", written)
    if "last" in steps:
        written = replaced(r"^(CONTRACTS: .* =) .*$", r"\1 {'last': '99'}", written)
    elif "next" in steps:
        written = replaced(r'^( +)(Column\("reason".*)$', r'\1\2\n\1Column("of_the_next", Integer),', written)
    tables.write_text(written)


def replaced(pattern: str, by: str, written: str) -> str:
    """Replace the one place of a text that matches."""
    found, count = re.subn(pattern, by, written, flags=re.M)
    assert count == 1, pattern
    return found
