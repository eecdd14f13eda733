"""Leases: who holds a record, who comes next, and that a lost lease writes nothing. Law: the server decides."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any

import pytest
from below import Worker, deafened, evict, keys_of, redis_of, server_with, tiers, until
from controls import sabotage
from sync_api import Blocking, in_thread

from distributed_state import Fenced, Locked, LockTimeout, StateStore
from distributed_state.programs.servers import redis_server
from distributed_state.warm.scripts import ACQUIRE


async def stop_renewing(store: Any) -> None:
    """What happens to a process that is paused: its lease runs out and nothing tells it."""
    for job in tiers(store).leases.renewal._jobs:
        await job.stop()


def elsewhere(work: Any) -> asyncio.Task[Any]:
    """Run it in a task that inherits no lease."""
    return asyncio.create_task(work, context=Context())


def expire(store: Any, id: str) -> None:
    """Take the lock away, as its TTL would."""
    with redis_of(store) as client:
        assert client.delete(keys_of(store, id).lock) == 1


def waiting(store: Any, id: str) -> int:
    """How many stand in a record's queue."""
    with redis_of(store) as client:
        return int(client.zcard(keys_of(store, id).wait))


@asynccontextmanager
async def held_by_another(session: Any, **options: Any) -> AsyncIterator[asyncio.Event]:
    """Another task holds the record until the block ends, or until the event is set."""
    held, leave = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with session.lock(**options):
            held.set()
            await leave.wait()

    task = elsewhere(hold())
    try:
        await asyncio.wait({task, elsewhere(held.wait())}, return_when="FIRST_COMPLETED")
        yield leave
    finally:
        leave.set()
        await task


async def test_a_refusal_names_the_holder_by_its_replica_and_token(store: Any) -> None:
    session = store.session("s")
    async with session.lock() as lease:
        holder = f"held by '{store.replica}' with token {lease.token}"
        with pytest.raises(Locked) as locked:
            await elsewhere(store.session("s").set("n", 1))
        assert str(locked.value) == f"session:s: {holder}"
        with pytest.raises(LockTimeout) as late:
            await elsewhere(store.session("s").lock(wait=0).acquire())
        assert str(late.value) == f"session:s: still {holder} after 0 s"


# Fencing


async def sleeper_and_successor(store: Any) -> None:
    """A holder sleeps past its TTL, somebody else takes over, writes and leaves; then the sleeper writes."""
    session = store.session("s")
    await session.set("by", "nobody")
    lease = session.lock(ttl=0.2)
    await lease.acquire()
    await stop_renewing(store)
    await session.set("by", "sleeper")

    async def successor(leave: asyncio.Event) -> int:
        async with session.lock(wait=5) as mine:
            await session.set("by", "successor")
            taken.set()
            await leave.wait()
            return int(mine.token)

    taken, leave = asyncio.Event(), asyncio.Event()
    task = elsewhere(successor(leave))
    await asyncio.wait_for(taken.wait(), 5)
    refused = []
    for moment in ("held by another", "held by nobody"):
        if moment == "held by nobody":
            leave.set()
            assert await task > lease.token
            with redis_of(store) as client:
                assert not client.exists(keys_of(store, "s").lock)
        try:
            await session.set("by", "sleeper, too late")
        except Fenced:
            refused.append(moment)
    assert refused == ["held by another", "held by nobody"]
    assert await session.get("by", fresh=True) == "successor"
    assert await session.version(fresh=True) == 3
    await lease.release()


async def test_a_holder_that_slept_past_its_ttl_cannot_overwrite_its_successor(store: Any) -> None:
    """Also when the lock is free again: a token is good only while exactly it is held."""
    await sleeper_and_successor(store)


@pytest.mark.only(api="asyncio")
async def test_without_the_comparison_in_the_commit_the_sleeper_overwrites(store: Any) -> None:
    """Negative control of G2."""
    with sabotage("commit", "if holder ~= lock_value then", "if false then"), pytest.raises(AssertionError):
        await sleeper_and_successor(store)


