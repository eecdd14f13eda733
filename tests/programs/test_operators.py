"""What operators ask of a fleet on the command line, with both servers there and with one of them away."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import sqlite3
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from rich.console import Console

from distributed_state import StateStore, WarmUnavailable
from distributed_state.cold.maintenance import CHUNK
from distributed_state.port.background import finish
from distributed_state.programs import cli
from distributed_state.programs.cli import fleet as fleet_commands
from distributed_state.programs.cli import shell, top
from distributed_state.programs.servers import wait_until
from distributed_state.store.fleet import FleetLooks
from distributed_state.store.lifecycle import core_of

NOWHERE = "redis://127.0.0.1:1"
NO_SQL = "postgresql+psycopg://nobody@127.0.0.1:1/none"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    for name in ("URL", "ARCHIVE", "NAMESPACE", "LOG_LEVEL"):
        monkeypatch.delenv(f"DISTRIBUTED_STATE_{name}", raising=False)
    monkeypatch.setenv("DISTRIBUTED_STATE_RETRY_FOR", "0")
    for console in (shell.out, shell.err):
        monkeypatch.setattr(console, "width", 200)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["distributed-state", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        seen = capsys.readouterr()
        return ended.value.code if isinstance(ended.value.code, int) else 0, seen.out, seen.err

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def place(servers: Any, tmp_path: Path) -> dict[str, str]:
    url = servers.redis("valkey").url
    return {"url": url, "archive": f"sqlite:///{tmp_path}/a.db", "namespace": f"ops-{uuid.uuid4().hex[:12]}"}


def options(place: dict[str, str], **others: str) -> list[str]:
    return [word for name, value in (place | others).items() for word in (f"--{name}", value)]


# top


def test_top_counts_commits_and_names_who_is_busy_with_sql_there_or_away(run: Run, place: dict[str, str]) -> None:
    ending = threading.Event()
    with StateStore.open(**place, archiver=False, beat=0.2) as store:

        def work() -> None:
            while not ending.wait(0.01):
                store.session("busy\x1b[2J").set("n", 1)
                if store.session("busy\x1b[2J").version() % 4 == 0:
                    store.session("calm").set("n", 1)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for archive in (place["archive"], NO_SQL):
                code, out, _ = run(*options(place, archive=archive), "top", "--json", "--interval", "1")
                seen = json.loads(out)
                assert (code, seen["commits"] > 5, seen["waiting"] > 0) == (0, True, True)
                assert [name for name, _ in seen["busiest"]] == ["session:busy%1B[2J", "session:calm"]
                assert sum(count for _, count in seen["busiest"]) == seen["sampled"]
                assert [each["role"] for each in seen["replicas"]] == ["worker"], "it is no replica itself"
                assert ("SQL does not answer" in seen["trouble"]) == (archive == NO_SQL)
            code, out, _ = run(*options(place), "top", "--once", "--interval", "0.5")
        finally:
            ending.set()
            thread.join()
        assert store.replica in out
    assert code == 0
    assert "commits/s" in out
    assert "\x1b" not in out, "it is no terminal: once, and in plain text"


def test_a_look_is_compared_with_the_one_before_also_over_an_epoch(place: dict[str, str]) -> None:
    with StateStore.open(**place, archiver=False, partitions=1) as store:
        store.session("s").set("n", 1)
        watch = FleetLooks(core_of(store)._lifecycle.tiers())
        first = finish(watch.look())
        assert (first.commits, first.busiest, first.waiting) == (None, (), 1), "nothing to compare with yet"
        for n in range(3):
            store.session("s").set("n", n)
        second = finish(watch.look())
        assert second.commits is not None
        assert second.seconds is not None
        assert round(second.commits * second.seconds) == 3
        assert second.busiest == (("session:s", 3),)
        third = finish(watch.look())
        assert (third.commits, third.busiest) == (0.0, ())


def test_top_says_that_redis_is_away_and_shows_what_was(place: dict[str, str]) -> None:
    with StateStore.open(**place, archiver=False) as store:
        store.session("s").set("n", 1)
        watched = top.Watched(store, 0.2)
        seen = watched.once()
        console = Console(file=io.StringIO(), width=160)
        console.print(watched.shown(seen, "no answer\x1b[2J", rows=20))
        console.print(watched.shown(None, "no answer", rows=20))
        text = console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO
        assert text.count("Redis does not answer") == 2
        assert "\x1b" not in text
        assert "1 unarchived commits" in text


def test_top_once_without_redis_is_an_error_of_one_line(run: Run, place: dict[str, str]) -> None:
    StateStore.open(**place).close()
    code, out, err = run(*options(place, url=NOWHERE), "top", "--once")
    assert (code, out) == (1, "")
    assert "127.0.0.1:1" in err
    assert "Traceback" not in err


@pytest.mark.wide
def test_top_in_a_terminal_ends_cleanly_at_ctrl_c(place: dict[str, str]) -> None:
    with StateStore.open(**place, archiver=False) as store:
        store.session("s").set("n", 1)
        pid, terminal = pty.fork()
        if pid == 0:
            program = [sys.executable, "-m", "distributed_state", *options(place), "top", "--interval", "0.2"]
            os.execve(sys.executable, program, os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "30"})
        shown = b""
        sent = False
        while True:
            assert select.select([terminal], [], [], 60)[0], shown[-500:]
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # it has ended
                break
            if not sent and shown.count(b"commits/s") > 2:
                os.write(terminal, b"\x03")
                sent = True
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0, shown[-2000:]
    assert b"Traceback" not in shown
    assert b"\x1b[?1049l" in shown, "the screen of before is back"


# The one server that is needed


def test_what_sql_alone_has_is_listed_while_redis_is_away(run: Run, place: dict[str, str]) -> None:
    with StateStore.open(**place) as store:
        store.session("c1", user="u1").write(set={"n": 1}, tag={"run": "r1"})
        store.admin.archive()
    away = options(place, url=NOWHERE)
    for words, shown in (
        (["sessions", "--user", "u1"], "c1"),
        (["sessions", "--tag", "run=r1"], "c1"),
        (["audit", "--conversation", "c1"], "conversation.created"),
        (["branches"], "branch"),
        (["branches", "session/c1"], "branch"),
    ):
        code, out, err = run(*away, *words)
        assert (code, shown in out) == (0, True), (words, out, err)
        assert "unarchived commits are not listed" in err
    code, out, err = run(*away, "migrate")
    assert (code, json.loads(out)["message"]) == (0, "the schema is up to date")
    for words in (["sessions", "--fresh"], ["get", "c1"], ["replicas"]):  # the controls: these need Redis
        code, _, err = run(*away, *words)
        assert (code, "127.0.0.1:1" in err) == (1, True), words


@pytest.mark.wide
def test_top_tail_and_leases_on_a_cluster(run: Run, servers: Any, tmp_path: Path) -> None:
    """`tail` continues from the position that it printed; `top` and `leases` read all partitions."""
    place = {
        "url": servers.cluster().url, "archive": f"sqlite:///{tmp_path}/c.db", "namespace": f"c{uuid.uuid4().hex[:12]}",
    }  # fmt: skip
    words = options(place)
    with StateStore.open(**place, beat=0.2) as store:
        for number in range(20):
            store.session(f"s{number}").create({"n": number})
        code, out, err = run(*words, "top", "--once", "--json")
        seen = json.loads(out)
        assert (code, seen["partitions"]) == (0, store.settings.partitions), err
        assert store.replica in out
        shown = list[str]()
        since = "oldest"
        for _ in range(4):
            code, out, err = run(*words, "tail", "conversation.created", "--json", "--count", "5", "--since", since)
            assert code == 0, err
            shown += [json.loads(line)["subject"] for line in out.splitlines()]
            since = err.split()[-1]
        assert sorted(shown) == sorted(f"session:s{number}" for number in range(20)), "each once"
        leases = [store.session(f"s{number}").lock() for number in range(20)]
        for each in leases:
            each.acquire()
        listed = [json.loads(line) for line in run(*words, "leases", "--json")[1].splitlines()]
        assert [each["record_id"] for each in listed] == [f"s{number}" for number in range(20)]
        assert run(*words, "end-lease", "s7", str(listed[7]["token"]))[0] == 0
        assert len(store.admin.leases()) == 19
        for each in leases:
            each.release()


def test_histories_are_read_searched_and_made_small_while_redis_is_away(run: Run, place: dict[str, str]) -> None:
    with StateStore.open(**place, search=True) as store:
        session = store.session("c1", user="u1")
        for number in range(30):
            session.write(set={"n": number}, append=[{"role": "user", "content": f"a weekend in Oslo {number}"}])
        store.search("Oslo", fresh=True)
        before = [(each.version, each.set, [said.content for said in each.appended]) for each in session.history()]
    away = options(place, url=NOWHERE)
    code, out, err = run(*away, "history", "c1", "--last", "3")
    assert (code, "n = 29" in out or "29" in out) == (0, True), (out, err)
    assert "unarchived commits are not listed" in err
    assert run(*away, "history", "nobody")[0] == 1
    code, out, err = run(*away, "search", "weekend 17", "--json")
    assert (code, [each["value"]["content"] for each in json.loads(out)]) == (0, ["a weekend in Oslo 17"]), err
    assert json.loads(run(*away, "search", "weekend", "--user", "u2", "--json")[1]) == []
    # Too young, by a margin for two clocks: the negative control of what follows.
    code, out, err = run(*away, "compact", "--older-than", "5m")
    assert (code, out) == (0, "packed 0 changes and 0 messages of 0 records\n"), err
    assert "unarchived commits are left unchanged" in err
    with sqlite3.connect(place["archive"].removeprefix("sqlite:///")) as connection:
        for table in ("changes", "messages", "records"):
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1].endswith("_ms")]
            for name in names:
                connection.execute(f"UPDATE {table} SET {name} = {name} - 864000000 WHERE {name} > 864000000")
    assert run(*away, "compact", "--older-than", "1d")[1].startswith("packed 29")
    code, out, err = run(*away, "purge", "--keep-messages", "3", "--yes")
    assert (code, "can only be changed in Redis" in err) == (1, True)
    with StateStore.open(**place) as store:
        past = store.session("c1").history()
        assert [(each.version, each.set, [said.content for said in each.appended]) for each in past] == before
    code, out, err = run(*away, "purge", "--keep-changes", "5", "--yes")
    assert (code, "removed 2" in out) == (0, True), (out, err)
    with StateStore.open(**place) as store:
        assert store.session("c1").get("n") == 29
        assert len(store.session("c1").history()) < 10


def test_what_redis_alone_has_is_shown_while_sql_is_away(run: Run, place: dict[str, str]) -> None:
    with StateStore.open(**place, beat=0.2) as store:
        store.session("c1").set("n", 1)
        store.admin.archive()
        away = options(place, archive=NO_SQL)
        assert json.loads(run(*away, "get", "c1")[1]) == {"n": 1}
        assert run(*away, "set", "c1", "n", "2")[:2] == (0, "2\n")
        wait_until(lambda: store.replica in run(*away, "replicas")[1], "a beat", seconds=30)
        code, out, err = run(*away, "tail", "--since", "oldest", "--count", "1")
        assert (code, "conversation.created" in out) == (0, True), err
        assert run(*away, "history", "c1")[0] == 1, "the control: this needs SQL"


def test_an_empty_database_is_given_no_tables_by_who_only_reads(
    run: Run, place: dict[str, str], postgres_url: str
) -> None:
    empty = options(place, archive=postgres_url)
    for words in ("get c", "sessions", "audit", "replicas", "top --once", "doctor --json", "branches"):
        code, out, err = run(*empty, *words.split())
        assert code == 1, words
        assert "there is no namespace" in err or "distributed-state migrate" in out, (out, err)
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        query = "SELECT count(*) FROM information_schema.tables WHERE table_schema = 'public'"
        assert connection.execute(query).fetchone() == (0,)
        assert run(*empty, "set", "c", "n", "1")[0] == 0
        assert connection.execute(query).fetchone() != (0,), "the control: who writes begins a store"
    assert run(*empty, "sessions")[0] == 0


# tail, replicas


@pytest.mark.unit
def test_the_position_of_tail_is_after_what_the_archive_showed_before_the_stream() -> None:
    reached = {("1-a", 0): 7, ("1-a", 1): 3, ("0-z", 2): 9, ("1-a", 3): 1}
    assert fleet_commands._after("0=1-a@5,1=1-a@4,2=1-a@2", reached) == "0=1-a@7,1=1-a@4,2=1-a@2"
    assert fleet_commands._after("oldest", reached) == "oldest"


def test_tail_ends_with_a_position_from_which_it_continues(run: Run, place: dict[str, str]) -> None:
    with StateStore.open(**place) as store:
        for n in range(3):
            store.emit("a.b", {"n": n})
        _, out, err = run(*options(place), "tail", "a.b", "--json", "--since", "oldest", "--count", "2")
        shown = [json.loads(line)["data"]["n"] for line in out.splitlines()]
        found = re.search(r"--since (\S+)$", err, re.MULTILINE)
        assert found, err
        _, out, err = run(*options(place), "tail", "a.b", "--json", "--since", found[1], "--count", "1")
        shown += [json.loads(line)["data"]["n"] for line in out.splitlines()]
        assert sorted(shown) == [0, 1, 2]


def test_replicas_come_with_what_they_do_and_in_pages(run: Run, place: dict[str, str]) -> None:
    with StateStore.open(**place, archiver=False) as one, StateStore.open(**place, archiver=False) as other:
        one.announce(role="service")
        other.announce(agents=["notes"])

        def announced() -> bool:
            found = one.admin.replicas()
            return len(found) == 2 and all(each.status for each in found)

        wait_until(announced, "both announced", seconds=30)
        ids = [each.id for each in one.admin.replicas()]
        roles = {one.replica: "service", other.replica: "agents"}
        assert {each.id: each.role for each in one.admin.replicas()} == roles
        _, out, err = run(*options(place), "replicas", "--json", "--limit", "1")
        assert [json.loads(line)["id"] for line in out.splitlines()] == ids[:1]
        assert f"1 more replicas: continue with --after {ids[0]}" in err
        _, out, err = run(*options(place), "replicas", "--json", "--limit", "1", "--after", ids[0])
        assert ([json.loads(line)["id"] for line in out.splitlines()], err) == (ids[1:], "")
        _, out, _ = run(*options(place), "replicas", "--json", "--role", "agents")
        assert [json.loads(line)["id"] for line in out.splitlines()] == [other.replica]
        assert run(*options(place), "replicas", "--after", "nobody")[0] == 1


# purge


def test_a_purge_holds_no_lock_for_longer_than_a_batch(run: Run, place: dict[str, str], postgres_url: str) -> None:
    """While it waits for one record, those of the batches before are purged and free."""
    given = place | {"archive": postgres_url}
    with StateStore.open(**given) as store:
        for n in range(2 * (2 * CHUNK + 50)):
            store.session(f"s{n // 2:04}").set("n", n)
        store.admin.archive()
    done: list[int] = []
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as holder:
        keys = [row[0] for row in holder.execute("SELECT key FROM records ORDER BY key")]
        holder.execute("SELECT 1 FROM records WHERE key = %s FOR UPDATE", [keys[-1]])

        def purging() -> None:
            with StateStore.open(**given, archiver=False) as store:
                done.append(store.admin.purge(keep_changes=1)["changes"])

        thread = threading.Thread(target=purging)
        thread.start()
        with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as other:
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            wait_until(lambda: other.execute(waits).fetchone() != (0,), "it waits", seconds=60)
            with other.transaction():
                free = other.execute("SELECT key FROM records ORDER BY key FOR UPDATE SKIP LOCKED").fetchall()
            assert len(free) >= len(keys) - CHUNK, "one batch is locked, and no more"
            left = other.execute("SELECT count(*) FROM changes WHERE version = 1").fetchone()
            assert left is not None
            assert left[0] <= CHUNK, "the batches before are done"
        assert not done, "the control: it has not ended"
        holder.rollback()
        thread.join(60)
    assert done == [2 * CHUNK + 50]


def test_redis_that_is_away_is_not_taken_for_an_empty_archive(run: Run, place: dict[str, str]) -> None:
    """The control of the listings above: without an archive that has the namespace, nothing is listed."""
    assert run(*options(place, url=NOWHERE), "sessions")[0] == 1
    with pytest.raises(WarmUnavailable):
        StateStore.open(**place | {"url": NOWHERE}, retry_for=0.0)
