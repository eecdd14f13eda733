"""Who may what: each operation of the service for each kind of caller, and what one tenant knows of another."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from below import tiers, until
from tenants import OPERATIONS, Served, body_of, opened, path_of

from distributed_state import AsyncStateStore, ConfigurationError
from distributed_state.programs.service import Access, Service, authentication, callers_policy
from distributed_state.programs.service.answers import Positions
from distributed_state.programs.service.authentication import Authentication, Caller, serving
from distributed_state.programs.service.limits import Limits
from distributed_state.programs.service.requests import Operation
from distributed_state.programs.service.resources import records
from distributed_state.records.access import Request as Asked
from distributed_state.values import access_tokens
from distributed_state.values.access_tokens import RIGHTS

HI = {"role": "user", "content": "hi"}


# The table


OF_ALL_TENANTS = {
    "GET /v1/replicas", "GET /v1/partitions", "GET /v1/findings", "GET /v1/branches", "GET /v1/tenants",
    "POST /v1/maintenance/compact", "POST /v1/maintenance/purge",
}  # fmt: skip
NEED_A_LEASE = {name for name in OPERATIONS if name.endswith(("/lease", "POST /v1/conversations/{id}/output"))}
STREAM = "text/event-stream"


def allowed(operation: Operation, other: str, mine: str, admin: str) -> tuple[str, ...]:
    """The tokens with all rights that this operation is asked with. A stream that begins has no end."""
    if operation.media != STREAM:
        return other, mine, admin
    return (other,) if "{id}" in operation.path else ()


@pytest.mark.wide
async def test_each_operation_is_for_those_who_have_its_right_in_its_tenant() -> None:
    """A row for each operation: without a token, without its right, of another tenant, of its own, of all tenants."""
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        lacking = {right: await served.token("acme:", *(set(RIGHTS) - {right})) for right in RIGHTS}
        other, mine, admin = [await served.token(prefix, *RIGHTS) for prefix in ("evil:", "acme:", "")]
        wrong = []
        for number, (name, operation) in enumerate(OPERATIONS.items()):
            id = f"acme:c{number}"
            for record in (store.session(id, user=id), store.user(id), store.task(id)):
                await record.write(set={"n": 1})
            found = [
                await served.ask(operation.method, path_of(operation, id), token, **body_of(operation, id))
                for token in (None, lacking[operation.right], *allowed(operation, other, mine, admin))
            ]
            statuses = [each.status_code for each in found]
            if statuses[:2] != [401, 403]:
                wrong.append((name, statuses))
            if operation.media == STREAM and statuses[2:] not in ([], [403]):
                wrong.append((name, statuses))
            if operation.media == STREAM or "/tokens" in name:  # those are tested below
                continue
            named = "{id}" in operation.path or id in str(body_of(operation, id)) or name in OF_ALL_TENANTS
            if statuses[2] != (403 if named else 200) or (not named and "acme" in found[2].text):
                wrong.append((name, statuses))
            if (statuses[3] == 403) is not (name in OF_ALL_TENANTS) or statuses[4] == 403:
                wrong.append((name, statuses))
            if {401, 422, 500, 501, 503} & {*statuses[3:]} - ({422} if name in NEED_A_LEASE else set()):
                wrong.append((name, [each.text for each in found[3:]]))
        assert wrong == []
        assert len(OPERATIONS) > 60


async def test_tokens_are_made_listed_and_refused_within_a_tenant_and_its_rights() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        mine, other, every = [await served.token(prefix, *RIGHTS) for prefix in ("acme:", "evil:", "")]
        weak = await served.token("acme:", "admin", "read")

        async def make(token: str, **body: Any) -> httpx.Response:
            return await served.ask("POST", "/v1/tokens", token, json={"rights": ["read"], **body})

        made = await make(mine, actor="robot", expires=60)
        assert (made.status_code, made.json()["prefix"], made.headers["cache-control"]) == (201, "acme:", "no-store")
        text, place = made.json()["token"], made.headers["location"]
        assert (await served.ask("GET", "/v1/caller", text)).json()["actor"] == "robot"
        assert (await make(mine, tenant="acme:eu")).json()["prefix"] == "acme:eu:"
        refused = [
            (await make(mine, tenant="evil")).status_code, (await make(mine, tenant="acm")).status_code,
            (await make(weak, rights=["write"])).status_code, (await make(text)).status_code,
        ]  # fmt: skip
        assert refused == [403] * 4, "of others, or more than its maker may"
        wrong = [
            await make(mine, all_tenants=True), await make(every), await make(every, tenant="a/b"),
            await make(mine, rights=[]), await make(mine, rights=["root"]), await make(mine, actor="\0"),
        ]  # fmt: skip
        assert [each.status_code for each in wrong] == [422] * 6
        assert (await make(every, all_tenants=True)).json()["prefix"] == ""
        seen = await served.ask("GET", "/v1/tokens", mine)
        assert {each["prefix"] for each in seen.json()["tokens"]} == {"acme:", "acme:eu:"}
        assert text.partition(access_tokens.id_of(text) or "")[2] not in seen.text
        assert [each["prefix"] for each in (await served.ask("GET", "/v1/tokens", other)).json()["tokens"]] == ["evil:"]
        absent = [
            await served.ask("DELETE", path, other) for path in (place, "/v1/tokens/0123456789abcdef", "/v1/tokens/%00")
        ]
        assert [each.status_code for each in absent] == [404] * 3, "alike, whether there is one or may be one"
        assert (await served.ask("DELETE", place, mine)).json()["revoked"] is not None


async def test_tokens_are_listed_by_pages_within_a_tenant() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        mine, capitals = [await served.token(prefix, *RIGHTS) for prefix in ("acme:", "ACME:")]
        for _ in range(4):
            assert (await served.ask("POST", "/v1/tokens", mine, json={"rights": ["read"]})).status_code == 201
        whole = (await served.ask("GET", "/v1/tokens", mine)).json()
        assert whole["after"] is None
        found, path = [], "/v1/tokens?limit=2"
        while path:
            page = await served.ask("GET", path, mine)
            found += page.json()["tokens"]
            assert page.json()["after"] == (page.json()["tokens"][-1]["id"] if "link" in page.headers else None)
            path = page.links["next"]["url"] if "link" in page.headers else ""
        assert found == whole["tokens"]
        assert len({each["id"] for each in found}) == 5
        assert [each["prefix"] for each in (await served.ask("GET", "/v1/tokens", capitals)).json()["tokens"]] == [
            "ACME:"
        ]
        behind = [f"/v1/tokens?after={id}" for id in (found[0]["id"], "0123456789abcdef", "%00")]
        answers = [(await served.ask("GET", path, capitals)).status_code for path in behind]
        assert answers == [422] * 3, "alike, whether another tenant has one or nobody has"


async def test_a_conversation_that_a_write_begins_counts_as_one_that_is_begun() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True), limits=Limits(tenant_conversations=1))
        token = await served.token("acme:", *RIGHTS)
        asked = [("c1", "writes"), ("c1", "writes"), ("c1", "changes"), ("c2", "writes"), ("c2", "changes")]
        bodies = {"writes": {"set": {"n": 1}}, "changes": {"key": "n", "add": 1}}
        found = [
            (await served.ask("POST", f"/v1/conversations/acme:{id}/{what}", token, json=bodies[what])).status_code
            for id, what in asked
        ]
        assert found == [200, 200, 200, 429, 429]


async def test_two_tokens_of_one_actor_do_not_meet_under_one_key() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        tokens = [await served.token("acme:", *RIGHTS, actor="web") for _ in range(2)]
        key = {"Idempotency-Key": "1"}
        made = []
        for token in (*tokens, tokens[0]):
            headers = {"Authorization": f"Bearer {token}", **key}
            found = await served.http.post("/v1/conversations", json={"fields": {"a": 1}}, headers=headers)
            assert found.status_code == 201, found.text
            assert found.json()["version"] == 1
            fork = await served.http.post(f"{found.headers['location']}/forks", json={}, headers=headers)
            assert fork.status_code == 422, "the key stands for another request"
            made.append(found.json()["id"])
        assert made[0] == made[2] != made[1]
        assert {each[:5] for each in made} == {"acme:"}


async def test_what_is_refused_for_its_right_counts_as_asked() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True), limits=Limits(tenant_requests=0.1))
        token = await served.token("acme:", "read")
        found = [(await served.ask("POST", "/v1/conversations", token, json={})).status_code for _ in range(2)]
        assert found == [403, 429]


async def test_conversations_are_counted_within_the_time_of_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True), limits=Limits(tenant_conversations=1, request=0.05))
        token, over = await served.token("acme:", "write"), threading.Event()
        monkeypatch.setattr(type(store._lifecycle.tiers().cold), "count", lambda *_: over.wait(20))
        async with asyncio.timeout(5):
            assert (await served.ask("POST", "/v1/conversations", token, json={})).status_code == 503
        over.set()


async def test_what_a_body_names_is_held_to_the_tenant_as_well() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        token = await served.token("evil:", *RIGHTS)
        await store.session("evil:c1").write(set={"n": 1})
        await store.session("acme:c1", user="acme:u1").write(append=[HI])
        for path, body in (
            ("conversations", {"user": "acme:u1"}),
            ("conversations", {"id": "acme:c2"}),
            ("conversations/evil:c1/forks", {"id": "acme:c2"}),
            ("search", {"query": "hi", "user": "acme:u1"}),
            ("search", {"query": "hi", "prefix": "acme:"}),
        ):
            assert (await served.ask("POST", f"/v1/{path}", token, json=body)).status_code == 403, body
        for query in ("prefix=acme:", "user=acme:u1"):
            assert (await served.ask("GET", f"/v1/conversations?{query}", token)).status_code == 403
        assert (await served.ask("POST", "/v1/search", token, json={"query": "hi"})).json() == {"hits": []}
        assert not await store.session("acme:c2").exists()


@pytest.mark.parametrize("name", ["GET /v1/conversations/{id}", "PUT /v1/conversations/{id}/fields/{key:path}"])
async def test_an_operation_that_forgets_its_check_is_stopped_by_the_policy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without that it would not be: so the policy is what the table above sees."""
    place = name.split()[1].replace("{id}", "acme:c1").replace("{key:path}", "n")
    monkeypatch.setattr(records, "within", lambda asked, id: id)
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        await store.session("acme:c1").write(set={"n": 1})
        token = await served.token("evil:", *RIGHTS)
        options = {"json": {"value": 2}} if name.startswith("PUT") else {}
        assert (await served.ask(name.split()[0], place, token, **options)).status_code == 403
        monkeypatch.setattr(authentication, "_in_tenant", lambda prefix, request: True)
        assert (await served.ask(name.split()[0], place, token, **options)).status_code == 200


