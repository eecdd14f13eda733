"""A text that a caller chooses is bounded before anything is written, whichever public parameter it comes by.

Law: parameters are found, not listed. A new method, property or column is tried without anybody thinking of it.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Collection, Iterator
from random import Random
from typing import Any
from urllib.parse import quote

import pytest
from below import redis_of
from sqlalchemy import LargeBinary, Text, select
from sync_api import core
from tenants import Served

from distributed_state import PutItem, StateError
from distributed_state.cold import tables
from distributed_state.programs.service import Access

DICE = Random(11)
LONG = "".join(chr(DICE.randrange(0x4E00, 0x9FFF)) for _ in range(3_000))  # which nothing compresses
_KEY = 2_400  # bytes of a Redis key: an id, a namespace and what stands around them
# What makes a call of each of these go through, where it is required; a new name needs one.
GIVEN: dict[str, Any] = {
    "id": "s", "key": "k", "value": 1, "values": {"k": 1}, "label": "l", "message": {"role": "user", "content": "x"},
    "messages": [], "version": 1, "new_id": "n", "type": "a.b", "subject": "x", "state": {"fields": {}},
    "collection": "c", "items": {"i": 1}, "defaults": {"k": 1}, "event": "new_task", "actor": "a", "user": "u",
    "change": lambda state: None, "changes": {"k": 1}, "branch": "b", "keys": "k", "tag": {"k": "t"}, "by": 1,
    "key_or_keys": "k", "older_than": 1e9, "function": lambda state: None, "turn_id": "t", "call_id": "c", "tool": "no",
    "agent": "a", "new_path": "p", "name": "n", "phase": "here", "question": "?",
    "user_id": "u", "idle": 60.0, "token": 1, "lines": [], "parts": {}, "levels": "memory", "durability": "memory",
}  # fmt: skip
# What waits for others, ends the store, or takes a file or a class.
LEFT_OUT = frozenset(
    ("open", "close", "events", "on", "aio", "lock", "turn", "agent", "host", "run", "reload_config", "upcast")
)


Call = Callable[[Any], Any]


def oversized(text: str, annotation: str) -> Any:
    """A value of a parameter that holds a long text; None if it takes no text."""
    for pattern, value in (
        (r"^(str|Any)\b|\| str\b", text),
        (r"^Mapping\[str, str \| Iterable", {text: text}),
        (r"^(Mapping|dict)\[str,", {text: 1}),
        (r"^Iterable\[str\]|^Sequence\[str\]|^list\[str\]", [text]),
    ):
        if re.search(pattern, annotation):
            return value
    return None


def calls(handle: Any) -> Iterator[tuple[str, Call]]:
    """The name of each public method of a handle, and how to call it with a long text for one of its parameters."""
    for name, method in inspect.getmembers(handle, inspect.ismethod):
        if name.startswith("_") or name in LEFT_OUT:
            continue
        parameters = inspect.signature(method).parameters
        for long in parameters.values():
            value = oversized(LONG, str(long.annotation))
            if value is not None:
                yield name, _call(parameters, long, value)


def _call(parameters: Any, long: inspect.Parameter, value: Any) -> Call:
    positional, named = [], {}
    for each in parameters.values():
        if each is long:
            given = value
        elif each.default is not inspect.Parameter.empty or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            continue
        elif each.name in GIVEN:
            given = GIVEN[each.name]
        else:
            raise AssertionError(f"GIVEN has nothing for {each.name}")
        if each.kind is each.VAR_KEYWORD:
            named[LONG] = 1
        elif each.kind is each.KEYWORD_ONLY:
            named[each.name] = given
        else:
            positional.append(given)
    return lambda method: method(*positional, **named)


async def require_bounded(store: Any) -> None:
    """All of it is in SQL, within the bounds of the indexes, and no key of Redis is longer than an id explains."""
    await store.admin.archive()
    cold = core(store)._lifecycle.cold
    assert [row.reason for row in cold.quarantined()] == []
    with cold.database.read() as connection:
        for table in tables.metadata.sorted_tables:
            indexed = {column for index in table.indexes for column in index.columns} | set(table.primary_key.columns)
            for column in indexed:
                if isinstance(column.type, (Text, LargeBinary)):
                    for value in connection.execute(select(column)).scalars():
                        size = len(value if isinstance(value, bytes) else (value or "").encode())
                        assert size <= tables.LONGEST[column.name], f"{table.name}.{column.name}"
    with redis_of(store) as client:
        assert max(map(len, client.keys("*"))) <= _KEY


async def send(handle: Any, name: str, call: Call) -> None:
    try:
        found = call(getattr(handle, name))
        if inspect.isawaitable(found):
            await asyncio.wait_for(found, 20)
    except StateError:
        pass  # refused


async def try_all(store: Any, kinds: Collection[str]) -> int:
    """Call all methods of these handles, each time of a record that is there; how many calls that were."""
    tried = 0
    for kind in kinds:
        for name, call in calls(store if kind == "store" else await handle_of(store, kind, "found")):
            tried += 1
            if kind == "turn":
                async with store.session(f"{kind}{tried}").turn() as turn:
                    await send(turn, name, call)
            else:
                await send(store if kind == "store" else await handle_of(store, kind, f"{kind}{tried}"), name, call)
    return tried


async def handle_of(store: Any, kind: str, id: str) -> Any:
    session = store.session(id, user="u")
    await session.write(set={"k": 1}, items=[PutItem(collection="c", key="k", value=1)])
    return {"session": session, "user": store.user("u"), "items": session.items("c"), "turn": session.turn()}[kind]


@pytest.mark.only(api="asyncio", warm="fake")
async def test_no_method_lets_a_long_text_into_an_index_or_a_key(opener: Any) -> None:
    store = await opener(partitions=1, durability="memory", max_field_bytes=4096)
    assert await try_all(store, ("session", "user", "items", "turn", "store")) > 150
    await require_bounded(store)


@pytest.mark.only(api="asyncio", warm="fake")
async def test_a_method_that_lets_a_long_text_through_is_found(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the bound of phases."""
    monkeypatch.setattr("distributed_state.tiers.changes.checked_phase", lambda phase: phase)
    monkeypatch.setattr("distributed_state.cold.archive.refuse_long", lambda item: None)
    store = await opener(partitions=1, durability="memory")
    await try_all(store, ["session"])
    with pytest.raises(AssertionError, match=r"records\.phase|index row"):
        await require_bounded(store)


