"""A remote store at a service of a newer release. Law: it leaves out what it does not know, and works as before."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from serving import served

from distributed_state import (
    AccessDenied,
    AsyncStateStore,
    ConfigurationError,
    StateError,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from distributed_state.port import http as port
from distributed_state.port.http import AsyncHttp, HttpAnswer
from distributed_state.programs.service import Service
from distributed_state.remote import values
from distributed_state.remote.requests import refusal
from distributed_state.results import Chunk, Ended, Notice

# What is inside has names of the user, or is a table.
OPEN = {
    "fields",
    "tags",
    "message",
    "messages",
    "value",
    "outcome",
    "data",
    "results",
    "stats",
    "status",
    "positions",
    "diverged",
}
MORE = {"of_the_next": {"a": [1]}}


def newer(found: Any) -> Any:
    """An answer as a newer release may give it: each object has one name more."""
    if isinstance(found, list):
        return [newer(each) for each in found]
    if isinstance(found, dict):
        return {name: each if name in OPEN else newer(each) for name, each in found.items()} | MORE
    return found


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on all answers are those of a newer release; what was asked."""
    asked: list[str] = []
    send, line = AsyncHttp.send, port._AsyncLines.line

    async def sent(http: AsyncHttp, method: str, path: str, *others: Any) -> HttpAnswer:
        answer = await send(http, method, path, *others)
        asked.append(path)
        return replace(answer, body=json.dumps(newer(json.loads(answer.body))).encode() if answer.body else b"")

    async def received(lines: Any, timeout: float) -> Any:
        found = await line(lines, timeout)
        name, colon, data = found.partition(": ") if isinstance(found, str) else ("", "", "")
        return f"data: {json.dumps(newer(json.loads(data)))}" if name == "data" and colon else found

    monkeypatch.setattr(AsyncHttp, "send", sent)
    monkeypatch.setattr(port._AsyncLines, "line", received)
    return asked


async def written(store: Any) -> list[Any]:
    """Change a session in many ways; what each call returned, and the events that came of it."""
    session = store.session("s", user="u")
    async with store.events() as events:
        found = await changed(store, session)
        return found + [(event.type, event.data) for event in [await events.next(10) for _ in range(3)]]


async def changed(store: Any, session: Any) -> list[Any]:
    found = [
        await session.write(set={"city": "Oslo"}, tag={"kind": "trip"}, expect_exists=False),
        await session.append({"role": "user", "content": "hi"}),
        await session.increment("n", 2),
        await session.items("notes").put("k", {"a": 1}),
        await session.checkpoint("here"),
        await session.set_lifetime(idle=900.0),
        await session.apply(lambda draft: draft.update(b=1)),
        await session.post({"role": "user", "content": "later"}),
        await session.wake("soon", after=3600),
    ]
    async with session.turn(request_id="r1") as turn:
        await turn.stream("ab")
        turn["done"] = True
    async with session.lock() as lease:
        found += [await lease.renew(), [each.record_id for each in await store.admin.leases()]]
    return [*found, await session.rollback(label="here"), await session.fork("f"), await store.delete("f")]


async def read(store: Any) -> list[Any]:
    """Everything that was written, as it is read."""
    session = store.session("s")
    found = [
        await session.get_all(), await session.get("city"), await session.version(), await session.tags(),
        await session.messages(), await session.phase(), await session.history(), await session.at(version=3),
        await session.checkpoints(), await session.lifetime(), await session.inbox(), await session.wakes(),
        await session.items("notes").list(), await session.items("notes").find("k"),
        await store.sessions(fresh=True),
        await store.asks(), await store.admin.branches("s"), [each.id for each in await store.admin.replicas()],
    ]  # fmt: skip
    async for part in session.output("r1", wait=10):
        found.append(part)
    return found


async def test_a_remote_store_leaves_out_what_a_newer_service_answers_beside(
    servers: Any, namespace: str, request: pytest.FixtureRequest
) -> None:
    """What it returns is the same as at a service of its own release."""
    place = {"url": servers.redis("valkey").url, "archive": "memory"}
    with (
        served(**place, namespace=namespace, service=Service()) as one,
        served(**place, namespace=f"{namespace}-2", service=Service()) as other,
    ):
        async with AsyncStateStore.open(str(one.base_url)) as store:
            expected, before = await written(store), await read(store)
        asked = request.getfixturevalue("patched")
        async with AsyncStateStore.open(str(one.base_url)) as store:
            assert await read(store) == before
        async with AsyncStateStore.open(str(other.base_url)) as store:
            found = await written(store)
    assert [str(each) for each in found] == [str(each) for each in expected]
    assert [type(each) for each in before[-2:]] == [Chunk, Ended]
    assert len(asked) > 30


def test_a_part_of_an_output_that_only_a_newer_release_knows_is_passed_on() -> None:
    assert values.part("of_the_next", "1-0", {"a": 1}) == Notice("1-0", "of_the_next", {"a": 1})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, Unauthenticated),
        (403, AccessDenied),
        (404, ConfigurationError),
        (409, StateError),
        (412, StateError),
        (413, TooLarge),
        (422, StateError),
        (429, Unavailable),
        (500, StateError),
        (503, Unavailable),
    ],
)
def test_an_error_that_only_a_newer_release_knows_is_what_its_status_means(status: int, kind: type[StateError]) -> None:
    problem = json.dumps({"error": "OfTheNext", "detail": "not today", "status": status, **MORE}).encode()
    found = refusal(HttpAnswer(status, {"content-type": "application/problem+json"}, problem))
    assert type(found) is kind
    assert "not today" in str(found)
