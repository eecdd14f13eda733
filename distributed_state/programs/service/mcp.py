"""The Model Context Protocol as an operation of the service; needs the extra `mcp`.

Law: a worker keeps no state between requests, so any worker can answer any request of an agent. Requests run as their
caller, who is recognized before the protocol is read.

A tool is the pydantic model of its arguments: the agent's model reads their descriptions, and its docstring describes
the tool. It names the right that it needs, checks its session first, and is one read or one commit. Writing does not
begin a session: an agent that mistypes an id gets an error, and does not continue in an empty session. Lists and
searches only return the caller's own records.

Design: section 25. Source: the specification at modelcontextprotocol.io, "Streamable HTTP".
"""

from __future__ import annotations

import re
import secrets
from dataclasses import asdict
from functools import cache, partial
from inspect import cleandoc
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

import orjson
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from distributed_state.conversation.session import AsyncSession
from distributed_state.errors import AccessDenied, InvalidValue, NotFound, StateError
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import waited
from distributed_state.programs.service import mcp_sdk, requests
from distributed_state.programs.service.answers import encode, refusal
from distributed_state.programs.service.requests import (
    PREFIX,
    SESSION,
    Asked,
    Label,
    Limit,
    Operation,
    Version,
    copying,
    searching,
)
from distributed_state.programs.service.resources import output, records, schedules
from distributed_state.programs.service.resources.schedules import Handler, QuestionName
from distributed_state.records import messages as shown_messages
from distributed_state.records.access import ITEMS, MESSAGES, MOVES
from distributed_state.records.context import context_of
from distributed_state.results import Written
from distributed_state.values import as_text
from distributed_state.values.access_tokens import Right
from distributed_state.values.items import DeleteItem, PutItem, name_of
from distributed_state.values.model import PHASE

PATH = f"{PREFIX}/mcp"
RESOURCES = {"state": "State of a session: version, phase, fields.", "messages": "The last messages of a session."}
_JSON = "application/json"
_ASKED = "distributed_state.asked"  # in the scope of a request, for the handlers below
_COLLECTED = "distributed_state.collected"  # likewise
_LARGE = 64 * 1024  # characters from which on a text bypasses the SDK, which copies its texts some ten times
_OF_KEYS = re.compile(r"[;,] [^;,]*Idempotency-Key")
_COPIES = 5  # of an answer in memory: stored, as values, as JSON, and as JSON within JSON
_LAST = 100  # messages of a resource
_INSTRUCTIONS = """\
Durable state of agents: sessions with fields, messages and notes, shared by all agents that work on them.
Read the state before you change it, and give its version as expect_version. Keep in notes what must be remembered."""


def operation() -> Operation:
    """The endpoint for the service's table of operations. Each tool requires a right of its own."""
    return Operation("POST", PATH, None, Endpoint().serve, copies=_COPIES, kind=kind_of)


def kind_of(request: Request) -> tuple[str, ...]:
    """Name the tool or resource and the session of a request; answers of one kind have about the same size."""
    body = request.state.body
    try:
        params = orjson.loads(body)["params"] if len(body) < _LARGE else {}
        given = params.get("arguments") or {}
        found = params.get("name"), params.get("uri"), given.get("session") or requests.header(request, SESSION)
    except (ValueError, LookupError, TypeError, AttributeError):
        return ()
    return tuple(str(each)[:200] for each in found)


