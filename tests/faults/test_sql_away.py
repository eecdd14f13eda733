"""SQL is away, frozen, full or locked. Law: Redis alone serves what it has, and nobody waits for long or is misled."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from below import keys_of, redis_of, tiers, until
from controls import sabotage
from sync_api import core
from tenants import HI, Served
from typer.testing import CliRunner

from distributed_state import ColdUnavailable, ConfigurationError
from distributed_state.cold import connections
from distributed_state.programs.cli import shell
from distributed_state.programs.servers import PostgresServer, postgres_server
from distributed_state.programs.service import Access, authentication, callers_policy
from distributed_state.values import access_tokens
from distributed_state.values.access_tokens import RIGHTS

postgres = pytest.mark.only(warm="single", cold="postgres")
sqlite = pytest.mark.only(warm="single", cold="sqlite")
pytestmark = pytest.mark.timeout(240)
PARTITIONS = 4
WAYS = ("frozen", "killed")


@contextmanager
def nowhere(how: str) -> Iterator[str]:
    """The URL of a database whose server refuses every connection, or takes it and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        port = listener.getsockname()[1]
        if how == "refuses":
            listener.close()
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"


@contextmanager
def own_database(opener: Any, *options: str) -> Iterator[PostgresServer]:
    """A PostgreSQL server of this test alone."""
    with postgres_server(*options) as server:
        opener.archive = server.url
        yield server


def leave(server: PostgresServer, how: str) -> None:
    server.pause() if how == "frozen" else server.kill()


def come_back(server: PostgresServer) -> None:
    server.resume() if server.running else server.start()


async def begun(opener: Any, **settings: Any) -> Any:
    """A store each of whose partitions was used, and archived."""
    store = await opener(partitions=PARTITIONS, archive_every=0.05, **settings)
    seen = set[int]()
    for number in range(200):
        partition = core(store)._lifecycle.context.keys.partition_of(f"session:old{number}")
        if partition not in seen:
            await store.session(f"old{number}").set("n", 0)
            seen.add(partition)
    assert len(seen) == PARTITIONS
    await store.admin.archive()
    return store


async def written(store: Any, ids: list[str], first: int, count: int = 5) -> None:
    for n in range(first, first + count):
        for id in ids:
            await store.session(id).set("n", n)


async def archived(store: Any) -> None:
    """Wait until SQL is used again, and has everything."""

    async def done() -> bool:
        try:
            await store.admin.archive()
            await store.session("old0").history(limit=1)  # what another worker has archived asks nobody
        except ColdUnavailable:
            return False
        return True

    await until(done, 90.0, every=0.1)


async def whole(store: Any, id: str, values: list[int]) -> None:
    """The history of a session is what was written to it: nothing lost, nothing twice, all of it in order."""
    history = await store.session(id).history()
    assert [change.version for change in history] == list(range(1, len(values) + 1))
    assert [change.set["n"] for change in history] == values


async def is_away(store: Any, id: str) -> None:
    """What only SQL knows is unavailable; never absent."""
    session = store.session(id)
    tiers(store).known_ids.add(f"session:{id}")  # else Redis may know by itself that it is new
    for ask in (lambda: session.get("n"), session.exists, lambda: session.set("n", 1), session.history):
        with pytest.raises(ColdUnavailable):
            await ask()


@postgres
@pytest.mark.parametrize("how", ["refuses", "is silent"])
async def test_a_worker_starts_and_serves_with_redis_alone(opener: Any, how: str) -> None:
    store = await begun(opener)
    await store.session("warm").set("n", 0)
    await store.session("gone").set("n", 0)
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(keys_of(store, "gone").record)
    await store.close()
    with nowhere(how) as url:
        alone = await opener(archive=url, partitions=PARTITIONS)
        assert await alone.session("warm").get("n") == 0
        await written(alone, ["warm"], 1)
        fresh = alone.session()
        await fresh.set("n", 0)
        async with alone.events("*"):  # joining needs nothing of SQL
            await is_away(alone, "gone")
        assert await alone.session("new").set("n", 0) == 1, "Redis knows that it is"
        findings = {finding.name: finding for finding in await alone.admin.doctor()}
        assert not findings["sql"].ok
        await alone.close()
    store = await opener(partitions=PARTITIONS)
    await store.admin.archive()
    await whole(store, "warm", list(range(6)))
    await whole(store, fresh.id, [0])