async def test_every_kind_of_write_is_fenced(store: Any) -> None:
    session = store.session("s")
    await session.write(set={"a": 1, "o": {}, "l": []}, append=[{"role": "user", "content": "hi"}])
    lease = session.lock(ttl=30)
    await lease.acquire()
    expire(store, "s")
    writes = {
        "set": lambda: session.set("a", 2),
        "delete": lambda: session.delete("a"),
        "clear": lambda: session.clear(messages=True),
        "increment": lambda: session.increment("a"),
        "float": lambda: session.increment("a", 0.5),
        "update": lambda: session.update("o", {"x": 1}),
        "append_to": lambda: session.append_to("l", 1),
        "append": lambda: session.append({"role": "user", "content": "late"}),
        "checkpoint": lambda: session.checkpoint("late"),
        "rollback": lambda: session.rollback(version=1),
        "apply": lambda: session.apply(lambda view: view.update(a=2)),
        "store.delete": lambda: store.delete("s"),
    }
    for name, write in writes.items():
        with pytest.raises(Fenced):
            await write()
        assert await session.version(fresh=True) == 1, name
    with pytest.raises(Fenced):
        async with store.batch() as batch:
            batch.on(session).set("a", 2)
    assert await session.get_all(fresh=True) == {"a": 1, "o": {}, "l": []}
    await lease.release()


async def test_tokens_grow_with_every_holder(store: Any) -> None:
    session, tokens = store.session("s"), []
    for _ in range(20):
        async with session.lock() as lease:
            tokens.append(lease.token)
            await session.increment("n")
    assert tokens == sorted(set(tokens))
    assert [change.token for change in await session.history()] == tokens


# Others


async def test_others_neither_write_nor_lock_while_a_record_is_held(store: Any) -> None:
    session = store.session("s")
    await session.set("a", 1)
    async with held_by_another(session):
        assert await session.get("a", fresh=True) == 1
        for write in (lambda: session.set("a", 2), lambda: session.increment("a"), lambda: store.delete("s")):
            with pytest.raises(Locked) as refusal:
                await write()
            assert not isinstance(refusal.value, LockTimeout)
        with pytest.raises(LockTimeout):
            await session.lock(wait=0).acquire()
        assert await store.session("other").set("a", 1) == 1
    assert await session.set("a", 3) == 2


async def test_an_advisory_lock_lets_others_write_but_not_hold(store: Any) -> None:
    session = store.session("s")
    async with held_by_another(session, advisory=True):
        assert await session.set("a", 1) == 1
        for advisory in (True, False):
            with pytest.raises(LockTimeout):
                await session.lock(wait=0, advisory=advisory).acquire()
    lease = session.lock(advisory=True)
    await lease.acquire()
    expire(store, "s")
    with pytest.raises(Fenced):
        await session.set("a", 2)
    await lease.release()


async def test_one_holder_may_nest(store: Any) -> None:
    session = store.session("s")
    async with session.lock() as outer:
        async with session.lock(wait=0) as inner:
            assert inner.token == outer.token
            await session.set("a", 1)
        await session.set("a", 2)
        with pytest.raises(Locked):
            await session.lock(advisory=True, wait=0).acquire()
        assert not outer.lost
    async with held_by_another(session):
        pass
    assert [change.token for change in await session.history()] == [outer.token] * 2


async def test_an_inner_lease_is_lost_with_the_outer_one(store: Any) -> None:
    session = store.session("s")
    outer = session.lock(ttl=0.3)
    await outer.acquire()
    inner = session.lock()
    await inner.acquire()
    expire(store, "s")
    try:
        await until(lambda: outer.lost, 3)
        assert inner.lost
        with pytest.raises(Fenced):
            await session.lock(wait=0).acquire()
    except asyncio.CancelledError:
        pytest.fail("only the body of `async with` is cancelled")
    await inner.release()
    await outer.release()


# Renewal and loss


async def test_a_lease_is_renewed_beyond_its_ttl(store: Any) -> None:
    session = store.session("s")
    async with session.lock(ttl=0.3) as lease:
        begun = time.monotonic()
        await until(lambda: time.monotonic() > begun + 1.2)
        assert not lease.lost
        await session.set("a", 1)
        with redis_of(store) as client:
            assert 0 < client.pttl(keys_of(store, "s").lock) <= 300
            assert str(lease.token).encode() in client.get(keys_of(store, "s").lock)
    assert (await session.history())[0].token == lease.token


