"""What a tenant may ask of a worker in a second, and how many conversations it may have."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from distributed_state.programs.service import limits
from distributed_state.programs.service.answers import EventStream
from distributed_state.programs.service.authentication import Caller
from distributed_state.programs.service.limits import Budget, Limits, Quota, Rates, Shares

pytestmark = pytest.mark.unit

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
        Budget(2**20).stream(),
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


def test_who_asked_nothing_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_TENANTS", 300)
    rates = Rates(Limits(tenant_requests=0.1), Clock())
    for number in range(301):
        rates.ask(Caller(actor=str(number)))
    rates.ask(Caller(actor="0"))
    refused(rates, Caller(actor="300"))


class Counted:
    """A store whose archive has so many records that begin so, and so many items of them."""

    def __init__(self, **many: int) -> None:
        self.many = many
        self.asked: list[str] = []
        self.going_on = asyncio.Event()
        self.going_on.set()
        self.cold = self.port = self._lifecycle = self

    def tiers(self) -> Any:
        return self

    async def sql(self, read: Any) -> int:
        await self.going_on.wait()
        return int(read())

    def count(self, scope: str, prefix: str, most: int) -> int:
        self.asked.append(f"{scope} {prefix}")
        return min(most, self.many.get(prefix.replace("%3A", ""), 0))

    def count_items(self, prefix: str, most: int) -> int:
        return self.count("item", prefix, most)


async def may(quota: Quota, store: Any, caller: Caller, kind: str = "session", more: int = 1) -> bool:
    try:
        await quota.ask(store, caller, kind, more)
    except HTTPException:
        return False
    return True


async def test_a_tenant_has_its_number_of_conversations_counted_once_a_minute() -> None:
    clock, store = Clock(), Counted(a=1_998, b=5)
    quota = Quota(Limits(tenant_conversations=2_000), clock)
    assert [await may(quota, store, A) for _ in range(2)] == [True] * 2
    with pytest.raises(HTTPException) as found:
        await quota.ask(store, A, "session")  # type: ignore[arg-type]
    assert (found.value.status_code, found.value.headers) == (429, {"Retry-After": "60"})
    assert store.asked == ["session a%3A"]
    assert await may(quota, store, B)
    assert await may(quota, store, Caller())
    store.many["a"] = 10
    clock.now = 61
    assert await may(quota, store, A)
    assert len(store.asked) == 3


async def test_each_kind_of_what_a_tenant_has_is_counted_by_itself() -> None:
    quota = Quota(Limits(tenant_conversations=1, tenant_tasks=2, tenant_users=3, tenant_items=4), Clock())
    for kind, most in (("session", 1), ("task", 2), ("user", 3), ("item", 4)):
        assert [await may(quota, Counted(), A, kind) for _ in range(6)].count(True) == most
    assert await may(Quota(Limits(), Clock()), Counted(), A, "item", 10**6), "by default there is no bound"
    several = Quota(Limits(tenant_items=4), Clock())
    assert [await may(several, Counted(), A, "item", more) for more in (3, 2, 1, 0, 1)] == [
        True,
        False,
        True,
        True,
        False,
    ]


async def test_who_comes_while_a_tenant_is_counted_waits_for_the_count() -> None:
    store, quota = Counted(a=8), Quota(Limits(tenant_conversations=10), Clock())
    store.going_on.clear()
    asking = [asyncio.create_task(may(quota, store, A)) for _ in range(20)]
    await asyncio.sleep(0)
    store.going_on.set()
    assert sum(await asyncio.gather(*asking)) == 2
    assert len(store.asked) == 1


# Tenants within tenants


def within(many: int) -> list[Caller]:
    """Callers of as many tenants within A, and within each other."""
    return [Caller(prefix=f"a:{'x:' * (number % 30)}{number}:") for number in range(many)]


def test_tenants_within_a_tenant_have_its_rates_together() -> None:
    """Its admin makes as many as it likes."""
    rates = Rates(Limits(tenant_requests=2, tenant_bytes=100), Clock())
    served = 0
    for caller in within(500):
        with contextlib.suppress(HTTPException):
            rates.ask(caller)
            served += 1
    assert served == 20
    refused(rates, A)
    assert rates.headers(Caller(prefix="a:new:"))["RateLimit"].startswith('"requests";r=0;t=10')
    rates.ask(B)
    one, other = Rates(Limits(tenant_bytes=100), Clock()), Caller(prefix="a:y:")
    one.count(other, 1_500)
    refused(one, A)
    refused(one, Caller(prefix="a:z:"))
    one.ask(B)


def test_a_tenant_within_another_has_no_more_than_its_own() -> None:
    clock = Clock()
    rates = Rates(Limits(tenant_requests=2), clock)
    inner, beside = Caller(prefix="a:x:"), Caller(prefix="a:y:")
    for _ in range(20):
        rates.ask(inner)
    clock.now = 5
    for _ in range(10):
        rates.ask(beside)
    refused(rates, inner)
    refused(rates, beside)


def test_whatever_tokens_are_made_so_many_buckets_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_TENANTS", 300)
    rates = Rates(Limits(tenant_requests=10**6), Clock())
    for caller in within(450):
        rates.ask(caller)
    assert len(rates) <= 300
    assert rates.traffic.busiest(1)[0].prefix == "a:"
    assert rates.traffic.busiest(1)[0].requests == 450


def test_tenants_within_a_tenant_have_its_places_together() -> None:
    places = Shares(100, "requests")
    for caller in within(200):
        with contextlib.suppress(HTTPException):
            places.take(caller)
    assert len(places) == 50, "one alone gets half of them"
    places.take(B)
    taken = within(50)
    for caller in taken:
        places.leave(caller)
    places.leave(B)
    assert len(places) == 0
    places.take(A)


async def test_tenants_within_a_tenant_have_its_quotas_together() -> None:
    quota, store = Quota(Limits(tenant_conversations=10, tenant_tasks=10, tenant_items=10), Clock()), Counted()
    for kind in ("session", "task", "item"):
        assert [await may(quota, store, caller, kind) for caller in within(60)].count(True) == 10
    assert not await may(quota, store, A)
    assert await may(quota, store, B)


def test_tenants_within_a_tenant_wait_for_each_other() -> None:
    assert {caller.party for caller in within(50)} == {A.party}
    assert {caller.tenant for caller in within(50)} == {"a:"}
    assert A.party != B.party != Caller(actor="b:").party


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
