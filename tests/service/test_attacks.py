"""Clients that mean ill: each attack on a worker process, what others notice, and that without the limit it succeeds.

Small numbers; those of docs/security.md are behind `-m soak`, and most attacks behind --wide.
"""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from below import until
from starlette.requests import Request
from starlette.responses import Response

from deploy.load import attacks
from deploy.load.attacks import CONVERSATIONS, HONEST, Target
from distributed_state import AsyncStateStore
from distributed_state.programs.service import Limits, Service, requests
from distributed_state.programs.service.requests import Asked, Operation

QUICK = ("--head-seconds", "0.4", "--body-seconds", "0.4", "--read-seconds", "0.4", "--min-rate", "10000000")
SLOW = ("--head-seconds", "60", "--body-seconds", "60", "--read-seconds", "60")
SMALL = ("--max-in-flight", "12000000", "--max-requests", "4", "--max-answer", "10000000")
LARGE = ("--max-in-flight", "1000000000", "--max-answer", "100000000")
HUGE = f"{CONVERSATIONS}/huge"
ANY_NUMBER = """
from distributed_state.programs.service import connections
connections.room = lambda wanted: 10**6
"""


def options(servers: Any, folder: Path) -> list[str]:
    """Where a worker keeps its state."""
    url = servers.redis("valkey").url
    return ["--url", url, "--archive", f"sqlite:///{folder}/archive.db", "--namespace", f"t{uuid.uuid4().hex[:12]}"]


