"""The inspector in a real browser: what works there, by keyboard too, what it loads, and whether everybody can use it.

The pictures in docs/pictures are of these pages.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from clocks import moved_by_hand
from playwright.sync_api import Browser, Page, expect, sync_playwright
from serving import served

from distributed_state import Fenced, LockTimeout, StateStore
from distributed_state.programs.inspector import PATH, Tickets, inspector
from distributed_state.programs.service import Access, Service, callers_policy
from distributed_state.programs.service.authentication import Authentication

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
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
    "live": f"{PATH}/live",
    "take-over": HELD,
    "fleet": f"{PATH}/fleet",
    "sign-in": f"{PATH}/sign-in",
}


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

    def __init__(self, http: httpx.Client, store: StateStore, tickets: Tickets) -> None:
        self.url = str(http.base_url).rstrip("/")
        self.store = store
        self.tickets = tickets
        self.http = http

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
        store.admin.archive()
        yield Opened(http, store, tickets)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium, "these tests need chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        # Root has no sandbox; what is opened here is ours.
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


class Watched:
    """A page, and what went wrong on it: errors on its console, requests to others than its server."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.wrong: list[str] = []
        page.on("console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", lambda sent: None if sent.url.startswith(url) else self.wrong.append(sent.url))


Picture = Callable[[Page, str], None]


@pytest.fixture
def picture(pytestconfig: pytest.Config) -> Picture:
    """Makes the picture of a page anew, if the option says so."""

    def take(page: Page, name: str) -> None:
        if pytestconfig.option.pictures:
            PICTURES.mkdir(exist_ok=True)
            page.screenshot(path=PICTURES / f"inspector-{name}.png")

    return take


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
    if scheme == "light" and name in ("find", "conversation", "graph", "turn", "difference", "fleet"):
        picture(watched.page, name)
    watched.page.context.close()


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
    page.get_by_label("Open by id").fill("trip-by-mouse")
    page.get_by_role("button", name="Open").click()
    page.get_by_role("link", name="graph").click()
    expect(page.get_by_role("heading", name="Graph of")).to_be_visible()
    page.get_by_role("link", name="1 create").click()
    page.get_by_role("link", name="Roll back to version 1").click()
    page.get_by_role("link", name="Cancel").click()
    assert session.get("city", fresh=True) == "Paris", "it was only asked"
    page.goto(f"{opened.url}{PATH}/conversations/trip-by-mouse?version=1")
    page.get_by_role("link", name="Roll back to version 1").click()
    page.get_by_role("button", name="Roll back").click()
    expect(page.get_by_text("Present state: version 3")).to_be_visible()
    expect(page.get_by_text("back to version 1")).to_be_visible()
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
    assert any("back to 3" in each for each in reached)
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
    expect(page.get_by_role("status")).to_have_text("Not allowed, or signed out", timeout=20_000)
    opened.store.emit("mail.sent", {"number": 2}, subject=opened.store.session("planned"))
    expect(other.page.locator("#events tbody tr")).to_have_count(1)
    expect(page.locator("#events tbody tr")).to_have_count(1)
    page.reload()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
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
    picture(page, "live")
    held.end()
    row.get_by_role("link").click()
    expect(page.get_by_role("heading", name="trip-to-bergen")).to_be_visible()
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
    before = page.locator("#partitions ~ table td:nth-child(3)").all_inner_texts()
    for number in range(40):
        opened.store.session(f"more-{number}").create({})
    page.wait_for_function(
        "before => [...document.querySelectorAll('#partitions ~ table td:nth-child(3)')]"
        ".map(each => each.innerText).join() !== before",
        arg=",".join(before),
    )
    expect(page.locator("#all")).to_have_attribute("open", "")
    assert watched.wrong == []
    page.context.close()
