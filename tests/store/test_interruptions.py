"""Signal handlers that raise at any moment, as Celery's soft time limit and Ctrl-C in a notebook do.

What holds a lease afterwards is a body that runs, or nobody. Law: that is seen while the traceback and the lease are
kept, as a notebook keeps them, and with a `ttl` that does not end by itself meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest
from below import keys_of, tiers, until
from interrupting import Interrupted, Steps
from remotely import Serving

from distributed_state import AsyncRemoteStore, AsyncStateStore, Fenced, LockTimeout, RemoteStore, StateStore
from distributed_state.port import background, bodies, waited
from distributed_state.port.blocking import finish
from distributed_state.port.bodies import Body
from distributed_state.port.http import AsyncHttp, BlockingHttp
from distributed_state.warm import lease

Enter = Callable[[Any], Any]


def LOCK(session: Any) -> Any:
    return session.lock(wait=0, ttl=600)


def TURN(session: Any) -> Any:
    return session.turn(wait=0, ttl=600, request_id="r")


KINDS = pytest.mark.parametrize("enter", [LOCK, TURN], ids=["lock", "turn"])
# All points of every n-th call of a function of ours; in a wide run those of each call.
POINTS = pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.wide)])
# One that was interrupted before it could be awaited never is.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    # An interruption may come where Python deletes an object, and a coroutine may be made and never awaited.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with StateStore.open(archive="memory", partitions=4) as store:
        yield store
    gc.collect()


def is_held(store: StateStore, id: str) -> bool:
    """Whether anybody holds it at the server, or it is looked after, once the next rounds of renewing are over."""
    with bodies.blocking():
        home = tiers(store.aio)
        renewal = home.leases.renewal
        for _ in range(3):
            for kept in list(renewal._held.values()):
                kept._again_at = 0.0
                lease = kept.lease()
                if lease is not None:
                    lease.renew_at = 0.0
            if renewal._held:
                finish(renewal._round())
        return bool(renewal._held) or finish(home.port.command(b"EXISTS", keys_of(store.aio, id).lock)) == 1


def with_a_body(store: StateStore, id: str) -> Callable[[], None]:
    """What a body does: it is there, and so is its lease."""

    def look() -> None:
        before = sys.gettrace()
        sys.settrace(None)
        assert is_held(store, id)
        sys.settrace(before)

    return look


def held_for(lease: Any, body: Callable[[], None] = lambda: None) -> None:
    with lease as held:
        body()
        if hasattr(held, "append"):
            held["n"] = 1


async def held_by_a_task_for(lease: Any, body: Callable[[], None] = lambda: None) -> None:
    async with lease as held:
        body()
        if hasattr(held, "append"):
            held["n"] = 1


def interrupted_at_every_point(store: StateStore, enter: Enter, every: int = 1) -> int:
    steps, count = Steps(every), 0
    held_for(enter(store.session("first")), with_a_body(store, "first"))
    while not steps.over:
        id = f"s{count}"
        lease, error = enter(store.session(id)), None
        try:
            with steps.interrupting():
                held_for(lease, with_a_body(store, id))
        except Interrupted as interrupted:
            error = interrupted  # kept, with all frames that it shows
        assert waited.present() is None, (steps.where, error)  # else the next call would count this one's waiting
        assert not is_held(store, id), (steps.where, error)
        count += 1
    return count


@KINDS
@POINTS
def test_an_interruption_at_any_point_leaves_a_lease_with_a_body_or_none(
    store: StateStore, enter: Enter, every: int
) -> None:
    assert interrupted_at_every_point(store, enter, every) > 100 / every


@KINDS
def test_if_a_body_were_never_seen_to_be_over_a_lease_would_be_left(
    store: StateStore, enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(Body, "there", True)
    with pytest.raises(AssertionError):
        interrupted_at_every_point(store, enter)


@pytest.mark.parametrize(
    ("enter", "every"),
    [
        (LOCK, 8),
        pytest.param(LOCK, 1, marks=pytest.mark.wide),
        pytest.param(TURN, 32, marks=pytest.mark.wide),
        pytest.param(TURN, 1, marks=pytest.mark.full),
    ],
)
def test_so_does_an_interruption_of_a_task(store: StateStore, enter: Enter, every: int) -> None:
    async def all_of_them() -> int:
        steps, count = Steps(every), 0
        await held_by_a_task_for(enter(store.aio.session("first")), with_a_body(store, "first"))
        while not steps.over:
            id = f"s{count}"
            lease, error = enter(store.aio.session(id)), None
            try:
                with steps.interrupting():
                    await held_by_a_task_for(lease, with_a_body(store, id))
            except Interrupted as interrupted:
                error = interrupted
            assert not is_held(store, id), (steps.where, error)
            count += 1
        return count

    assert asyncio.run(all_of_them()) > 100 / every


# Over HTTP, where the caller renews


@pytest.fixture(autouse=True, scope="module")
def one_context() -> Iterator[None]:
    """Clients are made by the hundred here, each with the certificates of all the world."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="module")
