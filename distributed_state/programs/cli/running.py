"""Commands that run for a while: an archiver, an agent, a replay, a demo. Law: Ctrl-C ends them cleanly.

A demo is real, verifies itself, and leaves nothing running.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import distributed_state
from distributed_state.errors import InvalidValue, StateError
from distributed_state.programs.cli.shell import (
    app,
    ending_in_the_log,
    err,
    named,
    open_store,
    out,
    print_json,
)


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


def _progress(store: distributed_state.StateStore) -> str:
    try:
        stats = store.stats()
    except StateError as error:
        # An archiver goes on while its servers restart.
        return f"waiting: {error}"
    archived = stats["archived"]
    return f"{archived} commit{'s' * (archived != 1)} archived here, {stats['unarchived']} waiting"


_HELP_OF_DEMO = "Watch it work: real servers and processes, in this terminal, verified at the end."
demo = typer.Typer(
    help=_HELP_OF_DEMO,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(demo, name="demo")


@demo.callback()
def _demos() -> None:
    """Make `lifecycle` a subcommand, though it is the only one."""


@demo.command()
def lifecycle(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="Redis or Valkey to use; by default one is started.")] = None,
    archive: Annotated[str | None, typer.Option(help="SQL database to use; by default a SQLite file.")] = None,
    pause: Annotated[
        float | None, typer.Option(min=0, help="Seconds between steps; by default 0.8 on a terminal, else 0.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep notes, logs and the database in this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the result, as JSON.")] = False,
) -> None:
    """Run three replicas that create, switch, clear and delete conversations, and kill one of them meanwhile.

    Each replica is a process that runs the same agent. What one does runs the hooks of all; the one that was killed
    comes back and receives the events that it missed. At the end the events that each received are compared with the
    stream and with SQL. Takes less than half a minute; exit code 1 if anything differs.

    Example: [cyan]distributed-state demo lifecycle[/]
    """
    from distributed_state.programs.demo import lifecycle as demos
    from distributed_state.programs.demo.screen import Screen

    given = context.obj
    if pause is None:
        pause = 0.8 if sys.stdout.isatty() and not as_json else 0.0
    screen = Screen(Console(quiet=True) if as_json else out)
    report = demos.lifecycle(
        demos.Plan(url=url or given["url"], archive=archive or given["archive"], keep=keep, pause=pause), screen
    )
    if as_json:
        print_json(report.to_dict())
    else:
        screen.close(report)
    if report.differences:
        raise typer.Exit(1)