@pytest.fixture(scope="module")
def strict(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A worker with small limits."""
    with Target(options(servers, tmp_path_factory.mktemp("strict")), *QUICK, *SMALL) as target:
        yield target


@pytest.fixture(scope="module")
def lenient(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A worker without these limits, on which the attacks succeed."""
    with Target(options(servers, tmp_path_factory.mktemp("lenient")), *SLOW, *LARGE) as target:
        yield target


@pytest.fixture(scope="module")
def byte_a_second(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A worker that gives clients as little time as `strict`, and is content with a byte a second."""
    with Target(options(servers, tmp_path_factory.mktemp("byte_a_second")), *QUICK[:-1], "1", *LARGE) as target:
        yield target


def with_huge(target: Target) -> Target:
    """The same, with a conversation of 11 MB, where an answer has 10."""
    if target.http.get(f"{HUGE}?last=0").status_code == 404:
        attacks.conversation(target, "huge", 12, 950_000)
    return target


class Watch(attacks.Watch):
    """Another client, which sees how much the worker computes while it waits for its answer.

    Not how long it waits: a machine that runs other tests is late by itself.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._worker = psutil.Process(target.process.pid)
        self.computed = 0.0

    def _spent(self) -> float:
        times = self._worker.cpu_times()
        return float(times.user + times.system)

    def _asked(self, path: str) -> float:
        began = self._spent()
        waited = super()._asked(path)
        self.computed = max(self.computed, self._spent() - began)
        return waited

    @property
    def well(self) -> bool:
        """Whether other clients were served all the while, within twice the time that is promised."""
        return self.seen.failures == 0 and self.computed < 1.0 and self.seen.rss < 300


def survives(target: Target, attack: Callable[[], list[socket.socket]]) -> None:
    """Nobody else notices the attack, and it ends."""
    before = target.descriptors()
    with Watch(target) as watch, attacks.held(attack()) as connections:
        assert attacks.wait_closed(connections, 20)
    assert watch.well, (watch.seen, watch.computed)
    assert _soon(lambda: target.descriptors() <= before + 5)


def _soon(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether it holds within so many seconds; it is asked every 20 ms."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# Connections


def test_half_a_head_and_a_silent_connection_end_in_time(strict: Target) -> None:
    survives(strict, lambda: attacks.half_heads(strict, 50) + attacks.silent(strict, 50))
    with attacks.held(attacks.connected(strict, b"GET / HTTP/1.1\r\n", 1)) as (late,):
        assert late.recv(1000).startswith(b"HTTP/1.1 408 ")


@pytest.mark.wide
def test_without_the_limit_half_heads_and_silent_connections_stay(lenient: Target) -> None:
    """The negative control of the test before."""
    with attacks.held(attacks.half_heads(lenient, 5) + attacks.silent(lenient, 5)) as connections:
        assert not attacks.wait_closed(connections, 1.0)
        assert not any(map(attacks.closed, connections))


@pytest.mark.wide
@pytest.mark.parametrize("limited", [True, False])
def test_silent_connections_never_take_the_last_descriptor(servers: Any, tmp_path: Path, limited: bool) -> None:
    where = options(servers, tmp_path)
    with Target(where, *SLOW, descriptors=160, before="" if limited else ANY_NUMBER) as target:
        with Watch(target) as watch, attacks.held(attacks.silent(target, 250)) as connections:
            assert not limited or _soon(lambda: sum(map(attacks.closed, connections)) >= 170)
            looks = watch.seen.looks
            assert _soon(lambda: watch.seen.looks > looks)
        assert watch.well is limited, (watch.seen, watch.computed)


@pytest.mark.wide
def test_one_address_has_its_number_of_connections(servers: Any, tmp_path: Path) -> None:
    with Target(options(servers, tmp_path), "--max-per-address", "5") as target:
        with attacks.held(attacks.silent(target, 10)) as connections:
            assert _soon(lambda: sum(map(attacks.closed, connections)) >= 5)
        assert _soon(lambda: target.http.get("/healthz").status_code == 200)


# Bodies


@pytest.mark.wide
def test_half_bodies_hold_no_more_memory_than_they_may(strict: Target, lenient: Target) -> None:
    began = strict.rss()
    survives(strict, lambda: attacks.half_bodies(strict, 60))
    assert strict.rss() < began + 40
    began = lenient.rss()
    with attacks.held(attacks.half_bodies(lenient, 150)) as connections:
        assert _soon(lambda: lenient.rss() > began + 55), "without the limit they are all kept"
        assert not any(map(attacks.closed, connections))


@pytest.mark.wide
def test_a_body_that_trickles_ends_too(strict: Target, byte_a_second: Target) -> None:
    def ends(target: Target, seconds: float) -> bool:
        with attacks.held(attacks.begun_bodies(target, 1)) as (slow,):
            return _soon(lambda: attacks.closed(slow) or not slow.send(b" "), seconds)

    assert ends(strict, 10)
    assert not ends(byte_a_second, 2), "it gives as long for the first byte, and each that comes is fast enough"


def test_bodies_that_do_not_come_take_no_slots(strict: Target) -> None:
    """Of which there are four."""
    with attacks.held(attacks.ten_bytes(strict, 20)):
        assert strict.post(f"{CONVERSATIONS}/{HONEST}/turns", set={"a": 2}).status_code == 200


@pytest.mark.parametrize("first", [True, False])
async def test_a_body_is_waited_for_before_its_request_has_a_place(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it were waited for in that place, strangers who send nothing would take all of them."""
    receive, waiting = requests.receive_body, list[Request]()

    async def counted(request: Request, limits: Limits) -> int:
        waiting.append(request)
        return await receive(request, limits)

    async def unread(request: Request, limits: Limits) -> int:
        request.state.body = b""
        return 0

    async def late(asked: Asked) -> Response:
        if not first:
            await counted(asked.request, asked.limits)
        return Response()

    monkeypatch.setattr(requests, "receive_body", counted if first else unread)
    async with AsyncStateStore.open(archive="memory") as store:
        service = Service(Limits(requests=4), more=[Operation("POST", "/v1/late", "write", late)])
        service.begin(store)
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:

            async def endless() -> AsyncIterator[bytes]:
                yield b"{"
                await asyncio.Event().wait()

            attack = [asyncio.create_task(http.post("/v1/late", content=endless())) for _ in range(20)]
            await until(lambda: len(waiting) == (20 if first else 4))
            honest = await http.post("/v1/late")
            assert honest.status_code == (200 if first else 429)
            for each in attack:
                each.cancel()
            await asyncio.gather(*attack, return_exceptions=True)


def test_a_body_of_an_absurd_shape_is_refused_unread(strict: Target) -> None:
    """Each kind of them, and that it is its limit which refuses it: tests/service/test_requests.py."""
    with Watch(strict) as watch:
        for body in (attacks.many_fields(50_000), attacks.many_fields(6_000), attacks.deep(100_000)):
            assert attacks.sent(strict, body, 1) == {422}
    assert watch.well, (watch.seen, watch.computed)


def test_brackets_in_a_text_are_no_nesting(strict: Target) -> None:
    said = "[{" * 1000 + '\\"' * 10
    body = {"fields": {"a": said, "b": [[[{"c": [said]}]]]}, "id": "brackets"}
    assert strict.post(CONVERSATIONS, **body).status_code == 201
    assert strict.http.get(f"{CONVERSATIONS}/brackets").json()["fields"] == body["fields"]


def test_a_body_of_two_lengths_closes_its_connection(strict: Target) -> None:
    head = (
        f"POST {CONVERSATIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    smuggled = b"0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with attacks.held(attacks.connected(strict, head.encode() + smuggled, 1)) as (connection,):
        found = b""
        while data := connection.recv(65536):
            found += data
    assert found.startswith(b"HTTP/1.1 400 ")
    assert found.count(b"HTTP/1.1") == 1


# Answers


@pytest.mark.wide
def test_a_conversation_that_is_too_large_is_read_page_by_page(strict: Target, lenient: Target) -> None:
    refused = with_huge(strict).http.get(HUGE, params={"last": 10_000})
    assert refused.status_code == 422
    assert "page" in refused.json()["detail"]
    assert len(strict.http.get(HUGE, params={"last": 9}).json()["messages"]) == 9
    asked = with_huge(lenient).http.get(HUGE, params={"last": 10_000})
    assert len(asked.json()["messages"]) == 12, "without the limit it is built in memory"


@pytest.mark.wide
def test_clients_that_do_not_read_are_disconnected(strict: Target, lenient: Target) -> None:
    path = f"{HUGE}?last=9"
    before = with_huge(strict).descriptors()
    with Watch(strict) as watch, attacks.held(attacks.deaf(strict, path, 6)):
        assert _soon(lambda: strict.descriptors() <= before + 3)
    assert watch.well, (watch.seen, watch.computed)
    before, began = with_huge(lenient).descriptors(), lenient.rss()
    with attacks.held(attacks.deaf(lenient, path, 6)):
        assert _soon(lambda: lenient.rss() > began + 25), "without the limit their answers are kept"
        assert lenient.descriptors() >= before + 6


@pytest.mark.wide
def test_an_answer_that_is_read_too_slowly_ends_too(strict: Target, byte_a_second: Target) -> None:
    """Though what the kernel keeps for the client comes to an end long after it."""

    def ends(target: Target, seconds: float) -> bool:
        before = with_huge(target).descriptors()
        with attacks.held(attacks.deaf(target, f"{HUGE}?last=9", 1)) as (slow,):
            return _soon(lambda: target.descriptors() <= before or not slow.recv(4096), seconds)

    assert ends(strict, 10)
    assert not ends(byte_a_second, 2)


@pytest.mark.soak
def test_attacks_of_full_size(servers: Any, tmp_path: Path) -> None:
    where = options(servers, tmp_path)
    with Target(where) as another:
        attacks.conversation(another, "huge", 312, 10**6)
        attacks.conversation(another, "large", 8, 10**6)
        for number in range(attacks.NINES):
            attacks.conversation(another, f"nine{number}", 9, 10**6)
    with Target(where) as target:
        for name, run in attacks.attacks(target).items():
            with Watch(target) as watch:
                run()
            assert watch.well, (name, watch.seen, watch.computed)
