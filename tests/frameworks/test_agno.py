"""Agno: what any of its databases does, ours on both APIs beside two of its own; and what only ours does."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from agno.agent import Agent
from agno.db.base import AsyncBaseDb, BaseDb, SessionType
from agno.db.in_memory import InMemoryDb
from agno.db.postgres import PostgresDb
from agno.db.schemas.evals import EvalRunRecord, EvalType
from agno.db.schemas.memory import UserMemory
from agno.db.sqlite import AsyncSqliteDb, SqliteDb
from agno.models.base import Model
from agno.models.response import ModelResponse
from agno.os import AgentOS
from agno.run.agent import RunOutput
from agno.run.base import RunStatus
from agno.session import AgentSession, TeamSession
from agno.tracing.schemas import Trace
from below import until
from frameworks.examples import run_examples
from reaping import Sweeps, quiet

from distributed_state import AsyncSession, AsyncStateStore, Deleted, StateStore
from distributed_state.adapters.agno import AsyncDistributedDb, DistributedDb, records

pytestmark = [
    pytest.mark.only(api="asyncio"),
    pytest.mark.filterwarnings("ignore:Type object:sqlalchemy.exc.SADeprecationWarning"),  # of Agno's SQLite
]
ALL = ("ours", "ours for asyncio", "in memory", "sqlite")


class Any_:
    """A database of either kind, each of whose methods is awaited."""

    def __init__(self, db: Any) -> None:
        self.db = db

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **more: Any) -> Any:
            found = getattr(self.db, name)(*args, **more)
            return await found if inspect.isawaitable(found) else found

        return call


@asynccontextmanager
async def database(kind: str, opener: Any, tmp_path: Path) -> AsyncIterator[Any]:
    given = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    if kind == "ours":
        with StateStore.open(**given) as store:
            yield Any_(DistributedDb(store))
    elif kind == "ours for asyncio":
        async with AsyncStateStore.open(**given) as store:
            yield Any_(AsyncDistributedDb(store))
    elif kind == "in memory":
        yield Any_(InMemoryDb())
    else:
        db = SqliteDb(db_file=f"{tmp_path}/agno.db")
        yield Any_(db)
        db.close()


def session(id: str = "s", user: str | None = "ada", **state: Any) -> AgentSession:
    return AgentSession(
        session_id=id,
        agent_id="a1",
        user_id=user,
        session_data={"session_state": state, "session_name": f"name of {id}"},
        metadata={"m": [1, None]},
        created_at=1000,
    )


def run(id: str, session_id: str = "s", status: RunStatus = RunStatus.completed, **more: Any) -> RunOutput:
    return RunOutput(run_id=id, session_id=session_id, agent_id="a1", status=status, content=f"of {id}", **more)


@pytest.mark.parametrize("kind", ALL)
async def test_a_session_is_saved_read_renamed_and_deleted(kind: str, opener: Any, tmp_path: Path) -> None:
    async with database(kind, opener, tmp_path) as db:
        assert await db.get_session("s") is None
        saved = await db.upsert_session(session(k=1))
        assert (saved.session_id, saved.session_data["session_state"]) == ("s", {"k": 1})
        read = await db.get_session("s", SessionType.AGENT)
        assert isinstance(read, AgentSession)
        assert (read.user_id, read.metadata, read.created_at) == ("ada", {"m": [1, None]}, 1000)
        assert read.session_data == {"session_state": {"k": 1}, "session_name": "name of s"}
        read.session_data["session_state"]["k"] = {"deep": [1.5, None, "\u00e5"]}
        read.session_data["session_state"][""] = "empty"
        read.metadata = None
        await db.upsert_session(read)
        again = await db.get_session("s")
        assert again.session_data["session_state"] == {"k": {"deep": [1.5, None, "\u00e5"]}, "": "empty"}
        assert again.metadata is None
        del again.session_data["session_state"]["k"]
        await db.upsert_session(again)
        assert (await db.get_session("s")).session_data["session_state"] == {"": "empty"}
        named = await db.rename_session("s", SessionType.AGENT, "better")
        assert named.session_data["session_name"] == "better"
        assert await db.rename_session("nowhere", SessionType.AGENT, "x") is None
        as_dict = await db.get_session("s", deserialize=False)
        assert (as_dict["session_id"], as_dict["session_type"], as_dict["agent_id"]) == ("s", "agent", "a1")
        # One that was made anew means itself as it stands.
        await db.upsert_session(session(other=2))
        assert (await db.get_session("s")).session_data["session_state"] == {"other": 2}
        assert await db.delete_session("s", user_id="bob") is False
        assert await db.delete_session("s") is True
        assert await db.delete_session("s") is False
        assert await db.get_session("s") is None
        await db.upsert_session(session())
        await db.delete_sessions(["s", "nowhere"])
        assert await db.get_session("s") is None


@pytest.mark.parametrize("kind", ALL)
async def test_a_session_is_its_owners(kind: str, opener: Any, tmp_path: Path) -> None:
    async with database(kind, opener, tmp_path) as db:
        await db.upsert_session(session(user=None, k=0))
        assert (await db.upsert_session(session(user="ada", k=1))).user_id == "ada", "what is nobody's can be taken"
        assert await db.upsert_session(session(user="bob", k=2)) is None
        assert await db.get_session("s", user_id="bob") is None
        assert (await db.get_session("s", user_id="ada")).session_data["session_state"] == {"k": 1}


@pytest.mark.parametrize("kind", ALL)
async def test_runs_are_stored_apart_and_in_order(kind: str, opener: Any, tmp_path: Path) -> None:
    async with database(kind, opener, tmp_path) as db:
        await db.upsert_session(session())
        for number in range(12):
            await db.upsert_run(
                run(f"r{number}", created_at=1000 + number), session_id="s", user_id="ada", run_index=number
            )
        await db.upsert_run(run("r3", status=RunStatus.error), session_id="s", user_id="ada")
        await db.upsert_run(
            run("member", parent_run_id="r1", created_at=2000), session_id="s", user_id="ada", run_index=12
        )
        read = await db.get_session("s")
        assert [each.run_id for each in read.runs] == [*(f"r{number}" for number in range(12)), "member"]
        assert read.runs[3].status == RunStatus.error
        recent = await db.get_session("s", runs_limit=9)
        assert [each.run_id for each in recent.runs] == ["r2", *(f"r{number}" for number in range(4, 12))]
        assert (await db.get_run("r5")).content == "of r5"
        assert await db.get_run("nowhere") is None
        assert [each.run_id for each in await db.get_runs(session_id="s", status=RunStatus.error)] == ["r3"]
        rows, total = await db.get_runs(session_id="s", limit=5, page=2, deserialize=False)
        assert (len(rows), total) == (5, 13)
        assert len(await db.get_runs(user_id="ada")) == 13
        assert await db.get_runs(user_id="bob") == []
        assert await db.delete_run("r0") is True
        assert await db.delete_run("r0") is False
        await db.delete_runs(["r1", "nowhere"])
        assert [each.run_id for each in (await db.get_session("s")).runs][:2] == ["r2", "r3"]
        # Saving the session leaves its runs.
        await db.upsert_session(read)
        assert "r11" in [each.run_id for each in (await db.get_session("s")).runs]
        await db.delete_session("s")
        assert await db.get_run("r11") is None


@pytest.mark.parametrize("kind", ALL)
async def test_sessions_are_listed_and_filtered(kind: str, opener: Any, tmp_path: Path) -> None:
    async with database(kind, opener, tmp_path) as db:
        every = [session(f"s{number}", user=("ada", "bob")[number % 2]) for number in range(5)]
        for number, each in enumerate(every):
            each.created_at = 1000 + number
        await db.upsert_sessions(every)
        team = TeamSession(
            session_id="t", team_id="t1", user_id="ada", session_data={"session_name": "A team"}, created_at=1
        )
        await db.upsert_session(team)

        async def ids(**filters: Any) -> list[str]:
            return [
                each.session_id for each in await db.get_sessions(sort_by="created_at", sort_order="asc", **filters)
            ]

        assert await ids() == ["t", "s0", "s1", "s2", "s3", "s4"]
        assert await ids(user_id="ada") == ["t", "s0", "s2", "s4"]
        assert await ids(session_type=SessionType.AGENT, component_id="a1") == ["s0", "s1", "s2", "s3", "s4"]
        assert await ids(session_type=SessionType.TEAM) == ["t"]
        assert await ids(session_name="a TEAM") == ["t"]
        assert await ids(start_timestamp=1001, end_timestamp=1003) == ["s1", "s2", "s3"]
        assert await ids(limit=2, page=2) == ["s1", "s2"]
        rows, total = await db.get_sessions(limit=2, deserialize=False, include_runs=False)
        assert (len(rows), total) == (2, 6)
        assert not any(row.get("runs") for row in rows)


@pytest.mark.parametrize("kind", [each for each in ALL if each != "in memory"])
async def test_a_page_needs_a_limit_and_counts_from_one(kind: str, opener: Any, tmp_path: Path) -> None:
    async with database(kind, opener, tmp_path) as db:
        await db.upsert_session(session())
        for wrong in {"page": 2}, {"page": 0, "limit": 1}:
            for call in (db.get_sessions, db.get_runs, db.get_user_memories, db.get_user_memory_stats):
                with pytest.raises(ValueError, match="`page`"):
                    await call(**wrong)


@pytest.mark.parametrize("kind", [each for each in ALL if each != "in memory"])
async def test_rows_of_runs_have_the_columns_of_the_table(kind: str, opener: Any, tmp_path: Path) -> None:
    async with database(kind, opener, tmp_path) as db:
        await db.upsert_session(session())
        for number in range(3):
            await db.upsert_run(run(f"r{number}"), session_id="s", user_id="ada", run_index=number + 5)
        rows, _ = await db.get_runs(session_id="s", deserialize=False)
        columns = ("run_id", "session_id", "run_type", "agent_id", "user_id", "status", "run_index")
        of_second = {"run_id": "r1", "session_id": "s", "run_type": "agent", "agent_id": "a1"}
        of_second |= {"user_id": "ada", "status": "COMPLETED", "run_index": 6}
        alone = await db.get_run("r1", deserialize=False)
        for row in rows[1], alone:
            assert {name: row[name] for name in columns} == of_second
            assert row["run_data"]["content"] == "of r1"
        assert [row["run_index"] for row in rows] == [5, 6, 7]


def days_ago(days: int) -> int:
    return int(time.time()) - days * 86_400


@pytest.mark.parametrize("kind", [each for each in ALL if each != "in memory"])
async def test_metrics_are_counted_from_the_sessions(kind: str, opener: Any, tmp_path: Path) -> None:
    """As Agno's database in memory counts them, which is the measure: its tables and ours are filled alike."""

    async def counted(db: Any, **wanted: Any) -> Any:
        rows, latest = await db.get_metrics(**wanted)
        plain = [{name: value for name, value in row.items() if not name.endswith("_at")} for row in rows]
        assert (latest is None) == (rows == [])
        return sorted(
            ({**row, "date": str(row["date"])[:10]} for row in plain),
            key=lambda row: (row["date"], row["user_id"] or ""),
        )

    memory = Any_(InMemoryDb())
    async with database(kind, opener, tmp_path) as db:
        both = (memory, db)
        for each in both:
            assert not await each.calculate_metrics()
            for id, user, days in (("a", "ada", 3), ("b", "ada", 3), ("c", None, 1), ("d", "bob", 0)):
                made = session(id, user=user)
                made.created_at = days_ago(days)
                made.session_data["session_metrics"] = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
                await each.upsert_session(made)
                used = run(f"of {id}", session_id=id, model="m", model_provider="p")
                await each.upsert_run(used, session_id=id, user_id=user, run_index=0)
            assert len(await each.calculate_metrics()) == 3
        theirs, ours = [await counted(each) for each in both]
        assert len(theirs) == 3
        if kind != "sqlite":  # its ids are random
            assert ours == theirs
        today = datetime.now(UTC).date()
        for wanted in ({"user_id": "ada"}, {"user_id": ""}, {"starting_date": today}, {"ending_date": today}):
            assert len(await counted(db, **wanted)) == len(await counted(memory, **wanted))
        # What comes today is added; the days that are over stay as they were counted.
        for each in both:
            for id, days in (("e", 0), ("f", 3)):
                late = session(id)
                late.created_at = days_ago(days)
                await each.upsert_session(late)
            assert len(await each.calculate_metrics()) == 2
        theirs, ours = [await counted(each) for each in both]
        assert [row["agent_sessions_count"] for row in ours] == [row["agent_sessions_count"] for row in theirs]


