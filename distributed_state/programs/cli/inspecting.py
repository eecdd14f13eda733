"""The command that opens a store's pages in a browser. Law: other users of the machine get nothing from it.

Design: section 28.
"""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

import distributed_state
from distributed_state.errors import ConfigurationError
from distributed_state.programs.cli.shell import app, require_existing


@app.command()
def inspect(
    context: typer.Context,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any that is free.", min=0, max=65535)] = 0,
) -> None:
    r"""Look at a store in a browser, on this machine, until Ctrl-C; needs `pip install 'distributed-state\[serve]'`.

    The link that is printed opens the pages once, for whoever uses it first: then that browser alone has them. What is
    changed there is asked before.

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
        # No replica that archives, or that the fleet counts: somebody who looks.
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
        mounts={inspector.PATH: lambda served: inspector.inspector(served, tickets)},
        report=report,
    )
