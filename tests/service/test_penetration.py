"""What an attacker with a token of one tenant found open once. Law: each way has a test that it is closed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
from typing import Any

import httpx
import pytest
from below import until
from reaping import Sweeps
from starlette.requests import Request
from starlette.types import Message
from tenants import Served, opened

from distributed_state.cold import search_store
from distributed_state.errors import NotFound, WarmUnavailable
from distributed_state.programs.inspector import PATH, inspector
from distributed_state.programs.inspector.pages import Refused, form
from distributed_state.programs.service import Access, answers, app, requests
from distributed_state.programs.service.limits import Limits
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.running import mount
from distributed_state.search import querying
from distributed_state.values import access_tokens
from distributed_state.values.access_tokens import RIGHTS
from distributed_state.warm.held_leases import CarriedLease

HI = {"role": "user", "content": "hi"}
ONE = "/v1/conversations/acme:{}"


# Quotas


BEGINNING: list[tuple[str, str, dict[str, Any]]] = [
    ("PATCH", "/fields", {"set": {"n": 1}}),
    ("PUT", "/fields/n", {"value": 1}),
    ("POST", "/messages", {"messages": [HI]}),
    ("PUT", "/messages", {"messages": [HI]}),
    ("PATCH", "/items/c", {"put": {"1": 1}}),
    ("PATCH", "/tags", {"tag": {"a": ["b"]}}),
    ("POST", "/checkpoints", {"label": "x"}),
    ("PUT", "/lifetime", {"idle": 60}),
    ("POST", "/turns", {"messages": [HI]}),
    ("POST", "/changes", {"key": "n", "add": 1}),
    ("POST", "/writes", {"set": {"n": 1}}),
]


@pytest.mark.parametrize(
    "condition",
    [{"If-None-Match": "*"}, *(pytest.param(each, marks=pytest.mark.wide) for each in ({}, {"If-Match": '"0"'}))],
)
async def test_no_condition_begins_more_conversations_than_a_tenant_may_have(condition: dict[str, str]) -> None:
    """`If-None-Match: *` said of many operations that they begin one, and these were not counted."""
    async with opened() as store:
        served = Served(store, Access(tokens=True), limits=Limits(tenant_conversations=1))
        root = await served.token("", *RIGHTS)
        more = []
        for number, (method, path, body) in enumerate(BEGINNING):
            mine = await served.token(f"t{number}:", *RIGHTS)
            for token in (mine, root):
                headers = condition | {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
                for at in range(3):
                    one = f"/v1/conversations/t{number}:{at}.{token == root}{path}"
                    await served.http.request(method, one, json=body, headers=headers)
            versions = [await store.session(f"t{number}:{at}.False").version() for at in range(3)]
            by_root = await store.session(f"t{number}:2.True").version()
            if sum(map(bool, versions)) != bool(by_root):  # one, if it begins any; of all tenants, any number
                more.append((method, path, versions, by_root))
        assert not more


async def test_an_admin_has_no_more_by_tokens_of_tenants_within_its_own() -> None:
    """60 conversations were made where 10 were allowed, and 500 of 500 requests passed where 40 should have."""
    async with opened() as store:
        served = Served(store, Access(tokens=True), limits=Limits(tenant_requests=4, tenant_conversations=5))
        began = time.monotonic()
        admin, other = await served.token("acme:", *RIGHTS), await served.token("other:", *RIGHTS)
        made = []
        for number in range(10):
            answer = await served.ask(
                "POST", "/v1/tokens", admin, json={"tenant": f"acme:{number}", "rights": ["read", "write"]}
            )
            made.append(answer.json()["token"])
        found = [(await served.ask("POST", "/v1/conversations", token, json={})).status_code for token in made * 5]
        assert found.count(201) == 5
        assert len(await store.sessions(prefix="acme:", limit=500)) == 5
        passed = len(found) - found.count(429)
        read = [(await served.ask("GET", "/v1/caller", token)).status_code for token in made * 5]
        assert read.count(200) <= 40 + 4 * (time.monotonic() - began) - len(made) - passed, "ten seconds' worth"
        assert (await served.ask("POST", "/v1/conversations", other, json={})).status_code == 201


@pytest.mark.parametrize("kind", ["tasks", "users", "items"])
async def test_tasks_users_and_items_count_towards_the_quota_of_a_tenant(kind: str) -> None:
    async with opened() as store:
        limits = Limits(**{f"tenant_{kind}": 2})  # type: ignore[arg-type]
        served = Served(store, Access(tokens=True), limits=limits)
        token, inner = await served.token("acme:", *RIGHTS), await served.token("acme:eu:", *RIGHTS)
        root = await served.token("", *RIGHTS)
        await store.session("acme:c").create()

        async def put(name: str, by: str = token) -> int:
            if kind == "items":
                path, body = "/v1/conversations/acme:c/items/notes", {"put": {name: 1}}
            else:
                path, body = f"/v1/{kind}/acme:eu:{name}/fields", {"set": {"n": 1}}
            return (await served.ask("PATCH", path, by, json=body)).status_code

        assert [await put(name) for name in ("a", "b", "a", "b", "c")] == [200, 200, 200, 200, 429]
        if kind != "items":
            assert await put("d", inner) == 429, "what lies within counts as well"
        assert await put("d", root) == 200
        # As the archive has it.
        await store.admin.archive()
        served = Served(store, Access(tokens=True), limits=limits)
        assert [await put(name) for name in ("a", "e")] == [200, 429]


async def test_what_was_begun_is_answered_again_at_the_limit() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True), limits=Limits(tenant_conversations=2))
        token = await served.token("acme:", *RIGHTS)

        async def begin(path: str, key: str) -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "Idempotency-Key": key}
            answer = await served.http.post(f"/v1/conversations{path}", json={}, headers=headers)
            return answer.status_code, answer.json().get("id")

        first = await begin("", "c")
        fork = await begin(f"/{first[1]}/forks", "f")
        assert [first[0], fork[0]] == [201, 201]
        assert [await begin("", "c"), await begin(f"/{first[1]}/forks", "f")] == [first, fork]
        assert [await begin("", "c2"), await begin(f"/{first[1]}/forks", "f2")] == [(429, None)] * 2


@pytest.mark.parametrize("condition", [{}, {"If-Match": "*"}, {"If-Match": '"2"'}], ids=["", "any", "version"])
async def test_no_condition_begins_more_expired_conversations_than_a_tenant_may_have(condition: dict[str, str]) -> None:
    async with opened(archiver=False, expired="begin again") as store:
        ids = [f"acme:{number}" for number in range(len(BEGINNING))]
        for id in ids:
            await store.session(id, idle=0.001).set("n", 1)
        sweeps = Sweeps(store)
        await until(lambda: all_expired(sweeps, len(ids)))
        await store.session("acme:live").set("n", 1)
        await store.admin.archive()
        served = Served(store, Access(tokens=True), limits=Limits(tenant_conversations=1))
        token = await served.token("acme:", *RIGHTS)
        for id, (method, path, body) in zip(ids, BEGINNING, strict=True):
            place = f"/v1/conversations/{id}{path}"
            headers = condition | {"Authorization": f"Bearer {token}"}
            answer = await served.http.request(method, place, json=body, headers=headers)
            assert answer.status_code == 429, path


async def all_expired(sweeps: Sweeps, count: int) -> bool:
    await sweeps()
    return sweeps.reaper.expired == count


# What is said of the inside


async def test_who_is_nobody_is_told_no_address_by_readyz(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: Any) -> None:
        raise WarmUnavailable("10.0.0.7:6379: the user worker has no permissions")

    monkeypatch.setattr(app, "any_server", away)
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        public = await served.ask("GET", "/readyz")
        assert public.status_code == 503
        assert public.json()["redis"] == "cannot be used now; see the log"
        assert "10.0.0.7" not in public.text
        transport = httpx.ASGITransport(served.service.ops, client=("10.1.2.3", 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as operator:
            assert "10.0.0.7" in (await operator.get("/readyz")).text, "on the port of operators all is said"
        own = Served(store, Access())
        assert "10.0.0.7" in (await own.ask("GET", "/readyz")).text, "and on the operator's own machine"


async def test_a_log_does_not_show_a_lease_that_somebody_holds(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever reads logs could have written under it."""
    caplog.set_level(logging.INFO)
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        mine = await served.token("acme:", *RIGHTS)
        await store.session("acme:c").set("n", 1)
        taken = await served.ask("POST", f"{ONE.format('c')}/lease", mine, json={})
        held = base64.urlsafe_b64decode(taken.json()["lease"] + "==").decode()
        for lease in (CarriedLease("x1@1-a:r.1.0"), CarriedLease(held)):
            headers = {"Authorization": f"Bearer {mine}", "Lease": records.show_lease(lease)}
            path = f"{ONE.format('c')}/fields/n"
            answer = await served.http.request("PUT", path, json={"value": 2}, headers=headers)
            assert answer.is_success is (lease.lock_value == held)
    refused = [each for each in caplog.messages if "no longer holds the lease" in each]
    assert refused, "a control: it is logged, as what was held"
    assert not [each for each in caplog.messages if held.rpartition(".")[2] in each]


