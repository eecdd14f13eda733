"""A dependency of FastAPI with `yield` is a generator that is kept: what it holds lasts as long as its request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any

import httpx
import pytest
import uvicorn
from below import until
from fastapi import Depends, FastAPI
from fastapi.responses import StreamingResponse

from distributed_state import AsyncStateStore, LockTimeout

TTL = 0.3


class Program:
    """A program whose requests hold the conversation "s" by a dependency; they last until `leave` is set."""

    def __init__(self, store: AsyncStateStore, dependency: Any) -> None:
        self.store = store
        self.entered, self.leave = asyncio.Event(), asyncio.Event()
        self.app = FastAPI()
        given = Depends(dependency(store))

        @self.app.get("/answer")
        async def answer(held: Any = given) -> dict[str, int]:
            self.entered.set()
            await self.leave.wait()
            held["n"] = 1
            return {}

        @self.app.get("/fails")
        async def fails(held: Any = given) -> None:
            raise RuntimeError("the model is away")

        @self.app.get("/stream")
        async def stream(held: Any = given) -> StreamingResponse:
            return StreamingResponse(self.words())

    async def words(self) -> AsyncIterator[bytes]:
        self.entered.set()
        while True:
            yield b"word "
            await asyncio.sleep(0.02)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Serve it on a real socket."""
        server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_level="critical"))
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                yield client
        finally:
            self.leave.set()
            server.should_exit = True
            await serving

    async def free(self) -> bool:
        """Whether nobody holds it."""

        async def take() -> bool:
            try:
                async with self.store.session("s").lock(wait=0):
                    return True
            except LockTimeout:
                return False

        return await asyncio.create_task(take(), context=Context())

    async def held_for_long(self) -> None:
        """Longer than a lease lasts that nobody renews."""
        for _ in range(10):
            await asyncio.sleep(TTL / 3)
            assert not await self.free()


def by_a_task(store: AsyncStateStore) -> Any:
    async def held() -> AsyncIterator[Any]:
        async with store.session("s").turn(ttl=TTL) as turn:
            yield turn

    return held


def by_threads(store: AsyncStateStore) -> Any:
    """Entered and left in threads of a pool, each in a context of its own."""

    def held() -> Iterator[Any]:
        with store.blocking.session("s").turn(ttl=TTL) as turn:
            yield turn

    return held


BOTH = pytest.mark.parametrize("dependency", [by_a_task, by_threads])


@BOTH
async def test_a_turn_of_a_dependency_lasts_as_long_as_its_request_and_is_written(dependency: Any) -> None:
    async with AsyncStateStore.open(archive="memory") as store:
        program = Program(store, dependency)
        async with program.client() as client:
            asked = asyncio.create_task(client.get("/answer"))
            await program.entered.wait()
            await program.held_for_long()
            program.leave.set()
            assert (await asked).status_code == 200
            await until(program.free)
            assert await store.session("s").get("n") == 1


@BOTH
async def test_it_ends_when_its_client_goes_away(dependency: Any) -> None:
    async with AsyncStateStore.open(archive="memory") as store:
        program = Program(store, dependency)
        async with program.client() as client:
            async with client.stream("GET", "/stream") as response:
                words = response.aiter_bytes()  # kept: its end is that of the stream
                await anext(words)
                await program.held_for_long()
            await until(program.free)


@BOTH
async def test_it_ends_when_its_request_fails(dependency: Any) -> None:
    async with AsyncStateStore.open(archive="memory") as store:
        program = Program(store, dependency)
        async with program.client() as client:
            assert (await client.get("/fails")).status_code == 500
            await until(program.free)
            assert not await store.session("s").exists()