@postgres
async def test_where_redis_knows_nothing_a_worker_needs_sql(opener: Any) -> None:
    with nowhere("refuses") as url, pytest.raises(ColdUnavailable):
        await opener(archive=url)


@postgres
async def test_another_database_is_refused_when_it_comes(opener: Any, postgres_url: str, monkeypatch: Any) -> None:
    """Before anything is written there: it has tables of nobody."""
    store = await begun(opener)
    await store.close()
    with monkeypatch.context() as patched:
        patched.setattr(connections, "sign_of_postgresql", None)
        patched.setattr("distributed_state.cold.store.opening.ready", _away)
        store = await opener(archive=postgres_url, partitions=PARTITIONS)
        await store.session("old0").set("n", 1)
    with pytest.raises(ConfigurationError, match="has no namespace"):
        await store.admin.archive()
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as raw:
        assert raw.execute("SELECT count(*) FROM namespaces").fetchone() == (0,)


def _away(database: Any, migrate: bool) -> None:
    raise ColdUnavailable("not yet")


@pytest.mark.wide
@postgres
async def test_a_statement_that_waits_too_long_is_ended(opener: Any, postgres_url: str) -> None:
    opener.archive = postgres_url
    store = await begun(opener, sql_timeout=3.0)
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as other:
        other.execute("LOCK TABLE records, changes IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(ColdUnavailable, match="timeout"):
            await store.session("unknown").get("n")
        await written(store, ["old0"], 1)
    await archived(store)
    await whole(store, "old0", list(range(6)))


@postgres
@pytest.mark.wide
@pytest.mark.parametrize("how", WAYS)
async def test_what_is_written_while_sql_is_away_is_archived_once_it_is_back(opener: Any, how: str) -> None:
    """By a worker that was there before and by one that started meanwhile."""
    with own_database(opener) as server:
        store = await begun(opener)
        await written(store, ["old0"], 1)
        leave(server, how)
        await written(store, ["old0"], 6)
        await is_away(store, "unknown")
        other = await opener(partitions=PARTITIONS, archive_every=0.05)
        await written(other, ["old0"], 11)
        await is_away(other, "unknown")
        assert await store.session("old0").get("n", fresh=True) == 15
        fresh = other.session()
        await fresh.set("n", 0)
        come_back(server)
        await archived(other)
        await archived(store)
        for each in (store, other):
            await whole(each, "old0", list(range(16)))
            await whole(each, fresh.id, [0])
            assert not await each.session("unknown").exists()
            assert (await each.admin.stats())["unarchived"] == 0


@postgres
@pytest.mark.wide
@pytest.mark.parametrize("how", WAYS)
async def test_a_conversation_is_begun_under_a_name_that_redis_knows_to_be_new(opener: Any, how: str) -> None:
    with own_database(opener) as server:
        store = await begun(opener)
        for id in ("seen", "taken"):
            assert not await store.session(id).exists()
        await store.session("taken").set("n", 0)
        await store.admin.archive()
        tiers(store).hot.forget("session:taken")
        drop(store, "taken")  # it was begun, archived, and left Redis since it was seen to be new
        leave(server, how)
        await store.session("seen").set("n", 0)
        await is_away(store, "taken")
        await is_away(store, "unseen")
        come_back(server)
        await archived(store)
        await whole(store, "seen", [0])
        await whole(store, "taken", [0])


@postgres
@pytest.mark.wide
async def test_without_the_token_or_the_ids_of_redis_it_would_be_begun_twice(opener: Any) -> None:
    """The controls of the last: an id that is believed without a proof."""
    with own_database(opener) as server:
        store, other = await begun(opener), await opener(partitions=PARTITIONS)
        assert not await other.session("taken").exists()
        seen = tiers(other).known_ids["session:taken"]
        await store.session("taken").set("n", 0)
        await store.admin.archive()
        drop(store, "taken")
        leave(server, "killed")
        tiers(other).hot.forget("session:taken")
        with pytest.raises(ColdUnavailable):
            await other.session("taken").get("n", fresh=True)
        with redis_of(other) as client:
            client.set(keys_of(other, "taken").hydration, seen)
        assert await other.session("taken").get("n", fresh=True) is None, "and it is there"
        with sabotage("commit", "not string.find(listed, mark, 1, true)", "true"):
            assert await other.session("taken").set("n", 1) == 1, "SQL has another version 1"


def drop(store: Any, id: str) -> None:
    """As expiry or eviction would, once it is archived."""
    with redis_of(store) as client:
        assert client.delete(keys_of(store, id).record) == 1


@postgres
@pytest.mark.wide
async def test_without_the_watch_a_frozen_server_is_waited_for(opener: Any, monkeypatch: Any) -> None:
    """The control of those that freeze it: nothing else notices. It is the watch that ends the wait."""
    with own_database(opener) as server:
        monkeypatch.setattr(connections.Watcher, "_watch", lambda self: None)
        monkeypatch.setattr(connections.Watcher, "require_life", lambda self: None)
        store = await begun(opener, archiver=False)
        await store.session("unseen").exists()  # its connection is in the pool
        server.pause()
        asked = tiers(store).port.spawn(lambda: ask(store), "asks")
        try:
            await tiers(store).port.sleep(5.0)
            assert not answered(store)
        finally:
            server.resume()
            await until(lambda: answered(store), 60.0)
            await asked.stop()


async def ask(store: Any) -> None:
    home = tiers(store)
    await home.port.sql(home.cold.cursors)
    home.asked_and_answered = True  # type: ignore[attr-defined]


def answered(store: Any) -> bool:
    return hasattr(tiers(store), "asked_and_answered")


@postgres
@pytest.mark.wide
async def test_a_server_without_a_free_connection_is_away(opener: Any) -> None:
    with own_database(opener, "-c", "max_connections=12") as server:
        store = await begun(opener)
        await store.close()
        taken = list[Any]()
        with pytest.raises(psycopg.OperationalError, match=r"too many clients|remaining connection slots"):
            while True:
                taken.append(psycopg.connect(server.url.replace("+psycopg", "")))
        store = await opener(partitions=PARTITIONS, archive_every=0.05)
        await written(store, ["old0"], 1)
        await is_away(store, "unknown")
        for each in taken:
            each.close()
        await archived(store)
        await whole(store, "old0", list(range(6)))


@postgres
@pytest.mark.wide
@pytest.mark.parametrize("limited", [True, False])
async def test_a_worker_that_is_stopped_in_a_transaction_holds_nobody_up(
    opener: Any, postgres_url: str, monkeypatch: Any, limited: bool
) -> None:
    """The server ends it; without that limit (the control) others wait for the rows that it has locked."""
    opener.archive = postgres_url
    # The watch of a worker that is stopped does not run either.
    monkeypatch.setattr(connections.Attempt, "end", lambda self, why: None)
    if not limited:
        short = connections._limits
        monkeypatch.setattr(connections, "_limits", lambda *s: short(*s) | {"idle_in_transaction_session_timeout": 0})
    store = await begun(opener, sql_timeout=3.0, archiver=False)
    stopped = tiers(store).cold.database.write()
    connection = stopped.__enter__()
    connection.exec_driver_sql("SELECT * FROM cursors FOR UPDATE")
    try:
        await store.session("old0").set("n", 1)
        if limited:
            await archived(store)
            await whole(store, "old0", [0, 1])
        else:
            for _ in range(5):
                with pytest.raises(ColdUnavailable):
                    await store.admin.archive()
    finally:
        with suppress(ColdUnavailable):  # the server has undone it
            stopped.__exit__(None, None, None)


@pytest.mark.wide
@sqlite
async def test_a_file_that_another_process_has_locked_is_away(opener: Any, tmp_path: Path) -> None:
    """For those who write; readers do not wait for it. Who has the file to himself keeps out readers too."""
    store = await begun(opener, sql_timeout=4.0)
    other = sqlite3.connect(tmp_path / "archive.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    await written(store, ["old0"], 1)
    with pytest.raises(ColdUnavailable, match="locked"):
        await store.admin.archive()
    assert not await store.session("unknown").exists()
    other.execute("ROLLBACK")
    other.close()
    await archived(store)
    await whole(store, "old0", list(range(6)))


@sqlite
async def test_nothing_is_archived_into_a_file_that_was_removed(opener: Any, tmp_path: Path) -> None:
    """SQLite goes on writing to it, and what it holds is gone with the last connection."""
    folder = tmp_path / "archive"
    folder.mkdir()
    opener.archive = f"sqlite:///{folder}/a.db"
    store = await begun(opener)
    kept = tmp_path / "kept"
    shutil.copytree(folder, kept)
    shutil.rmtree(folder)
    await written(store, ["old0"], 1)
    for _ in range(3):
        with pytest.raises(ColdUnavailable):
            await store.admin.archive()
    shutil.copytree(kept, folder)
    await archived(store)
    await whole(store, "old0", list(range(6)))


# Tokens of a service


@pytest.mark.only(api="asyncio", warm="single", cold="postgres")
async def test_while_sql_is_away_known_tokens_go_on_until_they_are_revoked(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "Ages", partial(authentication.Ages, fresh=0.05, revoked=0.1, wait=0.2))
    with own_database(opener) as server:
        served = Served(await opener(access=callers_policy(), sql_timeout=2), Access(tokens=True))
        tokens = [await served.token("acme:", *RIGHTS, seconds=None) for _ in range(3)]
        root = await served.token("", *RIGHTS, seconds=None)
        assert (await served.ask("GET", "/v1/caller", root)).status_code == 200
        for at in range(3):
            await served.store.session(f"acme:{at}").set("n", 0)

        async def turn(at: int) -> int:
            path, turn = f"/v1/conversations/acme:{at}/turns", {"messages": [HI]}
            return (await served.ask("POST", path, tokens[at], json=turn)).status_code

        async def revoke(at: int, by: str) -> str:
            answer = await served.ask("DELETE", f"/v1/tokens/{access_tokens.id_of(tokens[at])}", by)
            assert (answer.status_code, answer.json()["error"]) == (503, "Unavailable")
            return str(answer.json()["detail"])

        assert [await turn(at) for at in range(3)] == [200] * 3
        server.kill()
        await asyncio.sleep(0.2)  # older than `revoked`
        assert [await turn(at) for at in range(3)] == [200] * 3, "of what is in Redis"
        store = ("--url", opener.url, "--archive", server.url, "--namespace", opener.namespace)
        words = [*store, "token", "revoke", str(access_tokens.id_of(tokens[0]))]
        done = await asyncio.to_thread(CliRunner().invoke, shell.app, words)
        assert (done.exit_code, "revoke it again then" in done.stderr) == (1, True)

        async def refused(at: int) -> bool:
            return await turn(at) == 401

        await until(lambda: refused(0))
        assert "can revoke it now" in await revoke(2, tokens[1]), "SQL alone knows that it is of the same tenant"
        assert await turn(2) == 200
        assert "services refuse the token" in await revoke(2, root), "over HTTP, too"
        await until(lambda: refused(2))
        assert "services refuse the token" in await revoke(1, tokens[1]), "its own token"
        await until(lambda: refused(1))
        server.start()
        await served.service.drain()
        await served.service.close()
