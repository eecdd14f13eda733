"""What the HTTP worker waits for: its servers' answers, and the work that a request left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import httpx
import pytest
from below import until
from serving import served

from distributed_state import StateStore
from distributed_state.errors import Unavailable, WarmUnavailable
from distributed_state.port import waited
from distributed_state.port.shared import SharedPort
from distributed_state.port.waited import Room
from distributed_state.programs.service import Service, limits
from distributed_state.programs.service.app import Probe, Work
from distributed_state.programs.service.connections import Connections
from distributed_state.programs.service.limits import Budget, Buffered, Growing, Limits, Sizes
from distributed_state.programs.service.resources import records
from distributed_state.values.journal import JournalEntry


async def test_a_server_is_asked_once_a_while_however_many_want_to_know() -> None:
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        if asked > 1:
            raise WarmUnavailable("away")

    probe = Probe("redis", ask, 0.2)
    assert set(await asyncio.gather(*(probe.problem() for _ in range(20)))) == {""}
    assert asked == 1
    assert await until(probe.problem) == "away"
    assert asked == 2


async def test_a_server_that_hangs_is_not_asked_again_before_it_answered() -> None:
    asked, answer = 0, asyncio.Event()

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await answer.wait()

    probe = Probe("redis", ask, 0.05)
    for _ in range(3):
        assert await probe.problem() == "no answer within 0.05 s"
        await asyncio.sleep(0.06)
    assert asked == 1
    answer.set()

    async def well() -> bool:
        return await probe.problem() == ""

    await until(well)
    await probe.close()


async def test_work_is_answered_in_time_and_tidied_up_behind() -> None:
    work, gate, tidied = Work(), asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await gate.wait()
            tidied.set()
            raise WarmUnavailable("nobody hears this any more")

    with pytest.raises(Unavailable, match=r"abandoned after 0\.01 s"):
        await work.within(0.01, slow())
    assert (len(work), tidied.is_set()) == (0, False)
    gate.set()
    await work.finish(30)
    assert tidied.is_set()


async def test_work_is_finished_or_given_up_at_the_end() -> None:
    work, gate = Work(), asyncio.Event()

    async def until_open() -> int:
        await gate.wait()
        return 7

    running = asyncio.create_task(work.within(60, until_open()))
    await until(lambda: len(work))
    asyncio.get_running_loop().call_later(0.02, gate.set)
    await work.finish(5)
    assert await running == 7
    gate.clear()
    running = asyncio.create_task(work.within(60, until_open()))
    await until(lambda: len(work))
    await work.finish(0.01)
    with pytest.raises(Unavailable):
        await running


async def test_work_that_begins_while_the_last_of_it_is_waited_for_is_finished_too() -> None:
    """At each SIGTERM under load some requests were answered 503, with 15 s left."""
    work, first, second = Work(), asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(work.within(60, first.wait()))
    await until(lambda: len(work))
    ending = asyncio.create_task(work.finish(30))
    await asyncio.sleep(0)
    late = asyncio.create_task(work.within(60, second.wait()))
    await until(lambda: len(work) == 2)
    first.set()
    assert await running
    for _ in range(20):
        await asyncio.sleep(0)
    assert not late.done()
    second.set()
    assert await late
    await ending


@pytest.mark.parametrize("many", [10, 1000])
async def test_the_memory_of_a_crowd_of_connections_is_given_back_once(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr("distributed_state.programs.service.connections.trim_memory", lambda: given.append(1))
    connections = Connections(Limits(head=0.02))
    watching = asyncio.create_task(connections.watch())
    for each in [Mock(address="10.1.2.3") for _ in range(many)]:
        connections.enter(each)
        connections.leave(each)
    connections.enter(stays := Mock(address="10.1.2.3"))
    await until(lambda: stays.look.call_count >= 3)  # of what follows it, two rounds are whole
    watching.cancel()
    assert len(given) == (many == 1000)


def test_giving_memory_back_is_no_error_wherever_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.trim_memory()
    monkeypatch.setattr(limits.ctypes, "CDLL", Mock(side_effect=OSError))
    limits.trim_memory()
    limits.return_large_blocks()


# What a worker holds for its clients

NINE = "/v1/conversations/nine?last=9"
ROOM = 3_000_000


@contextlib.contextmanager
def holding(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> Iterator[tuple[httpx.Client, Service, list[int]]]:
    """A service with a conversation of 900 KB, and the most that it held until now."""
    service, most = Service(Limits(in_flight=ROOM, **limits)), [0]
    counted = Budget._count

    def count(self: Budget, party: str, size: int) -> None:
        counted(self, party, size)
        most[0] = max(most[0], self.taken)

    monkeypatch.setattr(Budget, "_count", count)
    with served(None, "memory", "holding", service=service) as client:
        client.post("/v1/conversations", json={"id": "nine"}).raise_for_status()
        for _ in range(9):
            said = {"role": "user", "content": os.urandom(50_000).hex()}
            client.post("/v1/conversations/nine/messages", json={"messages": [said]}).raise_for_status()
        client.get(NINE).raise_for_status()
        yield client, service, most
        assert soon(lambda: service.budget.held == 0), "all of it is given back"


def soon(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def read_at_once(client: httpx.Client, many: int) -> list[int]:
    def read(_: int) -> int:
        with httpx.Client(base_url=client.base_url, timeout=60) as http:
            return http.get(NINE).status_code

    with ThreadPoolExecutor(many) as pool:
        return list(pool.map(read, range(many)))


def test_readers_of_a_large_conversation_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with holding(monkeypatch) as (client, _, most):
        assert read_at_once(client, 8) == [200] * 8
        assert most[0] <= ROOM


def test_without_a_budget_they_would_all_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "_fits", lambda *_: True)
    with holding(monkeypatch) as (client, _, most):
        assert read_at_once(client, 8) == [200] * 8
        assert most[0] > ROOM


def unread(client: httpx.Client, path: str, many: int) -> list[socket.socket]:
    found = []
    for _ in range(many):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((client.base_url.host, client.base_url.port or 0))
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        found.append(connection)
    return found


def test_an_answer_is_held_until_it_is_read_and_given_back_when_its_client_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with holding(monkeypatch, leaving=60, room=0.5) as (client, service, most):
        connections = unread(client, NINE, 6)
        assert soon(lambda: service.budget.taken > 800_000)
        assert soon(lambda: not service.budget.waiting)
        refused = client.get(NINE)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert client.get("/v1/conversations/nine/tags").status_code in (200, 503)
        assert client.get("/healthz").status_code == 200
        assert most[0] <= ROOM
        for each in connections:
            each.close()
        assert soon(lambda: service.budget.taken < 100_000)
        assert client.get(NINE).status_code == 200


def test_a_client_that_does_not_read_makes_room_for_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_PRESSING", 0.1)
    with holding(monkeypatch, leaving=60, room=30) as (client, _, _):
        connections = unread(client, NINE, 3)
        assert read_at_once(client, 3) == [200] * 3
        for each in connections:
            each.close()


def test_what_a_request_took_is_given_back_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with holding(monkeypatch, request=3.0) as (client, service, _):
        assert client.get("/v1/conversations/none").status_code == 404
        assert client.post("/v1/conversations", json={"id": "x", "fields": 1}).status_code == 422
        monkeypatch.setattr(records, "read_shown", lambda *_, **__: asyncio.Event().wait())
        assert client.get(NINE).status_code == 503
        monkeypatch.setattr(records, "read_shown", lambda *_, **__: asyncio.sleep(0))
        assert client.get(NINE).status_code == 500
        assert soon(lambda: service.budget.held == 0)


def test_a_body_with_very_many_values_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"fields": {"a": [1] * 20_000}}
    with holding(monkeypatch, room=0.2) as (client, service, most):
        most[0] = 0  # of the reads before
        assert client.post("/v1/conversations", json=body).status_code == 201
        assert most[0] >= 2_000_000
        most[0] = 0
        with ThreadPoolExecutor(6) as pool:
            found = set(pool.map(lambda _: client.post("/v1/conversations", json=body).status_code, range(6)))
        assert found <= {201, 503}
        assert most[0] <= ROOM
        assert soon(lambda: service.budget.held == 0)


def test_unread_streams_of_events_buffer_little_and_lose_nothing(
    servers: Any, tmp_path: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [0]
    counted = Buffered.count

    def count(self: Buffered, size: int) -> None:
        counted(self, size)
        held[0] = max(held[0], self._budget.buffered)

    monkeypatch.setattr(Buffered, "count", count)
    service = Service(Limits(in_flight=ROOM, slow=60, leaving=60))
    url, archive, many, size = servers.redis("valkey").url, f"sqlite:///{tmp_path}/a.db", 150, 3_000
    with (
        served(url, archive, namespace, service=service) as client,
        StateStore.open(url, archive=archive, namespace=namespace) as store,
    ):
        connections = unread(client, "/v1/events", 8)
        for each in connections:
            each.settimeout(60)
            assert each.recv(1, socket.MSG_PEEK), "a stream is answered once it has joined"
        assert len(service._hearers) == 8
        for n in range(many):
            store.emit("a.b", {"n": n, "text": "x" * size}, subject="s")
        # Each may have 16 more when all of them together have a quarter, the one before them, and the one it writes.
        assert soon(lambda: held[0] > ROOM // 8)
        connections[0].settimeout(20)
        text = b""
        while b'"n":%d,' % (many - 1) not in text:
            text += connections[0].recv(65536)
        for n in range(many):
            assert b'"n":%d,' % n in text, "none is missing"
        most = ROOM // 4 + 8 * 18 * (size + 1_000)
        assert held[0] <= most < 8 * many * size // 2
        for each in connections:
            each.close()
        assert soon(lambda: service.budget.buffered == 0)


class Kept(bytes):
    """Bytes that were read for an answer, as long as somebody has them."""

    held: ClassVar[Counter[Room | None]] = Counter()
    room: Room | None

    def __new__(cls, data: bytes) -> Kept:
        kept = super().__new__(cls, data)
        kept.room = waited._room.get()
        cls.held[kept.room] += len(data)
        return kept

    def __del__(self) -> None:
        Kept.held[self.room] -= len(self)


def test_a_history_that_turns_out_large_holds_nothing_while_it_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of these answers, and what was guessed of them is given back before they are read."""
    held, many = list[int](), 6
    read, wait = SharedPort.sql, Growing.wait

    async def sql(self: SharedPort, function: Any, *arguments: Any) -> Any:
        found = await read(self, function, *arguments)
        if not isinstance(found, list) or not all(isinstance(each, JournalEntry) for each in found):
            return found
        return [replace(each, data=Kept(each.data)) for each in found]

    async def waiting(self: Growing, size: int) -> None:
        held.append(Kept.held[self])
        await wait(self, size)

    monkeypatch.setattr(SharedPort, "sql", sql)
    monkeypatch.setattr(Growing, "wait", waiting)
    monkeypatch.setattr(Sizes, "note", lambda *_: None)
    monkeypatch.setattr(limits, "_LOADING", 0.0)
    with holding(monkeypatch, room=60) as (client, _, _):

        def ask(_: int) -> int:
            with httpx.Client(base_url=client.base_url, timeout=60) as http:
                return http.get("/v1/conversations/nine/versions").status_code

        with ThreadPoolExecutor(many) as pool:
            assert list(pool.map(ask, range(many))) == [200] * many
        assert len(held) >= many // 2
        assert set(held) == {0}
        assert len(Kept.held) == many, "each had bytes of its own"