class Endpoint:
    """Answers requests of the protocol."""

    def __init__(self) -> None:
        self._server = mcp_sdk.server(
            "distributed-state",
            _INSTRUCTIONS,
            {
                "list_tools": self._list_tools,
                "call_tool": self._call_tool,
                "list_resources": self._list_resources,
                "list_resource_templates": self._list_templates,
                "read_resource": self._read_resource,
            },
            lambda name: TOOLS[name].schema_of_arguments() if name in TOOLS else None,
        )

    async def serve(self, asked: Asked) -> Response:
        """Answer one request of the protocol as one piece of JSON, never as a stream."""
        # One manager for each request, with which it ends or is cancelled, because other workers would lack its state.
        manager = StreamableHTTPSessionManager(
            self._server, json_response=True, stateless=True, max_request_body_size=asked.limits.body
        )
        collected = _Collected()
        scope = dict(asked.request.scope) | {_ASKED: asked, _COLLECTED: collected}
        async with manager.run():
            await manager.handle_request(scope, _receive(asked.request), collected.send)
        return await collected.response()

    # Tools

    async def _list_tools(self, request: Request, _: Any) -> dict[str, Any]:
        """List the tools that the caller may call."""
        rights = _asked(request).caller.rights
        return {"tools": [_shown(each) for each in TOOLS.values() if each.right in rights]}

    async def _call_tool(self, request: Request, params: Any) -> dict[str, Any]:
        if params.name not in TOOLS:
            raise mcp_sdk.refused(mcp_sdk.INVALID_PARAMS, f"there is no tool {params.name!r:.80}")
        try:
            text = await _run(_asked(request), TOOLS[params.name], params.arguments)
        except Exception as error:  # noqa: BLE001 - the agent gets its public text, and the log the rest
            return {"content": [{"type": "text", "text": _problem(error)}], "isError": True}
        return {"content": [{"type": "text", "text": _collected(request).keep(text)}]}

    # Resources

    async def _list_resources(self, request: Request, _: Any) -> dict[str, Any]:
        """List the resources of the session that the client names for all calls; templates describe the others."""
        asked = _asked(request)
        named = requests.header(asked.request, SESSION)
        if not named or not named.startswith(asked.caller.prefix) or "read" not in asked.caller.rights:
            return {"resources": []}
        listed = [
            {"uri": f"{kind}://{as_text.quoted(named)}", "name": kind, "description": text, "mimeType": _JSON}
            for kind, text in RESOURCES.items()
        ]
        return {"resources": listed}

    async def _list_templates(self, request: Request, _: Any) -> dict[str, Any]:
        listed = [
            {"uriTemplate": f"{kind}://{{session}}", "name": kind, "description": text, "mimeType": _JSON}
            for kind, text in RESOURCES.items()
        ]
        return {"resourceTemplates": listed}

    async def _read_resource(self, request: Request, params: Any) -> dict[str, Any]:
        uri = str(params.uri)
        kind, _, named = uri.partition("://")
        try:
            if kind not in RESOURCES or not named:
                raise InvalidValue(f"a resource is state://SESSION or messages://SESSION, not {uri!r:.80}")
            asked = _asked(request)
            given = {"session": records.within(asked, _name(named))}
            tool: type[Tool] = GetState
            if kind == "messages":
                tool, given = ReadMessages, given | {"limit": str(_LAST)}
            text = await _run(asked, tool, given)
        except Exception as error:  # noqa: BLE001 - likewise
            code = mcp_sdk.INVALID_PARAMS if isinstance(error, StateError) else mcp_sdk.INTERNAL_ERROR
            raise mcp_sdk.refused(code, _problem(error)) from None
        return {"contents": [{"uri": uri, "text": _collected(request).keep(text), "mimeType": _JSON}]}


def _name(quoted: str) -> str:
    try:
        return as_text.read(quoted.encode("utf-8", "surrogatepass"))
    except UnicodeDecodeError as error:
        raise InvalidValue("the session is not UTF-8 after percent-decoding") from error


async def _run(asked: Asked, tool: type[Tool], given: dict[str, Any] | None) -> str:
    """Return the tool's result as JSON. Raises StateError."""
    allow(asked, tool.right)
    requests.check_members(given or {}, asked.limits)
    text = encode(await tool.read(given).run(asked))
    if len(text) > asked.limits.answer:
        raise InvalidValue(f"the answer has {len(text)} bytes, more than {asked.limits.answer}: ask for less")
    return text.decode()


