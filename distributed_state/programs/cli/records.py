"""Commands that read records and their history, change records, and publish events to the fleet.

Law: a command that reads may load records into Redis, but changes nothing else. A command that cannot be undone asks
first, and each command that writes prints what was written.

A listing says whether more rows may follow, and how to continue. An ambiguous time is refused.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import distributed_state
from distributed_state.errors import InvalidValue, NotFound
from distributed_state.programs.cli.shell import (
    WHEN,
    How,
    Id,
    Scope,
    app,
    err,
    given_search,
    group,
    moment,
    open_existing,
    open_store,
    open_to_list,
    out,
    plain,
    print_json,
    print_json_lines,
    print_table,
    printable,
    record_of,
    say_more,
    when,
)

_PAGE = 1000


@app.command()
def get(
    context: typer.Context,
    id: Id,
    key: Annotated[
        str | None, typer.Argument(help="Name of a field; by default all fields.", show_default=False)
    ] = None,
    scope: Scope = "session",
) -> None:
    """Print all fields of a record, or one field, as JSON. A field that holds bytes is printed unchanged.

    Example: [cyan]distributed-state get user-123 preferences[/]
    """
    with open_existing(context) as store:
        record = record_of(store, scope, id)
        if not record.exists():
            raise NotFound(f"there is no {scope} {id!r}")
        fields = record.get_all()
        chat = store.session(id).messages(last=1) if scope == "session" and key is None else []
    for each in chat:
        text = f"its last message is number {each.number}: distributed-state messages {shlex.quote(id)}"
        err.print(text, markup=False, highlight=False, soft_wrap=True)
    if key is not None and key not in fields:
        raise NotFound(f"{scope} {id!r} has no field {key!r}")
    given = {name: value for name, value in fields.items() if isinstance(value, bytes)}
    if key in given:
        if sys.stdout.isatty():  # it may hold control sequences that a terminal would obey
            raise InvalidValue(f"{key!r} holds {len(given[key])} bytes: redirect the output to a file: get ... > file")
        sys.stdout.buffer.write(given[key])
    elif key is not None:
        print_json(fields[key])
    else:
        print_json({name: value for name, value in fields.items() if name not in given})
        for name, data in given.items():
            err.print(
                plain(f"not shown: {name} holds {len(data)} bytes; to write them to a file: get {id} {name} > file")
            )


@app.command()
def messages(
    context: typer.Context,
    id: Id,
    last: Annotated[int, typer.Option(min=1, help="How many messages to show.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Print the messages of a session, the newest last.

    Example: [cyan]distributed-state messages user-123 --last 5[/]
    """
    with open_existing(context) as store:
        session = store.session(id)
        if not session.exists():
            raise NotFound(f"there is no session {id!r}")
        found = session.messages(last=last)
    if as_json:
        print_json_lines({"number": each.number, **each.to_dict()} for each in found)
        return
    table = Table("number", "time", "message")
    for each in found:
        table.add_row(str(each.number), when(each.timestamp) if each.timestamp else "", plain(_said(each)))
    print_table(table)


