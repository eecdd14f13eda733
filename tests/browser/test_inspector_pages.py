"""The inspector in a real browser: what works there, by keyboard too, what it loads, and whether everybody can use it.

The pictures in docs/pictures are of these pages.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from clocks import moved_by_hand
from pages_seen import Picture, Watched
from playwright.sync_api import Browser, expect
from serving import served

from distributed_state import Fenced, LockTimeout, StateStore, Stopped
from distributed_state.programs.inspector import PATH, Tickets, inspector
from distributed_state.programs.servers import wait_until
from distributed_state.programs.service import Access, Service, callers_policy
from distributed_state.programs.service.authentication import Authentication

KEY = "k" * 43
PLACE = f"{PATH}/conversations/trip-to-bergen"
HELD = "held"
PAGES = {
    "find": f"{PATH}/",
    "conversation": PLACE,
    "past": f"{PLACE}?version=3",
    "graph": f"{PLACE}/graph",
    "large": f"{PATH}/conversations/large",
    "found": f"{PATH}/?phase=planning&newer=1&held=true",
    "turn": f"{PATH}/conversations/a-slow-turn",
    "difference": f"{PLACE}/difference?from=2&to=9",
    "rollback": f"{PLACE}/rollback?version=2",
    "erase": f"{PLACE}/erase",
    "questions": f"{PATH}/questions",
    "asking": f"{PATH}/conversations/trip-to-lofoten",
    "stuck": f"{PATH}/stuck",
    "stuck-one": f"{PATH}/conversations/invoice-4712",
    "live": f"{PATH}/live",
    "take-over": HELD,
    "fleet": f"{PATH}/fleet",
    "users": f"{PATH}/users",
    "user": f"{PATH}/users/ada",
    "tasks": f"{PATH}/tasks",
    "task": f"{PATH}/tasks/nightly-report",
    "tokens": f"{PATH}/tokens",
    "sign-in": f"{PATH}/sign-in",
}


PICTURED = ("find", "conversation", "graph", "turn", "difference", "fleet", "questions", "stuck", "asking")


def fill(store: StateStore) -> None:
    """Keep a conversation about a journey, and some others."""
    for number in range(8):
        store.session(f"conversation-{number}", user=f"user-{number % 3}").create({"n": number})
    trip = store.session("trip-to-bergen", user="ada")
    with store.acting_as("web"):
        trip.create({"city": "Oslo", "plan": {"nights": 3, "rooms": [{"kind": "double", "price": 120}]}})
    for number, question in enumerate(("Where to?", "And the hotel?", "By train?")):
        with store.acting_as(f"worker-{number}"):
            trip.append(
                {"role": "user", "content": question},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": f"call_{number}", "type": "function",
                     "function": {"name": "search_hotels", "arguments": '{"city": "Bergen", "nights": 3}'}}]},
                {"role": "tool", "tool_call_id": f"call_{number}", "content": '{"hotels": ["Bryggen", "Floien"]}'},
                {"role": "assistant", "content": "There are two hotels that fit."},
            )  # fmt: skip
            trip.set("step", number)
        trip.transition(("new_task", "plan_ready", "reflect")[number])
    trip.checkpoint("before booking")
    trip.set("city", "Bergen")
    trip.rollback(version=3)
    trip.set("city", "Bergen")
    trip.fork("trip-to-tromso", version=8)
    store.session("trip-to-tromso").set("city", "Tromso")
    store.user("ada").set("language", "nb")
    store.task("nightly-report", user="ada").create({"pages": 3})
    store.session("large").create({"city": "Oslo", "report": "x" * 3_000_000})
    store.session("planned").transition("new_task")
    slow = store.session("a-slow-turn", user="ada").turn(wait=1)
    go_on = moved_by_hand(slow._core)
    with slow:
        with slow.model("gpt-5"):
            go_on(0.6)
        with slow.tool("search_hotels"):
            go_on(3.2)
        go_on(0.2)
        slow.append({"role": "assistant", "content": "There are two hotels that fit."})


def go_on_alone(store: StateStore) -> None:
    """Let some sessions ask people, others fail in their handlers, and one have wakes."""
    for id, user, question, data, expires in (
        ("trip-to-lofoten", "ada", "The cabin at Reine costs 900 for three nights. Shall I book it?",
         {"price": 900, "nights": 3, "choices": ["Book it", "Look for a cheaper one", "No"]}, 86_400),
        ("invoice-4711", "grace", "This invoice has no order number. Which order does it belong to?", None, None),
    ):  # fmt: skip
        with store.session(id, user=user).turn() as turn:
            turn.append({"role": "assistant", "content": question})
            turn.ask(question, name="booking" if data else "", data=data, expires=expires)
    lofoten = store.session("trip-to-lofoten")
    lofoten.wake("Has the weather changed?", every=86_400, name="weather", handler="travel")
    with running(store, "invoices", max_attempts=1):
        for number, user in ((4712, "grace"), (4713, "ada")):
            session = store.session(f"invoice-{number}", user=user)
            session.post({"role": "user", "content": "Please pay this."}, handler="invoices")
        wait_until(lambda: len(store.sessions(stuck=True, fresh=True)) == 2, "two stuck sessions")


@contextmanager
def running(store: StateStore, handler: str, **options: Any) -> Iterator[None]:
    """A worker whose handler fails, until the block ends."""

    def fail(turn: Any) -> None:
        turn.take()
        raise ConnectionError("the ledger does not answer")

    store.handler(handler, fail)
    working = threading.Thread(target=partial(store.work, **options))
    working.start()
    try:
        yield
    finally:
        store.stop_working()
        working.join(60)


class Held:
    """A turn that runs, and one who waits for its record, in threads of their own, until it is ended."""

    def __init__(self, store: StateStore, id: str) -> None:
        self.session = store.session(id)
        self.outcome = ""
        self._leave = threading.Event()
        begun = threading.Event()
        self._turn = threading.Thread(target=self._run, args=(begun,), daemon=True)
        self._turn.start()
        assert begun.wait(10)
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    def _run(self, begun: threading.Event) -> None:
        try:
            with self.session.turn() as turn:
                begun.set()
                self._leave.wait(120)
                turn["late"] = True
            self.outcome = "written"
        except Fenced:
            self.outcome = "refused"

    def _wait(self) -> None:
        with suppress(LockTimeout), self.session.lock(wait=60):
            pass

    def end(self) -> str:
        self._leave.set()
        for each in (self._turn, self._waiter):
            each.join(60)
        return self.outcome


class Opened:
    """A service with the inspector, on real servers, and a store beside it."""

    def __init__(
        self, http: httpx.Client, store: StateStore, tickets: Tickets, another: Callable[..., StateStore]
    ) -> None:
        self.url = str(http.base_url).rstrip("/")
        self.store = store
        self.tickets = tickets
        self.http = http
        self.another = another

    def reader(self) -> str:
        """A token that only reads."""
        given = {"all_tenants": True, "rights": ["read"], "actor": "ada"}
        made = self.http.post("/v1/tokens", headers={"Authorization": f"Bearer {KEY}"}, json=given)
        return str(made.json()["token"])

    def asked_to_take_over(self) -> str:
        """The page that asks whether a lease is taken over, of one that is held for the rest of these tests."""
        id = "trip-that-is-held"
        found = [each for each in self.store.admin.leases() if each.record_id == id]
        if not found:
            self.lease = self.store.session(id).lock()
            self.lease.acquire()
            found = [each for each in self.store.admin.leases() if each.record_id == id]
        return f"{PATH}/leases/conversations/{id}/{found[0].token}/take-over"


@pytest.fixture(scope="module")
def opened(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    place = {"archive": f"sqlite:///{tmp_path_factory.mktemp('browser')}/a.db", "namespace": f"t{os.urandom(6).hex()}"}
    url, tickets = servers.redis("valkey").url, Tickets(KEY)
    service = Service(authentication=Authentication(Access(key=KEY, tokens=True)))
    service.app.mount(PATH, inspector(service.app, tickets))
    with (
        served(url, service=service, access=callers_policy(), **place) as http,
        StateStore.open(url, archiver=False, **place) as store,
    ):
        fill(store)
        go_on_alone(store)
        store.admin.archive()
        yield Opened(http, store, tickets, partial(StateStore.open, url, archiver=False, **place))


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened_page(browser: Browser, opened: Opened, scheme: str = "light", token: str = KEY) -> Watched:
    context = browser.new_context(viewport={"width": 1100, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
    context.add_cookies(
        [{"name": "distributed_state_inspector", "value": token, "url": f"{opened.url}{PATH}/"}]  # as its path is
    )
    return Watched(context.new_page(), opened.url)


@pytest.mark.parametrize("name", PAGES)
def test_each_page_is_usable_by_everybody_and_loads_nothing_from_others(
    browser: Browser, opened: Opened, scheme: str, name: str, picture: Picture
) -> None:
    watched = opened_page(browser, opened, scheme)
    watched.page.goto(opened.url + (opened.asked_to_take_over() if PAGES[name] == HELD else PAGES[name]))
    expect(watched.page.locator("h1")).to_be_visible()
    found = Axe().run(watched.page)
    assert found.violations_count == 0, found.generate_report()
    assert watched.wrong == []
    if scheme == "light" and name in PICTURED:
        picture(watched.page, f"inspector-{name}")
    watched.page.context.close()


@pytest.mark.parametrize("name", PAGES)
def test_no_page_scrolls_sideways_on_a_phone(browser: Browser, opened: Opened, name: str) -> None:
    watched = opened_page(browser, opened)
    watched.page.set_viewport_size({"width": 390, "height": 844})
    watched.page.goto(opened.url + (opened.asked_to_take_over() if PAGES[name] == HELD else PAGES[name]))
    assert watched.page.evaluate("document.documentElement.scrollWidth") == 390
    watched.page.context.close()


def test_times_are_shown_in_the_readers_time_zone(browser: Browser, opened: Opened) -> None:
    context = browser.new_context(timezone_id="Pacific/Kiritimati")  # 14 hours ahead of UTC
    cookie = {"name": "distributed_state_inspector", "value": KEY, "url": f"{opened.url}{PATH}/"}
    context.add_cookies([cookie])  # type: ignore[list-item]
    page = context.new_page()
    page.goto(opened.url + PLACE)
    shown = page.locator(".versions time").first
    expect(shown).not_to_contain_text("UTC")
    at = datetime.fromisoformat(shown.get_attribute("datetime") or "")
    there = at.astimezone(timezone(timedelta(hours=14)))
    assert (shown.text_content() or "").endswith(there.strftime("%H:%M:%S"))
    assert shown.get_attribute("title") == at.strftime("%Y-%m-%d %H:%M:%S UTC")
    context.close()


def test_the_actions_stay_in_reach(browser: Browser, opened: Opened) -> None:
    for width in (1100, 390):
        watched = opened_page(browser, opened)
        page = watched.page
        page.set_viewport_size({"width": width, "height": 600})
        page.goto(f"{opened.url}{PLACE}?version=9")
        page.mouse.wheel(0, 5000)
        page.wait_for_function("scrollY > 500")
        expect(page.get_by_role("link", name="Roll back to version 9")).to_be_in_viewport(ratio=1)
        page.context.close()


def test_a_fault_and_a_strangers_request_would_be_noticed(browser: Browser, opened: Opened) -> None:
    """The negative control."""
    watched = opened_page(browser, opened)
    watched.page.goto(opened.url + PAGES["find"])
    watched.page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=http://127.0.0.1:9/x.png>')")
    watched.page.wait_for_timeout(200)
    assert any("Content Security Policy" in each for each in watched.wrong)
    assert Axe().run(watched.page).violations_count > 0
    watched.page.context.close()


def test_a_link_opens_the_pages_once(browser: Browser, opened: Opened) -> None:
    link = f"{opened.url}{PATH}/enter?ticket={opened.tickets.ticket}"
    first, second = browser.new_context().new_page(), browser.new_context().new_page()
    first.goto(link)
    expect(first.get_by_role("heading", name="Find a conversation")).to_be_visible()
    second.goto(link)
    expect(second.get_by_role("alert")).to_contain_text("already used")
    second.goto(f"{opened.url}{PATH}/fleet")
    expect(second.get_by_role("heading", name="Sign in")).to_be_visible()
    second.get_by_label("Token").fill(KEY)
    second.get_by_role("button", name="Sign in").click()
    expect(second.get_by_role("heading", name="Find a conversation")).to_be_visible()
    second.get_by_role("button", name="Sign out").click()
    expect(second.get_by_role("heading", name="Sign in")).to_be_visible()
    for page in (first, second):
        page.context.close()


def test_the_slider_shows_the_state_at_a_version(browser: Browser, opened: Opened) -> None:
    watched = opened_page(browser, opened)
    page = watched.page
    page.goto(opened.url + PLACE)
    expect(page.locator("#fields ~ .tree")).to_contain_text("Bergen")
    page.get_by_role("slider").focus()
    page.keyboard.press("Home")
    expect(page.get_by_text("State at version 1")).to_be_visible()
    expect(page.locator("#fields ~ .tree")).to_contain_text("Oslo")
    assert page.url.endswith("version=1")
    assert watched.wrong == []
    page.context.close()


def test_a_rollback_by_keyboard_alone(browser: Browser, opened: Opened) -> None:
    session = opened.store.session("trip-by-keyboard")
    session.create({"city": "Oslo"})
    session.set("city", "Paris")
    opened.store.admin.archive()
    watched = opened_page(browser, opened)
    page = watched.page
    page.goto(f"{opened.url}{PATH}/")

    def reach(text: str) -> None:
        """Go on by the tabulator until this has the focus."""
        for _ in range(60):
            page.keyboard.press("Tab")
            if text in (page.evaluate("document.activeElement.textContent") or ""):
                return
        raise AssertionError(f"{text} is not reached")

    reach("trip-by-keyboard")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="trip-by-keyboard")).to_be_visible()
    page.goto(f"{page.url}?version=1")
    reach("Roll back to version 1")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Roll back to version 1?")).to_be_visible()
    assert session.get("city", fresh=True) == "Paris", "it was only asked"
    reach("Roll back")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Present state: version 3")).to_be_visible()
    assert session.get("city", fresh=True) == "Oslo"
    assert watched.wrong == []
    page.context.close()


def test_a_rollback_by_clicking(browser: Browser, opened: Opened) -> None:
    session = opened.store.session("trip-by-mouse")
    session.create({"city": "Oslo"})
    session.set("city", "Paris")
    opened.store.admin.archive()
    watched = opened_page(browser, opened)
    page = watched.page
    page.goto(f"{opened.url}{PATH}/")
    page.get_by_role("searchbox").fill("trip-by-m")
    page.get_by_role("button", name="Find").click()
    page.get_by_role("link", name="trip-by-mouse").click()
    page.get_by_role("link", name="Graph").click()
    expect(page.get_by_role("heading", name="Graph of")).to_be_visible()
    page.get_by_role("link", name="1 city set").click()
    page.get_by_role("link", name="Roll back to version 1").click()
    page.get_by_role("link", name="Cancel").click()
    assert session.get("city", fresh=True) == "Paris", "it was only asked"
    page.goto(f"{opened.url}{PATH}/conversations/trip-by-mouse?version=1")
    page.get_by_role("link", name="Roll back to version 1").click()
    page.get_by_role("button", name="Roll back").click()
    expect(page.get_by_text("Present state: version 3")).to_be_visible()
    expect(page.locator(".words").get_by_text("back to version 1")).to_be_visible()
    assert session.get("city", fresh=True) == "Oslo"
    assert watched.wrong == []
    page.context.close()


def test_the_graph_is_walked_by_keyboard(browser: Browser, opened: Opened) -> None:
    watched = opened_page(browser, opened)
    page = watched.page
    page.goto(opened.url + PAGES["graph"])
    reached = list[str]()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent").strip())
        if reached[-1].startswith("fork trip-to-tromso"):
            break
    assert any("checkpoint before booking" in each for each in reached)
    assert any("back to version 3" in each for each in reached)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="trip-to-tromso")).to_be_visible()
    expect(page.get_by_text("forked from")).to_be_visible()
    assert watched.wrong == []
    page.context.close()


def test_an_export_and_a_large_field_are_downloaded(browser: Browser, opened: Opened) -> None:
    watched = opened_page(browser, opened)
    page = watched.page
    page.goto(f"{opened.url}{PATH}/conversations/large")
    expect(page.get_by_text("1 too large to show here")).to_be_visible()
    with page.expect_download() as field:
        page.get_by_role("link", name="download report").click()
    assert field.value.suggested_filename == "field.json"
    with page.expect_download() as whole:
        page.get_by_role("link", name="Export as JSON Lines").click()
    assert whole.value.suggested_filename == "large.jsonl"
    lines = Path(whole.value.path()).read_text().splitlines()
    assert lines == opened.store.admin.export("large")
    assert watched.wrong == []
    page.context.close()


def test_a_live_page_ends_when_its_token_is_revoked(browser: Browser, opened: Opened) -> None:
    def ask(method: str, path: str, **options: Any) -> Any:
        return opened.http.request(method, path, headers={"Authorization": f"Bearer {KEY}"}, **options).json()

    made = ask("POST", "/v1/tokens", json={"all_tenants": True, "rights": ["read", "events"], "actor": "ada"})
    watched = opened_page(browser, opened, token=made["token"])
    page = watched.page
    page.goto(f"{opened.url}{PATH}/live?types=mail.*")
    expect(page.get_by_role("status")).to_have_text("Connected")
    opened.store.emit("mail.sent", {"number": 1}, subject=opened.store.session("planned"))
    expect(page.locator("#events tbody tr")).to_have_count(1)
    ask("DELETE", f"/v1/tokens/{made['id']}")
    # The negative control: who has another token hears on.
    other = opened_page(browser, opened)
    other.page.goto(f"{opened.url}{PATH}/live?types=mail.*")
    expect(other.page.get_by_role("status")).to_have_text("Connected")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible(timeout=20_000)
    opened.store.emit("mail.sent", {"number": 2}, subject=opened.store.session("planned"))
    expect(other.page.locator("#events tbody tr")).to_have_count(1)
    for each in (page, other.page):
        each.context.close()


def test_events_are_seen_as_they_happen_without_a_reload(browser: Browser, opened: Opened, picture: Picture) -> None:
    watched = opened_page(browser, opened)
    page = watched.page
    page.goto(f"{opened.url}{PATH}/live?types=mail.*")
    expect(page.get_by_role("status")).to_have_text("Connected")
    opened.store.emit("mail.sent", {"to": "<b>ada</b>"}, subject=opened.store.session("trip-to-bergen"))
    opened.store.emit("other.thing", {}, subject=opened.store.session("trip-to-bergen"))
    row = page.locator("#events tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("mail.sent")
    expect(row).to_contain_text("<b>ada</b>")
    held = Held(opened.store, "trip-to-bergen")
    expect(page.locator("#held tbody tr").filter(has_text="trip-to-bergen")).to_contain_text("1, the first for")
    picture(page, "inspector-live")
    held.end()
    row.get_by_role("link").click()
    expect(page.get_by_role("heading", name="trip-to-bergen")).to_be_visible()
    assert watched.wrong == []
    page.context.close()


def test_the_output_of_a_turn_is_seen_while_it_runs(browser: Browser, opened: Opened) -> None:
    session = opened.store.session("trip-that-speaks")
    session.create({})
    watched = opened_page(browser, opened)
    page = watched.page
    page.goto(f"{opened.url}{PATH}/conversations/trip-that-speaks")
    state, output = page.locator("#turn"), page.locator("#output")
    expect(state).to_have_text("No turn runs")
    expect(output).to_be_hidden()
    with suppress(ZeroDivisionError), session.turn(request_id="r1") as turn:
        turn.stream("<b>There")
        turn.stream(" are</b>")
        turn.stream({"tool": "<i>hotels</i>"})
        turn.stream(b"\0\1")
        turn.flush()
        expect(state).to_have_text("A turn runs")
        expect(output.locator("p")).to_have_text(
            ["<b>There are</b>", '{"tool":"<i>hotels</i>"}', "bytes AAE="]
        )  # fmt: skip
        raise ZeroDivisionError
    expect(output.locator("p").last).to_have_text("Failed: nothing was written")
    with session.turn(request_id="r1") as turn:
        turn.stream("y" * 10_000)
        turn.stream("Two hotels.")
        turn.flush()
        expect(output.locator("p").nth(4)).to_contain_text("Begun again")
        expect(output.locator(".old")).to_have_count(4)
        said = output.locator("p").last
        expect(said).to_contain_text("Two hotels.")
        assert len(said.text_content() or "") == 8001, "as much as of a message, and a mark"
        turn["city"] = "Bergen"
        turn.outcome = {"hotels": 2}
    expect(output.locator("p").last).to_have_text('Ended: written as version 2, outcome {"hotels":2} show version 2')
    expect(state).to_have_text("No turn runs")
    with session.turn(request_id="r2") as turn:
        turn.stream("Another")
        turn.flush()
        expect(output.locator("p")).to_have_text(["Another"])
    expect(output.locator("p").last).to_have_text("Ended: written as version 3 show version 3")
    with session.turn() as turn:
        turn.stream("It changes nothing")
    expect(output.locator("p")).to_have_text(["It changes nothing", "Ended: nothing was written"])
    assert watched.wrong == []
    page.context.close()


def test_output_that_is_missing_is_marked_and_a_page_shows_the_last_parts(browser: Browser, opened: Opened) -> None:
    with opened.another(output_bytes=64 * 1024) as store:
        session = store.session("trip-of-many-words")
        session.create({})
        watched = opened_page(browser, opened)
        page = watched.page
        with session.turn() as turn:
            for number in range(500):
                turn.stream({"number": number, "text": "x" * 400})
                turn.flush()
            page.goto(f"{opened.url}{PATH}/conversations/trip-of-many-words")
            parts = page.locator("#output p")
            expect(parts.first).to_have_text("Output is missing here")
            for number in range(300):
                turn.stream({"number": number, "text": "y" * 400})
            turn.flush()
            expect(parts.last).to_contain_text('"number":299')
            expect(parts.last).to_contain_text("more characters")
            expect(parts).to_have_count(200)
            expect(parts.first).to_have_text("Earlier output is not shown")
        assert watched.wrong == []
        page.context.close()


def test_a_turn_is_stopped_by_the_second_click(browser: Browser, opened: Opened, picture: Picture) -> None:
    session = opened.store.session("trip-that-is-stopped", user="ada")
    session.create({"city": "Oslo"})
    session.append({"role": "user", "content": "Which hotels are there in Bergen?"})
    opened.store.admin.archive()
    watched, reading = (opened_page(browser, opened, token=each) for each in (KEY, opened.reader()))
    page = watched.page
    for each in (page, reading.page):
        each.goto(f"{opened.url}{PATH}/conversations/trip-that-is-stopped")
    stop = page.locator("#stop")
    expect(page.locator("#turn")).to_have_text("No turn runs")
    expect(stop).to_be_hidden()
    with session.turn(request_id="r1") as turn:
        turn.stream({"tool": "search_hotels", "city": "Bergen"})
        turn.stream("There are two hotels that fit: Bryggen, by the harbour, and ")
        turn.flush()
        expect(reading.page.locator("#output")).to_contain_text("two hotels")
        expect(reading.page.locator("#turn")).to_have_text("A turn runs")
        expect(reading.page.locator("#stop")).to_have_count(0)
        session.post({"role": "user", "content": "One with a sauna, please."}, request_id="r2")
        expect(page.locator("#inbox")).to_contain_text("One with a sauna")
        expect(stop).to_have_text("Stop the turn")
        stop.dblclick()
        expect(stop).to_have_text("Stop the turn? Click again")
        assert not turn.stopping, "it was only asked"
        assert Axe().run(page).violations_count == 0, Axe().run(page).generate_report()
        page.set_viewport_size({"width": 1100, "height": 440})
        picture(page, "inspector-turn-live")
        stop.click()
        expect(page.locator("#output p").last).to_have_text("Asked to stop: requested in the inspector")
        with pytest.raises(Stopped), turn.stoppable():
            threading.Event().wait(30)
        turn.append({"role": "assistant", "content": "There are two hotels that fit"})
    expect(page.locator("#output p").last).to_contain_text("Ended: written as version 4")
    expect(stop).to_be_hidden()
    page.get_by_role("link", name="show version 4").click()
    expect(page.get_by_text("State at version 4")).to_be_visible()
    assert (watched.wrong, reading.wrong) == ([], [])
    for each in (page, reading.page):
        each.context.close()


def test_the_inbox_is_seen_as_it_changes_and_the_slider_leaves_it(browser: Browser, opened: Opened) -> None:
    session = opened.store.session("trip-with-messages")
    session.create({"city": "Oslo"})
    session.set("city", "Bergen")
    opened.store.admin.archive()
    watched = opened_page(browser, opened)
    page = watched.page
    page.goto(f"{opened.url}{PATH}/conversations/trip-with-messages")
    inbox, state = page.locator("#inbox"), page.locator("#turn")
    expect(inbox).to_have_text("")
    expect(state).to_have_text("No turn runs")
    for text in ("<b>first</b>", "second", "third"):
        session.post({"role": "user", "content": text}, request_id=f"id-{text}")
    expect(inbox).to_contain_text("3 messages wait")
    expect(inbox.locator("li").first).to_contain_text("<b>first</b>")
    expect(inbox.locator("li").first).to_contain_text("request id-<b>first</b>")
    session.withdraw(2)
    expect(inbox).to_contain_text("2 messages wait")
    with session.turn(request_id="r") as turn:
        turn.stream("I look")
        turn.take()
        page.get_by_role("slider").focus()
        page.keyboard.press("Home")
        expect(page.get_by_text("State at version 1")).to_be_visible()
        turn.stream(" for it")
        turn.flush()
        expect(page.locator("#output p")).to_have_text(["I look for it"])
        page.go_back()
        expect(page.get_by_text("Present state")).to_be_visible()
        turn.stream(".")
    expect(page.locator("#output p").first).to_have_text("I look for it.")
    expect(inbox).to_have_text("")
    assert watched.wrong == []
    page.context.close()


def test_a_running_turn_is_taken_over_by_click_and_writes_nothing(browser: Browser, opened: Opened) -> None:
    session = opened.store.session("trip-that-hangs")
    session.create({"city": "Oslo"})
    session.set("city", "Paris")
    opened.store.admin.archive()
    held = Held(opened.store, "trip-that-hangs")
    watched = opened_page(browser, opened)
    page = watched.page
    page.goto(f"{opened.url}{PATH}/live")
    row = page.locator("#held tbody tr").filter(has_text="trip-that-hangs")
    expect(row).to_contain_text("turn")
    expect(row).to_contain_text("1, the first for")
    page.get_by_role("link", name="Take over trip-that-hangs").click()
    expect(page.get_by_role("heading", name="Take trip-that-hangs over?")).to_be_visible()
    assert not held.outcome
    page.get_by_role("button", name="Take over").click()
    expect(row).to_contain_text("client (you)")
    page.goto(f"{opened.url}{PATH}/conversations/trip-that-hangs/rollback?version=1")
    page.get_by_role("button", name="Roll back").click()
    expect(page.get_by_text("Present state: version 3")).to_be_visible()
    page.goto(f"{opened.url}{PATH}/live")
    page.get_by_role("link", name="Release trip-that-hangs").click()
    page.get_by_role("button", name="Release").click()
    assert held.end() == "refused"
    expect(row).to_have_count(0)  # by itself: the page looks again
    assert session.get_all(fresh=True) == {"city": "Oslo"}
    assert watched.wrong == []
    page.context.close()


def test_a_turn_is_released_by_keyboard_while_the_page_goes_on(browser: Browser, opened: Opened) -> None:
    """The list is made anew every two seconds: what has the focus keeps it."""
    held = Held(opened.store, "trip-by-keys")
    watched = opened_page(browser, opened)
    page = watched.page
    page.goto(f"{opened.url}{PATH}/live")
    link = page.get_by_role("link", name="Release trip-by-keys")
    link.focus()
    with page.expect_response(lambda found: found.url.endswith("/live")):
        pass
    page.wait_for_function("document.activeElement.textContent.includes('Release trip-by-keys')")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Release trip-by-keys from its holder?")).to_be_visible()
    page.get_by_role("button", name="Release").press("Enter")
    expect(page.get_by_role("heading", name="Live")).to_be_visible()
    assert held.end() == "refused"
    assert watched.wrong == []
    page.context.close()


def test_the_fleet_is_seen_as_it_changes_and_what_was_unfolded_stays(browser: Browser, opened: Opened) -> None:
    watched = opened_page(browser, opened)
    page = watched.page
    page.goto(f"{opened.url}{PATH}/fleet")
    page.get_by_text("checks made when").click()
    page.get_by_text("All partitions").click()
    before = page.locator("#every td:nth-child(3)").all_inner_texts()
    for number in range(40):
        opened.store.session(f"more-{number}").create({})
    page.wait_for_function(
        "before => [...document.querySelectorAll('#every td:nth-child(3)')]"
        ".map(each => each.innerText).join() !== before",
        arg=",".join(before),
    )
    for each in ("#all", "#every"):
        expect(page.locator(each)).to_have_attribute("open", "")
    commits = page.locator('[data-name="Commits"]')
    expect(commits.locator("dd")).to_contain_text("/s")
    expect(commits.locator("polyline")).to_have_attribute("points", re.compile(r"^0,.* 2\.0"), timeout=15_000)
    assert watched.wrong == []
    page.context.close()


def test_a_question_is_answered_by_clicking_and_what_is_half_written_stays(browser: Browser, opened: Opened) -> None:
    """The list is read again every five seconds."""
    with opened.store.session("trip-with-a-question", user="ada").turn() as turn:
        turn.ask("By train?", data=["yes", "no"])
    watched = opened_page(browser, opened)
    page = watched.page
    page.goto(f"{opened.url}{PATH}/questions")
    asked = page.locator("#questions li").filter(has_text="trip-with-a-question")
    text = asked.get_by_label("Another answer")
    text.press_sequentially("by ")
    with opened.store.session("trip-with-another", user="ada").turn() as turn:
        turn.ask("By boat?")
    other = page.locator("#questions li").filter(has_text="trip-with-another")
    expect(other).to_contain_text("By boat?", timeout=15_000)  # by itself
    page.keyboard.type("train")  # it still has the focus
    expect(text).to_have_value("by train")
    opened.store.session("trip-with-another").answer("yes")
    expect(other).to_have_count(0, timeout=15_000)
    expect(text).to_have_value("by train")
    asked.get_by_role("button", name="yes").click()
    expect(page.get_by_role("heading", name="Questions", exact=True)).to_be_visible()
    expect(asked).to_have_count(0)
    session = opened.store.session("trip-with-a-question")
    assert [each.message.content for each in session.inbox()] == ["yes"]
    assert watched.wrong == []
    page.context.close()


def test_a_second_answer_is_refused_in_words(browser: Browser, opened: Opened) -> None:
    with opened.store.session("trip-answered-twice").turn() as turn:
        turn.ask("By train?")
    watched = opened_page(browser, opened)
    page = watched.page
    page.route("**/output", lambda route: route.abort())  # the page does not find out by itself
    page.goto(f"{opened.url}{PATH}/conversations/trip-answered-twice")
    page.get_by_label("Answer").fill("no")
    opened.store.session("trip-answered-twice").answer("yes")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("heading", name="Nothing was changed")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("Somebody has answered this question already")
    page.context.close()


def test_a_stuck_conversation_is_retried_by_keyboard(browser: Browser, opened: Opened) -> None:
    """The list is made anew every five seconds: what has the focus keeps it."""
    with running(opened.store, "hangs", max_attempts=1):
        for each in ("first", "second"):
            opened.store.session(f"stuck-{each}").post({"role": "user", "content": "hi"}, handler="hangs")
        wait_until(lambda: len(opened.store.sessions(stuck=True, fresh=True)) == 4, "two more")
    watched, reading = (opened_page(browser, opened, token=each) for each in (KEY, opened.reader()))
    page = watched.page
    for each in (page, reading.page):
        each.goto(f"{opened.url}{PATH}/stuck")
        expect(each.locator("#stuck tbody tr").filter(has_text="stuck-second")).to_contain_text("ConnectionError")
    expect(reading.page.locator("#stuck").get_by_role("button")).to_have_count(0)
    page.get_by_role("button", name="Retry stuck-second").focus()
    with page.expect_response(lambda found: "/stuck" in found.url, timeout=15_000):
        pass
    page.wait_for_function("document.activeElement.textContent.includes('Retry stuck-second')")
    page.keyboard.press("Enter")
    expect(page.locator("#stuck tbody tr").filter(has_text="stuck-second")).to_have_count(0)
    expect(page.locator("#stuck tbody tr").filter(has_text="stuck-first")).to_have_count(1)
    expect(reading.page.locator("#stuck tbody tr").filter(has_text="stuck-second")).to_have_count(0, timeout=15_000)
    assert watched.wrong == []
    for each in (page, reading.page):
        each.context.close()


def test_the_schedule_is_seen_as_it_changes(browser: Browser, opened: Opened) -> None:
    session = opened.store.session("trip-that-wakes")
    session.create({})
    watched = opened_page(browser, opened)
    page = watched.page
    page.goto(f"{opened.url}{PATH}/conversations/trip-that-wakes")
    expect(page.locator("#turn")).to_have_text("No turn runs")
    expect(page.locator("#plan")).to_have_text("")
    with session.turn() as turn:
        turn.wake("Ask again", after=10_800, name="<b>again</b>")
        turn.ask("By train?")
    plan = page.locator("#plan")
    expect(plan).to_contain_text("<b>again</b>")
    expect(plan).to_contain_text("in 3 h")
    expect(plan).to_contain_text("By train?")
    session.answer("yes")
    expect(plan).not_to_contain_text("By train?")
    assert watched.wrong == []
    page.context.close()
