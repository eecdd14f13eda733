"""The table of all operations under /v1, and its description.

Law: only operations of the table are served and described.

The description is OpenAPI 3.1. It is made and compressed once, at the first request for it.
"""

from __future__ import annotations

import asyncio
import gzip
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response

from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import PROBLEM, encode
from distributed_state.programs.service.requests import (
    CONDITIONS,
    IDEMPOTENCY_KEY,
    IF_MATCH,
    IF_NONE_MATCH,
    LAST_EVENT_ID,
    LEASE,
    PREFIX,
    SENT,
    Operation,
    Serve,
)
from distributed_state.programs.service.resources import (
    admin,
    conversations,
    fields,
    history,
    leases,
    output,
    records,
    schedules,
    search,
    usage,
)
from distributed_state.values.access_tokens import Right
from distributed_state.values.as_text import BASE64
from distributed_state.values.model import Scope

Line = Callable[..., Operation]
_READ = (IF_NONE_MATCH,)
_WRITE = (IF_MATCH, IF_NONE_MATCH, IDEMPOTENCY_KEY, LEASE)
_HELD = (LEASE,)
_AGAIN = (IF_MATCH, IDEMPOTENCY_KEY, LEASE)  # for an existing record
_BEGIN = (IF_NONE_MATCH, IDEMPOTENCY_KEY)
_PAST = 4  # copies in memory of an answer that is not in hot: stored, unpacked, decoded and encoded


class _Number(IntegerConvertor):
    """A number in a path. A path with more than 40 digits is not found, as Python refuses to read 4,301 digits."""

    regex = "[0-9]{1,40}"


register_url_convertor("number", _Number())


def operations(events: Serve, follow: Serve, own_events: Serve) -> list[Operation]:
    """All operations; `events` serves the event stream, `own_events` that of a conversation, `follow` its output."""
    # Routes are tried in order, so the most frequent requests come first.
    many = [
        *_conversations(),
        *_running(follow, own_events),
        *_scheduled(),
        *(each for scope in records.NAMES for each in _records(scope)),
    ]
    many += [
        Operation("POST", f"{PREFIX}/search", "read", search.search, "Search", answer=search.Hits),
        Operation("GET", f"{PREFIX}/branches", "admin", history.all_branches, "List the branches of all records",
                  answer=history.Branches),
        Operation("GET", f"{PREFIX}/replicas", "admin", admin.replicas, "List the replicas", answer=admin.Replicas),
        Operation("GET", f"{PREFIX}/partitions", "admin", admin.partitions, "List the partitions",
                  answer=admin.Partitions),
        Operation("GET", f"{PREFIX}/leases", "admin", leases.listing, "List the leases that are held",
                  answer=leases.Leases),
        Operation("GET", f"{PREFIX}/tenants", "admin", admin.tenants, "List each tenant's use of this worker",
                  answer=admin.Tenants),
        Operation("GET", f"{PREFIX}/findings", "admin", admin.findings, "Examine the servers and the fleet",
                  answer=admin.Findings),
        Operation("GET", f"{PREFIX}/events", "events", events, "Read events as they come", headers=(LAST_EVENT_ID,),
                  media="text/event-stream"),
        Operation("POST", f"{PREFIX}/tokens", "admin", admin.create_token, "Make a token", answer=admin.Made,
                  status=201),
        Operation("GET", f"{PREFIX}/tokens", "admin", admin.list_tokens, "List tokens", answer=admin.Tokens),
        Operation("DELETE", f"{PREFIX}/tokens/{{token}}", "admin", admin.revoke_token,
                  "Revoke a token and the tokens that it made", answer=admin.Token),
        Operation("GET", f"{PREFIX}/caller", "read", admin.who, "Read the caller", answer=admin.Who),
        Operation("POST", f"{PREFIX}/maintenance/compact", "admin", admin.compact, "Pack old history",
                  answer=admin.Counts),
        Operation("POST", f"{PREFIX}/maintenance/purge", "admin", admin.purge, "Remove old data",
                  answer=admin.Counts),
    ]  # fmt: skip
    return many


