"""The inspector's pages about sessions that go on by themselves: questions, stuck sessions, schedules."""

from __future__ import annotations

import re
from typing import Any

import pytest
from below import said, until
from handled import ask, make_stuck, schedule_of, worked

from distributed_state.programs.inspector import PATH, pages, schedules
from tests.inspector.test_inspector import EVIL, Browser, looked_at

PLACE = "/conversations/acme:c"


async def with_rights(browser: Browser, prefix: str, *rights: str) -> Browser:
    return Browser(browser.served, await browser.served.token(prefix, *rights))


def form_of(page: str) -> dict[str, str]:
    """The hidden fields of the first form that answers a question."""
    found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page.partition("/answer")[2])
    return dict(found[:3])


# Questions


async def test_a_question_is_shown_answered_once_and_gone() -> None:
    async with looked_at() as (store, browser):
        assert "No question is open" in (await browser.get("/questions")).text
        await ask(store, "acme:c", f"Shall I book {EVIL}?", name="booking", data={"price": 900}, expires=86_400)
        await store.session("evil:c").create()
        await ask(store, "evil:c", "secret?")
        listed = (await browser.get("/questions")).text
        for shown in ("1 open question<", "acme:c", "acme:ada", "booking", "&lt;script&gt;alert", "price", "900"):
            assert shown in listed, shown
        for hidden in ("<script>alert", "secret"):
            assert hidden not in listed, hidden
        assert re.search(r"asked <time [^>]*>[\d :-]{19} UTC</time> · expires <time", listed)
        given = form_of(listed) | {"answer": "yes,\r\nplease"}
        sent = await browser.post(PLACE + "/answer", given)
        assert (sent.status_code, sent.headers["location"]) == (303, f"{PATH}/questions")
        assert [each.message.content for each in await store.session("acme:c").inbox()] == ["yes,\nplease"]
        assert "No question is open" in (await browser.get("/questions")).text

        again = await browser.post(PLACE + "/answer", given | {"answer": "no"})
        assert again.status_code == 409
        assert "Somebody has answered this question already" in again.text
        async with store.session("acme:c").turn() as turn:
            turn.take()
            turn.move_to("done")
        closed = await browser.post(PLACE + "/answer", given)
        assert closed.status_code == 409
        assert "it was answered, or it expired" in closed.text
        assert len(await store.session("acme:c").inbox()) == 0


async def test_an_answer_does_not_reach_a_later_question_of_its_name() -> None:
    async with looked_at() as (store, browser):
        await ask(store, "acme:c", "Oslo?")
        shown = form_of((await browser.get("/questions")).text)
        await ask(store, "acme:c", "Bergen?")
        assert (await browser.post(PLACE + "/answer", shown | {"answer": "yes"})).status_code == 409
        assert await store.session("acme:c").inbox() == []
        assert "Bergen?" in (await browser.get("/questions")).text


async def test_an_expired_question_is_not_shown() -> None:
    async with looked_at() as (store, browser):
        await ask(store, "acme:c", "Now?", expires=0.05)
        await until(store.session("acme:c").inbox)
        assert "No question is open" in (await browser.get("/questions")).text
        assert "Open question" not in (await browser.get(PLACE)).text


async def test_who_only_reads_has_no_buttons_and_another_site_answers_nothing() -> None:
    async with looked_at() as (store, browser):
        await ask(store, "acme:c", "Shall I?", data=["yes", "no"])
        await make_stuck(store, "acme:c")
        reader = await with_rights(browser, "acme:", "read", "events")
        stranger = await with_rights(browser, "evil:", "read", "write")
        given = form_of((await browser.get("/questions")).text) | {"answer": "yes"}
        for path in ("/questions", "/stuck", PLACE, PLACE + "/schedule"):
            forms = [len(re.findall(r"/(answer|retry)\"", (await each.get(path)).text)) for each in (browser, reader)]
            assert (forms[0] > 0, forms[1]) == (True, 0), path
        for each in (reader, stranger):
            assert (await each.post(PLACE + "/answer", given)).status_code == 403
            assert (await each.post(PLACE + "/retry", {"back": ""})).status_code == 403
        assert (await stranger.get(PLACE + "/schedule")).status_code == 403
        for what, sent in (("answer", given), ("retry", {"back": ""})):
            foreign = await browser.post(f"{PLACE}/{what}", sent, **{"Sec-Fetch-Site": "cross-site"})
            assert foreign.status_code == 403
            assert (
                (await Browser(browser.served, None).post(f"{PLACE}/{what}", sent))
                .headers["location"]
                .endswith("/sign-in")
            )
        assert [each.message.content for each in await store.session("acme:c").inbox()] == ["hi"]
        found = await schedule_of(store.session("acme:c"))
        assert found is not None
        assert found.stuck


