"""The inspector's pages about users, tasks and access tokens."""

from __future__ import annotations

import re

from below import until

from distributed_state.programs.inspector import PATH
from distributed_state.values.access_tokens import RIGHTS
from tests.inspector.test_inspector import EVIL, Browser, looked_at


async def test_users_and_tasks_are_listed_and_shown_as_they_are_and_were() -> None:
    async with looked_at() as (store, browser):
        ada, task = store.user("acme:ada"), store.task("acme:t", user="acme:ada")
        await ada.set("language", EVIL)
        await ada.set("language", "nb")
        await task.create({"n": 1})
        await store.user("evil:eve").set("secret", 1)
        await store.admin.archive()
        users, tasks = [(await browser.get(path)).text for path in ("/users", "/tasks")]
        assert re.findall(r"/users/[^\"]*\">([^<]+)</a>", users) == ["acme:ada"]
        assert f'<a href="{PATH}/?user=acme%3Aada">show' in users
        assert re.findall(r"/tasks/[^\"]*\">([^<]+)</a>", tasks) == ["acme:t"]
        assert (
            "No" not in (await browser.get("/users?prefix=acme:a")).text.partition("<tbody>")[2].partition("</tr>")[0]
        )
        assert "None." in (await browser.get("/tasks?user=acme:bob")).text
        now, was = [(await browser.get(f"/users/acme:ada{each}")).text for each in ("", "?version=1")]
        assert ("nb" in now, "&lt;script&gt;" in was, "<script>alert" in was) == (True, True, False)
        assert now.count("language set") == 2
        assert f'user <a href="{PATH}/users/acme%3Aada">' in (await browser.get("/tasks/acme:t")).text
        for path, status in (("/users/evil:eve", 403), ("/users/acme:no", 404), ("/users/acme:ada?version=9", 404)):
            assert (await browser.get(path)).status_code == status, path


async def test_a_token_is_revoked_by_who_may_from_a_page_of_ours() -> None:
    async with looked_at() as (_, browser):
        given = await browser.served.token("acme:", "read", actor=f"bot {EVIL}")
        foreign = await browser.served.token("evil:", "read", actor="eve")
        bot, id = Browser(browser.served, given), given.split("_")[1]
        assert (await bot.get("/")).status_code == 200
        page = (await browser.get("/tokens")).text
        assert (id in page, foreign.split("_")[1] in page, given in page) == (True, False, False)
        assert ("bot &lt;script&gt;" in page, "<script>alert" in page) == (True, False)
        assert (await bot.get("/tokens")).status_code == 403
        for who, headers in ((bot, {}), (browser, {"Sec-Fetch-Site": "cross-site"})):
            assert (await who.post(f"/tokens/{id}/revoke", {"x": ""}, **headers)).status_code == 403
        assert (await browser.post(f"/tokens/{foreign.split('_')[1]}/revoke", {"x": ""})).status_code == 404
        assert (await bot.get("/")).status_code == 200
        assert (await browser.post(f"/tokens/{id}/revoke", {"x": ""})).headers["location"] == f"{PATH}/tokens"

        async def signed_out() -> bool:
            return (await bot.get("/")).status_code == 303

        await until(signed_out)
        assert "revoked <time" in (await browser.get("/tokens")).text
        every = Browser(browser.served, await browser.served.token("", *RIGHTS))
        assert "(all tenants)" in (await every.get("/tokens")).text
