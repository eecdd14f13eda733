"""Servers and files of ours on a machine that others use too. Law: nobody else reads, writes or learns a password."""

from __future__ import annotations

import grp
import io
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from below import logged_in, server_binary
from hiredis import ReplyError
from rich.console import Console

from distributed_state import ConfigurationError, StateStore
from distributed_state.cold import engine, opening
from distributed_state.cold.engine import Database
from distributed_state.programs.replay.coordinator import read_conversations
from distributed_state.programs.replay.run import Plan, replay
from distributed_state.programs.servers import (
    PostgresServer,
    RedisServer,
    SentinelServer,
    ask,
    postgres_server,
    redis,
    redis_cluster,
    redis_sentinel,
    redis_server,
)

WORD = "a-word-that-nobody-else-knows"


@pytest.fixture
def careless() -> Iterator[None]:
    """A umask that lets everybody read and write what is made."""
    before = os.umask(0)
    yield
    os.umask(before)


@contextmanager
def several(kind: str, *options: str) -> Iterator[list[RedisServer]]:
    """One server, or all of a cluster, or all that Sentinels watch and these too."""
    if kind == "cluster":
        with redis_cluster(*options, replicas=0, binary=server_binary("cluster")) as cluster:
            yield list(cluster.nodes)
    elif kind == "sentinel":
        with redis_sentinel(*options, replicas=1, sentinels=2, binary=server_binary("sentinel")) as watched:
            yield [*watched.servers, *watched.sentinels]
    else:
        with redis_server(*options, binary=server_binary(kind)) as server:
            yield [server]


def lets_in(server: RedisServer, password: str | None) -> bool:
    try:
        return bool(ask(server.port, "PING", password=password) == "PONG")
    except ReplyError as error:
        if not str(error).startswith(("NOAUTH", "WRONGPASS")):
            raise
        return False


def command_lines() -> bytes:
    """Of all processes."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_bytes())
        except OSError:
            continue  # it has ended
    return b"\n".join(found)


def open_to_others(folder: Path) -> dict[str, str]:
    """What is there that others can read, or enter: a group that has a name counts as others."""
    found = {}
    named = {each.gr_gid for each in grp.getgrall()}
    for path in (folder, *folder.rglob("*")):
        held = path.lstat()
        others = 0o007 if held.st_gid not in named else 0o077
        if held.st_mode & others:
            found[str(path.relative_to(folder))] = f"{held.st_mode & 0o777:o}"
    return found


@pytest.mark.parametrize(
    "kind", ["redis", "valkey", *(pytest.param(each, marks=pytest.mark.wide) for each in ("cluster", "sentinel"))]
)
@pytest.mark.parametrize("named", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_servers_are_closed_to_others(kind: str, named: bool, careless: None) -> None:
    """Whether the password is a new one or one that the options name: nobody is let in, reads it, or reads the data."""
    options = ["--appendonly", "yes", "--save", "3600 1", *(["--requirepass", WORD] if named else [])]
    # Most servers hide their arguments once they run; these are told not to.
    with several(kind, "--set-proc-title", "no", *options) as servers:
        seen = command_lines()
        for server in servers:
            assert (server.password == WORD) is named
            assert not lets_in(server, None)
            assert not lets_in(server, "")
            assert not lets_in(server, "wrong")
            assert lets_in(server, server.password)
            assert str(server.port).encode() in seen, "it is among those looked at"
            assert server.password.encode() not in seen
            # A Sentinel writes its configuration again.
            words = ("SENTINEL", "FLUSHCONFIG") if isinstance(server, SentinelServer) else ("SAVE",)
            assert server.ask(*words) == "OK"
            assert len(list(server.directory.rglob("*"))) >= 2
            assert open_to_others(server.directory) == {}


def test_postgres_is_closed_to_others(careless: None) -> None:
    with postgres_server() as server:
        url = server.url.replace("+psycopg", "")
        for login in ("postgres", "postgres:wrong"):
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(logged_in(url, login))
        with psycopg.connect(url) as connection:
            rules = connection.execute("SELECT DISTINCT auth_method FROM pg_hba_file_rules").fetchall()
        assert rules == [("scram-sha-256",)], "on every way to it"
        seen = command_lines()
        assert str(server.directory).encode() in seen, "it is among those looked at"
        assert server.password.encode() not in seen
        assert server.password not in server.log.read_text()
        assert len(list(server.directory.rglob("*"))) > 500
        assert open_to_others(server.directory) == {}
        if os.geteuid() == 0:  # who is not root runs it as themselves
            by_another_nobody(server)


def by_another_nobody(server: PostgresServer) -> None:
    """Others too run as the user nobody, and read nothing here."""
    words = dict(line.split(":", 1) for line in Path(f"/proc/{server.pid}/status").read_text().splitlines())
    (group,) = set(map(int, words["Gid"].split()))
    assert words["Groups"].split() == []
    assert group not in {each.gr_gid for each in grp.getgrall()}

    def reads(as_group: int) -> bool:
        asked: dict[str, Any] = {"user": "nobody", "group": as_group, "extra_groups": []}
        command = ["/bin/cat", str(server.directory / "data" / "PG_VERSION")]
        return not subprocess.run(command, capture_output=True, check=False, cwd="/", **asked).returncode

    assert not reads(pwd.getpwnam("nobody").pw_gid)
    assert not reads(0)
    assert reads(group), "the control"


def test_negative_control_a_server_that_was_told_no_password_lets_everybody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = redis.launch
    monkeypatch.setattr(redis, "launch", lambda *given, secret: launch(*given))
    with redis_server() as server:
        assert lets_in(server, None)


def test_each_server_has_a_password_of_its_own() -> None:
    with redis_server() as one, redis_server() as other:
        assert len({one.password, other.password}) == 2
        assert not lets_in(one, other.password)


def test_negative_control_a_password_in_a_command_line_is_seen() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", "input('begun\\n')", WORD], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"  # a moment after it is made it has no command line yet
        assert WORD.encode() in command_lines()
        process.kill()


_started = list[str]()


def _hear(event: str, given: Any) -> None:
    if event == "subprocess.Popen":
        _started.extend(map(str, given[1]))


@pytest.mark.wide
def test_a_replay_tells_its_password_to_nobody_and_its_files_are_its_owners(
    tmp_path: Path, careless: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not to its workers' command lines, its logs or the terminal; the mode of what it keeps is its own affair."""
    sys.addaudithook(_hear)  # which stays
    monkeypatch.setattr(redis, "new_password", lambda: WORD)
    _started.clear()
    report = replay(Plan(read_conversations(None)[:2], workers=2, keep=tmp_path / "kept"), Console(file=io.StringIO()))
    assert report.differences == []
    assert "distributed_state.programs.replay.worker" in _started, "its workers are among what was heard of"
    assert not [word for word in _started if WORD in word]
    kept = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    assert {"acknowledged.jsonl", "archive.db", "server.log", "worker-0.log"} <= {path.name for path in kept}
    assert not [path for path in kept if WORD.encode() in path.read_bytes()]
    assert open_to_others(tmp_path / "kept") == {}
    assert WORD not in "".join(capfd.readouterr())


