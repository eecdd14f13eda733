"""The command that serves a store over HTTP. Law: what HTTP needs is imported only when it is asked for."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import distributed_state
from distributed_state.errors import ConfigurationError
from distributed_state.programs.cli.shell import app

_ENV = "DISTRIBUTED_STATE_SERVE_"


def _option(name: str, help: str, **limits: Any) -> Any:
    return typer.Option(envvar=_ENV + name, help=help, **limits)


@app.command()
def serve(
    context: typer.Context,
    host: Annotated[str, _option("HOST", "Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1",
    port: Annotated[int, _option("PORT", "Port to listen on; 0 is any that is free.", min=0, max=65535)] = 8080,
    wait: Annotated[float, _option("WAIT", "Seconds to wait for Redis and SQL at startup.", min=0)] = 60.0,
    drain: Annotated[float, _option("DRAIN", "Seconds that running requests get at shutdown.", min=0)] = 15.0,
    notice: Annotated[
        float,
        _option("NOTICE", "Seconds at shutdown during which /readyz fails before connections are refused.", min=0),
    ] = 1.0,
    timeout: Annotated[float, _option("TIMEOUT", "Seconds that a request may take.", min=0.1)] = 30.0,
    busy: Annotated[
        float, _option("BUSY", "Seconds that a turn waits for another turn of its conversation.", min=0)
    ] = 10.0,
    max_body: Annotated[int, _option("MAX_BODY", "Largest request body in bytes.", min=1)] = 4 * 2**20,
    max_requests: Annotated[int, _option("MAX_REQUESTS", "Concurrent requests; more are answered 429.", min=1)] = 512,
    max_streams: Annotated[
        int, _option("MAX_STREAMS", "Concurrent event streams; more are answered 429.", min=0)
    ] = 512,
    heartbeat: Annotated[
        float, _option("HEARTBEAT", "Seconds between heartbeats on a silent event stream.", min=0.1)
    ] = 15.0,
    slow: Annotated[
        float, _option("SLOW", "Seconds after which an event stream whose client reads nothing is closed.", min=0.1)
    ] = 10.0,
    cors_origin: Annotated[
        list[str] | None,
        _option(
            "CORS_ORIGIN", "Web pages whose scripts may call it, as https://app.example.com; several by repeating."
        ),
    ] = None,
    access_log: Annotated[bool, _option("ACCESS_LOG", "Log each request as a line of JSON on stdout.")] = False,
) -> None:
    """Serve conversations over HTTP, until SIGTERM or Ctrl-C; needs `pip install 'distributed-state\\[serve]'`.

    One process serves one store; run several behind a load balancer. It does not authenticate: the proxy in front must.

    Example: [cyan]distributed-state --url redis://host --archive postgresql+psycopg://host/agents serve --port 8080[/]
    """
    try:
        from distributed_state.programs import service
    except ImportError as error:
        raise ConfigurationError(f"serving needs {error.name}: run `pip install 'distributed-state[serve]'`") from error
    limits = service.Limits(
        body=max_body, request=timeout, busy=busy, requests=max_requests, streams=max_streams, heartbeat=heartbeat,
        slow=slow, notice=notice, drain=drain,
    )  # fmt: skip

    async def opened() -> distributed_state.AsyncStateStore:
        return await distributed_state.AsyncStateStore.open(**context.obj)

    service.serve(
        opened,
        host=host,
        port=port,
        wait=wait,
        limits=limits,
        access_log=access_log,
        origins=tuple(cors_origin or ()),
        report=lambda line: typer.echo(line),
    )
