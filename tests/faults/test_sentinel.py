"""Behind Sentinels: primaries that are replaced under load, Sentinels that are dead, cut off or wrong.

Law: nobody is started again, and one that was cut off with the old primary is never believed.
"""

from __future__ import annotations

import socketserver
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from below import logged_in, server_binary
from hiredis import Reader, pack_command
from sync_api import Blocking, core, in_thread
from under_load import Load, load, now

from distributed_state import AsyncStateStore, ConfigurationError, StateStore
from distributed_state.port.topology import SentinelWatch, Topology
from distributed_state.programs.servers import RedisSentinel, RedisServer, redis_sentinel, wait_until

KIND = pytest.mark.parametrize("kind", ["redis", "valkey"])
API = pytest.mark.parametrize("api", [pytest.param("asyncio", marks=pytest.mark.full), "blocking"])


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    return {"archive": f"sqlite:///{tmp_path}/archive.db", "namespace": f"t{uuid.uuid4().hex[:12]}"}


async def opened(api: str, url: str, **settings: Any) -> Any:
    if api == "asyncio":
        return await AsyncStateStore.open(url, **settings)
    return Blocking(await in_thread(lambda: StateStore.open(url, **settings)))


def elected(watched: RedisSentinel, before: RedisServer) -> float:
    """Wait until the Sentinels name another primary that calls itself one, and when that was."""

    def so() -> bool:
        primary = watched.primary
        return primary is not before and primary.info("replication")["role"] == "master"

    wait_until(so, "no other primary was elected")
    return now()


def goes_on(running: Load, times: list[float]) -> None:
    """After each election somebody's commit is acknowledged within two seconds."""
    for at in times:
        acknowledged = [each for id in running.ids for each in running.times[id] if each >= at]
        assert acknowledged, "nothing was acknowledged after it"
        assert min(acknowledged) - at < 2.0


@pytest.mark.wide
@KIND
@pytest.mark.timeout(300)
async def test_workers_under_load_need_no_restart_through_failovers(kind: str, place: Any, pytestconfig: Any) -> None:
    """Handed over by the Sentinels and killed, in turn. A hand-over by Sentinels may lose the last commits, too."""
    rounds = 10 if pytestconfig.option.wide or pytestconfig.option.full else 2
    times = []
    with redis_sentinel(binary=server_binary(kind)) as watched:
        # Sentinels repeat an election that nobody won, some seconds later; two of those are nothing special.
        with load(url=watched.url, retry_for=60.0, **place) as running:
            for number in range(rounds):
                before = watched.primary
                if number % 2:
                    watched.kill_primary()
                else:
                    watched.sentinels[0].ask("SENTINEL", "FAILOVER", "mymaster")
                times.append(elected(watched, before))
                time.sleep(0.5)
                before.start()
                watched.wait_converged()
            time.sleep(0.3)
        # A lock that the old primary gave after the other was promoted is lost with it, and its holder is refused.
        failed = [each for each in running.failed if " Fenced(" not in each]
        assert not failed, failed[:3]
        goes_on(running, times)
        print(f"{running.acknowledged()} acknowledged, {await running.check_what_is_left()} lost")  # noqa: T201 - shown with -s


@pytest.mark.wide
@API
async def test_one_living_sentinel_is_enough_and_the_first_seeds_may_be_dead(api: str, place: Any) -> None:
    with redis_sentinel(replicas=0) as watched:
        watched.sentinels[0].kill()
        watched.sentinels[1].pause()
        store = await opened(api, watched.url, **place)
        assert await store.session("s").set("a", 1) == 1
        watched.sentinels[2].kill()
        assert await store.session("s").set("a", 2) == 2, "the primary is known"
        core(store)._lifecycle.connections.topology.doubt()
        assert await store.session("s").set("a", 3) == 3, "and nobody says that it is another one"
        watched.sentinels[1].resume()
        await store.close()


@contextmanager
def without_watch() -> Iterator[None]:
    begin = SentinelWatch.begin
    SentinelWatch.begin = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        SentinelWatch.begin = begin  # type: ignore[method-assign]


async def left_by(store: Any, watched: RedisSentinel, api: str) -> float:
    """Seconds from the election of another primary until this store asks that one, with no command of its own."""
    topology = core(store)._lifecycle.connections.topology
    before = watched.primary
    named = topology.only
    before.pause()
    at = elected(watched, before)
    deadline = now() + 4
    while topology.only == named and now() < deadline:
        time.sleep(0.005)
    found = now() - at if topology.only != named else float("inf")
    before.resume()
    return found


@pytest.mark.wide
@API
async def test_an_idle_store_leaves_the_old_primary_when_sentinels_say_so(api: str, place: Any) -> None:
    """Nothing is asked meanwhile; the old primary is frozen, and comes back with every connection open."""
    quiet = {"archiver": False, "beat": 0.0, "max_staleness": 0, "retry_for": 3.0}
    with redis_sentinel() as watched:
        watched.sentinels[1].pause()  # one that is silent holds nobody up
        store = await opened(api, watched.url, **quiet, **place)
        assert await store.session("s").set("a", 1) == 1
        watched.sentinels[1].resume()
        assert await left_by(store, watched, api) < 1.0
        assert await store.session("s").set("a", 2) == 2
        await store.close()


