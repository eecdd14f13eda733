"""Commands that search, and make what is searched. Law: an index can always be made anew from the archive."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

import distributed_state
from distributed_state.programs.cli.looking import plain
from distributed_state.programs.cli.running import named
from distributed_state.programs.cli.shell import app, err, open_store, open_to_list, out, print_json

_HOW = "How it is searched: a Search of your program, as shop.settings:search. By default as the index was made."
How = Annotated[str | None, typer.Option("--search", metavar="MODULE:NAME", help=_HOW)]


def _given(how: str | None) -> dict[str, Any]:
    return {} if how is None else {"search": named(how)}


@app.command()
def index(
    context: typer.Context,
    how: How = None,
    remove: Annotated[bool, typer.Option("--remove", help="Switch search off and remove the index.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Switch search on, and bring the index up to the archive. Safe beside workers; it may be broken off and repeated.

    Example: [cyan]distributed-state --archive postgresql://host/agents index[/]
    """
    if remove:
        if not yes:
            typer.confirm("Remove the index? What it says stays in the archive.", abort=True, err=True)
        with open_store(context, search=False, archiver=False) as store:
            typer.echo("removed" if store.remove_index() else "there is none")
        return
    with open_store(context, **_given(how)) as store, err.status("looking") as status:

        def show(so_far: distributed_state.Indexed) -> None:
            status.update(f"{so_far.behind} of {so_far.records} records left")

        done = store.update_index(progress=show)
    typer.echo(f"the index has all of {done.records} records")


@app.command()
def search(
    context: typer.Context,
    query: Annotated[str, typer.Argument(help="Words that are all said there.", show_default=False)],
    scope: Annotated[str | None, typer.Option(help="Only records of this kind: session, user, app or task.")] = None,
    prefix: Annotated[str, typer.Option(help="Only records whose ids begin so.")] = "",
    user: Annotated[str | None, typer.Option(help="Only records of this user.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many to show.")] = 10,
    json_: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    how: How = None,
) -> None:
    """Find what messages, fields and items say, the most relevant first.

    Example: [cyan]distributed-state search "weekend Oslo" --user u1[/]
    """
    with open_to_list(context, **_given(how)) as store:
        hits = store.search(query, scope=scope, prefix=prefix, user=user, limit=limit, fresh=True)
    if json_:
        print_json([asdict(hit) for hit in hits])
        return
    for hit in hits:
        place = f"message {hit.number}" if hit.kind == "message" else f"{hit.kind} {hit.key}"
        out.print(f"[bold]{plain(hit.scope)} {plain(hit.id)}[/] {plain(place)}: {plain(hit.text)}", soft_wrap=True)