async def test_choices_are_buttons_and_an_answer_on_the_conversations_page_comes_back_to_it() -> None:
    async with looked_at() as (store, browser):
        await ask(store, "acme:c", "Which?", data={"choices": ["by train", "by <b>boat</b>"], "price": 9})
        page = (await browser.get(PLACE)).text
        assert '<button name="answer" value="by train">by train</button>' in page
        assert "by &lt;b&gt;boat" in page
        assert "Another answer" in page
        for empty in ({}, {"answer": " "}):
            assert (await browser.post(PLACE + "/answer", form_of(page) | empty)).status_code == 422
        sent = await browser.post(PLACE + "/answer", form_of(page) | {"answer": "by train"})
        assert sent.headers["location"] == f"{PATH}/conversations/acme%3Ac"
        assert [each.message.content for each in await store.session("acme:c").inbox()] == ["by train"]


@pytest.mark.parametrize("data", [None, 1, [], ["x"] * 11, ["x" * 81], [""], ["a", 1], {"choices": "ab"}, {"a": ["b"]}])
def test_only_few_short_texts_are_choices(data: Any) -> None:
    shown = {"conversation": "c", "name": "", "id": "1", "question": "?", "data": data}
    assert schedules.question_shown(shown)["choices"] == []


async def test_questions_are_listed_in_pages_and_read_again_only_if_others_are_open() -> None:
    async with looked_at() as (store, browser):
        for number in range(52):
            await ask(store, f"acme:{number:02}", f"Number {number}?")
        first = (await browser.get("/questions")).text
        assert "50 open questions on this page" in first
        following = re.search(r'href="[^"]*/(questions\?after=[^"]+)" rel="next"', first)
        assert following is not None
        second = (await browser.get("/" + following[1])).text
        assert ("Number 51?" in second, "Number 0?" in second) == (True, False)
        polled = re.search(r'hx-get="[^"]*(/questions\?[^"]+)"', second)
        assert polled is not None
        path = polled[1].replace("&amp;", "&")
        assert (await browser.get(path, **{"HX-Request": "true"})).status_code == 204
        assert (await browser.get(path)).status_code == 200, "a browser shows it"
        await ask(store, "acme:99", "One more?")
        assert "One more?" in (await browser.get(path, **{"HX-Request": "true"})).text


async def test_large_questions_hide_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with looked_at() as (store, browser):
        for number in range(6):
            await ask(store, f"acme:{number}", "Well?", data="x" * 9000)
        monkeypatch.setattr(pages, "_LARGEST", 50_000)
        first = await browser.get("/questions")
        assert (first.status_code, "5 open questions on this page" in first.text) == (200, True)


# Stuck conversations


async def test_a_stuck_conversation_is_listed_and_tried_again() -> None:
    async with looked_at() as (store, browser):
        assert "No conversation is stuck" in (await browser.get("/stuck")).text
        await store.session("evil:c").create()
        await make_stuck(store, "acme:c", "evil:c")
        listed = (await browser.get("/stuck")).text
        for shown in ("1 conversation is stuck", "acme:c", "acme:ada", ">support</td>", "ZeroDivisionError"):
            assert shown in listed, shown
        for hidden in ("evil:c", "a secret"):
            assert hidden not in listed, hidden
        assert re.search(r'<time class="ago" datetime="[^"]*Z">[\d.]+ s ago<', listed)
        page = (await browser.get(PLACE)).text
        assert "Stuck: " in page
        assert "ZeroDivisionError" in page

        done = await browser.post(PLACE + "/retry", {"back": ""})
        assert (done.status_code, done.headers["location"]) == (303, f"{PATH}/stuck")
        assert "No conversation is stuck" in (await browser.get("/stuck")).text
        again = await browser.post(PLACE + "/retry", {"back": "one"})
        assert (again.status_code, "somebody has retried it already" in again.text) == (409, True)
        async with worked(store, lambda turn: turn.append(*(each.message for each in turn.take()))):
            await until(lambda: served(store))
        assert "is called when something is posted" in (await browser.get(PLACE)).text


