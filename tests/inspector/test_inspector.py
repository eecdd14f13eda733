"""The inspector: who sees what on its pages, what they do, and what does not get through them."""

from __future__ import annotations

import asyncio
import html
import json
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from below import tiers, until
from clocks import moved_by_hand
from handled import ask
from starlette.requests import Request
from tenants import Served, opened

from distributed_state import AsyncStateStore, Fenced, StateStore, Stopped, tool
from distributed_state.errors import StateError
from distributed_state.programs.inspector import PATH, Tickets, app, inspector, pages
from distributed_state.programs.inspector.pages import COOKIE
from distributed_state.programs.inspector.values import Budget, tree, trees
from distributed_state.programs.service import Access
from distributed_state.programs.service.connections import CONNECTION
from distributed_state.store.export import PAGE, Export
from distributed_state.values.access_tokens import RIGHTS

EVIL = "<script>alert('x')</script>\"onload='y'"
OURS = {"Sec-Fetch-Site": "same-origin"}


class Browser:
    """A browser that has signed in with a token: the cookie is sent as one that is set on this path is."""

    def __init__(self, served: Served, token: str | None) -> None:
        self.served = served
        self.headers = {} if token is None else {"Cookie": f"{COOKIE}={token}"}

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.served.http.get(PATH + path, headers=self.headers | headers)

    async def post(self, path: str, given: dict[str, Any], **headers: str) -> httpx.Response:
        return await self.served.http.post(PATH + path, data=given, headers=self.headers | (headers or OURS))


@asynccontextmanager
async def looked_at(*rights: str, tickets: Tickets | None = None) -> AsyncIterator[tuple[AsyncStateStore, Browser]]:
    """A store with a conversation of tenant acme's, and a browser of somebody there with these rights."""
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        served.service.app.mount(PATH, inspector(served.service.app, tickets))
        session = store.session("acme:c", user="acme:ada")
        await session.create({"city": "Oslo", "plan": {"nights": [1, 2]}, EVIL: EVIL, "raw": b"\0\1"})
        await session.append({"role": "user", "content": f"hi {EVIL}"})
        await session.append(
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "book", "arguments": '{"hotel": "A"}'}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "booked"},
        )  # fmt: skip
        await session.set("city", "Bergen")
        await session.checkpoint("before")
        await store.admin.archive()
        yield store, Browser(served, await served.token("acme:", *(rights or RIGHTS)))


async def test_a_conversation_is_shown_as_it_is_and_as_it_was() -> None:
    async with looked_at() as (_, browser):
        now = await browser.get("/conversations/acme:c")
        assert now.status_code == 200
        for shown in (
            "Bergen",
            "version <b>5</b>",
            "<b>book</b>",
            "hotel: A",
            "booked",
            "checkpoint before",
            "5 versions",
        ):
            assert shown in now.text, shown
        past = (await browser.get("/conversations/acme:c?version=1")).text
        assert "Oslo" in past
        assert "booked" not in past
        assert "Roll back to version 1" in past
        difference = (await browser.get("/conversations/acme:c/difference?from=1&to=4")).text
        assert "Oslo" in difference
        assert "Bergen" in difference
        assert "booked" in difference
        statuses = [
            (await browser.get(f"/conversations/{rest}")).status_code
            for rest in (
                "acme:c?version=6",
                "acme:c?version=x",
                "acme:nope",
                "acme:c/difference",
                "acme:%FF",
                "acme:c/x",
            )
        ]
        assert statuses == [404, 422, 404, 422, 422, 404]


async def test_what_users_wrote_is_text_on_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    async with looked_at() as (_, browser):

        async def shown() -> str:
            found = await browser.get("/conversations/acme:c")
            assert found.status_code == 200
            assert "script-src 'self'" in found.headers["content-security-policy"]
            assert "unsafe" not in found.headers["content-security-policy"]
            assert found.headers["cache-control"] == "no-store"
            return found.text

        assert "<script>alert" not in await shown()
        assert "&lt;script&gt;alert" in await shown()
        with_id = await browser.get(f"/conversations/acme:{httpx.URL('/' + EVIL).raw_path.decode()[1:]}")
        assert "<script>alert" not in with_id.text
        # The negative control: without escaping it would be markup.
        monkeypatch.setattr(pages._templates, "autoescape", False)
        monkeypatch.setattr(pages._templates, "cache", None)
        assert "<script>alert" in await shown()


