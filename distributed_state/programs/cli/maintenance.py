"""Commands for operators: they keep the archive small, current and searchable, and make tokens.

Law: a command that cannot be undone asks first, and an interrupted command can be run again without harm. A token for
callers of the HTTP service is shown only once, when it is made.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

import distributed_state
from distributed_state.errors import (
    ConfigurationError,
    InvalidValue,
    WarmUnavailable,
)
from distributed_state.programs.cli.shell import (
    How,
    Scope,
    app,
    err,
    given_search,
    group,
    named,
    open_existing,
    open_store,
    open_to_tidy,
    plain,
    print_json_lines,
    print_table,
    printable,
    span,
    when,
)
from distributed_state.programs.logs import report
from distributed_state.values.access_tokens import RIGHTS


@app.command()
def compact(
    context: typer.Context,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Pack history older than this, such as 12h or 7d.")
    ] = "1d",
) -> None:
    """Pack old history into compressed blocks in SQL. All reads still find it. Safe while workers run.

    Example: [cyan]distributed-state --archive postgresql://host/agents compact --older-than 7d[/]
    """
    with open_to_tidy(context) as store, err.status("looking") as status:
        done = store.admin.compact(
            older_than=span("--older-than", older_than), progress=lambda records: status.update(f"{records} records")
        )
    typer.echo(f"packed {done['changes']} changes and {done['messages']} messages of {done['records']} records")


def _age(variable: str, help: str) -> Any:
    return typer.Option(envvar=variable, metavar="AGE", help=help)


def _count(variable: str, help: str) -> Any:
    return typer.Option(envvar=variable, min=1, help=help)


_older = _age(
    "DISTRIBUTED_STATE_PURGE_OLDER_THAN", "Remove versions, branches and events older than this, such as 90d."
)
_changes = _count("DISTRIBUTED_STATE_PURGE_KEEP_CHANGES", "Keep only this many of each record's newest changes.")
_messages = _age("DISTRIBUTED_STATE_PURGE_MESSAGES_OLDER_THAN", "Hide messages older than this, such as 90d.")
_shown = _count(
    "DISTRIBUTED_STATE_PURGE_KEEP_MESSAGES",
    "Show only this many of each conversation's newest messages; hide older ones.",
)
_events = _age(
    "DISTRIBUTED_STATE_PURGE_EVENTS_OLDER_THAN", "Remove events older than this; overrides --older-than for events."
)
_branches = _age(
    "DISTRIBUTED_STATE_PURGE_BRANCHES_OLDER_THAN",
    "Remove branches older than this; overrides --older-than for branches.",
)


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
    """Remove old versions, branches, events and messages from SQL. The present state of each record stays.

    This cannot be undone. A hidden message is removed when the last version that showed it is removed. Safe while
    workers run: a transaction covers at most a few hundred records or a few thousand events.

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
        typer.confirm("Remove this old data for good?", abort=True, err=True)
    with open_to_tidy(context) as store, err.status("purging"):
        done = store.admin.purge(**seconds, keep_changes=keep_changes, keep_messages=keep_messages)
    report(
        f"removed {done['changes']} changes, {done['messages']} messages and {done['events']} events of "
        f"{done['records']} records; {done['left_out']} messages are now hidden"
    )


@app.command()
def reencrypt(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count; change nothing.")] = False,
) -> None:
    """Re-encrypt everything with the current key of DISTRIBUTED_STATE_KEYS or DISTRIBUTED_STATE_KEY_FILE.

    Values that already use that key are skipped, so the command may be interrupted and repeated. Safe while workers
    run. Exit code 1 if a record cannot be decrypted.

    Example: [cyan]distributed-state reencrypt --dry-run[/]
    """
    done: distributed_state.results.Reencrypted | None = None  # None: no record was examined, as without keys

    def show(now: distributed_state.results.Reencrypted) -> None:
        nonlocal done
        done = now
        err.print(f"{done.records} records, {done.values} values", highlight=False)

    try:
        with open_store(context) as store:
            done = store.admin.reencrypt(dry_run=dry_run, progress=show)
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
    """Copy from Redis to SQL what SQL lacks after an old backup of SQL was restored.

    [cyan]doctor[/] lists the partitions where SQL is older than Redis. Commits that are still in the journal are
    archived one by one; other records are copied whole. Lost data is listed. Writes to one partition at a time are
    paused. The command may be interrupted and repeated. Exit code 1 if data is lost, or SQL refuses some of it.

    Example: [cyan]distributed-state --url redis://host --archive postgresql://host/agents repair --dry-run[/]
    """

    def show(now: distributed_state.results.Repaired) -> None:
        status.update(
            f"{now.partitions} partitions, {len(now.behind)} older in SQL, {now.records + now.commits} copied"
        )

    with open_store(context) as store, err.status("looking") as status:
        done = store.admin.repair(dry_run=dry_run, progress=show)
    if not done.behind:
        typer.echo(f"nothing to repair: SQL is up to date with Redis in all {done.partitions} partitions")
        return
    what = "would archive" if dry_run else "archived"
    typer.echo(f"partitions where SQL was older: {', '.join(map(str, done.behind))}")
    typer.echo(
        f"{what}: {done.commits} commits, {done.records} whole records, {done.events} events; "
        f"{done.aside} commits put in the quarantine"
    )
    if done.branched:
        typer.echo(
            f"kept in branches, see `branches`: {done.branched} commits that continue no version of their record"
        )
    for scope, id in done.deleted:
        typer.echo(f"deleted again, as it was deleted after the backup: {scope} {printable(id)}")
    for each in done.lost:
        typer.echo(f"lost: messages {each.first} to {each.last} of {each.scope} {printable(each.id)}")
    for scope, id in done.lost_items:
        typer.echo(f"possibly lost: older items of {scope} {printable(id)} that changed after the backup")
    for scope, id in done.refused:
        typer.echo(f"refused by SQL, see `doctor` and the quarantine: data of {scope} {printable(id)}")
    if done.lost or done.lost_items or done.refused:
        raise typer.Exit(1)