@app.command()
def history(
    context: typer.Context,
    id: Id,
    scope: Scope = "session",
    last: Annotated[int, typer.Option(min=1, help="How many changes to show.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List a record's changes, each with its version, time, actor, worker and lease token. Turns show their duration.

    Example: [cyan]distributed-state history user-123 --last 10[/]
    """
    with open_to_list(context) as store:
        changes = _changes_of(store, scope, id, last)
    if as_json:
        print_json_lines(map(asdict, changes))
        return
    table = Table("version", "time", "kind", "by", "worker", "token", "what")
    for change in changes:
        token = str(change.token) if change.token else ""
        who = plain(change.actor), plain(change.replica)
        table.add_row(str(change.version), when(change.time), change.kind, *who, token, _what(change))
    print_table(table)


def _changes_of(store: Any, scope: str, id: str, last: int) -> list[distributed_state.results.Change]:
    from distributed_state.store.archive_alone import ArchiveAlone
    from distributed_state.values.model import Ref

    if isinstance(store, ArchiveAlone):
        changes = store.history(Ref(scope, id), last)
        if not changes:
            raise NotFound(f"there is no {scope} {id!r} in the archive")
        return changes
    record = record_of(store, scope, id)
    version = record.version()
    if not version:
        raise NotFound(f"there is no {scope} {id!r}")
    return record.history(after=max(0, version - last))


def _what(change: distributed_state.results.Change) -> str:
    parts = [f"{key} = {_shown(value)}" for key, value in change.set.items()]
    parts += [f"{key} deleted" for key in change.deleted]
    parts += [f"+ {_said(message)}" for message in change.appended]
    parts += [f"phase {change.phase}"] if change.phase else []
    parts += [f"label {change.label}"] if change.label else []
    parts += _took(change.times)
    parts += [f"used {change.usage.tokens} tokens of {', '.join(change.usage.models)}"] if change.usage else []
    return "\n".join(plain(part if len(part) <= 100 else part[:97] + "...") for part in parts)


def _shown(value: Any) -> str:
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else json.dumps(value)


def _said(message: distributed_state.Message) -> str:
    if message.role is None:
        return json.dumps(message.to_dict())
    return f"{message.role}: {json.dumps(message.content)}"


def _took(times: distributed_state.results.TurnTimes | None) -> list[str]:
    """The time of a turn and its largest part; empty for other commits."""
    from distributed_state.values.turn_times import spent

    it = spent(None if times is None else asdict(times))
    return [] if it is None else [f"took {it.total:.3f} s, {it.most.share:.0%} of it {it.most.name}"]


@app.command()
def branches(
    context: typer.Context,
    record: Annotated[
        str | None, typer.Argument(help="Only branches of this record, such as session/user-123.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List branches: acknowledged commits that are not part of their records' history because of a failover.

    Example: [cyan]distributed-state branches session/user-123[/]
    """
    with open_to_list(context) as store:
        if record is not None:
            scope, slash, id = record.partition("/")
            if not slash:
                raise InvalidValue(f"{record!r:.80} is not a record: write it as session/{record:.80}")
            found = store.admin.branches(id, scope=scope)
        else:
            found = page = store.admin.branches(limit=_PAGE)
            while page:
                page = store.admin.branches(limit=_PAGE, after=page[-1].cursor)
                found += page
    if as_json:
        print_json_lines(asdict(each) | {"complete": each.complete} for each in found)
        return
    table = Table("record", "branch", "after version", "commits", "missing", "first", "last", "by", "cause")
    for each in found:
        lost = ", ".join(f"{first}-{last}" for first, last in each.missing)
        row = (f"{each.scope}/{each.record_id}", each.id, str(each.base), str(each.commits), lost)
        times = (when(each.first_time), when(each.last_time))
        table.add_row(*map(plain, (*row, *times, ", ".join(each.actors), each.cause)))
    print_table(table)


@app.command()
def sessions(
    context: typer.Context,
    user: Annotated[str | None, typer.Option(help="Only sessions of this user.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Only ids that begin with this; sorted by id.")] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="Only those with this tag, written name=value; may be given several times.")
    ] = None,
    phase: Annotated[str | None, typer.Option(help="Only those in this phase.")] = None,
    changed_since: Annotated[str | None, typer.Option(help=f"Only those that changed after this time: {WHEN}.")] = None,
    changed_before: Annotated[
        str | None, typer.Option(help="Only those last changed before this time; same format.")
    ] = None,
    larger_than: Annotated[
        int | None, typer.Option(min=0, metavar="BYTES", help="Only those to which more than this was committed.")
    ] = None,
    stuck: Annotated[bool, typer.Option("--stuck", help="Only those whose handler is not called again.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Include unarchived commits.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Rows per page.")] = 50,
    after: Annotated[
        str | None, typer.Option(help="Continue after this cursor, which the previous page printed.")
    ] = None,
    scope: Scope = "session",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List sessions, the last changed first. They are sorted by the minute of their last archived change.

    Example: [cyan]distributed-state sessions --user u1 --phase booking --changed-since 2h[/]
    """
    tags = _tags(tag or [])
    now = time.time()
    since = moment("--changed-since", changed_since, now)
    before = moment("--changed-before", changed_before, now)
    # Without an archiver of its own, whose progress would change the list.
    with open_to_list(context, archiver=False) as store:
        rows = store.sessions(
            user=user, prefix=prefix, tags=tags, limit=limit, after=after, scope=scope, fresh=fresh, phase=phase,
            changed_since=since, changed_before=before, larger_than=larger_than, stuck=stuck,
        )  # fmt: skip
        if not fresh and isinstance(store, distributed_state.StateStore) and (n := store.admin.stats()["unarchived"]):
            text = f"{n:.0f} commits are not archived yet and not counted here; add --fresh to see them"
            err.print(text, style="yellow", markup=False, highlight=False)
    if as_json:
        print_json_lines(asdict(row) for row in rows)
        if len(rows) == limit:
            say_more(rows[-1].cursor)
        return
    table = Table("id", "user", "phase", "version", "bytes", "created", "updated", "")
    for row in rows:
        texts = (plain(row.id), plain(row.user or ""), plain(row.phase or ""), str(row.version), str(row.size or ""))
        table.add_row(*texts, when(row.created), when(row.updated), "deleted" if row.deleted else "")
    print_table(table)
    if len(rows) == limit:
        say_more(rows[-1].cursor)


def _tags(given: list[str]) -> dict[str, list[str]]:
    """Parse `--tag name=value` options: each name with all of its values."""
    tags: dict[str, list[str]] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidValue(f"{text!r:.80} is not a tag: write it as name=value")
        tags.setdefault(name, []).append(value)
    return tags


@app.command()
def search(
    context: typer.Context,
    query: Annotated[str, typer.Argument(help="Words to find; a result contains all of them.", show_default=False)],
    scope: Annotated[str | None, typer.Option(help="Only records of this kind: session, user, app or task.")] = None,
    prefix: Annotated[str, typer.Option(help="Only records whose ids begin with this.")] = "",
    user: Annotated[str | None, typer.Option(help="Only records of this user.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many results to show.")] = 10,
    json_: Annotated[bool, typer.Option("--json", help="Print the results as one JSON array.")] = False,
    how: How = None,
) -> None:
    """Search the text of messages, fields and items, and print the most relevant results first.

    Example: [cyan]distributed-state search "weekend Oslo" --user u1[/]
    """
    with open_to_list(context, **given_search(how)) as store:
        hits = store.search(query, scope=scope, prefix=prefix, user=user, limit=limit, fresh=True)
    if json_:
        print_json([asdict(hit) for hit in hits])
        return
    for hit in hits:
        place = f"message {hit.number}" if hit.kind == "message" else f"{hit.kind} {hit.key}"
        out.print(f"[bold]{plain(hit.scope)} {plain(hit.id)}[/] {plain(place)}: {plain(hit.text)}", soft_wrap=True)


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
    since: Annotated[str | None, typer.Option(help=f"Only events from this time on: {WHEN}.")] = None,
    until: Annotated[str | None, typer.Option(help="Only events before this time; same format.")] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="How many events; the newest unless --after is given.")
    ] = 100,
    after: Annotated[
        str | None, typer.Option(help="Continue after this cursor, or 'oldest' to start with the oldest event.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one CloudEvent per line.")] = False,
) -> None:
    """List events of all replicas from the archive, newest last.

    Example: [cyan]distributed-state audit --type "conversation.*" --since 10m[/]
    """
    now = time.time()
    begin = moment("--since", since, now)
    end = moment("--until", until, now)
    with open_to_list(context) as store:
        events = store.admin.audit(
            conversation=conversation, subject=subject, type=type_, since=begin, until=end, limit=limit, after=after
        )
    if as_json:
        print_json_lines(event.to_dict() for event in events)
    else:
        table = Table("time", "type", "subject", "version", "by", "data")
        for event in events:
            version = str(event.version or "")
            data = json.dumps(event.data, ensure_ascii=False) if event.data else ""
            short = data if len(data) <= 100 else data[:97] + "..."
            row = (event.type, event.subject, version, event.actor, short)
            table.add_row(when(event.time), *(plain(text) for text in row))
        print_table(table)
    if after is not None and len(events) == limit:
        say_more(events[-1].cursor)


@app.command("set")
def set_(
    context: typer.Context,
    id: Id,
    key: Annotated[str, typer.Argument(help="Name of the field.", show_default=False)],
    value: Annotated[str, typer.Argument(help="Value of the field as JSON; text needs quotes.", show_default=False)],
    scope: Scope = "session",
) -> None:
    """Set one field and print the record's new version.

    Example: [cyan]distributed-state set user-123 name '"Alice"'[/]
    """
    try:
        decoded = json.loads(value)
    except ValueError as error:
        raise InvalidValue(f"{value!r} is not JSON ({error}); text needs quotes: '\"text\"'") from error
    with open_store(context) as store:
        version = record_of(store, scope, id).set(key, decoded)
    typer.echo(version)


@app.command()
def rollback(
    context: typer.Context,
    id: Id,
    version: Annotated[int | None, typer.Option(min=1, help="Restore the state at this version.")] = None,
    label: Annotated[str | None, typer.Option(help="Restore the last checkpoint with this label.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of changes to go back; by default one.")] = None,
    scope: Scope = "session",
) -> None:
    """Restore an earlier state of a record, and print its new version. The history stays as it is.

    Example: [cyan]distributed-state rollback user-123 --version 7[/]
    """
    with open_store(context) as store:
        typer.echo(record_of(store, scope, id).rollback(steps=steps, label=label, version=version))


@app.command()
def post(
    context: typer.Context,
    id: Id,
    text: Annotated[str, typer.Argument(help="The message of the user.", show_default=False)],
    request: Annotated[
        str | None, typer.Option(help="Id of the request: the same message is accepted once.", show_default=False)
    ] = None,
    handler: Annotated[
        str | None,
        typer.Option(help="Handler, for a session without one.", show_default=False),
    ] = None,
) -> None:
    """Leave a user's message for the next turn of a session, and print its number in the inbox.

    Example: [cyan]distributed-state post user-123 "And Bergen?"[/]
    """
    with open_store(context) as store:
        said = {"role": "user", "content": text}
        typer.echo(store.session(id).post(said, request_id=request, handler=handler))


@app.command()
def stop(
    context: typer.Context,
    id: Id,
    request: Annotated[str | None, typer.Option(help="Stop only the turn of this request.", show_default=False)] = None,
    reason: Annotated[str | None, typer.Option(help="Shown to the turn and to its followers.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the end of the turn.")] = 5.0,
) -> None:
    """Ask the running turn of a session to stop, on whichever worker it runs, and print the result.

    Example: [cyan]distributed-state stop user-123 --reason "too long"[/]
    """
    with open_store(context) as store:
        found = store.session(id).stop(request, reason=reason, wait=wait)
    typer.echo(found.state if found.version is None else f"{found.state} as version {found.version}")


@app.command()
def fork(
    context: typer.Context,
    id: Id,
    new_id: Annotated[str, typer.Argument(help="Id of the new record.", show_default=False)],
    version: Annotated[
        int | None, typer.Option(help="Fork the state at this version; by default the present state.")
    ] = None,
    branch: Annotated[str | None, typer.Option(help="Fork the state of this branch; see `branches`.")] = None,
    scope: Scope = "session",
) -> None:
    """Create a new record from the state of an existing one, and print its version. Both share earlier messages.

    Example: [cyan]distributed-state fork user-123 user-123-lost --branch 3-9f2c01ab[/]
    """
    with open_store(context) as store:
        typer.echo(record_of(store, scope, id).fork(new_id, version=version, branch=branch))


@app.command()
def delete(context: typer.Context, id: Id, scope: Scope = "session") -> None:
    """Delete a record. Its history stays until `purge`, `erase` or `forget` removes it.

    Example: [cyan]distributed-state delete user-123[/]
    """
    with open_store(context) as store:
        version = store.delete(id, scope=scope)
    typer.echo(f"deleted as version {version}")


@app.command()
def erase(
    context: typer.Context,
    id: Id,
    scope: Scope = "session",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a record with its messages, history and events. Forks of it stay. This cannot be undone.

    Example: [cyan]distributed-state erase user-123[/]
    """
    if not yes:
        typer.confirm(f"Remove {scope} {id!r}, with its history, for good?", abort=True, err=True)
    with open_store(context) as store:
        found = store.erase(id, scope=scope)
    typer.echo("erased" if found else "there was nothing to erase")


@app.command()
def forget(
    context: typer.Context,
    user: Annotated[str, typer.Argument(help="Id of the user.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove every trace of a user: records, sessions, history, forks. This cannot be undone.

    Example: [cyan]distributed-state forget u1[/]
    """
    if not yes:
        typer.confirm(f"Remove everything about user {user!r}, with its history, for good?", abort=True, err=True)
    with open_store(context) as store:
        count = store.forget(user)
    typer.echo(f"{count} records removed")


@app.command("reload-config")
def reload_config(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(help="A YAML file, or a JSON file if its name ends in .json.", show_default=False)
    ],
    agent: Annotated[str, typer.Option(help="Only for the agent with this name.")] = "",
) -> None:
    """Replace the config of the running agents, on every replica, without a restart.

    Example: [cyan]distributed-state reload-config agents.yaml --agent note_agent[/]
    """
    with open_store(context) as store:
        version = store.admin.reload_config(file, agent=agent)
    typer.echo(f"config of {f'agent {agent}' if agent else 'all agents'} is version {version}")


send = group("send", "Publish an event to every replica: an action of a user, or an event of your own.")
Conversation = Annotated[str, typer.Argument(help="Id of the conversation.", show_default=False)]
Client = Annotated[str, typer.Option(help="Name of the client, that is the user's window or program.")]


@send.command("new-conversation")
def new_conversation(
    context: typer.Context,
    id: Conversation,
    clear: Annotated[
        bool, typer.Option("--clear", help="Clear an existing conversation: remove its fields and messages.")
    ] = False,
    user: Annotated[str | None, typer.Option(help="Id of the user who owns the conversation.")] = None,
) -> None:
    """Create a conversation, or clear one.

    Example: [cyan]distributed-state send new-conversation c1 --user u1[/]
    """
    with open_store(context) as store:
        session = store.session(id, user=user)
        if clear:
            _require(store, id)
            _print_version("conversation.cleared", id, session.clear(messages=True))
        else:
            _print_version("conversation.created", id, session.create())


@send.command()
def switch(
    context: typer.Context,
    id: Conversation,
    previous: Annotated[str, typer.Option(help="Id of the previous conversation.")] = "",
    client: Client = "",
) -> None:
    """Switch a client to a conversation.

    Example: [cyan]distributed-state send switch c2 --previous c1 --client web[/]
    """
    with open_store(context) as store:
        _require(store, id)
        _print_version("conversation.switched", id, store.session(id).switch(previous_id=previous, client=client))


@send.command("delete")
def delete_conversation(context: typer.Context, id: Conversation) -> None:
    """Delete a conversation.

    Example: [cyan]distributed-state send delete c1[/]
    """
    with open_store(context) as store:
        _print_version("conversation.deleted", id, store.delete(id))


@send.command()
def activate(
    context: typer.Context,
    agent: Annotated[str, typer.Argument(help="Name of the agent to activate.", show_default=False)],
    previous: Annotated[
        str | None, typer.Option(help="Name of the previous agent; by default the last one that this client activated.")
    ] = None,
    conversation: Annotated[str, typer.Option(help="Id of the client's conversation.")] = "",
    client: Client = "",
) -> None:
    """Activate an agent for a client. The client's previous agent is deactivated.

    Example: [cyan]distributed-state send activate notes --client web[/]
    """
    with open_store(context) as store:
        _print_event(store.activate_agent(agent, client=client, conversation_id=conversation, previous_agent=previous))


@send.command()
def directory(
    context: typer.Context,
    old: Annotated[str, typer.Argument(help="The previous directory.", show_default=False)],
    new: Annotated[str, typer.Argument(help="The new directory.", show_default=False)],
    client: Client = "",
) -> None:
    """Change a client's working directory.

    Example: [cyan]distributed-state send directory /home/u /home/u/project --client web[/]
    """
    with open_store(context) as store:
        _print_event(store.change_directory(new, client=client, old_path=old))


@send.command()
def event(
    context: typer.Context,
    type_: Annotated[
        str, typer.Argument(metavar="TYPE", help="Type of the event, such as mail.sent.", show_default=False)
    ],
    subject: Annotated[str, typer.Option(help="Subject of the event, such as session:c1.")] = "",
    data: Annotated[str, typer.Option(help="Data of the event, a JSON object.")] = "{}",
) -> None:
    """Publish an event of your own.

    Example: [cyan]distributed-state send event mail.sent --subject user:u1 --data '{"id": 7}'[/]
    """
    try:
        decoded = json.loads(data)
    except ValueError as error:
        raise InvalidValue(f"--data {data!r:.80} is not JSON ({error})") from error
    if not isinstance(decoded, dict):
        raise InvalidValue(f"--data must be a JSON object, not {data!r:.80}")
    with open_store(context) as store:
        _print_event(store.emit(type_, decoded, subject=subject))


def _print_event(event: distributed_state.Event) -> None:
    typer.echo(json.dumps(event.to_dict()))


def _require(store: distributed_state.StateStore, id: str) -> None:
    if not store.session(id).exists(fresh=True):
        raise NotFound(f"there is no session {id!r}")


def _print_version(type: str, id: str, version: int) -> None:
    typer.echo(f"{type} {printable(id)} version {version}")
