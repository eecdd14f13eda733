"""Searching: what records say is found, nothing else is, and what finds it never holds up who writes."""

from __future__ import annotations

from typing import Any


def said(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


async def places(store: Any, query: str | None = None, **options: Any) -> list[tuple[str, Any]]:
    """Where a text is found: each record's id, and the message's number or the field's name."""
    options = {"fresh": True, "limit": 100} | options
    return [(hit.id, hit.number if hit.kind == "message" else hit.key) for hit in await store.search(query, **options)]


async def searching(opener: Any, **settings: Any) -> Any:
    return await opener(**({"search": True, "partitions": 4} | settings))


async def test_messages_and_fields_are_found_by_what_they_say(opener: Any) -> None:
    store = await searching(opener)
    await store.session("c1", user="u1").write(
        set={"city": "Bergen", "plan": {"stops": ["Oslo", "Trondheim"]}}, append=[said("A weekend in Oslo, please")]
    )
    await store.user("u1").set("home", "Oslo")
    assert set(await places(store, "oslo")) == {("c1", 0), ("c1", "plan"), ("u1", "home")}
    assert await places(store, "oslo weekend") == [("c1", 0)]
    assert await places(store, "Bergen", kinds=["message"]) == []
    (hit,) = await store.search("weekend")
    assert (hit.scope, hit.id, hit.user, hit.kind, hit.number) == ("session", "c1", "u1", "message", 0)
    assert hit.text == "A weekend in Oslo, please"
    assert hit.value["role"] == "user"
    assert hit.version == 1
    assert hit.score > 0