@app.command()
def migrate(
    context: typer.Context,
    contract: Annotated[
        bool, typer.Option("--contract", help="Then remove what only workers of older releases use. Needs Redis.")
    ] = False,
) -> None:
    """Migrate the SQL schema to the latest version. Stores also do this when they open. Safe to run concurrently.

    Workers of the release before can run and start beside it. Without --contract this command does not need Redis. With
    it, it is refused while such workers run, which it names.

    Example: [cyan]distributed-state --archive postgresql+psycopg://host/agents migrate[/]
    """
    # Not a store: SQL's tables can be migrated without Redis.
    from distributed_state.cold import opening
    from distributed_state.cold.store import ColdStore
    from distributed_state.store.lifecycle import EMBEDDED_ARCHIVE, resolve

    settings = resolve(**context.obj)
    archive = settings.archive or EMBEDDED_ARCHIVE
    cold = ColdStore.open(archive, settings.namespace, timeout=settings.sql_timeout, alone=settings.url is None)
    try:
        if contract:
            with cold.database.read() as sql:
                contracts = opening.pending(opening.revision(sql))
            if contracts and settings.url is not None:
                _require_release(context, max(contracts.values(), key=_numbers))
            opening.migrate(cold.database, contract=True)
    finally:
        cold.close()
    report("the schema is up to date")