@pytest.mark.parametrize("kind", [each for each in ALL if each != "in memory"])
async def test_a_pending_run_is_cancelled_unless_it_went_on(kind: str, opener: Any, tmp_path: Path) -> None:
    async with database(kind, opener, tmp_path) as db:
        await db.upsert_session(session())
        for status in RunStatus.pending, RunStatus.running, RunStatus.completed:
            await db.upsert_run(run(status.value, status=status), session_id="s", user_id="ada")
        silent = run("silent", status=RunStatus.pending)
        silent.content = None
        await db.upsert_run(silent, session_id="s", user_id="ada")

        async def cancel(run_id: str, **more: Any) -> bool:
            given = {"session_id": "s", "user_id": "ada", "reason": "the ticket was lost"} | more
            return bool(await db.cancel_pending_run(run_id, **given))

        assert not await cancel("nowhere")
        assert not await cancel("PENDING", session_id="another")
        assert not await cancel("PENDING", user_id="bob")
        assert not await cancel("COMPLETED")
        assert not await cancel("RUNNING")
        with pytest.raises(ValueError, match="Only Pending or Running"):
            await cancel("COMPLETED", expected_status="COMPLETED")
        assert await cancel("PENDING")
        assert not await cancel("PENDING"), "a second time it is none"
        assert await cancel("RUNNING", expected_status="RUNNING")
        assert await cancel("silent")
        runs = {each.run_id: each for each in (await db.get_session("s")).runs}
        assert {id: each.status.value for id, each in runs.items()} == {
            "PENDING": "CANCELLED", "RUNNING": "CANCELLED", "silent": "CANCELLED", "COMPLETED": "COMPLETED"
        }  # fmt: skip
        assert (runs["PENDING"].content, runs["silent"].content) == ("of PENDING", "the ticket was lost")