def _receive(request: Request) -> Receive:
    """Return a function that gives the SDK the body, which has already arrived and passed the checks of its shape."""

    async def whole() -> Message:
        return {"type": "http.request", "body": request.state.body, "more_body": False}

    return whole


def _asked(request: Request) -> Asked:
    asked = request.scope[_ASKED]
    assert isinstance(asked, Asked)
    return asked


def _collected(request: Request) -> _Collected:
    found = request.scope[_COLLECTED]
    assert isinstance(found, _Collected)
    return found


def _problem(error: Exception) -> str:
    """The text of an error for the agent, as clients of the service's other operations get it."""
    problem = orjson.loads(refusal(error).body)
    # Tools take no Idempotency-Key, so the advice to repeat a write with the same one is left out.
    text = _OF_KEYS.split(problem["detail"])[0]
    return f"{problem['error']}: {text}"


def _shown(tool: type[Tool]) -> dict[str, Any]:
    hints = {"readOnlyHint": tool.right == "read", "destructiveHint": tool.right == "delete", "openWorldHint": False}
    schema = tool.schema_of_arguments()
    return {"name": tool.name, "description": tool.description(), "inputSchema": schema, "annotations": hints}


class _Collected:
    """Collects the SDK's response as one value. Large texts are inserted at the end."""

    def __init__(self) -> None:
        self._kept: dict[str, str] = {}
        self._status = 500
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = b""

    def keep(self, text: str) -> str:
        """Return the text, or a placeholder if it is large."""
        if len(text) < _LARGE:
            return text
        word = uuid4().hex
        self._kept[word] = text
        return word

    async def send(self, message: Message) -> None:
        """Take an ASGI message of the response."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], message.get("headers", [])
        else:
            self._body += message.get("body", b"")

    async def response(self) -> Response:
        """The whole response."""
        for word in [*self._kept]:
            text = self._kept.pop(word)
            await requests.in_turn(len(text), partial(self._put, word, text))
        # The SDK refers to this object until the next garbage collection, so the body is removed from it now.
        body, self._body = self._body, b""
        response = Response(body, self._status)
        kept = [(name, value) for name, value in self._headers if name.lower() != b"content-length"]
        response.raw_headers = [*kept, (b"content-length", str(len(body)).encode())]
        return response

    def _put(self, word: str, text: str) -> None:
        before, _, after = self._body.partition(b'"%s"' % word.encode())
        self._body = b"".join((before, orjson.dumps(text), after))


# Tools


_WRONG = 5  # arguments that are named in one error
NOTES = "notes"
_LOOKED_AT = 100  # hits of all sessions in which those of one session are searched


class Tool(BaseModel):
    """A tool; an instance holds the arguments of one call."""

    model_config = ConfigDict(extra="forbid")

    name: ClassVar[str]
    right: ClassVar[Right]

    async def run(self, asked: Asked) -> Any:
        """Return the result that the agent reads as JSON. Raises StateError."""
        raise NotImplementedError

    @classmethod
    def description(cls) -> str:
        """The description of the tool for agents: its docstring."""
        return cleandoc(cls.__doc__ or "")

    @classmethod
    @cache
    def schema_of_arguments(cls) -> dict[str, Any]:
        """JSON schema of the arguments, made once; do not change it."""
        schema = cls.model_json_schema()
        return {name: part for name, part in schema.items() if name not in ("title", "description")}

    @classmethod
    def read(cls, given: dict[str, Any] | None) -> Tool:
        """Return the tool with these arguments. Raises InvalidValue that names wrong ones, for the model to correct."""
        try:
            return cls.model_validate(given or {})
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)[:_WRONG]
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))[:80]}: {each['msg'][:200]}" for each in found)
            raise InvalidValue(f"{cls.name}: {wrong}; it takes {', '.join(cls.model_fields)}") from error


class OfSession(Tool):
    """A tool for one session."""

    session: str | None = Field(
        None, description="Id of the session. It may be left out where the client names one for all calls."
    )

    def chosen(self, asked: Asked) -> AsyncSession:
        """The session. Raises AccessDenied for another tenant's, before a server is asked."""
        return asked.store.session(records.within(asked, self.session or default_session(asked)))

    async def written(self, asked: Asked, **changes: Any) -> Written:
        """Change the session, which must have begun."""
        session = self.chosen(asked)
        await records.comes_back(asked, context_of(session))
        return await session.write(**changes, expect_exists=True)


