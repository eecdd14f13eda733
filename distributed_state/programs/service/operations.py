"""The table of what is served under /v1. Law: what is not in it is neither served nor described."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.responses import Response

from distributed_state.programs.service.resources import (
    branching,
    conversations,
    fields,
    fleet,
    history,
    items,
    leases,
    messages,
    records,
    search,
    shapes,
    tokens,
)
from distributed_state.programs.service.routes import (
    IDEMPOTENCY_KEY,
    IF_MATCH,
    IF_NONE_MATCH,
    LAST_EVENT_ID,
    LEASE,
    PREFIX,
    Asked,
    Operation,
    Serve,
)
from distributed_state.programs.service.streaming import Heard
from distributed_state.values.access_tokens import Right
from distributed_state.values.model import Scope

OfScope = Callable[[Scope, Asked], Coroutine[Any, Any, Response]]
Line = Callable[..., Operation]
_READ = (IF_NONE_MATCH,)
_WRITE = (IF_MATCH, IF_NONE_MATCH, IDEMPOTENCY_KEY, LEASE)
_HELD = (LEASE,)
_AGAIN = (IF_MATCH, IDEMPOTENCY_KEY, LEASE)  # of a record that is there
_BEGIN = (IF_NONE_MATCH, IDEMPOTENCY_KEY)
_PAST = 4  # copies of an answer: hot keeps nothing of it, so it is stored, unpacked, decoded and encoded


class _Number(IntegerConvertor):
    """A number in a path. What has more digits than any is not found: Python refuses to read 4,301 of them."""

    regex = "[0-9]{1,40}"


register_url_convertor("number", _Number())


def operations(events: Serve) -> list[Operation]:
    """All of them; `events` serves the stream of events."""
    # Those of each request first: routes are tried in order.
    many = [*_conversations(), *(each for scope in records.NAMES for each in _records(scope))]
    many += [
        Operation("POST", f"{PREFIX}/search", "read", search.search, "Search", body=search.Search, answer=search.Hits),
        Operation("GET", f"{PREFIX}/branches", "admin", branching.all_branches, "List the branches of all records",
                  query=branching.BranchPage, answer=branching.Branches),
        Operation("GET", f"{PREFIX}/replicas", "admin", fleet.replicas, "List the replicas", answer=fleet.Replicas),
        Operation("GET", f"{PREFIX}/partitions", "admin", fleet.partitions, "List the partitions",
                  answer=fleet.Partitions),
        Operation("GET", f"{PREFIX}/leases", "admin", leases.listing, "List the leases that are held",
                  query=leases.Page, answer=leases.Leases),
        Operation("GET", f"{PREFIX}/tenants", "admin", fleet.tenants, "List what tenants ask of this worker",
                  answer=fleet.Tenants),
        Operation("GET", f"{PREFIX}/findings", "admin", fleet.findings, "Examine the servers and the fleet",
                  answer=fleet.Findings),
        Operation("GET", f"{PREFIX}/events", "events", events, "Read events as they come",
                  query=Heard, headers=(LAST_EVENT_ID,), media="text/event-stream"),
        Operation("POST", f"{PREFIX}/tokens", "admin", tokens.create, "Make a token",
                  body=tokens.MakeToken, answer=tokens.Made, status=201),
        Operation("GET", f"{PREFIX}/tokens", "admin", tokens.listing, "List tokens", query=tokens.Page,
                  answer=tokens.Tokens),
        Operation("DELETE", f"{PREFIX}/tokens/{{token}}", "admin", tokens.revoke, "Refuse a token, and what it made",
                  answer=tokens.Token),
        Operation("GET", f"{PREFIX}/caller", "read", fleet.who, "Read who is asking", answer=fleet.Who),
        Operation("POST", f"{PREFIX}/maintenance/compact", "admin", fleet.compact, "Pack old history",
                  body=fleet.Compact, answer=fleet.Counts),
        Operation("POST", f"{PREFIX}/maintenance/purge", "admin", fleet.purge, "Remove what is old",
                  body=fleet.Purge, answer=fleet.Counts),
    ]  # fmt: skip
    return many


def _conversations() -> list[Operation]:
    every = f"{PREFIX}/conversations"
    one = f"{every}/{{id}}"
    create, listing = partial(conversations.create, "session"), partial(search.listing, "session")
    return [
        Operation("POST", f"{one}/turns", "write", conversations.turn, "Serve one request in a turn",
                  body=conversations.Turn, answer=conversations.Turned, headers=_WRITE),
        Operation("GET", one, "read", conversations.read, "Read a conversation",
                  query=conversations.Last, answer=conversations.Conversation, headers=_READ),
        Operation("POST", every, "write", create, "Begin a conversation",
                  body=conversations.Create, answer=shapes.Begun, status=201, headers=_BEGIN),
        Operation("GET", every, "read", listing, "List conversations",
                  query=search.Listing, answer=search.Conversations),
        Operation("GET", f"{one}/messages", "read", messages.page, "Read a page of messages",
                  query=messages.Page, answer=messages.Numbered, headers=_READ),
        Operation("POST", f"{one}/messages", "write", messages.append, "Add messages",
                  body=messages.Append, answer=messages.Appended, status=201, headers=_WRITE),
        Operation("PUT", f"{one}/messages", "write", messages.replace, "Replace messages",
                  body=messages.Replace, answer=shapes.Written, headers=_WRITE),
        Operation("DELETE", f"{one}/messages/last", "write", messages.pop, "Take the last message back",
                  answer=messages.Popped, headers=_WRITE),
        Operation("GET", f"{one}/transcript", "read", messages.transcript, "Read messages as they were given",
                  query=messages.Page, answer=messages.Transcript, headers=_READ),
        Operation("GET", f"{one}/messages/{{number:number}}", "read", messages.one, "Read one message",
                  query=records.Fresh, answer=messages.Single),
        Operation("GET", f"{one}/lifetime", "read", conversations.read_lifetime, "Read how long a conversation lives",
                  answer=conversations.Lives),
        Operation("PUT", f"{one}/lifetime", "write", conversations.put_lifetime, "Set how long a conversation lives",
                  body=conversations.Live, answer=shapes.Written, headers=_WRITE),
    ]  # fmt: skip


def _records(scope: Scope) -> list[Operation]:
    name = records.NAMES[scope]
    one = f"{PREFIX}/{name}s/{{id}}"

    def line(method: str, path: str, right: Right, serve: OfScope, summary: str, **more: Any) -> Operation:
        return Operation(method, one + path, right, partial(serve, scope), f"{summary} of a {name}", **more)

    found = [
        *_fields(line), *_items(line), *_past(line), *_whole(line),
        line("POST", "/writes", "write", fields.write_whole, "Make one write", body=fields.WholeWrite,
             answer=fields.WholeWritten, headers=_WRITE),
        line("POST", "/changes", "write", fields.change_field, "Change a field by what it holds",
             body=fields.FieldChange, answer=fields.FieldChanged, headers=_WRITE),
    ]  # fmt: skip
    if scope != "session":
        found.append(line("GET", "", "read", records.read, "Read the state",
                          query=records.Fresh, answer=records.Shown, headers=_READ))  # fmt: skip
    if scope == "task":
        found.append(Operation("POST", f"{PREFIX}/tasks", "write", partial(conversations.create, scope), "Begin a task",
                               body=conversations.Create, answer=shapes.Begun, status=201, headers=_BEGIN))  # fmt: skip
        found.append(Operation("GET", f"{PREFIX}/tasks", "read", partial(search.listing, scope), "List tasks",
                               query=search.Listing, answer=search.Tasks))  # fmt: skip
    if scope == "user":
        found.append(Operation("GET", f"{PREFIX}/users", "read", partial(search.listing, scope), "List users",
                               query=search.Listing, answer=search.Users))  # fmt: skip
        found.append(line("DELETE", "/traces", "delete", records.forget, "Remove every trace",
                          answer=records.Forgotten))  # fmt: skip
    return found


def _fields(line: Line) -> list[Operation]:
    return [
        line("GET", "/fields", "read", fields.read, "Read all fields",
             query=records.Fresh, answer=fields.Fields, headers=_READ),
        line("PATCH", "/fields", "write", fields.patch, "Change several fields",
             body=fields.Patch, answer=fields.Patched, headers=_WRITE),
        line("GET", "/fields/{key:path}", "read", fields.get, "Read one field",
             query=fields.FieldAt, answer=fields.FieldValue, headers=_READ),
        line("PUT", "/fields/{key:path}", "write", fields.put, "Set one field",
             body=fields.SetField, answer=shapes.Written, headers=_WRITE),
        line("DELETE", "/fields/{key:path}", "write", fields.delete, "Delete one field",
             answer=shapes.Written, headers=_WRITE),
        line("GET", "/tags", "read", fields.tags, "Read the tags",
             query=records.Fresh, answer=fields.Tags, headers=_READ),
        line("PATCH", "/tags", "write", fields.retag, "Change the tags",
             body=fields.Retag, answer=shapes.Written, headers=_WRITE),
    ]  # fmt: skip


def _items(line: Line) -> list[Operation]:
    every = "/items/{collection}"
    return [
        line("GET", every, "read", items.page, "Read a page of items", query=items.Page, answer=items.Items),
        line("PATCH", every, "write", items.change, "Change items",
             body=items.ChangeItems, answer=shapes.Written, headers=_WRITE),
        line("GET", every + "/{key:path}", "read", items.get, "Read an item",
             query=items.AtVersion, answer=items.ItemShown),
    ]  # fmt: skip


def _past(line: Line) -> list[Operation]:
    return [
        line("GET", "/versions", "read", history.history, "Read a page of the history",
             query=history.Past, answer=history.Versions, copies=_PAST),
        line("GET", "/versions/{version:number}", "read", history.at, "Read a version",
             query=history.OnBranch, answer=history.State, copies=_PAST),
        line("GET", "/versions/{version:number}/diff", "read", history.diff, "Compare two versions",
             query=history.Other, answer=history.Difference, copies=2 * _PAST),
        line("GET", "/overview", "read", history.overview, "Read as much as fits on a page",
             query=history.Looked, answer=history.Overview),
        line("GET", "/timeline", "read", history.timeline, "Read what happened to the state",
             query=history.Below, answer=history.Timeline),
        line("GET", "/forks", "read", branching.list_forks, "List the forks",
             query=branching.ForkPage, answer=branching.Forks),
        line("GET", "/checkpoints", "read", branching.checkpoints, "List the checkpoints",
             query=branching.CheckpointPage, answer=branching.Checkpoints),
        line("POST", "/checkpoints", "write", branching.make_checkpoint, "Make a checkpoint",
             body=branching.Checkpoint, answer=shapes.Written, status=201, headers=_WRITE),
        line("POST", "/rollback", "write", branching.rollback, "Restore an earlier state",
             body=branching.Rollback, answer=shapes.Written, headers=_AGAIN),
        line("POST", "/forks", "write", branching.fork, "Make a fork",
             body=branching.Fork, answer=shapes.Begun, status=201, headers=(IDEMPOTENCY_KEY,)),
        line("GET", "/branches", "read", branching.branches_of, "List the branches", answer=branching.Branches),
        line("DELETE", "/branches/{branch}", "delete", branching.drop_branch, "Drop a branch",
             answer=branching.Dropped),
    ]  # fmt: skip


def _whole(line: Line) -> list[Operation]:
    return [
        line("POST", "/lease", "write", leases.take, "Take the lease",
             body=leases.Take, answer=leases.Taken, status=201),
        line("PUT", "/lease", "write", leases.renew, "Renew the lease",
             body=leases.Renew, answer=leases.Taken, headers=_HELD),
        line("DELETE", "/lease", "write", leases.release, "Release the lease",
             answer=leases.Released, headers=_HELD),
        line("PUT", "/lease/{token:number}", "admin", leases.take_over, "Take somebody's lease over",
             body=leases.Renew, answer=leases.Taken),
        line("DELETE", "/lease/{token:number}", "admin", leases.end, "End somebody's lease",
             answer=leases.Released),
        line("DELETE", "", "delete", records.delete, "Delete the state",
             answer=shapes.Versioned, headers=(IF_MATCH, LEASE)),
        line("DELETE", "/everything", "delete", records.erase, "Erase the state and the history",
             answer=records.Erased, headers=_HELD),
        line("GET", "/export", "admin", records.export, "Export the whole history", media="application/jsonl"),
    ]  # fmt: skip