def service(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    archive = f"sqlite:///{tmp_path_factory.mktemp('service')}/archive.db"
    place = {"url": servers.redis("valkey").url, "archive": archive, "namespace": uuid.uuid4().hex[:12]}
    with Serving(place) as worker:
        yield worker.url


Works = list[Callable[[], Any]]


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> Works:
    """What is done in the background for each lease, True if it was renewed: done when the test says so."""
    found: Works = []

    async def nothing() -> bool:
        return False

    def collected(every: Any) -> Any:
        def begin(http: Any, seconds: float, work: Callable[[], Any]) -> Any:
            found.append(work)
            return every(http, 0.0, nothing)

        return begin

    for http in AsyncHttp, BlockingHttp:
        monkeypatch.setattr(http, "every", collected(http.every))
    return found


def renewed_over_http(store: RemoteStore, works: Works, every: int = 1, most: int = 10_000) -> tuple[int, int]:
    """Enter and leave leases, interrupted at each point once: how many there were, and are renewed afterwards."""
    steps, kept, prefix = Steps(every), list[Any](), uuid.uuid4().hex
    while not steps.over and len(kept) < most:
        lease = store.session(f"{prefix}{len(kept)}").lock(wait=0, ttl=600)
        try:
            with steps.interrupting():
                held_for(lease)
            kept.append(lease)
        except Interrupted as interrupted:
            kept.append((lease, interrupted))  # as a notebook keeps them
    return len(kept), sum(background.finish(work()) for work in works)


async def renewed_by_a_task_over_http(store: AsyncRemoteStore, works: Works, every: int) -> tuple[int, int]:
    """Each with a client of its own: one that was interrupted at an await may keep a lock of anyio's for good."""
    steps, kept, prefix = Steps(every), list[Any](), uuid.uuid4().hex
    while not steps.over:
        lease = store.session(f"{prefix}{len(kept)}").lock(wait=0, ttl=600)
        try:
            with steps.interrupting():
                await held_by_a_task_for(lease)
            kept.append(lease)
        except Interrupted as interrupted:
            kept.append((lease, interrupted))
            store._requests.http._clients.clear()
    return len(kept), sum([await work() for work in works])


@POINTS
def test_a_lease_over_http_that_was_interrupted_at_any_point_is_not_renewed(
    service: str, works: Works, every: int
) -> None:
    with StateStore.open(service) as store:
        held_for(store.session("first").lock(ttl=600), lambda: checked(background.finish(works[-1]())))
        count, renewed = renewed_over_http(store, works, every)
        assert renewed == 0
        assert count > 100 / every


@pytest.mark.parametrize("every", [pytest.param(4, marks=pytest.mark.wide), pytest.param(1, marks=pytest.mark.full)])
async def test_nor_is_that_of_a_task(service: str, works: Works, every: int) -> None:
    async with AsyncStateStore.open(service) as store:
        async with store.session("first").lock(ttl=600):
            checked(await works[-1]())
        count, renewed = await renewed_by_a_task_over_http(store, works, every)
        assert renewed == 0
        assert count > 100 / every


def checked(found: bool) -> None:
    assert found


def test_if_its_body_were_never_seen_to_be_over_it_would_be(
    service: str, works: Works, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(Body, "there", True)
    with StateStore.open(service) as store:
        assert renewed_over_http(store, works, 8, 50)[1] > 0


async def test_one_that_was_interrupted_while_it_was_taken_by_hand_ends(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncStateStore.open(service) as store:
        id, every = uuid.uuid4().hex, AsyncHttp.every
        lease = store.session(id).lock(ttl=1)

        def interrupted(*given: Any) -> Any:
            every(*given)
            raise Interrupted

        async def over() -> bool:
            return not await store.admin.leases(prefix=id)

        monkeypatch.setattr(AsyncHttp, "every", interrupted)
        with pytest.raises(Interrupted):
            await lease.acquire()
        assert not await over()
        await until(over, every=0.05)


@pytest.mark.parametrize("by_hand", [False, True])
async def test_one_in_a_generator_lasts_as_long_as_that_is_kept(service: str, by_hand: bool) -> None:
    with StateStore.open(service) as store:
        id = uuid.uuid4().hex
        generator = entered(store.session(id), by_hand, ttl=1)
        next(generator)
        start = time.monotonic()
        await until(lambda: time.monotonic() > start + 1.5, every=0.1)
        assert store.admin.leases(prefix=id)
        del generator
        gc.collect()
        await until(lambda: not store.admin.leases(prefix=id), every=0.05)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("api", ["blocking", "asyncio"])
@pytest.mark.parametrize(
    "count", [pytest.param(300, marks=pytest.mark.wide), pytest.param(50_000, marks=pytest.mark.full)]
)
def test_and_so_do_interruptions_by_chance(api: str, count: int) -> None:
    tests = Path(__file__).parents[1]
    program = [sys.executable, str(tests / "interrupted_by_chance.py"), api, str(count), str(time.time_ns())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent)))}
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, f"{count} interrupted, 0 left\n"), (program, done.stderr)