def _conversations() -> list[Operation]:
    every = f"{PREFIX}/conversations"
    one = f"{every}/{{id}}"
    create, listing = partial(conversations.create, "session"), partial(search.listing, "session")
    return [
        Operation("POST", f"{one}/turns", "write", conversations.turn, "Serve one request in a turn",
                  answer=conversations.Turned, headers=_WRITE),
        Operation("GET", f"{one}/turns/{{request}}", "read", conversations.answered_turn, "Read a request's result",
                  answer=conversations.Turned),
        Operation("GET", one, "read", conversations.read, "Read a conversation", answer=conversations.Conversation,
                  headers=_READ),
        Operation("POST", every, "write", create, "Create a conversation", answer=requests.Begun, status=201,
                  headers=_BEGIN),
        Operation("GET", every, "read", listing, "List conversations", answer=search.Conversations),
        Operation("GET", f"{one}/messages", "read", conversations.message_page, "Read a page of messages",
                  answer=conversations.Numbered, headers=_READ),
        Operation("POST", f"{one}/messages", "write", conversations.append_messages, "Add messages",
                  answer=conversations.Appended, status=201, headers=_WRITE),
        Operation("PUT", f"{one}/messages", "write", conversations.replace, "Replace messages", answer=requests.Written,
                  headers=_WRITE),
        Operation("DELETE", f"{one}/messages/last", "write", conversations.pop, "Remove the last message",
                  answer=conversations.Popped, headers=_WRITE),
        Operation("GET", f"{one}/transcript", "read", conversations.transcript, "Read the transcript",
                  answer=conversations.Transcript, headers=_READ),
        Operation("GET", f"{one}/messages/{{number:number}}", "read", conversations.one_message, "Read one message",
                  answer=conversations.Single),
        Operation("GET", f"{one}/usage", "read", usage.of_conversation, "Read the tokens that a conversation used",
                  answer=usage.UsageShown, headers=_READ),
        Operation("GET", f"{one}/lifetime", "read", conversations.read_lifetime, "Read a conversation's lifetime",
                  answer=conversations.Lives),
        Operation("PUT", f"{one}/lifetime", "write", conversations.put_lifetime, "Set a conversation's lifetime",
                  answer=requests.Written, headers=_WRITE),
    ]  # fmt: skip


def _running(follow: Serve, own_events: Serve) -> list[Operation]:
    one = f"{PREFIX}/conversations/{{id}}"
    stream, resumes = "text/event-stream", (LAST_EVENT_ID,)
    return [
        Operation("GET", f"{one}/output", "read", follow, "Follow the turns of a conversation", headers=resumes,
                  media=stream, tickets=True),
        Operation("POST", f"{one}/output", "write", output.stream, "Stream chunks of a turn", answer=output.Streamed,
                  headers=_HELD),
        Operation("POST", f"{one}/tickets", "read", output.create_ticket, "Make a ticket to follow a conversation",
                  answer=output.Ticket, status=201),
        Operation("POST", f"{one}/stop", "write", output.stop, "Stop a turn", answer=output.Stopped),
        Operation("POST", f"{one}/inbox", "write", output.post, "Leave a message for a turn", answer=output.Posted,
                  status=202, headers=(IDEMPOTENCY_KEY,)),
        Operation("GET", f"{one}/inbox", "read", output.read_inbox, "Read the inputs that wait", answer=output.Inbox),
        Operation("DELETE", f"{one}/inbox/{{number:number}}", "write", output.withdraw, "Withdraw an input",
                  answer=output.Withdrawn),
        Operation("GET", f"{one}/events", "read", own_events, "Read a conversation's events as they come",
                  headers=resumes, media=stream),
    ]  # fmt: skip