async def test_a_form_that_does_not_come_whole_is_no_fault_to_be_logged() -> None:
    """Anybody, without a token, had a trace of it written to the log for each."""

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    sent = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}
    headers = [(name.encode(), value.encode()) for name, value in sent.items()]
    with pytest.raises(Refused, match="before the whole form arrived"):
        await form(Request({"type": "http", "method": "POST", "headers": headers}, gone))


async def test_no_request_is_led_to_a_host_that_it_names_itself() -> None:
    """Starlette led to `http://` and whatever `Host` said, of a path with one '/' too many."""
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        mount(served.service.app, PATH, inspector(served.service.app))
        for path in ("/v1/conversations/", f"{ONE.format('c')}/", "/healthz/", f"{PATH}/fleet/", f"{PATH}/sign-in/"):
            answer = await served.http.get(path, headers={"Host": "evil.example"})
            assert answer.status_code == 404, path
            assert "evil" not in str(answer.headers)
        answer = await served.http.get(PATH, headers={"Host": "evil.example"})
        assert (answer.status_code, answer.headers["Location"]) == (307, f"{PATH}/")


# Outages


async def test_a_filter_that_nothing_fits_has_the_index_searched_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a hundred times, for a request of fifty bytes."""
    looked: list[int] = []

    def counted(*given: Any) -> search_store.Page:
        looked.append(given[1].limit)
        return search_store.Page([], given[1].limit, True)

    monkeypatch.setattr(search_store, "search", counted)
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        mine = await served.token("acme:", *RIGHTS)
        asked = {"query": "word", "filter": {"nobody": "has this"}}
        assert (await served.ask("POST", "/v1/search", mine, json=asked)).json() == {"hits": []}
    assert 1 < len(looked) <= 6
    assert sum(looked) >= 10_000, "all that it ever looks at"


async def test_searches_of_a_tenant_wait_for_its_others_and_for_nobody_elses() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        mine, other = [await served.token(prefix, *RIGHTS) for prefix in ("acme:", "bob:")]
        async with contextlib.AsyncExitStack() as held:
            for _ in range(requests._SEARCHES):
                await held.enter_async_context(requests.searching("prefix acme:"))
            assert (await served.ask("POST", "/v1/search", other, json={"query": "x"})).status_code == 200
            waiting = asyncio.create_task(served.ask("POST", "/v1/search", mine, json={"query": "x"}))
            assert (await served.ask("GET", "/v1/caller", mine)).status_code == 200
            assert (await served.ask("POST", "/v1/search", other, json={"query": "y"})).status_code == 200
            assert not waiting.done()
        assert (await waiting).status_code == 200


@pytest.mark.parametrize(("together", "held_up"), [(querying._TOGETHER, False), (10**9, True)])
async def test_a_search_among_thousands_lets_others_go_between(
    monkeypatch: pytest.MonkeyPatch, together: int, held_up: bool
) -> None:
    row = search_store.Row("session:acme%3Ac", None, "message", b"", b"0", 1, "text", b'{"role":"user"}', 1.0)
    monkeypatch.setattr(search_store, "search", lambda *_: search_store.Page([row] * 1000, 10_000, False))
    monkeypatch.setattr(querying, "_TOGETHER", together)
    at_once, most = 0, 0

    def fits(_: Any) -> bool:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        return False

    async def others() -> None:
        nonlocal at_once
        while True:
            at_once = 0
            await asyncio.sleep(0)

    monkeypatch.setattr(querying, "_filter", lambda _: fits)
    async with opened() as store:
        beside = asyncio.create_task(others())
        assert await store.search("text", filter={"x": 1}) == []
        beside.cancel()
    assert (most > querying._PAGE * 3) is held_up


def test_the_part_of_a_long_text_that_is_shown_is_looked_for_in_its_beginning() -> None:
    """64 words that are nowhere, in a hundred hits of 200 KB, held the worker up for seconds."""
    filler = "lorem ipsum " * 500
    assert "needle" in querying.snippet(f"{filler}needle {filler}", "nowhere needle")
    assert querying.snippet("x" * 20_000 + " needle", "needle").startswith("xxx")
    assert "first" in querying.snippet(f"{filler}first {filler} second {filler}", "second first")


async def test_who_asks_for_what_is_not_set_up_fills_no_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(search=False) as store:
        served = Served(store, Access(tokens=True))
        mine = await served.token("acme:", *RIGHTS)
        await store.session("acme:c").create()
        monkeypatch.setattr(answers, "_logged", {})
        for _ in range(5):
            assert (await served.ask("POST", "/v1/search", mine, json={"query": "x"})).status_code == 501
            asked = {"set": {"n": 1}, "durability": "fsynced"}
            answer = await served.ask("POST", f"{ONE.format('c')}/writes", mine, json=asked)
            assert (answer.status_code, answer.json()["error"]) == (501, "ConfigurationError")
    lines = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(lines) == 2, [each.getMessage() for each in lines]


# Tokens


async def test_what_a_stolen_token_made_is_revoked_with_it() -> None:
    """Its thief made himself another one first, and stayed."""
    async with opened() as store:
        served, beside = [Served(store, Access(tokens=True)) for _ in range(2)]
        tokens = store._lifecycle.tiers().cold.access_tokens
        stolen, mine = await served.token("acme:", *RIGHTS), await served.token("acme:", *RIGHTS)

        async def make(token: str, where: Served = served) -> httpx.Response:
            return await where.ask("POST", "/v1/tokens", token, json={"rights": ["read", "admin"]})

        async def left(*texts: str) -> list[float | None]:
            ids = [access_tokens.id_of(each) or "" for each in texts]
            found = await store._lifecycle.tiers().port.sql(tokens.find, ids)
            return [found[each].left for each in ids]

        child, own = [(await make(each)).json()["token"] for each in (stolen, mine)]
        assert (await served.ask("GET", "/v1/tokens", mine)).json()["tokens"][2]["made_by"] is not None
        grandchild = (await make(child)).json()["token"]
        assert (await beside.ask("GET", "/v1/caller", stolen)).status_code == 200
        assert 0 not in await left(stolen, child, grandchild, own)
        gone = await served.ask("DELETE", f"/v1/tokens/{access_tokens.id_of(stolen)}", mine)
        assert gone.json()["revoked"] is not None
        assert (await left(stolen, child, grandchild)) == [0, 0, 0]
        assert 0 not in await left(own, mine), "what others made stays"
        assert (await beside.ask("GET", "/v1/caller", stolen)).status_code == 200, "known there for a moment more"
        assert (await make(stolen, beside)).status_code == 401, "in which it makes nothing that would stay"
        await store._lifecycle.tiers().port.sql(tokens.revoke_alone, access_tokens.id_of(mine))
        assert [each == 0 for each in await left(mine, own)] == [True, False]
        with pytest.raises(NotFound):
            await store._lifecycle.tiers().port.sql(tokens.revoke_alone, "0" * 16)


async def test_a_stream_that_only_its_head_is_asked_of_has_an_end() -> None:
    """A proxy takes the answer for whole, and sends the next client's request behind a stream that never ends."""
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        mount(served.service.app, PATH, inspector(served.service.app))
        mine = await served.token("acme:", *RIGHTS)
        async with asyncio.timeout(10):
            for path in ("/v1/events", f"{PATH}/live/events"):
                answer = await served.ask("HEAD", path, mine)
                assert answer.status_code == 200, path
        assert not served.service._streams


# Truth in statuses


async def test_what_was_deleted_is_gone_and_no_conflict_also_under_a_key() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        mine = await served.token("acme:", *RIGHTS)
        await store.session("acme:c").set("n", 1)
        await store.delete("acme:c")
        found = {}
        for method, path, body in BEGINNING:
            for key in ({}, {"Idempotency-Key": f"key of {path}"}):
                headers = {"Authorization": f"Bearer {mine}"} | key
                asked = await served.http.request(method, ONE.format("c") + path, json=body, headers=headers)
                found[method, path, *key] = asked.json().get("error", "written")
        assert set(found.values()) <= {"Deleted", "written"}, found
        assert [path for (_, path, *_), said in found.items() if said == "Deleted"], "a control"
        conflict = {"expect": {"n": 2}, "set": {"n": 3}}
        await store.session("acme:d").set("n", 1)
        there = await served.ask("PATCH", f"{ONE.format('d')}/fields", mine, json=conflict)
        assert (there.status_code, there.json()["error"]) == (409, "Conflict")
        absent = await served.ask("PATCH", f"{ONE.format('e')}/fields", mine, json=conflict)
        assert absent.status_code == 404
