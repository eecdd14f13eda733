"""Pages that are seen in a browser. Law: what goes wrong on a page is noticed."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page

Picture = Callable[[Page, str], None]


class Watched:
    """A page, and what went wrong on it: errors on its console, requests to others than its servers."""

    def __init__(self, page: Page, *urls: str) -> None:
        self.page = page
        self.wrong: list[str] = []
        page.on("console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", lambda sent: None if sent.url.startswith(urls) else self.wrong.append(sent.url))
