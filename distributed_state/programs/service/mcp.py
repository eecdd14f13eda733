"""The Model Context Protocol, as one more operation of the service. Law: nothing is kept between two requests.

Any worker answers any request, whichever answered the one before, and what an agent begins with one worker it goes
on with at another. What it asks for is done as its caller, who was recognized before the protocol is looked at.

It needs the extra `mcp`.

Design: section 25. Source: the specification at modelcontextprotocol.io, "Streamable HTTP".
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any
from uuid import uuid4

import orjson
from mcp import types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from distributed_state.errors import InvalidValue, StateError
from distributed_state.programs.service import mcp_tools, requests, scheduling
from distributed_state.programs.service.answers import encode, refusal
from distributed_state.programs.service.mcp_tools import Tool, allow
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.routes import PREFIX, SESSION, Asked, Operation
from distributed_state.values import path_names

PATH = f"{PREFIX}/mcp"
TOOLS: dict[str, type[Tool]] = {
    each.name: each
    for each in (
        mcp_tools.GetState,
        mcp_tools.SetState,
        mcp_tools.AppendMessage,
        mcp_tools.ReadMessages,
        mcp_tools.AddNote,
        mcp_tools.ListNotes,
        mcp_tools.DeleteNote,
        mcp_tools.Search,
        mcp_tools.History,
        mcp_tools.ListSessions,
        mcp_tools.CreateSession,
        mcp_tools.ForkSession,
        mcp_tools.Rollback,
    )
}
RESOURCES = {"state": "State of a session: version, phase, fields.", "messages": "The last messages of a session."}
_JSON = "application/json"
_ASKED = "distributed_state.asked"  # in the scope of a request, for the handlers below
_COLLECTED = "distributed_state.collected"  # likewise
_LARGE = 64 * 1024  # characters of a text that the SDK, which copies all that it is given some ten times, does not get
_OF_KEYS = re.compile(r"[;,] [^;,]*Idempotency-Key")
_COPIES = 5  # of an answer: as it is stored, as values, as JSON, and as JSON within JSON
_LAST = 100  # messages of a resource
_INSTRUCTIONS = """\
Durable state of agents: sessions with fields, messages and notes, shared by all who work on them.
Read the state before you change it, and give its version as expect_version. Keep in notes what must be remembered."""
Context = ServerRequestContext[Any, Any]


def operation() -> Operation:
    """The endpoint, as the service's table has it. Each tool asks for a right of its own."""
    return Operation("POST", PATH, None, Endpoint().serve, copies=_COPIES, kind=kind_of)