async def test_a_lost_lease_tells_its_holder(store: Any) -> None:
    """By the next renewal at the latest; then nothing is even sent."""
    session = store.session("s")
    lease = session.lock(ttl=0.6)
    await lease.acquire()
    expire(store, "s")
    begun = time.monotonic()
    await until(lambda: lease.lost, 3)
    assert time.monotonic() - begun < 0.6
    with pytest.raises(Fenced, match="nothing was sent"):
        await session.set("a", 1)
    await lease.release()
    assert await session.set("a", 2) == 1


@pytest.mark.only(api="asyncio")
async def test_the_body_of_a_lost_lease_is_cancelled_and_raises_fenced(store: Any) -> None:
    session, cancelled = store.session("s"), False

    async def body() -> None:
        nonlocal cancelled
        async with session.lock(ttl=0.3):
            expire(store, "s")
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                cancelled = True
                raise

    with pytest.raises(Fenced, match="its body was ended"):
        await body()
    assert cancelled
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await session.set("a", 1)


@pytest.mark.only(api="asyncio")
@pytest.mark.parametrize("lost_too", [False, True])
async def test_a_foreign_cancellation_is_not_swallowed(store: Any, lost_too: bool) -> None:
    session, inside = store.session("s"), asyncio.Event()

    async def body() -> None:
        async with session.lock(ttl=0.3):
            inside.set()
            await asyncio.sleep(10)

    task = asyncio.create_task(body())
    await inside.wait()
    if lost_too:
        lease = next(iter(tiers(store).leases.renewal.leases))
        lease.lose()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    await until(lambda: not waiting(store, "s"))
    assert await session.set("a", 1) == 1


@pytest.mark.only(api="asyncio", warm="redis")
async def test_a_timeout_around_a_lease_is_still_a_timeout(store: Any) -> None:
    session = store.session("s")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), session.lock():
            await asyncio.sleep(10)
    assert await session.set("a", 1) == 1


@pytest.mark.only(api="asyncio", warm="redis")
async def test_a_lease_held_without_a_body_does_not_cancel_its_task(store: Any) -> None:
    """`acquire` and `release` by hand: nobody would turn the cancellation into Fenced."""
    session = store.session("s")
    lease = session.lock(ttl=0.2)
    await lease.acquire()
    expire(store, "s")
    await until(lambda: lease.lost, 3)
    await asyncio.sleep(0)
    with pytest.raises(Fenced):
        await session.set("a", 1)
    await lease.release()


@pytest.mark.only(warm="single")
async def test_a_silent_server_costs_the_lease_before_its_ttl_is_over(opener: Any, tmp_path: Any) -> None:
    """However long a command may take: whoever holds the record must know before another one can."""
    with redis_server() as server:
        store = await opener(url=server.url, archive=f"sqlite:///{tmp_path}/own.db", timeout=8, retry_for=1)
        lease = store.session("s").lock(ttl=1.0)
        await lease.acquire()
        server.pause()
        try:
            begun = time.monotonic()
            await until(lambda: lease.lost, 4)
            assert time.monotonic() - begun < 1.05
        finally:
            server.resume()
        await lease.release()
        await opener.close()


async def test_a_lease_after_a_quiet_time_is_renewed(store: Any) -> None:
    """The renewer sleeps long while nothing is held; a lease taken just as it goes to sleep must wake it."""
    await in_task(store.session("first"))
    leases, session = tiers(store).leases, store.session("s")
    idle, go_on, clear = threading.Event(), threading.Event(), leases.renewal._kept.clear

    def clear_late() -> None:
        if threading.current_thread() is not threading.main_thread() and not idle.is_set():
            idle.set()
            go_on.wait(5)
        clear()

    leases.renewal._kept.clear = clear_late
    leases.renewal._kept.set()
    if isinstance(store, Blocking):
        await until(idle.is_set)
    lease = session.lock(ttl=0.3)
    await lease.acquire()
    go_on.set()
    start = time.monotonic()
    await until(lambda: time.monotonic() > start + 0.6)
    assert not lease.lost
    await session.set("a", 1)
    await lease.release()