def default_session(asked: Asked) -> str:
    """The session that the header names. Raises InvalidValue if none is named."""
    named = requests.header(asked.request, SESSION)
    if not named:
        raise InvalidValue("name the session: give its id as `session`, or send the header X-Session-Id")
    return named


def allow(asked: Asked, right: Right) -> None:
    """Raise AccessDenied unless the caller has the right."""
    if right not in asked.caller.rights:
        raise AccessDenied(f"{asked.caller.actor!r:.80} has no right to {right}")


# State and messages


class GetState(OfSession):
    """Read the state of a session: its version, phase and fields, all of them or those named."""

    name: ClassVar[str] = "get_state"
    right: ClassVar[Right] = "read"
    keys: list[str] | None = Field(None, description="Names of the fields to read; all if left out.")

    async def run(self, asked: Asked) -> Any:
        """Version, phase and fields of one moment."""
        session = self.chosen(asked)
        context = context_of(session)
        context.allow("read", MOVES)

        async def read() -> CachedRecord:
            entry = records.there(await context.read(True), context)
            if self.keys is None:
                records.size_of(entry, asked.limits)
            return entry

        entry = await waited.with_room(read)
        phase = entry.fields.get(PHASE)
        fields = context.fields(entry)
        if self.keys is not None:
            fields = {key: fields[key] for key in self.keys if key in fields}
        return {
            "session": session.id,
            "version": entry.version,
            "phase": None if phase is None else phase.decode("utf-8", "surrogatepass"),
            **as_text.apart(fields),
        }


class SetState(OfSession):
    """Set fields of a session's state in one atomic commit; the other fields stay as they are.

    With expect_version nothing is written unless the session is still at that version; else read the state and decide
    again.
    """

    name: ClassVar[str] = "set_state"
    right: ClassVar[Right] = "write"
    fields: dict[str, Any] = Field(description="New values by the fields' names; any JSON values.")
    expect_version: Version | None = Field(None, description="Version of the session that this change is based on.")

    async def run(self, asked: Asked) -> Any:
        """The new version."""
        if not self.fields:
            raise InvalidValue("fields: name at least one field to set")
        written = await self.written(asked, set=self.fields, expect_version=self.expect_version)
        return {"version": written.version}


class AppendMessage(OfSession):
    """Add a message to the end of a session's conversation."""

    name: ClassVar[str] = "append_message"
    right: ClassVar[Right] = "write"
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="Author of the message.")
    content: str = Field(description="The text.")
    tool_call_id: str | None = Field(None, description="For the role tool: the call that this answers.")
    metadata: dict[str, Any] | None = Field(None, description="Data to keep with the message.")

    async def run(self, asked: Asked) -> Any:
        """The new version, and the message's number."""
        given = {"tool_call_id": self.tool_call_id, "metadata": self.metadata}
        message = {"role": self.role, "content": self.content} | {
            name: value for name, value in given.items() if value is not None
        }
        written = await self.written(asked, append=[message])
        return {"version": written.version, "number": written.first_message}


class PostMessage(OfSession):
    """Leave a message for the agent of a session: its next turn, or the one that runs, will read it from the inbox."""

    name: ClassVar[str] = "post_message"
    right: ClassVar[Right] = "write"
    content: str = Field(description="The text.")
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        "user", description="Author of the message."
    )
    request_id: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        None, description="A unique id: a repeated message with this id is accepted once."
    )
    handler: Handler | None = Field(
        None, description="Name of the handler that serves the message; a session keeps its first one."
    )

    async def run(self, asked: Asked) -> Any:
        """The message's number in the inbox."""
        message = {"role": self.role, "content": self.content}
        number = await output.posted(asked, self.chosen(asked), message, self.request_id, self.handler)
        return {"number": number}


