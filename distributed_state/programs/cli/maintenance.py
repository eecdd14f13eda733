"""Commands that keep the archive small, current and searchable.

Law: what cannot be undone asks first, and a command that was ended is run again without harm.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

import distributed_state
from distributed_state.programs.cli.shell import (
    How,
    Scope,
    app,
    err,
    given_search,
    named,
    open_store,
    open_to_tidy,
    printable,
    span,
)


@app.command()
def compact(
    context: typer.Context,
    older_than: Annotated[str, typer.Option(metavar="AGE", help="Pack what is older, as 12h or 7d.")] = "1d",
) -> None:
    """Pack old history into compressed blocks in SQL. Everything reads it as before. Safe beside workers.

    Example: [cyan]distributed-state --archive postgresql://host/agents compact --older-than 7d[/]
    """
    with open_to_tidy(context) as store, err.status("looking") as status:
        done = store.compact(
            older_than=span("--older-than", older_than), progress=lambda records: status.update(f"{records} records")
        )
    typer.echo(f"packed {done['changes']} changes and {done['messages']} messages of {done['records']} records")


def _age(variable: str, help: str) -> Any:
    return typer.Option(envvar=variable, metavar="AGE", help=help)


def _count(variable: str, help: str) -> Any:
    return typer.Option(envvar=variable, min=1, help=help)


_older = _age("DISTRIBUTED_STATE_PURGE_OLDER_THAN", "Versions, branches and events older than 90d.")
_changes = _count("DISTRIBUTED_STATE_PURGE_KEEP_CHANGES", "All but so many changes of each record.")
_messages = _age("DISTRIBUTED_STATE_PURGE_MESSAGES_OLDER_THAN", "Let conversations show no older messages.")
_shown = _count("DISTRIBUTED_STATE_PURGE_KEEP_MESSAGES", "Let conversations show no more messages.")
_events = _age("DISTRIBUTED_STATE_PURGE_EVENTS_OLDER_THAN", "Events older than that, if not of the age of versions.")
_branches = _age("DISTRIBUTED_STATE_PURGE_BRANCHES_OLDER_THAN", "Branches older, if not of the age of versions.")


@app.command()
def purge(
    context: typer.Context,
    older_than: Annotated[str | None, _older] = None,
    keep_changes: Annotated[int | None, _changes] = None,
    messages_older_than: Annotated[str | None, _messages] = None,
    keep_messages: Annotated[int | None, _shown] = None,
    events_older_than: Annotated[str | None, _events] = None,
    branches_older_than: Annotated[str | None, _branches] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove what is old from SQL: versions, events, messages. The present states stay. This cannot be undone.

    Messages that conversations show no more are removed with the versions that showed them. Safe beside workers: no
    transaction takes more than some hundred records or some thousand events.

    Example: [cyan]distributed-state --archive postgresql://host/agents purge --older-than 90d --keep-messages 1000[/]
    """
    ages = {
        "older_than": older_than,
        "messages_older_than": messages_older_than,
        "events_older_than": events_older_than,
        "branches_older_than": branches_older_than,
    }
    seconds = {name: None if age is None else span(f"--{name.replace('_', '-')}", age) for name, age in ages.items()}
    if not yes:
        typer.confirm("Remove it for good?", abort=True, err=True)
    with open_to_tidy(context) as store, err.status("purging"):
        done = store.purge(**seconds, keep_changes=keep_changes, keep_messages=keep_messages)
    typer.echo(
        f"removed {done['changes']} changes, {done['messages']} messages and {done['events']} events of "
        f"{done['records']} records; {done['left_out']} messages are shown no more"
    )


@app.command()
def reencrypt(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count; change nothing.")] = False,
) -> None:
    """Re-encrypt everything with the current key of DISTRIBUTED_STATE_KEYS or DISTRIBUTED_STATE_KEY_FILE.

    What has that key already is skipped, so the command may be interrupted and repeated, while workers run. Exit code 1
    if a record cannot be decrypted.

    Example: [cyan]distributed-state reencrypt --dry-run[/]
    """
    done: distributed_state.Reencrypted | None = None  # None: nothing was looked at, as without keys

    def show(now: distributed_state.Reencrypted) -> None:
        nonlocal done
        done = now
        err.print(f"{done.records} records, {done.values} values", highlight=False)

    try:
        with open_store(context) as store:
            done = store.reencrypt(dry_run=dry_run, progress=show)
    finally:
        if done is not None:
            what = "to re-encrypt" if dry_run else "re-encrypted"
            counts = f"{done.records} records: {done.values} values and {done.copies} copies in Redis {what}"
            typer.echo(f"{counts}, {done.failed} records unreadable")
    if done.failed:
        raise typer.Exit(1)


