"""The examples in the docstrings of the public names, on both faces, against the embedded store: each is true."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docstrings import compiled, examples
from public_names import PUBLIC, VALUES, members
from pydantic import BaseModel

from distributed_state import AsyncStateStore, StateStore


def found() -> Iterator[Any]:
    """The examples of all public names, each once."""
    seen = set()
    for name, kind in PUBLIC.items():
        if name in VALUES:
            continue
        described = [(name, kind), *(members(kind) if isinstance(kind, type) else ())]
        for member, each in described:
            for number, example in enumerate(examples(each)):
                of_asyncio = name.startswith("Async")
                if (example, member, of_asyncio) not in seen:
                    seen.add((example, member, of_asyncio))
                    where = name if each is kind else f"{name}.{member}"
                    yield pytest.param(example, of_asyncio, id=f"{where}-{number}")


def names(store: Any) -> dict[str, Any]:
    """What an example may use without saying where it comes from."""
    session = store.session("c1", user="u1")
    return {**PUBLIC, "BaseModel": BaseModel, "store": store, "session": session, "record": store.task("t0")}


def test_there_are_examples_of_both_faces() -> None:
    faces = [param.values[1] for param in found()]
    assert faces.count(True) == faces.count(False) >= 30, "each is generated for the other face"


@pytest.mark.parametrize(("example", "of_asyncio"), list(found()))
def test_examples_are_true(
    example: str, of_asyncio: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each runs as it stands, on its face, against an embedded store, and what it asserts holds."""
    monkeypatch.chdir(tmp_path)
    code = compiled(example)

    async def on_asyncio() -> None:
        async with AsyncStateStore.open(archive="memory") as store:
            waiting = eval(code, names(store))
            if waiting is not None:
                await waiting

    if of_asyncio:
        asyncio.run(on_asyncio())
    else:
        assert not code.co_flags & inspect.CO_COROUTINE, "an example of the blocking face awaits nothing"
        with StateStore.open(archive="memory") as store:
            eval(code, names(store))
