"""The audit trail as a command. Law: a time is read as its writer meant it, or refused."""

from __future__ import annotations

import json
import re
import sys
import time
from datetime import datetime
from typing import Annotated

import typer
from rich.table import Table

from distributed_state.errors import InvalidValue
from distributed_state.programs.cli.looking import plain, when
from distributed_state.programs.cli.shell import app, err, open_to_list, out

_AGO = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
WHEN = "an age, such as 10m, 2h or 7d, or a date and time in ISO 8601, local unless it has an offset"


@app.command()
def audit(
    context: typer.Context,
    conversation: Annotated[str | None, typer.Option(help="Only events of this conversation.")] = None,
    subject: Annotated[
        str | None, typer.Option(help="Only events about this subject, such as user:u1 or client:web.")
    ] = None,
    type_: Annotated[
        str | None, typer.Option("--type", help="Type of event, such as conversation.deleted or conversation.*")
    ] = None,
    since: Annotated[str | None, typer.Option(help=f"Events from then on: {WHEN}.")] = None,
    until: Annotated[str | None, typer.Option(help="Events before then.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many events; without --after, the newest.")] = 100,
    after: Annotated[str | None, typer.Option(help="Continue after this cursor, or start from the 'oldest'.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one CloudEvent per line.")] = False,
) -> None:
    """List events of all replicas from the archive, newest last.

    Example: [cyan]distributed-state audit --type "conversation.*" --since 10m[/]
    """
    now = time.time()
    begin = moment("--since", since, now)
    end = moment("--until", until, now)
    with open_to_list(context) as store:
        events = store.audit(
            conversation=conversation, subject=subject, type=type_, since=begin, until=end, limit=limit, after=after
        )
    if as_json:
        # JSON in ASCII: control sequences that a terminal would obey are escaped.
        sys.stdout.writelines(json.dumps(event.to_dict()) + "\n" for event in events)
    else:
        table = Table("time", "type", "subject", "version", "by", "data")
        for event in events:
            version = str(event.version or "")
            data = json.dumps(event.data, ensure_ascii=False) if event.data else ""
            short = data if len(data) <= 100 else data[:97] + "..."
            row = (event.type, event.subject, version, event.actor, short)
            table.add_row(when(event.time), *(plain(text) for text in row))
        out.print(table)
    if after is not None and len(events) == limit:
        err.print(f"more may follow: --after {events[-1].cursor}", markup=False, highlight=False)


def moment(option: str, text: str | None, now: float) -> float | None:
    """The time that an option names, in seconds since 1970."""
    if text is None:
        return None
    if past := _AGO.fullmatch(text):
        return max(0.0, now - float(past[1]) * _SECONDS[past[2]])
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise InvalidValue(f"{option} is {WHEN}, not {text!r:.80}") from error


def span(option: str, text: str) -> float:
    """The length of time that an option names, in seconds."""
    if found := _AGO.fullmatch(text):
        return float(found[1]) * _SECONDS[found[2]]
    raise InvalidValue(f"{option} is a number and a unit, as in 30m, 12h or 7d, not {text!r:.80}")


def ago(seconds: float) -> str:
    """A length of time in its largest unit, as `moment` reads it."""
    unit = max((each for each in _SECONDS if _SECONDS[each] <= max(seconds, 1)), key=_SECONDS.__getitem__)
    return f"{max(seconds, 0) // _SECONDS[unit]:.0f}{unit}"
