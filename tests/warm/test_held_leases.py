"""Leases as an operator sees them: who holds what, who waits, and how one is ended or taken over. Law: G2 holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any

import pytest
from below import keys_of, redis_of, tiers, until
from controls import sabotage
from sync_api import Blocking
from tenants import Served, opened

from distributed_state import AccessDenied, AsyncStateStore, Fenced, InvalidValue, LockTimeout
from distributed_state.programs.service import Access
from distributed_state.results import HeldLease
from distributed_state.warm.held_leases import HeldLeases
from distributed_state.warm.lease import AsyncLease


def elsewhere(work: Any) -> asyncio.Task[Any]:
    """Run it in a task that inherits no lease."""
    return asyncio.create_task(work, context=Context())


@asynccontextmanager
async def held(session: Any, **options: Any) -> AsyncIterator[list[str]]:
    """Somebody else holds the record until the block ends, and finds out what it can still write then."""
    taken, leave = asyncio.Event(), asyncio.Event()
    outcome: list[str] = []

    async def hold() -> None:
        lease = session.lock(**options)
        await lease.acquire()
        taken.set()
        await leave.wait()
        try:
            await session.set("by", "the first")
            outcome.append("written")
        except Fenced:
            outcome.append("refused")
        finally:
            await lease.release()

    task = elsewhere(hold())
    await taken.wait()
    try:
        yield outcome
    finally:
        leave.set()
        await task


async def listed(store: Any, **options: Any) -> list[HeldLease]:
    found: list[HeldLease] = await store.admin.leases(**options)
    return found


async def one(store: Any) -> HeldLease:
    (found,) = await listed(store)
    return found


def members(store: Any, id: str) -> int:
    """How many the sorted set of a record's partition has."""
    with redis_of(store) as client:
        return int(client.zcard(keys_of(store, id).leases))


async def test_a_lease_is_listed_while_it_is_held(store: Any) -> None:
    session = store.session("c:1")
    assert await listed(store) == []
    before = await store.time()
    async with session.lock(ttl=30) as lease:
        found = await one(store)
        assert (found.scope, found.record_id, found.kind, found.token) == ("session", "c:1", "lock", lease.token)
        assert (found.replica, found.waiting, found.waiters) == (store.replica, 0, ())
        # Its own clock gave it: a token is never less than the one before it, so it may be a little ahead.
        assert before - 1 <= found.since <= await store.time() + 1
        assert 0 < found.ends - await store.time() <= 31
    assert await listed(store) == []
    assert members(store, "c:1") == 0
    async with store.user("ada").lock(advisory=True), session.turn():
        assert sorted((each.scope, each.kind) for each in await listed(store)) == [
            ("session", "turn"),
            ("user", "advisory"),
        ]
    assert await listed(store) == []


async def test_those_who_wait_are_listed_in_order(store: Any) -> None:
    session = store.session("c")
    async with held(session):
        waiting = []
        for number in range(3):
            waiting.append(elsewhere(take(session)))
            await until(lambda number=number: queued(store, number + 1))
        found = await one(store)
        assert found.waiting == 3
        assert [each.replica for each in found.waiters] == [store.replica] * 3
        since = [each.since for each in found.waiters]
        assert since == sorted(since)
        assert since[0] > found.since
    await asyncio.gather(*waiting)


async def take(session: Any) -> None:
    async with session.lock(wait=20):
        pass


async def queued(store: Any, number: int) -> bool:
    return (await one(store)).waiting == number


async def test_pages_have_all_of_them_once_the_longest_held_first(store: Any) -> None:
    sessions = [store.session(f"p{number:02}") for number in range(23)]
    leases = [each.lock() for each in [*sessions, store.user("p")]]
    for lease in leases:
        await lease.acquire()
    try:
        for limit in (1, 5, 100):
            found, after = list[HeldLease](), None
            while page := await listed(store, limit=limit, after=after):
                assert len(page) <= limit
                found += page
                after = page[-1].cursor
            assert [each.token for each in found] == sorted(lease.token for lease in leases)
        assert [each.record_id for each in await listed(store, scope="user")] == ["p"]
        some = await listed(store, prefix="p1", limit=3)
        assert [each.record_id for each in some] == ["p10", "p11", "p12"]
        assert len(await listed(store, prefix="p1", after=some[-1].cursor)) == 7
        assert await listed(store, prefix="x") == []
    finally:
        for lease in leases:
            await lease.release()
    for wrong in ({"limit": 0}, {"limit": 1001}, {"after": "x"}, {"prefix": 1}, {"scope": "x"}):
        with pytest.raises(InvalidValue):
            await store.admin.leases(**wrong)


