"""Threads of frameworks' own stores are copied: whole, once, again after a kill, and never over what others wrote."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from below import hidden, until
from frameworks import adopting_sources
from frameworks.adopting_sources import add, config_of, counts, memory_saver, run, sqlite_saver, thread
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.store.postgres import PostgresStore
from langgraph.store.sqlite import SqliteStore
from packaging.requirements import Requirement

import distributed_state.adapters.openai_agents_adopting as openai
from distributed_state import InvalidValue, NotFound, StateStore
from distributed_state.adapters.adk import DistributedSessionService
from distributed_state.adapters.adk import adopting as adk
from distributed_state.adapters.adopting import adopt
from distributed_state.adapters.agno import AsyncDistributedDb
from distributed_state.adapters.agno import adopting as agno
from distributed_state.adapters.langgraph import DistributedStateSaver, DistributedStateStore
from distributed_state.adapters.langgraph import adopting as langgraph
from distributed_state.adapters.langgraph import adopting_memories as langgraph_store
from distributed_state.adapters.openai_agents import DistributedSession

pytestmark = pytest.mark.only(api="asyncio")
COMMAND = (sys.executable, "-m", "distributed_state")
MANY = 1000


def shown(saver: Any, thread_id: str) -> Any:
    """All that a saver tells of a thread, sets as lists."""

    def text(value: Any) -> str:
        return repr({k: sorted(v) if isinstance(v, set) else v for k, v in sorted(value.items())})

    found = {}
    for each in saver.list({"configurable": {"thread_id": thread_id}}):
        checkpoint = text({**each.checkpoint, "channel_values": text(each.checkpoint["channel_values"])})
        parent = each.parent_config and str(each.parent_config["configurable"]["checkpoint_id"])
        named = each.config["configurable"]
        key = named["checkpoint_ns"], str(named["checkpoint_id"])
        found[key] = (parent, checkpoint, text(each.metadata), repr(each.pending_writes))
    return found


# What an extra brings


def brought(requirements: Iterable[str]) -> set[str]:
    """The names of all that these bring, with the extras that each asks for."""
    found: set[tuple[str, str]] = set()
    left = [(each, "") for each in requirements]
    while left:
        line, of = left.pop()
        wanted = Requirement(line)
        for extra in {"", *wanted.extras}:
            asked = wanted.marker is None or wanted.marker.evaluate({"extra": of})
            if asked and (wanted.name, extra) not in found:
                found.add((wanted.name, extra))
                left += [(each, extra) for each in importlib.metadata.requires(wanted.name) or ()]
    return {name for name, _ in found}


def test_the_extra_brings_what_reading_openai_agents_sessions_from_sql_needs() -> None:
    """SQLAlchemy's asyncio, with which the SDK's class reads, needs greenlet, which since 2.1 only an extra brings."""
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    assert "greenlet" not in brought(project["dependencies"]), "the control"
    assert "greenlet" in brought(project["optional-dependencies"]["openai-agents"])


# LangGraph


async def test_threads_of_a_saver_are_copied_and_then_are_there(store: Any) -> None:
    source = memory_saver()
    assert counts(await run(langgraph, store, lambda: source, dry_run=True)) == (1, 0, {}, {})
    assert await store.sessions(fresh=True) == []
    assert counts(await run(langgraph, store, source)) == (1, 0, {}, {})
    target = DistributedStateSaver(store)
    found = [each async for each in target.alist(config_of("t0") | {"configurable": {"thread_id": "t0"}})]
    assert len(found) == 5
    latest = await target.aget_tuple(config_of("t0"))
    assert latest is not None
    assert latest.checkpoint == source.get_tuple(config_of("t0")).checkpoint
    version = await store.session("langgraph/t0").version()
    assert counts(await run(langgraph, store, source)) == (0, 1, {}, {})
    assert await store.session("langgraph/t0").version() == version, "nothing is written a second time"


async def test_what_went_on_in_the_source_follows_and_what_went_on_here_is_named(store: Any) -> None:
    source = InMemorySaver()
    for name in ("a", "b"):
        thread(source, name)
    assert (await run(langgraph, store, source)).copied == 2
    newest = source.get_tuple(config_of("a")).config
    source.put_writes(newest, [("messages", "late")], "task-9")
    add(source, "a", 5, newest, messages=["more"])
    target = DistributedStateSaver(store)
    before = await target.aget_tuple(config_of("b"))
    assert before is not None
    changed = {**before.checkpoint, "id": str(adopting_sources.uuid6()), "channel_values": {}}
    await target.aput(before.config, changed, {"step": 9}, {})
    done = await run(langgraph, store, source)
    assert counts(done)[:2] == (1, 0)
    assert re.match("it went on here: 1 checkpoints of 6", done.differ["b"])
    assert counts(await run(langgraph, store, source, only=["a"])) == (0, 1, {}, {})
    latest = await target.aget_tuple(config_of("b"))
    assert latest is not None
    assert latest.checkpoint["id"] == changed["id"], "nobody overwrote it"


async def test_a_checkpoint_that_is_another_here_is_named(store: Any) -> None:
    """The control: equality is looked for in what is stored, not in ids."""
    source = InMemorySaver()
    thread(source, "a")
    await run(langgraph, store, source)
    found = source.get_tuple(config_of("a"))
    source.put(found.parent_config, {**found.checkpoint, "ts": "1999"}, found.metadata, {})
    done = await run(langgraph, store, source)
    assert list(done.differ) == ["a"]
    assert "its checkpoint is not the same here" in done.differ["a"]


def owned_saver() -> InMemorySaver:
    """One thread whose metadata names its owner, from the second checkpoint on, and one whose does not."""
    source = InMemorySaver()
    thread(source, "nobody's")
    first = add(source, "ada's", 1, messages=["hello"])
    source.put(
        first, {**source.get_tuple(first).checkpoint, "id": str(adopting_sources.uuid6())}, {"user_id": "ada"}, {}
    )
    return source


async def test_threads_get_the_owner_that_their_metadata_names(store: Any) -> None:
    source = owned_saver()
    async with AsyncExitStack() as stack:
        threads = await langgraph.threads(stack, store, source, user="user_id")
        assert counts(await adopt(threads, store)) == (2, 0, {}, {})
        assert await threads.ownerless() == 1
        assert counts(await adopt(threads, store)) == (0, 2, {}, {})
    assert {each.id: each.user for each in await store.sessions(fresh=True)} == {
        "langgraph/ada's": "ada", "langgraph/nobody's": None
    }  # fmt: skip
    await store.forget("ada")
    assert [each.id for each in await store.sessions(fresh=True)] == ["langgraph/nobody's"]
    assert (await run(langgraph, store, source, more={"user": "user_id"})).differ == {"ada's": "it was deleted here"}
    with pytest.raises(InvalidValue, match="give into= or user="):
        await run(langgraph, store, source, more={"user": "user_id", "into": DistributedStateSaver})


# LangGraph's store


@contextmanager
def memories(kind: str, path: Path, postgres: str) -> Iterator[tuple[BaseStore, Any]]:
    """A store of LangGraph, and how it is named as a source."""
    if kind == "memory":
        store = InMemoryStore()
        yield store, store
    elif kind == "sqlite":
        with SqliteStore.from_conn_string(str(path)) as sqlite:
            sqlite.setup()
            yield sqlite, f"sqlite:///{path}"
    else:
        url = postgres.replace("+psycopg", "")
        with PostgresStore.from_conn_string(url) as postgresql:
            postgresql.setup()
            yield postgresql, url


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
async def test_values_of_a_store_are_copied_with_their_times(
    store: Any, tmp_path: Path, postgres_url: str, kind: str
) -> None:
    with memories(kind, tmp_path / "store.db", postgres_url) as (source, named):
        source.put(("users", "ada"), "seat", {"train": "window", "n": 1})
        source.put(("users", "ada"), "diet", {"likes": ["rain"]})
        source.put(("users", "ada", "a/b"), "k", {"v": 1})
        source.put(("users/ada", "a"), "k", {"v": 2})
        source.put(("brief",), "k", {"v": 3})
        assert counts(await run(langgraph_store, store, named)) == (4, 0, {}, {})
        assert counts(await run(langgraph_store, store, named)) == (0, 4, {}, {})
        target = DistributedStateStore(store)
        for namespace, key in (("users", "ada"), "seat"), (("users", "ada", "a/b"), "k"), (("users/ada", "a"), "k"):
            theirs, ours = source.get(namespace, key, refresh_ttl=False), await target.aget(namespace, key)
            assert theirs is not None
            assert ours is not None
            assert (ours.value, ours.updated_at.timestamp()) == (theirs.value, theirs.updated_at.timestamp())
        # Both go on.
        source.put(("users", "ada"), "seat", {"train": "aisle"})
        source.put(("users", "ada"), "new", {"v": 4})
        source.put(("brief",), "k", {"v": 4})
        source.put(("users/ada", "a"), "l", {"v": 4})
        await target.aput(("brief",), "k", {"v": 5})
        await target.aput(("users", "ada", "a/b"), "l", {"v": 5})
        await target.adelete(("users/ada", "a"), "k")
        done = await run(langgraph_store, store, named)
        assert counts(done)[:2] == (1, 0)
        assert done.differ == {
            "brief": "it was changed here",
            "users.ada.a/b": "it went on here: 1 values of 2 are not in the source",
            "users/ada.a": "values were removed here: 2 of 2 are not there",
        }
        found = await target.aget(("users", "ada"), "seat")
        assert found is not None
        assert found.value == {"train": "aisle"}
        assert len(await target.asearch(("users", "ada"))) == 5
        assert (await run(langgraph_store, store, named, only=["users.ada"])).there == 1


async def test_values_that_are_copied_get_the_lifetime_of_the_target(store: Any) -> None:
    source = InMemoryStore()
    source.put(("users",), "k", {"v": 1})

    def into(store: Any) -> DistributedStateStore:
        return DistributedStateStore(store, ttl={"default_ttl": 0.001}, owner=lambda namespace: "ada")

    assert counts(await run(langgraph_store, store, source, more={"into": into})) == (1, 0, {}, {})
    target = into(store)
    await until(partial(_swept, target))
    assert await target.alist_namespaces() == []
    assert list((await run(langgraph_store, store, source, more={"into": into})).differ) == ["users"]
    await store.forget("ada")
    assert (await run(langgraph_store, store, source, more={"into": into})).differ == {"users": "it was deleted here"}


async def _swept(target: DistributedStateStore) -> bool:
    return await target.asweep_ttl() > 0


async def test_a_saver_whose_threads_are_held_holds_them(store: Any) -> None:
    source = memory_saver()

    def into(store: Any) -> DistributedStateSaver:
        return DistributedStateSaver(store, exclusive=True)

    assert counts(await run(langgraph, store, source, more={"into": into})) == (1, 0, {}, {})
    assert counts(await run(langgraph, store, source)) == (0, 1, {}, {})


async def test_what_was_deleted_here_is_not_brought_back(store: Any) -> None:
    source = memory_saver()
    await run(langgraph, store, source)
    await DistributedStateSaver(store).adelete_thread("t0")
    assert (await run(langgraph, store, source)).differ == {"t0": "it was deleted here"}


async def test_checkpoints_that_were_removed_here_are_not_brought_back(store: Any) -> None:
    source = memory_saver()
    await run(langgraph, store, source)
    await DistributedStateSaver(store).aprune(["t0"])
    done = await run(langgraph, store, source)
    assert counts(done)[:2] == (0, 0)
    assert re.match("checkpoints were removed here", done.differ["t0"])


async def test_threads_belong_to_whom_their_metadata_names(store: Any) -> None:
    source = InMemorySaver()
    for name, named in (("a", {"user_id": "ada"}), ("b", {})):
        config = config_of(name)
        source.put({"configurable": config["configurable"] | named}, adopting_sources.empty_checkpoint(), {}, {})
    more = {"into": lambda store: DistributedStateSaver(store, user="user_id")}
    done = await run(langgraph, store, source, more=more)
    assert (done.copied, list(done.failed)) == (1, ["b"])
    assert "would begin without an owner" in done.failed["b"]
    assert [row.id for row in await store.sessions(user="ada", fresh=True)] == ["langgraph/a"]


async def test_one_that_cannot_be_read_is_named_and_the_others_are_copied(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = InMemorySaver()
    for name in ("a", "b"):
        thread(source, name)
    read = InMemorySaver.alist

    def broken(self: Any, config: Any, **more: Any) -> Any:
        if config and config["configurable"]["thread_id"] == "a":
            raise ValueError("no checkpoint")
        return read(self, config, **more)

    monkeypatch.setattr(InMemorySaver, "alist", broken)
    done = await run(langgraph, store, source)
    assert counts(done) == (1, 0, {}, {"a": "ValueError: no checkpoint"})
    with pytest.raises(NotFound, match="nobody"):
        await run(langgraph, store, source, only=["nobody"])


async def test_threads_of_postgresql_are_listed_by_pages(
    store: Any, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are copies of others, of which a page border may go through the ids."""
    from langgraph.checkpoint.postgres import PostgresSaver

    monkeypatch.setattr(langgraph, "_PAGE", 3)
    url = postgres_url.replace("+psycopg", "")
    with PostgresSaver.from_conn_string(url) as saver:
        saver.setup()
        for name in ("a", "b", "c"):
            thread(saver, name)
        for copy in ("d", "e", "f", "g"):
            for each in reversed(list(saver.list({"configurable": {"thread_id": "a"}}))):
                named = each.parent_config["configurable"] if each.parent_config else {}
                config = config_of(copy, named.get("checkpoint_id"), each.config["configurable"]["checkpoint_ns"])
                saver.put(config, each.checkpoint, each.metadata, each.checkpoint["channel_versions"])
    assert counts(await run(langgraph, store, url)) == (7, 0, {}, {})
    assert counts(await run(langgraph, store, url)) == (0, 7, {}, {})