async def served(store: Any) -> bool:
    return any(each.content == "hi" for each in await store.session("acme:c").messages(fresh=True))


async def test_a_retry_on_the_conversations_page_comes_back_to_it() -> None:
    async with looked_at() as (store, browser):
        await make_stuck(store, "acme:c")
        done = await browser.post(PLACE + "/retry", {"back": "one"})
        assert done.headers["location"] == f"{PATH}/conversations/acme%3Ac"


async def test_all_stuck_conversations_are_retried_but_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with looked_at() as (store, browser):
        monkeypatch.setattr(schedules, "_ROWS", 2)
        for id in ("acme:d", "acme:e", "evil:c"):
            await store.session(id).create()
        await make_stuck(store, "acme:c", "acme:d", "acme:e", "evil:c")
        reader = await with_rights(browser, "acme:", "read")
        assert "Retry all" not in (await reader.get("/stuck")).text
        assert "Retry all" in (await browser.get("/stuck")).text
        assert (await reader.post("/stuck/retry", {"x": ""})).status_code == 403
        foreign = await browser.post("/stuck/retry", {"x": ""}, **{"Sec-Fetch-Site": "cross-site"})
        assert foreign.status_code == 403
        assert (await browser.post("/stuck/retry", {"x": ""})).headers["location"] == f"{PATH}/stuck"
        assert "No conversation is stuck" in (await browser.get("/stuck")).text
        found = await schedule_of(store.session("evil:c"))
        assert found is not None
        assert found.stuck, "another tenant's"


# The schedule of a conversation


async def test_a_conversation_shows_its_handler_and_its_wakes() -> None:
    async with looked_at() as (store, browser):
        assert "<h2>Schedule</h2>" not in (await browser.get(PLACE)).text
        session = store.session("acme:c")
        await session.wake("Ask again", after=7200, name=f"w{EVIL}", every=86_400, handler="support")
        await session.wake("x" * 400, after=86_400 * 3)
        for path in (PLACE, PLACE + "/schedule"):
            page = (await browser.get(path)).text
            for shown in ("<b>support</b> is due in ", "in 3 d", "every 24 h", "Ask again", "(without a name)"):
                assert shown in page, (path, shown)
            assert ("<script>alert" in page, "&lt;script&gt;alert" in page) == (False, True)
            assert ("x" * 300 + "…" in page, "x" * 301 in page) == (True, False)
        await session.post(said("hi"))
        assert "<b>support</b> is due now" in (await browser.get(PLACE)).text


async def test_a_wake_is_cancelled_once_by_who_may() -> None:
    async with looked_at() as (store, browser):
        session = store.session("acme:c")
        for name in ("", "n\u202e"):
            await session.wake("x", after=60, name=name)
        reader = await with_rights(browser, "acme:", "read")
        shown = ["/cancel-wake" in (await each.get(PLACE)).text for each in (browser, reader)]
        assert shown == [True, False]
        assert (await reader.post(PLACE + "/cancel-wake", {"name": ""})).status_code == 403
        foreign = await browser.post(PLACE + "/cancel-wake", {"name": ""}, **{"Sec-Fetch-Site": "cross-site"})
        assert foreign.status_code == 403
        assert (await browser.post(PLACE + "/cancel-wake", {"name": "n"})).status_code == 409
        for name in ("n\u202e", ""):
            done = await browser.post(PLACE + "/cancel-wake", {"name": name})
            assert done.headers["location"] == f"{PATH}/conversations/acme%3Ac"
        assert "<h2>Schedule</h2>" not in (await browser.get(PLACE)).text


async def test_a_wake_of_a_conversation_without_a_handler_waits_for_a_turn() -> None:
    async with looked_at() as (store, browser):
        await store.session("acme:c").wake("x", after=60, name="n")
        page = (await browser.get(PLACE)).text
        assert "an ordinary turn serves its wakes" in page


async def test_a_schedule_that_cannot_be_read_hides_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with looked_at() as (store, browser):
        await store.session("acme:c").wake("x" * 100_000, after=60)
        monkeypatch.setattr(pages, "_LARGEST", 50_000)
        page = await browser.get(PLACE)
        assert page.status_code == 200
        assert "When it goes on cannot be shown: " in page.text
        assert "Bergen" in page.text
