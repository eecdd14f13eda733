"""What a timeline says of each version in words. Law: no message keeps a timeline from being read."""

from __future__ import annotations

from typing import Any

import pytest
from below import said, tiers
from tenants import Served, opened

from distributed_state import AsyncStateStore
from distributed_state.programs.service import Access
from distributed_state.records import history

CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "book", "arguments": "{}"}}
USE: dict[str, Any] = {"type": "tool_use", "id": "d", "name": "weather", "input": {}}


async def timeline(store: AsyncStateStore, id: str = "s") -> list[tuple[str | None, list[str]]]:
    """The words and the tools of each version over HTTP, the oldest first."""
    served = Served(store, Access(tokens=True))
    found = await served.ask("GET", f"/v1/conversations/{id}/timeline", await served.token("", "read"))
    assert found.status_code == 200, found.text
    return [(each["said"], each["tools"]) for each in found.json()["versions"]][::-1]


async def test_a_version_is_told_by_what_its_user_said_and_which_tools_ran() -> None:
    async with opened() as store:
        session = store.session("s")
        await session.append(
            {"role": "system", "content": "Be brief."}, said("Where to?"),
            {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "booked"}, {"role": "assistant", "content": "To Bergen."},
        )  # fmt: skip
        parts = [{"type": "text", "text": "I look."}, USE]
        await session.append({"role": "assistant", "content": parts}, {"role": "tool", "content": "rain"})
        await session.set("n", 1)
        await session.append(said("x" * 500))
        await session.rollback(version=1)
        shown = [("Where to?", ["book"]), ("I look.", ["weather"]), (None, []), ("x" * 200, []), (None, [])]
        assert await timeline(store) == shown
        await session.fork("f", version=2)
        await store.session("f").append(said("Mine."))
        assert await timeline(store, "f") == [(None, []), ("Mine.", [])]


@pytest.mark.parametrize(
    "message",
    [
        {"type": "x", "content": 7}, {"type": "x", "content": [{"text": 7}, 7, {"type": "tool_use", "name": 7}]},
        {"role": "assistant", "tool_calls": [7, {"function": {"name": None}}, {"function": 7}]},
        {"type": "x", "tool_calls": "y"},
    ],
)  # fmt: skip
def test_messages_of_any_shape_have_words_or_none(message: dict[str, Any]) -> None:
    assert history._words(message) == ("", [])


async def test_large_messages_are_not_read_for_a_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as store:
        session = store.session("s")
        await session.append(said("small"))
        await session.append(said("y" * 2**20))
        await session.append(*(said(f"m{number}") for number in range(20)))
        cold, read = tiers(store).cold, list[int]()

        def counted(*given: Any) -> Any:
            found = type(cold).messages(cold, *given)
            read.append(len(found))
            return found

        monkeypatch.setattr(cold, "messages", counted, raising=False)
        assert await timeline(store) == [(None, []), (None, []), ("m0", [])]
        assert read == [8], "the first ones of the last version: the others are older than what is too large"
