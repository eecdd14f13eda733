"""The server of the MCP SDK, version 1 or 2. Law: only this module knows how the two versions differ.

Some frameworks require version 1 and others version 2, so both must work beside them. Handlers get and return what the
protocol defines, under its own names (`inputSchema`), which the models of both versions read.

Design: section 25.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import mcp
from mcp import types
from mcp.server.lowlevel import Server
from starlette.requests import Request

Handler = Callable[[Request, Any], Awaitable[dict[str, Any]]]  # takes the HTTP request and the parameters
INVALID_PARAMS, INTERNAL_ERROR = types.INVALID_PARAMS, types.INTERNAL_ERROR
_VERSION_1: Any = getattr(mcp, "McpError", None)  # version 2 calls it MCPError


def refused(code: int, message: str) -> Exception:
    """Return the error that a handler raises to refuse a request."""
    if _VERSION_1 is None:
        return mcp.MCPError(code=code, message=message)
    error: Exception = _VERSION_1(types.ErrorData(code=code, message=message))
    return error


def server(
    name: str,
    instructions: str,
    handlers: Mapping[str, Handler],
    schema_of: Callable[[str], dict[str, Any] | None],
) -> Server[Any]:
    """Return a server with handlers by name (`list_tools`), and the schemas of its tools' arguments."""
    if _VERSION_1 is None:
        adapted: dict[str, Any] = {f"on_{each}": _by_context(each, handler) for each, handler in handlers.items()}
        return Server(name, instructions=instructions, get_tool_input_schema=schema_of, **adapted)
    made: Any = Server(name, instructions=instructions)
    for each, handler in handlers.items():
        made.request_handlers[_model(each, "Request")] = _by_request(made, each, handler)
    found: Server[Any] = made
    return found


def _model(name: str, kind: str) -> Any:
    """Return a model of the SDK: ListToolsRequest for `list_tools`."""
    return getattr(types, name.title().replace("_", "") + kind)


def _by_context(name: str, handler: Handler) -> Callable[[Any, Any], Awaitable[Any]]:
    """Adapt a handler to version 2."""
    result = _model(name, "Result")

    async def handled(context: Any, params: Any) -> Any:
        return result.model_validate(await handler(context.request, params))

    return handled


def _by_request(made: Any, name: str, handler: Handler) -> Callable[[Any], Awaitable[Any]]:
    """Adapt a handler to version 1."""
    result, wrapped = _model(name, "Result"), _model("server", "Result")

    async def handled(request: Any) -> Any:
        return wrapped(result.model_validate(await handler(made.request_context.request, request.params)))

    return handled
