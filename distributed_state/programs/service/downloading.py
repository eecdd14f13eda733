"""A record as a file that is downloaded. Law: a client that reads slowly costs a page of it, and no more.

Design: section 28.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from distributed_state.errors import StateError
from distributed_state.programs.service.budget import Budget, Taken
from distributed_state.programs.service.connections import CONNECTION
from distributed_state.programs.service.fairness import copying
from distributed_state.programs.service.limits import Limits
from distributed_state.store.export import PAGE, Export

A_PAGE = 4 * PAGE  # bytes that some lines take while they are made: stored, unpacked, written, encoded
log = logging.getLogger(__name__)


class Download(Response):
    """Writes the lines of an export, some at a time. An error behind the first of them ends the connection."""

    media_type = "application/jsonl"

    def __init__(
        self,
        lines: list[str],
        export: Export,
        name: str,
        limits: Limits,
        budget: Budget,
        taken: Taken,
        count: Callable[[int], None],
    ) -> None:
        # `lines` are the first ones; `taken` holds their bytes. `count` is called with the bytes that are sent.
        title = quote(name[:200], safe="", errors="replace")
        named = f"attachment; filename=\"export.jsonl\"; filename*=UTF-8''{title}.jsonl"
        super().__init__(headers={"Content-Disposition": named, "Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._lines = lines
        self._export = export
        self._limits = limits
        self._budget = budget
        self._taken = taken
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write all lines, or as far as the client reads them in time."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            while self._lines:
                block = "".join(f"{line}\n" for line in self._lines).encode()
                self._lines = []
                self._taken.become(len(block))
                self._count(len(block))
                async with asyncio.timeout(self._limits.slow):
                    await send({"type": "http.response.body", "body": block, "more_body": True})
                del block
                self._taken.give_back()
                self._taken = await self._budget.take(self._taken.party, A_PAGE)
                async with copying(self._taken.party):
                    self._lines = await self._export.following()
        except (TimeoutError, StateError, HTTPException) as error:
            slow = f"the client read nothing for {self._limits.slow:g} s"
            log.warning("an export was cut off: %s", slow if isinstance(error, TimeoutError) else error)
            connection = scope.get("state", {}).get(CONNECTION)
            if connection is None:
                raise
            connection.abort()  # an answer that ends as it should would be taken for a whole file
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):  # or uvicorn would log the response as incomplete
                    await receive()
            return
        finally:
            self._taken.give_back()
        await send({"type": "http.response.body", "body": b""})