async def test_a_holder_whose_lease_was_ended_writes_nothing(store: Any) -> None:
    session = store.session("c")
    await session.set("by", "nobody")
    async with held(session) as outcome:
        token = (await one(store)).token
        assert await store.admin.end_lease("c", token + 1) is False
        assert await store.admin.end_lease("other", token) is False
        assert (await one(store)).token == token
        assert await store.admin.end_lease("c", token) is True
        assert await store.admin.end_lease("c", token) is False
        assert await listed(store) == []
        await session.set("by", "the next")
    assert outcome == ["refused"]
    assert await session.get("by", fresh=True) == "the next"
    for wrong in (0, -1, 10**18, True, "1"):
        with pytest.raises(InvalidValue):
            await store.admin.end_lease("c", wrong)


async def test_who_waits_comes_after_a_lease_that_was_ended(store: Any) -> None:
    session = store.session("c")
    async with held(session):
        waiter = elsewhere(take(session))
        await until(lambda: queued(store, 1))
        assert await store.admin.end_lease("c", (await one(store)).token)
        await asyncio.wait_for(waiter, 10)


async def taken_over_by_its_token(store: Any) -> None:
    """Somebody gives the token of another lease, and then that of the one which is held."""
    session = store.session("c")
    async with held(session) as outcome:
        first = await one(store)
        with pytest.raises(LockTimeout):
            async with session.lock(wait=0, take_over=first.token + 1):
                pass
        async with session.lock(wait=0, take_over=first.token) as mine:
            assert mine.token > first.token
            await session.set("by", "the operator")
            assert (await one(store)).token == mine.token
    assert outcome == ["refused"]
    assert await session.get("by", fresh=True) == "the operator"


async def test_a_lease_is_taken_over_from_its_holder_alone(store: Any) -> None:
    await taken_over_by_its_token(store)


@pytest.mark.only(api="asyncio")
async def test_without_the_comparison_of_tokens_it_is_taken_from_anybody(store: Any) -> None:
    """The negative control."""
    compared = "string.sub(held, 2, #seize + 1) == seize"
    with sabotage("acquire", compared, "true"), pytest.raises(pytest.fail.Exception):
        await taken_over_by_its_token(store)


async def test_a_turn_that_was_taken_over_is_ended_and_wrote_nothing(store: Any) -> None:
    session = store.session("c")
    inside, leave = asyncio.Event(), asyncio.Event()

    async def turn() -> None:
        async with session.turn(request_id="r") as running:
            running["a"] = 1
            inside.set()
            await leave.wait()

    task = elsewhere(turn())
    await inside.wait()
    found = await one(store)
    assert found.kind == "turn"
    assert await store.admin.end_lease("c", found.token)
    leave.set()
    with pytest.raises(Fenced):
        await task
    assert await session.get("a", fresh=True) is None


async def test_what_ended_by_itself_is_neither_listed_nor_kept(store: Any) -> None:
    sessions = [store.session(f"gone{number}") for number in range(3)]
    leases: list[AsyncLease] = [each.lock() for each in sessions]
    for lease in leases:
        await lease.acquire()
    with redis_of(store) as client:
        for number in range(2):
            client.delete(keys_of(store, f"gone{number}").lock)
        assert sum(members(store, f"gone{number}") > 0 for number in range(2)) == 2, "it is what tidying is for"
        keys = tiers(store).keys
        look = HeldLeases(tiers(store).port, keys, tiers(store).clock)

    async def tidied() -> int:
        await look.tidy(range(keys.partitions), 10)
        with redis_of(store) as client:
            return sum(int(client.zcard(keys.partition(each).leases)) for each in range(keys.partitions))

    if not isinstance(store, Blocking):
        assert await tidied() == 1
    assert [each.record_id for each in await listed(store)] == ["gone2"]
    assert members(store, "gone2") >= 1
    for lease in leases:
        await lease.release()


@pytest.mark.only(api="asyncio")
async def test_a_lease_of_an_epoch_that_is_over_is_not_shown(store: Any) -> None:
    session = store.session("c")
    async with held(session):
        keys = keys_of(store, "c")
        with redis_of(store) as client:
            value = client.get(keys.lock).decode()
            before, _, rest = value.partition("@")
            client.set(keys.lock, f"{before}@another:{rest.partition(':')[2]}", keepttl=True)
        assert await listed(store) == []


