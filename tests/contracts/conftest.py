"""The grounds on which the contract of `Port` is tested. As everywhere, what a default run leaves out is `wide`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contracts.grounds import (
    EMBEDDED,
    SIMULATED,
    AsyncioGround,
    BlockingGround,
    Case,
    Ground,
    SimulatedGround,
    cases,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ground" in metafunc.fixturenames:
        given, option = vars(metafunc.function), metafunc.config.option
        mode = "full" if option.full else "wide" if option.wide else ""
        asked = metafunc.definition.name, given["kinds"], given["apis"]
        first = cases(*asked)
        marked = [pytest.param(each, marks=() if each in first else pytest.mark.wide) for each in cases(*asked, mode)]
        metafunc.parametrize("ground", marked, indirect=True, ids=str)


@pytest.fixture
def ground(request: pytest.FixtureRequest) -> Ground:
    """One running implementation of the port."""
    case: Case = request.param
    if case.kind in SIMULATED:
        return SimulatedGround(case.kind, in_thread=case.api == "blocking")
    servers: Any = request.getfixturevalue("servers")
    made = AsyncioGround if case.api == "asyncio" else BlockingGround
    # A test that runs on the embedded server, too, does nothing to the network.
    return made(case.kind, servers, faults=not set(EMBEDDED) & set(vars(request.function)["kinds"]))