# Over HTTP


class Described:
    """The operations of the service as OpenAPI has them, and a body for each text that they take."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def whole(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A schema without references."""
        while "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    def example(self, schema: dict[str, Any]) -> Any:
        """The least that fits."""
        schema = self.whole(schema)
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            return self.example(each)
        if schema.get("type") == "array":
            return [self.example(schema.get("items", {}))]
        if schema.get("type") == "object":
            needed = schema.get("required", ())
            return {name: self.example(schema["properties"][name]) for name in needed}
        return {"integer": 1, "number": 1.0, "boolean": True, "string": "x"}.get(schema.get("type", ""), 1)

    def oversized(self, schema: dict[str, Any], depth: int = 0) -> Iterator[Any]:
        """One value for each text in it, which is long, with the least beside it."""
        schema = self.whole(schema)
        for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from self.oversized(each, depth)
        if depth > 5 or "enum" in schema or "const" in schema:
            return
        if schema.get("type") == "string":
            yield LONG
        if schema.get("type") == "array":
            yield from ([value] for value in self.oversized(schema.get("items", {}), depth + 1))
        if schema.get("type") == "object":
            least = self.example(schema)
            for name, inner in schema.get("properties", {}).items():
                yield from ({**least, name: value} for value in self.oversized(inner, depth + 1))
            more = schema.get("additionalProperties")
            if isinstance(more, dict) or (more is not False and not schema.get("properties")):
                yield {LONG: self.example(more if isinstance(more, dict) else {})}

    def requests(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Each operation once for each text that it takes: method, path and options of a request."""
        server = self.document["servers"][0]
        for place, operations in self.document["paths"].items():
            path = server["url"] + place
            for method, operation in operations.items():
                contents = [*operation.get("requestBody", {}).get("content", {}).values()]
                least = {"json": self.example(contents[0].get("schema", {}))} if contents else {}
                for parameter in operation.get("parameters", ()):
                    if parameter["in"] == "query":
                        for value in self.oversized(parameter["schema"]):
                            yield method, filled(path), {"params": {parameter["name"]: value}}
                    if parameter["in"] == "path":
                        yield method, filled(path.replace("{" + parameter["name"] + "}", quote(LONG))), least
                for content in contents:
                    for value in self.oversized(content.get("schema", {})):
                        yield method, filled(path), {"json": value}


def filled(path: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda name: "1" if name[1] in ("version", "number", "token") else "x", path)


@pytest.mark.wide
@pytest.mark.only(api="asyncio", warm="fake")
async def test_no_request_lets_a_long_text_into_an_index_or_a_key(opener: Any) -> None:
    """And none is answered as a failure of the service."""
    store = await opener(partitions=1, durability="memory")
    served = Served(store, Access(insecure=True))
    described = Described((await served.http.get("/v1/openapi.json")).json())
    tried = 0
    for method, path, options in described.requests():
        if method == "get" and path.endswith("/events"):
            continue  # a stream
        tried += 1
        answer = await served.http.request(method.upper(), path, **options)
        assert answer.status_code < 500, (method, path[:80], answer.text[:200])
    assert tried > 200
    await require_bounded(store)