@pytest.mark.wide
async def test_without_hearing_them_it_would_stay(place: Any) -> None:
    """The negative control."""
    quiet = {"archiver": False, "beat": 0.0, "max_staleness": 0, "retry_for": 0.5, "unarchived_bytes": 0}
    with without_watch(), redis_sentinel() as watched:
        store = await opened("asyncio", watched.url, **quiet, **place)
        await store.session("s").set("a", 1)
        assert await left_by(store, watched, "asyncio") == float("inf")
        await store.close()


class CutOff(socketserver.ThreadingTCPServer):
    """A Sentinel that heard nothing of a failover: it names the old primary, under the epoch that it knows."""

    daemon_threads = True

    def __init__(self, primary: RedisServer) -> None:
        facts = [b"ip", b"127.0.0.1", b"port", b"%d" % primary.port, b"config-epoch", b"0", b"quorum", b"2"]
        address = facts[1:4:2]

        class Answer(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                reader = Reader()
                while received := self.request.recv(65_536):
                    reader.feed(received)
                    while (words := reader.gets()) is not False:
                        said = {b"MASTER": facts, b"GET-MASTER-ADDR-BY-NAME": address}.get(
                            words[-2 % len(words)].upper(), []
                        )
                        self.request.sendall(pack_command(tuple(said)) if said else b"+OK\r\n")

        super().__init__(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


async def back_to_the_old(api: str, place: Any) -> bool:
    """Whether a store asks the old primary when only a Sentinel answers that was cut off with it."""
    with redis_sentinel(replicas=1) as watched, CutOff(watched.primary) as cut_off:
        url = watched.url.replace("/mymaster", f",127.0.0.1:{cut_off.server_address[1]}/mymaster")
        store = await opened(api, url, archiver=False, beat=0.0, max_staleness=0, retry_for=3.0, **place)
        await store.session("s").set("a", 1)
        old = watched.primary
        watched.failover()
        assert await store.session("s").set("a", 2) == 2
        for sentinel in watched.sentinels:
            sentinel.kill()
        old.ask("REPLICAOF", "NO", "ONE")  # as it was before it was told
        topology = core(store)._lifecycle.connections.topology
        topology.doubt()
        assert await store.session("s").set("a", 3) == 3
        await store.close()
        return bool(topology.only == f"127.0.0.1:{old.port}")


@pytest.mark.wide
@API
async def test_a_sentinel_cut_off_with_the_old_primary_is_not_believed(api: str, place: Any) -> None:
    assert not await back_to_the_old(api, place)


@pytest.mark.wide
async def test_without_comparing_epochs_it_would_be(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(Topology, "_epoch", property(lambda self: -1, lambda self, value: None), raising=False)
    assert await back_to_the_old("asyncio", place)


@pytest.mark.wide
@API
async def test_the_doctor_says_which_sentinels_answer_whether_they_agree_and_are_enough(api: str, place: Any) -> None:
    with redis_sentinel(replicas=1) as watched, CutOff(watched.primary) as cut_off:
        every = watched.url.replace("/mymaster", f",127.0.0.1:{cut_off.server_address[1]}/mymaster")
        store = await opened(api, every, **place)
        first, second, third = watched.sentinels
        old = f"127.0.0.1:{watched.primary.port}"
        found = {each.name: each for each in await store.admin.doctor()}
        shown = [(found[name].ok, found[name].found) for name in ("sentinels", "sentinels' primary", "quorum")]
        assert shown == [
            (True, "4 of 4 answer"),
            (True, f"{old} (config epoch 0)"),
            (True, "2 must agree that the primary is down; a failover can be started"),
        ]
        new = f"127.0.0.1:{watched.failover().port}"
        third.kill()
        found = {each.name: each for each in await store.admin.doctor()}
        assert (found["sentinels"].ok, found["sentinels"].found) == (False, "3 of 4 answer")
        assert f"127.0.0.1:{third.port}" in found["sentinels"].advice
        assert not found["sentinels' primary"].ok
        assert found["sentinels' primary"].found == f"{new} (config epoch 1), {old} (config epoch 0)"
        second.kill()
        wait_until(
            lambda: str(first.ask("SENTINEL", "SENTINELS", "mymaster")).count("s_down") == 2, "nobody missed them"
        )
        found = {each.name: each for each in await store.admin.doctor()}
        assert not found["quorum"].ok
        assert "NOQUORUM" in found["quorum"].found
        await store.close()


async def test_what_cannot_work_is_refused_with_the_reason(place: Any) -> None:
    with redis_sentinel(replicas=1, sentinels=1) as watched:
        with pytest.raises(ConfigurationError, match="No such master"):
            await opened("asyncio", watched.url.replace("mymaster", "another"), **place)
        replica = watched.replicas[0]
        with pytest.raises(ConfigurationError, match="role is slave; a read-only replica"):
            await opened("asyncio", replica.url, **place)
        url = (
            logged_in(watched.url, f":{watched.sentinels[0].password}")
            .replace("redis+sentinel://", "redis://")
            .partition("/mymaster")[0]
        )
        with pytest.raises(ConfigurationError, match="a Sentinel: use"):
            await opened("asyncio", url, **place)
        await in_database_three(watched, place)


async def in_database_three(watched: RedisSentinel, place: Any) -> None:
    store = await opened("blocking", watched.url.replace("mymaster/0", "mymaster/3"), **place)
    await store.session("s").set("a", 1)
    assert "db3" in watched.primary.info("keyspace")
    assert "db0" not in watched.primary.info("keyspace")
    await store.close()
