"""One connection of the service, on a transport that is none: what it counts, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response
from uvicorn.server import ServerState

from distributed_state.programs.service.connections import Connection as Protocol
from distributed_state.programs.service.connections import Connections
from distributed_state.programs.service.limits import Limits

pytestmark = pytest.mark.unit

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"


class Transport(asyncio.Transport):
    """Takes all that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.said = b""
        self._closing = False

    def write(self, data: Any) -> None:
        self.said += bytes(data)

    def close(self) -> None:
        self._closing = True

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def connected(limits: Limits | None = None) -> tuple[Protocol, Connections, Transport]:
    connections, transport = Connections(limits or Limits(connections=10)), Transport()
    config = uvicorn.Config(Response("ok"), log_config=None, lifespan="off", ws="none")
    found = Protocol(connections, config=config, server_state=ServerState(), app_state={})
    found.connection_made(transport)
    return found, connections, transport


async def answered(transport: Transport) -> None:
    for _ in range(20):
        await asyncio.sleep(0)
    assert transport.said.endswith(b"ok")


async def test_a_connection_that_is_lost_leaves_nothing_to_the_garbage_collector() -> None:
    for request in (b"", GET[:10], GET, POST):
        protocol, connections, transport = connected()
        if request:
            protocol.data_received(request)
        if request in (GET, POST):
            await answered(transport)
        gc.disable()
        try:
            seen = weakref.ref(protocol)
            transport.close()
            protocol.connection_lost(None)
            del protocol
            assert seen() is None, request
        finally:
            gc.enable()
        assert (len(connections), connections.in_flight) == (0, 0)


async def test_what_a_request_holds_after_its_client_left_is_not_counted() -> None:
    """It would be counted for ever, and there would be no room for others."""
    protocol, connections, transport = connected()
    protocol.data_received(POST)
    protocol.hold(1000)
    assert connections.in_flight == 1001
    transport.close()
    protocol.connection_lost(None)
    protocol.hold(1000)
    assert (protocol.held, connections.in_flight) == (0, 0)
