"""The embedded store: no server, one process, and each commit archived before it returns."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest
from below import Worker, redis_of
from crew import agent
from sync_api import Blocking, in_thread

from distributed_state import AsyncStateStore, ConfigurationError, DurabilityUnknown, StateStore


def opened(api: str, path: Path, **settings: Any) -> Any:
    if api == "asyncio":
        return AsyncStateStore.open(archive=f"sqlite:///{path}", **settings)
    return Blocking(StateStore.open(archive=f"sqlite:///{path}", **settings))


apis = pytest.mark.parametrize("api", ["asyncio", pytest.param("blocking", marks=pytest.mark.full)])


@apis
async def test_what_was_written_is_there_after_opening_again(api: str, tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    for round in range(3):
        async with opened(api, path) as store:
            session = store.session("s", user="u")
            assert await session.version() == 4 * round
            assert await session.get("n", 0) == round
            await session.set("value", {"round": round, "big": 2**70, "text": "\0\ud800"})
            assert await session.increment("n") == round + 1
            await session.append({"role": "user", "content": str(round)})
            async with store.batch() as batch:
                batch.on(session).set("batch", round)
    async with opened(api, path) as store:
        session = store.session("s")
        assert await session.get_all() == {"value": {"round": 2, "big": 2**70, "text": "\0\ud800"}, "n": 3, "batch": 2}
        assert [each.content for each in await session.messages()] == ["0", "1", "2"]
        assert [change.version for change in await session.history()] == list(range(1, 13))
        assert [(row.id, row.version) for row in await store.sessions(user="u")] == [("s", 12)]


@apis
async def test_a_start_is_no_loss(api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        async with opened(api, tmp_path / "state.db") as store:
            await store.session("s").set("n", 1)
            assert all(each.ok for each in await store.admin.doctor())
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []


@pytest.mark.wide
@apis
async def test_what_is_not_archived_yet_is_archived_when_the_store_is_closed(api: str, tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with opened(api, path, durability="memory", archiver=False) as store:
        async with store.batch() as batch:
            for number in range(100):
                batch.on(store.session(f"s{number}")).set("n", number)
        assert (await store.admin.stats())["unarchived"] == 100
    async with opened(api, path) as store:
        assert [await store.session(f"s{number}").get("n") for number in range(100)] == list(range(100))


@apis
async def test_a_commit_is_archived_before_it_returns(api: str, tmp_path: Path) -> None:
    async with opened(api, tmp_path / "state.db") as store:
        for number in range(10):
            await store.session(f"s{number}").set("n", 1)
            assert (await store.admin.stats())["unarchived"] == 0
        with redis_of(store) as client:
            client.flushall()  # as the end of the process would
        for number in range(10):
            assert await store.session(f"s{number}").get("n", fresh=True) == 1


@apis
async def test_without_any_argument_it_is_a_file_in_the_working_folder(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    opening: Any = AsyncStateStore.open() if api == "asyncio" else Blocking(StateStore.open())
    async with opening as store:
        assert await store.session("user-123", user="u1").set("user_name", "Alice") == 1
    assert (tmp_path / "distributed-state.db").exists()


@apis
@pytest.mark.parametrize("archive", [None, "sqlite:///a.db", "sqlite:///./a.db", "sqlite:///file:a%2520b.db?uri=true"])
async def test_a_relative_path_means_the_folder_in_which_the_store_was_opened(
    api: str, archive: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the program changes its folder. With the asyncio API it is the folder of `open(...)`."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    opening: Any = (
        AsyncStateStore.open(archive=archive) if api == "asyncio" else Blocking(StateStore.open(archive=archive))
    )
    monkeypatch.chdir(elsewhere)
    async with opening as store:
        sessions = [store.session(f"s{number}") for number in range(8)]
        await asyncio.gather(*(each.set("n", 1) for each in sessions))  # over more connections than the first
        assert [await each.get("n", fresh=True) for each in sessions] == [1] * 8
    assert list(elsewhere.iterdir()) == []
    name = {None: "distributed-state.db", "sqlite:///file:a%2520b.db?uri=true": "a b.db"}.get(archive, "a.db")
    assert {path.name for path in here.iterdir()} == {name, f"{name}.lock"}
    async with opened(api, here / name) as store:
        assert await store.session("s7").get("n") == 1


@apis
@pytest.mark.parametrize("name", ["{}/a.db", "file:{}/a.db?uri=true", "file://{}/a.db?uri=true"])
async def test_a_file_that_was_deleted_is_noticed_and_not_made_again(api: str, name: str, tmp_path: Path) -> None:
    """However it is named. Once it is back, what was acknowledged is written into it."""
    async with opened(api, Path(name.format(tmp_path))) as store:
        await store.session("s").set("n", 1)
        (tmp_path / "a.db").rename(tmp_path / "moved.db")
        for _ in range(2):
            with pytest.raises(DurabilityUnknown, match=r"a\.db: was deleted (or replaced )?since it was opened"):
                await store.session("s").increment("n")
        assert not (tmp_path / "a.db").exists()
        (tmp_path / "moved.db").rename(tmp_path / "a.db")
        await store.session("s").increment("n")
    async with opened(api, tmp_path / "a.db") as store:
        assert await store.session("s").get("n") == 4


@apis
@pytest.mark.parametrize("driver", ["sqlite", "sqlite+pysqlite"])
async def test_a_second_store_on_the_same_file_is_refused(api: str, driver: str, tmp_path: Path) -> None:
    """In this process, too; and it is free again afterwards."""
    archive = f"{driver}:///{tmp_path}/state.db"
    async with opened(api, tmp_path / "state.db") as store:
        await store.session("s").set("a", 1)
        with pytest.raises(ConfigurationError, match=r"state\.db: .*one Redis url"):
            StateStore.open(archive=archive)
        await store.session("s").set("a", 2)
    with StateStore.open(archive=archive) as again:
        assert again.session("s").get("a") == 2


@pytest.mark.wide
@apis
async def test_a_second_store_on_the_same_postgresql_archive_is_refused(api: str, postgres_url: str) -> None:
    """In this process and in another one; it is free again when the first is closed, or killed."""

    async def refused() -> None:
        with pytest.raises(ConfigurationError, match=r"namespace 'n': another store .*one Redis url"):
            await in_thread(lambda: StateStore.open(archive=postgres_url, namespace="n"))

    opening: Any = AsyncStateStore.open(archive=postgres_url, namespace="n")
    if api == "blocking":
        opening = Blocking(await in_thread(lambda: StateStore.open(archive=postgres_url, namespace="n")))
    async with opening as store:
        await store.session("s").set("a", 1)
        await refused()
        with await in_thread(lambda: StateStore.open(archive=postgres_url, namespace="another")) as other:
            other.session("s").set("a", 2)
        await store.session("s").set("a", 3)
    with Worker("write", ids=["t"], archive=postgres_url, namespace="n") as first:
        assert first.line() == "opened"
        await refused()
        first.kill()
        with StateStore.open(archive=postgres_url, namespace="n") as again:
            assert again.session("s").get("a") == 3


@pytest.mark.parametrize("limit", [0, pytest.param(3, marks=pytest.mark.full)])
async def test_keeping_an_archive_holds_up_nobody_and_ends_with_its_server(postgres_url: str, limit: int) -> None:
    """A transaction is open for as long as the store is: it sees no old rows, and no limit of the server's ends it."""
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(
            f"ALTER DATABASE {connection.info.dbname} SET idle_in_transaction_session_timeout = '{limit}s'"
        )
        store = StateStore.open(archive=postgres_url)
        store.session("s").set("a", 1)
        await asyncio.sleep(limit * 1.2)
        holding = "SELECT pid, backend_xmin, backend_xid FROM pg_stat_activity WHERE state = 'idle in transaction'"
        ((pid, *seen),) = connection.execute(holding).fetchall()
        assert seen == [None, None]
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        store.session("s").set("a", 2)
        store.close()


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.wide)])
async def test_a_second_process_is_refused_and_one_that_is_killed_loses_nothing_that_it_acknowledged(
    tmp_path: Path, kills: int
) -> None:
    archive, acknowledged = f"sqlite:///{tmp_path}/state.db", dict[str, list[str]]()
    for kill in range(kills):
        with Worker("write", ids=["a", "b", "c"], archive=archive) as worker:
            assert worker.line() == "opened"
            with pytest.raises(ConfigurationError, match="one Redis url"):
                StateStore.open(archive=archive)
            for _ in range(20 + 17 * kill):
                worker.line()
            worker.process.kill()
            worker.process.wait(30)
            lines = worker.lines()
        for line in lines:
            if len(line.split()) == 4:  # the last one may be cut off
                id, version, replica, number = line.split()
                acknowledged.setdefault(id, []).append(f"{version} {replica} {number}")
    with StateStore.open(archive=archive) as store:
        for id in ("a", "b", "c"):
            history = store.session(id).history()
            assert [change.version for change in history] == list(range(1, len(history) + 1))
            kept = {f"{change.version} {' '.join(str(change.appended[0].content).split()[1:])}" for change in history}
            assert set(acknowledged.get(id, [])) <= kept
            assert len(store.session(id).messages()) == len(history), "each once, in order"


