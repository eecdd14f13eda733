"""The MCP SDK's own client, of version 1 or 2, with the names of version 2."""

from __future__ import annotations

import json
import re
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import mcp

__all__ = ["MODES", "Client", "MCPError", "http_client"]

if hasattr(mcp, "MCPError"):
    import httpx2 as http_client
    from mcp import MCPError
    from mcp.client.client import Client

    MODES: tuple[str, ...] = ("legacy", "auto")  # the handshake of 2025, and each request for itself
else:
    import httpx as http_client
    from mcp import McpError as MCPError

    MODES = ("legacy",)

    class Client:  # type: ignore[no-redef]
        """A session of version 1 that has begun."""

        def __init__(self, streams: Any, mode: str) -> None:
            self._streams = streams
            self._stack = AsyncExitStack()

        async def __aenter__(self) -> Client:
            read, write, _ = await self._stack.enter_async_context(self._streams)
            self._session = await self._stack.enter_async_context(mcp.ClientSession(read, write))
            await self._session.initialize()
            return self

        async def __aexit__(self, *raised: Any) -> None:
            await self._stack.aclose()

        def __getattr__(self, name: str) -> Any:
            async def called(*given: Any) -> Any:
                answer = await getattr(self._session, name)(*given)
                return json.loads(answer.model_dump_json(), object_hook=_named)

            return called


def _named(found: dict[str, Any]) -> Any:
    """An object by the names of version 2. Schemas, and what holds one, have names of their own besides."""
    named = {re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name): each for name, each in found.items()}
    return _Both(named)


class _Both(SimpleNamespace):
    """An object that is read by attributes, or as a mapping, as schemas are."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__(**found)

    def __getitem__(self, name: str) -> Any:
        return self.__dict__[name]

    def get(self, name: str) -> Any:
        return self.__dict__.get(name)

    def items(self) -> Any:
        return self.__dict__.items()