@pytest.mark.timeout(400)
@pytest.mark.only(api="asyncio", warm="valkey", cold="sqlite")
@pytest.mark.servers
async def test_a_thousand_threads_survive_a_kill_in_the_middle(opener: Any, tmp_path: Path) -> None:
    source = sqlite_saver(tmp_path / "graphs.db", MANY)
    given, urls = hidden("--url", opener.url, "--archive", opener.archive, "--namespace", opener.namespace)
    command = [*COMMAND, *given, "adopt", "langgraph", source]
    environment = {**os.environ, **urls, "COLUMNS": "200"}
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment, cwd=tmp_path) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("300 of"):
                break
        process.kill()
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"(\d+) found in the source: (\d+) copied, (\d+) already equal, 0 differ, 0 failed", ended.stdout)
    assert found, ended.stdout
    listed, copied, there = map(int, found.groups())
    assert listed == copied + there == MANY
    assert there >= 300
    store = await opener()
    target = DistributedStateSaver(store)
    with SqliteSaver.from_conn_string(str(tmp_path / "graphs.db")) as saver:
        for number in range(0, MANY, 37):
            assert shown(target, f"t{number}") == shown(saver, f"t{number}")
    assert len(await store.sessions(prefix="langgraph/", limit=1000, fresh=True)) == MANY
    # The control: one pending write that the source does not have, in one of them.
    newest = await target.aget_tuple(config_of(f"t{MANY - 1}"))
    assert newest is not None
    await target.aput_writes(newest.config, [("messages", "only here")], "task-0")
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert ended.returncode == 1
    assert f"differs: t{MANY - 1}: checkpoint" in ended.stderr
    assert f"0 copied, {MANY - 1} already equal, 1 differ, 0 failed" in ended.stdout


