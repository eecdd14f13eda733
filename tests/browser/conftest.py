"""A browser for all tests of pages, and the pictures that docs/ has of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages_seen import Picture
from playwright.sync_api import Browser, Page, sync_playwright

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium, "these tests need chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        # Root has no sandbox; what is opened here is ours.
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def picture(pytestconfig: pytest.Config) -> Picture:
    """Takes the picture of a page for docs/, if pytest was started with `--pictures`."""

    def take(page: Page, name: str) -> None:
        if pytestconfig.option.pictures:
            PICTURES.mkdir(exist_ok=True)
            page.screenshot(path=PICTURES / f"{name}.png")

    return take
