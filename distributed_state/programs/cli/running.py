"""Commands that run until they are ended, or for a while. Law: Ctrl-C ends them cleanly.

`serve` serves a store over HTTP to its callers, `inspect` to a browser on this machine only; other users of the machine
get nothing from it. The libraries of HTTP are imported only for these commands. A demo uses real servers, and
leaves nothing running.

Design: section 28.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from contextlib import ExitStack
from functools import partial
from inspect import iscoroutine, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import distributed_state
from distributed_state.errors import ConfigurationError, InvalidValue, StateError
from distributed_state.programs.cli.shell import (
    app,
    err,
    group,
    named,
    open_store,
    out,
    print_json,
    require_existing,
    stop_on_signals,
)
from distributed_state.programs.logs import report


@app.command()
def archiver(
    context: typer.Context,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between lines of progress.")] = 10.0,
    metrics_port: Annotated[
        int | None,
        typer.Option(envvar="DISTRIBUTED_STATE_METRICS_PORT", min=0, max=65535, help="Port for Prometheus metrics."),
    ] = None,
) -> None:
    """Archive commits from Redis to SQL until SIGTERM or Ctrl-C. Several archivers divide the partitions among them.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents archiver[/]
    """
    stopping = stop_on_signals()
    with open_store(context, archiver=True, beat=None) as store, ExitStack() as stack:
        if metrics_port is not None:
            stack.enter_context(distributed_state.metrics.serve(store, metrics_port))
        store.announce(role="archiver")
        report("archiving")
        said = 0.0
        while not stopping():
            if time.monotonic() - said >= every:
                said = time.monotonic()
                report(_progress(store))
            time.sleep(0.1)
    report("stopped")


@app.command()
def replay(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="Conversations as JSON lines; by default a sample.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 4,
    kill: Annotated[int, typer.Option(min=0, help="How many workers to kill in the middle of a turn.")] = 0,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Use threads and the embedded store instead of servers.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How many times to replay the file.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Seed of the random choice of workers to kill.")] = None,
    url: Annotated[str | None, typer.Option(help="Redis or Valkey to use; by default one is started.")] = None,
    archive: Annotated[str | None, typer.Option(help="SQL database to use; by default a SQLite file.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace to use; by default a new one.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep logs and databases in this folder.")] = None,
    report: Annotated[Path | None, typer.Option("--json", help="Write the results as JSON to this file.")] = None,
) -> None:
    """Replay recorded conversations on several workers, kill some, and verify that nothing acknowledged was lost.

    Every turn goes to whichever worker is free: it locks the session, reads the context, commits and releases. At the
    end every message is read back from SQL and compared. Exit code 1 if anything differs.

    Example: [cyan]distributed-state replay --workers 4 --kill 3[/]
    """
    from distributed_state.programs.replay.coordinator import read_conversations
    from distributed_state.programs.replay.run import Plan, replay, show
    from distributed_state.settings import private_opener

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
        # The file is private, as differences show users' messages.
        with open(report, "w", encoding="utf-8", opener=private_opener) as file_of_report:
            file_of_report.write(json.dumps(result.to_dict(), indent=2) + "\n")
    if result.differences:
        raise typer.Exit(1)


@app.command()
def opperator(
    context: typer.Context,
    agent: Annotated[
        str,
        typer.Argument(help="The agent's class, an instance, or a function that returns one, as module:NAME."),
    ],
    client: Annotated[str, typer.Option(help="Name of the client in events; by default user and host.")] = "",
    config: Annotated[
        Path | None,
        typer.Option(help="The agent's config file, YAML or JSON; by default agents.yaml. SIGHUP reloads it."),
    ] = None,
) -> None:
    """Run an agent under an Opperator daemon. They exchange JSON lines on stdin and stdout.

    Conversation events from the daemon are published to all replicas, and the agent shares its state with them. The
    command ends at the end of stdin or on SIGTERM.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents opperator
    my_agent:NoteAgent[/]
    """
    from distributed_state.adapters.opperator import run
    from distributed_state.adapters.opperator.wire import standard_streams

    for handler in logging.getLogger().handlers:
        # The agent's log goes to the daemon as messages. They lack tracebacks, so only those are also printed here.
        handler.addFilter(lambda record: not hasattr(record, "agent") or record.exc_info is not None)
    with standard_streams() as (stdin, stdout):
        run(_agent(agent, context.obj, config), stdin, stdout, client=client)


def _agent(place: str, settings: dict[str, Any], config: Path | None) -> Any:
    """The agent that `module:NAME` names: a class, which is created here, a function that returns one, or an agent.

    It opens the store of these settings, and reads this config or the one in the working folder, unless its author
    gave it others.
    """
    from distributed_state.adapters.opperator.agent import config_file

    stores: dict[type, Any] = {
        distributed_state.Agent: distributed_state.StateStore,
        distributed_state.AsyncAgent: distributed_state.AsyncStateStore,
    }
    opens = {kind: partial(store.open, **settings) for kind, store in stores.items()}
    found = named(place)
    made = found
    if callable(found):
        kind = next((each for each in stores if isinstance(found, type) and issubclass(found, each)), None)
        made = _called(place, found, {} if kind is None else {"store": opens[kind]})
    kind = next((each for each in stores if isinstance(made, each)), None)
    if kind is None:
        if iscoroutine(made):
            made.close()
        raise InvalidValue(
            f"{place!r} {'is' if made is found else 'returned'} an object of type {type(made).__name__}: "
            "name a class of agents, an agent, or a function that returns one"
        )
    context = made.agent_context
    if context.source == stores[kind].open:
        context.source = opens[kind]
    if config is not None:
        context.config = context.config.with_source(config)
    elif not context.config.has_source and (file := config_file()) is not None:
        context.config = context.config.with_source(file)
    return made


def _called(place: str, function: Any, offered: dict[str, Any]) -> Any:
    """Call a class or function with what it requires of `offered`. Raises InvalidValue if it requires more."""
    try:
        takes = signature(function)
        needed = {name for name, each in takes.parameters.items() if each.default is each.empty}
        bound = takes.bind(**{name: value for name, value in offered.items() if name in needed})
    except (TypeError, ValueError) as error:
        raise InvalidValue(
            f"{place!r} is called without arguments: {error}; name a function that returns the agent"
        ) from error
    return function(*bound.args, **bound.kwargs)


def _progress(store: distributed_state.StateStore) -> str:
    try:
        stats = store.admin.stats()
    except StateError as error:
        # An archiver continues while its servers restart.
        return f"waiting: {error}"
    archived = stats["archived"]
    return f"{archived} commit{'s' * (archived != 1)} archived by this process, {stats['unarchived']} unarchived"


demo = group("demo", "Demonstrations, with real servers and processes.")


@demo.command()
def chat(
    context: typer.Context,
    port: Annotated[int, typer.Option(help="Port of the page; 0 is any that is free.", min=0, max=65535)] = 0,
    url: Annotated[str | None, typer.Option(help="Redis or Valkey to use; by default one is started.")] = None,
    pause: Annotated[float, typer.Option(min=0, help="Seconds between two words of an answer.")] = 0.12,
) -> None:
    r"""Serve a page to chat with agents on two workers: reload it, stop an answer, kill workers. Runs until Ctrl-C.

    Each worker is a process of `distributed-state work` with a handler, which answers with a scripted model. The page
    posts messages to the service and follows the answers. If the worker that speaks is killed, the other one answers;
    if both are, those that are started next. Open the printed link: it has the key of this run. Needs `pip install
    'distributed-state\[serve]'`.

    Example: [cyan]distributed-state demo chat[/]
    """
    try:
        from distributed_state.programs.demo import chat as demos
    except ImportError as error:
        raise ConfigurationError(
            f"the chat needs {error.name}: run `pip install 'distributed-state[serve]'`"
        ) from error
    demos.chat(url or context.obj["url"], port, pause, typer.echo)


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

    Each replica is a process that runs the same agent. An action on one replica runs the hooks of all. The killed
    replica restarts and receives the events that it missed. At the end, the events that each replica received are
    compared with the stream and with SQL. This takes less than 30 seconds. Exit code 1 if anything differs.

    Example: [cyan]distributed-state demo lifecycle[/]
    """
    from distributed_state.programs.demo import lifecycle as demos
    from distributed_state.programs.demo.lifecycle import Screen

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