# OpenAI Agents

ITEMS: list[Any] = [
    {"role": "user", "content": "hello"},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "1.0"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "there"}], "number": 7},
]


async def test_sessions_of_the_agents_sdk_are_copied(store: Any, tmp_path: Path) -> None:
    from agents.memory.sqlite_session import SQLiteSession

    path = str(tmp_path / "agents.db")
    for id in ("a", "b/c", "long"):
        with closing(SQLiteSession(id, path)) as session:
            await session.add_items(ITEMS if id != "long" else ITEMS * 120)
    assert counts(await run(openai, store, path)) == (3, 0, {}, {})
    assert counts(await run(openai, store, f"sqlite:///{path}")) == (0, 3, {}, {})
    assert await DistributedSession("b/c", store).get_items() == ITEMS
    with closing(SQLiteSession("a", path)) as session:
        await session.add_items(ITEMS[:1])
    await DistributedSession("b/c", store).add_items(ITEMS[:1])
    await DistributedSession("long", store).pop_item()
    done = await run(openai, store, path)
    assert counts(done)[:2] == (1, 0)
    assert done.differ == {
        "b/c": "it went on here: 1 items of 5 are not in the source",
        "long": "items were removed here: 479 are left of 480 in the source",
    }
    assert len(await DistributedSession("a", store).get_items()) == 5
    assert len(await DistributedSession("long", store).get_items()) == 479


