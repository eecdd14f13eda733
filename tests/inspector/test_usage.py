"""The inspector's page of tokens, and the tokens on a conversation's page."""

from __future__ import annotations

import re

from tests.inspector.test_inspector import EVIL, looked_at

PLACE = "/conversations/acme:c"


async def test_tokens_are_shown_by_model_and_day() -> None:
    async with looked_at() as (store, browser):
        assert "No turn of the last 31 days has named tokens" in (await browser.get("/usage")).text
        assert "output tokens" not in (await browser.get(PLACE)).text
        async with store.session("acme:c").turn() as turn:
            turn.model("gpt-5", input_tokens=1_234_567, output_tokens=89)
            turn.model(f"small {EVIL}", input_tokens=7)
        async with store.session("evil:c").turn() as turn:
            turn.model("secret", input_tokens=1)
        shown = (await browser.get("/usage")).text
        row = r"<td>gpt-5</td>" + "".join(rf'<td class="number">{each}</td>' for each in ("1", "1,234,567", "89"))
        assert re.search(row, shown)
        assert re.search(r'<td>\d{4}-\d\d-\d\d</td><td class="number">2</td><td class="number">1,234,574</td>', shown)
        assert "&lt;script&gt;alert" in shown
        for hidden in ("<script>alert", "secret"):
            assert hidden not in shown
        assert "gpt-5" in (await browser.get("/usage?user=acme:ada")).text
        nobodys = (await browser.get("/usage?user=acme:bob")).text
        assert "in conversations of <b>acme:bob</b> has named tokens" in nobodys
        one = (await browser.get(PLACE)).text
        assert "<b>1,234,574</b> input and <b>89</b> output tokens" in one
        assert " · 1,234,663 tokens · " in one
