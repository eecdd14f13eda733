"""Erasing: a record or a person is gone from every tier, whoever writes meanwhile and wherever it is interrupted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from below import everything_in_sql, held_in_redis, keys_of, redis_of, tiers, until
from combinations import APIS, WARM
from reaping import Sweeps, quiet, run
from sync_api import core

from distributed_state import (
    AccessDenied,
    ColdUnavailable,
    Deleted,
    Encryption,
    KeyRing,
    Locked,
    NotFound,
    StateError,
    Unavailable,
    WarmUnavailable,
)
from distributed_state.records import lifecycle, restoring
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path

MARK = "alice-7f3a"
APIS_AND_SERVERS = [f"{api} {warm}" for warm in WARM for api in APIS]


def said(text: Any, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": str(text)}


async def texts(session: Any, **options: Any) -> list[str]:
    return [message.content for message in await session.messages(**options)]


def traces(store: Any, opener: Any, mark: str = MARK, *, sql: bool = True) -> list[str]:
    """Where a text can still be found; that a conversation is deleted has to be heard by replicas that are away."""
    found = []
    with redis_of(store) as client:
        for key in client.scan_iter(f"{opener.namespace}*", count=1000):
            blobs = [held_in_redis(client, key)]
            if key.endswith(b":events"):
                rows = [repr(row).encode() for row in client.xrange(key)]
                blobs = [row for row in rows if b"\\nconversation.deleted\\nsession:" not in row]
            found += [f"redis {key!r}: {blob[:200]!r}" for blob in blobs if mark.encode() in blob]
    if not sql:
        return found
    if opener.archive != "memory":
        tables = everything_in_sql(opener.archive, opener.namespace)
        found += [f"sql {name}: {rows}"[:400] for name, rows in tables.items() if mark in repr(rows)]
    if opener.archive.startswith("sqlite"):
        path = Path(opener.archive.removeprefix("sqlite:///"))
        found += [file.name for file in path.parent.glob(f"{path.name}*") if mark.encode() in file.read_bytes()]
    return found


# Forks on the way


@pytest.mark.wide
@pytest.mark.timeout(60)
async def test_forks_that_are_made_while_a_person_is_forgotten_are_forgotten_too(opener: Any) -> None:
    """Forks of forks included, whether they were committed before `forget` returned or after."""
    store = await opener(archive_every=0.02, partitions=2, sweep=0.05)
    await store.session("chat-0", user=MARK).write(set={"secret": MARK}, append=[said(MARK)])
    await store.admin.archive()
    made, refused, stop = ["chat-0"], 0, asyncio.Event()

    async def forker(who: int) -> None:
        nonlocal refused
        number = 0
        while not stop.is_set():
            number += 1
            name = f"chat-{who}-{number}"
            try:
                await store.session(random.choice(made[-8:])).fork(name)
                made.append(name)
            except (Deleted, NotFound):
                refused += 1
            await asyncio.sleep(0)

    forkers = [asyncio.create_task(forker(who)) for who in range(6)]
    await until(lambda: len(made) > 12)
    try:
        assert await store.forget(MARK) >= 12
        await until(lambda: refused > 20)
    finally:
        stop.set()
        await asyncio.gather(*forkers)
    await store.admin.archive()
    await until(lambda: traces(store, opener) == [])
    for name in made:
        assert not await store.session(name).exists(fresh=True)


class Held:
    """A fork's commit, held up before it is sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        loop, commit = asyncio.get_running_loop(), write_path.commit

        async def held(home: Any, keys: Any, draft: Any, **more: Any) -> Any:
            loop.call_soon_threadsafe(self.reached.set)
            while not self.go_on.is_set():
                await home.port.sleep(0.005)
            return await commit(home, keys, draft, **more)

        monkeypatch.setattr(restoring, "write_path", SimpleNamespace(commit=held))


