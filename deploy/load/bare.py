"""Workers as written with Starlette and redis-py alone. Law: they send what ours send, and keep no promise.

The server is ours, with its limits, and a request needs the generator's token, where it has one.

No lease decides who serves, nothing is repeated once only, nothing reaches SQL, and nobody is told of a change.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from hmac import compare_digest
from http.client import HTTPConnection, HTTPException
from itertools import count
from uuid import uuid4

import orjson
import redis.asyncio
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deploy.load.baseline import Commands, Trip, rounds_of
from deploy.load.client import headers
from distributed_state.programs.servers import free_port
from distributed_state.programs.service import Limits
from distributed_state.programs.service.connections import Connections
from distributed_state.programs.service.running import config_of

_START = 30.0


class Worker:
    """Answers as the service does: what a conversation's creation and its turns ask of Redis, and no more."""

    def __init__(self, url: str, commands: Commands) -> None:
        pool = redis.asyncio.BlockingConnectionPool.from_url(url, max_connections=64, timeout=None)
        self._client = redis.asyncio.Redis.from_pool(pool)
        self._commands = commands
        self._shas = dict[str, str]()
        self._versions = count(2)
        given = headers().get("Authorization")
        self._token = given and _digest(given)
        routes = [Route("/v1/conversations", self._create, methods=["POST"])]
        routes += [
            Route("/v1/conversations/{id}/turns", self._turn, methods=["POST"]),
            Route("/healthz", self._healthz),
        ]
        self.app = Starlette(routes=routes)

    async def begin(self) -> None:
        """Load the scripts."""
        for trip in (*self._commands.create, *self._commands.turn):
            self._shas[trip.script] = await self._client.script_load(trip.script)

    async def _create(self, request: Request) -> Response:
        if not self._recognizes(request):
            return Response(status_code=401)
        json.loads(await request.body())
        id = uuid4().hex
        await self._send(id, self._commands.create)
        return Response(orjson.dumps({"id": id, "version": 1}), 201, media_type="application/json")

    async def _turn(self, request: Request) -> Response:
        if not self._recognizes(request):
            return Response(status_code=401)
        json.loads(await request.body())
        await self._send(request.path_params["id"], self._commands.turn)
        answer = {"version": next(self._versions), "repeated": False, "outcome": None}
        return Response(orjson.dumps(answer), media_type="application/json")

    def _recognizes(self, request: Request) -> bool:
        return not self._token or compare_digest(self._token, _digest(request.headers.get("authorization", "")))

    async def _send(self, id: str, trips: list[Trip]) -> None:
        for together in rounds_of(trips):
            async with self._client.pipeline(transaction=False) as pipe:
                for trip in together:
                    pipe.evalsha(self._shas[trip.script], trip.keys, *trip.names(id), *trip.words)
                await pipe.execute()

    async def _healthz(self, request: Request) -> Response:
        return Response(b"")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _serve(url: str, commands: Commands, port: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the parent, who then ends us

    async def serve() -> None:
        worker = Worker(url, commands)
        await worker.begin()
        gc.collect()
        gc.freeze()
        connections = Connections(Limits())
        config = config_of(worker.app, connections)
        config.port = port
        await asyncio.gather(uvicorn.Server(config).serve(), connections.watch())

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


@contextmanager
def bare_workers(url: str, number: int, commands: Commands) -> Iterator[Sequence[str]]:
    """So many worker processes; their URLs. Raises RuntimeError at the end if one of them died on the way."""
    context = multiprocessing.get_context("spawn")
    ports = [free_port() for _ in range(number)]
    processes = [context.Process(target=_serve, args=(url, commands, port), daemon=True) for port in ports]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + _START
        for port in ports:
            while not _answers(port):
                if time.monotonic() > deadline or not all(process.is_alive() for process in processes):
                    raise RuntimeError("a worker of bare redis-py does not get ready")
                time.sleep(0.05)
        yield [f"http://127.0.0.1:{port}" for port in ports]
        if not all(process.is_alive() for process in processes):
            raise RuntimeError("a worker of bare redis-py died: what the others carried is no comparison")
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answers(port: int) -> bool:
    with suppress(OSError, HTTPException), closing(HTTPConnection("127.0.0.1", port, timeout=2)) as connection:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    return False