_ENV = "DISTRIBUTED_STATE_SERVE_"
_AUTH = "Authentication"


def _option(name: str, help: str, **limits: Any) -> Any:
    return typer.Option(envvar=_ENV + name, help=help, **limits)


def _auth(name: str, help: str) -> Any:
    return _option(name, help, rich_help_panel=_AUTH)


def _names(given: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in given.split(",") if each.strip())


@app.command()
def serve(
    context: typer.Context,
    host: Annotated[str, _option("HOST", "Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1",
    port: Annotated[int, _option("PORT", "Port to listen on; 0 is any that is free.", min=0, max=65535)] = 8080,
    wait: Annotated[float, _option("WAIT", "Seconds to wait for Redis and SQL at startup.", min=0)] = 60.0,
    drain: Annotated[
        float, _option("DRAIN", "Seconds that running requests have to finish at shutdown.", min=0)
    ] = 15.0,
    notice: Annotated[
        float,
        _option("NOTICE", "Seconds at shutdown during which /readyz fails before connections are refused.", min=0),
    ] = 1.0,
    timeout: Annotated[float, _option("TIMEOUT", "Seconds that a request may take.", min=0.1)] = 30.0,
    busy: Annotated[
        float, _option("BUSY", "Seconds that a turn waits for another turn of its conversation.", min=0)
    ] = 10.0,
    head_seconds: Annotated[
        float, _option("HEAD_SECONDS", "Seconds within which the headers of a request must arrive.", min=0.1)
    ] = 10.0,
    body_seconds: Annotated[
        float,
        _option(
            "BODY_SECONDS", "Seconds within which a body must arrive; 1 more per --min-rate bytes received.", min=0.1
        ),
    ] = 10.0,
    read_seconds: Annotated[
        float,
        _option(
            "READ_SECONDS",
            "Seconds within which a client must read its answer; 1 more per --min-rate bytes read.",
            min=0.1,
        ),
    ] = 10.0,
    min_rate: Annotated[
        int, _option("MIN_RATE", "Minimum rate in bytes per second at which a client must send and read.", min=1)
    ] = 16 * 1024,
    idle: Annotated[int, _option("IDLE", "Seconds that an idle connection is kept open between requests.", min=1)] = 75,
    max_connections: Annotated[
        int,
        _option("MAX_CONNECTIONS", "Concurrent connections; fewer if the process has too few file descriptors.", min=1),
    ] = 4096,
    max_per_address: Annotated[
        int, _option("MAX_PER_ADDRESS", "Concurrent connections per client address; 0: no limit.", min=0)
    ] = 0,
    max_in_flight: Annotated[
        int, _option("MAX_IN_FLIGHT", "Total bytes of bodies, answers and unsent events held in memory.", min=1)
    ] = 64 * 2**20,
    max_body: Annotated[int, _option("MAX_BODY", "Largest request body in bytes.", min=1)] = 2**20,
    max_depth: Annotated[int, _option("MAX_DEPTH", "Maximum nesting depth of a body's JSON.", min=1)] = 64,
    max_values: Annotated[
        int, _option("MAX_VALUES", "Maximum number of JSON values in a body, including nested ones.", min=1)
    ] = 50_000,
    max_fields: Annotated[int, _option("MAX_FIELDS", "Maximum number of fields that a request sets.", min=1)] = 5_000,
    max_messages: Annotated[
        int, _option("MAX_MESSAGES", "Maximum number of messages that a request appends.", min=1)
    ] = 1_000,
    max_answer: Annotated[int, _option("MAX_ANSWER", "Largest answer in bytes.", min=1)] = 16 * 2**20,
    max_requests: Annotated[
        int, _option("MAX_REQUESTS", "Concurrent requests; further ones are answered 429.", min=1)
    ] = 512,
    tenant_requests: Annotated[
        float, _option("TENANT_REQUESTS", "Requests per second of one tenant in this process; 0: no limit.", min=0)
    ] = 0.0,
    tenant_bytes: Annotated[
        float,
        _option(
            "TENANT_BYTES", "Bytes per second of one tenant's bodies and answers in this process; 0: no limit.", min=0
        ),
    ] = 0.0,
    tenant_metrics: Annotated[
        int, _option("TENANT_METRICS", "Number of tenants with separate metrics; all others are added up.", min=0)
    ] = 0,
    tenant_conversations: Annotated[
        int, _option("TENANT_CONVERSATIONS", "Approximate maximum of conversations per tenant; 0: no limit.", min=0)
    ] = 0,
    tenant_tasks: Annotated[
        int, _option("TENANT_TASKS", "Approximate maximum of tasks per tenant; 0: no limit.", min=0)
    ] = 0,
    tenant_users: Annotated[
        int, _option("TENANT_USERS", "Approximate maximum of users per tenant; 0: no limit.", min=0)
    ] = 0,
    tenant_items: Annotated[
        int, _option("TENANT_ITEMS", "Approximate maximum of items in all records of a tenant; 0: no limit.", min=0)
    ] = 0,
    max_streams: Annotated[
        int, _option("MAX_STREAMS", "Concurrent event streams; further ones are answered 429.", min=0)
    ] = 512,
    heartbeat: Annotated[
        float, _option("HEARTBEAT", "Seconds between heartbeats on a silent event stream.", min=0.1)
    ] = 15.0,
    slow: Annotated[
        float, _option("SLOW", "Seconds after which an event stream is closed if its client reads nothing.", min=0.1)
    ] = 10.0,
    cors_origin: Annotated[
        list[str] | None,
        _option(
            "CORS_ORIGIN",
            "Origin whose scripts may call the service, such as https://app.example.com; may be given several times.",
        ),
    ] = None,
    ops_host: Annotated[str, _option("OPS_HOST", "Address to listen on with --ops-port.")] = "127.0.0.1",
    ops_port: Annotated[
        int | None,
        _option("OPS_PORT", "Separate port for health and metrics; --port then does not serve them.", min=0, max=65535),
    ] = None,
    tokens: Annotated[bool, _auth("TOKENS", "Accept bearer tokens made by `token create`.")] = False,
    jwt_issuer: Annotated[str, _auth("JWT_ISSUER", "Accept JWTs of this issuer (claim iss).")] = "",
    jwt_audience: Annotated[str, _auth("JWT_AUDIENCE", "Audience that the JWTs must have (claim aud).")] = "",
    jwt_keys: Annotated[str, _auth("JWT_KEYS", "URL of the issuer's JSON Web Key Set.")] = "",
    jwt_tenant: Annotated[str, _auth("JWT_TENANT", "JWT claim that holds the tenant.")] = "tenant",
    jwt_rights: Annotated[str, _auth("JWT_RIGHTS", "JWT claim that holds the rights.")] = "scope",
    jwt_actor: Annotated[str, _auth("JWT_ACTOR", "JWT claim that holds the actor, shown in the history.")] = "sub",
    jwt_algorithms: Annotated[
        str, _auth("JWT_ALGORITHMS", "Accepted signature algorithms, separated by commas; only asymmetric ones.")
    ] = "RS256,PS256,ES256,EdDSA",
    trust_proxy: Annotated[
        str,
        _auth(
            "TRUST_PROXY",
            "Comma-separated addresses or networks of proxies whose X-Tenant, X-Rights and X-Actor are trusted.",
        ),
    ] = "",
    allow_host: Annotated[
        str, _auth("ALLOW_HOST", "Host names that requests may use for this service, separated by commas.")
    ] = "",
    insecure: Annotated[
        bool, _auth("INSECURE", "Accept all requests without authentication; excludes the other options here.")
    ] = False,
    access_log: Annotated[bool, _option("ACCESS_LOG", "Log each request as one line of JSON on stdout.")] = False,
    mcp: Annotated[
        bool, _option("MCP", "Serve the Model Context Protocol at /v1/mcp; needs the extra \\[mcp].")
    ] = False,
    inspect: Annotated[
        bool, _option("INSPECT", "Serve the inspector at /inspect: web pages that show and change the store.")
    ] = True,
    inspect_title: Annotated[
        str, _option("INSPECT_TITLE", "Name of this installation on the inspector's pages, such as Production.")
    ] = "",
) -> None:
    """Serve conversations over HTTP, until SIGTERM or Ctrl-C; needs `pip install 'distributed-state\\[serve]'`.

    One process serves one store; run several processes with a load balancer. Without an authentication option, only
    this machine can connect.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents serve --tokens[/]
    """
    try:
        from distributed_state.programs import service
    except ImportError as error:
        raise ConfigurationError(f"serving needs {error.name}: run `pip install 'distributed-state[serve]'`") from error
    limits = service.Limits(
        head=head_seconds, arriving=body_seconds, leaving=read_seconds, rate=min_rate, idle=idle,
        connections=max_connections, per_address=max_per_address, in_flight=max_in_flight, body=max_body,
        depth=max_depth, values=max_values, fields=max_fields, messages=max_messages, answer=max_answer,
        tenant_requests=tenant_requests, tenant_bytes=tenant_bytes, tenant_conversations=tenant_conversations,
        tenant_tasks=tenant_tasks, tenant_users=tenant_users, tenant_items=tenant_items,
        tenant_metrics=tenant_metrics, request=timeout, busy=busy, requests=max_requests, streams=max_streams,
        heartbeat=heartbeat, slow=slow, notice=notice, drain=drain,
    )  # fmt: skip

    claims = jwt_issuer or jwt_audience or jwt_keys
    issuer = service.Issuer(
        jwt_issuer, jwt_audience, jwt_keys, tenant=jwt_tenant, rights=jwt_rights, actor=jwt_actor,
        algorithms=_names(jwt_algorithms),
    ) if claims else None  # fmt: skip
    access = service.Access(tokens, issuer, _names(trust_proxy), _names(allow_host), insecure)

    async def opened() -> distributed_state.AsyncStateStore:
        store = await distributed_state.AsyncStateStore.open(**context.obj, access=service.callers_policy())
        store.announce(role="service")
        return store

    service.serve(
        opened,
        host=host,
        port=port,
        wait=wait,
        ops_host=ops_host,
        ops_port=ops_port,
        limits=limits,
        access=access,
        access_log=access_log,
        origins=tuple(cors_origin or ()),
        more=_mcp() if mcp else (),
        mounts={"/inspect": partial(_inspector(), title=inspect_title)} if inspect else {},
        report=report,
    )


def _inspector() -> Any:
    """The inspector's pages, imported only if they are served."""
    from distributed_state.programs import inspector

    return inspector.inspector


def _mcp() -> tuple[Any, ...]:
    """The endpoint of MCP, imported only if it is served, as its SDK takes 25 MB."""
    try:
        from distributed_state.programs.service import mcp
    except ImportError as error:
        raise ConfigurationError(f"--mcp needs {error.name}: run `pip install 'distributed-state[mcp]'`") from error
    return (mcp.operation(),)


@app.command()
def inspect(
    context: typer.Context,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any that is free.", min=0, max=65535)] = 0,
    title: Annotated[str, _option("INSPECT_TITLE", "Name of this installation on the pages, such as Production.")] = "",
) -> None:
    r"""Look at a store in a browser, on this machine, until Ctrl-C; needs `pip install 'distributed-state\[serve]'`.

    The printed one-time link signs in the first browser that opens it; no other browser has access. Each change must be
    confirmed.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents inspect[/]
    """
    try:
        from distributed_state.programs import inspector, service
    except ImportError as error:
        raise ConfigurationError(
            f"inspecting needs {error.name}: run `pip install 'distributed-state[serve]'`"
        ) from error
    require_existing(context)
    key = secrets.token_urlsafe(32)
    tickets = inspector.Tickets(key)

    async def opened() -> distributed_state.AsyncStateStore:
        # It only reads: it does not archive, and the fleet does not count it as a replica.
        return await distributed_state.AsyncStateStore.open(
            **context.obj, access=service.callers_policy(), archiver=False, beat=0.0
        )

    def report(line: str) -> None:
        before, serving, url = line.partition("serving on ")
        typer.echo(f"open {url}{inspector.PATH}/enter?ticket={tickets.ticket}" if serving and not before else line)

    service.serve(
        opened,
        port=port,
        access=service.Access(key=key),
        limits=service.Limits(notice=0.0),
        mounts={inspector.PATH: lambda served: inspector.inspector(served, tickets, title=title)},
        report=report,
    )
