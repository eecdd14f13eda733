"""What tests of searching share: stores that are searched, and where something is found."""

from __future__ import annotations

from typing import Any

from sqlalchemy import create_engine, text

MARK = "zanzibar"


def said(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


async def places(store: Any, query: str | None = None, **options: Any) -> list[tuple[str, Any]]:
    """Where a text is found: each record's id, and the message's number or the field's name."""
    options = {"fresh": True, "limit": 100} | options
    return [(hit.id, hit.number if hit.kind == "message" else hit.key) for hit in await store.search(query, **options)]


def run_sql(opener: Any, *statements: str) -> None:
    engine = create_engine(opener.archive)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


async def searching(opener: Any, **settings: Any) -> Any:
    return await opener(**({"search": True, "partitions": 4} | settings))