async def test_an_erased_record_leaves_no_trace_among_the_leases(store: Any) -> None:
    session = store.session("c")
    await session.set("a", 1)
    lease = session.lock()
    await lease.acquire()
    with redis_of(store) as client:
        client.delete(keys_of(store, "c").lock)
    await lease.release()
    with redis_of(store) as client:
        client.zadd(keys_of(store, "c").leases, {keys_of(store, "c").record: 17})
    await store.erase(session.id)
    assert members(store, "c") == 0


@pytest.mark.only(api="asyncio", warm="embedded")
async def test_only_an_operator_may_look_at_leases_or_end_them() -> None:
    async with AsyncStateStore.open(archive="memory", access=lambda asked: asked.action != "admin") as store:
        for call in (store.admin.leases(), store.admin.end_lease("c", 1)):
            with pytest.raises(AccessDenied):
                await call
        with pytest.raises(AccessDenied):
            store.session("c").lock(take_over=1)
        store.session("c").lock()


# Over HTTP


async def test_an_operator_of_a_tenant_sees_and_takes_its_leases_alone() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        every, acme, writer = [
            await served.token(prefix, *rights)
            for prefix, rights in (
                ("", ["read", "write", "admin"]),
                ("acme:", ["write", "admin"]),
                ("acme:", ["write"]),
            )
        ]

        async def held_by(id: str) -> dict[str, Any]:
            taken = await served.ask("POST", f"/v1/conversations/{id}/lease", every, json={"ttl": 60})
            assert taken.status_code == 201, taken.text
            return dict(taken.json())

        async def listed_by(token: str, **query: Any) -> list[str]:
            answer = await served.ask("GET", "/v1/leases", token, params=query)
            assert answer.status_code == 200, answer.text
            return [each["record_id"] for each in answer.json()["leases"]]

        await store.session("acme:c").create({})
        first, other = await held_by("acme:c"), await held_by("evil:c")
        assert await listed_by(every) == ["acme:c", "evil:c"], "the negative control"
        assert await listed_by(acme) == ["acme:c"]
        answer = (await served.ask("GET", "/v1/leases", acme)).json()
        (row,) = answer["leases"]
        assert (row["kind"], row["token"], row["replica"]) == ("client", first["token"], store.replica)
        assert row["since"] <= answer["time"] + 1 <= row["ends"]
        secret = first["lease"]
        assert secret not in str(answer), "whoever reads the list could write under it"
        assert (await served.ask("GET", "/v1/leases", acme, params={"prefix": "evil:"})).status_code == 403
        page = await served.ask("GET", "/v1/leases", every, params={"limit": 1})
        assert (await served.http.get(page.links["next"]["url"], headers={"Authorization": f"Bearer {every}"})).json()[
            "leases"
        ][0]["record_id"] == "evil:c"
        refused = [
            (await served.ask("GET", "/v1/leases", writer)).status_code,
            (await served.ask("DELETE", f"/v1/conversations/acme:c/lease/{first['token']}", writer)).status_code,
            (await served.ask("PUT", f"/v1/conversations/acme:c/lease/{first['token']}", writer, json={})).status_code,
            (await served.ask("DELETE", f"/v1/conversations/evil:c/lease/{other['token']}", acme)).status_code,
            (await served.ask("PUT", f"/v1/conversations/evil:c/lease/{other['token']}", acme, json={})).status_code,
        ]
        assert refused == [403] * 5

        async def written(lease: str) -> int:
            headers = {"Authorization": f"Bearer {every}", "Lease": lease}
            put = await served.http.put("/v1/conversations/acme:c/fields/a", json={"value": 1}, headers=headers)
            return put.status_code

        assert await written(secret) == 200
        wrong = f"/v1/conversations/acme:c/lease/{first['token'] + 1}"
        assert (await served.ask("PUT", wrong, acme, json={})).status_code == 423
        assert (await served.ask("DELETE", wrong, acme)).json() == {"released": False}
        assert (await served.ask("DELETE", f"/v1/conversations/acme:c/lease/{10**39}", acme)).status_code == 422
        assert await written(secret) == 200
        mine = await served.ask("PUT", f"/v1/conversations/acme:c/lease/{first['token']}", acme, json={"ttl": 60})
        assert mine.status_code == 200, mine.text
        assert await written(secret) == 412
        assert await written(mine.json()["lease"]) == 200
        ended = await served.ask("DELETE", f"/v1/conversations/acme:c/lease/{mine.json()['token']}", acme)
        assert ended.json() == {"released": True}
        assert await written(mine.json()["lease"]) == 412
        assert await listed_by(every) == ["evil:c"]