async def test_a_tenant_neither_lists_nor_names_nor_makes_what_is_anothers() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        mine, other = await served.token("acme:", "read", "write"), await served.token("evil:", "read", "write")
        made = (await served.ask("POST", "/v1/conversations", mine, json={"user": "acme:u1"})).json()
        assert made["id"].startswith("acme:")
        for user in ("acme:u1", "acme:", "x", "evil"):
            assert (await served.ask("POST", "/v1/conversations", other, json={"user": user})).status_code == 403, user
        assert (await served.ask("GET", "/v1/conversations", other)).json()["conversations"] == []
        assert (await served.ask("GET", "/v1/conversations?user=acme:u1", other)).status_code == 403
        listed = (await served.ask("GET", "/v1/conversations", mine)).json()["conversations"]
        assert [each["id"] for each in listed] == [made["id"]]
        there = await served.ask("GET", f"/v1/conversations/{made['id']}", other)
        absent = await served.ask("GET", f"/v1/conversations/{made['id']}0", other)
        assert there.status_code == absent.status_code == 403
        told = [each.json() | {"instance": ""} for each in (there, absent)]
        assert told[0] | {"detail": ""} == told[1] | {"detail": ""}
        assert told[0]["detail"] == told[1]["detail"].replace(f"{made['id']}0", made["id"])