@pytest.mark.wide
async def test_an_agent_that_was_killed_goes_on_in_the_next_process(tmp_path: Path) -> None:
    """Which begins with a server that knows no script, and learns to give a lock back before it learns to commit."""
    archive = f"sqlite:///{tmp_path}/state.db"
    with Worker("agent", id="s", die=True, archive=archive) as worker:
        worker.process.wait(30)
    assert worker.process.exit_code == -signal.SIGKILL
    assert agent("s", die=False, archive=archive) == "done"


@pytest.mark.parametrize("write", [True, False])
async def test_other_tasks_have_their_turn_between_the_commands_of_a_busy_one(write: bool) -> None:
    """Nothing is waited for, and still each command gives way to the rest of the loop, as one to a server does."""
    turns = 0

    async def another() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with AsyncStateStore.open(archive="memory", durability="memory", archiver=False) as store:
        session = store.session("s")
        await session.set("a", 0)
        task = asyncio.create_task(another())
        for n in range(50):
            if write:
                await session.set("a", n)
            else:
                await session.get("a", fresh=True)
        task.cancel()
    assert turns >= 49


async def test_memory_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with StateStore.open(archive="memory") as one, StateStore.open(archive="memory") as other:
        one.session("s").set("a", 1)
        assert other.session("s").get("a") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.wide
