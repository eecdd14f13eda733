"""What a tenant may ask of a worker in a second, and how many conversations it may have."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from distributed_state.programs.service.callers import Caller
from distributed_state.programs.service.limits import Limits
from distributed_state.programs.service.quotas import Quota
from distributed_state.programs.service.rates import Rates
from distributed_state.programs.service.streaming import EventStream

A, B = Caller(actor="one", prefix="a:"), Caller(prefix="b:")


class Clock:
    """Time that passes when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(rates: Rates, caller: Caller) -> dict[str, str]:
    with pytest.raises(HTTPException) as found:
        rates.ask(caller)
    assert found.value.status_code == 429
    return dict(found.value.headers or {})


def test_a_tenant_that_asks_too_much_is_told_when_to_come_back_and_others_are_served() -> None:
    clock = Clock()
    rates = Rates(Limits(tenant_requests=2), clock)
    for _ in range(20):
        rates.ask(A)
    assert refused(rates, A) == {
        "Retry-After": "1",
        "RateLimit-Policy": '"requests";q=20;w=10',
        "RateLimit": '"requests";r=0;t=10',
    }
    refused(rates, Caller(actor="another", prefix="a:"))
    rates.ask(B)
    clock.now = 0.5
    rates.ask(A)
    refused(rates, A)
    clock.now = 100
    assert rates.headers(A)["RateLimit"] == '"requests";r=20;t=0'


def test_bytes_are_counted_when_they_are_known_so_the_next_request_waits_for_them() -> None:
    clock = Clock()
    rates = Rates(Limits(tenant_bytes=100), clock)
    rates.ask(A)
    rates.count(A, 1_500)
    assert refused(rates, A)["Retry-After"] == "5"
    assert rates.headers(A)["RateLimit-Policy"] == '"bytes";q=1000;w=10;qu="content-bytes"'
    clock.now = 6
    rates.ask(A)


class Two:
    """Two events, and the end."""

    position, waiting = "7", False

    def __init__(self) -> None:
        self.left = [SimpleNamespace(type=name, to_dict=dict) for name in ("mine", "theirs", "mine")]
        self.stream: EventStream | None = None

    async def next(self, timeout: float) -> Any:
        if self.left:
            return self.left.pop()
        assert self.stream is not None
        self.stream.end()
        return None

    def end(self) -> None:
        """Nothing: it has one."""

    async def close(self) -> None:
        """Nothing is open."""


async def test_bytes_of_a_stream_of_events_count_as_others_do() -> None:
    rates, sent, events = Rates(Limits(tenant_bytes=1), Clock()), [], Two()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    events.stream = EventStream(
        events,  # type: ignore[arg-type]
        Limits(),
        lambda _: None,
        lambda event: event.type == "mine",
        partial(rates.count, A),
        str,
    )
    await events.stream({}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert b"".join(sent).count(b"event: mine") == 2
    assert b"theirs" not in b"".join(sent)
    assert refused(rates, A)["Retry-After"] == str(len(b"".join(sent)) - 10)


def test_without_a_tenant_each_actor_has_a_quota_and_a_name_is_not_a_tenants() -> None:
    rates = Rates(Limits(tenant_requests=0.1), Clock())
    rates.ask(Caller(actor="a:"))
    refused(rates, Caller(actor="a:"))
    rates.ask(A)
    rates.ask(Caller(actor="b"))


def test_nothing_is_counted_by_default() -> None:
    rates = Rates(Limits())
    for _ in range(1_000):
        rates.ask(A)
    assert rates.headers(A) == {}


def test_who_asked_nothing_for_longest_is_forgotten() -> None:
    rates = Rates(Limits(tenant_requests=0.1), Clock())
    for number in range(10_001):
        rates.ask(Caller(actor=str(number)))
    rates.ask(Caller(actor="0"))
    refused(rates, Caller(actor="10000"))


class Listing:
    """A store with so many conversations of each prefix."""

    def __init__(self, **many: int) -> None:
        self.many = many
        self.asked = 0

    async def sessions(self, *, prefix: str, limit: int, after: int | None) -> list[Any]:
        self.asked += 1
        begin = after or 0
        stop = min(self.many.get(prefix, 0), begin + limit)
        return [SimpleNamespace(cursor=number + 1) for number in range(begin, stop)]


async def test_a_tenant_has_its_number_of_conversations_counted_once_a_minute() -> None:
    clock, store = Clock(), Listing(a=1_998, b=5)
    quota = Quota(2_000, clock)
    a, b = Caller(prefix="a"), Caller(prefix="b")
    for _ in range(2):
        await quota.ask(store, a)  # type: ignore[arg-type]
    with pytest.raises(HTTPException) as found:
        await quota.ask(store, a)  # type: ignore[arg-type]
    assert (found.value.status_code, found.value.headers) == (429, {"Retry-After": "60"})
    assert store.asked == 2
    await quota.ask(store, b)  # type: ignore[arg-type]
    await quota.ask(store, Caller())  # type: ignore[arg-type]
    store.many["a"] = 10
    clock.now = 61
    await quota.ask(store, a)  # type: ignore[arg-type]
    assert store.asked == 4


def test_what_tenants_ask_for_is_counted_and_fades_with_time() -> None:
    clock = Clock()
    rates = Rates(Limits(), clock)
    for _ in range(100):
        clock.now += 0.1
        rates.ask(A)
        rates.count(A, 1000)
    rates.ask(B)
    first, second = rates.traffic.busiest(10)
    assert (first.prefix, first.requests, first.bytes) == ("a:", 100, 100_000)
    assert (second.prefix, second.requests, second.bytes) == ("b:", 1, 0)
    assert 5 < first.requests_per_second < 10, "ten a second, for ten seconds"
    clock.now += 60
    (later,) = rates.traffic.busiest(1)
    assert later.requests_per_second < 0.1
    assert later.requests == 100


async def test_conversations_of_a_tenant_are_counted_once_a_minute() -> None:
    clock = Clock()
    rates, counts = Rates(Limits(), clock), iter([3, 5])
    rates.ask(A)

    async def count() -> int:
        return next(counts)

    assert [await rates.traffic.conversations("a:", count) for _ in range(3)] == [3] * 3
    clock.now += 61
    assert await rates.traffic.conversations("a:", count) == 5