def kind_of(request: Request) -> tuple[str, ...]:
    """Name the tool or resource and the session of a request: answers of one kind are of about the same size."""
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
        self._server: Server[Any] = Server(
            "distributed-state",
            instructions=_INSTRUCTIONS,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
            get_tool_input_schema=lambda name: TOOLS[name].schema_of_arguments() if name in TOOLS else None,
        )

    async def serve(self, asked: Asked) -> Response:
        """Answer one request of the protocol, whole: as JSON, never as a stream."""
        # One for each request, and gone with it, cancelled if that is: whatever it would keep, another worker lacks.
        manager = StreamableHTTPSessionManager(
            self._server, json_response=True, stateless=True, max_request_body_size=asked.limits.body
        )
        collected = _Collected()
        scope = dict(asked.request.scope) | {_ASKED: asked, _COLLECTED: collected}
        async with manager.run():
            await manager.handle_request(scope, _receive(asked.request), collected.send)
        return await collected.response()

    # Tools

    async def _list_tools(self, context: Context, _: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        """Those that the caller may call."""
        rights = _asked(context).caller.rights
        return types.ListToolsResult(tools=[_shown(each) for each in TOOLS.values() if each.right in rights])

    async def _call_tool(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in TOOLS:
            raise MCPError(code=types.INVALID_PARAMS, message=f"there is no tool {params.name!r:.80}")
        try:
            text = await _run(_asked(context), TOOLS[params.name], params.arguments)
        except Exception as error:  # noqa: BLE001 - the agent reads what may be said of it, the log has the rest
            return types.CallToolResult(content=[types.TextContent(text=_problem(error))], is_error=True)
        return types.CallToolResult(content=[types.TextContent(text=_collected(context).keep(text))])

    # Resources

    async def _list_resources(
        self, context: Context, _: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        """Those of the session that the client names for all calls; of others the templates tell."""
        asked = _asked(context)
        named = requests.header(asked.request, SESSION)
        if not named or not named.startswith(asked.caller.prefix) or "read" not in asked.caller.rights:
            return types.ListResourcesResult(resources=[])
        listed = [
            types.Resource(uri=f"{kind}://{path_names.quoted(named)}", name=kind, description=text, mime_type=_JSON)
            for kind, text in RESOURCES.items()
        ]
        return types.ListResourcesResult(resources=listed)

    async def _list_templates(
        self, context: Context, _: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        listed = [
            types.ResourceTemplate(uri_template=f"{kind}://{{session}}", name=kind, description=text, mime_type=_JSON)
            for kind, text in RESOURCES.items()
        ]
        return types.ListResourceTemplatesResult(resource_templates=listed)

    async def _read_resource(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        kind, _, named = params.uri.partition("://")
        try:
            if kind not in RESOURCES or not named:
                raise InvalidValue(f"a resource is state://SESSION or messages://SESSION, not {params.uri!r:.80}")
            asked = _asked(context)
            given = {"session": records.within(asked, _name(named))}
            tool: type[Tool] = mcp_tools.GetState
            if kind == "messages":
                tool, given = mcp_tools.ReadMessages, given | {"limit": str(_LAST)}
            text = await _run(asked, tool, given)
        except Exception as error:  # noqa: BLE001 - likewise
            code = types.INVALID_PARAMS if isinstance(error, StateError) else types.INTERNAL_ERROR
            raise MCPError(code=code, message=_problem(error)) from None
        return types.ReadResourceResult(
            contents=[types.TextResourceContents(uri=params.uri, text=_collected(context).keep(text), mime_type=_JSON)]
        )


def _name(quoted: str) -> str:
    try:
        return path_names.read(quoted.encode("utf-8", "surrogatepass"))
    except UnicodeDecodeError as error:
        raise InvalidValue("the session is not UTF-8 where its % are decoded") from error


async def _run(asked: Asked, tool: type[Tool], given: dict[str, Any] | None) -> str:
    """What the tool comes to, as JSON. Raises StateError."""
    allow(asked, tool.right)
    requests.check_members(given or {}, asked.limits)
    text = encode(await tool.read(given).run(asked))
    if len(text) > asked.limits.answer:
        raise InvalidValue(f"the answer has {len(text)} bytes, more than {asked.limits.answer}: ask for less")
    return text.decode()


def _receive(request: Request) -> Receive:
    """What the SDK reads the body with, which is here already, and of a shape that may be read."""

    async def whole() -> Message:
        return {"type": "http.request", "body": request.state.body, "more_body": False}

    return whole


def _asked(context: Context) -> Asked:
    asked = context.request.scope[_ASKED] if context.request is not None else None
    assert isinstance(asked, Asked)
    return asked


def _collected(context: Context) -> _Collected:
    assert context.request is not None
    found = context.request.scope[_COLLECTED]
    assert isinstance(found, _Collected)
    return found


def _problem(error: Exception) -> str:
    """What an agent reads of an error: what a client of the service's other operations does."""
    problem = orjson.loads(refusal(error).body)
    # Nothing here has such a key: the advice to repeat a write under its own is left out.
    text = _OF_KEYS.split(problem["detail"])[0]
    return f"{problem['error']}: {text}"


def _shown(tool: type[Tool]) -> types.Tool:
    hints = types.ToolAnnotations(
        read_only_hint=tool.right == "read", destructive_hint=tool.right == "delete", open_world_hint=False
    )
    return types.Tool(
        name=tool.name, description=tool.description(), input_schema=tool.schema_of_arguments(), annotations=hints
    )


class _Collected:
    """A response that is sent to it, as one value. Large texts are put into it in the end."""

    def __init__(self) -> None:
        self._kept: dict[str, str] = {}
        self._status = 500
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = b""

    def keep(self, text: str) -> str:
        """The text, or a word that stands for it if it is large."""
        if len(text) < _LARGE:
            return text
        word = uuid4().hex
        self._kept[word] = text
        return word

    async def send(self, message: Message) -> None:
        """Take a part of the response, as ASGI has it."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], message.get("headers", [])
        else:
            self._body += message.get("body", b"")

    async def response(self) -> Response:
        """All of it."""
        for word in [*self._kept]:
            text = self._kept.pop(word)
            await scheduling.in_turn(len(text), partial(self._put, word, text))
        # The SDK keeps references to this object until the next garbage collection: the body must not wait for that.
        body, self._body = self._body, b""
        response = Response(body, self._status)
        kept = [(name, value) for name, value in self._headers if name.lower() != b"content-length"]
        response.raw_headers = [*kept, (b"content-length", str(len(body)).encode())]
        return response

    def _put(self, word: str, text: str) -> None:
        before, _, after = self._body.partition(b'"%s"' % word.encode())
        self._body = b"".join((before, orjson.dumps(text), after))