# Files


def test_negative_control_a_file_that_is_made_as_usual_is_seen(tmp_path: Path, careless: None) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "file").touch()
    assert open_to_others(tmp_path) == {"file": "666"}


def test_files_of_the_embedded_store_are_their_owners_alone(tmp_path: Path, careless: None) -> None:
    tmp_path.chmod(0o700)
    with StateStore.open(archive=f"sqlite:///{tmp_path}/a.db") as store:
        store.session("s").set("a", 1, durability="archived")
        assert {path.name for path in tmp_path.iterdir()} == {"a.db", "a.db-wal", "a.db-shm", "a.db.lock"}
        assert open_to_others(tmp_path) == {}
    assert open_to_others(tmp_path) == {}


def test_negative_control_sqlite_alone_lets_others_read(
    tmp_path: Path, careless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    for module in (engine, opening):
        monkeypatch.setattr(module, "create_private", lambda path: None)
    with StateStore.open(archive=f"sqlite:///{tmp_path}/a.db") as store:
        store.session("s").set("a", 1, durability="archived")
        assert set(open_to_others(tmp_path)) == {"a.db", "a.db-wal", "a.db-shm", "a.db.lock"}


def test_one_that_is_there_keeps_its_mode(tmp_path: Path, careless: None) -> None:
    for name in ("a.db", "a.db.lock"):
        (tmp_path / name).touch(0o640)
    with StateStore.open(archive=f"sqlite:///{tmp_path}/a.db") as store:
        store.session("s").set("a", 1, durability="archived")
        assert {f"{path.stat().st_mode & 0o777:o}" for path in tmp_path.iterdir()} == {"640"}


@pytest.mark.wide
def test_what_a_link_names_and_a_url_of_a_file_too(tmp_path: Path, careless: None) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "link.db").symlink_to("target.db")
    for url in (f"sqlite:///{tmp_path}/link.db", f"sqlite:///file:{tmp_path}/a%2520b.db?uri=true"):
        with StateStore.open(archive=url) as store:
            store.session("s").set("a", 1)
    for path in ("target.db", "a b.db"):
        assert f"{(tmp_path / path).stat().st_mode & 0o777:o}" == "600"


def test_what_may_only_be_read_is_not_made(tmp_path: Path) -> None:
    database = Database(f"sqlite:///file:{tmp_path}/a.db?mode=ro&uri=true")
    with closing(database), pytest.raises(ConfigurationError, match="unable to open"), database.read():
        pass
    assert list(tmp_path.iterdir()) == []