async def test_a_listing_that_is_not_narrowed_is_refused_by_the_policy_itself() -> None:
    """So that an operation that forgets the prefix fails, and gives nothing away."""
    allows = callers_policy()

    def may(action: Any, id: str | None, user: str | None, prefix: str | None, *rights: Any) -> bool:
        with serving(Caller("a", "acme:", frozenset(rights))):
            return allows(Asked("a", action, "session", id, None, user, prefix))

    assert may("read", None, None, "acme:", "read")
    assert may("read", None, None, "acme:eu:", "read")
    assert not may("read", None, None, None, "read")
    assert not may("read", None, None, "acme", "read")
    assert not may("read", None, None, "", "read")
    assert not may("read", "acme:1", "evil:u", None, "read")
    assert not may("read", "acme2:1", None, None, "read")
    assert not may("read", "acme:1", None, None, "write", "delete", "events", "admin")
    assert not may("write", "acme:1", None, None, "read", "events", "admin")
    assert not may("lock", "acme:1", None, None, "read", "delete", "admin")
    assert not may("admin", None, None, None, *RIGHTS)
    assert may("admin", None, "acme:u", None, "delete")
    assert not may("admin", "acme:1", None, None, "read", "write", "events")


async def test_the_history_shows_whose_token_it_was() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        token = await served.token("acme:", "write", actor="Zoë")
        headers = {"Authorization": f"Bearer {token}", "X-Actor": "somebody else"}
        await served.http.post("/v1/conversations", json={"id": "acme:c1"}, headers=headers)
        assert [each.actor for each in await store.session("acme:c1").history()] == ["Zoë"]
        nameless = await served.token("acme:", "write", actor="")
        assert (await served.ask("POST", "/v1/conversations", nameless, json={"id": "acme:c2"})).status_code == 201
        (made,) = await store.session("acme:c2").history()
        assert made.actor == f"token:{access_tokens.id_of(nameless)}"


