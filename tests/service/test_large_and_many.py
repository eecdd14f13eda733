"""What one tenant can make a worker do for a few bytes: wait in its places, and read what is large."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from below import until
from tenants import Served, opened

from distributed_state.programs.service import Access, limits, requests
from distributed_state.programs.service.authentication import RIGHTS
from distributed_state.programs.service.limits import Limits

SMALL = Limits(answer=20_000)
LARGE = {"role": "user", "content": "x" * 6_000}
C = "/v1/conversations/acme:c"


@asynccontextmanager
async def running(*asked: Any) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """These requests, for as long as the block runs."""
    tasks = [asyncio.create_task(each) for each in asked]
    try:
        yield tasks
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def refused(tasks: list[asyncio.Task[httpx.Response]]) -> int:
    return sum(each.done() and each.result().status_code == 429 for each in tasks)


@pytest.mark.parametrize(("prefix", "others", "served"), [("acme:", 6, 200), ("", 2, 429)])
async def test_a_tenant_that_waits_leaves_places_for_another(prefix: str, others: int, served: int) -> None:
    """Of eight places it gets four. A caller of all tenants has no share, and takes all."""
    async with opened() as store:
        here = Served(store, Access(tokens=True), limits=Limits(requests=8))
        mine, other = await here.token(prefix, *RIGHTS), await here.token("b:", *RIGHTS)
        await store.session("acme:c").set("n", 1)
        async with store.session("acme:c").lock():
            waiting = [here.ask("POST", f"{C}/lease", mine, json={"wait": 30}) for _ in range(10)]
            async with running(*waiting) as tasks:
                await until(lambda: refused(tasks) == others, 20)
                found = await here.ask("POST", "/v1/conversations", other, json={})
                assert found.status_code == (201 if served == 200 else served), found.text


async def test_a_tenant_that_hears_much_leaves_streams_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as store:
        here = Served(store, Access(tokens=True), limits=Limits(streams=4))
        mine, other = await here.token("acme:", *RIGHTS), await here.token("b:", *RIGHTS)

        async def received() -> int:
            async with running(*(here.ask("GET", "/v1/events", mine) for _ in range(5))) as tasks:
                await until(lambda: refused(tasks) >= 1, 20)
                async with running(here.ask("GET", "/v1/events", other)) as (one,):
                    await asyncio.wait((one,), timeout=0.1)
                    return one.result().status_code if one.done() else 200

        assert await received() == 200
        monkeypatch.setattr(limits.Shares, "take", _first_come)
        assert await received() == 429


def _first_come(self: limits.Shares, caller: Any) -> None:
    if len(self) >= 4:
        raise limits.HTTPException(429, "full")
    self._all += 1
    self._taken.update(caller.tenants)


async def test_numbers_that_python_does_not_read_or_add_are_no_fault_of_the_worker() -> None:
    async with opened() as store:
        here = Served(store, Access(tokens=True))
        mine = await here.token("acme:", *RIGHTS)
        await store.session("acme:c").set("n", 10**400)
        for path in ("versions", "messages"):
            assert (await here.ask("GET", f"{C}/{path}/{'9' * 4301}", mine)).status_code == 404
        changed = await here.ask("POST", f"{C}/changes", mine, json={"key": "n", "add": 0.5})
        assert (changed.status_code, changed.json()["error"]) == (422, "InvalidValue")


async def test_a_tenant_copies_records_one_by_one_and_others_meanwhile() -> None:
    running_now = dict.fromkeys(("a:", "b:", ""), 0)
    most = dict(running_now)

    async def copy(tenant: str) -> None:
        async with requests.copying(tenant):
            running_now[tenant] += 1
            most[tenant] = max(most[tenant], running_now[tenant])
            await asyncio.sleep(0)
            running_now[tenant] -= 1

    await asyncio.gather(*(copy(tenant) for tenant in ("a:", "a:", "b:", "a:", "", "", "b:")))
    assert most == {"a:": 1, "b:": 1, "": 1}


@pytest.mark.parametrize(("path", "given"), [("forks", {"id": "acme:d"}), ("rollback", {"version": 1})])
async def test_forks_and_rollbacks_of_a_tenant_wait_for_its_others(path: str, given: dict[str, Any]) -> None:
    async with opened() as store:
        here = Served(store, Access(tokens=True))
        mine = await here.token("acme:", *RIGHTS)
        await store.session("acme:c").set("n", 1)
        async with requests.copying("prefix b:"):
            assert (await here.ask("POST", f"{C}/{path}", mine, json=given)).is_success
        given = given | ({"id": "acme:e"} if "id" in given else {})
        async with (
            requests.copying("prefix acme:"),
            running(here.ask("POST", f"{C}/{path}", mine, json=given)) as (one,),
        ):
            assert (await here.ask("GET", C, mine)).is_success
            assert not one.done()