class ReadMessages(OfSession):
    """Read messages of a session in order, each with its number: the last ones, or a page before or after a number.

    To read older messages, give the smallest number that you have as before; to read newer ones, give the greatest as
    after.
    """

    name: ClassVar[str] = "read_messages"
    right: ClassVar[Right] = "read"
    limit: Limit = Field(20, description="How many messages at most.")
    before: Version | None = Field(None, description="Only messages with a smaller number; returns the last of them.")
    after: Version | None = Field(None, description="Only messages with a greater number; returns the first of them.")

    async def run(self, asked: Asked) -> Any:
        """The messages, oldest first, and whether the page is full."""
        return await messages_of(asked, self)


async def messages_of(asked: Asked, wanted: ReadMessages) -> dict[str, Any]:
    """A page of messages. Raises NotFound and Deleted if there is no session."""
    session = wanted.chosen(asked)
    context = context_of(session)
    context.allow("read", MESSAGES)
    order: Literal["asc", "desc"] = "desc" if wanted.after is None else "asc"
    page = shown_messages.Page(limit=wanted.limit, before=wanted.before, after=wanted.after, order=order)
    shown, size = await records.read_shown(context, page, asked.limits, fresh=True)
    records.there(shown.entry, context)
    found = await requests.in_turn(size, shown.raw)
    return {
        "session": session.id,
        "version": shown.entry.version,
        "messages": found,
        "more": len(found) == wanted.limit,
    }


# Questions to people, and handlers that failed


class ListQuestions(Tool):
    """List the open questions that agents have asked people, those of the last changed sessions first."""

    name: ClassVar[str] = "list_questions"
    right: ClassVar[Right] = "read"
    user: str | None = Field(None, description="Only questions of this user's sessions.")
    limit: Limit = Field(50, description="How many sessions to look at, of those that wait for an answer.")
    after: str | None = Field(None, description="`next` of the previous page.")

    async def run(self, asked: Asked) -> Any:
        """A page of questions; times are in seconds since 1970. `next` is null if it is the last page."""
        given = schedules.Asking(user=self.user, limit=self.limit, after=self.after)
        found, following = await schedules.open_questions(asked, given)
        return {"questions": [{"session": row.pop("conversation"), **row} for row in found], "next": following}


class AnswerQuestion(OfSession):
    """Answer an open question of a session; its agent goes on with the answer. Only the first answer is accepted.

    Answer only with what a person has said.
    """

    name: ClassVar[str] = "answer_question"
    right: ClassVar[Right] = "write"
    value: Any = Field(description="The answer: any JSON value, usually a text.")
    question: QuestionName = Field("", description="`name` of the question.")
    id: Annotated[str, Field(max_length=100)] | None = Field(
        None, description="`id` of the question, so that a later question of its name is not answered."
    )

    async def run(self, asked: Asked) -> Any:
        """Whether the answer was accepted; false if somebody had answered already."""
        return {"accepted": await self.chosen(asked).answer(self.value, self.question, id=self.id)}


class RetrySession(OfSession):
    """Let the handler of a session be called again now, after it failed; list_sessions with stuck finds such sessions.

    Call it when the cause of the failure has gone.
    """

    name: ClassVar[str] = "retry_session"
    right: ClassVar[Right] = "write"

    async def run(self, asked: Asked) -> Any:
        """Whether it will be called; false if its last call did not fail."""
        return {"retried": await self.chosen(asked).retry()}


# Notes


