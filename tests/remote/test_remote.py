"""The remote store: the same code on a direct store and behind a real worker, and what happens when that fails."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from below import until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy import Loss, Proxy
from remotely import Serving
from serving import served

from distributed_state import (
    ABSENT,
    DEFAULT,
    PRESENT,
    AccessDenied,
    AsyncItems,
    AsyncRecord,
    AsyncRemoteStore,
    AsyncSession,
    AsyncStateStore,
    ConfigurationError,
    Conflict,
    Deleted,
    Fenced,
    InvalidTransition,
    InvalidValue,
    ItemPage,
    Locked,
    LockTimeout,
    Message,
    NotFound,
    PutItem,
    RemoteStore,
    StateError,
    StateStore,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from distributed_state.port.http import AsyncHttp, BlockingHttp
from distributed_state.programs.service import Service
from distributed_state.remote import values
from distributed_state.remote.record import AsyncRemoteItems, AsyncRemoteRecord
from distributed_state.remote.requests import KEY
from distributed_state.remote.session import AsyncRemoteSession
from distributed_state.results import Lifetime
from distributed_state.values import access_tokens

USE = """
from distributed_state import ABSENT, StateStore

with StateStore.open() as store:                    # embedded: no server, archived to ./distributed-state.db
    session = store.session("user-123", user="u1")  # a handle; no I/O
    session.set("city", "Oslo")                     # one round trip; returns the new version
    session.get("city")                             # hot: no I/O
    session.increment("count")
    session.append({"role": "user", "content": "A hotel, please"})

    with session.lock(ttl=30, wait=5):              # writes by others raise Locked; ours carry the fencing token
        session.write(set={"step": 2}, append=[{"role": "assistant", "content": "When?"}])  # all or nothing
    session.set("owner", "w1", expect={"owner": ABSENT})  # raises Conflict, writes nothing, if owner exists

    session.checkpoint("before booking")
    session.set("booked", True)
    session.rollback(label="before booking")        # a new version; history is never rewritten
    session.at(version=1).fields                    # any version can be read ...
    session.fork("user-123-b")                      # ... and forked
"""


@dataclass(frozen=True)
class Worker:
    """What serves, and where."""

    url: str


@pytest.fixture(scope="module")
def place(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the state of this file's tests is."""
    folder = tmp_path_factory.mktemp("remote")
    archive = f"sqlite:///{folder}/archive.db"
    return {"url": servers.redis("valkey").url, "archive": archive, "namespace": f"r{uuid.uuid4().hex[:12]}"}


@pytest.fixture(scope="module")
def workers(place: dict[str, str]) -> Iterator[tuple[Worker, Worker]]:
    """Two workers of one store, each with a replica of its own, in threads: a worker that is killed is a process."""
    with served(**place, service=Service()) as one, served(**place, service=Service()) as other:
        yield Worker(str(one.base_url)), Worker(str(other.base_url))


Opens = Callable[[], AbstractAsyncContextManager[Any]]


@pytest.fixture(params=["direct", "remote"])
def opens(request: pytest.FixtureRequest, place: dict[str, str], workers: tuple[Worker, Worker]) -> Opens:
    """What opens the same state: directly, or through a worker."""
    if request.param == "direct":
        return lambda: AsyncStateStore.open(place["url"], archive=place["archive"], namespace=place["namespace"])
    return lambda: AsyncStateStore.open(workers[0].url)


@pytest.fixture
def id() -> str:
    return uuid.uuid4().hex


HI = {"role": "user", "content": "hi"}


# The same on both


def test_one_program_runs_on_all_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: dict[str, str], workers: Any, namespace: str
) -> None:
    """Only the arguments of `open` differ."""
    monkeypatch.chdir(tmp_path)
    assert USE.count("StateStore.open()") == 1
    direct = f'"{place["url"]}", archive="sqlite:///{tmp_path}/a.db", namespace="{namespace}"'
    found = []
    for place_given in ("", direct, f'"{workers[0].url}"'):
        code = USE.replace("StateStore.open()", f"StateStore.open({place_given})")
        code += "    seen = session.get_all(), [(m.get('role'), m.get('content')) for m in session.raw_messages()]\n"
        code += "    seen += session.version(), [(each.version, each.kind) for each in session.history()]\n"
        names: dict[str, Any] = {}
        exec(compile(code, "program", "exec"), names)
        found.append(names["seen"])
        assert isinstance(names["store"], RemoteStore if "http" in place_given else StateStore)
    assert found[0] == found[1] == found[2]


async def test_a_write_says_which_argument_is_no_mapping_or_no_list(opens: Opens, id: str) -> None:
    async with opens() as store:
        session = store.session(id)
        for name in ("set", "delete", "increment", "append", "items", "tag", "untag", "expect"):
            with pytest.raises(InvalidValue, match=rf"^{name} takes .*, not 3$"):
                await session.write(**{"set": {"a": 1}, name: 3})
        assert await session.version() == 0


async def test_an_update_of_several_fields_is_sent_to_set_many(opens: Opens, id: str) -> None:
    async with opens() as store:
        session: Any = store.session(id)
        with pytest.raises(InvalidValue, match=r"set_many\(values\) sets several fields"):
            await session.update({"a": 1})
        with pytest.raises(InvalidValue, match="update takes a mapping, not NoneType"):
            await session.update("a")
        assert await session.version() == 0