# Loads


def fresh(store: StateStore, id: str) -> None:
    store.session(id).get("n", fresh=True)


def several(store: StateStore, id: str) -> None:
    store.get_many([store.session(id)], fresh=True)


def turn(store: StateStore, id: str) -> None:
    with store.session(id).turn(wait=0, ttl=600):
        pass


LOADS = pytest.mark.parametrize("load", [fresh, several, turn])


def loads_interrupted_at_every_point(store: StateStore, load: Callable[[StateStore, str], None], every: int = 1) -> int:
    steps, count, hot = Steps(every), 0, tiers(store.aio).hot
    store.session("s").set("n", 1)
    text = keys_of(store.aio, "s").ref.text
    load(store, "s")
    while not steps.over:
        error = None
        try:
            with steps.interrupting():
                load(store, "s")
        except Interrupted as interrupted:
            error = interrupted
        assert waited.present() is None, (steps.where, error)
        with bodies.blocking():
            flight, ours = hot.take_off(text, freshness=None, alone=False)
        assert ours, (steps.where, error)
        hot.land(text, flight, None)
        assert not hot._flights, (steps.where, error)
        with bodies.blocking():
            assert not is_held(store, "s")
        count += 1
    return count


@LOADS
@POINTS
def test_nobody_waits_for_a_load_that_was_interrupted(
    store: StateStore, load: Callable[[StateStore, str], None], every: int
) -> None:
    assert loads_interrupted_at_every_point(store, load, every) > 100 / every


