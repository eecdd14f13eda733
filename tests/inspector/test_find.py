"""The inspector's first page: which conversations are found by what."""

from __future__ import annotations

import re

from below import until
from tenants import Served, opened

from distributed_state.programs.inspector import PATH, inspector
from distributed_state.programs.service import Access
from distributed_state.values.access_tokens import RIGHTS
from tests.inspector.test_inspector import Browser, looked_at


async def test_conversations_are_found_by_pages() -> None:
    async with looked_at() as (store, browser):
        for number in range(60):
            await store.session(f"acme:n{number:02}", user="acme:bob").create({})
        found, path = list[str](), "/?q=acme:n"
        while path:
            page = (await browser.get(path)).text
            found += re.findall(r">(acme:n\d\d)<", page)
            more = re.search(r'href="' + PATH + r'([^"]+)" rel="next"', page)
            path = more[1].replace("&amp;", "&") if more else ""
        assert found == [f"acme:n{number:02}" for number in range(60)]
        users = (await browser.get("/?user=acme:bob")).text
        assert "acme:n00" in users
        assert "acme:c<" not in users
        opened_by_id = await browser.get("/?id=acme:a/b%3F")
        assert opened_by_id.headers["location"] == f"{PATH}/base64/conversations/YWNtZTphL2I_"
        assert found[0] in (await browser.get("/?q=n0")).text, "also without the tenant's prefix"


async def test_a_search_shows_a_row_for_each_conversation_and_leads_to_the_message() -> None:
    async with looked_at() as (store, browser):
        for id in ("acme:x", "evil:x"):
            await store.session(id, user="acme:bob" if id < "b" else None).append(
                *({"role": "user", "content": f"the {word} & <b>boat</b>"} for word in ("red", "hotel", "Hotels"))
            )
        await store.user("acme:ada").set("note", "hotel")
        await until(lambda: _found(browser, "/?q=%22hotel%22", "1 conversation contains"))
        page = (await browser.get("/?q=hotel")).text
        assert page.count("<li>") == 1
        hit = re.search(r"/conversations/acme%3Ax\?before=(\d)#m(\d)\">acme:x</a> <small>message no. (\d)", page)
        assert hit is not None
        assert int(hit[1]) - 1 == int(hit[2]) == int(hit[3]) > 0
        assert re.search("the <mark>[hH]otels?</mark> &amp; &lt;b&gt;boat&lt;/b&gt;", page)
        assert "evil:x" not in page
        there = (await browser.get("/conversations/acme:x?before=2")).text
        assert ('id="m1"' in there, 'id="m2"' in there) == (True, False)
        nobody = (await browser.get("/?q=hotel&user=acme:ada")).text
        assert ("No conversation matches" in nobody, "<mark>" in nobody) == (True, False)


async def _found(browser: Browser, path: str, text: str) -> bool:
    return text in (await browser.get(path)).text


async def test_where_nothing_is_searched_ids_are_found_and_the_reason_is_shown() -> None:
    async with opened(search=False) as store:
        served = Served(store, Access(tokens=True))
        served.service.app.mount(PATH, inspector(served.service.app))
        await store.session("c-1").create({})
        await store.admin.archive()
        page = (await Browser(served, await served.token("", *RIGHTS)).get("/?q=c-")).text
        assert (">c-1</a>" in page, "search is not set up here" in page) == (True, True)


async def test_conversations_are_found_by_phase_age_size_and_lease() -> None:
    async with looked_at() as (store, browser):

        async def found(query: str) -> set[str]:
            page = await browser.get(f"/?{query}")
            assert page.status_code == 200, page.text
            return set(re.findall(r">acme:([a-z]+)</a>", page.text))

        phased = store.session("acme:phased")
        await phased.transition("new_task")
        large = store.session("acme:large")
        await large.create({"x": "y" * 3_000_000})
        await store.admin.archive()
        assert await found("phase=planning") == {"phased"}
        assert await found("phase=executing") == set()
        assert await found("mib=2.5") == {"large"}
        assert await found("mib=3") == set()
        every = {"c", "phased", "large"}
        assert (await found("newer=1"), await found("older=1")) == (every, set())
        assert (await found("newer=0"), await found("older=0")) == (set(), every)
        assert await found("held=true") == set()
        async with large.lock():
            assert await found("held=true") == {"large"}
            assert await found("held=true&phase=planning") == set()
        assert await found("held=true") == set()
        await phased.transition("plan_ready")
        await store.admin.archive()
        assert (await found("phase=planning"), await found("phase=executing")) == (set(), {"phased"})
        await store.erase(phased.id)
        assert await found("phase=executing") == set()
        assert (await browser.get("/?mib=x")).status_code == 422
