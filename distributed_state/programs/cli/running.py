"""Commands that run for a while. Law: Ctrl-C ends them cleanly, and running them again does no harm."""

from __future__ import annotations

import importlib
import json
import logging
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

import distributed_state
from distributed_state.errors import InvalidValue, StateError
from distributed_state.programs.cli.looking import printable
from distributed_state.programs.cli.shell import Scope, app, ending_in_the_log, err, open_store, out


@app.command()
def archiver(
    context: typer.Context,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between lines of progress.")] = 10.0,
    metrics_port: Annotated[
        int | None,
        typer.Option(envvar="DISTRIBUTED_STATE_METRICS_PORT", min=0, max=65535, help="Port for Prometheus metrics."),
    ] = None,
) -> None:
    """Archive commits from Redis to SQL until SIGTERM or Ctrl-C. Several archivers share the partitions.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents archiver[/]
    """
    stopping = False

    def stop(*_: Any) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with ending_in_the_log(), open_store(context, archiver=True, beat=None) as store, ExitStack() as stack:
        if metrics_port is not None:
            stack.enter_context(distributed_state.metrics.serve(store, metrics_port))
        store.announce(role="archiver")
        typer.echo("archiving")
        said = 0.0
        while not stopping:
            if time.monotonic() - said >= every:
                said = time.monotonic()
                typer.echo(_progress(store))
            time.sleep(0.1)
    typer.echo("stopped")


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
def replay(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="Conversations as JSON lines; by default a sample.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 4,
    kill: Annotated[int, typer.Option(min=0, help="How many workers to kill in the middle of a turn.")] = 0,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Use threads and the embedded store; no server.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How many times to replay the file.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Seed of the random choice of workers to kill.")] = None,
    url: Annotated[str | None, typer.Option(help="Redis or Valkey to use; by default one is started.")] = None,
    archive: Annotated[str | None, typer.Option(help="SQL database to use; by default a SQLite file.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace to use; by default a new one.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep logs and databases in this folder.")] = None,
    report: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Replay recorded conversations on several workers, kill some, and verify that nothing acknowledged was lost.

    Every turn goes to whichever worker is free: it locks the session, reads the context, commits and releases. At the
    end every message is read back from SQL and compared. Exit code 1 if anything differs.

    Example: [cyan]distributed-state replay --workers 4 --kill 3[/]
    """
    from distributed_state.cold.private_files import opener
    from distributed_state.programs.replay.conversations import read_conversations
    from distributed_state.programs.replay.report import show
    from distributed_state.programs.replay.run import Plan, replay

    conversations = read_conversations(file)
    given = context.obj
    plan = Plan(
        [conversation.again(number) for number in range(1, rounds + 1) for conversation in conversations],
        url=url or given["url"],
        archive=archive or given["archive"],
        namespace=namespace or given["namespace"],
        workers=workers,
        kills=kill,
        in_process=in_process,
        seed=seed,
        keep=keep,
    )
    result = replay(plan, err)
    show(result, out)
    if report is not None:
        # Differences show what users said.
        with open(report, "w", encoding="utf-8", opener=opener) as file_of_report:
            file_of_report.write(json.dumps(result.to_dict(), indent=2) + "\n")
    if result.differences:
        raise typer.Exit(1)


@app.command()
def opperator(
    context: typer.Context,
    agent: Annotated[str, typer.Argument(help="The agent's class, as module:NAME; imported from the current folder.")],
    client: Annotated[str, typer.Option(help="The client named in events; by default user and host.")] = "",
    config: Annotated[
        Path | None, typer.Option(help="The agent's config, YAML or JSON; SIGHUP reads it again.")
    ] = None,
) -> None:
    """Run an agent under an Opperator daemon, which it talks to in JSON lines on stdin and stdout.

    What the daemon reports about conversations is published to the whole fleet, and the agent shares its state with
    every other replica. Ends at the end of stdin, or with SIGTERM.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents opperator
    my_agent:NoteAgent[/]
    """
    from distributed_state.adapters.opperator import bridge
    from distributed_state.adapters.opperator.pipes import standard_streams

    for handler in logging.getLogger().handlers:
        # The agent's log goes to the daemon as messages; only tracebacks, which those lack, are printed here too.
        handler.addFilter(lambda record: not hasattr(record, "agent") or record.exc_info is not None)
    with standard_streams() as (stdin, stdout):
        kind = named(agent)
        if not isinstance(kind, type) or not issubclass(kind, (distributed_state.Agent, distributed_state.AsyncAgent)):
            raise InvalidValue(f"{agent!r} is no subclass of Agent or AsyncAgent")
        if issubclass(kind, distributed_state.AsyncAgent):
            asyncio_agent = kind(lambda: distributed_state.AsyncStateStore.open(**context.obj), config=config)
            bridge.run(asyncio_agent, stdin, stdout, client=client)
        else:
            with open_store(context) as store:
                bridge.run(kind(store, config=config), stdin, stdout, client=client)


def named(place: str) -> Any:
    """Import what `module:NAME` names, with the current folder on the path."""
    module, _, name = place.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidValue(f"{place!r} is not found as module:NAME from the current folder: {error}") from error


def _progress(store: distributed_state.StateStore) -> str:
    try:
        stats = store.stats()
    except StateError as error:
        # An archiver goes on while its servers restart.
        return f"waiting: {error}"
    archived = stats["archived"]
    return f"{archived} commit{'s' * (archived != 1)} archived here, {stats['unarchived']} waiting"
