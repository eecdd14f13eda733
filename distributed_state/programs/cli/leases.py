"""Commands about who holds which records. Law: a lease is named by its fencing token, and ended only if it is that."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer
from rich.table import Table

from distributed_state.errors import NotFound
from distributed_state.programs.cli.auditing import ago
from distributed_state.programs.cli.looking import plain
from distributed_state.programs.cli.shell import Id, Scope, app, err, open_existing, out


@app.command()
def leases(
    context: typer.Context,
    scope: Annotated[str | None, typer.Option(help="Only of this kind: session, user, app or task.")] = None,
    prefix: Annotated[str, typer.Option(help="Only of ids that begin so.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Rows per page.")] = 100,
    after: Annotated[str | None, typer.Option(help="Continue behind this cursor, which the page before named.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List who holds which records, locks and running turns, and who waits for them; those held longest first.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents leases[/]
    """
    with open_existing(context) as store:
        found = store.leases(scope=scope, prefix=prefix, limit=limit, after=after)
        now = store.time() if found and not as_json else 0.0
    if as_json:
        # JSON in ASCII: control sequences that a terminal would obey are escaped.
        sys.stdout.writelines(json.dumps(dataclasses.asdict(each)) + "\n" for each in found)
    else:
        table = Table("record", "kind", "token", "replica", "held", "ends in", "waiting")
        for each in found:
            times = [ago(now - each.since), f"{max(0.0, each.ends - now):.0f}s", str(each.waiting or "")]
            row = [f"{each.scope} {each.record_id}", each.kind, str(each.token), each.replica, *times]
            table.add_row(*(plain(text) for text in row))
        out.print(table)
    if len(found) == limit:
        err.print(f"more may follow: --after {found[-1].cursor}", markup=False, highlight=False)


@app.command(name="end-lease")
def end_lease(
    context: typer.Context,
    id: Id,
    token: Annotated[int, typer.Argument(help="Its fencing token, as `leases` shows it.", show_default=False)],
    scope: Scope = "session",
) -> None:
    """End a lease, whoever holds it: what its holder writes is refused from then on, and who waits is next.

    Example: [cyan]distributed-state end-lease c1 1764123456789012[/]
    """
    with open_existing(context) as store:
        if not store.end_lease(id, token, scope=scope):
            raise NotFound(f"{scope} {id!r:.200}: no lease with token {token} is held (any more)")
