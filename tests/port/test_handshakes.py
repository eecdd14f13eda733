"""A server that takes connections and says nothing, as one that is frozen does, until another one has its keys."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from distributed_state.errors import WarmUnavailable
from distributed_state.port.background import finish
from distributed_state.port.connections import Connections
from distributed_state.port.shared import SharedPort

PING = [(b"PING",)]
TIMEOUT = 20.0  # seconds, after which a connection would be given up anyway


@pytest.fixture
def frozen() -> Iterator[Connections]:
    """Connections of a URL that means such a server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = Connections(f"redis://127.0.0.1:{server.getsockname()[1]}", TIMEOUT)
        connections.topology.only = connections.address.seeds[0]
        connections.topology.doubted = False
        yield connections


def switch(connections: Connections, other: str) -> str:
    """As a look does that finds another server."""
    before = connections.topology.only
    assert before is not None
    connections.topology.only = other
    connections.topology.drop(before)
    return before


def left_by_a_thread(connections: Connections, to: str) -> bool:
    """Whether a thread whose connection is not ready is told that the keys are with this server."""
    port = SharedPort(connections)
    told = threading.Event()

    def ask() -> None:
        node = connections.topology.only
        assert node is not None
        with pytest.raises(WarmUnavailable):
            finish(port.exchange_with(node, PING))
        told.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    time.sleep(0.2)
    assert not told.is_set()
    before = switch(connections, to)
    found = told.wait(1.0)
    switch(connections, "")
    connections.topology.drop(before)  # in a control, where it still waits
    asking.join(5)
    finish(port.close())
    return found


async def left_by_a_task(connections: Connections, to: str) -> bool:
    """The same of a task."""
    port = SharedPort(connections)
    node = connections.topology.only
    assert node is not None
    asking = asyncio.ensure_future(port.exchange_with(node, PING))
    await asyncio.sleep(0.2)
    assert not asking.done()
    switch(connections, to)
    await asyncio.wait((asking,), timeout=1.0)
    found = asking.done()
    asking.cancel()
    with pytest.raises((WarmUnavailable, asyncio.CancelledError)):
        await asking
    await port.close()
    return found


def test_a_thread_that_connects_is_told_that_another_server_has_the_keys(frozen: Connections) -> None:
    assert left_by_a_thread(frozen, "127.0.0.1:1")


def test_it_goes_on_if_the_server_still_has_them(frozen: Connections) -> None:
    """It has another data id: the connection will get that."""
    assert not left_by_a_thread(frozen, frozen.address.seeds[0])


async def test_a_task_that_connects_is_told_that_another_server_has_the_keys(frozen: Connections) -> None:
    assert await left_by_a_task(frozen, "127.0.0.1:1")


async def test_a_task_goes_on_if_the_server_still_has_them(frozen: Connections) -> None:
    assert not await left_by_a_task(frozen, frozen.address.seeds[0])
