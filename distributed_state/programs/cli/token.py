"""Commands for the tokens of the HTTP service's callers. Law: a token is shown once, when it is made."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from distributed_state.errors import ConfigurationError, InvalidValue
from distributed_state.programs.cli.shell import app, err, out, plain, print_json_lines, span, when
from distributed_state.values.access_tokens import RIGHTS

token = typer.Typer(
    help="Make, list and revoke the tokens by which callers of `serve --tokens` are known.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(token, name="token")


@contextmanager
def _tokens(context: typer.Context) -> Iterator[Any]:
    """The tokens in SQL. Redis is not asked, so that a token can be revoked while Redis is unavailable."""
    # SQL's libraries are loaded as the command runs, so that --help is answered without them.
    from distributed_state.cold.store import ColdStore
    from distributed_state.store.lifecycle import EMBEDDED_ARCHIVE, resolve

    settings = resolve(**context.obj)
    archive = settings.archive or EMBEDDED_ARCHIVE
    if archive == "memory":
        raise ConfigurationError("archive: tokens in memory would be gone with this command; name a database")
    cold = ColdStore.open(archive, settings.namespace, migrate=settings.migrate, timeout=settings.sql_timeout)
    try:
        yield cold.access_tokens
    finally:
        cold.close()


@token.command()
def create(
    context: typer.Context,
    tenant: Annotated[
        str | None, typer.Option(help="Whose ids it may name: all that begin so, as acme:", show_default=False)
    ] = None,
    all_tenants: Annotated[bool, typer.Option("--all-tenants", help="It may name every id.")] = False,
    rights: Annotated[str, typer.Option(help=f"Some of {', '.join(RIGHTS)}.")] = "read,write",
    actor: Annotated[str, typer.Option(help="Whom the history names as the actor; without, the id of the token.")] = "",
    expires: Annotated[str, typer.Option(help="How long it is valid, as 12h or 30d, or never.")] = "90d",
    into: Annotated[
        Path | None, typer.Option(help="A file for it; one that holds such a token already is left as it is.")
    ] = None,
) -> None:
    """Make a token and print it: this once, as SQL keeps its digest alone.

    Example: [cyan]distributed-state token create --tenant acme: --rights read,write,events --expires 30d --actor web[/]
    """
    from distributed_state.tiers.actors import noted
    from distributed_state.values import access_tokens

    if (tenant is None) != all_tenants:
        raise InvalidValue("say --tenant, or --all-tenants for a token that may name every id")
    chosen = {each.strip() for each in rights.split(",")}
    if not chosen <= set(RIGHTS):
        raise InvalidValue(f"--rights are some of {', '.join(RIGHTS)}, not {', '.join(sorted(chosen - set(RIGHTS)))}")
    seconds = None if expires == "never" else span("--expires", expires)
    noted(actor)
    prefix = "" if tenant is None else access_tokens.prefix_of(tenant)
    with _tokens(context) as tokens:
        if into is not None and _is_such(tokens, into, prefix, chosen, actor):
            err.print(f"{into} holds such a token already", markup=False, highlight=False)
            return
        id, text = access_tokens.make()
        tokens.add(id, access_tokens.digest(text), prefix=prefix, rights=chosen, actor=actor, seconds=seconds)
    if into is None:
        sys.stdout.write(f"{text}\n")
    else:
        _write(into, text)
        err.print(f"token {id} is in {into}", markup=False, highlight=False)


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
    out.print(table)


@token.command()
def revoke(
    context: typer.Context,
    id: Annotated[str, typer.Argument(help="Id of the token.", show_default=False)],
    alone: Annotated[bool, typer.Option("--alone", help="Leave those that were made with it valid.")] = False,
) -> None:
    """Refuse a token from now on, and those that were made with it. Services do so within 5 seconds.

    Example: [cyan]distributed-state token revoke 0123456789abcdef[/]
    """
    with _tokens(context) as tokens:
        (tokens.revoke_alone if alone else tokens.revoke)(id)
    typer.echo(f"token {id} is revoked")


def _minute(seconds: float) -> str:
    return when(seconds)[:16]


def _is_such(tokens: Any, path: Path, prefix: str, rights: set[str], actor: str) -> bool:
    """Whether the file holds a token that is valid and as it is wanted."""
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
    """Write a file that its owner alone may read, from its first byte on."""
    from distributed_state.cold.private_files import opener

    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "x", opener=opener) as file:
        file.write(f"{text}\n")
    beside.replace(path)