def _require_release(context: typer.Context, release: str) -> None:
    """Raise ConfigurationError, which names them, if workers of an older release run."""
    with open_existing(context) as store:
        others = [each for each in store.admin.replicas() if each.id != store.replica]
    late = [
        f"{each.id} ({each.version or 'unknown'}, process {each.pid} on {each.host})"
        for each in others
        if _numbers(each.version) < _numbers(release)
    ]
    if late:
        raise ConfigurationError(
            f"workers older than {release} need what would be removed; replace them first: {', '.join(late)}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """A release as numbers that can be compared; an unknown one is the oldest."""
    return tuple(int(each) for each in re.findall(r"\d+", version)[:3])


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

    Every record of the scope must have this schema. Exit code 1 if a record fails; it stays unchanged.

    Example: [cyan]distributed-state upcast my_agent.state:TRIP --dry-run[/]
    """
    wanted = named(schema)
    sofar = distributed_state.results.Upcast()

    def show(now: distributed_state.results.Upcast) -> None:
        nonlocal sofar
        if now.failed > sofar.failed and len(now.failures) == now.failed:
            err.print(now.failures[-1], style="red", markup=False, highlight=False)
        sofar = now
        status.update(f"{now.upcast} upcast, {now.unchanged} unchanged, {now.failed} failed")

    try:
        with open_store(context) as store, err.status("looking for records") as status:
            store.admin.upcast(wanted, scope=scope, user=user, dry_run=dry_run, limit=limit, progress=show)
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
    """Switch search on, and index all archived records. Safe while workers run; it may be interrupted and repeated.

    Example: [cyan]distributed-state --archive postgresql://host/agents index[/]
    """
    if remove:
        if not yes:
            typer.confirm("Remove the index? The records stay in the archive.", abort=True, err=True)
        with open_store(context, search=False, archiver=False) as store:
            typer.echo("the index is removed" if store.admin.remove_index() else "there is no index")
        return
    with open_store(context, **given_search(how)) as store, err.status("looking") as status:

        def show(so_far: distributed_state.results.Indexed) -> None:
            status.update(f"{so_far.behind} of {so_far.records} records are still to be indexed")

        done = store.admin.update_index(progress=show)
    typer.echo(f"all {done.records} records are indexed")


token = group("token", "Create, list and revoke the tokens with which clients of `serve --tokens` sign in.")


@contextmanager
def _tokens(context: typer.Context) -> Iterator[Any]:
    """The tokens in SQL. Redis is not asked, so that a token can be revoked while Redis is unavailable."""
    # SQL's libraries are loaded as the command runs, so that --help is answered without them.
    from distributed_state.cold.store import ColdStore
    from distributed_state.store.lifecycle import EMBEDDED_ARCHIVE, resolve

    settings = resolve(**context.obj)
    archive = settings.archive or EMBEDDED_ARCHIVE
    if archive == "memory":
        raise ConfigurationError(
            "archive: tokens in memory would be lost when this command ends; name a database with --archive"
        )
    cold = ColdStore.open(archive, settings.namespace, migrate=settings.migrate, timeout=settings.sql_timeout)
    try:
        yield cold.access_tokens
    finally:
        cold.close()


@token.command()
def create(
    context: typer.Context,
    tenant: Annotated[
        str | None, typer.Option(help="Allow only ids that begin with this prefix, such as acme:", show_default=False)
    ] = None,
    all_tenants: Annotated[bool, typer.Option("--all-tenants", help="Allow all ids.")] = False,
    rights: Annotated[str, typer.Option(help=f"Any of {', '.join(RIGHTS)}, separated by commas.")] = "read,write",
    actor: Annotated[str, typer.Option(help="Actor shown in the history; by default the id of the token.")] = "",
    expires: Annotated[str, typer.Option(help="Time until the token expires, such as 12h or 30d, or 'never'.")] = "90d",
    into: Annotated[
        Path | None,
        typer.Option(help="File to write the token to. If it holds a valid token with the same options, it is kept."),
    ] = None,
) -> None:
    """Create a token and print it. It is shown only now, because SQL stores only its digest.

    Example: [cyan]distributed-state token create --tenant acme: --rights read,write,events --expires 30d --actor web[/]
    """
    from distributed_state.tiers.ambient import noted
    from distributed_state.values import access_tokens

    if (tenant is None) != all_tenants:
        raise InvalidValue("give --tenant, or --all-tenants for a token that allows all ids")
    chosen = {each.strip() for each in rights.split(",")}
    if not chosen <= set(RIGHTS):
        raise InvalidValue(f"--rights takes any of {', '.join(RIGHTS)}, not {', '.join(sorted(chosen - set(RIGHTS)))}")
    seconds = None if expires == "never" else span("--expires", expires)
    noted(actor)
    prefix = "" if tenant is None else access_tokens.prefix_of(tenant)
    with _tokens(context) as tokens:
        if into is not None and _is_such(tokens, into, prefix, chosen, actor):
            report(f"{into} already holds a valid token with these options")
            return
        id, text = access_tokens.make()
        tokens.add(id, access_tokens.digest(text), prefix=prefix, rights=chosen, actor=actor, seconds=seconds)
    if into is None:
        sys.stdout.write(f"{text}\n")
    else:
        _write(into, text)
        report(f"token {id} is written to {into}")


@token.command("list")
def list_(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List the tokens of the namespace, without their secrets.

    Example: [cyan]distributed-state --archive postgresql+psycopg://host/agents token list[/]
    """
    with _tokens(context) as tokens:
        found = tokens.all()
    if as_json:
        print_json_lines(map(asdict, found))
        return
    table = Table(
        Column("id", no_wrap=True), "tenant", "rights", "actor", "created", "expires", "revoked", "made by", box=None
    )
    for each in found:
        until = "never" if each.expires is None else _minute(each.expires)
        revoked = "" if each.revoked is None else _minute(each.revoked)
        rights, tenant = ", ".join(each.rights), plain(each.prefix) or "(all)"
        table.add_row(
            each.id, tenant, rights, plain(each.actor), _minute(each.created), until, revoked, each.made_by or ""
        )
    print_table(table)


@token.command()
def revoke(
    context: typer.Context,
    id: Annotated[str, typer.Argument(help="Id of the token.", show_default=False)],
    alone: Annotated[
        bool, typer.Option("--alone", help="Revoke only this token, not the tokens created with it.")
    ] = False,
) -> None:
    """Revoke a token and all tokens created with it. Services refuse them within 5 seconds.

    While SQL is unavailable, only the token itself is refused, and the command fails: repeat it when SQL answers.

    Example: [cyan]distributed-state token revoke 0123456789abcdef[/]
    """
    from distributed_state.port.blocking import finish
    from distributed_state.store.lifecycle import lifecycle_of, resolve
    from distributed_state.tiers.revoking import revoke

    try:
        if resolve(**context.obj).url is None:
            raise WarmUnavailable("the embedded server is in the process of the service")
        with open_store(context, archiver=False) as store:
            finish(revoke(lifecycle_of(store).tiers(), id, alone=alone))
    except WarmUnavailable:
        with _tokens(context) as tokens:
            (tokens.revoke_alone if alone else tokens.revoke)(id)
    typer.echo(f"token {id} is revoked")


def _minute(seconds: float) -> str:
    return when(seconds)[:16]


def _is_such(tokens: Any, path: Path, prefix: str, rights: set[str], actor: str) -> bool:
    """Whether the file holds a valid token with this prefix, these rights and this actor."""
    from distributed_state.values import access_tokens

    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return False
    id = access_tokens.id_of(text)
    found = tokens.find([id]).get(id) if id else None
    if found is None or found.digest != access_tokens.digest(text) or found.left == 0:
        return False
    token = found.token
    return (token.prefix, set(token.rights), token.actor) == (prefix, rights, actor)


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    from distributed_state.settings import private_opener

    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "x", opener=private_opener) as file:
        file.write(f"{text}\n")
    beside.replace(path)