async def test_characters_that_deceive_are_seen_and_forms_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async with looked_at() as (store, browser):
        id = "acme:in\u202evoice\x1b"
        await ask(store, id, "Pay \u202efdp.exe\u202c\u200b?", name="\u2066n", data=["yes\u202e"])
        place = "/conversations/acme:in%E2%80%AEvoice%1B"
        page = (await browser.get(place)).text
        for unseen in "\u202e\u202c\u200b\u2066\x1b":
            assert unseen not in page
        for shown in (
            r"<h1 title=\"acme:in\u202evoice\u001b\">",
            r"Pay \u202efdp.exe\u202c\u200b?",
            r"question \u2066n",
        ):
            assert shown.replace('\\"', '"') in page, shown
        fields = re.findall(r'name="(\w+)" value="([^"]*)"', page.partition("/answer")[2])
        given = {name: html.unescape(value) for name, value in fields[:4]}
        assert (given["name"], given["answer"]) == ("\u2066n", "yes\u202e")
        assert (await browser.post(place + "/answer", given)).status_code == 303
        assert [each.message.content for each in await store.session(id).inbox()] == ["yes\u202e"]
        with monkeypatch.context() as patched:
            patched.setattr(pages, "_UNSEEN", re.compile("(?!)"))
            assert "\u202e" in (await browser.get(place)).text, "the negative control"
        erased = await browser.post(place + "/erase", {"typed": r"acme:in\u202evoice\u001b"})
        assert erased.headers["location"] == f"{PATH}/", "it is typed as it is seen"


async def test_the_installation_is_named_on_each_page() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        served.service.app.mount(PATH, inspector(served.service.app, title="Production <EU>"))
        page = (await Browser(served, None).get("/sign-in")).text
        assert "<title>Sign in · Production &lt;EU&gt;</title>" in page
        assert '<b class="title">Production &lt;EU&gt;</b>' in page
    async with looked_at() as (_, browser):
        assert "<title>Find · inspector</title>" in (await browser.get("/")).text