@LOADS
def test_if_its_end_were_not_seen_somebody_would(
    store: StateStore, load: Callable[[StateStore, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(Body, "there", True)
    with pytest.raises(AssertionError):
        loads_interrupted_at_every_point(store, load)


def test_who_waits_for_one_already_looks_for_itself(store: StateStore) -> None:
    store.session("s").set("n", 1)
    hot, text = tiers(store.aio).hot, keys_of(store.aio, "s").ref.text
    hot.forget(text)
    leader, waits = Body(), list[float]()

    class NeverSet:
        async def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            leader.leave()
            return False

    with bodies.blocking():
        flight, _ = hot.take_off(text, freshness=None, alone=False, body=leader)
    flight.done = NeverSet()
    assert store.session("s").get("n") == 1
    assert len(waits) == 1
    assert waits[0] < 1


# Those who do not come back


def is_free(store: StateStore, id: str) -> bool:
    try:
        with store.session(id).lock(wait=0):
            return True
    except LockTimeout:
        return False


def test_a_lease_that_was_taken_by_hand_ends_with_its_thread(store: StateStore) -> None:
    kept: list[Any] = []
    thread = threading.Thread(target=lambda: kept.append(store.session("s").lock(ttl=0.3).acquire()))
    thread.start()
    thread.join()
    with store.session("s").lock(wait=10):
        assert kept[0].lost
    kept[0].release()


def test_if_its_thread_were_never_seen_to_end_it_would_be_held(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(bodies, "ended", lambda owner: False)
    kept: list[Any] = []
    thread = threading.Thread(target=lambda: kept.append(store.session("s").lock(ttl=0.3).acquire()))
    thread.start()
    thread.join()
    with pytest.raises(LockTimeout):
        store.session("s").lock(wait=1).acquire()
    kept[0].release()


async def test_and_with_its_task(store: StateStore) -> None:
    async def take() -> Any:
        return await store.aio.session("s").lock(ttl=0.3).acquire()

    lease = await asyncio.create_task(take())
    async with store.aio.session("s").lock(wait=10):
        assert lease.lost
    await lease.release()


async def test_a_turn_whose_task_ended_commits_nothing(store: StateStore) -> None:
    """It was sent without a lock value, after another holder might have written."""
    session = store.aio.session("s")
    turn = session.turn(ttl=0.3)

    async def enter() -> None:
        await turn.__aenter__()

    await asyncio.create_task(enter())
    turn["n"] = 1
    await until(lambda: turn.lost)
    with pytest.raises(Fenced, match="nothing was sent"):
        await turn.__aexit__(None, None, None)
    assert await session.get("n", fresh=True) is None


async def test_a_task_that_was_started_under_a_lease_whose_task_ended_writes_nothing(store: StateStore) -> None:
    session, lost = store.aio.session("s"), asyncio.Event()

    async def write() -> None:
        await lost.wait()
        await session.set("n", 1)

    async def take() -> Any:
        return await session.lock(ttl=0.3).acquire(), asyncio.create_task(write())

    lease, writing = await asyncio.create_task(take())
    await until(lambda: lease.lost)
    lost.set()
    with pytest.raises(Fenced, match="nothing was sent"):
        await writing
    await lease.release()
    assert await session.set("n", 2) == 1


def test_and_with_the_object_if_nobody_keeps_that(store: StateStore) -> None:
    store.session("s").lock(ttl=0.3).acquire()
    with store.session("s").lock(wait=10):
        pass


def test_leases_that_nobody_keeps_do_not_stay_in_the_context_that_took_them(store: StateStore) -> None:
    """Each lock copied all of them, and they grew by one with each that was interrupted."""

    def take() -> int:
        for number in range(10):
            store.session(f"s{number}").lock(ttl=0.3).acquire()
        return len(lease._held.get())

    assert Context().run(take) <= 2


def entered(session: Any, by_hand: bool, ttl: float = 0.3) -> Iterator[None]:
    if by_hand:
        lease = session.lock(ttl=ttl).acquire()
        yield
        lease.release()
    else:
        with session.lock(ttl=ttl):
            yield


async def test_its_thread_may_end_before_the_generator(store: StateStore) -> None:
    """FastAPI runs the two halves of a dependency in threads of a pool, which end when they are idle."""
    generator = entered(store.session("s"), False)
    thread = threading.Thread(target=next, args=(generator,))
    thread.start()
    thread.join()
    start = time.monotonic()
    await until(lambda: time.monotonic() > start + 1.0, every=0.1)
    assert not await asyncio.to_thread(is_free, store, "s")
    del generator
    gc.collect()
    await until(lambda: asyncio.to_thread(is_free, store, "s"), every=0.1)


def test_a_turn_may_be_left_in_another_context_than_it_was_entered_in(store: StateStore) -> None:
    turn = store.session("s").turn(request_id="r")
    view = Context().run(turn.__enter__)
    view["n"] = 1
    Context().run(turn.__exit__, None, None, None)
    assert store.session("s").get("n") == 1
    assert is_free(store, "s")


@pytest.mark.parametrize("by_hand", [False, True])
async def test_a_lease_in_a_generator_lasts_as_long_as_that_is_kept(store: StateStore, by_hand: bool) -> None:
    """As the dependencies of a request do in FastAPI."""
    generator = entered(store.session("s"), by_hand)
    next(generator)
    start = time.monotonic()
    await until(lambda: time.monotonic() > start + 1.0, every=0.1)
    assert not await asyncio.to_thread(is_free, store, "s")
    del generator
    gc.collect()
    await until(lambda: asyncio.to_thread(is_free, store, "s"), every=0.1)


def test_writing_a_command_may_be_interrupted_at_any_moment() -> None:
    """In a process of its own, which hiredis ended within the first hundreds (SIGSEGV)."""
    program = """if True:
        import signal
        from distributed_state.port.connections import _Words
        from distributed_state.port.commands import Packer

        class Interrupted(BaseException): ...

        def interrupt(*_):
            raise Interrupted

        signal.signal(signal.SIGALRM, interrupt)
        packer, driver, count = Packer("a-data-id"), _Words(), 0
        while count < 1000:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00003 + count % 97 * 1e-7)
                while True:
                    packer.pack([(b"EVALSHA", 1, 2, 3, 4, 5, 6, 7, 8, 9)])
                    driver.pack("SELECT", 1)
            except Interrupted:
                count += 1
        print(count)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1000\n"), done.stderr
