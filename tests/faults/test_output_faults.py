"""Faults of servers, links and workers while turns stream.

Law: a follower is shown each attempt's chunks in order and once, or a mark; the record is what it would be without it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from below import ROOT, keys_of, own_server, redis_of, server_binary, tiers, until
from following import attempts, chunk_of, plain, shown
from proxy import Proxy

from distributed_state import AsyncStateStore, Backpressure, Conflict, Fenced, WarmUnavailable
from distributed_state.port.topology import slot_of
from distributed_state.programs.servers import RedisCluster, RedisSentinel, RedisServer, redis_cluster, redis_sentinel
from distributed_state.results import Abandoned, Ended, Failed
from distributed_state.warm.scripts import OUTPUT

DYING = Path(__file__).with_name("dying_streamer.py")
CHUNKS = 4
INPUTS = ("q1", "q2")  # that wait for the workers of dying_streamer.py
single = pytest.mark.only(warm="single")


class Follower:
    """Follows a request from another task and goes on where Redis did not answer; `parts` is what it was shown."""

    def __init__(self, store: Any, id: str, request: str = "r", seconds: float = 60.0) -> None:
        self.parts: list[Any] = []
        self._seconds = seconds
        self._task = asyncio.create_task(self._follow(store.session(id), request))

    async def _follow(self, session: Any, request: str) -> None:
        async with session.output(request) as output:
            while True:
                try:
                    part = await output.next(self._seconds)
                except WarmUnavailable:
                    continue
                if part is None:
                    return
                self.parts.append(part)

    async def saw(self, count: int) -> None:
        """Wait until it was shown so many parts."""
        await until(lambda: len(self.parts) >= count, 60)

    async def end(self) -> list[Any]:
        """All that it was shown, once it has ended."""
        await asyncio.wait_for(self._task, 120)
        return self.parts


async def stream(turn: Any, first: int, last: int, attempt: str = "a") -> None:
    """Send chunks, each as a batch."""
    for number in range(first, last + 1):
        await turn.stream(chunk_of(attempt, number))
        await turn.flush()


@asynccontextmanager
async def answering(store: Any, **options: Any) -> AsyncIterator[Any]:
    """A turn of request r in session s that writes."""
    async with store.session("s").turn(request_id="r", **options) as turn:
        yield turn
        turn["answered"] = True
        turn.outcome = "answer"


# Workers that are killed


async def follow_to_the_end(session: Any, again: bool) -> list[Any]:
    """All that is shown of a request, which is served again if its first worker dies and `again`."""
    parts: list[Any] = []
    while True:
        more = await shown(session, "r", after=parts[-1].position if parts else None, wait=1000)
        parts += more[1:] if parts and more[:1] == parts[-1:] else more
        if not again or isinstance(parts[-1], Ended):
            return parts
        await asyncio.sleep(0.05)


@pytest.mark.wide
@pytest.mark.only(api="asyncio", warm="real")
@pytest.mark.replicas
@pytest.mark.parametrize("deaths", [16, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.timeout(1200)
async def test_a_worker_killed_at_any_line_leaves_its_followers_the_truth(opener: Any, deaths: int) -> None:
    store = await opener()
    place = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    following = [
        asyncio.create_task(follow_to_the_end(store.session(f"s{death}"), bool(death % 2))) for death in range(deaths)
    ]
    command = [sys.executable, "-X", "faulthandler", str(DYING), str(deaths)]
    dying = await asyncio.create_subprocess_exec(
        *command, stdout=-1, stderr=-1, cwd=ROOT, env=os.environ | {"PLACE": json.dumps(place)}
    )
    out, errors = await dying.communicate()
    assert dying.returncode == 0, errors[-3000:]
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == deaths
    assert sum(killed for _, _, killed in rows) >= deaths * 0.8, "a worker that was not killed proves nothing"
    ends = set()
    for (id, line, _), follower in zip(rows, following, strict=True):
        parts = await follower
        told = id, line, plain(parts)
        for each in (parts, await shown(store.session(id), "r")):
            *_, (attempt, numbers) = attempts(each)
            written = [message.content for message in await store.session(id).messages(fresh=True)]
            waiting = [input.message.content for input in await store.session(id).inbox()]
            if isinstance(each[-1], Ended):
                assert each[-1].version == 1 + len(INPUTS), told
                assert (attempt, numbers) == (str(each[-1].outcome), [*range(1, CHUNKS + 1)]), told
                assert (written, waiting) == ([*INPUTS, attempt], []), told
            else:
                assert isinstance(each[-1], Abandoned | Failed), told
                assert attempt == "1", told
                assert (written, waiting) == ([], [*INPUTS]), told
                assert int(id[1:]) % 2 == 0, told
        ends.add((type(parts[-1]).__name__, len(attempts(parts))))
    assert ends >= {("Abandoned", 1), ("Ended", 1), ("Ended", 2)}, "they died in different places"


# Servers that lose the output


@single
@pytest.mark.replicas
async def test_a_stream_that_is_lost_in_the_middle_is_shown_with_a_mark(opener: Any) -> None:
    """It expired, or was evicted. Who had seen the chunks before misses nothing."""
    one, two = [await opener() for _ in range(2)]
    follower = Follower(two, "s")
    async with answering(one) as turn:
        await stream(turn, 1, 3)
        await follower.saw(3)
        with redis_of(one) as client:
            assert client.delete(keys_of(one, "s").output) == 1
        await stream(turn, 4, 5)
    assert plain(await follower.end()) == ["a:1", "a:2", "a:3", "a:4", "a:5", ("Ended", 1, "answer")]
    assert plain(await shown(two.session("s"), "r")) == ["Truncated", "a:4", "a:5", ("Ended", 1, "answer")]


@single
@pytest.mark.replicas
async def test_an_output_that_has_expired_ends_by_the_record(opener: Any) -> None:
    one, two = [await opener(output_ttl=1) for _ in range(2)]
    async with answering(one) as turn:
        await stream(turn, 1, 3)
    parts = await shown(two.session("s"), "r")
    with redis_of(one) as client:
        await until(lambda: not client.exists(keys_of(one, "s").output))
    assert plain(await shown(two.session("s"), "r")) == [("Ended", 1, "answer")]
    rest = await shown(two.session("s"), "r", after=parts[1].position)
    assert plain(rest) == ["Truncated", ("Ended", 1, "answer")], "the third chunk is missing"


@single
@pytest.mark.replicas
async def test_an_output_that_is_evicted_is_shown_with_a_mark(opener: Any) -> None:
    with own_server(opener, "--maxmemory-policy", "volatile-lru") as server:
        opener.url = server.url
        one, two = [await opener(archiver=False, beat=0.0, output_bytes=2**22) for _ in range(2)]
        async with answering(one) as turn:
            await stream(turn, 1, 1)
            for _ in range(40):
                await turn.stream("x" * 50_000)
            await turn.flush()
            output = keys_of(one, "s").output
            with redis_of(one) as client:
                for key in client.scan_iter():
                    if key != output:
                        client.persist(key)  # otherwise the lease may be what is evicted
                client.config_set("maxmemory", client.info("memory")["used_memory"] - 500_000)
                client.set("more", "x" * 1000)
                assert not client.exists(output)
                client.config_set("maxmemory", 0)
            await stream(turn, 42, 43)
        assert plain(await shown(two.session("s"), "r")) == ["Truncated", "a:42", "a:43", ("Ended", 1, "answer")]
        await opener.close()


@single
@pytest.mark.replicas
@pytest.mark.parametrize("how", ["flush", "restart"])
async def test_a_server_that_lost_everything_in_the_middle_of_a_turn_shows_its_end(opener: Any, how: str) -> None:
    """The holder lost its lease with the data, and writes nothing; the request is served again."""
    with own_server(opener) as server:
        opener.url = server.url
        one, two = [await opener(max_staleness=0.4) for _ in range(2)]
        await one.session("s").set("before", 1)
        await one.admin.archive()
        follower = Follower(two, "s")
        with pytest.raises((Fenced, Conflict)):
            async with answering(one) as turn:
                await stream(turn, 1, 3)
                await follower.saw(3)
                emptied(server, how)
                await stream(turn, 4, 5)
        assert plain(await follower.end()) == ["a:1", "a:2", "a:3", "Abandoned"]
        async with answering(one) as turn:
            await stream(turn, 1, 2, "b")
        rest = await shown(two.session("s"), "r", after=follower.parts[-1].position)
        version = await two.session("s").version(fresh=True)
        assert plain(rest) == ["Restarted", "b:1", "b:2", ("Ended", version, "answer")]
        assert [change.version for change in await two.session("s").history()] == list(range(1, version + 1))
        await opener.close()


@single
@pytest.mark.replicas
@pytest.mark.parametrize("how", ["flush", "restart"])
async def test_a_server_that_lost_an_answered_request_ends_it_by_the_record(opener: Any, how: str) -> None:
    with own_server(opener) as server:
        opener.url = server.url
        one, two = [await opener(max_staleness=0.4) for _ in range(2)]
        async with answering(one) as turn:
            await stream(turn, 1, 3)
        parts = await shown(two.session("s"), "r")
        emptied(server, how)
        rest = await shown(two.session("s"), "r", after=parts[1].position, wait=30)
        assert plain(rest) == ["Truncated", ("Ended", 1, "answer")]
        assert plain(await shown(two.session("s"), "r", wait=30)) == [("Ended", 1, "answer")]
        await opener.close()


def emptied(server: RedisServer, how: str) -> None:
    if how == "flush":
        server.ask("FLUSHALL")
    else:
        server.kill()
        server.start()


# Primaries that are replaced


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    return {"archive": f"sqlite:///{tmp_path}/archive.db", "namespace": f"t{uuid.uuid4().hex[:12]}", "retry_for": 60.0}


async def replaced(url: str, place: dict[str, Any], replace: Any) -> None:
    """Replace the primary while a turn streams, and compare what is shown with the record."""
    one, two = [await AsyncStateStore.open(url, **place) for _ in range(2)]
    try:
        await one.session("s").set("before", 1)
        follower = Follower(two, "s")
        replacing: Any = None
        fenced = False
        try:
            async with answering(one, ttl=60) as turn:
                for number in range(1, 101):
                    await turn.stream(chunk_of("a", number))
                    if number == 10:
                        await turn.flush()
                        await follower.saw(10)
                        replacing = asyncio.create_task(asyncio.to_thread(replace, one))
                    await asyncio.sleep(0.02)
                await replacing
        except (Fenced, Conflict):
            fenced = True
            await replacing
        parts = await follower.end()
        ((attempt, numbers),) = attempts(parts)
        answers = [change for change in await two.session("s").history() if "answered" in change.set]
        assert attempt == "a"
        if fenced:
            assert isinstance(parts[-1], Abandoned | Failed), plain(parts)
            assert answers == []
            async with answering(one) as turn:
                await stream(turn, 1, 2, "b")
            rest = await shown(two.session("s"), "r", after=parts[-1].position, wait=60)
            # The holder may have ended its turn after the follower was told.
            assert plain(rest)[-4:-1] == ["Restarted", "b:1", "b:2"]
            assert set(plain(rest)[:-4]) <= {"Truncated", "Failed"}
        else:
            assert isinstance(parts[-1], Ended), plain(parts)
            assert [change.version for change in answers] == [parts[-1].version]
            assert numbers == list(range(1, 101)) or "Truncated" in plain(parts)
        late = await shown(two.session("s"), "r", wait=60)
        assert isinstance(late[-1], Ended)
        attempts(late)
    finally:
        await one.close()
        await two.close()


@pytest.mark.wide
@pytest.mark.parametrize("how", ["handed over", "killed"])
@pytest.mark.timeout(300)
async def test_a_primary_behind_sentinels_is_replaced_in_the_middle_of_a_stream(how: str, place: Any) -> None:
    with redis_sentinel(replicas=1, binary=server_binary("sentinel")) as watched:

        def replace(store: Any, watched: RedisSentinel = watched) -> None:
            if how == "killed":
                watched.wait_replaced(watched.kill_primary())
            else:
                watched.failover()

        await replaced(watched.url, place, replace)


@pytest.mark.wide
@pytest.mark.parametrize("how", ["handed over", "killed"])
@pytest.mark.timeout(300)
async def test_a_primary_of_a_cluster_is_replaced_in_the_middle_of_a_stream(how: str, place: Any) -> None:
    with redis_cluster(replicas=1, binary=server_binary("cluster")) as cluster:

        def replace(store: Any, cluster: RedisCluster = cluster) -> None:
            node = cluster.primary_of(slot_of(keys_of(store, "s").output))
            if how == "killed":
                cluster.kill_primary(node)
                cluster.wait_converged()
            else:
                cluster.failover(node)

        await replaced(cluster.url, place, replace)


# Links


@single
@pytest.mark.replicas
async def test_a_follower_whose_connections_are_cut_is_shown_all(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        one, two = await opener(), await opener(url=proxy.url)
        follower = Follower(two, "s")
        async with answering(one) as turn:
            for number in range(1, 101):
                await turn.stream(chunk_of("a", number))
                if number % 10 == 0:
                    await turn.flush()
                    if number == 10:
                        await follower.saw(10)
                    proxy.cut()
        parts = await follower.end()
        assert attempts(parts) == [("a", list(range(1, 101)))]
        assert "Truncated" not in plain(parts)
        await opener.close()


@single
@pytest.mark.replicas
async def test_a_follower_whose_link_is_half_open_is_shown_all(opener: Any) -> None:
    """Nothing arrives that is published; it asks every second."""
    with Proxy(opener.url) as proxy:
        one, two = await opener(), await opener(url=proxy.url)
        follower = Follower(two, "s", seconds=600)
        async with answering(one) as turn:
            await stream(turn, 1, 5)
            await follower.saw(5)
            assert proxy.mute(b"SSUBSCRIBE") >= 1
            await stream(turn, 6, 20)
            await follower.saw(20)
        assert plain(await follower.end()) == [*(chunk_of("a", n) for n in range(1, 21)), ("Ended", 1, "answer")]
        await opener.close()


@single
@pytest.mark.replicas
async def test_batches_whose_answers_are_lost_appear_once(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        one, two = await opener(url=proxy.url), await opener()
        follower = Follower(two, "s")
        async with answering(one) as turn:
            for number in range(1, 31):
                if number % 5 == 0:
                    proxy.lose(OUTPUT.sha).go.set()
                await stream(turn, number, number)
        parts = await follower.end()
        assert plain(parts) == [*(chunk_of("a", n) for n in range(1, 31)), ("Ended", 1, "answer")]
        assert await shown(two.session("s"), "r") == parts
        with redis_of(two) as client:
            assert client.xlen(keys_of(two, "s").output) == 31
        await opener.close()


@single
@pytest.mark.replicas
async def test_a_batch_that_arrives_after_another_holder_began_appears_nowhere(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        one, two = await opener(url=proxy.url, stream_interval=10), await opener()
        follower, other = Follower(two, "s"), Follower(two, "s", "q")

        async def first() -> None:
            async with answering(one, ttl=600) as turn:
                await stream(turn, 1, 1)
                await follower.saw(1)
                held.append(proxy.hold(OUTPUT.sha))
                await stream(turn, 2, 2)

        held: list[Any] = []
        late = asyncio.create_task(first())
        await until(lambda: held and held[0].arrived.is_set())
        async with two.session("s").turn(request_id="q", busy="interrupt") as turn:
            held[0].go.set()
            await until(held[0].happened.is_set)
            await stream(turn, 1, 1, "b")
            turn["n"] = 1
        with pytest.raises(Fenced):
            await late
        assert plain(await follower.end()) == ["a:1", "Abandoned"]
        assert plain(await other.end()) == ["b:1", ("Ended", 1, None)]
        with redis_of(two) as client:
            entries = repr(client.xrange(keys_of(two, "s").output))
        assert "a:1" in entries
        assert "a:2" not in entries
        await opener.close()


@single
@pytest.mark.replicas
async def test_a_worker_that_does_not_read_costs_the_holder_and_redis_a_bounded_part(opener: Any) -> None:
    """Its link is half-open, so what is published stays in its connection; Redis keeps `output_bytes`."""
    with own_server(opener) as server, Proxy(server.url) as proxy:
        opener.url = server.url
        size = 2**18
        one, two = await opener(output_bytes=size), await opener(url=proxy.url, output_bytes=size)
        follower = Follower(two, "s")
        async with answering(one) as turn:
            await stream(turn, 1, 1)
            await follower.saw(1)
            with redis_of(one) as client:
                proxy.mute(b"")
                for _ in range(400):
                    await turn.stream("x" * 20_000)
                await turn.flush()
                assert client.memory_usage(keys_of(one, "s").output) <= size * 1.1
            assert tiers(one).leases.outputs.dropped == 0, "nobody waits for a follower"
        proxy.cut()
        parts = await follower.end()
        assert [part for part in plain(parts) if part[:1] != "x"] == ["a:1", "Truncated", ("Ended", 1, "answer")]
        await opener.close()


# A full server


@single
@pytest.mark.replicas
async def test_a_turn_goes_on_while_redis_is_full_and_shows_that_chunks_are_missing(opener: Any) -> None:
    with own_server(opener) as server:
        opener.url = server.url
        one, two = [await opener(archiver=False, beat=0.0) for _ in range(2)]
        follower = Follower(two, "s")
        async with answering(one) as turn:
            await stream(turn, 1, 3)
            server.ask("CONFIG", "SET", "maxmemory", "1")
            await stream(turn, 4, 6)
            server.ask("CONFIG", "SET", "maxmemory", "0")
            await stream(turn, 7, 8)
        # Those who follow while it is full may be shown all.
        parts = await follower.end()
        assert plain(parts)[-3:] == ["a:7", "a:8", ("Ended", 1, "answer")]
        assert [attempt for attempt, _ in attempts(parts)] == ["a"]
        later = ["a:1", "a:2", "a:3", "Truncated", "a:7", "a:8", ("Ended", 1, "answer")]
        assert plain(await shown(two.session("s"), "r")) == later
        assert tiers(one).leases.outputs.dropped == 3
        await opener.close()


@single
@pytest.mark.replicas
async def test_a_commit_on_a_full_redis_goes_as_without_output(opener: Any) -> None:
    with own_server(opener) as server:
        opener.url = server.url
        one, two = [await opener(archiver=False, beat=0.0) for _ in range(2)]
        results = []
        for id, chunks in (("quiet", 0), ("live", 2)):
            await one.session(id).set("before", 1)
            error: Backpressure | None = None
            try:
                async with one.session(id).turn(request_id="r") as turn:
                    await stream(turn, 1, chunks)
                    turn["answered"] = True
                    server.ask("CONFIG", "SET", "maxmemory", "1")
            except Backpressure as refused:
                error = refused
            server.ask("CONFIG", "SET", "maxmemory", "0")
            results.append((type(error), await two.session(id).has("answered", fresh=True)))
        assert results[0] == results[1]
        parts = plain(await shown(two.session("live"), "r", wait=5))
        assert parts[:-1] == ["a:1", "a:2"]
        assert parts[-1] == ("Ended", 2, None) if results[1][1] else parts[-1] in ("Failed", "Abandoned")
        await opener.close()