async def forgotten_during_a_fork(opener: Any, held: Held, erase: Callable[[Any], Any]) -> tuple[bool, list[str]]:
    """Whether the erasure waited for the fork, and the traces when both have returned. Nobody sweeps."""
    store = await quiet(opener, beat=0, partitions=2)
    await store.session("chat", user=MARK).write(set={"a": MARK}, append=[said(MARK)])
    forking = asyncio.create_task(store.session("chat").fork("late"))
    await held.reached.wait()
    erasing = asyncio.create_task(erase(store))
    home = tiers(store)

    async def erased() -> bool:
        rows = partial(home.cold.history, "session:chat", after=0, before=9)
        return not await run(store, home.port.sql(rows))

    await until(erased)
    done, _ = await asyncio.wait([erasing], timeout=0.3)
    held.go_on.set()
    await asyncio.wait([forking, erasing])
    assert erasing.result()
    assert not await store.session("late").exists(fresh=True) or done
    return not done, traces(store, opener)


@pytest.mark.parametrize("erase", ["forget", "erase"])
async def test_what_is_erased_during_a_fork_is_gone_with_the_fork(
    opener: Any, erase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it returns, and not when somebody has swept."""
    call = {"forget": lambda store: store.forget(MARK), "erase": lambda store: store.erase("chat")}[erase]
    assert await forgotten_during_a_fork(opener, Held(monkeypatch), call) == (True, [])


async def test_without_waiting_for_it_the_fork_shows_what_is_erased(opener: Any, monkeypatch: Any) -> None:
    """The negative control."""

    async def nothing(*_: Any) -> set[str]:
        return set()

    monkeypatch.setattr(lifecycle, "forks_ended", nothing)
    waited, left = await forgotten_during_a_fork(opener, Held(monkeypatch), lambda store: store.forget(MARK))
    assert not waited
    assert left != []


async def test_a_fork_that_nobody_waited_for_takes_itself_back(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process was stopped for longer than one may take."""
    monkeypatch.setattr(lifecycle, "_fork_seconds", lambda settings: 0.2)
    monkeypatch.setattr(lifecycle.ForkUnderWay, "require_time", lambda self: None)
    held = Held(monkeypatch)
    store = await quiet(opener, beat=0, partitions=2)
    await store.session("chat", user=MARK).set("a", MARK)
    forking = asyncio.create_task(store.session("chat").fork("late"))
    await held.reached.wait()
    assert await store.forget(MARK) == 1
    held.go_on.set()
    with pytest.raises(Deleted, match="erased while"):
        await forking
    assert not await store.session("late").exists(fresh=True)
    assert traces(store, opener) == []


async def test_a_fork_that_took_too_long_is_not_committed(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_fork_seconds", lambda settings: 0.0)
    store = await opener()
    await store.session("chat").set("a", 1)
    with pytest.raises(WarmUnavailable, match="nothing was written"):
        await store.session("chat").fork("late")
    assert not await store.session("late").exists(fresh=True)


async def test_a_fork_that_is_committed_when_all_is_over_goes_too(opener: Any) -> None:
    """It had read its source before; a fork of it fails, and whoever archives erases it."""
    store = await quiet(opener, beat=0, partitions=1)
    await store.session("chat", user=MARK).set("a", MARK)
    late, home = store.session("late"), tiers(store)
    changes = core(late)._context.changes()
    draft = await run(store, restoring.plan_fork(home, keys_of(store, "chat"), keys_of(store, "late"), changes, None))
    assert await store.forget(MARK) == 1
    await run(store, write_path.commit(home, keys_of(store, "late"), draft))
    assert await late.get("a") == MARK
    with pytest.raises(Deleted):
        await late.fork("later")
    sweeps = Sweeps(store)
    for _ in range(2):
        sweeps.reaper._erase_at = 0.0
        await sweeps()
    assert traces(store, opener) == []
    assert not await late.exists(fresh=True)


# Interrupted


class Cut:
    """Cuts the connections of a store at the nth thing that is asked of Redis or SQL, before it is done or after."""

    def __init__(self, store: Any) -> None:
        self.at = self.count = 0
        self.after = self.inside = False
        port = tiers(store).port
        for name in ("command", "exchange", "script", "scripts", "sql"):
            setattr(port, name, self._cut(getattr(port, name), ColdUnavailable if name == "sql" else WarmUnavailable))

    def _cut(self, ask: Any, error: type[StateError]) -> Any:
        async def asked(*words: Any) -> Any:
            if not self.at or self.inside:
                return await ask(*words)
            self.count += 1
            if self.count == self.at and not self.after:
                raise error("cut off before")
            self.inside = True  # a script is sent by an exchange: that is one thing
            try:
                answer = await ask(*words)
            finally:
                self.inside = False
            if self.count == self.at:
                raise error("cut off behind")
            return answer

        return asked

    async def __call__(self, work: Any, at: int, *, after: bool) -> bool:
        """Whether the work was cut off at this step; False if it ended before it came to that."""
        self.at, self.after, self.count = at, after, 0
        try:
            await work
        except Unavailable:
            return True
        finally:
            self.at = 0
        return False


async def a_person(store: Any, name: str) -> None:
    session = store.session(f"{name}-chat", user=name, idle=3600)
    await session.write(set={name: name}, append=[said(name)], phase=name)
    await session.fork(f"{name}-fork")
    await store.session(f"{name}-fork").append(said(name))
    await store.user(name).set("a", name)
    await store.emit("mail", {"to": name}, subject=session)


@pytest.mark.wide
async def test_a_person_who_is_half_forgotten_is_forgotten_in_the_end(opener: Any) -> None:
    """Wherever the connection is cut, before or after what was asked for was done, and by anybody."""
    store = await quiet(opener, retry_for=0, beat=0, partitions=1)
    cut, cuts, missed, sweeps = Cut(store), 0, 0, Sweeps(store)
    # Each combination tries some of the steps in all ways; another one begins elsewhere.
    step, every = 1 + APIS_AND_SERVERS.index(f"{opener.api} {opener.warm}") % 6, 4
    while missed < 2:  # things asked at once count as one, so that one miss is not yet the end
        name, after = f"{MARK}-{step}", step // every % 2 == 0
        await a_person(store, name)
        if await cut(store.forget(name), step, after=after):
            cuts += 1
        else:
            missed += 1
        if step // every % 4 < 2 or not core(store)._lifecycle.cold.pending():
            await store.forget(name)
        else:
            for _ in range(2):
                sweeps.reaper._erase_at = 0.0
                await sweeps()
        assert core(store)._lifecycle.cold.pending() == []
        assert traces(store, opener, name, sql=False) == [], (step, after)
        step += every
    assert cuts > 4
    assert traces(store, opener) == []


async def test_a_request_for_a_record_that_is_erased_already_ends(opener: Any) -> None:
    """Two of them at once, one of which wrote its tombstone when the other one was done, leave nothing behind."""
    store, sweeps = await quiet(opener, beat=0, partitions=1), None
    await a_person(store, MARK)
    cold, noted = core(store)._lifecycle.cold, []
    request = cold.request_owned
    cold.request_owned = lambda user, actor: noted.append(request(user, actor)) or noted[-1]
    await store.forget(MARK)
    # As the other one, which read what was noted, goes on now.
    await run(store, lifecycle.finish(tiers(store), noted[0]))
    assert traces(store, opener) == []
    assert cold.pending() == []
    # And as it dies behind its tombstones: these ask for the rest.
    await run(store, lifecycle._bury(tiers(store), noted[0], []))
    assert {each.record for each in cold.pending()} == {each.record for each in noted[0]}
    sweeps = Sweeps(store)
    for _ in range(2):
        sweeps.reaper._erase_at = 0.0
        await sweeps()
    assert traces(store, opener) == []


async def test_the_doctor_tells_what_is_half_erased(opener: Any) -> None:
    store = await quiet(opener, retry_for=0, beat=0)
    await a_person(store, MARK)

    async def finding() -> Any:
        return next(each for each in await store.admin.doctor() if each.name == "sql erasures")

    assert (await finding()).ok
    await run(store, tiers(store).archiver.drain())
    core(store)._lifecycle.cold.request_owned(MARK)  # as a `forget` that died behind its first step
    found = await finding()
    assert (found.ok, found.found) == (False, "3 pending")
    await store.forget(MARK)
    assert (await finding()).ok


async def test_who_asked_is_named_whoever_completes_it(opener: Any) -> None:
    """The one who asked died behind its first step; a replica that archives the partition goes on."""
    store = await quiet(opener, beat=0)
    received: list[Any] = []
    store.on("conversation.deleted", received.append)
    for id in "a", "b":
        await store.session(id, user="u").append(said("hi"))
    await run(store, tiers(store).archiver.drain())
    cold = core(store)._lifecycle.cold
    with store.acting_as("somebody else"):
        await run(store, lifecycle.finish(tiers(store), cold.request("session:a", "asked for a")))
        await run(store, lifecycle.finish(tiers(store), cold.request_owned("u", "asked for all")))
    await until(lambda: len(received) == 2)
    assert [(each.subject, each.actor) for each in received] == [
        ("session:a", "asked for a"), ("session:b", "asked for all")
    ]  # fmt: skip


# One record


async def test_an_erased_record_is_nowhere_and_what_was_beside_it_stays(opener: Any) -> None:
    store = await opener(partitions=2)
    session = store.session("chat", user="bob", idle=3600)
    for number in range(40):
        await session.append(said(f"{MARK} {number}"))
    await session.write(set={"a": MARK}, phase=MARK)
    await session.checkpoint(MARK)
    await store.emit("mail", {"to": MARK}, subject=session)
    other = store.session("other", user="bob")
    await other.write(set={"a": 1}, append=[said("other")])
    version = await session.version()
    assert traces(store, opener) != []
    assert await store.erase(session.id) is True
    assert traces(store, opener) == []
    assert tiers(store).hot.entries.get("session:chat") is None
    assert not await session.exists(fresh=True)
    assert await store.erase(session.id) is False
    assert await store.erase("never") is False
    assert await texts(other) == ["other"]
    assert [row.id for row in await store.sessions(user="bob")] == ["other"]
    assert [event.type for event in await store.admin.audit(subject=session)] == []
    with pytest.raises(Deleted):
        await session.set("a", 1)
    with pytest.raises(NotFound):
        await session.rollback(version=version)
    assert await session.create({"a": 2}) > version
    assert await session.get_all(fresh=True) == {"a": 2}
    assert await texts(session) == []
    assert await store.erase("chat") is True
    assert await store.erase("bob", scope="user") is False


@pytest.mark.parametrize("sealed", [False, True])
async def test_forks_of_an_erased_record_keep_what_they_share(opener: Any, sealed: bool) -> None:
    """Those of forks too, made before or after, and when all but the last of them are erased."""
    keys = KeyRing({"k": b"k" * 32}) if sealed else None
    store = await opener(**({"encryption": Encryption(keys)} if keys else {}))
    session = store.session("a")
    await session.write(set={"x": 1}, append=[said("one"), said("two")])
    await session.fork("b")
    await store.session("b").append(said("three"))
    await store.session("b").fork("c")
    await store.session("c").append(said("four"))
    assert await store.erase(session.id)
    assert await texts(store.session("b"), fresh=True) == ["one", "two", "three"]
    await store.session("b").fork("d")
    assert await texts(store.session("d"), fresh=True) == ["one", "two", "three"]
    assert await store.erase("b")
    # Another one under the old name is somebody else.
    await session.create()
    await session.append(said("new"))
    await store.session("c").fork("e")
    for id, expected in {
        "c": ["one", "two", "three", "four"],
        "d": ["one", "two", "three"],
        "e": ["one", "two", "three", "four"],
    }.items():
        copy = store.session(id)
        await store.admin.archive()
        with redis_of(store) as client:
            client.delete(keys_of(store, id).record)
        tiers(store).hot.forget(f"session:{id}")
        assert await texts(copy) == expected
        assert await copy.get_all() == {"x": 1}
    assert await texts(session) == ["new"]


async def test_who_reads_while_it_is_erased_finds_nothing(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the reader has looked at the record already, and its messages go from SQL before it asks for them."""
    store = await opener(recent_messages=1)
    session = store.session("s")
    await session.append(*(said(number) for number in range(9)))
    await store.admin.archive()
    read = read_path.read
    before = await run(store, read(tiers(store), keys_of(store, "s"), fresh=True))
    before.messages.clear()
    looks = [before]

    async def reading(tiers: Any, keys: Any, **options: Any) -> Any:
        return looks.pop() if looks else await read(tiers, keys, **options)

    async def whole(tiers: Any, keys: Any, entry: Any) -> Any:
        return entry

    assert await store.erase(session.id)
    monkeypatch.setattr(read_path, "read", reading)
    monkeypatch.setattr(read_path, "load_whole", whole)
    assert await texts(session) == []
    assert looks == []


async def test_a_fork_shows_nothing_of_who_has_the_name_of_what_was_erased(opener: Any) -> None:
    """Not even before it is archived, when it has no copies of its own yet."""
    store = await opener(archive_every=3600.0, durability="memory")
    session = store.session("a")
    await session.append(said("one"), said("two"))
    await session.fork("b")
    await store.admin.archive()
    assert await store.erase(session.id)
    await session.create()
    await session.append(*(said(f"of another {number}") for number in range(5)))
    await store.admin.archive()
    await store.session("b").fork("c")
    tiers(store).hot.forget("session:c")
    assert await texts(store.session("c"), fresh=True) == ["one", "two"]
    await store.session("c").fork("d")
    assert await texts(store.session("d"), fresh=True) == ["one", "two"]
    assert await store.erase("b")
    assert await texts(store.session("d"), fresh=True) == await texts(store.session("c"), fresh=True) == ["one", "two"]


async def test_a_rollback_that_was_on_its_way_brings_nothing_back(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It read the state before that was erased, and wrote it behind the tombstone."""
    store = await quiet(opener, beat=0, partitions=1)
    session = store.session("chat", user=MARK)
    await session.set("a", MARK)
    await session.set("a", 2)
    changes = core(session)._context.changes()
    changes.undelete()
    changes.set("a", MARK)
    late, clean = [changes.draft("rollback", deleted="revive")], lifecycle._clean

    async def clean_behind(tiers: Any, done: Any) -> None:
        if late:  # the rows have gone, and this is archived now
            await write_path.commit(tiers, keys_of(store, "chat"), late.pop())
        await clean(tiers, done)

    monkeypatch.setattr(lifecycle, "_clean", clean_behind)
    assert await store.erase(session.id)
    assert not late
    assert traces(store, opener) == []
    assert not await session.exists(fresh=True)


async def test_a_record_that_is_held_is_erased_when_it_is_free(opener: Any) -> None:
    """Locked is raised, but the request stands."""
    store = await quiet(opener, beat=0, partitions=1)
    session, held, leave = store.session("chat"), asyncio.Event(), asyncio.Event()
    await session.set("a", MARK)

    async def hold() -> None:
        async with session.lock():
            held.set()
            await leave.wait()

    holder = asyncio.create_task(hold())
    await held.wait()
    with pytest.raises(Locked):
        await store.erase(session.id)
    assert await session.get("a", fresh=True) == MARK
    leave.set()
    await holder
    sweeps = Sweeps(store)
    for _ in range(2):
        sweeps.reaper._erase_at = 0.0
        await sweeps()
    assert traces(store, opener) == []


@pytest.mark.replicas
async def test_another_replica_does_not_go_on_showing_what_is_erased(opener: Any) -> None:
    store, other = await opener(), await opener()
    await store.session("chat").set("a", MARK)

    async def is_hot() -> bool:
        await other.session("chat").get_all()
        return "session:chat" in tiers(other).hot.entries

    await until(is_hot)
    await store.erase("chat")
    await until(lambda: "session:chat" not in tiers(other).hot.entries)
    assert await other.session("chat").get_all() == {}


async def test_erasing_asks_the_policy(opener: Any) -> None:
    asked: list[Any] = []
    store = await opener(access=lambda request: asked.append(request) or request.action != "admin")
    session = store.session("chat", user="bob")
    await session.set("a", 1)
    for call in (lambda: store.erase("chat"), lambda: store.forget("bob")):
        with pytest.raises(AccessDenied):
            await call()
        assert asked[-1].action == "admin"
    assert await session.get("a", fresh=True) == 1
