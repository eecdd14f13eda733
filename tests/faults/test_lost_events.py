"""What becomes of events when connections, consumers and Redis fail (G6).

Law: what a replica received equals the stream, or there is one resync where something is missing.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import redis
from below import Worker, own_server, tiers, until
from proxy import Proxy
from sync_api import in_thread

from distributed_state import Event, WarmUnavailable
from distributed_state.cold.values import Batch
from distributed_state.values.journal import JournalEntry, pack
from distributed_state.warm import consumers
from distributed_state.warm.consumers import RESYNC, Consumers, RecentEvents, Subscription
from distributed_state.warm.scripts import EMIT
from distributed_state.warm.stream import Head, Position

single = pytest.mark.only(warm="single")


class Listener:
    """A replica that writes down what it is told."""

    def __init__(self, store: Any) -> None:
        self.store, self.received = store, list[Event]()
        store.on("*", self.hear)

    def hear(self, event: Event) -> None:
        self.received.append(event)

    def told(self) -> list[Event]:
        return [event for event in self.received if event.type != RESYNC]

    @property
    def resyncs(self) -> int:
        return sum(event.type == RESYNC for event in self.received)


def streams(url: str, store: Any) -> dict[int, list[tuple[str, int]]]:
    """Every event that Redis holds, by partition: its id and offset."""
    keys = tiers(store).keys
    with redis.Redis.from_url(url) as client:
        return {
            at: [(fields[b"h"].split(b"\n")[0].decode(), int(name.split(b"-")[0])) for name, fields in found]
            for at in range(keys.partitions)
            if (found := client.xrange(keys.partition(at).events))
        }


def by_partition(events: list[Event]) -> dict[int, list[tuple[str, int]]]:
    found = defaultdict(list)
    for event in events:
        found[event.partition].append((event.id, event.sequence))
    return dict(found)


async def emit_many(store: Any, count: int, tasks: int = 20) -> None:
    async def some(task: int) -> None:
        for n in range(task, count, tasks):
            await store.emit("test.counted", {"n": n}, subject=f"subject {n % 50}")

    await asyncio.gather(*(some(task) for task in range(tasks)))


async def kill_subscribers(url: str, done: asyncio.Event, kills: list[int]) -> None:
    """Cut every subscription, all or some, at random moments; `kills` counts them."""
    with redis.Redis.from_url(url) as client:
        while not done.is_set():
            await asyncio.sleep(random.uniform(0.01, 0.15))
            links = [each["id"] for each in client.client_list(_type="pubsub")]
            chosen = links if random.random() < 0.3 else random.sample(links, len(links) // 2)
            for each in chosen:
                kills[0] += client.client_kill_filter(_id=each)


async def emit_while_subscribers_are_cut_off(url: str, store: Any) -> int:
    """Emit until enough were cut off, and many events at least; how many these were."""
    count, kills, done = 0, [0], asyncio.Event()
    killer = asyncio.create_task(kill_subscribers(url, done, kills))
    while count < 1000 or kills[0] < 20:
        await emit_many(store, 100)
        count += 100
    done.set()
    await killer
    return count


@pytest.mark.wide
@single
@pytest.mark.timeout(240)
async def test_nothing_is_missed_when_subscribers_are_cut_off_at_random(opener: Any) -> None:
    with own_server(opener) as server:
        opener.url = server.url
        replicas = [await opener(partitions=8) for _ in range(5)]
        listeners = [Listener(each) for each in replicas]
        count = await emit_while_subscribers_are_cut_off(server.url, replicas[0])
        expected = streams(server.url, replicas[0])
        assert sum(map(len, expected.values())) == count
        await until(lambda: all(len(each.received) >= count for each in listeners), 100)
        for each in listeners:
            assert each.resyncs == 0
            assert by_partition(each.told()) == expected


@pytest.mark.wide
@single
@pytest.mark.only(api="asyncio")
async def test_without_the_look_into_the_stream_events_are_missed(opener: Any, monkeypatch: Any) -> None:
    """Negative control of the test above: what is published alone does not suffice."""

    async def blind(feed: Any, subscription: Subscription, partitions: list[int], heads: Any) -> set[int]:
        subscription.assign({at: Position(*heads[at][:2]) for at in partitions if heads[at].epoch})
        return set()

    monkeypatch.setattr(Consumers, "_read", blind)
    with own_server(opener) as server:
        opener.url = server.url
        replicas = [await opener(partitions=8) for _ in range(3)]
        listeners = [Listener(each) for each in replicas]
        count = await emit_while_subscribers_are_cut_off(server.url, replicas[0])
        await asyncio.sleep(1)
        assert min(len(each.received) for each in listeners) < count


@pytest.mark.wide
@single
@pytest.mark.only(api="blocking")
@pytest.mark.timeout(180)
async def test_who_is_dropped_for_its_full_buffer_reads_on_from_the_stream(opener: Any) -> None:
    """A replica that stands still while more than the server buffers for it is published."""
    with own_server(opener, "--client-output-buffer-limit", "pubsub 1mb 1mb 0") as server:
        opener.url = server.url
        store = await opener(partitions=4, beat=0)  # nobody tells of the listener as lost
        place = {"url": server.url, "archive": opener.archive, "namespace": opener.namespace, "partitions": 4}
        with Worker("listen", **place) as listener, redis.Redis.from_url(server.url) as client:
            assert listener.line() == "opened"
            await store.emit("first", subject="s")
            await in_thread(listener.line)
            os.kill(listener.process.pid, signal.SIGSTOP)
            before = len(client.client_list(_type="pubsub"))
            # More than the buffers of both sockets hold as well.
            # More than the buffers of both sockets hold as well.
            for n in range(5000):
                await store.emit("large", {"n": n, "x": "x" * 3500}, subject=f"s{n % 7}")
            await until(lambda: len(client.client_list(_type="pubsub")) < before)
            os.kill(listener.process.pid, signal.SIGCONT)
            received = [await in_thread(listener.line) for _ in range(5000)]
            expected = streams(server.url, store)
            found: dict[int, list[tuple[str, int]]] = {}
            for line in received:
                partition, sequence, id = line.split()
                found.setdefault(int(partition), []).append((id, int(sequence)))
            first = tiers(store).keys.partition_of("s")
            expected[first] = expected[first][1:]
            assert found == {at: rows for at, rows in expected.items() if rows}


async def restarted(server: Any, how: str) -> None:
    server.kill()
    await asyncio.sleep(0.3)
    server.start()


@pytest.mark.wide
@single
@pytest.mark.timeout(180)
async def test_a_restart_that_keeps_the_data_misses_nothing(opener: Any) -> None:
    with own_server(opener, "--appendonly", "yes", "--appendfsync", "always") as server:
        opener.url = server.url
        replicas = [await opener(partitions=4) for _ in range(3)]
        listeners = [Listener(each) for each in replicas]
        await replicas[0].ready()
        work = asyncio.create_task(emit_many(replicas[0], 1500, tasks=3))
        # Of a first epoch that ends before Redis has it nobody knows whether it had events: a resync would be right.
        await until(lambda: len(streams(server.url, replicas[0])) == 4)
        for _ in range(2):
            await restarted(server, "kept")
            await asyncio.sleep(0.3)
        assert not work.done()
        await work
        expected = streams(server.url, replicas[0])
        assert sum(map(len, expected.values())) == 1500
        await until(lambda: all(len(each.received) >= 1500 for each in listeners), 30)
        assert [each.resyncs for each in listeners] == [0, 0, 0]
        assert all(by_partition(each.told()) == expected for each in listeners)


async def an_epoch_that_went_on_elsewhere(opener: Any, *, joins_before: bool) -> list[str]:
    """Return what a listener receives of a partition that Redis lost while a former primary still wrote there."""
    with own_server(opener) as server, redis.Redis.from_url(server.url) as client:
        store = await opener(url=server.url, partitions=1)
        other = await opener(url=server.url, partitions=1, archiver=False)
        listener = Listener(other) if joins_before else None
        await other.ready()
        await store.emit("data.first", {}, subject="s")
        await until(lambda: listener is None or len(listener.received) == 1)
        await store.admin.archive()
        client.flushall()
        listener = listener or Listener(other)
        await other.ready()
        await until(lambda: listener.resyncs == joins_before)
        assert all(at.waits for at in tiers(other).consumers._subscriptions[0].taken().values())
        # A former primary took this one, and its worker archived it.
        cold = tiers(store).cold
        cursor = await tiers(store).port.sql(cold.cursor, 0)
        event = pack([(b"e", b"2 data.elsewhere s", b"{}")])
        entry = JournalEntry(cursor.offset + 1, "former.1.emit", "", 0, now_ms(), "emit", "", 0, event, 0)
        await tiers(store).port.sql(cold.archive, [Batch(0, cursor.epoch, cursor.offset, [entry], cursor.event)])
        await store.emit("data.second", {}, subject="s")
        await until(lambda: "data.second" in [event.type for event in listener.received])
        types = [event.type for event in listener.received]
        await store.close()
        return types


def now_ms() -> int:
    """The time of an event that is written now."""
    return int(time.time() * 1000)


@single
@pytest.mark.only(api="asyncio")
@pytest.mark.parametrize("joins_before", [False, True])
async def test_an_epoch_that_goes_on_at_a_former_primary_is_a_resync(opener: Any, joins_before: bool) -> None:
    types = await an_epoch_that_went_on_elsewhere(opener, joins_before=joins_before)
    assert types == [*(["data.first", RESYNC] if joins_before else []), RESYNC, "data.second"]


@single
@pytest.mark.only(api="asyncio")
async def test_a_position_that_knows_no_events_would_not_show_it(opener: Any, monkeypatch: Any) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(Position, "known", None)
    types = await an_epoch_that_went_on_elsewhere(opener, joins_before=False)
    assert types == ["data.second"]


@pytest.mark.wide
@single
@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["flush", "restart"])
async def test_redis_that_comes_back_empty_is_one_resync_between_what_was_before_and_after(
    opener: Any, how: str
) -> None:
    with own_server(opener) as server:
        opener.url = server.url
        replicas = [await opener(partitions=4) for _ in range(3)]
        listeners = [Listener(each) for each in replicas]
        for each in replicas:
            await each.ready()
        for n in range(40):
            await replicas[0].emit("before", {"n": n}, subject=f"s{n}")
        await until(lambda: all(len(each.received) == 40 for each in listeners))
        if how == "flush":
            with redis.Redis.from_url(server.url) as client:
                client.flushall()
        else:
            await restarted(server, "empty")
        for n in range(40):
            await replicas[0].emit("after", {"n": n}, subject=f"s{n}")
        await until(lambda: all(len(each.received) >= 81 for each in listeners), 30)
        await asyncio.sleep(consumers._CHECK + 0.5)
        expected = streams(server.url, replicas[0])
        for each in listeners:
            types = [event.type for event in each.received]
            assert types == ["before"] * 40 + [RESYNC] + ["after"] * 40
            assert each.received[40].data["partitions"] == [0, 1, 2, 3]
            assert by_partition(each.received[41:]) == expected


@single
async def test_a_group_whose_place_was_lost_goes_on_where_the_data_began(opener: Any) -> None:
    with own_server(opener) as server:
        opener.url = server.url
        store = await opener(partitions=1)
        async with store.events("note.*", group="g") as events:
            await store.emit("note.before", subject="s")
            assert (await events.next(5)).type == "note.before"
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        await store.emit("note.after", subject="s")
        async with store.events("note.*", group="g") as events:
            assert [(await events.next(5)).type for _ in range(2)] == [RESYNC, "note.after"]


async def heard_before_and_after_a_save(listener: Listener, url: str, kept: int, lost: int) -> None:
    """So many events that a file of Redis has, and so many that it lacks, all of them heard."""
    for n in range(kept):
        await listener.store.emit("kept", {"n": n}, subject="s")
    with redis.Redis.from_url(url) as client:
        client.save()
    for n in range(lost):
        await listener.store.emit("lost", {"n": n}, subject="s")
    await until(lambda: len(listener.received) == kept + lost)


def looks_no_more(store: Any) -> Callable[[], None]:
    """From now on its listeners do not reach the stream; until what is returned is called."""
    stream = tiers(store).stream
    heads = stream.reachable_heads

    async def away(_: Any) -> Any:
        raise WarmUnavailable("away")

    stream.reachable_heads = away
    return lambda: setattr(stream, "reachable_heads", heads)


@single
@pytest.mark.timeout(180)
async def test_what_was_heard_before_older_data_is_not_heard_again(opener: Any) -> None:
    """Another worker recovers before the listener looks: the stream goes on from before where that was."""
    with own_server(opener) as server:
        opener.url = server.url
        store, other = [await opener(partitions=1, archiver=False, unarchived_bytes=0) for _ in range(2)]
        listener = Listener(store)
        await store.ready()
        await heard_before_and_after_a_save(listener, server.url, 4, 2)
        look_again = looks_no_more(store)
        await restarted(server, "older")
        await other.emit("new", {"n": 0}, subject="s")
        look_again()
        await until(lambda: listener.received[-1].type == "new", 20)
        assert [each.type for each in listener.received] == ["kept"] * 4 + ["lost"] * 2 + [RESYNC, "new"]
        assert listener.received[6].data["reason"] == "epoch"


async def written_again_behind_a_loss(opener: Any) -> None:
    """Its writer did not hear that it was written, its server forgot it, and a listener had heard it."""
    with own_server(opener) as server, Proxy(server.url) as proxy:
        opener.url = server.url
        store = await opener(partitions=1, archiver=False, unarchived_bytes=0)
        writer = await opener(url=proxy.url, partitions=1, archiver=False, unarchived_bytes=0)
        listener = Listener(store)
        await store.ready()
        await heard_before_and_after_a_save(listener, server.url, 4, 2)
        loss = proxy.lose(EMIT.sha)
        task = asyncio.ensure_future(writer.emit("again", subject="s"))
        await until(lambda: len(listener.received) == 7)
        await restarted(server, "older")
        await store.emit("between", subject="s")
        loss.go.set()
        await task
        await store.emit("new", subject="s")
        await until(lambda: listener.received[-1].type == "new", 20)
        assert (await task).sequence == 6, "behind what is kept, and the one between"
        told = [each.type for each in listener.told()]
        assert told == ["kept"] * 4 + ["lost"] * 2 + ["again", "between", "new"]
        assert listener.resyncs == 1


@single
async def test_what_comes_again_under_another_number_is_not_heard_again(opener: Any) -> None:
    await written_again_behind_a_loss(opener)


@single
async def test_by_its_number_alone_it_would_be(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(RecentEvents, "until", lambda *_: frozenset())
    with pytest.raises(AssertionError):
        await written_again_behind_a_loss(opener)


@pytest.mark.wide
@single
async def test_one_who_hangs_is_no_reason_for_others_to_hear_twice(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue is full, so that it takes nothing; what the others took is known all the same."""
    monkeypatch.setattr(consumers, "_ROOM", 20)
    with own_server(opener) as server:
        opener.url = server.url
        store, other = [await opener(partitions=1, archiver=False, unarchived_bytes=0) for _ in range(2)]
        listener = Listener(store)
        async with store.events():  # of which nobody asks for anything
            await store.ready()
            await heard_before_and_after_a_save(listener, server.url, 30, 30)
            look_again = looks_no_more(store)
            await restarted(server, "older")
            await other.emit("new", {"n": 0}, subject="s")
            with redis.Redis.from_url(server.url) as client:  # so that the stream is read from its beginning
                client.hset(tiers(store).keys.partition(0).meta, "continues", "")
            look_again()
            await until(lambda: listener.received[-1].type == "new", 20)
            ids = [each.id for each in listener.told()]
            assert len(ids) == len(set(ids)) == 61