async def test_a_session_that_was_cleared_here_stays_so_and_one_that_has_a_title_follows(
    store: Any, tmp_path: Path
) -> None:
    from agents.memory.sqlite_session import SQLiteSession

    path = str(tmp_path / "agents.db")
    for id in ("a", "b"):
        with closing(SQLiteSession(id, path)) as session:
            await session.add_items(ITEMS)
    await store.session("b").set("title", "Oslo")  # before it is adopted, and no message
    assert counts(await run(openai, store, path)) == (2, 0, {}, {})
    await DistributedSession("a", store).clear_session()
    await store.session("b").set("title", "Bergen")
    with closing(SQLiteSession("b", path)) as session:
        await session.add_items(ITEMS[:1])
    done = await run(openai, store, path)
    assert counts(done) == (1, 0, {"a": "items were removed here: 0 are left of 4 in the source"}, {})
    assert await DistributedSession("a", store).get_items() == []
    assert len(await DistributedSession("b", store).get_items()) == 5


@pytest.mark.parametrize("kind", ["redis", "postgres"])
async def test_sessions_of_the_agents_sdk_in_other_databases_are_copied(
    store: Any, redis_url: str, postgres_url: str, kind: str
) -> None:
    from agents.extensions.memory.redis_session import RedisSession
    from agents.extensions.memory.sqlalchemy_session import SQLAlchemySession

    ids = [uuid4().hex, f"{uuid4().hex}:messages"]
    for id in ids:
        if kind == "redis":
            theirs: Any = RedisSession.from_url(id, url=redis_url)
        else:
            theirs = SQLAlchemySession.from_url(id, url=postgres_url, create_tables=True)
        await theirs.add_items(ITEMS)
        await (theirs.close() if kind == "redis" else theirs.engine.dispose())
    url = redis_url if kind == "redis" else postgres_url.replace("+psycopg", "")
    assert counts(await run(openai, store, url, only=ids)) == (2, 0, {}, {})
    assert counts(await run(openai, store, url, only=ids)) == (0, 2, {}, {})
    for id in ids:
        assert await DistributedSession(id, store).get_items() == ITEMS


