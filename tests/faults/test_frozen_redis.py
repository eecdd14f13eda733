"""Redis stands still. Law: each call is answered within `retry_for`, whatever it asks, and so is each HTTP operation.

Every public coroutine method is called, on either API, and every operation that is described: those that the tables
here do not know are noticed.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import generate_blocking
import pytest
from below import own_server, said, server_binary, until
from pydantic import BaseModel
from tenants import OPERATIONS, Served, body_of, path_of

from distributed_state import AgentState, AsyncStateStore, PutItem, StateError, WarmUnavailable, Workflow, tool
from distributed_state.programs.servers import redis_cluster, redis_sentinel, redis_server
from distributed_state.programs.service import Access, callers_policy
from distributed_state.values.access_tokens import RIGHTS

RETRY_FOR, AT_MOST, MAX_STALENESS = 0.5, 1.5, 0.2
GIVEN = {"retry_for": RETRY_FOR, "max_staleness": MAX_STALENESS, "partitions": 4, "durability": "memory"}
AT_ONCE = 8
CROWD = 60  # requests at once, which have room for four
ROUNDS = 6  # for those that were late: on a busy machine one may be so by chance
pytestmark = [pytest.mark.only(warm="single"), pytest.mark.timeout(180)]
Called = Callable[[], Awaitable[Any]]


class Trip(BaseModel):
    city: str = ""


def put(value: int) -> PutItem:
    return PutItem(collection="seats", key="1", value=value)


class Place:
    """What one call is about: a session of its own, which was written, and the store."""

    def __init__(self, opener: Any, store: Any, name: str) -> None:
        self.opener, self.store, self.id = opener, store, name
        self.session = store.session(name, user=f"u{name}")
        self.typed = store.session(f"typed {name}", schema=Trip)
        self.items = self.session.items("seats")
        self.made: Any = None
        self.entered: Any = None

    async def write(self, retrying: Any) -> None:
        """Through a store that has time: on a busy machine half a second is little."""
        session = retrying.session(self.id, user=f"u{self.id}")
        await session.write(set={"a": 1, "o": {}, "l": []}, append=[said("hi")], items=[put(1)])
        await session.checkpoint("here")
        await session.set("a", 2)  # something to archive
        await retrying.session(self.typed.id, schema=Trip).create(Trip())

    async def opened(self, name: str) -> bool:
        """Whether what the call is inside of is open now."""
        make = INSIDE.get(name) or INSIDE.get(name.partition(".")[0] + ".")
        try:
            if make is not None:
                self.made = make(self)
            if inspect.isawaitable(self.made):
                self.made = await self.made
            elif make is not None and not name.endswith(("__aenter__", "acquire")):
                self.entered = await self.made.__aenter__()
        except WarmUnavailable:
            return False
        return True


@tool
def nothing(state: Any) -> str:
    return "nothing"


INSIDE: dict[str, Callable[[Place], Any]] = {
    "AsyncLease.": lambda at: at.session.lock(ttl=120),
    "AsyncLease.acquire": lambda at: at.store.user(at.id).lock(ttl=120),
    "AsyncTransaction.": lambda at: at.session.transaction(),
    "AsyncTurn.": lambda at: at.session.turn(request_id="r", ttl=120),
    "AsyncEdit.": lambda at: at.typed.edit(),
    "AsyncBatch.": lambda at: at.store.batch(),
    "AsyncEvents.": lambda at: at.store.events("note.*"),
    "AsyncOutput.": lambda at: at.session.output("r"),
    "AsyncStoppable.": lambda at: at.session.turn(ttl=120).stoppable(),
    "AsyncStateStore.close": lambda at: at.opener(url=at.opener.url, **GIVEN),
    "AsyncStateStore.__aexit__": lambda at: at.opener(url=at.opener.url, **GIVEN),
    "AsyncAdmin.import_": lambda at: at.store.admin.export(at.id),
}
END = (None, None, None)


async def changed(at: Place) -> None:
    at.entered["a"] = 2
    await at.made.__aexit__(*END)


async def flushed(at: Place) -> None:
    await at.entered.stream("x")
    await at.entered.flush()


async def edited(at: Place) -> None:
    at.entered.city = "Oslo"
    await at.made.__aexit__(*END)


async def batched(at: Place) -> None:
    at.entered.on(at.session).set("a", 2)
    at.entered.on(at.store.user(at.id)).set("a", 2)
    await at.made.__aexit__(*END)


CALLS: dict[str, Callable[[Place], Awaitable[Any]]] = {
    "AsyncRecord.get": lambda at: at.session.get("a"),
    "AsyncRecord.has": lambda at: at.session.has("a"),
    "AsyncRecord.get_all": lambda at: at.session.get_all(fresh=True),
    "AsyncRecord.view": lambda at: at.session.view(),
    "AsyncRecord.version": lambda at: at.session.version(),
    "AsyncRecord.exists": lambda at: at.session.exists(),
    "AsyncRecord.tags": lambda at: at.session.tags(),
    "AsyncRecord.set": lambda at: at.session.set("a", 2, ttl=60, expect={"a": 1}),
    "AsyncRecord.set_many": lambda at: at.session.set_many({"a": 2}),
    "AsyncRecord.delete": lambda at: at.session.delete("a"),
    "AsyncRecord.clear": lambda at: at.session.clear(),
    "AsyncRecord.update": lambda at: at.session.update("o", {"a": 1}),
    "AsyncRecord.append_to": lambda at: at.session.append_to("l", 1),
    "AsyncRecord.increment": lambda at: at.session.increment("a", 0.5),
    "AsyncRecord.write": lambda at: at.session.write(set={"a": 2}, items=[put(2)], durability="archived"),
    "AsyncRecord.create": lambda at: at.store.task(f"new {at.id}").create({"a": 1}),
    "AsyncRecord.apply": lambda at: at.session.apply(lambda tx: tx.update(a=2)),
    "AsyncRecord.initialize": lambda at: at.session.initialize({"b": 1}),
    "AsyncRecord.export_state": lambda at: at.session.export_state(messages=True),
    "AsyncRecord.restore_state": lambda at: at.session.restore_state({"fields": {"a": 3}}),
    "AsyncAdmin.cleanup": lambda at: at.store.admin.cleanup(at.session.id, days=1),
    "AsyncRecord.history": lambda at: at.session.history(),
    "AsyncRecord.at": lambda at: at.session.at(version=1),
    "AsyncAdmin.drop_branch": lambda at: at.store.admin.drop_branch(at.session.id, "none"),
    "AsyncRecord.checkpoint": lambda at: at.session.checkpoint("there"),
    "AsyncRecord.checkpoints": lambda at: at.session.checkpoints(),
    "AsyncRecord.rollback": lambda at: at.session.rollback(label="here"),
    "AsyncRecord.fork": lambda at: at.session.fork(f"fork {at.id}"),
    "AsyncItems.get": lambda at: at.items.get("1"),
    "AsyncItems.find": lambda at: at.items.find("1"),
    "AsyncItems.get_many": lambda at: at.items.get_many(["1"]),
    "AsyncItems.find_many": lambda at: at.items.find_many(["1"]),
    "AsyncItems.exists": lambda at: at.items.exists("1"),
    "AsyncItems.list": lambda at: at.items.list(),
    "AsyncItems.put": lambda at: at.items.put("2", 2),
    "AsyncItems.put_many": lambda at: at.items.put_many({"2": 2}),
    "AsyncItems.put_missing": lambda at: at.items.put_missing({"2": 2}),
    "AsyncItems.delete": lambda at: at.items.delete("1"),
    "AsyncSession.append": lambda at: at.session.append(said("there")),
    "AsyncSession.messages": lambda at: at.session.messages(),
    "AsyncSession.raw_messages": lambda at: at.session.raw_messages(fresh=True),
    "AsyncSession.pop_message": lambda at: at.session.pop_message(),
    "AsyncSession.replace_messages": lambda at: at.session.replace_messages([said("anew")]),
    "AsyncSession.window": lambda at: at.session.window(max_tokens=100),
    "AsyncSession.phase": lambda at: at.session.phase(),
    "AsyncSession.transition": lambda at: at.session.transition("planning"),
    "AsyncSession.context": lambda at: at.session.context(),
    "AsyncSession.load_state": lambda at: at.session.load_state(),
    "AsyncSession.save_state": lambda at: at.session.save_state(AgentState(session_id=at.id)),
    "AsyncSession.switch": lambda at: at.session.switch(),
    "AsyncSession.lifetime": lambda at: at.session.lifetime(),
    "AsyncSession.set_lifetime": lambda at: at.session.set_lifetime(idle=60),
    "AsyncSession.call": lambda at: at.session.call(nothing, {}, call_id="c"),
    "AsyncTypedRecord.load": lambda at: at.typed.load(fresh=True),
    "AsyncTypedRecord.create": lambda at: at.store.task(f"typed {at.id}", schema=Trip).create(Trip()),
    "AsyncTypedRecord.modify": lambda at: at.typed.modify(lambda trip: Trip(city="Oslo")),
    "AsyncTypedRecord.is_older": lambda at: at.typed.is_older(),
    "AsyncTypedRecord.upcast": lambda at: at.typed.upcast(),
    "AsyncLease.acquire": lambda at: at.made.acquire(),
    "AsyncLease.release": lambda at: at.entered.release(),
    "AsyncLease.__aenter__": lambda at: at.made.__aenter__(),
    "AsyncLease.__aexit__": lambda at: at.made.__aexit__(*END),
    "AsyncTransaction.__aenter__": lambda at: at.made.__aenter__(),
    "AsyncTransaction.__aexit__": changed,
    "AsyncTurn.messages": lambda at: at.entered.messages(),
    "AsyncTurn.window": lambda at: at.entered.window(max_tokens=100),
    "AsyncTurn.load_state": lambda at: at.entered.load_state(),
    "AsyncTurn.save_state": lambda at: at.entered.save_state(AgentState(session_id=at.id)),
    "AsyncTurn.call": lambda at: at.entered.call(nothing, {}, call_id="c"),
    "AsyncTurn.__aenter__": lambda at: at.made.__aenter__(),
    "AsyncTurn.__aexit__": changed,
    "AsyncEdit.__aenter__": lambda at: at.made.__aenter__(),
    "AsyncEdit.__aexit__": edited,
    "AsyncBatch.__aenter__": lambda at: at.made.__aenter__(),
    "AsyncBatch.__aexit__": batched,
    "AsyncTurn.stream": lambda at: at.entered.stream("x"),
    "AsyncTurn.flush": flushed,
    "AsyncSession.stop": lambda at: at.session.stop(wait=0),
    "AsyncSession.post": lambda at: at.session.post({"role": "user"}, request_id="r"),
    "AsyncSession.inbox": lambda at: at.session.inbox(),
    "AsyncSession.withdraw": lambda at: at.session.withdraw(1),
    "AsyncSession.wake": lambda at: at.session.wake("there", after=60, handler="a"),
    "AsyncSession.wakes": lambda at: at.session.wakes(),
    "AsyncSession.usage": lambda at: at.session.usage(fresh=True),
    "AsyncSession.cancel_wake": lambda at: at.session.cancel_wake("none"),
    "AsyncSession.retry": lambda at: at.session.retry(),
    "AsyncSession.answer": lambda at: at.session.answer("yes"),
    "AsyncTurn.arrived": lambda at: at.entered.arrived(),
    "AsyncOutput.next": lambda at: at.entered.next(timeout=0.1),
    "AsyncOutput.close": lambda at: at.made.close(),
    "AsyncOutput.__aenter__": lambda at: at.made.__aenter__(),
    "AsyncOutput.__aexit__": lambda at: at.made.__aexit__(*END),
    "AsyncStoppable.__aenter__": lambda at: at.made.__aenter__(),
    "AsyncStoppable.__aexit__": lambda at: at.made.__aexit__(*END),
    "AsyncEvents.next": lambda at: at.entered.next(timeout=0.1),
    "AsyncEvents.close": lambda at: at.made.close(),
    "AsyncEvents.__aenter__": lambda at: at.made.__aenter__(),
    "AsyncEvents.__aexit__": lambda at: at.made.__aexit__(*END),
    "AsyncStateStore.__aenter__": lambda at: at.opener(url=at.opener.url, **GIVEN),
    "AsyncStateStore.__aexit__": lambda at: at.made.__aexit__(*END),
    "AsyncStateStore.close": lambda at: at.made.close(),
    "AsyncStateStore.time": lambda at: at.store.time(),
    "AsyncStateStore.get_many": lambda at: at.store.get_many([at.session, at.typed], fresh=True),
    "AsyncStateStore.run": lambda at: at.store.run(Workflow({"planning": lambda s, t: s}), "?", session_id=f"r{at.id}"),
    "AsyncStateStore.delete": lambda at: at.store.delete(at.id),
    "AsyncStateStore.erase": lambda at: at.store.erase(at.id),
    "AsyncStateStore.sessions": lambda at: at.store.sessions(),
    "AsyncStateStore.asks": lambda at: at.store.asks(),
    "AsyncStateStore.usage": lambda at: at.store.usage(fresh=True),
    "AsyncAdmin.branches": lambda at: at.store.admin.branches(),
    "AsyncAdmin.export": lambda at: at.store.admin.export(at.id),
    "AsyncAdmin.import_": lambda at: at.store.admin.import_(at.made, id=f"i{at.id}"),
    "AsyncAdmin.reencrypt": lambda at: at.store.admin.reencrypt(),
    "AsyncAdmin.repair": lambda at: at.store.admin.repair(),
    "AsyncAdmin.compact": lambda at: at.store.admin.compact(),
    "AsyncAdmin.purge": lambda at: at.store.admin.purge(keep_changes=1000),
    "AsyncStateStore.forget": lambda at: at.store.forget(f"u{at.id}"),
    "AsyncAdmin.upcast": lambda at: at.store.admin.upcast(Trip, scope="task"),
    "AsyncAdmin.archive": lambda at: at.store.admin.archive(),
    "AsyncAdmin.doctor": lambda at: at.store.admin.doctor(),
    "AsyncAdmin.stats": lambda at: at.store.admin.stats(),
    "AsyncStateStore.search": lambda at: at.store.search("hi"),
    "AsyncAdmin.update_index": lambda at: at.store.admin.update_index(),
    "AsyncAdmin.remove_index": lambda at: at.store.admin.remove_index(),
    "AsyncStateStore.emit": lambda at: at.store.emit("note.made"),
    "AsyncStateStore.activate_agent": lambda at: at.store.activate_agent("a", client="c"),
    "AsyncStateStore.change_directory": lambda at: at.store.change_directory("/a", client="c"),
    "AsyncStateStore.off": lambda at: at.store.off(print),
    "AsyncStateStore.ready": lambda at: at.store.ready(),
    "AsyncAdmin.replicas": lambda at: at.store.admin.replicas(),
    "AsyncAdmin.leases": lambda at: at.store.admin.leases(),
    "AsyncAdmin.end_lease": lambda at: at.store.admin.end_lease(at.id, 1),
    "AsyncAdmin.reload_config": lambda at: at.store.admin.reload_config({"a": 1}),
    "AsyncAdmin.audit": lambda at: at.store.admin.audit(),
}  # fmt: skip
# Not the caller's to wait for: the next event is, however long there is none.
WITHOUT_END = {"AsyncEvents.__anext__", "AsyncOutput.__anext__", "AsyncStateStore.work"}


def classes() -> list[type]:
    """Those of which the sync API is made, a remote store's and an agent's apart, which ask by others."""
    entries = [each for file in generate_blocking.FILES if file.module.startswith("store.") for each in file.classes]
    found = [generate_blocking.classes_of(entry)[:2] for entry in entries]
    return [getattr(importlib.import_module(module), name) for module, name in found]


def methods() -> dict[str, Any]:
    """The public coroutine methods, and the entrances and exits of `async with`, with those of bases without an API."""
    inner = generate_blocking.INNER
    apis = classes()
    own = {
        kind: {name for base in kind.__mro__[:-1] if base is kind or base not in apis for name in vars(base)}
        for kind in apis
    }
    return {
        f"{kind.__name__}.{name}": each
        for kind in apis
        for name, each in ((name, getattr(kind, name)) for name in own[kind])
        if inspect.iscoroutinefunction(each)
        and (name[0] != "_" or name.startswith("__a"))
        and name not in inner.get(kind.__name__, ())
    }


def test_every_public_method_is_called_here() -> None:
    assert methods().keys() - WITHOUT_END == CALLS.keys()


@asynccontextmanager
async def standing_still(server: Any, fault: str = "frozen") -> AsyncIterator[None]:
    if fault == "frozen":
        server.pause()
    else:
        server.kill()
    try:
        await asyncio.sleep(2 * MAX_STALENESS)  # what hot holds is too old by then
        yield
    finally:
        if fault == "frozen":
            server.resume()


async def timed(call: Callable[[], Awaitable[Any]], few: asyncio.Semaphore) -> tuple[float, Any]:
    async with few:
        began = time.monotonic()
        try:
            found = await call()
        except StateError as error:
            found = error
        return time.monotonic() - began, found


async def opened(opener: Any, **more: Any) -> Any:
    with suppress(WarmUnavailable):
        return await opener(search=True, **GIVEN | more)
    return None


async def how_long(opener: Any, server: Any, names: list[str], **more: Any) -> dict[str, tuple[float, Any]]:
    """How long each call took while Redis stood still, and what came of it."""
    opener.url = server.url
    store = await until(lambda: opened(opener, **more))
    retrying = await opener(**GIVEN | {"retry_for": 30.0})
    places = {name: Place(opener, store, uuid.uuid4().hex) for name in names}
    for place in places.values():
        await place.write(retrying)
    for name, place in places.items():
        await until(lambda: place.opened(name))  # noqa: B023 - it is waited for
    few = asyncio.Semaphore(AT_ONCE)
    async with standing_still(server):
        calls = [timed(lambda name=name: CALLS[name](places[name]), few) for name in names]  # type: ignore[misc]
        found = dict(zip(names, await asyncio.gather(*calls), strict=True))
    await opener.close()
    return found


async def late(opener: Any, server: Any, names: list[str]) -> dict[str, tuple[float, Any]]:
    """Those that are late each time: on a machine that does much else one may be late by chance."""
    found: dict[str, tuple[float, Any]] = dict.fromkeys(names, (0.0, None))
    for _ in range(ROUNDS):
        found = await how_long(opener, server, list(found))
        found = {name: (seconds, result) for name, (seconds, result) in found.items() if seconds > AT_MOST}
        if not found:
            break
    return found


@pytest.mark.replicas
async def test_closing_after_a_write_waits_once_for_a_redis_that_stands_still(opener: Any) -> None:
    """For the archive of what was written, and then for the background work: both are one call."""
    with own_server(opener) as server:
        opener.url = server.url
        took = []
        for _ in range(ROUNDS):
            store = await until(lambda: opened(opener, retry_for=1.5, close_timeout=5.0, archiver=False))
            await store.session("s").set("n", 1)
            async with standing_still(server):
                began = time.monotonic()
                await store.close()
                took.append(time.monotonic() - began)
            if took[-1] < 2.5:
                break
        assert min(took) < 2.5, took


SOME = [
    "AsyncRecord.get", "AsyncRecord.set", "AsyncLease.__aenter__", "AsyncTurn.__aexit__", "AsyncBatch.__aexit__",
    "AsyncEvents.__aenter__", "AsyncAdmin.archive", "AsyncStateStore.get_many", "AsyncStateStore.emit",
    "AsyncAdmin.stats", "AsyncAdmin.doctor", "AsyncStateStore.__aenter__", "AsyncStateStore.close",
]  # fmt: skip


@pytest.mark.replicas
@pytest.mark.parametrize("names", [SOME, pytest.param([*CALLS], marks=pytest.mark.wide)], ids=["some", "all"])
async def test_each_call_is_answered_in_time_while_redis_stands_still(opener: Any, names: list[str]) -> None:
    with own_server(opener) as server:
        assert await late(opener, server, names) == {}


@pytest.mark.wide
@pytest.mark.parametrize("fault", ["frozen", "killed"])
async def test_each_operation_is_answered_in_time_while_redis_does_not_answer(fault: str, tmp_path: Path) -> None:
    """The head of a stream of events as well."""
    given = {"archive": f"sqlite:///{tmp_path}/a.db", "access": callers_policy(), "search": True}
    with redis_server() as server:
        async with AsyncStateStore.open(server.url, **GIVEN | given | {"retry_for": 30.0}) as retrying:
            for number in range(len(OPERATIONS)):
                for record in (
                    retrying.session(f"c{number}"),
                    retrying.user(f"c{number}"),
                    retrying.task(f"c{number}"),
                ):
                    await record.write(set={"n": 1}, items=[put(1)])
        store = await until(lambda: opened_here(server.url, given))
        served = Served(store, Access(tokens=True))
        token = await served.token("", *RIGHTS)
        await served.ask("GET", "/v1/caller", token)
        answers: dict[str, tuple[float, Any]] = {}
        async with standing_still(server, fault):
            for _ in range(ROUNDS):
                names = [name for name in OPERATIONS if answers.get(name, (math.inf, None))[0] > AT_MOST]
                answers |= await answered(served, token, names)
            await store.close()
    assert {name: (seconds, str(each)) for name, (seconds, each) in answers.items() if seconds > AT_MOST} == {}
    statuses = Counter(each.status_code for _, each in answers.values())
    assert statuses.keys() <= {200, 201, 400, 404, 409, 412, 422, 428, 503}
    assert answers["GET /v1/events"][1].status_code == 503
    assert statuses[503] > 40, "and they are of Redis"


@pytest.mark.parametrize("path", ["conversations/{}", "conversations/{}/export", "events?types={}.x"])
async def test_requests_that_wait_for_each_other_wait_for_redis_as_long_as_one(path: str, tmp_path: Path) -> None:
    """For room in memory, or for their turn: who comes behind a call that Redis did not answer asks no more."""
    given = {"archive": f"sqlite:///{tmp_path}/a.db", "access": callers_policy()}
    with redis_server() as server:
        store = await until(lambda: opened_here(server.url, given))
        served = Served(store, Access(tokens=True))
        token = await served.token("", *RIGHTS)
        await served.ask("GET", "/v1/caller", token)
        took, every = [], asyncio.Semaphore(CROWD)
        async with standing_still(server):
            while len(took) < ROUNDS and (not took or min(took) > AT_MOST):
                paths = [f"/v1/{path.format(f'{len(took)}-{number}')}" for number in range(CROWD)]
                calls = [timed(partial(served.ask, "GET", each, token), every) for each in paths]
                answers = await asyncio.gather(*calls)
                assert {each.status_code for _, each in answers} == {503}
                took.append(max(seconds for seconds, _ in answers))
            await store.close()
        assert min(took) < AT_MOST, took


async def answered(served: Served, token: str, names: list[str]) -> dict[str, tuple[float, Any]]:
    """How long these operations took, and their answers."""
    few, calls = asyncio.Semaphore(AT_ONCE), []
    for number, name in enumerate(names):
        operation = OPERATIONS[name]
        path, body = path_of(operation, f"c{number}"), body_of(operation, f"c{number}")
        calls.append(timed(partial(served.ask, operation.method, path, token, **body), few))
    return dict(zip(names, await asyncio.gather(*calls), strict=True))


async def opened_here(url: str, given: dict[str, Any]) -> Any:
    with suppress(WarmUnavailable):
        return await AsyncStateStore.open(url, **GIVEN | given)
    return None


@pytest.mark.replicas
async def test_without_a_limit_of_the_whole_call_its_waits_add_up(opener: Any, monkeypatch: Any) -> None:
    """The negative control: each of two questions waits for itself."""
    name = "AsyncStateStore.activate_agent"
    bounded: Any = AsyncStateStore.activate_agent
    monkeypatch.setattr(AsyncStateStore, "activate_agent", bounded.__wrapped__)
    with own_server(opener) as server:
        found = await how_long(opener, server, [name])
    assert found[name][0] > 1.9 * RETRY_FOR


class AllOf:
    """Servers that stand still together."""

    def __init__(self, url: str, servers: list[Any]) -> None:
        self.url, self.servers = url, servers

    def pause(self) -> None:
        for each in self.servers:
            each.pause()

    def resume(self) -> None:
        for each in self.servers:
            each.resume()


@pytest.mark.wide
@pytest.mark.replicas
@pytest.mark.parametrize("kind", ["cluster", "one of a cluster", "primary", "sentinels too"])
async def test_where_keys_may_be_elsewhere_the_look_for_them_is_part_of_the_time(opener: Any, kind: str) -> None:
    """Nobody is elected meanwhile."""
    with ExitStack() as stack:
        if "cluster" in kind:
            options = ("--cluster-node-timeout", "60000", "--cluster-require-full-coverage", "no")
            cluster = stack.enter_context(redis_cluster(*options, replicas=0, binary=server_binary("cluster")))
            place = AllOf(cluster.url, cluster.nodes if kind == "cluster" else cluster.nodes[:1])
        else:
            started = redis_sentinel(replicas=0, sentinels=2, down_after_ms=60_000, binary=server_binary("sentinel"))
            watched = stack.enter_context(started)
            sentinels = watched.sentinels if kind == "sentinels too" else []
            place = AllOf(watched.url, [watched.primary, *sentinels])
        assert await late(opener, place, SOME) == {}
