"""The command that lists records. Law: what more there may be is said, with how to go on."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table

import distributed_state
from distributed_state.errors import InvalidValue
from distributed_state.programs.cli.auditing import WHEN, moment
from distributed_state.programs.cli.looking import plain, when
from distributed_state.programs.cli.shell import Scope, app, err, open_to_list, out


@app.command()
def sessions(
    context: typer.Context,
    user: Annotated[str | None, typer.Option(help="Only sessions of this user.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Only those whose ids begin so, in order of their ids.")] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="Only those with this tag, as name=value; may be given several times.")
    ] = None,
    phase: Annotated[str | None, typer.Option(help="Only those that are in this phase.")] = None,
    changed_since: Annotated[str | None, typer.Option(help=f"Only those that changed since: {WHEN}.")] = None,
    changed_before: Annotated[str | None, typer.Option(help="Only those that did not change since.")] = None,
    larger_than: Annotated[
        int | None, typer.Option(min=0, metavar="BYTES", help="Only those to which more was committed.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Also what is not archived yet.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Rows per page.")] = 50,
    after: Annotated[
        str | None, typer.Option(help="Continue after this cursor, which the previous page printed.")
    ] = None,
    scope: Scope = "session",
) -> None:
    """List sessions, the most recently archived change first, to the minute.

    Example: [cyan]distributed-state sessions --user u1 --phase booking --changed-since 2h[/]
    """
    tags = _tags(tag or [])
    now = time.time()
    since = moment("--changed-since", changed_since, now)
    before = moment("--changed-before", changed_before, now)
    # Not by an archiver of its own: the list would depend on how far that has come.
    with open_to_list(context, archiver=False) as store:
        rows = store.sessions(
            user=user, prefix=prefix, tags=tags, limit=limit, after=after, scope=scope, fresh=fresh, phase=phase,
            changed_since=since, changed_before=before, larger_than=larger_than,
        )  # fmt: skip
        if not rows and not fresh and isinstance(store, distributed_state.StateStore):
            waiting = store.stats()["unarchived"]
            if waiting:
                text = f"{waiting:.0f} commits are not archived yet, and not listed: --fresh lists them too"
                err.print(text, style="yellow", markup=False, highlight=False)
    table = Table("id", "user", "phase", "version", "bytes", "created", "updated", "")
    for row in rows:
        texts = (plain(row.id), plain(row.user or ""), plain(row.phase or ""), str(row.version), str(row.size or ""))
        table.add_row(*texts, when(row.created), when(row.updated), "deleted" if row.deleted else "")
    out.print(table)
    if len(rows) == limit:
        err.print(f"more may follow: --after {rows[-1].cursor}", markup=False, highlight=False)


def _tags(given: list[str]) -> dict[str, list[str]]:
    """What `--tag name=value` asks for: each name with all of its values."""
    tags: dict[str, list[str]] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidValue(f"{text!r:.80} is no tag: write it as name=value")
        tags.setdefault(name, []).append(value)
    return tags