async def test_fields(opens: Opens, id: str) -> None:
    async with opens() as store:
        session = store.session(id, user=f"u{id}")
        assert (await session.get("city", "none"), await session.get_all(), await session.version()) == ("none", {}, 0)
        assert await session.set("city", "Oslo") == 1
        assert await session.set_many({"a": [1, {"b": None}], "odd / name?": b"\x00\xff", "..": 2}) == 2
        assert await session.get("odd / name?") == b"\x00\xff"
        assert await session.get("..") == 2
        assert await session.has("a")
        assert not await session.has("none")
        assert await session.delete("..") == 3
        assert await session.get_all() == {"city": "Oslo", "a": [1, {"b": None}], "odd / name?": b"\x00\xff"}
        assert await session.set("city", "Rome", expect={"city": "Oslo", "x": ABSENT, "a": PRESENT}) == 4
        with pytest.raises(Conflict) as refused:
            await session.set("city", "Bern", expect={"city": "Oslo"})
        assert refused.value.version == 4
        with pytest.raises(Conflict):
            await session.set("city", "Bern", expect_version=3)
        with pytest.raises(Conflict):
            await session.write(set={"city": "Bern"}, expect_exists=False)
        assert await session.set("city", "Bern", expect_version=4) == 5
        assert await session.set("soon", 1, ttl=0.01) == 6
        await until(lambda: _gone(session, "soon"), every=0.02)
        assert (await session.clear(), await session.get_all()) == (7, {})
        for bad in ({1: 2}, (1, 2), float("nan"), [b"x"]):
            with pytest.raises(InvalidValue):
                await session.set("bad", bad)
        assert [each.id for each in await store.sessions(user=f"u{id}", fresh=True)] == [id]


async def _gone(record: Any, key: str) -> bool:
    return not await record.has(key, fresh=True)


async def test_what_depends_on_what_a_field_holds(opens: Opens, id: str) -> None:
    async with opens() as store:
        user = store.user(id)
        assert [await user.increment("n"), await user.increment("n", -3), await user.increment("n", 0.5)] == [
            1,
            -2,
            -1.5,
        ]
        assert await user.increment("large", 10**30) == 10**30
        assert await user.append_to("list", 1, {"a": 2}) == 5
        assert await user.append_to("list", "x") == 6
        assert await user.update("map", {"a": 1, "b": {"c": 2}}) == 7
        assert await user.update("map", {"a": None}) == 8
        found = {"n": -1.5, "large": 10**30, "list": [1, {"a": 2}, "x"], "map": {"a": None, "b": {"c": 2}}}
        assert await user.get_all() == found
        for call in (user.increment("list"), user.update("list", {}), user.append_to("map", 1)):
            with pytest.raises(InvalidValue):
                await call
        assert [each.kind for each in await user.history(after=3)] == [
            "increment",
            "append_to",
            "append_to",
            *["update"] * 2,
        ]


async def test_what_cannot_be_is_refused(opens: Opens, id: str) -> None:
    async with opens() as store:
        session = store.session(id)
        await session.set("a", 1)
        for call in (
            lambda: session.history(limit=-1), lambda: session.history(limit="x"), lambda: session.at(version=1.5),
            lambda: session.at(version=True), lambda: session.at(version=-1), lambda: session.set("t", 1, ttl=math.inf),
            lambda: session.set("t", 1, ttl=True), lambda: session.get("a", max_staleness="x"),
            lambda: session.messages(max_staleness=-1), lambda: store.sessions(scope="none"),
            lambda: session.lock(wait=-1).acquire(), lambda: store.events("").next(),
            lambda: session.apply(lambda tx: tx.get("#phase")), lambda: session.apply(lambda tx: tx.tag("", "x")),
        ):  # fmt: skip
            with pytest.raises(InvalidValue):
                await call()
        assert await store.session(f"{id}-none").history() == []
        assert [each.id for each in await store.sessions(scope="user", prefix=id, fresh=True)] == []


async def test_messages(opens: Opens, id: str) -> None:
    async with opens() as store:
        session = store.session(id)
        assert await session.messages() == []
        odd = {"role": "user", "content": [{"type": "text", "text": "x"}], "number": 7, "timestamp": 1.5, "own": None}
        assert (
            await session.append(HI, Message(role="assistant", content="yes"), {"type": "reasoning", "summary": []})
            == 1
        )
        assert await session.append(odd) == 2
        found = await session.messages()
        assert [each.number for each in found] == [0, 1, 2, 3]
        assert [each.to_dict() for each in found][::3] == [HI, odd]
        assert found[0].timestamp is not None
        assert [each.number for each in await session.messages(last=2)] == [2, 3]
        assert [each.number for each in await session.messages(limit=2, order="desc", before=3)] == [2, 1]
        assert [each.number for each in await session.messages(limit=2, after=0)] == [1, 2]
        assert (await session.messages(after=0, limit=1))[0].content == "yes"
        assert await session.messages(after=8) == []
        popped = await session.pop_message()
        assert (popped.number, popped.to_dict()) == (3, odd)
        assert await session.replace_messages([{"role": "user", "content": "no"}], after=1, expect_last=2) == 4
        with pytest.raises(Conflict):
            await session.replace_messages([], after=3)
        raw = await session.raw_messages()
        assert [(each["number"], each.get("content")) for each in raw] == [(0, "hi"), (1, "yes"), (4, "no")]
        assert all(each["timestamp"] > 1e9 for each in raw)
        assert await session.replace_messages([]) == 5
        assert await session.pop_message() is None


