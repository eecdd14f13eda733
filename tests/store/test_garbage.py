"""What turns and requests leave behind goes with its last reference. Law: nothing waits for the garbage collector.

Its rounds take longer the more a worker holds, and nothing is answered meanwhile; until one comes, the body of a
request that was refused would stay in memory.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from typing import Any

import pytest
from serving import JSON, served
from starlette.requests import Request

from distributed_state import AsyncStateStore, AsyncTurn, Conflict, StateStore, Turn
from distributed_state.programs.service.app import Work

MANY = 20
STORE: dict[str, Any] = {"archive": "memory", "archiver": False, "beat": 0}  # nothing but the test makes garbage


@contextmanager
def left_over(kind: type | tuple[type, ...]) -> Iterator[list[object]]:
    """The objects of this type that nobody can reach any more after the block, and that did not go by themselves."""
    found: list[object] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)  # of all threads of this process: others leave other things
    try:
        yield found
        gc.collect()
        found += [each for each in gc.garbage if isinstance(each, kind)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def serve_turns(store: StateStore, id: str, kept: Callable[[Any], None] = lambda turn: None) -> None:
    for number in range(MANY):
        with store.session(id).turn(request_id=f"r{number}") as turn:
            kept(turn)
            turn.append({"role": "user", "content": "Where to?"})
            turn["n"] = number
            turn.outcome = number


def test_turns_of_blocking_code_leave_nothing(redis_url: str, namespace: str) -> None:
    with StateStore.open(redis_url, namespace=namespace, **STORE) as store:
        serve_turns(store, "first")
        with left_over(AsyncTurn) as found:
            serve_turns(store, "s")
    assert not found


def test_control_a_turn_that_leads_to_itself_is_counted(redis_url: str, namespace: str) -> None:
    with StateStore.open(redis_url, namespace=namespace, **STORE) as store, left_over(Turn) as found:
        serve_turns(store, "s", lambda turn: setattr(turn, "itself", turn))
    assert len(found) == MANY


async def test_turns_of_asyncio_leave_nothing(redis_url: str, namespace: str) -> None:
    async def turn(session: Any, number: int) -> None:
        async with session.turn() as turn:
            turn["n"] = number

    async def refused(session: Any) -> None:
        try:  # `pytest.raises` would keep the error, and what that leads to
            await session.set("n", 1, expect={"n": "what it is not"})
        except Conflict:
            return
        raise AssertionError("it was written")

    async with AsyncStateStore.open(redis_url, namespace=namespace, **STORE) as store:
        session = store.session("s")
        await asyncio.create_task(turn(session, 0))
        with left_over((AsyncTurn, Conflict)) as found:
            for number in range(MANY):
                await asyncio.create_task(turn(session, number))
                await asyncio.create_task(refused(session))
    assert not found


def ask(client: Any) -> None:
    with closing(HTTPConnection(client.base_url.host, client.base_url.port, timeout=30)) as connection:
        asked = partial(_asked, connection)
        for number in range(MANY):
            turns = f"/v1/conversations/c{number}/turns"
            assert asked("POST", "/v1/conversations", {"id": f"c{number}"}) in (201, 409)
            assert asked("GET", "/v1/conversations/none") == 404
            assert asked("POST", turns, {"messages": 1}) == 422
            assert asked("POST", turns, {"set": {"n": 1}}, {"If-Match": '"99"'}) == 412
            assert asked("POST", turns, {"set": {"n": 1}}) == 200


def _asked(
    connection: HTTPConnection, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> int:
    sent = None if body is None else json.dumps(body)
    connection.request(method, path, sent, JSON | (headers or {}))
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_requests_leave_nothing(redis_url: str, namespace: str) -> None:
    with served(redis_url, namespace=namespace, **STORE) as client:
        ask(client)
        with left_over((AsyncTurn, Request)) as found:
            ask(client)
    assert not found


def test_control_a_task_that_its_exception_leads_to_is_counted(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def within(self: Work, seconds: float, work: Any) -> Any:
        task = asyncio.ensure_future(work)
        return await task

    monkeypatch.setattr(Work, "within", within)
    with served(redis_url, namespace=namespace, **STORE) as client:
        ask(client)
        with left_over(Request) as found:
            ask(client)
    assert len(found) >= MANY
