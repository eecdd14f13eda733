"""A service in a thread of the test, on real servers, asked over a socket. Law: it is gone with its `with` block."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from distributed_state import AsyncStateStore
from distributed_state.programs.service import Limits, Service
from distributed_state.programs.service.connections import Connections
from distributed_state.programs.service.running import Server, config_of

JSON = {"Content-Type": "application/json"}


@contextmanager
def served(
    url: str | None, archive: str, namespace: str, *, service: Service | None = None, **settings: Any
) -> Iterator[httpx.Client]:
    """A client of a service on this store."""
    service = service or Service(Limits(busy=0.3))
    # The protocol is named: without it asyncio sets no TCP_NODELAY, and an answer with a body takes 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 64 * 1024)  # as `running` has it
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = Server(config_of(service.app, Connections(service.limits, service.budget)))
    failed: list[BaseException] = []

    async def run() -> None:
        async with AsyncStateStore.open(url, archive=archive, namespace=namespace, **settings) as store:
            service.begin(store)
            await server.serve(sockets=[listener])
            await service.drain()
            await service.close()

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001 - raised in the test below
            failed.append(error)

    thread = threading.Thread(target=main)
    thread.start()
    host, port = listener.getsockname()
    try:
        with httpx.Client(base_url=f"http://{host}:{port}", timeout=30, headers=JSON) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not failed, failed
        assert not thread.is_alive()