async def test_writes_transactions_and_phases(opens: Opens, id: str) -> None:
    async with opens() as store:
        session = store.session(id)
        done = await session.write(
            set={"a": 1, "list": [1]}, increment={"n": 2}, append=[HI], tag={"run": ["r1", "r2"]}
        )
        assert (done.version, done.results, done.first_message) == (1, {"n": 2}, 0)
        assert (await session.write(untag={"run": "r1"}, delete=["n"])).version == 2
        assert await session.tags() == {"run": ("r2",)}
        async with session.transaction() as tx:
            assert (tx.version, sorted(tx)) == (2, ["a", "list"])
            tx["b"] = tx["a"] + 1
            tx["list"].append(2)
            tx.append({"role": "assistant", "content": "done"})
            del tx["a"]
        assert await session.get_all() == {"b": 2, "list": [1, 2]}
        with pytest.raises(Conflict):
            async with session.transaction() as tx:
                tx["b"] = 3
                await session.set("c", 1)
        assert await session.apply(lambda tx: tx.update(d=tx["b"]) or tx["b"]) == 2
        assert await session.apply(lambda tx: (tx.get("none", 0), "none" in tx, tx.pop("none", 1))) == (0, False, 1)
        async with session.transaction() as tx:
            tx.tag("run", "r3", "r4")
            tx.untag("run", "r3")
            tx.tag("none")
        assert await session.tags() == {"run": ("r2", "r4")}
        assert (await session.get("d"), len(await session.messages())) == (2, 2)
        assert await session.phase() is None
        with pytest.raises(InvalidTransition) as refused:
            await session.transition("no such event")
        assert refused.value.event == "no such event"
        event = DEFAULT.events(DEFAULT.initial)[0]
        following = await session.transition(event, set={"moved": True})
        assert (await session.phase(), await session.get("moved")) == (following, True)
        with pytest.raises(Conflict):
            await session.write(set={"x": 1}, expect_phase="elsewhere")


async def test_items(opens: Opens, id: str) -> None:
    async with opens() as store:
        session = store.session(id, user=f"u{id}")
        notes = session.items("notes")
        assert (await notes.list(), await notes.find("a"), await notes.get("a", 7)) == (ItemPage((), None), None, 7)
        assert await notes.put("a", {"n": 2**70}) == 1, "it begins the conversation, and its owner with it"
        assert [each.user for each in await store.sessions(prefix=id, fresh=True)] == [f"u{id}"]
        assert await notes.put_many({"b/../c": b"\xff", "ü": None, "b": [1]}) == 2
        assert [(each.key, each.value) for each in (await notes.list()).items] == [
            ("a", {"n": 2**70}), ("b", [1]), ("b/../c", b"\xff"), ("ü", None)
        ]  # fmt: skip
        page = await notes.list(limit=3)
        assert [each.key for each in (await notes.list(limit=3, after=page.next)).items] == ["ü"]
        back = await notes.list(limit=1, prefix="b", reverse=True)
        assert ([each.key for each in back.items], back.next) == (["b/../c"], "b/../c")
        found = await notes.find("b/../c")
        assert (found.collection, found.key, found.value, found.version) == ("notes", "b/../c", b"\xff", 2)
        assert (await notes.exists("ü"), await notes.get("ü", 1), await notes.exists(".."), notes.collection) == (
            True, None, False, "notes"
        )  # fmt: skip
        with pytest.raises(Conflict):
            await notes.put("a", 1, if_absent=True)
        with pytest.raises(Conflict):
            await notes.put("z", 1, if_present=True)
        with pytest.raises(Conflict):
            await notes.put_many({"z": 1, "a": 1}, if_absent=True)
        with pytest.raises(Conflict):
            await notes.delete("a", "z", if_present=True)
        assert await notes.delete("a", "z") == 3
        assert (await notes.exists("a"), await notes.get("a", version=2)) == (False, {"n": 2**70})
        with pytest.raises(NotFound):
            await notes.find("a", version=99)
        assert [each.kind for each in await session.history()] == ["put", "put", "delete"]
        assert session.items("others").collection == "others"
        assert (await session.items("others").list()).items == ()


@pytest.mark.wide
async def test_items_change_together_with_what_is_beside_them(opens: Opens, id: str) -> None:
    async with opens() as store:
        session = store.session(id)
        keep = PutItem(collection="notes", key="a", value=0, keep=True)
        done = await session.write(set={"n": 1}, items=[keep, PutItem(collection="x", key="b", value=b"b")])
        assert done.version == 1
        async with session.transaction() as tx:
            tx["n"] += 1
            tx.put_item("notes", "a", 5, keep=True)
            tx.put_item("notes", "c", 6, if_absent=True)
            tx.delete_item("x", "b", if_present=True)
        assert await session.version() == 2
        assert [(each.key, each.value) for each in (await session.items("notes").list()).items] == [("a", 0), ("c", 6)]
        assert (await session.items("x").list()).items == ()
        with pytest.raises(Conflict):
            async with session.transaction() as tx:
                tx["n"] = 9
                tx.delete_item("x", "b", if_present=True)
        assert await session.get("n") == 2
        with pytest.raises(InvalidValue):
            await session.write(items=[{"key": "a"}])
        with pytest.raises(InvalidValue):
            await session.items("notes").put("a", 1, if_absent=True, if_present=True)
        with pytest.raises(InvalidValue):
            await session.items("notes").put("a", {1})
        with pytest.raises(InvalidValue):
            session.items("")
        with pytest.raises(TooLarge):
            await session.items("notes").get("x" * 1025)


async def test_a_turn_is_one_commit_made_once(opens: Opens, id: str) -> None:
    async with opens() as store:
        session = store.session(id)
        await session.write(set={"gone": 1, "kept": 2}, tag={"run": "r0"})
        for repeated in (False, True):
            async with session.turn(request_id="r/å") as turn:
                assert turn.repeated is repeated
                if turn.repeated:
                    with pytest.raises(InvalidValue):
                        turn["late"] = 1
                    continue
                assert (turn.version, turn["kept"], turn.request_id) == (1, 2, "r/å")
                turn.append(HI, {"role": "assistant", "content": "Oslo."})
                turn["city"], turn["photo"] = "Oslo", b"\xff"
                del turn["gone"]
                turn.tag("run", "r1")
                turn.untag("run", "r0")
                turn.put_item("notes", "a", {"text": "rest"})
                assert turn.transition("new_task", machine=DEFAULT) == turn.phase
                turn.outcome = {"answer": "Oslo."}
            assert turn.outcome == {"answer": "Oslo."}
        assert turn.answered_version == 2
        assert await session.get_all() == {"kept": 2, "city": "Oslo", "photo": b"\xff"}
        assert await session.tags() == {"run": ("r1",)}
        assert await session.items("notes").get("a") == {"text": "rest"}
        assert [each.content for each in await session.messages()] == ["hi", "Oslo."]
        assert await session.phase() is not None
        assert [each.kind for each in await session.history()] == ["write", "turn"]