def _scheduled() -> list[Operation]:
    one = f"{PREFIX}/conversations/{{id}}"
    return [
        Operation("GET", f"{PREFIX}/usage", "read", usage.of_all, "Add up the tokens that models used",
                  answer=usage.UsageByDay),
        Operation("GET", f"{PREFIX}/asks", "read", schedules.questions, "List open questions",
                  answer=schedules.Questions),
        Operation("POST", f"{one}/answers", "write", schedules.reply, "Answer an open question",
                  answer=schedules.Replied),
        Operation("GET", f"{one}/schedule", "read", schedules.read, "Read when a conversation goes on",
                  answer=schedules.Schedule),
        Operation("POST", f"{one}/wakes", "write", schedules.wake, "Set a wake of a conversation",
                  answer=schedules.Woken),
        Operation("DELETE", f"{one}/wakes", "write", schedules.cancel_wake, "Remove a wake of a conversation",
                  answer=schedules.Cancelled),
        Operation("POST", f"{one}/retry", "write", schedules.retry, "Call a conversation's handler again",
                  answer=schedules.Retried),
    ]  # fmt: skip


def _records(scope: Scope) -> list[Operation]:
    name = records.NAMES[scope]
    one = f"{PREFIX}/{name}s/{{id}}"

    def line(method: str, path: str, right: Right, serve: Serve, summary: str, **more: Any) -> Operation:
        said = summary if "{}" in summary else summary + "{}"
        return Operation(method, one + path, right, partial(serve, scope), said.format(f" of a {name}"), **more)

    found = [
        *_fields(line), *_items(line), *_past(line), *_whole(line),
        line("POST", "/writes", "write", fields.write_whole, "Make several changes", answer=fields.WholeWritten,
             headers=_WRITE),
        line("POST", "/changes", "write", fields.change_field, "Change a field{}, based on its value",
             answer=fields.FieldChanged, headers=_WRITE),
    ]  # fmt: skip
    if scope != "session":
        found.append(line("GET", "", "read", records.read, "Read the state", answer=records.Shown, headers=_READ))
    if scope == "task":
        create, listing = partial(conversations.create, scope), partial(search.listing, scope)
        found += [
            Operation("POST", f"{PREFIX}/tasks", "write", create, "Create a task", answer=requests.Begun, status=201,
                      headers=_BEGIN),
            Operation("GET", f"{PREFIX}/tasks", "read", listing, "List tasks", answer=search.Tasks),
        ]  # fmt: skip
    if scope == "user":
        listing = partial(search.listing, scope)
        found += [
            Operation("GET", f"{PREFIX}/users", "read", listing, "List users", answer=search.Users),
            line("DELETE", "/traces", "delete", records.forget, "Erase all data", answer=records.Forgotten),
        ]
    return found


def _fields(line: Line) -> list[Operation]:
    return [
        line("GET", "/fields", "read", fields.read, "Read all fields", answer=fields.Fields, headers=_READ),
        line("PATCH", "/fields", "write", fields.patch, "Change several fields", answer=fields.Patched, headers=_WRITE),
        line("GET", "/fields/{key:path}", "read", fields.get, "Read one field", answer=fields.FieldValue,
             headers=_READ),
        line("PUT", "/fields/{key:path}", "write", fields.put, "Set one field", answer=requests.Written,
             headers=_WRITE),
        line("DELETE", "/fields/{key:path}", "write", fields.delete, "Delete one field", answer=requests.Written,
             headers=_WRITE),
        line("GET", "/tags", "read", fields.tags, "Read the tags", answer=fields.Tags, headers=_READ),
        line("PATCH", "/tags", "write", fields.retag, "Change the tags", answer=requests.Written, headers=_WRITE),
    ]  # fmt: skip


