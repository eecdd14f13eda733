"""Implementations on which the contract of `Port` is tested. A test runs on one real server, with `--wide` on both."""

from __future__ import annotations

import zlib

import pytest

from tests.simulation.grounds import REAL, AsyncioGround, BlockingGround, Ground, SimulatedGround

SERVERS = ("valkey", "redis")  # the second is the oldest supported one


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kinds = vars(metafunc.function).get("kinds", ())
    every = metafunc.config.option.wide or metafunc.config.option.full
    chosen = SERVERS if every else (SERVERS[zlib.crc32(metafunc.definition.name.encode()) % 2],)
    cases = [(kind, server) for kind in sorted(kinds) for server in (chosen if kind in REAL else ("",))]
    if cases:
        metafunc.parametrize("ground", cases, indirect=True, ids=[" ".join(filter(None, case)) for case in cases])


@pytest.fixture
def ground(request: pytest.FixtureRequest) -> Ground:
    """One running implementation of the port."""
    kind, server = request.param
    if kind.startswith("simulated"):
        return SimulatedGround(in_thread=kind != "simulated")
    made = AsyncioGround if kind.startswith("asyncio") else BlockingGround
    if not server:
        return made(None)
    servers = request.getfixturevalue("servers")
    (other,) = {*SERVERS} - {server}
    return made(servers.redis(server).url, servers.redis(other).url)
