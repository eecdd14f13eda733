"""Running turns behind a service: followed, streamed and stopped as on a direct store, on both APIs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from proxy import Proxy
from serving import served

from distributed_state import (
    AsyncRemoteStore,
    ConfigurationError,
    Conflict,
    InvalidValue,
    NotFound,
    RemoteStore,
    StateStore,
    Stopped,
    Workflow,
)
from distributed_state.programs.servers import redis_server
from distributed_state.programs.service import Limits, Service
from distributed_state.results import Chunk, Ended, Failed, Notice


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with redis_server() as server:
        yield server.url


class Both:
    """A store behind a service, and a direct one beside it."""

    def __init__(self, store: RemoteStore, direct: StateStore, place: str) -> None:
        self.store, self.direct, self.place = store, direct, place
        self.session = store.session("c")
        self.beside = direct.session("c")


@pytest.fixture
def both(url: str, tmp_path: Path) -> Iterator[Both]:
    archive = f"sqlite:///{tmp_path}/a.db"
    service = Service(Limits(busy=0.3, heartbeat=0.5))
    with (
        StateStore.open(url, archive=archive, namespace=tmp_path.name, stream_interval=0.0) as direct,
        served(url, archive, tmp_path.name, service=service) as client,
        RemoteStore.open(str(client.base_url)) as store,
    ):
        direct.session("c").set("n", 0)
        yield Both(store, direct, str(client.base_url))


def said(parts: Any) -> list[Any]:
    """Chunks by their data, other parts by their kind."""
    return [part.data if isinstance(part, Chunk) else type(part).__name__ for part in parts]


CHUNKS = ["Os", "lo", {"tool": [1, None]}, b"\x00\xff"]


def test_a_turn_of_a_direct_store_is_followed_and_resumed(both: Both) -> None:
    with both.beside.turn(request_id="r") as turn:
        for chunk in CHUNKS:
            turn.stream(chunk)
        turn["n"] = 1
        turn.outcome = {"answer": "Oslo"}
    parts = list(both.session.output("r", wait=10))
    assert said(parts) == [*CHUNKS, "Ended"]
    assert parts[-1] == Ended(parts[-1].position, 2, {"answer": "Oslo"})
    assert list(both.session.output("r", after=parts[1].position, wait=10)) == parts[2:]
    assert list(both.session.output("r", after=parts[-1].position, wait=10)) == []


def test_a_remote_turn_is_followed_on_a_direct_store_and_ends_with_its_commit(both: Both) -> None:
    with both.session.turn(request_id="r") as turn:
        for chunk in CHUNKS:
            turn.stream(chunk)
        turn["n"] = 1
        turn.outcome = "Oslo"
        assert turn.request_id == "r"
        assert not turn.repeated
    assert turn.written == 2
    parts = list(both.beside.output("r", wait=10))
    assert said(parts) == [*CHUNKS, "Ended"]
    assert (parts[-1].version, parts[-1].outcome) == (2, "Oslo")


def test_a_remote_turn_that_changes_nothing_or_raises_ends_its_output(both: Both) -> None:
    with both.session.turn() as turn:
        turn.stream("a")
    with pytest.raises(ZeroDivisionError), both.session.turn(request_id="r") as turn:
        turn.stream("b")
        raise ZeroDivisionError
    parts = list(both.beside.output("r", wait=10))
    assert [type(each) for each in parts] == [Chunk, Failed]


def test_chunks_are_sent_together(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    order = type(both.store._core._requests).order

    async def counted(self: Any, method: str, path: str, *given: Any, **options: Any) -> Any:
        sent.append(path.rpartition("/")[2])
        return await order(self, method, path, *given, **options)

    monkeypatch.setattr(type(both.store._core._requests), "order", counted)
    with both.session.turn(request_id="r") as turn:
        for n in range(500):
            turn.stream(str(n))
    assert 0 < sent.count("output") < 100
    assert said(both.beside.output("r", wait=10)) == [*map(str, range(500)), "Ended"]


def test_a_remote_turn_is_stopped_and_keeps_what_it_has(both: Both) -> None:
    done: list[Any] = []
    stopping = threading.Thread(target=lambda: done.append(both.beside.stop("r", reason="enough", wait=10)))
    with both.session.turn(request_id="r") as turn:
        turn.stream("a")
        turn.flush()
        stopping.start()
        with pytest.raises(Stopped) as stopped:
            while True:
                turn.stream("x")
                turn.flush()
        turn["n"] = 1
    stopping.join(20)
    assert stopped.value.reason == "enough"
    assert turn.written == 2
    assert done[0].version == 2
    assert said(both.session.output("r", wait=10))[-1] == "Ended"


def test_a_remote_client_stops_a_turn_of_a_worker(both: Both) -> None:
    done: list[Any] = []
    stopping = threading.Thread(target=lambda: done.append(both.session.stop("r", reason="enough", wait=10)))
    with both.beside.turn(request_id="r") as turn:
        stopping.start()
        with pytest.raises(Stopped):
            while True:
                turn.stream("x")
        turn["n"] = 1
    stopping.join(20)
    assert (done[0].state, done[0].version) == ("stopped", 2)
    assert both.session.stop().state == "nothing ran"


def test_an_input_is_posted_withdrawn_taken_and_followed(both: Both) -> None:
    message = {"role": "user", "content": "q"}
    assert both.session.post(message, request_id="q") == both.session.post(message, request_id="q") == 1
    assert (both.session.post(message), both.session.post(message)) == (2, 3)
    assert [each.number for each in both.session.inbox()] == [1, 2, 3]
    assert both.beside.inbox()[0] == both.session.inbox()[0]
    assert (both.session.withdraw(3), both.session.withdraw(3)) == (True, False)
    with both.session.turn() as turn:
        assert turn.inbox == ()
        assert [each.number for each in turn.arrived()] == [1, 2]
        assert [each.message.content for each in turn.take(1)] == ["q"]
        turn.stream("a")
        both.beside.post(message)
        assert [each.number for each in turn.arrived()] == [4]
        assert [each.number for each in turn.take()] == [2, 4]
        turn.append({"role": "assistant", "content": "a"})
    assert both.beside.inbox() == []
    assert said(both.session.output("q", wait=10)) == ["a", "Ended"]


def test_wakes_are_set_listed_and_cancelled(both: Both) -> None:
    session = both.session
    with pytest.raises(NotFound):
        both.store.session("none").wake("early", after=1, handler="a")
    assert session.wakes() == both.store.session("none").wakes() == []
    assert session.cancel_wake("x") is False
    session.wake("later", after=3600, name="later", handler="a")
    session.wake("often", after=60, every=60, name="often")
    assert session.wakes() == both.beside.wakes()
    assert [(each.wake, each.every) for each in session.wakes()] == [("often", 60), ("later", None)]
    assert (session.cancel_wake("later"), session.cancel_wake("later")) == (True, False)
    for bad in ({}, {"after": -1}, {"after": 1, "at": 1}, {"after": 1, "handler": "a b"}):
        with pytest.raises(InvalidValue):
            session.wake("x", **bad)
    with pytest.raises(Conflict, match="handler is 'a'"):
        session.wake("x", after=1, handler="b")


def test_a_question_is_listed_and_answered_once(both: Both) -> None:
    with both.beside.turn() as turn:
        turn.ask("Shall I book?", name="booking", data={"price": 900})
    assert both.store.asks(user="nobody") == []
    [ask] = both.store.asks()
    assert [ask] == both.direct.asks(fresh=True)
    with pytest.raises(NotFound, match="no open question"):
        both.session.answer("yes", "booking", id="another")
    with pytest.raises(InvalidValue):
        both.session.answer(object(), "booking")
    assert both.session.answer({"book": True}, "booking", id=ask.id) is True
    assert both.session.answer("no", "booking") is False
    assert [each.message.metadata for each in both.beside.inbox()] == [{"answers": "booking", "value": {"book": True}}]
    assert both.store.asks() == []
    with pytest.raises(ConfigurationError, match="prefix= of asks"):
        both.store.asks(prefix="x")


def test_what_failed_is_tried_again(both: Both) -> None:
    with pytest.raises(NotFound):
        both.session.retry()
    agent = Workflow({"planning": lambda state, turn: state.to_error("no")})
    both.direct.run(agent, "look", session_id="c")
    assert (both.session.retry(), both.session.retry()) == (True, False)
    assert both.beside.phase(fresh=True) == "planning"


def test_notices_come_through_a_service(both: Both) -> None:
    with both.session.output(notices=True) as output:
        assert output.next(10) == Notice("", "resync", {})
        both.beside.set("a", 1)
        found = output.next(10)
        assert isinstance(found, Notice)
        assert (found.name, found.data["names"]) == ("fields.changed", ["a"])
        assert output.next(0.1) is None


def test_following_goes_on_over_another_connection(both: Both) -> None:
    with (
        Proxy(both.place) as proxy,
        RemoteStore.open(proxy.url) as store,
        store.session("c").output("r") as output,
    ):
        with both.beside.turn(request_id="r") as turn:
            turn.stream("a")
            assert said([output.next(10)]) == ["a"]
            proxy.cut()
            turn.stream("b")
            turn["n"] = 1
        assert said([output.next(20), output.next(20)]) == ["b", "Ended"]
        assert output.next(1) is None


async def test_the_asyncio_api_does_the_same(both: Both) -> None:
    async with AsyncRemoteStore.open(both.place) as store:
        session = store.session("c")
        following = asyncio.create_task(_all(session))
        await session.post({"role": "user", "content": "q"}, request_id="r")
        async with session.turn() as turn:
            await turn.arrived()
            turn.take()
            await turn.stream("a")
            await turn.flush()
            turn["n"] = 1
        assert said(await following) == ["a", "Ended"]


async def _all(session: Any) -> list[Any]:
    return [part async for part in session.output("r", wait=20)]
