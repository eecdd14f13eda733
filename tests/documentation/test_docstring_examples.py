"""The examples in the docstrings of the public names, on both APIs: each is true.

Against the embedded store; those of the remote store against a service, which is where they say.
"""

from __future__ import annotations

import asyncio
import inspect
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docstrings import compiled, examples
from public_names import PUBLIC, VALUES, members
from pydantic import BaseModel
from serving import served

from distributed_state import AsyncStateStore, StateStore
from distributed_state.programs.service import Service

SERVED = "http://127.0.0.1:8080"  # in the examples


def found() -> Iterator[Any]:
    """The examples of all public names, each once."""
    seen = set()
    for name, kind in PUBLIC.items():
        if name in VALUES:
            continue
        described = [(name, kind), *(members(kind) if isinstance(kind, type) else ())]
        for member, each in described:
            for number, example in enumerate(examples(each)):
                of_asyncio, remote = name.startswith("Async"), "Remote" in name
                if (example, member, of_asyncio, remote) not in seen:
                    seen.add((example, member, of_asyncio, remote))
                    where = name if each is kind else f"{name}.{member}"
                    # On one of the two APIs, in turn; a full run has both.
                    turn = zlib.crc32(f"{where.removeprefix('Async')}-{number}".encode()) % 2
                    marks = [] if turn == of_asyncio else [pytest.mark.full]
                    yield pytest.param(example, of_asyncio, remote, id=f"{where}-{number}", marks=marks)


def names(store: Any) -> dict[str, Any]:
    """What an example may use without saying where it comes from."""
    session = store.session("c1", user="u1")
    return {**PUBLIC, "BaseModel": BaseModel, "store": store, "session": session, "record": store.task("t0")}


def test_there_are_examples_of_both_apis() -> None:
    apis = [param.values[1] for param in found()]
    assert apis.count(True) == apis.count(False) >= 30, "each is generated for the other API"


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """Where a service is."""
    with served(None, "memory", "examples", service=Service()) as client:
        yield str(client.base_url)


@pytest.mark.parametrize(("example", "of_asyncio", "remote"), list(found()))
def test_examples_are_true(
    example: str,
    of_asyncio: bool,
    remote: bool,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each runs as it stands, on its API, and what it asserts holds."""
    monkeypatch.chdir(tmp_path)
    url = request.getfixturevalue("service") if remote else ""
    code = compiled(example.replace(SERVED, url) if remote else example)
    place: dict[str, Any] = {"url": url} if remote else {"archive": "memory"}

    async def on_asyncio() -> None:
        async with AsyncStateStore.open(**place) as store:
            waiting = eval(code, names(store))
            if waiting is not None:
                await waiting

    if of_asyncio:
        asyncio.run(on_asyncio())
    else:
        assert not code.co_flags & inspect.CO_COROUTINE, "an example of the sync API awaits nothing"
        with StateStore.open(**place) as store:
            eval(code, names(store))
