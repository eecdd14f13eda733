"""The script of the page docs/how-to/streaming-browser.md follows a turn in a real browser."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from docs_pages import ROOT, blocks_of
from playwright.sync_api import Browser, expect
from serving import served

from distributed_state import StateStore

PAGE = """<!doctype html><p id=answer></p><p id=state></p><script type=module>
import { follow } from './follow.js';
const answer = document.getElementById('answer');
const source = await follow('/v1/conversations/c', 'r', {}, (text) => { answer.textContent = text; });
setInterval(() => { document.getElementById('state').textContent = source.readyState; }, 10);
</script>"""


def test_a_page_shows_the_answer_after_a_reload_and_stops_at_its_end(
    servers: Any, browser: Browser, tmp_path: Path
) -> None:
    found = {block.file: block.text for block in blocks_of(ROOT / "docs" / "how-to" / "streaming-browser.md")}
    place = {"archive": f"sqlite:///{tmp_path}/a.db", "namespace": f"t{os.urandom(6).hex()}"}
    url = servers.redis("valkey").url
    with StateStore.open(url, **place, stream_interval=0.0) as store, served(url, **place) as http:
        page = browser.new_page()
        at = str(http.base_url.join("/page/"))
        page.route(at, lambda route: route.fulfill(body=PAGE, content_type="text/html"))
        script = {"body": found["follow.js"], "content_type": "text/javascript"}
        page.route(f"{at}follow.js", lambda route: route.fulfill(**script))
        session = store.session("c")
        session.set("n", 0)
        with session.turn(request_id="r") as turn:
            turn.stream("Os")
            page.goto(at)
            expect(page.locator("#answer")).to_have_text("Os")
            page.reload()
            expect(page.locator("#answer")).to_have_text("Os")
            turn.stream("lo")
            expect(page.locator("#answer")).to_have_text("Oslo")
            turn["n"] = 1
        expect(page.locator("#state")).to_have_text("2", timeout=20_000)  # closed: it was answered 204
        expect(page.locator("#answer")).to_have_text("Oslo")
        page.close()