def _items(line: Line) -> list[Operation]:
    every = "/items/{collection}"
    return [
        line("GET", every, "read", fields.item_page, "Read a page of items", answer=fields.Items),
        line("PATCH", every, "write", fields.change_items, "Change items", answer=requests.Written, headers=_WRITE),
        line("GET", every + "/{key:path}", "read", fields.get_item, "Read an item", answer=fields.ItemShown),
    ]  # fmt: skip


def _past(line: Line) -> list[Operation]:
    return [
        line("GET", "/versions", "read", history.history, "Read a page of the history", answer=history.Versions,
             copies=_PAST),
        line("GET", "/versions/{version:number}", "read", history.at, "Read a version", answer=history.State,
             copies=_PAST),
        line("GET", "/versions/{version:number}/diff", "read", history.diff, "Compare two versions",
             answer=history.Difference, copies=2 * _PAST),
        line("GET", "/overview", "read", history.overview, "Read the overview", answer=history.Overview),
        line("GET", "/timeline", "read", history.timeline, "Read the events of the state", answer=history.Timeline),
        line("GET", "/forks", "read", history.list_forks, "List the forks", answer=history.Forks),
        line("GET", "/checkpoints", "read", history.checkpoints, "List the checkpoints", answer=history.Checkpoints),
        line("POST", "/checkpoints", "write", history.make_checkpoint, "Make a checkpoint", answer=requests.Written,
             status=201, headers=_WRITE),
        line("POST", "/rollback", "write", history.rollback, "Restore an earlier state", answer=requests.Written,
             headers=_AGAIN),
        line("POST", "/forks", "write", history.fork, "Make a fork", answer=requests.Begun, status=201,
             headers=(IDEMPOTENCY_KEY,)),
        line("GET", "/branches", "read", history.branches_of, "List the branches", answer=history.Branches),
        line("DELETE", "/branches/{branch}", "delete", history.drop_branch, "Drop a branch", answer=history.Dropped),
    ]  # fmt: skip


def _whole(line: Line) -> list[Operation]:
    return [
        line("POST", "/lease", "write", leases.take, "Acquire the lease", answer=leases.Taken, status=201),
        line("PUT", "/lease", "write", leases.renew, "Renew the lease", answer=leases.Taken, headers=_HELD),
        line("DELETE", "/lease", "write", leases.release, "Release the lease", answer=leases.Released, headers=_HELD),
        line("PUT", "/lease/{token:number}", "admin", leases.take_over, "Take over another caller's lease",
             answer=leases.Taken),
        line("DELETE", "/lease/{token:number}", "admin", leases.end, "End a lease", answer=leases.Released),
        line("DELETE", "", "delete", records.delete, "Delete the state", answer=requests.Versioned, headers=(IF_MATCH,
             LEASE)),
        line("DELETE", "/everything", "delete", records.erase, "Erase the state and the history", answer=records.Erased,
             headers=_HELD),
        line("GET", "/export", "admin", records.export, "Export the whole history", media="application/jsonl"),
    ]  # fmt: skip


# For OpenAPI
_SCHEMAS = "#/components/schemas/"
_IN_PATH = re.compile(r"{(\w+)(?::(\w+))?}")
_HEADER_TEXTS = {
    IF_MATCH: "Write only if the record is at this version, as its ETag has it, or exists (`*`): else 412.",
    IF_NONE_MATCH: "Read: 304 if the record is still at one of these. Write: `*`, only if it is not there yet.",
    IDEMPOTENCY_KEY: "The request is applied once, however often it is sent with this key; 422 with another body. "
    "Use a random value: callers without their own token or actor share one set of keys.",
    LEASE: "Write under this lease, exactly as it was returned; 412 if it has ended.",
    LAST_EVENT_ID: "Continue after this position; it overrides `since`.",
}
_SERVERS = {
    PREFIX: "Names in paths are percent-encoded, each as one part: the id a/b as a%2Fb.",
    f"{PREFIX}/{BASE64}": "Names in paths are the base64url of their UTF-8, without padding: the id a/b as YS9i. "
    "For clients behind a proxy that decodes paths or tidies them up.",
}
_TEXT = {"type": "string"}
_SHAPES = {
    IF_MATCH: {"type": "string", "pattern": r'^(\*|"[0-9]{1,18}")$'},
    IDEMPOTENCY_KEY: {"type": "string", "pattern": '^[!-"$-~][!-~]{0,199}$'},
}
_ALWAYS = (401, 403, 413, 422, 429, 500, 501, 503)