async def test_a_policy_of_ones_own_is_asked_as_well() -> None:
    both = callers_policy(lambda request: request.id != "acme:secret")
    async with AsyncStateStore.open(archive="memory", access=both) as store:
        served = Served(store, Access(tokens=True))
        token = await served.token("", *RIGHTS)
        assert (await served.ask("POST", "/v1/conversations", token, json={"id": "acme:secret"})).status_code == 403
        assert (await served.ask("POST", "/v1/conversations", token, json={"id": "acme:c"})).status_code == 201


async def test_a_turn_asks_the_policy_few_questions() -> None:
    """As many as docs/security.md says."""
    asked: list[tuple[str, str | None]] = []
    both = callers_policy(lambda request: asked.append((request.action, request.field)) is None)
    async with AsyncStateStore.open(archive="memory", access=both) as store:
        served = Served(store, Access(tokens=True))
        token = await served.token("acme:", *RIGHTS)
        await served.ask("POST", "/v1/conversations", token, json={"id": "acme:c"})
        asked.clear()
        turn = {"messages": [HI], "set": {"n": 1}, "request_id": "r"}
        assert (await served.ask("POST", "/v1/conversations/acme:c/turns", token, json=turn)).status_code == 200
        assert len(asked) == 5, asked


@pytest.mark.parametrize("access", [None, lambda _: False, lambda _: True])
async def test_a_store_without_the_policy_is_not_served(access: Any) -> None:
    async with AsyncStateStore.open(archive="memory", access=access) as store:
        with pytest.raises(ConfigurationError, match="callers_policy"):
            Service(authentication=Authentication(Access(tokens=True))).begin(store)


# Events


