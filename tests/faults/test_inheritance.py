"""More of fork(): what a child does with what it inherited, and what that may not do to its parent."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from below import ROOT

from distributed_state import StateStore
from distributed_state.cold import engine
from distributed_state.cold.engine import Database
from distributed_state.port import Script, commands
from distributed_state.programs.servers import redis_server

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def child(work: Callable[[], Any], seconds: float = 60.0) -> None:
    """Run in a forked process that ends as processes do, with destructors and exit handlers; it must succeed."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode == 0


OPENS = """
import sys
from distributed_state import ConfigurationError, StateStore
try:
    StateStore.open(archive=sys.argv[1])
except ConfigurationError as error:
    print("refused" if "embedded" in str(error) else error)
"""


def another_process_opens(archive: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", OPENS, archive]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT, check=True).stdout.strip()


@pytest.mark.wide
def test_a_child_does_not_unlock_its_parents_embedded_store(tmp_path: Path) -> None:
    archive = f"sqlite:///{tmp_path}/own.db"
    with StateStore.open(archive=archive) as store:
        store.session("s").set("n", 1)
        for ends in (lambda: None, store.close):
            child(ends)
            assert another_process_opens(archive) == "refused"
        assert store.session("s").set("n", 2) == 2
    assert another_process_opens(archive) == ""


@pytest.mark.wide
def test_a_child_knows_that_it_holds_nothing(tmp_path: Path) -> None:
    """Its copy of the lease says lost; the parent's is renewed as before."""
    with redis_server() as server, StateStore.open(server.url, archive=f"sqlite:///{tmp_path}/a.db") as store:
        session = store.session("s")
        with session.lock(ttl=6.0) as lease:

            def look() -> None:
                assert lease.lost
                assert store.session("other").set("n", 1) == 1

            child(look)
            begun, until = time.monotonic(), lease._core.deadline
            while lease._core.deadline == until:
                assert session.increment("n") > 0
                assert time.monotonic() < begun + 60
                time.sleep(0.05)
            assert not lease.lost


@contextmanager
def reading_a_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the block while another thread of this process is in the middle of reading a script."""
    begun, go_on, files, parent = threading.Event(), threading.Event(), commands.resources.files, os.getpid()

    def slow(package: str) -> Any:
        if os.getpid() == parent:
            begun.set()
            go_on.wait(60)
        return files(package)

    monkeypatch.setattr(commands.resources, "files", slow)
    thread = threading.Thread(target=lambda: Script("read").sha)
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        go_on.set()
        thread.join()


def read_another() -> None:
    assert len(Script("commit").sha) == 40


def test_a_child_reads_scripts_while_its_parents_thread_was_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with reading_a_script(monkeypatch):
        child(read_another)


def test_with_a_lock_that_its_parent_held_it_would_read_none(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.RLock()

    class Locked:
        """functools.cached_property as Python 3.11 has it."""

        def __get__(self, owner: Any, kind: type | None = None) -> Any:
            with lock:
                return bare.__get__(owner)

    bare = vars(Script)["text"]
    monkeypatch.setattr(Script, "text", Locked())
    with reading_a_script(monkeypatch), pytest.raises(AssertionError):
        child(read_another, 2.0)


def written_in_a_child(archive: Path, *, held: bool = False) -> None:
    """Fork while a thread of this process is in the middle of a transaction; the child then writes, too.

    The thread commits when the fork waits for it, or holds its transaction until the child has ended.
    """
    database = Database(f"sqlite:///{archive}")
    with database.write() as connection:
        connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS t (n INTEGER)")
    begun, over = threading.Event(), threading.Event()

    def write() -> None:
        with database.write() as connection:
            connection.exec_driver_sql("INSERT INTO t VALUES (1)")
            begun.set()
            while (held or not engine.GATE.forks) and not over.wait(0.01):
                pass

    def write_too() -> None:
        assert not [each for each in open_files() if str(archive) in each]
        database.abandon()
        with database.write() as connection:
            connection.exec_driver_sql("INSERT INTO t VALUES (2)")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert begun.wait(60)
        child(write_too)
        with database.read() as connection:
            found = connection.exec_driver_sql("SELECT n FROM t ORDER BY n").scalars().all()
    finally:
        over.set()
        thread.join()
        database.close()
    assert found == [1, 2]


def open_files() -> list[str]:
    """What this process has open, where the system says it."""
    folder = Path("/proc/self/fd")
    return [os.readlink(each) for each in list(folder.iterdir()) if each.is_symlink()] if folder.exists() else []


def test_a_child_inherits_no_open_sqlite_database_and_no_transaction(tmp_path: Path) -> None:
    for number in range(2):
        written_in_a_child(tmp_path / f"{number}.db")


def test_a_fork_that_waited_for_no_transaction_would_leave_the_child_a_locked_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_FORK_SECONDS", 0.0)
    prepare = engine.prepare_sqlite
    monkeypatch.setattr(engine, "prepare_sqlite", lambda engine, seconds: prepare(engine, 0.1))
    with pytest.raises(AssertionError):
        written_in_a_child(tmp_path / "a.db", held=True)


@pytest.mark.wide
def test_parent_and_children_write_at_once_on_connections_of_their_own(tmp_path: Path) -> None:
    """Forked from threads under load, again and again: answers never reach the wrong process."""
    with redis_server() as server, StateStore.open(server.url, archive=f"sqlite:///{tmp_path}/a.db") as store:
        session = store.session("s")
        session.set("n", 0)
        parents: set[int] = set()

        def addresses() -> set[str]:
            answer = store._core._lifecycle.tiers().port.exchange([(b"CLIENT", b"ID")])
            try:
                answer.send(None)
            except StopIteration as done:
                return {str(done.value[0])}
            raise AssertionError

        mine = addresses()

        def work() -> None:
            assert not addresses() & mine
            for number in range(100):
                own = store.session(f"child-{os.getpid()}")
                assert own.increment("n") == number + 1
                session.increment("n")
            store.close()

        children = [multiprocessing.get_context("fork").Process(target=work) for _ in range(4)]
        for process in children:
            process.start()
        for number in range(100):
            parents.add(store.session("parent").set("n", number))
            session.increment("n")
        for process in children:
            process.join(30)
        assert [process.exitcode for process in children] == [0] * 4
        assert parents == set(range(1, 101))
        assert session.get("n", fresh=True) == 500
        assert [change.version for change in session.history()] == list(range(1, 502))


def test_threads_of_a_child_share_one_replica(tmp_path: Path) -> None:
    """The first call in the child makes it a replica; several first calls at once make one as well."""
    with redis_server() as server, StateStore.open(server.url, archive=f"sqlite:///{tmp_path}/a.db") as store:
        store.session("s").set("n", 0)

        def work() -> None:
            start, homes, interval = threading.Barrier(8), list[int](), sys.getswitchinterval()
            sys.setswitchinterval(1e-6)

            def first() -> None:
                start.wait(10)
                homes.append(id(store._core._lifecycle.tiers()))
                store.session("s").increment("n")

            threads = [threading.Thread(target=first) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            sys.setswitchinterval(interval)
            assert len(homes) == 8
            assert len(set(homes)) == 1
            archivers = [each for each in threading.enumerate() if each.name == "distributed-state-archiver"]
            assert len(archivers) == 1

        for _ in range(2):
            child(work)
        assert store.session("s").get("n", fresh=True) == 16