async def several_epochs_that_nobody_looked_at(opener: Any) -> None:
    """Nothing is lost in any of them, and events are written in each."""
    with own_server(opener, "--appendonly", "yes", "--appendfsync", "always") as server:
        opener.url = server.url
        store, other = [await opener(partitions=1, archiver=False) for _ in range(2)]
        listener = Listener(store)
        await store.ready()
        await other.emit("data", {"n": 0}, subject="s")
        await until(lambda: len(listener.received) == 1)
        look_again = looks_no_more(store)
        for n in range(1, 4):
            await restarted(server, "kept")
            await other.emit("data", {"n": n}, subject="s")
        look_again()
        await until(lambda: bool(listener.received) and listener.received[-1].data.get("n") == 3, 20)
        assert [each.data.get("n") for each in listener.received] == [0, 1, 2, 3], "and no resync"


@pytest.mark.wide
@single
@pytest.mark.timeout(180)
async def test_a_stream_that_went_on_through_several_epochs_is_read_on(opener: Any) -> None:
    await several_epochs_that_nobody_looked_at(opener)


@pytest.mark.wide
@single
@pytest.mark.timeout(180)
async def test_if_only_the_epoch_before_were_known_it_would_not_be(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    known = Head.end_of

    def of_the_last(head: Head, epoch: str) -> int:
        return known(head._replace(continues=head.continues.partition(" ")[0]), epoch)

    monkeypatch.setattr(Head, "end_of", of_the_last)
    with pytest.raises(AssertionError):
        await several_epochs_that_nobody_looked_at(opener)


async def a_replaced_server_answers_once_more(opener: Any) -> None:
    """The partition is in its second epoch; for a while heads come from a server that is still in the first."""
    with own_server(opener) as server:
        opener.url = server.url
        store = await opener(partitions=1, archiver=False, unarchived_bytes=0)
        listener = Listener(store)
        await store.ready()
        for n in range(3):
            await store.emit("first", {"n": n}, subject="s")
        await until(lambda: len(listener.received) == 3)
        stream = tiers(store).stream
        former = (await stream.heads([tiers(store).keys.partition(0)]))[0]
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        for n in range(3):
            await store.emit("second", {"n": n}, subject="s")
        await until(lambda: [each.type for each in listener.received].count("second") == 3)
        heads, asked = stream.reachable_heads, list[int]()

        async def of_the_former(partitions: Any) -> Any:
            asked.append(1)
            return dict.fromkeys((each.partition for each in partitions), former)

        stream.reachable_heads = of_the_former
        tiers(store).consumers.stir([0])
        await until(lambda: len(asked) >= 3)
        stream.reachable_heads = heads
        tiers(store).consumers.stir([0])
        await store.emit("second", {"n": 3}, subject="s")
        await until(lambda: listener.received[-1].data.get("n") == 3)
        assert [each.type for each in listener.received] == ["first"] * 3 + [RESYNC] + ["second"] * 4


@single
async def test_a_server_that_was_replaced_is_not_believed(opener: Any) -> None:
    await a_replaced_server_answers_once_more(opener)


@single
async def test_if_it_were_believed_events_would_be_heard_twice(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(consumers, "_REPLACED", 0.0)
    with pytest.raises(AssertionError):
        await a_replaced_server_answers_once_more(opener)


@single
@pytest.mark.timeout(180)
@pytest.mark.parametrize("remembered", [0, 2**20], ids=["forgotten", "remembered"])
async def test_redis_that_comes_back_with_older_data_is_a_resync(opener: Any, remembered: int) -> None:
    """Offsets are given anew to other events: without the look, those would be taken for what was heard already.

    One where nobody remembers. What a writer puts back is missing in the stream of the next epoch: that may be another.
    """
    with own_server(opener) as server:
        opener.url = server.url
        store = await opener(partitions=1, archiver=False, unarchived_bytes=remembered)
        listener = Listener(store)
        await store.ready()
        await heard_before_and_after_a_save(listener, server.url, 10, 5)
        await restarted(server, "older")
        await until(lambda: listener.resyncs, 20)
        for n in range(8):
            await store.emit("new", {"n": n}, subject="s")
        await until(lambda: [each.type for each in listener.received].count("new") == 8)
        told = [each.type for each in listener.received]
        resyncs = 2 if remembered and listener.resyncs == 2 else 1
        assert told == ["kept"] * 10 + ["lost"] * 5 + [RESYNC] * resyncs + ["new"] * 8
        assert listener.received[15].data["reason"] in ("rewound", "epoch" if remembered else "rewound")
        if remembered:
            await store.admin.archive()
            assert [each.type for each in await store.admin.audit()].count("lost") == 5


@pytest.mark.wide
@single
@pytest.mark.only(api="blocking")
@pytest.mark.timeout(180)
async def test_a_groups_events_are_taken_over_from_a_member_that_died(opener: Any) -> None:
    """Nothing is left out; only what was not seen to be handled comes again, with its id; order holds."""
    with own_server(opener) as server:
        opener.url = server.url
        store = await opener(partitions=8)
        place = {"url": server.url, "archive": opener.archive, "namespace": opener.namespace}
        place |= {"partitions": 8, "beat": 0}
        arguments = {"group": "g", "pause": 0.002, **place}
        with (
            Worker("share", **arguments) as one,
            Worker("share", **arguments) as two,
            Worker("share", **arguments) as three,
        ):
            workers = [one, two, three]
            for each in workers:
                assert await in_thread(each.line) == "opened"
            for n in range(1200):
                await store.emit("a", {"n": n}, subject=f"s{n % 30}")
                if n in (400, 800):
                    workers[n // 400 - 1].kill()
            handled: list[list[str]] = [one.lines(), two.lines(), []]
            expected = {id for rows in streams(server.url, store).values() for id, _ in rows}
            deadline = time.monotonic() + 40
            while not expected <= {line.split()[0] for lines in handled for line in lines}:
                assert time.monotonic() < deadline, "some were left out"
                handled[2].append(await in_thread(three.line))
        ids = [line.split()[0] for lines in handled for line in lines]
        assert set(ids) == expected
        assert len(ids) - len(expected) < 300
        for lines in handled:
            for subject in {line.split()[1] for line in lines}:
                numbers = [int(line.split()[2]) for line in lines if line.split()[1] == subject]
                assert numbers == sorted(set(numbers)), "each member saw a subject's events in order and once"


async def an_epoch_that_nobody_heard_of(opener: Any) -> None:
    """A listener begins while Redis holds nothing, and is cut off until an epoch has begun and ended."""
    with own_server(opener) as server, Proxy(server.url) as proxy:
        store = await opener(url=proxy.url, partitions=4)
        other = await opener(url=server.url, partitions=4)
        listener, feed = Listener(store), tiers(store).consumers
        await store.ready()
        assert all(at.waits for at in feed._subscriptions[0].taken().values())
        catch_up = feed._catch_up

        async def cut_off(behind: set[int]) -> None:
            raise WarmUnavailable("cut off")

        feed._catch_up = cut_off  # type: ignore[method-assign]
        await until(lambda: proxy.mute(b"SSUBSCRIBE"))
        for event_type in ("data.first", "data.second"):
            with redis.Redis.from_url(server.url) as client:
                client.flushall()
            for n in range(20):
                await other.emit(event_type, {"n": n}, subject=f"subject {n}")
        feed._catch_up = catch_up  # type: ignore[method-assign]
        proxy.cut(b"SSUBSCRIBE")
        await until(lambda: [event.type for event in listener.received].count("data.second") == 20)
        assert [event.type for event in listener.told()] == ["data.second"] * 20
        assert listener.resyncs == 1
        await store.close()


@single
@pytest.mark.replicas
async def test_an_epoch_that_began_and_ended_unheard_is_told_of(opener: Any) -> None:
    await an_epoch_that_nobody_heard_of(opener)


@single
@pytest.mark.replicas
@pytest.mark.only(api="blocking")
async def test_a_position_that_knows_no_epochs_would_not_show_an_epoch_unheard_of(
    opener: Any, monkeypatch: Any
) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(Position, "behind", classmethod(lambda cls, epochs, known=None: cls("", 0)))
    with pytest.raises(AssertionError):
        await an_epoch_that_nobody_heard_of(opener)


@single
@pytest.mark.replicas
@pytest.mark.only(api="blocking")
async def test_a_position_from_before_any_event_shows_an_epoch_that_ended_since(opener: Any) -> None:
    with own_server(opener) as server, redis.Redis.from_url(server.url) as client:
        store = await opener(url=server.url, partitions=4)
        for epochs, expected in ((1, []), (2, [RESYNC])):
            async with store.events("data.*") as events:
                position = events.position
            for _ in range(epochs):
                client.flushall()
                for n in range(20):
                    await store.emit("data.of", {"n": n}, subject=f"subject {n}")
            found = []
            async with store.events("data.*", since=position) as events:
                while len(found) < 20 + len(expected):
                    event = await events.next(timeout=10)
                    assert event is not None
                    found.append(event.type)
            assert found == [*expected, *["data.of"] * 20]
            await store.admin.archive()
            client.flushall()
        await store.close()