class AddNote(OfSession):
    """Write a note to remember in this session; it replaces a note with the same key."""

    name: ClassVar[str] = "add_note"
    right: ClassVar[Right] = "write"
    note: Any = Field(description="The note: any JSON value.")
    key: str | None = Field(None, description="Name of the note, such as a topic; one is made if left out.")

    async def run(self, asked: Asked) -> Any:
        """The note's key, and the new version."""
        key = uuid4().hex if self.key is None else self.key
        await records.puts(asked, context_of(self.chosen(asked)), [name_of(NOTES, key)])
        written = await self.written(asked, items=[PutItem(collection=NOTES, key=key, value=self.note)])
        return {"key": key, "version": written.version}


class ListNotes(OfSession):
    """Read the notes of a session in the order of their keys."""

    name: ClassVar[str] = "list_notes"
    right: ClassVar[Right] = "read"
    prefix: str = Field("", description="Only notes whose key begins with this.")
    after: str | None = Field(None, description="`next` of the previous page.")
    limit: Limit = Field(100, description="How many notes at most.")

    async def run(self, asked: Asked) -> Any:
        """A page of notes; `next` is null if it is the last."""
        session = self.chosen(asked)
        await records.look(session, True, ITEMS)
        page = await session.items(NOTES).list(prefix=self.prefix, after=self.after, limit=self.limit)
        notes = [{"key": each.key, "note": each.value, "version": each.version} for each in page.items]
        return {"session": session.id, "notes": notes, "next": page.next}


class DeleteNote(OfSession):
    """Delete a note of a session."""

    name: ClassVar[str] = "delete_note"
    right: ClassVar[Right] = "delete"
    key: str = Field(description="The note's key.")

    async def run(self, asked: Asked) -> Any:
        """The new version."""
        gone = DeleteItem(collection=NOTES, key=self.key, if_present=True)
        return {"version": (await self.written(asked, items=[gone])).version}


# Sessions: found, begun, and taken back


class Search(Tool):
    """Find messages, state and notes by their words, in all sessions or one; the best hits first."""

    name: ClassVar[str] = "search"
    right: ClassVar[Right] = "read"
    query: str = Field(description="Words to look for, in any order.")
    session: str | None = Field(None, description="Only in the session of this id.")
    limit: Annotated[int, Field(ge=1, le=100)] = Field(10, description="How many hits at most.")

    async def run(self, asked: Asked) -> Any:
        """The hits."""
        prefix = asked.caller.prefix if self.session is None else records.within(asked, self.session)
        # Ids of other sessions may begin with the same text, and have better hits.
        limit = self.limit if self.session is None else _LOOKED_AT
        async with searching(asked.caller.party):
            found = await asked.store.search(self.query, scope="session", prefix=prefix, limit=limit)
        own = [each for each in found if self.session in (None, each.id)]
        return {"hits": [asdict(each) for each in own[: self.limit]]}


class History(OfSession):
    """Read who changed what in a session, and when: one entry for each version, the oldest first."""

    name: ClassVar[str] = "history"
    right: ClassVar[Right] = "read"
    after: Version = Field(0, description="Only changes after this version.")
    limit: Limit = Field(50, description="How many changes at most.")

    async def run(self, asked: Asked) -> Any:
        """The changes; times are in seconds since 1970."""
        context = context_of(self.chosen(asked))
        changes = await records.read_history(context, asked.limits, after=self.after, limit=self.limit)
        if not changes and not self.after:
            raise NotFound("there is no such session, or its history was purged")
        return {
            "changes": [
                {
                    "version": each.version,
                    "time": each.time,
                    "actor": each.actor,
                    "kind": each.kind,
                    "set": each.set,
                    "deleted": each.deleted,
                    "appended": [message.to_dict() for message in each.appended],
                    "phase": each.phase,
                    "label": each.label,
                    "items": [
                        {"collection": collection, "key": key, "value": None if item is None else item.value}
                        for (collection, key), item in each.items.items()
                    ],
                }
                for each in changes
            ]
        }