async def test_what_was_deleted_here_under_another_name_is_not_brought_back(store: Any) -> None:
    from agents.memory.sqlite_session import SQLiteSession

    def into(id: str, store: Any) -> DistributedSession:
        return DistributedSession(f"chat:{id}", store)

    with closing(SQLiteSession("a")) as source, pytest.MonkeyPatch.context() as patched:
        patched.setattr(source, "close", lambda: None)
        await source.add_items(ITEMS)
        more = {"ids": ["a"], "into": into}
        assert (await run(openai, store, lambda id: source, more=more)).copied == 1
        await store.delete("chat:a")
        assert (await run(openai, store, lambda id: source, more=more)).differ == {"a": "it was deleted here"}


async def test_a_long_session_that_was_half_copied_is_finished(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from agents.memory.sqlite_session import SQLiteSession

    with closing(SQLiteSession("a")) as source:
        await source.add_items(ITEMS * 120)
        monkeypatch.setattr(source, "close", lambda: None)
        add_items = DistributedSession.add_items
        calls = []

        async def killed(self: Any, items: Any) -> None:
            calls.append(len(items))
            if len(calls) == 2:
                raise OSError("killed")
            await add_items(self, items)

        monkeypatch.setattr(DistributedSession, "add_items", killed)
        with pytest.raises(OSError, match="killed"):
            await run(openai, store, lambda id: source, more={"ids": ["a"]})
        assert len(await DistributedSession("a", store).get_items()) == 200
        assert counts(await run(openai, store, lambda id: source, more={"ids": ["a"]})) == (1, 0, {}, {})
        assert await DistributedSession("a", store).get_items() == ITEMS * 120
        monkeypatch.undo()


# ADK


async def events(service: Any, app: str, user: str, id: str, count: int) -> Any:
    from google.adk.events.event import Event
    from google.adk.events.event_actions import EventActions
    from google.genai.types import Content, Part

    session = await service.create_session(
        app_name=app, user_id=user, session_id=id, state={"city": "Oslo", "user:name": user, "app:rate": 1, "temp:x": 1}
    )
    for number in range(count):
        delta = {"step": number, "user:visits": number, f"app:{id}": number}
        said = Content(role="user", parts=[Part(text=f"{id} {number}")])
        event = Event(author="user", content=said, actions=EventActions(state_delta=delta))
        session = await service.get_session(app_name=app, user_id=user, session_id=id)
        await service.append_event(session, event)
    return session


async def test_sessions_of_adk_are_copied_with_what_users_and_apps_share(store: Any, tmp_path: Path) -> None:
    from google.adk.sessions.database_session_service import DatabaseSessionService

    path = tmp_path / "adk.db"
    source = DatabaseSessionService(f"sqlite+aiosqlite:///{path}")
    for app, user, id in ("shop", "ada", "1"), ("shop", "ada", "2/x"), ("shop", "bob", "1"), ("desk", "ada", "1"):
        await events(source, app, user, id, 3)
    assert counts(await run(adk, store, f"sqlite:///{path}")) == (4 + 3 + 2, 0, {}, {})
    assert counts(await run(adk, store, source)) == (0, 9, {}, {})
    target = DistributedSessionService(store)
    for user, id in ("ada", "1"), ("ada", "2/x"), ("bob", "1"):
        where = {"app_name": "shop", "user_id": user, "session_id": id}
        theirs, ours = await source.get_session(**where), await target.get_session(**where)
        assert ours.model_dump() == theirs.model_dump()
    # Both go on.
    where = {"app_name": "shop", "user_id": "ada", "session_id": "1"}
    session = await source.get_session(**where)
    await source.append_event(session, adk_note({"step": 9, "user:visits": 9}))
    await target.append_event(await target.get_session(**{**where, "user_id": "bob"}), adk_note({"app:rate": 2}))
    done = await run(adk, store, source)
    assert counts(done)[:2] == (2, 5)
    assert done.differ == {"shop/bob/1": "its events are not the same here", "shop": "it was changed here: rate"}
    ours = await target.get_session(**where)
    assert (ours.state["step"], ours.state["user:visits"], ours.state["app:rate"]) == (9, 9, 2)
    # It goes on here as any other.
    await target.append_event(ours, adk_note({"step": 10}))
    await source.close()


async def test_sessions_of_adk_in_postgresql_are_copied(store: Any, postgres_url: str) -> None:
    from google.adk.sessions.database_session_service import DatabaseSessionService

    source = DatabaseSessionService(postgres_url)
    await events(source, "shop", "ada", "1", 3)
    await source.close()
    url = postgres_url.replace("+psycopg", "")
    assert counts(await run(adk, store, url)) == (3, 0, {}, {})
    assert counts(await run(adk, store, url)) == (0, 3, {}, {})
    found = await DistributedSessionService(store).get_session(app_name="shop", user_id="ada", session_id="1")
    assert found is not None
    assert (found.state["step"], len(found.events)) == (2, 3)


def adk_note(delta: dict[str, Any]) -> Any:
    from google.adk.events.event import Event
    from google.adk.events.event_actions import EventActions

    return Event(author="user", actions=EventActions(state_delta=delta))


# Agno


async def test_sessions_runs_and_memories_of_agno_are_copied(store: Any, tmp_path: Path) -> None:
    from agno.db.schemas.memory import UserMemory
    from agno.db.sqlite import SqliteDb
    from agno.run.agent import RunOutput
    from agno.session import AgentSession

    source = SqliteDb(db_file=str(tmp_path / "agno.db"))
    for id in ("a", "b/c"):
        data = {"session_name": id, "session_state": {"city": "Oslo", "n": 1}}
        session = AgentSession(session_id=id, agent_id="x", user_id="ada", session_data=data, created_at=1700000000)
        source.upsert_session(session)
        for number in range(3):
            run_ = RunOutput(
                run_id=f"{id}{number}", agent_id="x", session_id=id, content=f"said {number}", created_at=5
            )
            source.upsert_run(run_, id, "ada", run_index=number)
    for user in ("ada", "bob", None):
        source.upsert_user_memory(UserMemory(memory="likes fish", memory_id=f"m{user}", user_id=user, topics=["food"]))
    assert counts(await run(agno, store, str(tmp_path / "agno.db"))) == (5, 0, {}, {})
    assert counts(await run(agno, store, source)) == (0, 5, {}, {})
    target = AsyncDistributedDb(store)
    theirs, ours = source.get_session("a"), await target.get_session("a")
    assert ours.to_dict() == theirs.to_dict()
    assert [each.run_id for each in ours.runs] == ["a0", "a1", "a2"]
    # Both go on.
    source.upsert_run(RunOutput(run_id="a3", agent_id="x", session_id="a", content="more"), "a", "ada", run_index=3)
    ours = await target.get_session("b/c")
    ours.session_data["session_state"]["n"] = 2
    await target.upsert_session(ours)
    await target.upsert_user_memory(UserMemory(memory="likes rain", memory_id="mbob", user_id="bob"))
    done = await run(agno, store, source)
    assert counts(done) == (1, 2, {"session/b/c": "it was changed here", "memories/bob": "they were changed here"}, {})
    assert [each.run_id for each in (await target.get_session("a")).runs] == ["a0", "a1", "a2", "a3"]


async def test_runs_and_memories_that_were_deleted_here_are_not_brought_back(store: Any, tmp_path: Path) -> None:
    from agno.db.schemas.memory import UserMemory
    from agno.db.sqlite import SqliteDb
    from agno.run.agent import RunOutput
    from agno.session import AgentSession

    source = SqliteDb(db_file=str(tmp_path / "agno.db"))
    source.upsert_session(AgentSession(session_id="a", agent_id="x", session_data={}, created_at=1700000000))
    for number in range(2):
        source.upsert_run(
            RunOutput(run_id=f"r{number}", agent_id="x", session_id="a", created_at=5), "a", None, run_index=number
        )
    for id in ("m1", "m2"):
        source.upsert_user_memory(UserMemory(memory="likes fish", memory_id=id, user_id="ada"))
    await store.user("ada").set("city", "Oslo")  # of whoever shares the record
    assert counts(await run(agno, store, source)) == (2, 0, {}, {})
    target = AsyncDistributedDb(store)
    await target.delete_run("r0")
    await target.delete_user_memory("m1", user_id="ada")
    done = await run(agno, store, source)
    assert counts(done)[:2] == (0, 0)
    assert done.differ == {
        "session/a": "runs were removed here: 1 of 2 in the source are not there",
        "memories/ada": "memories were removed here: 1 of 2 in the source are not there",
    }
    # The control: what is new in the source follows, where nothing was removed.
    source.upsert_user_memory(UserMemory(memory="likes rain", memory_id="m3", user_id="bob"))
    assert (await run(agno, store, source)).copied == 1


@pytest.mark.parametrize("kind", ["redis", "postgres"])
async def test_sessions_of_agno_in_other_databases_are_copied(
    store: Any, redis_url: str, postgres_url: str, kind: str
) -> None:
    from agno.db.postgres import PostgresDb
    from agno.db.redis import RedisDb
    from agno.db.schemas.memory import UserMemory
    from agno.run.agent import RunOutput
    from agno.session import AgentSession

    source: Any = RedisDb(db_url=redis_url) if kind == "redis" else PostgresDb(db_url=postgres_url)
    user = uuid4().hex  # RedisDb has one namespace, unless its maker says otherwise
    session = AgentSession(
        session_id=user, agent_id="x", user_id=user, session_data={"session_state": {"n": 1}}, created_at=1700000000
    )
    source.upsert_session(session)
    said = RunOutput(run_id=f"{user}0", agent_id="x", session_id=user, content="said", created_at=5)
    source.upsert_run(said, user, user, run_index=0)
    source.upsert_user_memory(UserMemory(memory="likes fish", memory_id=f"m{user}", user_id=user))
    source.close()
    url = redis_url if kind == "redis" else postgres_url.replace("+psycopg", "")
    only = [f"session/{user}", f"memories/{user}"]
    assert counts(await run(agno, store, url, only=only)) == (2, 0, {}, {})
    assert counts(await run(agno, store, url, only=only)) == (0, 2, {}, {})
    found = await AsyncDistributedDb(store).get_session(user)
    assert found is not None
    assert [each.content for each in found.runs] == ["said"]


# Sources

PARTS = {
    "LangGraph": langgraph,
    "LangGraph's store": langgraph_store,
    "OpenAI Agents": openai,
    "ADK": adk,
    "Agno": agno,
}


@pytest.mark.parametrize("framework", PARTS)
@pytest.mark.parametrize("kind", ["another's", "empty", "no database", "postgres"])
async def test_a_source_without_the_tables_of_the_framework_is_named_and_left_as_it_is(
    store: Any, tmp_path: Path, postgres_url: str, framework: str, kind: str
) -> None:
    path = tmp_path / "a b.db"
    path.write_bytes(b"" if kind == "empty" else b"no database, whatever its name says" * 100)
    if kind == "another's":
        path.unlink()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE letters (id TEXT)")
    url = f"sqlite:///{path}"
    if kind == "postgres":
        url = postgres_url.replace("+psycopg", "")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE letters")
        url = re.sub(r"/[^/?]+($|\?)", r"/letters\1", url)
    before = path.read_bytes()
    try:
        with pytest.raises(NotFound, match=f"^no tables of {framework} in the source: [^\n]+$"):
            await run(PARTS[framework], store, url, dry_run=True)
    finally:
        if kind == "postgres":
            with psycopg.connect(url) as connection:
                tables = connection.execute(
                    "SELECT 1 FROM pg_tables WHERE schemaname !~ '^pg_|^information'"
                ).fetchall()
            with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
                connection.execute("DROP DATABASE letters WITH (FORCE)")
            assert tables == []
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


async def test_tables_of_another_release_are_named_and_what_is_read_is_left_as_it_is(
    store: Any, tmp_path: Path
) -> None:
    from google.adk.sessions.database_session_service import DatabaseSessionService

    path = tmp_path / "adk.db"
    source = DatabaseSessionService(f"sqlite+aiosqlite:///{path}")
    await events(source, "shop", "ada", "1", 1)
    await source.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE name LIKE 'idx%'").fetchall():
            connection.execute(f"DROP INDEX {name}")  # which ADK would make again
        before = path.read_bytes()
        assert (await run(adk, store, str(path), dry_run=True)).copied == 3
        assert path.read_bytes() == before
        connection.execute("ALTER TABLE user_states RENAME COLUMN update_time TO since")
    with pytest.raises(
        NotFound, match=r"'user_states' has no column 'update_time'. If .* older release, let ADK bring"
    ):
        await run(adk, store, str(path))


# The command


def test_the_command_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from frameworks.adopting_sources import memory_saver\n"
        "from distributed_state.adapters.langgraph import DistributedStateSaver\n"
        "def saver(store): return DistributedStateSaver(store, prefix='graphs/')\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    archive = f"sqlite:///{tmp_path}/archive.db"

    def adopt(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, "--archive", archive, "adopt", *words]
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)

    done = adopt("langgraph", "shop:memory_saver", "--into", "shop:saver")
    assert (done.returncode, done.stdout) == (
        0,
        "1 found in the source: 1 copied, 0 already equal, 0 differ, 0 failed\n",
    ), done.stderr
    assert "1 of them have no owner: `store.forget` does not find these" in done.stderr
    with StateStore.open(archive=archive) as store:
        assert [row.id for row in store.sessions(fresh=True)] == ["graphs/t0"]
    (tmp_path / "latin").write_bytes(b"a\xff")
    for words, said in (
        (("openai", "sqlite:///none.db", "--ids", "latin"), "error: latin: not UTF-8 at byte 1"),
        (("langgraph", "redis://host"), "error: redis:// is not one of postgresql, sqlite"),
        (("langgraph", "sqlite:///none.db"), "error: there is no file 'none.db'"),
        (("agno", "mysql://host"), "error: mysql:// is not one of"),
        (("openai", "shop:saver"), "name those of your own function by --ids"),
        (("adk", "shop:saver"), "cannot be called without arguments"),
        (
            ("langgraph", "archive.db", "--dry-run"),
            "error: no tables of LangGraph in the source: it has no 'checkpoints'",
        ),
    ):
        done = adopt(*words)
        assert done.returncode == 1, words
        assert said in done.stderr, done.stderr