@app.command()
def repair(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count; change nothing.")] = False,
) -> None:
    """Bring SQL up to Redis where a backup of SQL was restored that is older; [cyan]doctor[/] names such partitions.

    What Redis still has of the difference is archived: commits one by one where the journal holds them, else records
    whole. What neither has is listed. One partition after the other waits meanwhile. It may be interrupted and run
    again. Exit code 1 if something is lost, or SQL refuses something.

    Example: [cyan]distributed-state --url redis://host --archive postgresql://host/agents repair --dry-run[/]
    """

    def show(now: distributed_state.Repaired) -> None:
        status.update(f"{now.partitions} partitions, {len(now.behind)} behind, {now.records + now.commits} brought")

    with open_store(context) as store, err.status("looking") as status:
        done = store.repair(dry_run=dry_run, progress=show)
    if not done.behind:
        typer.echo(f"{done.partitions} partitions: in none is SQL older than Redis")
        return
    what = "to bring" if dry_run else "brought"
    typer.echo(f"partitions where SQL was older: {', '.join(map(str, done.behind))}")
    typer.echo(
        f"{what}: {done.commits} commits, {done.records} records whole, {done.events} events; {done.aside} aside"
    )
    if done.branched:
        typer.echo(f"kept in branches, see `branches`: {done.branched} commits that neither SQL nor Redis continues")
    for scope, id in done.deleted:
        typer.echo(f"deleted since the backup, erase it again if it was erased: {scope} {printable(id)}")
    for each in done.lost:
        typer.echo(f"lost: messages {each.first} to {each.last} of {each.scope} {printable(each.id)}")
    for scope, id in done.lost_items:
        typer.echo(
            f"lost, it may be: items of {scope} {printable(id)} that changed since the backup, but for the newest"
        )
    for scope, id in done.refused:
        typer.echo(f"refused by SQL, see `doctor` and the quarantine: something of {scope} {printable(id)}")
    if done.lost or done.lost_items or done.refused:
        raise typer.Exit(1)


@app.command()
def migrate(context: typer.Context) -> None:
    """Migrate the SQL schema to the latest version. Safe while others do the same; stores also do it when they open.

    Redis is not asked.

    Example: [cyan]distributed-state --archive postgresql+psycopg://host/agents migrate[/]
    """
    # Not a store: SQL's tables are nothing that Redis need be there for.
    from distributed_state.cold.store import ColdStore
    from distributed_state.store.lifecycle import EMBEDDED_ARCHIVE, resolve

    settings = resolve(**context.obj)
    archive = settings.archive or EMBEDDED_ARCHIVE
    ColdStore.open(archive, settings.namespace, timeout=settings.sql_timeout, alone=settings.url is None).close()
    typer.echo("the schema is up to date")


@app.command()
def upcast(
    context: typer.Context,
    schema: Annotated[str, typer.Argument(help="The schema, as module:NAME; imported from the current folder.")],
    scope: Scope = "session",
    user: Annotated[str | None, typer.Option(help="Only records of this user.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count and check; change nothing.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after upcasting this many.")] = None,
) -> None:
    """Upcast records to a schema's version while workers run. It may be interrupted and run again.

    Every record of the scope has to be of this schema. Exit code 1 if any failed; those stay as they are.

    Example: [cyan]distributed-state upcast my_agent.state:TRIP --dry-run[/]
    """
    wanted = named(schema)
    sofar = distributed_state.Upcast()

    def show(now: distributed_state.Upcast) -> None:
        nonlocal sofar
        if now.failed > sofar.failed and len(now.failures) == now.failed:
            err.print(now.failures[-1], style="red", markup=False, highlight=False)
        sofar = now
        status.update(f"{now.upcast} upcast, {now.unchanged} unchanged, {now.failed} failed")

    try:
        with open_store(context) as store, err.status("looking for records") as status:
            store.upcast(wanted, scope=scope, user=user, dry_run=dry_run, limit=limit, progress=show)
    finally:
        verb = "to upcast" if dry_run else "upcast"
        typer.echo(f"{sofar.upcast} {verb}, {sofar.unchanged} unchanged, {sofar.failed} failed")
    if sofar.failed:
        raise typer.Exit(1)


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
    with open_store(context, **given_search(how)) as store, err.status("looking") as status:

        def show(so_far: distributed_state.Indexed) -> None:
            status.update(f"{so_far.behind} of {so_far.records} records left")

        done = store.update_index(progress=show)
    typer.echo(f"the index has all of {done.records} records")