async def test_a_lease_wakes_nobody_who_will_wake_in_time(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs look after all leases; waking them for each would cost more than the lease itself."""
    renewal = tiers(store).leases.renewal
    now = tiers(store).port.monotonic
    async with store.session("first").lock(ttl=30):
        await until(lambda: now() < renewal._renews_at < now() + 11 and now() < renewal._watches_at < now() + 28)
        woken = list[str]()
        monkeypatch.setattr(renewal._kept, "set", lambda: woken.append("renews"))
        monkeypatch.setattr(renewal._watched, "set", lambda: woken.append("watches"))
        for _ in range(3):
            async with store.session("s").lock(ttl=30):
                pass
        assert woken == []
        async with store.session("s").lock(ttl=20):
            assert woken == ["renews", "watches"]


async def in_task(session: Any) -> None:
    async with held_by_another(session):
        pass


@pytest.mark.wide
@pytest.mark.only(api="blocking")
async def test_renewal_survives_threads_that_come_and_go(store: Any) -> None:
    stop = time.monotonic() + 1.0

    async def churn(name: str) -> int:
        session, rounds = store.session(name), 0
        while time.monotonic() < stop:
            async with session.lock(ttl=0.05):
                rounds += 1
        return rounds

    async with held_by_another(store.session("kept"), ttl=2.0):
        with redis_of(store) as client:
            before = client.get(keys_of(store, "kept").lock)
            assert sum(await asyncio.gather(*(churn(f"c{n}") for n in range(6)))) > 20
            assert client.get(keys_of(store, "kept").lock) == before
    jobs: list[Any] = tiers(store).leases.renewal._jobs
    assert jobs
    assert all(job._thread.is_alive() for job in jobs)


# Waiting


async def test_a_wait_is_over_in_time_and_leaves_no_place_in_the_queue(store: Any) -> None:
    session = store.session("s")
    async with held_by_another(session):
        for wait in (0.0, 0.05, 0.3):
            begun = time.monotonic()
            with pytest.raises(LockTimeout):
                await session.lock(wait=wait).acquire()
            assert wait <= time.monotonic() - begun < wait + 5
            assert waiting(store, "s") == 0
    begun = time.monotonic()
    async with session.lock(wait=30):
        assert time.monotonic() - begun < 5


@pytest.mark.only(api="asyncio")
async def test_a_cancelled_waiter_leaves_no_place_in_the_queue(store: Any) -> None:
    """Whenever it is cancelled: while it waits, or while the server's answer is on its way."""
    session = store.session("s")
    async with held_by_another(session):
        for turns in range(25):
            task = asyncio.create_task(session.lock(wait=10).acquire())
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns % 5 == 4:
                await until(lambda: waiting(store, "s"))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            assert waiting(store, "s") == 0, f"after {turns} turns of the loop"
    begun = time.monotonic()
    async with session.lock(wait=5):
        assert time.monotonic() - begun < 0.5


@pytest.mark.only(api="asyncio")  # threads cannot be cancelled
async def test_a_waiter_that_is_cancelled_as_it_gets_the_lock_gives_it_back(store: Any) -> None:
    session = store.session("s")
    for turns in range(12):
        task = asyncio.create_task(session.lock(wait=10).acquire())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            await task.result().release()
        with redis_of(store) as client:
            assert not client.exists(keys_of(store, "s").lock), f"after {turns} turns of the loop"


async def newcomer_and_queue(store: Any) -> None:
    """The lock is free for a moment before the first in line takes it; a newcomer tries to get it just then."""
    session, keys = store.session("s"), keys_of(store, "s")
    with redis_of(store) as client:
        await in_task(session)
        client.zadd(keys.wait, {f"{int(time.time() * 1000) + 500}:somebody": 1})
        lease, passed = session.lock(wait=0), True
        try:
            await lease.acquire()
            await lease.release()
        except LockTimeout:
            passed = False
        assert not passed
        # Whoever does not come within the time it gave is skipped.
        async with session.lock(wait=5):
            assert client.zcard(keys.wait) == 0


@pytest.mark.only(api="asyncio")
async def test_a_newcomer_cannot_pass_the_queue(store: Any) -> None:
    await newcomer_and_queue(store)


@pytest.mark.only(api="asyncio", warm="redis")
async def test_without_the_queue_in_the_script_a_newcomer_passes(store: Any) -> None:
    """Negative control: a free lock goes to whoever asks first."""
    queue = "(not head[1] or (order ~= '' and tonumber(order) < tonumber(head[2])))"
    with sabotage("acquire", f"not held and {queue} then", "not held then"), pytest.raises(AssertionError):
        await newcomer_and_queue(store)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine, nobody is taken for dead."""
    monkeypatch.setattr("distributed_state.warm.lock._GRACE_MS", 60_000)


async def in_order(store: Any, session: Any, waiters: int) -> None:
    got: list[int] = []

    async def wait(number: int) -> None:
        async with session.lock(wait=20):
            got.append(number)

    tasks = []
    async with held_by_another(session) as leave:
        for number in range(waiters):
            tasks.append(asyncio.create_task(wait(number)))
            await until(lambda number=number: waiting(store, "s") == number + 1)
        leave.set()
    await asyncio.gather(*tasks)
    assert got == list(range(waiters))


@pytest.mark.usefixtures("unhurried")
async def test_waiters_come_in_the_order_in_which_they_asked(store: Any) -> None:
    for _ in range(4):
        await in_order(store, store.session("s"), 8)


@pytest.mark.replicas
@pytest.mark.usefixtures("unhurried")
async def test_nobody_overtakes_among_many_waiters_of_several_replicas(opener: Any) -> None:
    """Read off the server's own answers: whoever stood in the queue earlier got the smaller token."""
    stores = [await opener() for _ in range(3)]
    stood: dict[str, int] = {}
    granted: dict[str, int] = {}

    def listen(store: Any) -> None:
        port = tiers(store).port
        send = port.script

        async def script(script: Any, keys: Any, arguments: Any) -> Any:
            answer = await send(script, keys, arguments)
            if script is ACQUIRE and answer[0] == b"wait":
                stood[arguments[1]] = int(answer[3])
            elif script is ACQUIRE and answer[0] == b"ok":
                granted[arguments[1]] = int(answer[1][1:].split(b"@")[0])
            return answer

        port.script = script

    for store in stores:
        listen(store)
    turns: list[int] = []

    async def compete(store: Any, number: int) -> None:
        session = store.session("s")
        for _ in range(12):
            async with session.lock(wait=60):
                turns.append(number)
                count = await session.get("n", 0)
                await session.set("n", count + 1)

    await asyncio.gather(*(compete(stores[number % 3], number) for number in range(15)))
    assert await stores[0].session("s").get("n", fresh=True) == len(turns) == 180
    queued = sorted((order, granted[holder]) for holder, order in stood.items())
    assert len(queued) > 100
    assert [token for _, token in queued] == sorted(token for _, token in queued)
    with redis_of(stores[0]) as client:
        assert client.zcard(keys_of(stores[0], "s").wait) == 0


@pytest.mark.only(warm="real")
async def test_waiters_are_woken_and_do_not_poll(store: Any) -> None:
    """Counted on the server: asked, asked once more when the channel is confirmed, and asked when it is their turn."""
    session, waiters, asked = store.session("s"), 6, []
    lock, stop = keys_of(store, "s").lock, threading.Event()
    with server_with(store, lock) as client, client.monitor() as monitor:

        def count() -> None:
            for command in monitor.listen():
                if lock.decode() in command["command"] and "EVALSHA" in command["command"]:
                    asked.append(command["command"])
                if stop.is_set():
                    return

        thread = threading.Thread(target=count)
        thread.start()
        entered: list[float] = []

        async def wait() -> None:
            async with session.lock(wait=10):
                entered.append(time.monotonic())

        async with held_by_another(session) as leave:
            tasks = [asyncio.create_task(wait()) for _ in range(waiters)]
            await until(lambda: waiting(store, "s") == waiters)
            begun = time.monotonic()
            await until(lambda: time.monotonic() > begun + 1.2)
            left = time.monotonic()
            leave.set()
        await asyncio.gather(*tasks)
        stop.set()
        with server_with(store, lock) as other:
            other.eval("return redis.call('EXISTS', KEYS[1])", 1, lock)
        await asyncio.to_thread(thread.join, 5)
    acquire = [line for line in asked if f" {ACQUIRE.sha.decode()} " in line]
    # And once more for a waiter that is passed over, as its process was busy while the lock was offered to it.
    assert waiters < len(acquire) <= 4 * waiters + 2
    assert max(entered) - left < 1.0


# Crashes


@pytest.mark.wide
@pytest.mark.replicas
async def test_a_killed_holder_is_followed_after_its_ttl(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    with Worker("hold", id="s", ttl=1.0, **place(opener)) as worker:
        assert worker.line() == "opened"
        token = int(worker.line())
        with pytest.raises(Locked):
            await session.set("a", 1)
        worker.kill()
        begun = time.monotonic()
        async with session.lock(wait=10) as lease:
            assert time.monotonic() - begun < 1.5
            assert lease.token > token
            await session.set("a", 1)


@pytest.mark.wide
@pytest.mark.only(api="blocking", warm="valkey", cold="postgres")
async def test_a_killed_waiter_does_not_block_the_queue_for_long(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    async with held_by_another(session) as leave:
        with Worker("hold", id="s", ttl=30.0, wait=60.0, **place(opener)) as worker:
            assert worker.line() == "opened"
            await until(lambda: waiting(store, "s") == 1)
        behind = asyncio.create_task(in_task(session))
        await until(lambda: waiting(store, "s") == 2)
        with redis_of(store) as client:
            ((member, order),) = client.zrange(keys_of(store, "s").wait, 0, 0, withscores=True)
            # It has said that it comes back within ten minutes: whoever waited for that would wait in vain.
            client.zadd(
                keys_of(store, "s").wait, {b"%d:" % (time.time() * 1000 + 600_000) + member.partition(b":")[2]: order}
            )
            client.zrem(keys_of(store, "s").wait, member)
        leave.set()
        await behind


def dead_waiters(client: Any, keys: Any, count: int) -> None:
    """The first places in a record's queue belong to processes that died just now."""
    for number in range(count):
        client.zadd(keys.wait, {f"{int(time.time() * 1000) + 600_000}:dead{number}": number + 1})


@pytest.mark.wide
@pytest.mark.parametrize("ended", ["released", "expired"])
async def test_dead_waiters_hold_the_next_one_up_for_a_moment_each(store: Any, ended: str) -> None:
    """They have said that they come back within ten minutes."""
    session, keys = store.session("s"), keys_of(store, "s")
    await in_task(session)
    with redis_of(store) as client:
        if ended == "expired":
            epoch = client.hget(keys.meta, "epoch").decode()
            client.set(keys.lock, f"x1@{epoch}:died.1", px=300)
            dead_waiters(client, keys, 3)
            await in_task_within(session, 8)
        else:
            async with held_by_another(session) as leave:
                dead_waiters(client, keys, 3)
                behind = [asyncio.create_task(in_task_within(session, 8)) for _ in range(2)]
                await until(lambda: waiting(store, "s") == 5)
                leave.set()
                await asyncio.gather(*behind)
        assert client.zcard(keys.wait) == 0


async def in_task_within(session: Any, wait: float) -> None:
    async with held_by_another(session, wait=wait):
        pass


@pytest.mark.usefixtures("unhurried")
async def test_a_waiter_takes_up_its_place_under_another_deadline(store: Any) -> None:
    """It is offered the lock, which gives it less time than it had said; its place is left only once."""
    session, keys = store.session("s"), keys_of(store, "s")
    async with held_by_another(session) as leave:
        first = asyncio.create_task(in_task(session))
        await until(lambda: waiting(store, "s") == 1)
        with redis_of(store) as client:
            ((member, order),) = client.zrange(keys.wait, 0, -1, withscores=True)
            client.zadd(keys.wait, {b"99" + member: order})
            client.zrem(keys.wait, member)
        leave.set()
    await first
    assert waiting(store, "s") == 0


@pytest.mark.replicas
async def test_a_waiter_whose_link_is_down_keeps_its_turn(opener: Any) -> None:
    """Nothing wakes it, so it asks often enough not to be taken for dead."""
    one, deaf = await opener(), await opener()
    tiers(deaf).link.watch = lambda channel, handler: None  # type: ignore[method-assign]
    got: list[str] = []

    async def wait(name: str, store: Any) -> None:
        async with store.session("s").lock(wait=20):
            got.append(name)

    async with held_by_another(one.session("s")) as leave:
        tasks = [asyncio.create_task(wait("deaf", deaf))]
        await until(lambda: waiting(one, "s") == 1)
        tasks.append(asyncio.create_task(wait("next", one)))
        await until(lambda: waiting(one, "s") == 2)
        leave.set()
    await asyncio.gather(*tasks)
    assert got == ["deaf", "next"]


def place(opener: Any) -> dict[str, str]:
    """What another process needs to open the same store."""
    return {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}


# Release


async def test_a_lock_is_given_back_when_the_body_raises(store: Any) -> None:
    session = store.session("s")

    async def body() -> None:
        async with session.lock():
            await session.set("a", 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()
    with redis_of(store) as client:
        assert not client.exists(keys_of(store, "s").lock)
    async with held_by_another(session):
        pass


@pytest.mark.only(api="asyncio")
async def test_a_lock_is_given_back_under_cancellation(store: Any) -> None:
    """Cancelled in the body, and once more while it gives the lock back."""
    session = store.session("s")
    for again in (False, True):
        inside = asyncio.Event()

        async def body(inside: asyncio.Event = inside) -> None:
            async with session.lock():
                inside.set()
                await asyncio.sleep(10)

        task = asyncio.create_task(body())
        await inside.wait()
        task.cancel()
        if again:
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with redis_of(store) as client:
            await until(lambda client=client: not client.exists(keys_of(store, "s").lock), 2)


async def test_only_the_holder_can_release(store: Any) -> None:
    session = store.session("s")
    first = session.lock(ttl=30)
    await first.acquire()
    expire(store, "s")
    async with held_by_another(session):
        await first.release()
        with redis_of(store) as client:
            assert client.exists(keys_of(store, "s").lock)
        with pytest.raises(Locked):
            await session.set("a", 1)


# What a holder sees


@pytest.mark.replicas
async def test_a_holder_reads_what_its_predecessor_wrote(opener: Any) -> None:
    """Each replica keeps the record hot; the message that tells it of a change may come later than the lock."""
    stores = [await opener() for _ in range(3)]
    for store in stores:
        await store.session("s").set("n", 0)
        await until(lambda store=store: kept_hot(store))

    async def compete(store: Any) -> None:
        session = store.session("s")
        for _ in range(25):
            async with session.lock(wait=60):
                # Read, then write without an expectation: one stale read would lose a count.
                await session.set("n", await session.get("n") + 1)

    await asyncio.gather(*(compete(store) for store in stores))
    assert await stores[0].session("s").get("n", fresh=True) == 75


async def kept_hot(store: Any) -> bool:
    await store.session("s").get("n")
    return "session:s" in tiers(store).hot.entries


@pytest.mark.replicas
async def test_a_holder_does_not_wait_for_the_link_to_tell_it(opener: Any) -> None:
    """The same, with a replica whose messages do not arrive at all."""
    one, two = await opener(), await opener()
    await one.session("s").set("n", 0)
    await until(lambda: kept_hot(two))
    with deafened(tiers(two)):
        for number in range(1, 6):
            async with one.session("s").lock():
                await one.session("s").set("n", number)
            async with two.session("s").lock():
                assert await two.session("s").get("n") == number
            await until(lambda: kept_hot(two))


@pytest.mark.replicas
async def test_a_holder_reads_a_record_that_was_evicted_again(opener: Any) -> None:
    """The server cannot say the version of a record that it does not have, so the hot copy may be behind."""
    one, two = await opener(), await opener()
    await one.session("s").set("n", 0)
    await until(lambda: kept_hot(two))
    with deafened(tiers(two)):
        await one.session("s").set("n", 1)
        await evict(one, "s")
        assert await two.session("s").get("n") == 0, "hot is behind"
        async with two.session("s").lock():
            assert await two.session("s").get("n") == 1


@pytest.mark.replicas
async def test_a_holder_does_not_join_a_read_that_began_before_its_lock(opener: Any) -> None:
    one, two = await opener(), await opener()
    await one.session("s").set("n", 0)
    session, warm = two.session("s"), tiers(two).warm
    read, answered, go_on = warm.read, threading.Event(), threading.Event()

    async def slow(*arguments: Any) -> Any:
        answer = await read(*arguments)
        if not answered.is_set():
            answered.set()
            while not go_on.is_set():
                await warm.port.sleep(0.002)
        return answer

    warm.read = slow  # type: ignore[method-assign]
    early = asyncio.create_task(session.get("n"))
    await until(answered.is_set)
    async with one.session("s").lock():
        await one.session("s").set("n", 1)

    async def hold() -> Any:
        async with session.lock(wait=5):
            inside.set()
            return await session.get("n")

    inside = asyncio.Event()
    holder = asyncio.create_task(hold())
    await asyncio.wait_for(inside.wait(), 5)
    begun = time.monotonic()
    await until(lambda: holder.done() or time.monotonic() > begun + 0.2)
    go_on.set()
    assert await holder == 1
    await early


# Whose lease it is


@pytest.mark.only(api="asyncio")
async def test_a_task_started_in_the_body_writes_under_the_lease(store: Any) -> None:
    session = store.session("s")
    async with session.lock() as lease:
        await asyncio.gather(session.set("a", 1), asyncio.create_task(session.set("b", 2)))
    assert {change.token for change in await session.history()} == {lease.token}


@pytest.mark.only(api="asyncio")
async def test_a_task_started_in_the_body_does_not_nest_in_its_parents_lease(store: Any) -> None:
    """Nesting is for one owner; two tasks in one lock would both think that they are alone."""
    session = store.session("s")

    async def also() -> None:
        async with session.lock(wait=0.05):
            raise AssertionError("both hold it")

    async with session.lock():
        with pytest.raises(LockTimeout):
            await asyncio.create_task(also())
        async with session.lock(wait=0):
            await session.set("a", 1)


@pytest.mark.only(api="asyncio")
async def test_a_task_that_outlives_the_lease_may_write_and_lock_again(store: Any) -> None:
    """It inherited a lease that its parent has given back since: that is history, not a lease of its own."""
    session, released = store.session("s"), asyncio.Event()

    async def later() -> int:
        await released.wait()
        async with session.lock(wait=1) as lease:
            with redis_of(store) as client:
                assert str(lease.token).encode() in client.get(keys_of(store, "s").lock)
            await session.set("a", 2)
        return int(await session.set("a", 3))

    async with session.lock():
        await session.set("a", 1)
        child = asyncio.create_task(later())
    released.set()
    assert await child == 3


async def test_another_task_or_thread_does_not_hold_the_lease(store: Any) -> None:
    session = store.session("s")

    async def somebody() -> Any:
        return await session.set("a", 1)

    start = asyncio.Event()

    async def when_held() -> Any:
        await start.wait()
        return await somebody()

    other = asyncio.create_task(when_held())
    async with session.lock():
        start.set()
        with pytest.raises(Locked):
            await other


@pytest.mark.only(api="blocking", warm="valkey")
async def test_threads_started_in_the_body_do_not_hold_the_lease(opener: Any) -> None:
    url, archive, namespace = opener.url, opener.archive, opener.namespace

    def body() -> list[str]:
        with StateStore.open(url, archive=archive, namespace=namespace) as store:
            session, outcome = store.session("s"), []

            def write() -> None:
                try:
                    session.set("a", 1)
                    outcome.append("written")
                except Locked:
                    outcome.append("locked")

            with session.lock():
                thread = threading.Thread(target=write)
                thread.start()
                thread.join()
            return outcome

    assert await in_thread(body) == ["locked"]


async def test_a_lease_of_one_record_is_none_of_another(store: Any) -> None:
    one, two = store.session("one"), store.session("two")
    async with one.lock() as first, two.lock() as second:
        await one.set("a", 1)
        await two.set("a", 1)
    assert (await one.history())[0].token == first.token
    assert (await two.history())[0].token == second.token
