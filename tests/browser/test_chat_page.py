"""The page of `distributed-state demo chat`: it streams, and goes on after a reload, killed workers and a stop."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from chatting import chatting
from pages_seen import Picture, Watched
from playwright.sync_api import Browser, Locator, Page, expect

from distributed_state.programs.demo.chat import NAMES
from distributed_state.programs.demo.chat_agent import ANSWERS

SLOW = 60_000  # milliseconds; an answer takes eight seconds


@pytest.fixture(scope="module")
def link() -> Iterator[str]:
    with chatting(pause=0.1) as link:
        yield link


class Chat:
    """The page, as a visitor sees it."""

    def __init__(self, browser: Browser, link: str, scheme: str = "light") -> None:
        self.link = link
        self.context = browser.new_context(viewport={"width": 880, "height": 630}, color_scheme=scheme)  # type: ignore[arg-type]
        self.watched = Watched(self.context.new_page(), f"http://{urlsplit(link).hostname}:")
        self.page: Page = self.watched.page
        self.page.goto(link)
        expect(self.page.get_by_role("log")).to_have_attribute("aria-busy", "false", timeout=SLOW)
        self.speaking: Locator = self.page.locator(".message[data-state=speaking]")
        self.answers: Locator = self.page.locator(
            ".message[data-role=assistant]:not([data-state=speaking], [data-state=dead])"
        )
        self.happened: Locator = self.page.locator("#events")

    def speaker(self) -> Locator:
        """The name of the worker that speaks now."""
        mark = self.page.get_by_text("speaks", exact=True).and_(self.page.locator(":visible"))
        return self.page.get_by_role("article").filter(has=mark).get_by_role("heading")

    def both_serve(self) -> None:
        expect(self.page.locator("article[data-state=serving]")).to_have_count(2, timeout=SLOW)

    def kill(self, name: str) -> None:
        self.page.get_by_role("button", name=f"Kill {name}").click()
        expect(self.happened).to_contain_text(f"{name} was killed.")

    def send(self, text: str) -> None:
        self.page.get_by_label("Message").fill(text)
        self.page.get_by_role("button", name="Send").click()

    def said(self) -> str:
        """The words that are shown of the answer, once there are some: the beginning of one."""
        expect(self.speaking.locator("span")).to_contain_text(" ", timeout=SLOW)
        text = self.speaking.locator("span").inner_text()
        assert any(each.startswith(text.strip()) for each in ANSWERS)
        return text

    def last_answer(self) -> str:
        return self.answers.last.locator("span").inner_text().strip()

    def close(self) -> None:
        self.context.close()


def test_when_the_worker_that_speaks_is_killed_the_other_one_answers(
    browser: Browser, link: str, picture: Picture
) -> None:
    chat = Chat(browser, link)
    chat.both_serve()
    count = chat.answers.count()
    chat.send("Where should I go in June?")
    chat.said()
    killed = chat.speaker().inner_text()
    (other,) = {*NAMES} - {killed}
    chat.kill(killed)
    chat.send("And from there?")
    expect(chat.happened).to_contain_text(f"restarted: {killed} died", timeout=SLOW)
    expect(chat.speaking.locator("span")).to_contain_text(re.compile(".{120}"), timeout=SLOW)
    chat.said()
    expect(chat.speaker()).to_have_text(other)
    picture(chat.page, "demo-chat")
    expect(chat.answers).to_have_count(count + 1, timeout=SLOW)
    assert chat.last_answer() in ANSWERS
    expect(chat.answers.last.locator("small")).to_have_text(other)
    expect(chat.answers).to_have_count(count + 2, timeout=SLOW)
    assert chat.watched.wrong == []
    chat.close()


def test_when_all_workers_are_killed_others_go_on_with_everything_that_waits(browser: Browser, link: str) -> None:
    chat = Chat(browser, link)
    chat.both_serve()
    count = chat.answers.count()
    chat.send("Where should I go in June?")
    chat.said()
    for name in NAMES:
        chat.kill(name)
    chat.send("And from there?")
    expect(chat.page.locator(".message[data-state=waiting]")).to_have_count(1, timeout=SLOW)
    expect(chat.happened).to_contain_text("restarted: ", timeout=SLOW)
    expect(chat.answers).to_have_count(count + 2, timeout=SLOW)
    assert chat.last_answer() in ANSWERS
    assert chat.watched.wrong == []
    chat.close()


def test_an_answer_streams_to_each_page_and_goes_on_after_a_reload(browser: Browser, link: str) -> None:
    chat, other = Chat(browser, link), Chat(browser, link)
    count = chat.answers.count()
    chat.send("Reloaded <b>in the middle</b>")
    before = chat.said()
    assert other.said(), "a second page was open already"
    chat.page.reload()
    expect(chat.page.get_by_text("Reloaded <b>in the middle</b>")).to_be_visible(timeout=SLOW)
    expect(chat.speaking).to_contain_text(before.strip(), timeout=SLOW)
    chat.said()
    for each in (chat, other):
        expect(each.answers).to_have_count(count + 1, timeout=SLOW)
        expect(each.page.locator(".message[data-state=waiting]")).to_have_count(0)
        assert each.last_answer() in ANSWERS
        expect(each.happened).not_to_contain_text("restarted")
        assert each.watched.wrong == []
        each.close()


def test_an_answer_that_is_stopped_keeps_what_was_said(browser: Browser, link: str) -> None:
    chat = Chat(browser, link)
    stop = chat.page.get_by_role("button", name="Stop")
    expect(stop).to_be_disabled()
    count = chat.answers.count()
    chat.send("Stopped")
    before = chat.said()
    stop.click()
    expect(chat.answers).to_have_count(count + 1, timeout=SLOW)
    said, end = chat.last_answer()[:-9], chat.last_answer()[-9:]
    assert said.startswith(before)
    assert end == "(stopped)"
    assert any(each.startswith(said) for each in ANSWERS)
    expect(stop).to_be_disabled()
    assert chat.watched.wrong == []
    chat.close()


def test_a_message_that_is_sent_while_a_worker_speaks_waits_and_is_answered_next(browser: Browser, link: str) -> None:
    chat = Chat(browser, link)
    count = chat.answers.count()
    chat.send("First")
    chat.said()
    chat.send("Second")
    second = chat.page.locator(".message[data-state=waiting]").filter(has_text="Second")
    expect(second).to_contain_text("waits in the inbox")
    chat.page.reload()
    expect(second).to_be_visible(timeout=SLOW)
    expect(chat.answers).to_have_count(count + 2, timeout=SLOW)
    roles = chat.page.locator(".message").evaluate_all("all => all.map(each => each.dataset.role).slice(-4)")
    assert roles == ["user", "assistant"] * 2
    assert chat.watched.wrong == []
    chat.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_usable_by_everybody(browser: Browser, link: str, scheme: str) -> None:
    chat = Chat(browser, link, scheme)
    chat.send("Hello")
    chat.send("Hello again")
    expect(chat.page.locator(".message[data-state=waiting]")).to_have_count(1, timeout=SLOW)
    found = Axe().run(chat.page)
    assert found.violations_count == 0, found.generate_report()
    for _ in range(2):
        count = chat.answers.count()
        chat.page.get_by_role("button", name="Stop").click()
        expect(chat.answers).to_have_count(count + 1, timeout=SLOW)
    assert chat.watched.wrong == []
    chat.close()


def test_without_the_key_of_the_link_the_page_shows_nothing(browser: Browser, link: str) -> None:
    page = browser.new_page()
    page.goto(link.partition("#")[0])
    expect(page.locator("#events")).to_contain_text("open the link that the command has printed")
    expect(page.get_by_role("article")).to_have_count(0)
    page.close()