class ListSessions(Tool):
    """List sessions: the last changed first, or if your ids begin with a prefix, in the order of their ids."""

    name: ClassVar[str] = "list_sessions"
    right: ClassVar[Right] = "read"
    prefix: str | None = Field(None, description="Only sessions whose id begins with this.")
    user: str | None = Field(None, description="Only sessions of this user.")
    stuck: bool = Field(
        False, description="Only sessions whose handler failed too often to be called again; `schedule` says how."
    )
    limit: Limit = Field(50, description="How many sessions at most.")
    after: str | None = Field(None, description="`next` of the previous page.")

    async def run(self, asked: Asked) -> Any:
        """A page of sessions; `next` is null if it is the last."""
        prefix = records.narrowed(asked, self.prefix)
        if self.user is not None:
            records.within(asked, self.user)
        rows = await asked.store.sessions(
            user=self.user, prefix=prefix, limit=self.limit, after=self.after, stuck=self.stuck, fresh=self.stuck
        )
        shown = [{"session": each.id, **asdict(each)} for each in rows]
        for row in shown:
            del row["id"], row["cursor"]
        if self.stuck:
            still = await schedules.stuck(asked, [each.id for each in rows])
            shown = [row | {"schedule": each} for row, each in zip(shown, still, strict=True) if each is not None]
        return {"sessions": shown, "next": rows[-1].cursor if len(rows) == self.limit else None}


class CreateSession(Tool):
    """Begin a session; the other tools take its id as session."""

    name: ClassVar[str] = "create_session"
    right: ClassVar[Right] = "write"
    session: str | None = Field(None, description="Id of the new session; one is made if left out.")
    user: str | None = Field(None, description="Id of the user whose session it is.")
    fields: dict[str, Any] = Field(default_factory=dict, description="State to begin with, by the fields' names.")

    async def run(self, asked: Asked) -> Any:
        """The session's id and version."""
        user = records.owner(asked, self.user)
        session = asked.store.session(_new(asked, self.session), user=user)
        await asked.quota.ask(asked.store, asked.caller, "session")
        return {"session": session.id, "version": await session.create(self.fields)}


class ForkSession(OfSession):
    """Begin another session from the state and messages of this one, as it is or as it was at a version."""

    name: ClassVar[str] = "fork_session"
    right: ClassVar[Right] = "write"
    new_session: str | None = Field(None, description="Id of the new session; one is made if left out.")
    version: Version | None = Field(None, description="Version of this session to begin from; the last if left out.")

    async def run(self, asked: Asked) -> Any:
        """The new session's id and version."""
        id, session = _new(asked, self.new_session), self.chosen(asked)
        await asked.quota.ask(asked.store, asked.caller, "session")
        async with copying(asked.caller.party):
            return {"session": id, "version": await session.fork(id, version=self.version)}


class Rollback(OfSession):
    """Restore an earlier state of a session: one step back, or what one of the arguments names. No history is lost."""

    name: ClassVar[str] = "rollback"
    right: ClassVar[Right] = "write"
    steps: Version | None = Field(None, description="How many versions to go back.")
    label: Label | None = Field(None, description="Label of the checkpoint to go back to.")
    version: Version | None = Field(None, description="The version to go back to, from the history.")
    checkpoints: Version | None = Field(None, description="How many checkpoints to go back; 1 is the last.")

    async def run(self, asked: Asked) -> Any:
        """The new version."""
        session = self.chosen(asked)
        await records.comes_back(asked, context_of(session), revive=True)
        async with copying(asked.caller.party):
            return {"version": await session.rollback(**self.model_dump(exclude={"session"}))}


def _new(asked: Asked, id: str | None) -> str:
    if id is None:
        return asked.caller.prefix + secrets.token_hex(16)
    return records.within(asked, records.checked(id))


TOOLS: dict[str, type[Tool]] = {
    each.name: each
    for each in (
        GetState,
        SetState,
        AppendMessage,
        PostMessage,
        ReadMessages,
        ListQuestions,
        AnswerQuestion,
        RetrySession,
        AddNote,
        ListNotes,
        DeleteNote,
        Search,
        History,
        ListSessions,
        CreateSession,
        ForkSession,
        Rollback,
    )
}