async def test_no_value_of_a_users_keeps_a_conversation_off_its_page() -> None:
    """A tenant could have hidden one from who looks after all of them by a value that no page could show."""
    deep = "[" * 50_000
    with pytest.raises(RecursionError):
        json.loads(deep)
    hidden = [
        {"role": "user", "content": "half \ud800 letter"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": deep}}]},
        {"role": "user", "content": "x", "timestamp": 1e300},
        {"role": "user", "content": "x", "timestamp": -1e18},
        {"role": "user", "content": [{"type": "t", "a\ud800": ["\udfff", 10**4000]}]},
    ]
    async with looked_at() as (store, browser):
        session = store.session("acme:c")
        for at, message in enumerate(hidden):
            await session.append(message)
            await session.set(f"shown {at}", "\udc00")
            page = await browser.get("/conversations/acme:c")
            assert page.status_code == 200, message
            assert f"shown {at}" in page.text
        assert "half \\ud800 letter" in page.text


async def test_a_tenant_sees_its_own_alone() -> None:
    async with looked_at() as (store, browser):
        await store.session("evil:c").create({"secret": 1})
        listed = (await browser.get("/")).text
        assert "acme:c" in listed
        assert "evil:c" not in listed
        there, absent = [(await browser.get(f"/conversations/evil:{id}")) for id in ("c", "d")]
        assert there.status_code == absent.status_code == 403
        assert there.text.replace("evil:c", "evil:d") == absent.text
        assert "evil:c" not in (await browser.get("/?q=evil:")).text
        assert (await browser.get("/fleet")).status_code == 403
        every = Browser(browser.served, await browser.served.token("", *RIGHTS))
        assert "evil:c" in (await every.get("/")).text, "the negative control"
        await tiers(store).maintenance.begin(60, "ada", "new <b>Valkey</b>")
        shown = await every.get("/fleet")
        assert shown.status_code == 200
        for part in (
            "partitions, none late",
            "Hot, in the replicas",
            "Warm, Redis",
            "Cold, SQL",
            "Entries refused by SQL",
        ):
            assert part in shown.text
        assert "<p>maintenance until 2" in shown.text
        assert "announced by ada: new &lt;b&gt;Valkey&lt;/b&gt;</p>" in shown.text
        rows = (await browser.served.ask("GET", "/v1/tenants", every.headers["Cookie"].partition("=")[2])).json()[
            "tenants"
        ]
        found = {each["prefix"]: each for each in rows}
        assert (found["acme:"]["conversations"], found[""]["conversations"]) == (1, 2)
        assert found["acme:"]["requests"] >= 5
        assert found["acme:"]["bytes"] > 0


def test_exceptions_come_first() -> None:
    """Of the figures of a fleet, and of its partitions."""
    late: dict[str, Any] = {"offset": 5, "waiting": 2, "lag": 11.0, "fill": 0.1, "diverged": ""}
    well, full, unknown = (late | {"lag": 0.5} | each for each in ({}, {"fill": 0.3}, {"lag": None, "diverged": "x"}))
    assert [app._needs_attention(each) for each in (late, well, full, unknown)] == [True, False, True, True]
    stats = {"stats": {"hot_hits": 3, "hot_misses": 1, "archived": 7, "leases": 2}}
    figures = {each.name: (each.value, each.shown, each.counter) for each in app._figures([stats, stats], [late, well])}
    assert figures == {
        "Commits": (10, "10 in total", True), "Reads": (8, "8 in total", True), "Archived": (14, "14 in total", True),
        "Unarchived commits": (4, "4", False), "Oldest of them": (11.0, "11.0 s", False),
        "Fullest journal": (0.1, "10%", False), "Held leases": (4, "4", False),
    }  # fmt: skip
    assert len(app._figures([], [])) == 7


def test_what_was_lost_and_which_link_is_silent_is_told() -> None:
    """Of what replicas say with their beats, and of what a doctor found."""
    well = {"stats": {"hot_hits": 3, "hot_misses": 1, "link_up": 1, "link_silence_ms": 20}}
    silent = {"stats": {"link_up": 0, "link_silence_ms": 9000, "restarted": 2, "restarted_at": 1_764_000_000}}
    sql = {"name": "sql quarantine", "found": "3", "ok": False}
    redis = {"name": "127.0.0.1:7000 memory", "found": "2 MB", "ok": True}
    hot, warm, cold = app._tiers([well, silent, {"stats": {}}], [sql, redis])
    assert (hot.wrong, warm.wrong, cold.wrong) == (1, 0, 1)
    assert "75% of 4 reads answered" in hot.facts
    assert ("2 MB" in warm.facts, "quarantine: 3" in cold.facts) == (True, True)
    well["stats"] |= {"complete": 4, "complete_at": 1_764_000_001}
    complete, lost, aside = app._losses([well, silent], [sql])
    assert complete[1:] == ("4, the last 2025-11-24 16:00:01 UTC", False), "nothing is missing"
    assert lost[1:] == ("2, the last 2025-11-24 16:00:00 UTC", True)
    assert aside[1:] == ("3", True)
    assert [each[2] for each in app._losses([well], [])] == [False, False], "the negative control"


async def test_who_is_nobody_signs_in_first() -> None:
    async with looked_at() as (_, browser):
        token = browser.headers["Cookie"].partition("=")[2]
        stranger = Browser(browser.served, None)
        for path in ("/", "/conversations/acme:c", "/live", "/fleet"):
            sent = await stranger.get(path)
            assert (sent.status_code, sent.headers["location"]) == (303, f"{PATH}/sign-in")
        assert (await stranger.get("/live/events")).status_code == 401
        swapped = await stranger.get("/fleet", **{"HX-Request": "true"})
        assert swapped.headers["hx-redirect"] == f"{PATH}/sign-in"
        for wrong in ("", "x", "dstate_0123456789abcdef_" + "a" * 43, "a b\n"):
            assert (await stranger.post("/sign-in", {"token": wrong})).status_code == 401
        entered = await stranger.post("/sign-in", {"token": token})
        assert entered.status_code == 303, entered.text
        cookie = entered.headers["set-cookie"]
        assert (entered.status_code, entered.headers["location"]) == (303, f"{PATH}/")
        for word in ("HttpOnly", "SameSite=strict", f"Path={PATH}"):
            assert word in cookie
        assert "Secure" not in cookie
        assert (
            "Secure"
            in (await stranger.post("/sign-in", {"token": token}, **OURS, **{"X-Forwarded-Proto": "https"})).headers[
                "set-cookie"
            ]
        )
        left = await browser.post("/sign-out", {"x": ""})
        assert f'{COOKIE}=""' in left.headers["set-cookie"]


async def test_a_form_of_another_site_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with looked_at() as (store, browser):
        session = store.session("acme:c")

        async def rolled_back(**headers: str) -> int:
            return (await browser.post("/conversations/acme:c/rollback", {"version": "1"}, **headers)).status_code

        foreign = [
            {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "none"},
            {"Origin": "http://evil.example"}, {"Origin": "null"}, {"X": "y"},
        ]  # fmt: skip
        assert [await rolled_back(**each) for each in foreign] == [403] * 6
        assert await session.get("city") == "Bergen"
        assert await rolled_back(Origin="http://localhost") == 303
        assert await session.get("city") == "Oslo"
        monkeypatch.setattr(pages, "_ours", lambda request: True)
        assert await rolled_back(**foreign[0]) == 303, "the negative control"


async def test_what_changes_something_takes_its_right_and_is_in_the_history() -> None:
    async with looked_at() as (store, browser):
        reader = Browser(browser.served, await browser.served.token("acme:", "read"))
        place = "/conversations/acme:c"
        for what, given in (("rollback", {"version": "1"}), ("fork", {"version": "1"}), ("erase", {"typed": "acme:c"})):
            assert (await reader.get(f"{place}/{what}")).status_code == 200
            assert (await reader.post(f"{place}/{what}", given)).status_code == 403
        session = store.session("acme:c")
        assert (await browser.post(f"{place}/rollback", {"version": "1"})).headers[
            "location"
        ] == f"{PATH}/conversations/acme%3Ac"
        assert (await session.get("city"), (await session.history())[-1].actor) == ("Oslo", "web")
        forked = await browser.post(f"{place}/fork", {"version": "4", "id": "acme:other"})
        assert forked.headers["location"] == f"{PATH}/conversations/acme%3Aother"
        assert await store.session("acme:other").get("city") == "Bergen"
        for wrong in ("", "acme:d"):
            assert (await browser.post(f"{place}/erase", {"typed": wrong})).status_code == 422
        assert await session.get("city") == "Oslo"
        assert (await browser.post(f"{place}/erase", {"typed": "acme:c"})).headers["location"] == f"{PATH}/"
        await until(lambda: gone(browser, place))


async def test_a_version_names_its_worker_and_the_graph_says_what_came_of_what() -> None:
    async with looked_at() as (store, browser):
        session = store.session("acme:c")
        await session.rollback(version=1)
        await session.fork("acme:fork<", version=2)
        for event in ("new_task", "plan_ready"):
            await session.transition(event)
        await session.rollback(version=7)
        await session.rollback(version=1)
        await store.session("acme:fork<").set("n", 1)
        await store.admin.archive()
        page = (await browser.get("/conversations/acme:c")).text
        assert page.count('<li><a href="/inspect/conversations/acme%3Ac?version=') == 10
        assert f"replica {store.replica}" in page
        assert "back to version 1" in page
        assert {each.replica for each in await session.history()} == {store.replica}
        graph = (await browser.get("/conversations/acme:c/graph")).text
        for shown in (
            "rollback · back to 1",
            "rollback · phase none · back to 1",
            'class="phase-1" d="M60 62',
            'class="phase-2" d="M60 108',
            'class="phase-1" d="M60 154',
            '<span class="words">hi &lt;script&gt;',
            "<code>book</code>",
            "checkpoint before",
            ">fork acme:fork&lt;</a>",
            'class="bow"',
            "<td>before</td>",
        ):
            assert shown in graph, shown
        assert "It was forked from" not in graph
        assert 'version=2">acme:c</a>' in (await browser.get("/conversations/acme%3Afork%3C/graph")).text
        for number in range(3):
            await session.fork(f"acme:fork-{number}", version=3)
            await store.session(f"acme:fork-{number}").set("n", 1)
        await store.admin.archive()
        forked = (await browser.get("/conversations/acme:c/graph")).text
        assert '<a href="#forks-3">3 forks</a>' in forked
        row = forked.partition('<tr id="forks-3">')[2].partition("</tr>")[0]
        assert re.findall(r">(acme:[^<]+)</a>", row) == ["acme:fork-2", "acme:fork-1", "acme:fork-0"]
        await store.session("acme:many").create({})
        for number in range(70):
            await store.session("acme:many").set("n", number)
        await store.admin.archive()
        many = (await browser.get("/conversations/acme:many/graph")).text
        assert many.count("<circle") == 60
        assert "top=11" in many
        assert (await browser.get("/conversations/acme:many/graph?top=11")).text.count("<circle") == 11


async def test_what_waits_in_the_inbox_is_shown_as_text_and_a_full_one_hides_nothing_else() -> None:
    async with looked_at("read") as (store, browser):
        session = store.session("acme:c")
        assert "in the inbox" not in (await browser.get("/conversations/acme:c")).text
        await session.post({"role": "user", "content": f"wait {EVIL}" + "x" * 9000}, request_id=EVIL)
        for path in ("/conversations/acme:c", "/conversations/acme:c/inbox"):
            shown = (await browser.get(path)).text
            assert "1 message waits in the inbox" in shown
            assert re.search(
                r"no\. 1 · <time datetime=[^>]*>[\d :-]{19} UTC</time> · request &lt;script&gt;alert", shown
            )
            assert "wait &lt;script&gt;alert" in shown
            assert "more characters" in shown
            assert "<script>alert" not in shown
        for number in range(40):
            await session.post({"role": "user", "content": f"hello {number}."})
        shown = (await browser.get("/conversations/acme:c/inbox")).text
        assert "41 messages wait in the inbox; these are the first 30" in shown
        assert ("hello 28." in shown, "hello 29." in shown) == (True, False)
        stranger = Browser(browser.served, None)
        for part in ("inbox", "output"):
            assert (await browser.get(f"/conversations/evil:c/{part}")).status_code == 403
            assert (await stranger.get(f"/conversations/acme:c/{part}")).status_code in (303, 401)


async def test_an_inbox_too_large_for_a_page_hides_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with looked_at() as (store, browser):
        await store.session("acme:c").post({"role": "user", "content": "x" * 100_000})
        monkeypatch.setattr(pages, "_LARGEST", 50_000)
        shown = await browser.get("/conversations/acme:c")
        assert shown.status_code == 200
        assert "The inbox cannot be shown: it is 0.1 MiB" in shown.text
        assert "Bergen" in shown.text


async def test_a_turn_is_stopped_by_who_may_write_from_a_page_of_ours() -> None:
    async with looked_at() as (store, browser):
        reader = Browser(browser.served, await browser.served.token("acme:", "read", "events", "admin"))
        place = "/conversations/acme:c"
        assert 'id="stop"' in (await browser.get(place)).text
        assert 'id="stop"' not in (await reader.get(place)).text
        idle = await browser.post(f"{place}/stop", {"token": "7"})
        assert (idle.status_code, idle.text) == (200, "that turn has ended")
        assert (await browser.post(f"{place}/stop", {"x": ""})).status_code == 422
        async with store.session("acme:c").turn() as turn:
            given = {"token": str(turn.token)}
            refused = await reader.post(f"{place}/stop", given)
            assert (refused.status_code, "write" in refused.text) == (403, True), refused.text
            foreign = await browser.post(f"{place}/stop", given, **{"Sec-Fetch-Site": "cross-site"})
            assert foreign.status_code == 403
            stranger = Browser(browser.served, None)
            assert (await stranger.post(f"{place}/stop", given)).status_code == 401
            assert (await browser.get(f"{place}/stop")).status_code in (404, 405)
            assert not turn.stopping
            asking = asyncio.create_task(browser.post(f"{place}/stop", given))
            with pytest.raises(Stopped, match="requested in the inspector"):
                async with turn.stoppable():
                    await asyncio.sleep(60)
            asked = await asking
            assert (asked.status_code, asked.text) == (200, "")


async def gone(browser: Browser, place: str) -> bool:
    return (await browser.get(place)).status_code in (404, 410)


async def test_who_holds_what_is_seen_by_who_may_steer_it() -> None:
    async with looked_at() as (store, browser):
        await store.session("evil:c").create({})
        assert "No turn runs" in (await browser.get("/live")).text
        reader = Browser(browser.served, await browser.served.token("acme:", "read", "events"))
        async with store.session("acme:c").turn(), store.session("evil:c").lock() as other:
            shown = (await browser.get("/live")).text
            assert "1 turn runs" in shown
            assert shown.count(">Take over<") == shown.count(">Release<") == 1
            assert "evil:c" not in shown
            read = await reader.get("/live")
            assert (read.status_code, "acme:c" in read.text.partition("Last turns")[0]) == (200, False)
            every = Browser(browser.served, await browser.served.token("", *RIGHTS))
            assert "evil:c" in (await every.get("/live")).text, "the negative control"
            for what in ("end", "take-over"):
                theirs = f"/leases/conversations/evil:c/{other.token}/{what}"
                assert (await browser.get(theirs)).status_code == 403
                assert (await browser.post(theirs, {"seconds": "60"})).status_code == 403
                asked = await browser.get(f"/leases/conversations/acme:c/{other.token}/{what}")
                assert "This lease of" in asked.text
            for wrong in ("/leases/apps/acme:c/1/end", "/leases/conversations/acme:c/x/end"):
                assert (await browser.get(wrong)).status_code == 404


async def test_the_last_turns_and_messages_are_seen() -> None:
    async with looked_at() as (store, browser):
        await store.session("evil:c").append({"role": "user", "content": "secret"})
        await store.session("acme:quiet").create({"n": 1})
        await store.admin.archive()
        page = (await browser.get("/live")).text
        last = page.partition("Last turns and messages")[2].partition("</section>")[0]
        assert re.findall(r">(acme:\w+)</a>", last) == ["acme:c"]
        assert "<code>book</code>" in last
        assert "secret" not in page
        every = Browser(browser.served, await browser.served.token("", *RIGHTS))
        assert "secret" in (await every.get("/live")).text, "the negative control"
        for part, seen in ("held", "No turn runs"), ("last", "acme:c"):
            page = (await browser.get("/live", **{"HX-Target": part})).text
            assert [each in page for each in ("No turn runs", "acme:c")].count(True) == 1
            assert seen in page


async def test_a_record_that_was_taken_over_is_steered_under_the_new_lease() -> None:
    async with looked_at() as (store, browser):
        session = store.session("acme:c")
        turn = session.lock()
        await turn.acquire()
        place = f"/leases/conversations/acme:c/{turn.token}"
        asked = (await browser.get(f"{place}/take-over")).text
        assert "Nobody else can change it while you hold it" in asked
        assert (
            await browser.post(f"{place}/take-over", {"seconds": "60"}, Origin="http://evil.example")
        ).status_code == 403
        for wrong in ("", "0", "601", "1e3", "9999999"):
            assert (await browser.post(f"{place}/take-over", {"seconds": wrong})).status_code == 422
        await session.set("city", "Paris")
        taken = await browser.post(f"{place}/take-over", {"seconds": "60"})
        assert taken.status_code == 303, taken.text
        with pytest.raises(Fenced):
            await session.set("city", "Rome")
        await turn.release()
        back = {"version": "1"}
        assert (await browser.post("/conversations/acme:c/rollback", back)).status_code == 423, "without the cookie"
        cookie = taken.headers["set-cookie"]
        for word in ("HttpOnly", "SameSite=strict", f"Path={PATH}", "Max-Age=60"):
            assert word in cookie
        browser.headers["Cookie"] += f"; {cookie.partition(';')[0]}"
        assert (await browser.post("/conversations/acme:c/rollback", back)).status_code == 303
        assert await session.get("city", fresh=True) == "Oslo"
        live = (await browser.get("/live")).text
        assert "client (you)" in live
        mine = re.search(r"/leases/conversations/acme%3Ac/(\d+)/end", live)
        assert mine is not None
        ended = await browser.post(mine[0].replace("%3A", ":"), {"x": ""})
        assert f'{pages.HELD}=""' in ended.headers["set-cookie"]
        assert (await browser.post(mine[0].replace("%3A", ":"), {"x": ""})).status_code == 409
        await session.set("city", "Rome")


async def test_long_histories_and_chats_are_pages() -> None:
    async with looked_at() as (store, browser):
        session = store.session("acme:long")
        await session.create({})
        for number in range(70):
            await session.append({"role": "user", "content": f"said-{number}."})
        await store.admin.archive()
        seen, path, texts = 0, "/conversations/acme:long", list[str]()
        while path:
            found = (await browser.get(path)).text
            texts = re.findall(r"<p>(said-\d+\.)", found) + texts
            seen += 1
            earlier = re.search(r'href="' + PATH + r'([^"]+before=\d+)"', found)
            path = earlier[1].replace("%3A", ":") if earlier else ""
        assert texts == [f"said-{number}." for number in range(70)]
        assert seen == 3
        versions = (await browser.get("/conversations/acme:long")).text
        assert versions.count("#made") == 20
        assert "top=51" in versions
        past = (await browser.get("/conversations/acme:long?version=20")).text
        assert re.findall(r"version=(\d+)#made", past) == [str(number) for number in range(24, 4, -1)]
        assert ("top=44&amp;version=20" in past, "top=4&amp;version=20" in past) == (True, True)


async def test_what_is_too_large_for_a_page_is_named_and_hides_nothing_else() -> None:
    async with looked_at() as (store, browser):
        session = store.session("acme:large")
        await session.create({f"f{number}": "x" * 2**20 for number in range(3)} | {"city": "Oslo"})
        await session.append({"role": "user", "content": "said"})
        await session.append({"role": "user", "content": "y" * 2**20})
        await session.set("f1", "z")
        await store.admin.archive()
        now, was = [(await browser.get(f"/conversations/acme:large{each}")).text for each in ("", "?version=2")]
        for page in (now, was):
            assert "1.0 MiB" in page
            assert "Oslo" in page
            assert "4 versions" in page
            assert "f0 set, f1 set" in page
        assert ("2 too large to show" in now, "3 too large to show" in was) == (True, True)
        assert ("Message no. 1 is too large" in now, ">said<" in was) == (True, True)
        assert ">said<" in (await browser.get("/conversations/acme:large?before=1")).text
        field = await browser.get("/conversations/acme:large/field?name=f0")
        assert (field.status_code, field.headers["content-disposition"][:10]) == (200, "attachment")
        assert field.json() == {"version": 4, "value": "x" * 2**20}
        past = await browser.get("/conversations/acme:large/field?name=f1&version=3")
        assert past.json()["value"] == "x" * 2**20
        assert (await browser.get("/conversations/acme:large/field?name=nope")).status_code == 404
        assert (await browser.get("/conversations/acme:large/difference?from=1&to=4")).status_code == 413


def test_what_a_page_reads_is_bounded_and_counted() -> None:
    held = Held()
    request = Request({"type": "http", "headers": [], "state": {CONNECTION: held}})
    pages._bound(request, 1000)
    with pytest.raises(pages.Refused):
        pages._bound(request, 2**22)
    assert held.size == 4000


async def test_a_conversation_is_exported_whole_by_those_who_may() -> None:
    async with looked_at() as (store, browser):
        assert "acme%3Ac/export" in (await browser.get("/conversations/acme:c")).text
        sent = await browser.get("/conversations/acme:c/export")
        assert sent.headers["content-type"] == "application/jsonl"
        assert sent.headers["content-disposition"].endswith("UTF-8''acme%3Ac.jsonl")
        lines = await store.admin.export("acme:c")
        assert sent.text == "".join(f"{line}\n" for line in lines)
        await store.admin.import_(sent.text.splitlines(), id="acme:copy")
        assert await store.session("acme:copy").get("city") == "Bergen"
        reader = Browser(browser.served, await browser.served.token("acme:", "read", "write", "delete", "events"))
        refused, absent = await reader.get("/conversations/acme:c/export"), await browser.get("/conversations/x/export")
        assert (refused.status_code, "Not allowed" in refused.text) == (403, True)
        assert absent.status_code == 403, "another tenant's"
        assert (await browser.get("/conversations/acme:x/export")).status_code == 404


async def test_an_export_is_read_a_part_at_a_time_and_none_is_cut_off_unnoticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with looked_at() as (store, _):
        session = store.session("acme:long")
        await session.create({})
        for number in range(60):
            await session.append({"role": "user", "content": f"said-{number}." + "x" * (PAGE // 20)})
        await session.fork("acme:fork")
        await store.session("acme:fork").set("n", 1)
        await store.admin.archive()
        for id, counts in (("acme:long", (0, 61)), ("acme:fork", (60, 2))):
            names = store.session(id)._context.keys
            reading = Export(store._lifecycle.tiers(), names)
            parts = [await reading.begin()]
            while parts[-1]:
                parts.append(await reading.following())
            head = json.loads(parts[0][0])
            assert (head["messages"], head["changes"]) == counts
            assert 60 > max(map(len, parts)) > 2
            assert max(sum(map(len, part)) for part in parts) < 2 * PAGE
            assert [*chain(*parts)] == await store.admin.export(id)
        cut = Export(store._lifecycle.tiers(), store.session("acme:long")._context.keys)
        await cut.begin()
        monkeypatch.setattr(store._lifecycle.tiers().cold, "history", lambda *_, **__: [])
        with pytest.raises(StateError, match="export it again"):
            await cut.following()


class Held:
    """A connection that notes how much is held."""

    size = 0

    def hold(self, size: int) -> None:
        self.size += size


async def test_a_ticket_is_good_for_one() -> None:
    tickets = Tickets("the-key")
    async with looked_at(tickets=tickets) as (_, browser):
        ticket = tickets.ticket
        for wrong in ("", "x", "é"):
            assert (await browser.get(f"/enter?ticket={wrong}")).status_code == 403
        first, second = [await browser.get(f"/enter?ticket={ticket}") for _ in range(2)]
        assert f"{COOKIE}=the-key" in first.headers["set-cookie"]
        assert (second.status_code, "set-cookie" in second.headers) == (403, False)
        assert (await browser.get("/enter?ticket=")).status_code == 403


async def test_a_key_opens_a_service_and_nothing_else_does() -> None:
    async with opened() as store:
        served = Served(store, Access(key="k" * 43))
        assert (await served.ask("GET", "/v1/replicas", "k" * 43)).status_code == 200
        for wrong in (None, "", "k" * 42, "k" * 44):
            assert (await served.ask("GET", "/v1/replicas", wrong)).status_code == 401
        away = await served.http.get("/v1/replicas", headers={"Authorization": f"Bearer {'k' * 43}", "Host": "evil"})
        assert away.status_code == 421


def test_of_a_large_value_a_part_is_shown_and_the_rest_is_named() -> None:
    budget = Budget(100)
    found = tree("a", {"list": [list(range(1000)) for _ in range(1000)]}, budget)
    assert budget.left <= 0
    assert found.children[0].more == "999 more"
    assert tree("a", "x" * 10_000, Budget()).more == "6000 more characters"
    assert len(trees({f"f{number}": number for number in range(100_000)})) == 401
    deep: Any = []
    for _ in range(90):
        deep = [deep]
    assert tree("deep", deep, Budget()).kind == "list"


# The command


@contextmanager
def inspecting(archive: Path, **place: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command on this archive, and the link that it prints."""
    words = [word for name, value in place.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "distributed_state", "--archive", f"sqlite:///{archive}", *words, "inspect"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip().removeprefix("open ")
    finally:
        process.kill()
        process.communicate()


def test_the_command_prints_a_link_that_works_once_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    archive = tmp_path / "a.db"
    with StateStore.open(archive=f"sqlite:///{archive}") as store:
        store.session("c").create({"city": "Oslo"})
    with inspecting(archive) as (process, link):
        with httpx.Client() as client:
            assert client.get(link).status_code == 303
            found = client.get(link.partition("/enter")[0] + "/conversations/c")
            assert (found.status_code, "Oslo" in found.text) == (200, True)
            assert client.get(link.partition("/inspect")[0] + "/v1/conversations").status_code == 401
        assert httpx.get(link).status_code == 403
        assert httpx.get(link, headers={"Host": "evil.example"}).status_code == 421
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (0, ""), out


async def test_a_newcomer_finds_why_a_turn_took_four_seconds() -> None:
    """Of the one page, whose first sentence names the tool and its share; of old versions, too."""
    async with looked_at() as (store, browser):
        session = store.session("acme:c")
        turn = session.turn()
        go_on = moved_by_hand(turn)

        @tool
        async def search_hotels(city: str) -> list[str]:
            """Search."""
            go_on(3.2)
            return [city]

        async with turn:
            with turn.model("gpt-5"):
                go_on(0.6)
            call = await turn.call(search_hotels, {"city": "Bergen"})
            go_on(0.2)
            turn.append(call.to_message())
        for number in range(25):
            await session.set("n", number)
        await store.admin.archive()
        page = (await browser.get("/conversations/acme:c?version=6")).text
        sentence = re.sub(r"<[^>]*>", "", page[page.index("It took") :].split("</p>")[0])
        assert sentence == "It took 4.0 s, of which 3.2 s (80 %) were tool search_hotels."
        table = page[page.index("It took") :].split("</table>")[0]
        rows = [re.sub(r"<[^>]*>", "|", row).split("|") for row in table.split("<tr>")[2:]]
        assert [(row[1], row[3], row[7].strip()) for row in rows] == [
            ("waiting for the lease", "0.0 ms", "0 %"),
            ("reading", "0.0 ms", "0 %"),
            ("model gpt-5", "600 ms", "15 %"),
            ("tool search_hotels", "3.2 s", "80 %"),
            ("elsewhere", "200 ms", "5 %"),
        ]
        assert "turn · 4.0 s · " in (await browser.get("/conversations/acme:c?version=6&top=10")).text
        assert "It took" not in (await browser.get("/conversations/acme:c?version=7")).text, "the negative control"


async def test_a_turn_over_http_shows_what_its_client_ran() -> None:
    async with looked_at() as (store, browser):
        token = await browser.served.token("acme:", *RIGHTS)
        turn = {
            "messages": [{"role": "assistant", "content": "done"}], "seconds": 40.0,
            "runs": [{"kind": "tool", "name": f"look up {EVIL}"[:30], "seconds": 32}],
        }  # fmt: skip
        done = await browser.served.ask("POST", "/v1/conversations/acme:c/turns", token, json=turn)
        assert done.status_code == 200, done.text
        await store.admin.archive()
        page = (await browser.get("/conversations/acme:c")).text
        assert "It took <b>40" in page
        assert "(80 %) were <b>tool look up &lt;script&gt;" in page
        (change,) = await store.session("acme:c").history(after=done.json()["version"] - 1)
        assert (change.times.runs[0].seconds, change.times.elsewhere >= 8) == (32, True)
        wrong: list[dict[str, Any]] = [{"kind": "x"}, {"seconds": -1}, {"name": ""}, {"more": 1}]
        for each in wrong:
            sent = turn | {"runs": [turn["runs"][0] | each]}  # type: ignore[index]
            refused = await browser.served.ask("POST", "/v1/conversations/acme:c/turns", token, json=sent)
            assert refused.status_code == 422, each


@pytest.mark.wide
def test_the_command_shows_a_store_of_a_cluster(servers: Any, tmp_path: Path) -> None:
    place = {"url": servers.cluster().url, "namespace": f"i{uuid.uuid4().hex[:12]}"}
    archive = tmp_path / "a.db"
    with StateStore.open(archive=f"sqlite:///{archive}", **place) as store:
        store.session("c").create({"city": "Oslo"})
        store.admin.archive()
        with store.session("c").lock(), inspecting(archive, **place) as (_, link), httpx.Client() as client:
            root = client.get(link).headers["location"].removesuffix("/")
            base = link.partition("/inspect")[0] + root
            for path, shown in (
                ("/conversations/c", "Oslo"), ("/live", "1 more record is held"), ("/fleet", store.replica),
                ("/fleet", "16384 of 16384 slots served"), ("/", ">c<"),
            ):  # fmt: skip
                found = client.get(base + path)
                assert (found.status_code, shown in found.text) == (200, True), (path, found.text)