# As it is served


class Described:
    """Serves the description of these operations."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations
        self._made: _Made | None = None
        self._making = asyncio.Lock()

    async def openapi(self, request: Request) -> Response:
        """Answer with the OpenAPI description."""
        async with self._making:
            if self._made is None:
                # This takes a tenth of a second, and would delay other requests.
                self._made = await asyncio.to_thread(self._make)
        return self._made.answer(request)

    def _make(self) -> _Made:
        data = encode(description(self._operations))
        return _Made(data, gzip.compress(data, 6))


@dataclass(frozen=True, slots=True)
class _Made:
    data: bytes
    compressed: bytes

    def answer(self, request: Request) -> Response:
        """Answer in the form that the client accepts."""
        headers, data = {"Vary": "Accept-Encoding"}, self.data
        if requests.accepts_gzip(request):
            headers, data = {**headers, "Content-Encoding": "gzip"}, self.compressed
        return Response(data, headers=headers, media_type="application/json")


# OpenAPI


class Problem(BaseModel):
    """Problem details of an error (RFC 9457). `error` is its class, `instance` the id of the request.

    `version` is the version that was found; `phase` and `event` are those of a refused transition, `reason` is that of
    a stop. `expired` is when a conversation expired, in seconds since 1970; `begins_again` says that a write begins it
    again.
    """

    model_config = ConfigDict(extra="forbid")

    type: str
    title: str
    status: int
    detail: str
    instance: str
    error: str
    version: int | None = None
    phase: str | None = None
    event: str | None = None
    reason: str | None = None
    expired: float | None = None
    begins_again: bool | None = None


def description(operations: Sequence[Operation]) -> dict[str, Any]:
    """The description as a JSON object."""
    models: list[type[BaseModel]] = [Problem]
    models += [*(model for each in operations for model in (each.body, each.answer) if model is not None)]
    mode: JsonSchemaMode = "validation"
    unique: list[tuple[Any, JsonSchemaMode]] = [(model, mode) for model in dict.fromkeys(models)]
    names, schemas = models_json_schema(unique, ref_template=_SCHEMAS + "{model}")
    refs = {model: names[model, mode] for model, _ in unique}
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        path = plain(each.path).removeprefix(PREFIX)
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, refs, operations)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "distributed_state",
            "version": version("distributed-state"),
            "summary": "State for agents: conversations, users and tasks, with their history.",
        },
        "servers": [{"url": place, "description": text} for place, text in _SERVERS.items()],
        "paths": paths,
        "components": {
            "schemas": {name: _without_defaults(each) for name, each in schemas["$defs"].items()},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}, {}],
    }


def plain(path: str) -> str:
    """A path as OpenAPI writes it."""
    return _IN_PATH.sub(r"{\1}", path)


def name_of(operation: Operation) -> str:
    """The operation's id."""
    words = re.findall(r"\w+", plain(operation.path).removeprefix(PREFIX))
    return "_".join([operation.method.lower(), *words])