@pytest.mark.wide
async def test_a_tenant_hears_nothing_of_another_and_a_stream_ends_with_its_token() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        token = await served.token("acme:", "events")
        received: list[bytes] = []
        sent = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not sent.is_set():
                sent.set()
                return {"type": "http.request", "body": b"", "more_body": False}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            received.append(
                message.get("body", b"") if message["type"] == "http.response.body" else b"%d" % message["status"]
            )

        scope = {
            "type": "http", "method": "GET", "path": "/v1/events", "query_string": b"", "http_version": "1.1",
            "headers": [(b"host", b"localhost"), (b"authorization", f"Bearer {token}".encode())],
            "client": ("10.1.2.3", 5), "state": {}, "scheme": "http", "server": ("localhost", 80), "root_path": "",
        }  # fmt: skip
        stream = asyncio.create_task(served.service.app(scope, receive, send))
        await until(lambda: len(received) > 1)
        await store.session("evil:c1").create({"secret": 1})
        await store.emit("order.placed", {"secret": 2}, subject="acme")
        await store.emit("order.placed", {"secret": 3})
        await store.session("acme:c1").create({})
        await until(lambda: b"acme%3Ac1" in b"".join(received))
        text = b"".join(received)
        assert received[0] == b"200"
        assert text.count(b"data: ") == 1
        assert b"evil" not in text
        last = [line.removeprefix(b"id: ").decode() for line in text.splitlines() if line.startswith(b"id: ")][-1]
        plain = Positions(tiers(store).archive_id, "acme:").open(last)
        assert "-" in plain, "it names epochs"
        for place in (plain, Positions(tiers(store).archive_id, "evil:").seal(plain)):
            assert (await served.ask("GET", f"/v1/events?since={place}", token)).status_code == 422
        await served.revoke(token)
        async with asyncio.timeout(10):
            await stream
        await served.service.drain()
        await served.service.close()


# Tokens


async def test_a_stranger_is_told_nothing() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        valid = await served.token("acme:", "read")
        wrong = valid[:-4] + ("AAAA" if valid[-4:] != "AAAA" else "BBBB")
        gone, short = await served.token("acme:", "read"), await served.token("acme:", "read", seconds=0.001)
        await served.revoke(gone)
        unknown = access_tokens.make()[1]
        answers = [
            await served.ask("GET", "/v1/conversations", each) for each in (wrong, gone, short, unknown, "x", "")
        ]
        answers += [
            await served.http.get("/v1/conversations", headers={"Authorization": value})
            for value in (f"Basic {valid}", "Bearer", valid, b"Bearer \xff")
        ]
        twice = [("Host", "localhost"), *[("Authorization", f"Bearer {valid}")] * 2]
        answers.append(await served.http.send(httpx.Request("GET", "http://localhost/v1/conversations", headers=twice)))
        assert {(each.status_code, each.headers["www-authenticate"]) for each in answers} == {(401, "Bearer")}
        assert len({json.dumps(each.json() | {"instance": ""}) for each in answers}) == 1
        assert (await served.ask("GET", "/v1/conversations", valid)).status_code == 200


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


async def test_a_revoked_token_is_refused_within_five_seconds_and_until_then_sql_is_hardly_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened() as store:
        clock = Clock()
        monkeypatch.setattr(authentication, "time", clock)
        served = Served(store, Access(tokens=True))
        token = await served.token("acme:", "read")
        finds = counted(store)
        assert (await served.ask("GET", "/v1/conversations", token)).status_code == 200
        await served.revoke(token)
        statuses = []
        while not statuses or statuses[-1] == 200:
            statuses.append((await served.ask("GET", "/v1/conversations", token)).status_code)
            clock.now += 0.1
            assert clock.now < 105
        assert statuses[-1] == 401
        assert len(finds) <= 4 < len(statuses)


async def test_guesses_ask_sql_together_and_push_no_known_token_out() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        token = await served.token("acme:", "read")
        await served.ask("GET", "/v1/conversations", token)
        finds = counted(store)
        guesses = [access_tokens.make()[1] for _ in range(60)]
        answers = await asyncio.gather(*(served.ask("GET", "/v1/conversations", each) for each in guesses))
        assert {each.status_code for each in answers} == {401}
        answers = await asyncio.gather(*(served.ask("GET", "/v1/conversations", each) for each in guesses))
        assert {each.status_code for each in answers} == {401}
        assert len(finds) <= 5
        assert (await served.ask("GET", "/v1/conversations", token)).status_code == 200


def counted(store: AsyncStateStore) -> list[Any]:
    """What is asked of SQL about tokens from now on."""
    tokens = store._lifecycle.tiers().cold.access_tokens
    find, asked = tokens.find, []
    tokens.find = lambda ids: (asked.append(ids), find(ids))[1]  # type: ignore[method-assign]
    return asked
