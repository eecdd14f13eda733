"""What it takes to find out who sent a request, and to ask the policy: `python -m deploy.load.checks`.

Law: the token is known, as it is for all its requests but the first; no server is asked.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request

from distributed_state import AsyncStateStore
from distributed_state.programs.service import Access, callers_policy
from distributed_state.programs.service.authentication import Authentication, Caller, serving
from distributed_state.records.context import context_of
from distributed_state.store.lifecycle import lifecycle_of
from distributed_state.values import access_tokens

_ROUNDS, _TIMES = 20, 5_000


async def _measure(what: str, work: Callable[[], Awaitable[Any]]) -> None:
    found = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(_TIMES):
            await work()
        found.append((time.perf_counter() - began) / _TIMES * 1e6)
    print(f"{what}: {min(found):.1f} us at best, {statistics.median(found):.1f} us in the middle")


async def main() -> None:
    """Print the figures of docs/security.md."""
    id, text = access_tokens.make()

    def request() -> Request:
        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {text}".encode())]
        return Request({"type": "http", "headers": headers, "client": ("127.0.0.1", 1)})

    async with AsyncStateStore.open(archive="memory", access=callers_policy()) as store:
        lifecycle_of(store).tiers().cold.access_tokens.add(
            id, access_tokens.digest(text), prefix="acme:", rights=access_tokens.RIGHTS, actor="web", seconds=None
        )
        unchecked, checked = Authentication(Access(insecure=True)), Authentication(Access(tokens=True))
        checked.begin(store)
        await _measure("a request of anybody", lambda: unchecked.caller(request()))
        await _measure("a request with a token", lambda: checked.caller(request()))
        record = context_of(store.session("acme:c"))

        async def ask() -> None:
            record.allow("write", "n")

        with serving(Caller("web", "acme:")):
            await _measure("a question of the policy", ask)
        await checked.close()


if __name__ == "__main__":
    asyncio.run(main())