def _operation(operation: Operation, refs: dict[Any, Any], operations: Iterable[Operation]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": name_of(operation),
        "summary": operation.summary,
        "description": f"Needs the right `{operation.right}`.{_refused(operation)}",
        "tags": [plain(operation.path).split("/")[2]],
        "parameters": [*_path(operation.path), *_query(operation.query), *_headers(operation.headers)],
        "responses": _responses(operation, refs, operations),
    }
    if operation.body is not None:
        content = {"application/json": {"schema": refs[operation.body]}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _refused(operation: Operation) -> str:
    """Name the headers that the operation refuses because it is not a single commit of this record."""
    lacking = [] if operation.method == "GET" else [each for each in CONDITIONS if each not in operation.headers]
    named = ", ".join(f"`{each}`" for each in lacking)
    return f" Takes no {named}: a request with one of them is refused (422)." if named else ""


def _path(path: str) -> list[dict[str, Any]]:
    kinds = {"int": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}}
    text = {"type": "string", "minLength": 1}
    return [
        {"name": name, "in": "path", "required": True, "schema": kinds.get(kind, text)}
        for name, kind in _IN_PATH.findall(path)
    ]


def _query(model: type[BaseModel] | None) -> list[dict[str, Any]]:
    if model is None:
        return []
    schema = model.model_json_schema()
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _without_null(each)}
        for name, each in schema.get("properties", {}).items()
    ]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop null from a schema: a query cannot hold null, and an optional parameter is left out instead."""
    kinds = [each for each in schema.get("anyOf", []) if each != {"type": "null"}]
    found = {**kinds[0], **{name: value for name, value in schema.items() if name != "anyOf"}} if kinds else schema
    return {
        name: value for name, value in found.items() if not (name == "default" and value is None) and name != "title"
    }


def _without_defaults(schema: dict[str, Any]) -> dict[str, Any]:
    """Say defaults in words: generators of clients take a property with a default for one that is always there."""
    properties = {}
    for name, each in schema.get("properties", {}).items():
        default = each.get("default")
        said = [] if default is None else [f"By default {json.dumps(default)}."]
        words = " ".join([*filter(None, [each.get("description")]), *said])
        rest = {key: value for key, value in each.items() if key not in ("default", "description")}
        properties[name] = {**rest, "description": words} if words else rest
    return {**schema, "properties": properties} if properties else schema


def _headers(names: Iterable[str]) -> list[dict[str, Any]]:
    return [
        {"name": each, "in": "header", "description": _HEADER_TEXTS[each], "schema": _SHAPES.get(each, _TEXT)}
        for each in names
    ]


def _responses(operation: Operation, refs: dict[Any, Any], operations: Iterable[Operation]) -> dict[str, Any]:
    text = inspect.cleandoc(operation.answer.__doc__ or "") if operation.answer else HTTPStatus(operation.status).phrase
    done: dict[str, Any] = {"description": text}
    schema = refs[operation.answer] if operation.answer else _TEXT
    done["content"] = {operation.media: {"schema": schema}}
    done["headers"] = {name: {"schema": _TEXT} for name in SENT}
    links = _links(operation, operations)
    if links:
        done["links"] = links
    found = {str(operation.status): done}
    if IF_NONE_MATCH in operation.headers and operation.method == "GET":
        found["304"] = {"description": "The record is still at that version."}
    problem = {PROBLEM: {"schema": refs[Problem]}}
    for status in sorted(_statuses(operation)):
        found[str(status)] = {"description": HTTPStatus(status).phrase, "content": problem}
    return found


def _statuses(operation: Operation) -> set[int]:
    found = set(_ALWAYS)
    if "{" in operation.path:
        found |= {404, 410}
    if operation.method != "GET":
        found |= {404, 409, 410, 415, 423}
    if {IF_MATCH, LEASE} & {*operation.headers} or operation.method != "GET":
        found.add(412)
    return found


def _links(operation: Operation, operations: Iterable[Operation]) -> dict[str, Any]:
    """Links from an operation that makes a record to all operations on that record."""
    if operation.status != 201:
        return {}
    one = operation.path.removesuffix("/forks") if operation.path.endswith("/forks") else operation.path + "/{id}"
    return {
        name_of(each): {"operationId": name_of(each), "parameters": {"id": "$response.body#/id"}}
        for each in operations
        if each.path.startswith(one) and _IN_PATH.findall(each.path) == [("id", "")] and each is not operation
    }