def test_what_is_read_for_an_answer_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    take = Growing.take

    def taking(self: Growing, size: int) -> bool:
        counted.append(size)
        return take(self, size)

    monkeypatch.setattr(Growing, "take", taking)
    with holding(monkeypatch) as (client, _, _):
        for each in ("conversations/nine", "users/u"):
            client.put(f"/v1/{each}/fields/f", json={"value": "v" * 500_000}).raise_for_status()
        fields, both = range(500_000, 510_000), range(1_400_000, 1_410_000)
        messages = range(900_000, 910_000)
        for path, expected in (
            ("conversations/nine", [messages, both]),
            ("conversations/nine/messages", [messages, both]),
            ("conversations/nine/transcript", [messages, both]),
            ("conversations/nine/fields", [fields]),
            ("conversations/nine/versions", [both]),
            ("conversations/nine/versions/11", [fields, messages]),
            ("conversations/nine/versions/1/diff?to=11", [fields, messages]),
            ("users/u", [fields]),
        ):
            counted.clear()
            client.get(f"/v1/{path}").raise_for_status()
            assert all(any(size in each for size in counted) for each in expected), (path, counted)


def test_a_repeated_request_says_which_version_deleted_what_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with holding(monkeypatch) as (client, _, _):
        turn = {"messages": [{"role": "user", "content": "hi"}]}
        key = {"Idempotency-Key": "k"}
        client.post("/v1/conversations", json={"id": "d"}).raise_for_status()
        client.post("/v1/conversations/d/turns", json=turn, headers=key).raise_for_status()
        version = client.delete("/v1/conversations/d").json()["version"]
        for headers in (key, {}):
            found = client.post("/v1/conversations/d/turns", json=turn, headers=headers)
            assert (found.status_code, found.json()["version"]) == (410, version), found.text


def test_a_wrong_container_is_refused_over_http_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with holding(monkeypatch) as (client, _, _):
        for name in ("set", "delete", "increment", "append", "items", "tag", "untag", "expect"):
            found = client.post("/v1/conversations/w/writes", json={"set": {"a": 1}, name: 3})
            assert (found.status_code, found.json()["error"]) == (422, "InvalidValue"), found.text
        assert client.get("/v1/conversations/w").status_code == 404