async def test_a_turn_begins_a_conversation_of_its_user(opens: Opens, id: str) -> None:
    async with opens() as store:
        async with store.session(id, user=f"u{id}").turn(request_id="first") as turn:
            assert (turn.repeated, turn.version) == (False, 0)
        async with store.session(id).turn() as turn:
            assert turn.version == 1
        assert [each.id for each in await store.sessions(user=f"u{id}", fresh=True)] == [id]
        assert await store.session(id).version(fresh=True) == 1, "nothing was changed, and there is no request to keep"


async def test_a_turn_that_raises_writes_nothing_and_ends(opens: Opens, id: str) -> None:
    async with opens() as store:
        session = store.session(id)
        with pytest.raises(ZeroDivisionError):
            async with session.turn(request_id="r1") as turn:
                turn["a"] = 1 / 0
        async with session.turn(request_id="r1", busy="reject") as turn:
            assert not turn.repeated
            async with store.session(id).turn(busy="reject"):
                pass  # of this task
            turn.outcome = [1]
        await session.delete("a")
        with pytest.raises(InvalidTransition):
            async with session.turn(request_id="r2") as turn:
                turn.transition("no_such_event")
        await store.delete(id)
        with pytest.raises(Deleted):
            async with session.turn():
                pass


async def test_a_turn_keeps_others_away_and_is_known_to_all(place: dict[str, str], workers: Any, id: str) -> None:
    direct = AsyncStateStore.open(place["url"], archive=place["archive"], namespace=place["namespace"])
    async with AsyncStateStore.open(workers[0].url) as remote, direct as store:
        async with remote.session(id).turn(request_id="over HTTP") as turn:
            with pytest.raises(LockTimeout):
                await store.session(id).turn(busy="reject").__aenter__()
            turn.outcome = 7
        for there, other, name in ((store, remote, "over HTTP"), (remote, store, "direct")):
            async with there.session(id).turn(request_id=name) as turn:
                assert turn.repeated is (name == "over HTTP")
                if not turn.repeated:
                    turn.outcome = 8
            async with other.session(id).turn(request_id=name) as turn:
                assert (turn.repeated, turn.outcome) == (True, 7 if name == "over HTTP" else 8)


async def test_a_repeated_turn_keeps_nobody_waiting(opens: Opens, id: str) -> None:
    async with opens() as store, opens() as other:
        async with store.session(id).turn(request_id="r") as turn:
            turn.outcome = {"digest": "d41d8cd98f00b204e9800998ecf8427e"}
        async with store.session(id).turn(request_id="r") as turn:
            async with other.session(id).lock(wait=0.0):
                pass
            with pytest.raises(InvalidValue, match="'r' was answered already"):
                turn["late"] = 1
        assert (turn.repeated, turn.outcome) == (True, {"digest": "d41d8cd98f00b204e9800998ecf8427e"})


async def test_a_turn_moves_to_a_phase(opens: Opens, id: str) -> None:
    async with opens() as store, store.session(id).turn() as turn:
        with pytest.raises(InvalidValue, match="not to None"):
            turn.move_to(None)


async def test_a_turn_that_another_answered_meanwhile_shows_its_outcome(
    place: dict[str, str], workers: Any, id: str
) -> None:
    """It lost its lease, and another holder served the same request."""
    direct = AsyncStateStore.open(place["url"], archive=place["archive"], namespace=place["namespace"])
    async with AsyncStateStore.open(workers[0].url) as remote, direct as store:
        async with remote.session(id).turn(request_id="r") as late:
            late["n"] = 1
            late.outcome = "late"
            (held,) = await store.admin.leases(prefix=id)
            assert await store.admin.end_lease(id, held.token)
            async with store.session(id).turn(request_id="r") as first:
                first.outcome = "first"
        assert (late.repeated, late.outcome, late.answered_version, late.written) == (True, "first", 1, None)
        assert await store.session(id).get_all(fresh=True) == {}


async def test_a_turn_is_sent_under_its_own_lease_wherever_it_ends(workers: tuple[Worker, Worker], id: str) -> None:
    async with AsyncStateStore.open(workers[0].url) as store:
        session = store.session(id)
        body = session.turn(request_id="r")
        turn = await asyncio.create_task(body.__aenter__(), context=Context())
        turn["n"] = 1
        (held,) = await store.admin.leases(prefix=id)
        await asyncio.create_task(body.__aexit__(None, None, None), context=Context())
        assert [(each.kind, each.token) for each in await session.history()] == [("turn", held.token)]


async def test_a_turn_whose_task_ended_commits_nothing(workers: tuple[Worker, Worker], id: str) -> None:
    async with AsyncStateStore.open(workers[0].url) as store:
        session = store.session(id)
        body = session.turn(ttl=1.0)
        turn = await asyncio.create_task(body.__aenter__())
        turn["n"] = 1
        async with session.lock(wait=20.0):
            pass  # it was given back, as its holder has ended
        with pytest.raises(Fenced):
            await body.__aexit__(None, None, None)
        assert await session.version() == 0