@pytest.mark.replicas
async def test_a_run_that_goes_on_while_it_is_cancelled_is_not_overwritten(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = [AsyncDistributedDb(await opener()) for _ in range(2)]
    await one.upsert_session(session())
    write = AsyncSession.write
    for meanwhile, cancelled in ((RunStatus.completed, False), (RunStatus.pending, True)):
        await one.upsert_run(run("r", status=RunStatus.pending), session_id="s", user_id="ada")

        async def late(self: Any, meanwhile: RunStatus = meanwhile, **more: Any) -> Any:
            monkeypatch.setattr(AsyncSession, "write", write)
            await other.upsert_run(run("r", status=meanwhile, model="of another"), session_id="s", user_id="ada")
            return await write(self, **more)

        monkeypatch.setattr(AsyncSession, "write", late)
        assert await one.cancel_pending_run("r", session_id="s", user_id="ada", reason="lost") is cancelled
        found = await other.get_run("r")
        assert (found.model, found.status) == ("of another", RunStatus.cancelled if cancelled else meanwhile)


@pytest.mark.parametrize("kind", ALL)
async def test_memories_are_a_users(kind: str, opener: Any, tmp_path: Path) -> None:
    async with database(kind, opener, tmp_path) as db:
        likes = await db.upsert_user_memory(
            UserMemory(memory="Likes rain", user_id="ada", topics=["weather"], agent_id="a1", created_at=1000)
        )
        assert likes.memory_id
        await db.upsert_user_memory(
            UserMemory(memory="Walks", memory_id="m2", user_id="ada", topics=["sport", "weather"], created_at=2000)
        )
        await db.upsert_memories([UserMemory(memory="Sleeps", memory_id="m3", user_id="bob", created_at=3000)])
        assert (await db.get_user_memory(likes.memory_id)).memory == "Likes rain"
        assert await db.get_user_memory("m2", user_id="bob") is None
        assert await db.get_user_memory("nowhere") is None
        changed = UserMemory(memory="Runs", memory_id="m2", user_id="ada", topics=["sport"], created_at=2000)
        await db.upsert_user_memory(changed)

        async def some(**filters: Any) -> set[str]:
            return {each.memory for each in await db.get_user_memories(**filters)}

        assert await some() == {"Likes rain", "Runs", "Sleeps"}
        assert await some(user_id="ada") == {"Likes rain", "Runs"}
        assert await some(user_id="ada", topics=["sport"]) == {"Runs"}
        assert await some(agent_id="a1") == {"Likes rain"}
        assert await some(search_content="RAIN") == {"Likes rain"}
        rows, total = await db.get_user_memories(user_id="ada", limit=1, deserialize=False)
        assert (len(rows), total) == (1, 2)
        assert sorted(await db.get_all_memory_topics()) == ["sport", "weather"]
        stats, users = await db.get_user_memory_stats()
        assert ({each["user_id"]: each["total_memories"] for each in stats}, users) == ({"ada": 2, "bob": 1}, 2)
        await db.delete_user_memory("m3", user_id="ada")
        assert await some(user_id="bob") == {"Sleeps"}
        await db.delete_user_memory("m3")
        await db.delete_user_memories(["m2", "nowhere"], user_id="ada")
        assert await some() == {"Likes rain"}
        await db.clear_memories()
        assert await some() == set()


# What ours does


@pytest.mark.only(warm="real")
@pytest.mark.replicas
async def test_keys_that_many_set_at_once_are_all_kept(opener: Any, tmp_path: Path) -> None:
    """Agno's own way of setting one reads the session and saves it whole; its SQLite loses most, in the same run."""

    def race(databases: list[BaseDb]) -> int:
        databases[0].upsert_session(session())
        agents = [Agent(id="a1", db=db) for db in databases]
        with ThreadPoolExecutor(8) as threads:
            keys = [(agents[each % len(agents)], f"{each}.{number}") for each in range(8) for number in range(20)]
            list(threads.map(lambda one: one[0].update_session_state({one[1]: 1}, session_id="s"), keys))
        read = databases[0].get_session("s")
        assert read is not None
        return len(read.session_data["session_state"])

    given = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    with StateStore.open(**given) as one, StateStore.open(**given) as other:
        assert await asyncio.to_thread(race, [DistributedDb(one), DistributedDb(other)]) == 160
    sqlite = SqliteDb(db_file=f"{tmp_path}/agno.db")
    assert await asyncio.to_thread(race, [sqlite]) < 160
    sqlite.close()


async def test_two_who_read_a_session_at_once_keep_what_both_did(opener: Any, tmp_path: Path) -> None:
    async with database("ours for asyncio", opener, tmp_path) as db:
        await db.upsert_session(session(k=0, gone=1))
        one, other = await db.get_session("s"), await db.get_session("s")
        one.session_data["session_state"].update(of_one=1, k=1)
        del one.session_data["session_state"]["gone"]
        other.session_data["session_state"]["of_other"] = 1
        other.session_data["session_name"] = "renamed"
        await db.upsert_session(one)
        await db.upsert_session(other)
        read = await db.get_session("s")
        assert read.session_data == {
            "session_state": {"k": 1, "of_one": 1, "of_other": 1}, "session_name": "renamed"
        }  # fmt: skip
        await db.delete_session("s")
        one.session_data["session_state"]["k"] = 2
        with pytest.raises(Deleted):  # it was read before: a run that is under way brings nothing back
            await db.upsert_session(one)
        assert await db.get_session("s") is None


@pytest.mark.parametrize("expired", ["refuse", "begin again"])
async def test_by_the_setting_a_run_saves_its_session_again_that_expired(opener: Any, expired: str) -> None:
    store = await quiet(opener, session_idle=0.05, expired=expired)
    db = AsyncDistributedDb(store)
    await db.upsert_session(session(k=1))
    await db.upsert_run(run("r1"), session_id="s")
    read = await db.get_session("s")
    await until(Sweeps(store))
    assert await db.get_session("s") is None
    read.session_data["session_state"]["k"] = 2
    if expired == "refuse":
        with pytest.raises(Deleted, match="expired at"):
            await db.upsert_session(read)
        assert await db.get_session("s") is None
        await db.upsert_session(session(k=2))
    else:
        await db.upsert_session(read)
    again = await db.get_session("s")
    assert again.session_data["session_state"] == {"k": 2}
    assert [each.run_id for each in again.runs or []] == ([] if expired == "refuse" else ["r1"])


async def test_a_session_begins_where_something_is_that_is_none(opener: Any) -> None:
    """A name that came after the session was deleted was half a record, on which the id waited for ever."""
    store = await opener()
    db = AsyncDistributedDb(store)
    record = store.session("agno_sessions/s")
    for end in (store.erase, store.delete):
        await record.write(set={"data/session_name": "late", "data/other": 1}, revive=True)
        assert await db.get_session("s") is None
        assert await db.rename_session("s", SessionType.AGENT, "later") is None
        saved = await db.upsert_session(session(k=1))
        read = await db.get_session("s")
        assert read.session_data == saved.session_data == session(k=1).session_data
        await end(record.id)
        read.session_data["session_state"]["k"] = 3
        with pytest.raises(Deleted):
            await db.upsert_session(read)
        await db.upsert_session(session(k=2))
        assert (await db.get_session("s")).session_data["session_state"] == {"k": 2}
        await end(record.id)
    await db.upsert_session(session(user="bob"))
    await store.forget("ada")
    assert await db.get_session("s", user_id="bob"), "it is bob's, whosever it was before"
    await store.forget("bob")
    assert await db.get_session("s") is None


async def test_a_name_that_comes_when_the_session_is_deleted_leaves_nothing(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opener()
    db = AsyncDistributedDb(store)
    await db.upsert_session(session())
    write = AsyncSession.write

    async def late(self: Any, **more: Any) -> Any:
        monkeypatch.setattr(AsyncSession, "write", write)
        await db.delete_session("s")
        return await write(self, **more)

    monkeypatch.setattr(AsyncSession, "write", late)
    assert await db.rename_session("s", SessionType.AGENT, "late") is None
    assert not await store.session("agno_sessions/s").exists(fresh=True)


async def test_runs_are_of_their_session_and_go_with_it(opener: Any) -> None:
    store = await opener()
    db = AsyncDistributedDb(store)
    await db.upsert_run(run("early"), session_id="s", user_id="ada")
    assert await db.get_run("early") is None, "of a session that is not there"
    await db.upsert_session(session())
    for number in range(150):
        await db.upsert_run(run(f"r{number}", created_at=1000 + number), session_id="s")
    record = store.session("agno_sessions/s")
    assert len(await record.get_all()) < 20, "none of them is a field of it"
    before = await record.version(fresh=True)
    await db.upsert_run(run("r7", status=RunStatus.error), session_id="s")
    assert await record.version(fresh=True) == before + 1, "a run that is there is one commit"
    read = await db.get_session("s")
    assert [each.run_id for each in read.runs] == [f"r{number}" for number in range(150)]
    assert read.runs[7].status == RunStatus.error
    assert [each.run_id for each in (await db.get_session("s", runs_limit=3)).runs] == ["r147", "r148", "r149"]
    await store.session("agno_sessions/s").fork("agno_sessions/copy")
    copied = await db.get_session("copy")
    assert (copied.session_id, len(copied.runs)) == ("copy", 150)
    assert sorted(each.session_id for each in await db.get_sessions()) == ["copy", "s"]
    # A run that comes while the session is deleted is not there, nor is it when the session comes again.
    await store.erase("agno_sessions/s")
    await db.upsert_run(run("r7"), session_id="s")
    assert await db.get_run("r7") is None
    await db.upsert_session(session())
    assert (await db.get_session("s")).runs == []
    await db.upsert_run(run("r7"), session_id="s")
    assert [each.run_id for each in (await db.get_session("s")).runs] == ["r7"]
    assert (await db.get_run("r7")).run_id == "r7"


async def test_a_run_without_a_user_is_forgotten_with_its_session(opener: Any) -> None:
    store = await opener()
    db = AsyncDistributedDb(store)
    await db.upsert_session(session())
    await db.upsert_run(run("r0"), session_id="s")
    await store.forget("ada")
    assert await db.get_run("r0") is None
    assert not await store.task("agno_runs/r0").exists(fresh=True)


async def test_who_may_not_administer_lists(opener: Any) -> None:
    store = await opener(access=lambda request: request.action != "admin")
    db = AsyncDistributedDb(store)
    for user in ("ada", "bob"):
        await db.upsert_session(session(f"of {user}", user=user))
        await db.upsert_run(run(f"r {user}"), session_id=f"of {user}", user_id=user)
        await db.upsert_user_memory(UserMemory(memory=f"of {user}", user_id=user))
    assert [each.session_id for each in await db.get_sessions()] == ["of ada", "of bob"]
    assert [each.session_id for each in await db.get_sessions(user_id="bob")] == ["of bob"]
    assert [each.run_id for each in await db.get_runs(user_id="bob")] == ["r bob"]
    assert len(await db.get_user_memories()) == 2


async def test_what_is_listed_in_pages_is_all_of_it(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_PAGE", 3)
    store = await opener()
    db = AsyncDistributedDb(store)
    ids = [f"s{number}" for number in range(10)]
    for id in ids:
        await db.upsert_session(session(id))
    assert sorted(each.session_id for each in await db.get_sessions()) == ids
    assert sorted(each.session_id for each in await db.get_sessions(user_id="ada")) == ids


async def test_what_moves_to_the_front_while_pages_are_read_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an owner come in the order of their changes, and one of the last page may be the first meanwhile."""
    monkeypatch.setattr(records, "_PAGE", 3)
    order = [f"s{number}" for number in range(8)]

    class Moving:
        async def sessions(self, *, after: str | None, limit: int, **wanted: Any) -> list[Any]:
            begin = 0 if after is None else order.index(after) + 1
            page = [SimpleNamespace(id=id, cursor=id, created=0.0) for id in order[begin : begin + limit]]
            if after is None:
                order.insert(0, order.pop())
            return page

    assert await records._every(Moving(), "session", "", user="ada") == sorted(order)
    assert order[:2] == ["s6", "s7"]


async def test_a_memory_can_be_kept_of_a_user_whose_record_was_deleted(opener: Any) -> None:
    store = await opener()
    db = AsyncDistributedDb(store)
    await store.user("ada").set("k", 1)
    await store.delete("ada", scope="user")
    await db.upsert_user_memory(UserMemory(memory="Likes rain", memory_id="m", user_id="ada"))
    assert [each.memory for each in await db.get_user_memories()] == ["Likes rain"]
    await store.delete("ada", scope="user")
    await db.clear_memories()


async def test_other_families_are_anothers_or_refused_by_name(opener: Any, tmp_path: Path) -> None:
    store = await opener()
    alone = AsyncDistributedDb(store)
    with pytest.raises(NotImplementedError, match=r"get_eval_run: AsyncDistributedDb keeps sessions.*others="):
        await alone.get_eval_run("e")
    with pytest.raises(NotImplementedError, match=r"reassign_session_owner: .* never changes"):
        await alone.reassign_session_owner("s", previous_user_id="ada", user_id="bob")
    assert await alone.table_exists("agno_sessions")
    assert await alone.table_exists("agno_metrics")
    assert not await alone.table_exists("agno_eval_runs")

    class Other(AsyncDistributedDb):
        async def get_eval_run(self, *args: Any, **more: Any) -> Any:
            return args, more

    both = AsyncDistributedDb(store, others=Other(store))
    assert await both.get_eval_run("e", deserialize=False) == (("e",), {"deserialize": False})
    with StateStore.open(archive=f"sqlite:///{tmp_path}/own.db") as blocking:
        in_memory = InMemoryDb()
        db = DistributedDb(blocking, others=in_memory)
        assert db.get_eval_run("e") is None
        assert isinstance(db, BaseDb)
        assert isinstance(both, AsyncBaseDb)


async def test_agno_os_names_what_only_another_database_keeps(opener: Any) -> None:
    """Its routes of other families answer 501 with the method's name; its metrics are counted from the sessions."""
    db = AsyncDistributedDb(await opener())
    await db.upsert_session(session())
    for others, status in ((None, 501), (AsyncSqliteDb(db_url="sqlite+aiosqlite://"), 200)):
        db.others = others
        app = AgentOS(agents=[Agent(id="a1", db=db)], telemetry=False).get_app()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://os") as client:
            assert (await client.post("/metrics/refresh")).status_code == 200
            metrics = (await client.get("/metrics")).json()["metrics"]
            assert [(each["agent_sessions_count"], each["users_count"]) for each in metrics] == [(1, 1)]
            listed = (await client.get("/sessions", params={"type": "agent"})).json()["data"]
            assert [each["session_id"] for each in listed] == ["s"]
            answers = [await client.get(f"/{family}") for family in ("traces", "eval-runs")]
        assert [each.status_code for each in answers] == [status, status], answers[0].text
        if others is None:
            assert "get_traces: AsyncDistributedDb keeps sessions" in answers[0].text
            assert "NeedsOthers" in answers[1].text
    await others.close()


def test_what_belongs_to_a_session_here_can_be_kept_in_postgresql(postgres_url: str) -> None:
    """Agno's schema there has foreign keys to its own sessions: none of a table that `others` fills."""
    with StateStore.open(archive="memory") as store:
        theirs = PostgresDb(db_url=postgres_url)
        db = DistributedDb(store, others=theirs)
        db.upsert_session(session())
        now = datetime.now(UTC)
        of = {"run_id": "r", "session_id": "s", "user_id": "ada", "agent_id": "a1"}
        times = {"start_time": now, "end_time": now, "created_at": now, "duration_ms": 1}
        db.upsert_trace(
            Trace("t", "run", "OK", total_spans=1, error_count=0, team_id=None, workflow_id=None, **of, **times)
        )
        db.create_approval({"id": "p", **of, "status": "pending", "source_type": "agent", "pause_type": "confirmation"})
        db.create_eval_run(EvalRunRecord(run_id="e", eval_type=EvalType.ACCURACY, eval_data={}))
        entry = {"uuid": "u", "type": "user"}
        db.append_transcript_entries("claude", "project", "main", [entry], agno_session_id="s")
        db.upsert_compaction(
            {"compaction_id": "c", "session_id": "s", "run_id": "r", "summary": "short", "created_at": 1}
        )
        assert db.get_trace(trace_id="t").session_id == "s"
        assert db.get_approval("p")["session_id"] == "s"
        assert db.get_eval_run("e").run_id == "e"
        assert db.get_transcript_entries("claude", "project", "main") == [entry]
        assert [each["compaction_id"] for each in db.get_compactions_for_session("s")] == ["c"]
        theirs.close()


async def test_a_user_is_forgotten_with_sessions_runs_and_memories(opener: Any) -> None:
    store = await opener()
    db = AsyncDistributedDb(store)
    await db.upsert_session(session())
    await db.upsert_run(run("r0"), session_id="s", user_id="ada", run_index=0)
    await db.upsert_user_memory(UserMemory(memory="Likes rain", memory_id="m", user_id="ada"))
    await db.calculate_metrics()
    await store.forget("ada")
    assert await db.get_session("s") is None
    assert await db.get_run("r0") is None
    assert await db.get_user_memories(user_id="ada") == []
    assert await db.get_metrics() == ([], None)


async def test_the_example_runs() -> None:
    names = {"Agent": Agent, "AgentSession": AgentSession, "StateStore": StateStore, "DistributedDb": DistributedDb}
    assert await run_examples(DistributedDb, **names) == 1


async def test_both_databases_are_of_one_store(opener: Any) -> None:
    store = await opener()
    blocking, awaited = DistributedDb(store), AsyncDistributedDb(store)
    await asyncio.to_thread(blocking.upsert_session, session(k=1))
    assert (await awaited.get_session("s")).session_data["session_state"] == {"k": 1}


# An agent


class Scripted(Model):
    """A model that says how many messages it was sent."""

    def __init__(self) -> None:
        super().__init__(id="scripted")

    def response(self, messages: list[Any], **more: Any) -> ModelResponse:
        said = ModelResponse(role="assistant", content=f"{len(messages)} messages")
        messages.append(self._message(said))
        return said

    async def aresponse(self, messages: list[Any], **more: Any) -> ModelResponse:
        return self.response(messages, **more)

    @staticmethod
    def _message(said: ModelResponse) -> Any:
        from agno.models.message import Message

        return Message(role="assistant", content=said.content)

    def invoke(self, *args: Any, **more: Any) -> Any:
        raise NotImplementedError

    ainvoke = invoke_stream = ainvoke_stream = invoke

    def _parse_provider_response(self, response: Any, **more: Any) -> Any:
        raise NotImplementedError

    _parse_provider_response_delta = _parse_provider_response


@pytest.mark.replicas
async def test_an_agent_goes_on_at_another_replica(opener: Any) -> None:
    one, other = [AsyncDistributedDb(await opener()) for _ in range(2)]

    def agent(db: Any) -> Agent:
        return Agent(id="a1", model=Scripted(), db=db, add_history_to_context=True, telemetry=False)

    first = await agent(one).arun("hello", session_id="s", user_id="ada", session_state={"k": 1})
    second = await agent(other).arun("and on", session_id="s", user_id="ada")
    third = await agent(one).arun("and further", session_id="s", user_id="ada")
    assert [each.content for each in (first, second, third)] == ["1 messages", "3 messages", "5 messages"]
    read = await one.get_session("s")
    assert [each.run_id for each in read.runs] == [first.run_id, second.run_id, third.run_id]
    assert read.session_data["session_state"] == {"k": 1}


async def test_blocking_code_on_a_running_loop_and_in_threads(tmp_path: Path) -> None:
    with StateStore.open(archive=f"sqlite:///{tmp_path}/own.db") as store:
        db = DistributedDb(store)
        db.upsert_session(session(k=1))
        read = []
        thread = threading.Thread(target=lambda: read.append(db.get_session("s")))
        thread.start()
        thread.join()
        assert read[0].session_data["session_state"] == {"k": 1}