@pytest.mark.parametrize("archive", ["memory", "file"])
def test_ctrl_c_never_leaves_half_a_commit(tmp_path: Path, archive: str) -> None:
    """Scripts of the embedded server run in this process; an interrupt in one of them would be half a commit."""
    url = "memory" if archive == "memory" else f"sqlite:///{tmp_path}/a.db"
    dice, interrupted, armed = random.Random(1), 0, False
    main = threading.get_ident()

    def interrupt(*_: Any) -> None:
        if armed:
            raise KeyboardInterrupt

    # Not SIGALRM: that is how the runner ends a test that hangs.
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with StateStore.open(archive=url) as store:
            session = store.session("s")
            session.set("n", 0)
            for n in range(1, 200):
                timer = threading.Timer(dice.uniform(0.0001, 0.008), signal.pthread_kill, (main, signal.SIGUSR1))
                timer.start()
                try:
                    armed = True
                    session.set("n", n)
                    armed = False
                except KeyboardInterrupt:
                    interrupted += 1
                armed = False
                timer.join()
            history = session.history()
            assert [change.version for change in history] == list(range(1, session.version(fresh=True) + 1))
            assert [change.set["n"] for change in history] == sorted({change.set["n"] for change in history})
            assert session.get("n", fresh=True) == history[-1].set["n"]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert interrupted > 10