async def test_a_turn_inside_a_lock_that_was_released_commits_nothing(opens: Opens, id: str) -> None:
    async with opens() as store:
        session = store.session(id)
        lease = session.lock()
        await lease.acquire()
        with pytest.raises(Fenced):
            async with session.turn() as turn:
                turn["n"] = 1
                await lease.release()
        assert await session.version(fresh=True) == 0


async def test_a_task_that_outlives_a_lock_writes_without_it(opens: Opens, id: str) -> None:
    async with opens() as store:
        session, released = store.session(id), asyncio.Event()

        async def later() -> int:
            await released.wait()
            return int(await session.set("a", 1))

        lease = session.lock()
        await lease.acquire()
        child = asyncio.create_task(later())
        await lease.release()
        released.set()
        assert await child == 1


async def test_a_conflict_that_stays_is_asked_for_once(
    workers: tuple[Worker, Worker], id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    send = AsyncHttp.send

    async def noted(self: Any, method: str, path: str, *rest: Any) -> Any:
        sent.append(f"{method} {path}")
        return await send(self, method, path, *rest)

    async with AsyncStateStore.open(workers[0].url) as store:
        user = store.user(id)
        await user.write(set={"text": "a"}, items=[PutItem(collection="notes", key="a", value=1)])
        monkeypatch.setattr(AsyncHttp, "send", noted)
        with pytest.raises(Conflict):
            await user.items("notes").put("a", 2, if_absent=True)
        with pytest.raises(Conflict, match="does not hold an integer"):
            await user.write(increment={"text": 1})
    assert sent == [f"POST /v1/users/{id}/writes"] * 2


async def test_records_are_listed_by_a_tag_whose_key_has_a_colon(opens: Opens, id: str) -> None:
    async with opens() as store:
        for key in "a:b", "a", "a%3Ab":
            await store.session(f"{id}-{key}").write(tag={key: "b:c"})
            found = await store.sessions(prefix=id, tags={key: "b:c"}, fresh=True)
            assert [each.id for each in found] == [f"{id}-{key}"]


async def test_lifetimes(opens: Opens, id: str) -> None:
    async with opens() as store:
        session = store.session(id, user=f"u{id}")
        assert await session.lifetime() == Lifetime(None, None, None)
        assert await session.set_lifetime(idle=600.0, lifetime=1000) == 1
        lives = await session.lifetime()
        assert (lives.idle, round(lives.until - lives.ends, -1)) == (600.0, 400.0)
        assert await session.set_lifetime() == 2
        assert await session.lifetime() == Lifetime(None, None, None)
        with pytest.raises(InvalidValue):
            await session.set_lifetime(idle=0)
        assert [each.kind for each in await session.history()] == ["lifetime"] * 2


async def test_the_past(opens: Opens, id: str) -> None:
    async with opens() as store:
        session = store.session(id)
        await session.set("a", 1)
        await session.checkpoint("one")
        await session.set("a", b"two")
        await session.append(HI)
        assert [(each.label, each.version) for each in await session.checkpoints()] == [("one", 2)]
        assert await session.checkpoints(after=2) == await session.checkpoints(limit=0) == []
        assert [each.version for each in await session.checkpoints(before=9, limit=1, order="desc")] == [2]
        assert [(each.version, each.kind, each.set) for each in await session.history(after=1, limit=2)] == [
            (2, "checkpoint", {}), (3, "set", {"a": b"two"})
        ]  # fmt: skip
        then = await session.at(version=4)
        assert (then.fields, [each.to_dict() for each in then.messages], then.phase) == ({"a": b"two"}, [HI], None)
        assert await session.rollback(label="one") == 5
        assert await session.get("a") == 1
        assert await session.fork(f"{id}-b", version=4) >= 1
        assert await store.session(f"{id}-b").get("a") == b"two"
        with pytest.raises(Conflict):
            await session.fork(f"{id}-b")
        with pytest.raises(NotFound):
            await session.at(version=99)
        assert await store.admin.branches(session.id) == []
        lease = session.lock()
        await lease.acquire()
        found = [each for each in await store.admin.leases(prefix=id, scope="session") if each.record_id == id]
        assert [(each.token, each.waiters, each.waiting) for each in found] == [(lease.token, (), 0)]
        assert await store.admin.end_lease(id, lease.token + 1) is False
        assert await store.admin.end_lease(id, lease.token) is True
        with pytest.raises(Fenced):
            await session.set("a", 2)
        await lease.release()
        with pytest.raises(InvalidValue):
            await store.admin.end_lease(id, "1")
        await store.delete(id)
        with pytest.raises(Deleted):
            await session.set("a", 2)
        assert (await session.exists(), await session.get("a"), await session.version()) == (False, None, 6)
        with pytest.raises(Deleted):
            async with session.transaction() as tx:
                assert (dict(tx), tx.version) == ({}, 6)
                tx["a"] = 2
        assert await session.rollback(version=1) == 7
        assert (await store.erase(session.id), await session.exists()) == (True, False)


async def test_a_rollback_goes_one_step_back_or_to_the_last_checkpoint(opens: Opens, id: str) -> None:
    async with opens() as store:
        session = store.session(id)
        for number in (1, 2, 3):
            await session.set("n", number)
            if number == 1:
                await session.checkpoint("one")
        assert (await session.rollback(), await session.get("n")) == (5, 2)
        assert (await session.rollback(checkpoints=1), await session.get("n")) == (6, 1)
        with pytest.raises(NotFound):
            await session.rollback(checkpoints=2)


async def test_a_lock_keeps_others_away(opens: Opens, id: str) -> None:
    async with opens() as store, opens() as other:
        session = store.session(id)
        async with session.lock(ttl=30) as lease:
            assert lease.token > 0
            async with session.lock():
                assert await session.set("a", 1) == 1
            assert await session.append(HI) == 2
            with pytest.raises(NotFound):
                await store.admin.drop_branch(session.id, "none")
            user = store.user(id)
            await user.set("a", 1)
            async with user.lock(), user.transaction() as tx:  # as a turn: all at its end, or nothing
                tx["a"] += 1
            assert (await store.delete(id, scope="user"), await store.erase(id, scope="user")) == (3, True)
            # In a task of another context, as another caller is.
            with pytest.raises(Locked):
                await asyncio.create_task(other.session(id).set("a", 2), context=Context())
            with pytest.raises(LockTimeout):
                await asyncio.create_task(_locked(other.session(id)), context=Context())
        assert await other.session(id).set("a", 3) == 3
        assert [each.token for each in await session.history()] == [lease.token, lease.token, 0]


async def _locked(record: Any) -> None:
    async with record.lock(wait=0.05):
        pass


async def test_events_come_and_none_is_missed(opens: Opens, id: str) -> None:
    async with opens() as store:
        session = store.session(id)
        async with store.events("session.*") as events:
            await session.checkpoint("first")
            event = await _next(events, session)
            assert (event.type, event.conversation_id, event.data) == ("session.checkpoint", id, {"label": "first"})
            assert await events.next(timeout=0.01) is None
            position = events.position
            await session.checkpoint(odd := "second\x85\u2028\r\n" + "é" * 100)  # no end of a line, or escaped
            assert (await _next(events, session)).data == {"label": odd}
        async with store.events("session.*", since=position) as again:
            assert (await _next(again, session)).data == {"label": odd}


@pytest.mark.parametrize("close", ["events", "store"])
def test_blocking_code_waits_on_one_stream_whose_thread_ends_with_it(workers: Any, id: str, close: str) -> None:
    with StateStore.open(workers[0].url) as store:
        events = store.events("session.*").__enter__()
        stream = events._core._source._lines
        for label in "ab":
            for _ in range(3):
                assert events.next(timeout=0.005) is None
            store.session(id).checkpoint(label)
            event = events.next(timeout=10.0)
            assert event is not None
            assert event.data == {"label": label}
        assert events._core._source._lines is stream
        {"events": events, "store": store}[close].close()
        assert not stream._reader.is_alive()


async def test_a_store_that_closes_ends_its_streams(workers: tuple[Worker, Worker]) -> None:
    async with AsyncStateStore.open(workers[0].url) as store:
        events = store.events("none.*")
        await events.join()
        waiting = asyncio.create_task(events.next())
        await asyncio.sleep(0)
    with pytest.raises(StateError, match="this store is closed"):
        await asyncio.wait_for(waiting, 10)


async def _next(events: Any, session: Any) -> Any:
    """The next event of this session: other tests have theirs."""
    while True:
        event = await events.next(timeout=10.0)
        assert event is not None
        if event.conversation_id == session.id:
            return event


# Faults


@pytest.mark.wide
def test_increments_through_two_workers_are_all_counted(workers: tuple[Worker, Worker], id: str) -> None:
    def add(url: str) -> None:
        with StateStore.open(url) as store:
            for _ in range(10):
                store.user(id).increment("n")

    threads = [threading.Thread(target=add, args=(each.url,)) for each in workers * 2]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    with StateStore.open(workers[0].url) as store:
        assert store.user(id).get("n", fresh=True) == 40


CHANGES: dict[str, Callable[[Any], Any]] = {
    "append": lambda session: session.append({"role": "user", "content": "again"}),
    "increment": lambda session: session.increment("n"),
    "append_to": lambda session: session.append_to("list", 1),
    "write": lambda session: session.write(increment={"n": 1}, append=[HI]),
    "pop_message": lambda session: session.pop_message(),
    "checkpoint": lambda session: session.checkpoint("x"),
    "rollback": lambda session: session.rollback(version=1),
    "put": lambda session: session.items("notes").put("a", 1),
    "set_lifetime": lambda session: session.set_lifetime(idle=600),
}


def _without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    send = BlockingHttp.send

    async def keyless(self: Any, method: str, path: str, headers: Any, body: Any, timeout: float) -> Any:
        given = {name: value for name, value in headers.items() if name != KEY}
        return await send(self, method, path, given, body, timeout)

    monkeypatch.setattr(BlockingHttp, "send", keyless)


@pytest.mark.parametrize("name", CHANGES)
def test_a_write_whose_answer_is_lost_is_applied_once(workers: tuple[Worker, Worker], id: str, name: str) -> None:
    """It comes again, to another worker, under its key."""
    assert _versions_of(workers, id, name) == [2, 3, 4]


@pytest.mark.parametrize("name", ["append", "rollback"])
def test_without_its_key_it_would_be_applied_twice(
    workers: tuple[Worker, Worker], id: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The control of the test above."""
    _without_keys(monkeypatch)
    assert len(_versions_of(workers, id, name)) == 5


@pytest.mark.parametrize("keys", [True, False], ids=["with its key", "control: without"])
def test_a_fork_whose_answer_is_lost_is_made_once(
    workers: tuple[Worker, Worker], id: str, monkeypatch: pytest.MonkeyPatch, keys: bool
) -> None:
    """It comes again at another worker, which knows by its key that it is no fork onto a record that is there."""
    with Proxy(workers[0].url) as line, StateStore.open(line.url) as store:
        session = store.session(id)
        session.set("a", 1)
        if not keys:
            _without_keys(monkeypatch)
        loss = losing(line, partial(line.lead_to, workers[1].url))
        if keys:
            version = session.fork(f"{id}-b")
            assert [each.version for each in store.session(f"{id}-b").history()][-1:] == [version]
        else:
            with pytest.raises(Conflict):
                session.fork(f"{id}-b")
        assert loss.happened.is_set()
        assert store.session(f"{id}-b").get("a") == 1


@pytest.mark.parametrize("keys", [True, False], ids=["with its key", "control: without"])
def test_a_turn_whose_answer_is_lost_is_made_once(
    workers: tuple[Worker, Worker], id: str, monkeypatch: pytest.MonkeyPatch, keys: bool
) -> None:
    if not keys:
        _without_keys(monkeypatch)
    with Proxy(workers[0].url) as line, StateStore.open(line.url) as store:
        session = store.session(id)
        session.set("a", 1)
        loss = losing(line, partial(line.lead_to, workers[1].url), b"/turns HTTP")
        with session.turn(request_id="r1" if keys else None) as turn:
            turn.append(HI)
        assert loss.happened.is_set()
        assert [each.kind for each in session.history(after=1)] == ["turn"] * (1 if keys else 2)


def test_a_key_of_another_request_is_refused(workers: tuple[Worker, Worker], id: str) -> None:
    with httpx.Client(base_url=f"{workers[0].url}/v1/users/{id}", headers={KEY: "k"}) as http:
        asked = [http.post("/changes", json={"key": "n", "add": by}).json() for by in (1, 1, 2)]
    assert [each.get("sum") for each in asked] == [1, 1, None]
    assert [each.get("repeated") for each in asked] == [False, True, None]
    assert asked[2]["status"] == 422


def losing(line: Proxy, then: Callable[[], None], needle: bytes = b"/v1/conversations/") -> Loss:
    """Lose the answer to the next write; `then` happens before its client notices."""
    loss = line.lose(needle)

    def cut() -> None:
        loss.happened.wait(60)
        then()
        loss.go.set()

    threading.Thread(target=cut, daemon=True).start()
    return loss


def _versions_of(workers: tuple[Worker, Worker], id: str, name: str) -> list[int]:
    """What the history shows behind the first version of a change that was made three times, losing two answers."""
    with Proxy(workers[0].url) as line, StateStore.open(line.url) as store:
        session = store.session(id)
        session.append(*[HI] * 9)
        for worker in workers[::-1]:
            loss = losing(line, partial(line.lead_to, worker.url))
            CHANGES[name](session)
            assert loss.happened.is_set()
        CHANGES[name](session)
        return [each.version for each in session.history(after=1)]


@pytest.mark.wide
def test_messages_that_are_too_much_for_one_answer_come_in_several(workers: tuple[Worker, Worker], id: str) -> None:
    with StateStore.open(workers[0].url) as store:
        session = store.session(id)
        for number in range(20):
            session.append({"role": "user", "content": str(number) + "x" * 900_000})
        found = [each["content"].rstrip("x") for each in session.raw_messages()]
        assert found == [str(number) for number in range(20)]


@pytest.mark.wide
def test_a_worker_that_is_killed_in_the_middle_is_replaced_by_another(
    place: dict[str, str], workers: Any, id: str
) -> None:
    with Serving(place) as dying, Proxy(dying.url) as line, StateStore.open(line.url) as store:
        session = store.session(id)
        session.set("a", 1)

        def die() -> None:
            dying.kill()
            line.lead_to(workers[0].url)

        loss = losing(line, die)
        assert session.increment("n") == 1
        assert (session.get("n"), session.version(), loss.happened.is_set()) == (1, 2, True)


async def test_events_go_on_behind_a_broken_line(workers: tuple[Worker, Worker], id: str) -> None:
    with Proxy(workers[0].url) as line:
        async with AsyncStateStore.open(line.url) as store, store.events("session.*") as events:
            session = store.session(id)
            for label in "abc":
                await session.checkpoint(label)
            assert (await _next(events, session)).data == {"label": "a"}
            line.lead_to(workers[1].url)
            assert line.cut() == 2
            await session.checkpoint("d")
            assert [(await _next(events, session)).data["label"] for _ in range(3)] == ["b", "c", "d"]


@pytest.mark.wide
def test_a_lease_that_ended_refuses_what_is_written_under_it(workers: tuple[Worker, Worker], id: str) -> None:
    with StateStore.open(workers[0].url) as store, StateStore.open(workers[1].url) as other:
        session = store.session(id)
        session.set("a", 1)
        with session.lock(ttl=1.0) as lease:
            assert lease.renew()
            lease._core._stop()  # as if this process were frozen
            with other.session(id).lock(wait=10.0), pytest.raises(Fenced):
                session.set("a", 2)
            assert not lease.renew()
            assert lease.lost
            with pytest.raises(Fenced), session.transaction() as tx:
                tx["a"] = 2
        assert (session.get("a"), session.version()) == (1, 1)


@pytest.mark.wide
def test_a_token_says_who_asks_and_what_for(place: dict[str, str], id: str) -> None:
    """A tenant's id is refused to others, and a stranger gets nothing, by the errors of the direct store."""
    made = [access_tokens.make() for _ in range(3)]
    with StateStore.open(**place) as direct:
        tokens = direct.aio._lifecycle.tiers().cold.access_tokens
        for (each, text), rights in zip(made, (("read", "write"), ("read",), ("write",)), strict=True):
            tokens.add(each, access_tokens.digest(text), prefix=id, rights=rights, actor="ada", seconds=60)
    (_, mine), (_, reader), (_, writer) = made
    with Serving(place, "--tokens") as worker:
        for stranger in (None, access_tokens.make()[1]):
            with pytest.raises(Unauthenticated):
                StateStore.open(worker.url, token=stranger)
        with StateStore.open(worker.url, token=mine) as store:
            session = store.session()
            assert session.id.startswith(id)
            assert session.set("a", 1) == 1
            assert session.history()[0].actor == "ada"
            for call in (
                lambda: store.session("other").get("a"), lambda: store.session("other").set("a", 1),
                lambda: store.session("other").increment("a"), lambda: store.session("other").pop_message(),
                lambda: store.session("other").messages(), lambda: store.session("other").lock().__enter__(),
                lambda: store.admin.compact(), lambda: store.admin.purge(), lambda: store.admin.replicas(),
                lambda: store.erase(session.id),
            ):  # fmt: skip
                with pytest.raises(AccessDenied):
                    call()
            with StateStore.open(worker.url, token=reader) as other:
                assert other.session(session.id).get("a") == 1
                with pytest.raises(AccessDenied):
                    other.session(session.id).append(HI)
            with StateStore.open(worker.url, token=writer) as other:
                assert other.session(session.id).append(HI) == 2
                for name in ("get", "increment"):
                    with pytest.raises(AccessDenied):
                        getattr(other.session(session.id), name)("a")


def test_nobody_there_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(Unavailable):
        StateStore.open(url, retry_for=0.1)


def test_a_path_that_nobody_serves_is_no_missing_record(workers: tuple[Worker, Worker]) -> None:
    with pytest.raises(ConfigurationError):
        StateStore.open(f"{workers[0].url}/elsewhere")


# Values

_TEXT = st.text(max_size=20)
_SCALAR = st.none() | st.booleans() | st.integers() | st.integers(-(10**60), 10**60) | _TEXT
_JSON = st.recursive(
    _SCALAR | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=12,
)
_FIELDS = st.dictionaries(
    st.text(min_size=1, max_size=20).filter(lambda name: name[0] != "#"),
    _JSON | st.binary(max_size=50),
    min_size=1,
    max_size=4,
)


def test_values_come_back_as_they_went(workers: tuple[Worker, Worker], place: dict[str, str], id: str) -> None:
    """Through the service they are what they are on the direct store, of the same types."""
    written: list[dict[str, Any]] = []
    with StateStore.open(workers[0].url) as remote:

        @given(fields=_FIELDS)
        @settings(max_examples=20, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
        def round_trip(fields: dict[str, Any]) -> None:
            user = remote.user(f"{id}-{len(written)}")
            written.append(fields)
            user.set_many(fields)
            assert _same(user.get_all(), fields)
            for key, value in fields.items():
                assert _same(user.get(key), value)

        round_trip()
    with StateStore.open(**place) as direct:
        for number, fields in enumerate(written):
            assert _same(direct.user(f"{id}-{number}").get_all(), fields)


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other) if not isinstance(one, dict) else (
        one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    )  # fmt: skip


# What is not there


DIRECT = {"store": AsyncStateStore, "session": AsyncSession, "user": AsyncRecord, "items": AsyncItems}


@pytest.mark.parametrize("kind", DIRECT)
def test_a_name_of_the_direct_store_is_there_or_says_what_to_use(workers: tuple[Worker, Worker], kind: str) -> None:
    with StateStore.open(workers[0].url) as store:
        session = store.session("x")
        there = {"store": store, "session": session, "user": store.user("x"), "items": session.items("x")}[kind]
        absent = [name for name in dir(DIRECT[kind]) if name[0] != "_" and name not in dir(there)]
        assert absent
        for name in absent:
            with pytest.raises(ConfigurationError, match=f"{name} is not available on a remote store: "):
                getattr(there, name)
        with pytest.raises(AttributeError):
            there.no_such_name


def test_what_to_use_in_place_of_a_name_is_said_of_names_that_are_not_there() -> None:
    remote = (AsyncRemoteStore, AsyncRemoteSession, AsyncRemoteRecord, AsyncRemoteItems)
    names = {name for kind in DIRECT.values() for name in dir(kind)}
    assert names >= values.INSTEAD.keys()
    assert not {name for kind in remote for name in dir(kind)} & values.INSTEAD.keys()


# Sessions that expired


@pytest.mark.parametrize("begins", [False, True])
async def test_somebody_returns_to_a_session_that_expired_behind_a_service(
    place: dict[str, str], namespace: str, id: str, begins: bool
) -> None:
    told = {"expired": "begin again"} if begins else {}
    there = {**place, "namespace": namespace}
    with served(**there, service=Service(), session_idle=0.05, sweep=0.02, **told) as http:
        async with AsyncStateStore.open(str(http.base_url)) as store:
            session = store.session(id)

            async def expires() -> None:
                await until(lambda: _expired(session), 20)

            async def turn(**options: Any) -> None:
                async with session.turn(request_id=uuid.uuid4().hex, **options) as turn:
                    assert dict(turn) == {}
                    turn.append(HI)

            await session.set("city", "Oslo")
            for write in (lambda: session.set("a", 1), lambda: session.append(HI), turn):
                await expires()
                if begins:
                    await write()
                    continue
                with pytest.raises(Deleted, match=r"expired at .*session_idle") as caught:
                    await write()
                assert caught.value.expired == pytest.approx(time.time(), abs=60)
            await expires()
            await session.append(HI, revive=True)
            await expires()
            await turn(revive=True)
            await expires()
            await store.delete(id)
            for write in (lambda: session.set("a", 1), lambda: session.append(HI), turn):
                with pytest.raises(Deleted) as caught:
                    await write()
                assert caught.value.expired is None
            path = f"/v1/conversations/{id}"
            assert http.post(f"{path}/messages", json={"messages": [HI]}).status_code == 410
            assert http.post(f"{path}/messages", json={"messages": [HI], "revive": True}).status_code == 201
            await expires()
            assert http.post(f"{path}/messages", json={"messages": [HI]}).status_code == (201 if begins else 410)


async def _expired(session: Any) -> bool:
    return not await session.exists(fresh=True)
