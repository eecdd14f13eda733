"""A cold tier without Redis, on each database."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_state.cold.store import ColdStore
from tests.journals import Journal

Opener = Callable[..., ColdStore]


@pytest.fixture(scope="session")
def shared_postgres(servers: Any) -> str:
    url: str = servers.database()
    return url


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("shared_postgres"))
    return "memory" if request.param == "memory" else f"sqlite:///{tmp_path}/cold.db"


@pytest.fixture
def opened() -> Iterator[Opener]:
    stores: list[ColdStore] = []

    def opens(url: str, namespace: str = "", **options: Any) -> ColdStore:
        stores.append(ColdStore.open(url, namespace or f"n{uuid.uuid4().hex[:12]}", **options))
        return stores[-1]

    yield opens
    for store in stores:
        store.close()


@pytest.fixture
def cold(url: str, opened: Opener) -> ColdStore:
    return opened(url, snapshot_every=10)


@pytest.fixture
def journal(cold: ColdStore) -> Journal:
    return Journal(cold)


@pytest.fixture
def database_of_its_own(opener: Any, servers: Any) -> None:
    """Search is switched on for a whole database: other tests share theirs."""
    if opener.cold == "postgres":
        opener.archive = servers.database()
