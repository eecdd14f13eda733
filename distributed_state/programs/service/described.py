"""The description as it is sent. Law: it is made and compressed once, however often anybody asks for it."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from distributed_state.programs.service.answers import encode
from distributed_state.programs.service.docs_page import HEADERS, page
from distributed_state.programs.service.openapi import description
from distributed_state.programs.service.routes import Operation


@dataclass(frozen=True, slots=True)
class _Made:
    data: bytes
    compressed: bytes

    def answer(self, request: Request, media: str, headers: dict[str, str]) -> Response:
        """The one that the client can read."""
        headers = {"Vary": "Accept-Encoding", **headers}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.compressed, headers={**headers, "Content-Encoding": "gzip"}, media_type=media)
        return Response(self.data, headers=headers, media_type=media)


class Described:
    """The description of these operations, for programs and for people."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations
        self._made: tuple[_Made, _Made] | None = None
        self._making = asyncio.Lock()

    async def openapi(self, request: Request) -> Response:
        """The description as OpenAPI."""
        return (await self._pages())[0].answer(request, "application/json", {})

    async def docs(self, request: Request) -> Response:
        """The page to read."""
        return (await self._pages())[1].answer(request, "text/html", HEADERS)

    async def _pages(self) -> tuple[_Made, _Made]:
        async with self._making:
            if self._made is None:
                # A tenth of a second, in which requests would wait.
                self._made = await asyncio.to_thread(self._make)
            return self._made

    def _make(self) -> tuple[_Made, _Made]:
        found = description(self._operations)
        parts = [encode(found), page(found).encode()]
        one, other = (_Made(each, gzip.compress(each, 6)) for each in parts)
        return one, other
