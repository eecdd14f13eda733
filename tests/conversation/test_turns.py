"""A turn: one request, two round trips, one commit or nothing. Law: two turns of a conversation never interleave."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
from below import evict, keys_of, own_server, redis_of, until
from controls import sabotage
from counting import round_trips
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy import Proxy
from sync_api import core

from distributed_state import AsyncStateStore, Deleted, Fenced, Interrupted, InvalidValue, LockTimeout, NotFound
from distributed_state.warm.scripts import COMMIT


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


async def contents(session: Any) -> list[Any]:
    return [message.content for message in await session.messages(fresh=True)]


async def test_a_turn_is_one_commit(store: Any) -> None:
    session = store.session("s", user="u1", actor="agent")
    await session.set("city", "NYC")
    async with session.turn() as turn:
        assert turn["city"] == "NYC"
        turn.append(said("Book a flight"), said("When?", "assistant"))
        turn["step"] = 1
        turn["cities"] = [turn["city"]]
        turn["cities"].append("SF")
        turn.move_to("planning")
        assert (turn.phase, turn.version, len(turn.pending)) == ("planning", 1, 2)
        assert [message.content for message in await turn.messages()] == ["Book a flight", "When?"]
        assert [message.content for message in await turn.messages(last=1)] == ["When?"]
        assert await session.get("step", fresh=True) is None
    assert await session.version() == 2
    assert await session.get_all() == {"city": "NYC", "step": 1, "cities": ["NYC", "SF"]}
    assert await session.phase() == "planning"
    change = (await session.history())[-1]
    assert (change.kind, change.actor, len(change.appended), change.token > 0) == ("turn", "agent", 2, True)


async def test_a_turn_without_a_request_id_finds_no_answer_whatever_lies_in_the_record(store: Any) -> None:
    """A field without a name once passed for the record of such a turn: with a forged effect, on anybody's state."""
    session, victim = store.session("s", user="u1"), store.user("u2")
    await session.set("n", 1)
    await victim.set("balance", 100)
    effect = {"user": "u2", "version": 0, "mark": None, "fields": {"balance": {"base": 100, "mine": 0}}}
    forged = [0, {"version": 77}, None, effect]
    with redis_of(store) as client:
        client.hset(keys_of(store, "s").record, mapping={"": json.dumps(forged), "#q": json.dumps(forged)})
    async with session.turn() as turn:
        assert not turn.repeated
        turn["n"] = 2
    assert await session.get("n", fresh=True) == 2
    assert await victim.get("balance", fresh=True) == 100


async def test_a_turn_that_fails_changes_nothing(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 1)
    with pytest.raises(ZeroDivisionError):
        async with session.turn(request_id="r") as turn:
            turn["n"] = 2
            turn.append(said("lost"))
            turn.move_to("gone")
            raise ZeroDivisionError
    assert (await session.get_all(fresh=True), await session.version(), await contents(session)) == ({"n": 1}, 1, [])
    async with session.turn(request_id="r", wait=0.5) as turn:
        assert not turn.repeated
        turn["n"] = 3
    assert await session.get("n", fresh=True) == 3


async def test_a_turn_without_changes_writes_nothing(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 1)
    async with session.turn():
        pass
    assert await session.version(fresh=True) == 1
    await session.set("n", 2)


async def test_values_that_cannot_be_stored_are_refused_where_they_are_given(store: Any) -> None:
    session = store.session("s")
    for fault in (
        lambda turn: turn.append({"role": "nobody"}),
        lambda turn: turn.__setitem__("#phase", "x"),
        lambda turn: turn.__setitem__("a", {1, 2}),
        lambda turn: turn.move_to(""),
        lambda turn: turn.move_to(None),
        lambda turn: setattr(turn, "outcome", object()),
    ):
        with pytest.raises(InvalidValue):
            async with session.turn() as turn:
                turn["kept"] = True
                fault(turn)
    assert await session.version(fresh=True) == 0
    with pytest.raises(InvalidValue):
        async with session.turn() as turn:
            turn["a"] = []
            turn["a"].append(turn["a"])
    assert await session.version(fresh=True) == 0
    await session.set("n", 1)
    for bad in (
        {"request_id": ""},
        {"request_id": 5},
        {"request_id": "x" * 300},
        {"request_id": "#workflow step"},
        {"busy": "maybe"},
    ):
        with pytest.raises(InvalidValue):
            session.turn(**bad)


async def test_outside_its_body_a_turn_takes_nothing(store: Any) -> None:
    session = store.session("s")
    turn = session.turn()
    with pytest.raises(InvalidValue):
        turn["a"] = 1
    async with turn:
        turn["a"] = 1
    with pytest.raises(InvalidValue):
        turn["a"] = 2
    with pytest.raises(InvalidValue):
        turn.append(said("late"))
    assert await session.get_all(fresh=True) == {"a": 1}


async def test_a_deleted_session_takes_no_turn(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 1)
    await store.delete("s")
    with pytest.raises(Deleted):
        async with session.turn():
            raise AssertionError("not reached")
    await session.create()
    async with session.turn(wait=1) as turn:
        turn["n"] = 2


# Repeated requests


async def test_a_repeated_request_finds_the_first_outcome(store: Any) -> None:
    session = store.session("s")
    for attempt in range(3):
        async with session.turn(request_id="r-1") as turn:
            if turn.repeated:
                assert turn.outcome == {"answer": [42, 1.5, None]}
                with pytest.raises(InvalidValue, match="r-1"):
                    turn["n"] = 2
                with pytest.raises(InvalidValue, match="answered"):
                    turn.append(said("again"))
                with pytest.raises(InvalidValue, match="answered"):
                    turn.outcome = 1
            else:
                assert attempt == 0
                turn["n"] = 1
                turn.append(said("once"))
                turn.outcome = {"answer": [42, 1.5, None]}
    assert (await session.version(fresh=True), await contents(session)) == (1, ["once"])


async def test_a_request_without_an_outcome_is_remembered_too(store: Any) -> None:
    session = store.session("s")
    async with session.turn(request_id="quiet"):
        pass
    async with session.turn(request_id="quiet") as turn:
        assert (turn.repeated, turn.outcome) == (True, None)
    assert await session.get_all(fresh=True) == {}


async def test_outcomes_are_remembered_when_the_record_comes_back_from_sql(store: Any) -> None:
    session = store.session("s")
    async with session.turn(request_id="r") as turn:
        turn.outcome = "done"
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(keys_of(store, "s").record)
    core(store)._lifecycle.tiers().hot.clear()
    async with session.turn(request_id="r") as turn:
        assert (turn.repeated, turn.outcome) == (True, "done")


STEPS = st.one_of(
    st.tuples(st.just("turn"), st.integers(0, 5)),
    st.tuples(st.just("roll back"), st.integers(1, 4)),
    st.tuples(st.just("fork"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["restore", "clear", "evict", "import", "delete"]), st.just(0)),
)


class Answers:
    """The requests that a conversation must have answered, the last three of them, and those of its versions."""

    def __init__(self, conversation: int = 0) -> None:
        self.ids = (f"{conversation}.{copy}" for copy in count())
        self.session_id = next(self.ids)
        self.known: list[str] = []
        self.past: dict[int, list[str]] = {}
        self.served = 0
        self.outcomes: dict[str, int] = {}

    async def turn(self, store: Any, number: int) -> None:
        """Send a request, perhaps once more."""
        request = f"r{number}"
        async with store.session(self.session_id).turn(request_id=request) as turn:
            assert turn.repeated == (request in self.known), (request, self.known)
            if turn.repeated:
                assert turn.outcome == self.outcomes[request]
                return
            self.served += 1
            turn["n"] = self.served
            turn.append(said(request))
            turn.outcome = self.outcomes[request] = self.served
        self.known = [*(each for each in self.known if each != request), request][-3:]

    async def step(self, store: Any, kind: str, number: int) -> None:
        """Do to the conversation what may be done to it, and go on with the copy if it makes one."""
        session = store.session(self.session_id)
        if kind == "turn":
            await self.turn(store, number)
        elif kind == "roll back":
            with suppress(NotFound, Deleted):
                await session.rollback(steps=number)
        elif kind == "fork":
            version = max(1, await session.version(fresh=True) - number)
            copy = next(self.ids)
            with suppress(Deleted):
                await session.fork(copy, version=version)
                self.session_id, self.known, self.past = copy, self.past[version], {}
        elif kind == "restore":
            await session.restore_state({"n": 0})
        elif kind == "clear":
            await session.clear(messages=True, items=True)
        elif kind == "evict":
            await evict(store, self.session_id)
        elif kind == "import":
            self.session_id = next(self.ids)
            await store.admin.import_(await store.admin.export(session.id), id=self.session_id)
        elif kind == "delete":
            await store.delete(self.session_id)
            await session.create()
        after = await store.session(self.session_id).version(fresh=True)
        for version in range(max(self.past, default=0) + 1, after + 1):
            self.past[version] = self.known

    async def check(self, store: Any, steps: Any) -> None:
        """After these steps each request that must be remembered is answered as it was, and none is served again."""
        await store.session(self.session_id).set("n", 0)
        self.past[1] = []
        for kind, number in steps:
            await self.step(store, kind, number)
        for request in [*self.known]:
            await self.turn(store, int(request[1:]))
        assert self.outcomes == {} or max(self.outcomes.values()) == self.served


def test_an_answered_request_stays_answered_whatever_becomes_of_the_state() -> None:
    conversations = count()

    @given(st.lists(STEPS, min_size=2, max_size=14))
    @settings(max_examples=12)
    def check(steps: list[tuple[str, int]]) -> None:
        runner.run(Answers(next(conversations)).check(store, steps))

    async def opened() -> Any:
        return await AsyncStateStore.open(archive="memory", remembered_requests=3, archiver=False)

    with asyncio.Runner() as runner:
        store = runner.run(opened())
        try:
            check()
        finally:
            runner.run(store.close())


@pytest.mark.wide
async def test_an_answered_request_stays_answered_on_each_server_and_database(opener: Any) -> None:
    store = await opener(remembered_requests=3)
    turns = [("turn", 0), ("turn", 1)]
    await Answers().check(store, [
        *turns, ("roll back", 1), *turns, ("roll back", 2), ("evict", 0), *turns, ("restore", 0), *turns,
        ("clear", 0), *turns, ("turn", 2), ("import", 0), *turns, ("roll back", 2), *turns, ("evict", 0), *turns,
        ("fork", 0), *turns, ("turn", 3), ("turn", 4), ("turn", 3), ("evict", 0), ("turn", 4),
        ("delete", 0), ("turn", 3),
    ])  # fmt: skip


async def test_a_fork_knows_the_requests_of_the_state_that_it_starts_from(opener: Any) -> None:
    """It forgets them before those that it answers itself, whose versions are lower."""
    store = await opener(remembered_requests=2)
    session = store.session("s")
    for number in range(3):
        async with session.turn(request_id=f"r{number}") as turn:
            turn.outcome = number
    await session.fork("f", version=2)
    fork = store.session("f")
    async with fork.turn(request_id="r1") as turn:
        assert (turn.repeated, turn.outcome, turn.answered_version) == (True, 1, 1)
    for number in (2, 3):
        async with fork.turn(request_id=f"r{number}") as turn:
            assert not turn.repeated, "the session answered it later, and another request is new"
            turn.outcome = f"of the fork, {number}"
    for number in (2, 3):
        async with fork.turn(request_id=f"r{number}") as turn:
            assert (turn.repeated, turn.outcome) == (True, f"of the fork, {number}")


async def test_only_the_latest_requests_are_remembered(opener: Any) -> None:
    store = await opener(remembered_requests=3)
    session = store.session("s")
    for number in range(6):
        async with session.turn(request_id=f"r{number}") as turn:
            turn.outcome = number
    with redis_of(store) as client:
        kept = [name for name in client.hkeys(keys_of(store, "s").record) if name.startswith(b"#q")]
    assert sorted(kept) == [b"#qr3", b"#qr4", b"#qr5"]
    await session.clear()
    for number in (3, 4, 5):
        async with session.turn(request_id=f"r{number}") as turn:
            assert (turn.repeated, turn.outcome) == (True, number)


@pytest.mark.replicas
async def test_a_request_sent_to_many_replicas_is_served_once(opener: Any) -> None:
    await _served_once(opener)


@pytest.mark.replicas
async def test_without_the_lease_it_would_be_served_twice(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the lock is given to whoever asks."""
    everybody = "if seized or not held and"
    with sabotage("acquire", everybody, "if true or not held and"), pytest.raises((AssertionError, ExceptionGroup)):
        await _served_once(opener)


async def _served_once(opener: Any) -> None:
    replicas = [await opener() for _ in range(3)]
    for number in range(10):
        served: list[int] = []

        async def serve(store: Any, number: int = number, served: list[int] = served) -> Any:
            async with store.session("s").turn(request_id=f"r{number}") as turn:
                if not turn.repeated:
                    served.append(1)
                    await asyncio.sleep(0.01)
                    turn["n"] = turn.get("n", 0) + 1
                    turn.append(said(f"{number}"))
                    turn.outcome = f"answer {number}"
                return turn.outcome

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(serve(store)) for store in replicas]
        assert [task.result() for task in tasks] == [f"answer {number}"] * 3
        assert len(served) == 1
    session = replicas[0].session("s")
    assert await contents(session) == [str(number) for number in range(10)]
    assert await session.get("n") == 10


# While a turn runs


@pytest.mark.replicas
async def test_turns_of_one_conversation_never_interleave(opener: Any) -> None:
    replicas = [await opener() for _ in range(3)]

    async def serve(store: Any, name: str) -> None:
        for number in range(8):
            async with store.session("s").turn() as turn:
                turn.append(said(f"{name}{number}?"))
                await asyncio.sleep(0.001)
                turn.append(said(f"{name}{number}!", "assistant"))
                turn["turns"] = turn.get("turns", 0) + 1

    async with asyncio.TaskGroup() as group:
        for at, store in enumerate(replicas):
            group.create_task(serve(store, "abc"[at]))
    texts = await contents(replicas[0].session("s"))
    assert len(texts) == 48
    assert [text[:-1] for text in texts[::2]] == [text[:-1] for text in texts[1::2]]
    assert await replicas[1].session("s").get("turns", fresh=True) == 24


async def running(store: Any, *, began: asyncio.Event, end: asyncio.Event, **options: Any) -> None:
    async with store.session("s").turn(**options) as turn:
        turn.append(said("first"))
        began.set()
        await end.wait()


@pytest.mark.replicas
async def test_a_second_request_may_be_rejected(opener: Any) -> None:
    one, two = [await opener() for _ in range(2)]
    began, end = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(running(one, began=began, end=end))
    await began.wait()
    with pytest.raises(LockTimeout):
        async with two.session("s").turn(busy="reject"):
            raise AssertionError("not reached")
    with pytest.raises(LockTimeout):
        async with two.session("s").turn(wait=0.05):
            raise AssertionError("not reached")
    end.set()
    await first
    async with two.session("s").turn(busy="reject") as turn:
        assert len(await turn.messages()) == 1


@pytest.mark.replicas
async def test_a_second_request_may_interrupt(opener: Any) -> None:
    one, two = [await opener() for _ in range(2)]
    await one.session("s").set("n", 1)
    began, end = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(running(one, began=began, end=end, request_id="first"))
    await began.wait()
    async with two.session("s").turn(busy="interrupt", request_id="second", wait=0.1) as turn:
        turn.append(said("second"))
    end.set()
    with pytest.raises(Fenced):
        await first
    assert await contents(two.session("s")) == ["second"]


@pytest.mark.replicas
async def test_whoever_is_interrupted_is_told_at_once(opener: Any) -> None:
    """Through the record's channel, long before the lease would be renewed; under asyncio the body ends there."""
    one, two = [await opener() for _ in range(2)]
    await one.session("s").set("n", 1)

    async def hears() -> bool:
        await one.session("s").get("n", fresh=True)
        return bool(core(one)._lifecycle.tiers().link.confirmed(keys_of(one, "s").channel))

    await until(hears)
    began, end = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(running(one, began=began, end=end, ttl=600))
    await began.wait()
    async with two.session("s").turn(busy="interrupt", wait=0.1) as turn:
        turn["n"] = 2
    lease = next(iter(core(one)._lifecycle.tiers().leases.renewal.leases), None)
    await until(lambda: lease is None or lease.lost, 5)
    end.set()
    with pytest.raises(Interrupted):
        await first
    assert await one.session("s").get("n", fresh=True) == 2


@pytest.mark.replicas
async def test_the_same_request_does_not_interrupt_itself(opener: Any) -> None:
    one, two = [await opener() for _ in range(2)]
    began, end = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(running(one, began=began, end=end, request_id="same", busy="interrupt"))
    await began.wait()

    async def again() -> bool:
        async with two.session("s").turn(busy="interrupt", request_id="same") as turn:
            return bool(turn.repeated)

    second = asyncio.create_task(again())
    await until(lambda: waiting(one), 5)
    end.set()
    await first
    assert await second


def waiting(store: Any) -> int:
    with redis_of(store) as client:
        return int(client.zcard(keys_of(store, "s").wait))


@pytest.mark.replicas
async def test_a_lock_is_no_turn_and_is_not_interrupted(opener: Any) -> None:
    one, two = [await opener() for _ in range(2)]
    async with one.session("s").lock():
        with pytest.raises(LockTimeout):
            async with two.session("s").turn(busy="interrupt", wait=0.05):
                raise AssertionError("not reached")
        await one.session("s").set("n", 1)


async def test_a_turn_that_never_ends_is_given_up(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 1)
    with pytest.raises(Fenced):
        async with session.turn(limit=0.2) as turn:
            turn["n"] = 2
            await until(lambda: turn.lost, 10)
    assert await session.get("n", fresh=True) == 1


async def test_a_turn_that_was_taken_over_unheard_is_interrupted_as_well(store: Any) -> None:
    """Not heard of before the commit, because the link was silent. A lease that is merely gone is no interruption."""
    session = store.session("s")
    lock = keys_of(store, "s").lock
    for holder, expected in ("another.1.turn!", Interrupted), (None, Fenced):
        with pytest.raises(Fenced) as raised:
            async with session.turn() as turn:
                turn["n"] = 2
                with redis_of(store) as client:
                    epoch = client.hget(keys_of(store, "s").meta, "epoch").decode()
                    client.set(lock, f"x9@{epoch}:{holder}") if holder else client.delete(lock)
        assert raised.type is expected
        with redis_of(store) as client:
            client.delete(lock)
    assert await session.get("n", fresh=True) is None


async def test_a_turn_that_never_yields_is_given_up_as_well(store: Any) -> None:
    session = store.session("s")
    with pytest.raises(Fenced):
        async with session.turn(limit=0.1) as turn:
            turn["n"] = 2
            time.sleep(0.3)
    assert await session.get("n", fresh=True) is None


async def test_a_turn_is_entered_once(store: Any) -> None:
    session = store.session("s")
    turn = session.turn()
    with pytest.raises(InvalidValue, match=r"has not begun: .* `with session\.turn"):
        turn.append(said("too early"))
    async with turn:
        turn.append(said("once"))
        with pytest.raises(InvalidValue, match="entered once"):
            await turn.__aenter__()
        assert not turn.lost
    with pytest.raises(InvalidValue, match="entered once"):
        await turn.__aenter__()
    assert await contents(session) == ["once"]


async def test_times_of_a_turn_are_numbers(store: Any) -> None:
    session, nan = store.session("s"), float("nan")
    for name, bad in {"wait": ("1", None, -1, nan), "ttl": ("1", None, nan, 1e30), "limit": ("1", 0, -1, nan)}.items():
        for each in bad:
            with pytest.raises(InvalidValue, match=f"{name} is a number"):
                session.turn(**{name: each})
    with pytest.raises(InvalidValue, match="wait is a number"):
        session.lock(wait=nan)
    assert await session.version() == 0


async def test_a_turn_may_stand_inside_a_lock(store: Any) -> None:
    session = store.session("s")
    async with session.lock() as lease:
        async with session.turn() as turn:
            turn["n"] = 1
        assert not lease.lost
        await session.set("m", 2)
    assert await session.get_all(fresh=True) == {"n": 1, "m": 2}


async def test_a_turn_inside_a_lock_that_was_released_commits_nothing(store: Any) -> None:
    """It was sent without a lock value, after another holder might have written."""
    session = store.session("s")
    lease = session.lock()
    await lease.acquire()
    with pytest.raises(Fenced, match="nothing was sent"):
        async with session.turn() as turn:
            turn["n"] = 1
            await lease.release()
    assert await session.get("n", fresh=True) is None


async def test_what_the_turns_own_task_writes_beside_it_is_kept(store: Any) -> None:
    session = store.session("s")
    async with session.turn() as turn:
        await session.set("beside", 1)
        turn["inside"] = 2
    assert await session.get_all(fresh=True) == {"beside": 1, "inside": 2}


# Cost


@pytest.mark.only(warm="single")
async def test_a_turn_is_two_round_trips(opener: Any) -> None:
    """Four messages, three fields and the lease: one to take it and read, one to commit and give it back.

    The server says so itself: it counts how often it read from a socket.
    """
    with own_server(opener) as server:
        store = await opener(url=server.url, max_staleness=0, archiver=False, beat=0)
        session = store.session("s")
        await session.append(said("hello"))

        async def turn(number: int) -> None:
            async with session.turn(request_id=f"r{number}") as turn:
                await turn.messages(last=20)
                turn.append(said("1"), said("2", "assistant"), said("3", "tool"), said("4", "assistant"))
                turn["a"], turn["b"], turn["c"] = number, 2, 3

        await turn(0)
        with round_trips(store) as trips:
            for number in range(1, 11):
                await turn(number)
        assert trips == [10 * 2]
        assert (await session.version(), await session.get("a")) == (12, 10)
        await opener.close()


@pytest.mark.only(warm="real")
async def test_a_turn_ends_well_when_its_record_left_redis_meanwhile(opener: Any) -> None:
    store = await opener(durability="memory", archiver=False)
    session = store.session("s")
    await session.set("n", 1)
    async with session.turn() as turn:
        turn["n"] = 2
        await store.admin.archive()
        with redis_of(store) as client:
            assert client.delete(keys_of(store, "s").record)
    assert await session.get_all(fresh=True) == {"n": 2}
    assert await session.version() == 2
    async with session.turn(busy="reject") as turn:
        turn["n"] = 3


@pytest.mark.only(warm="real")
async def test_the_lease_is_kept_for_the_commit_that_needs_it(opener: Any) -> None:
    """The negative control: given back with a commit that found no record, it could not be sent again."""
    with sabotage("release", "if sequence ~= '' then", "if false then"), pytest.raises(Fenced):
        await test_a_turn_ends_well_when_its_record_left_redis_meanwhile(opener)


@pytest.mark.only(warm="single")
async def test_a_turn_whose_answer_is_lost_is_applied_once(opener: Any) -> None:
    """The commit and the lease's release are sent again together."""
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, max_staleness=0)
        session = store.session("s")
        await session.set("n", 1)
        for number in range(3):
            async with session.turn(request_id=f"r{number}", wait=1) as turn:
                turn["n"] += 1
                turn.append(said(str(number)))
                proxy.lose(COMMIT.sha).go.set()
        assert (await session.get("n"), await session.version()) == (4, 4)
        assert await contents(session) == ["0", "1", "2"]
        await opener.close()


# A bounded context


async def test_a_turns_window_holds_what_it_adds(store: Any) -> None:
    session = store.session("s")
    for number in range(8):
        await session.append(said(f"question {number}"), said(f"answer {number}", "assistant"))
    told: list[Any] = []

    def summarize(messages: Any, previous: str | None) -> str:
        told.append((len(messages), previous))
        return f"{len(told)} summaries"

    async with session.turn(request_id="r") as turn:
        turn.append(said("now"))
        dropped = await turn.window(max_tokens=40, keep_last=1)
        assert dropped.messages[-1].content == "now"
        assert len(dropped.messages) < 17
        bounds = {"max_tokens": 60, "keep_last": 1, "strategy": "summarize", "summarizer": summarize}
        first = await turn.window(**bounds)
        assert first.messages[0].role == "system"
        assert first.messages[-1].content == "now"
        assert first.tokens <= 60
        again = await turn.window(**bounds)
        assert (again.messages, len(told)) == (first.messages, len(told)), "the summary is there already"
        made = len(told)
        assert await session.version(fresh=True) == 8, "and nothing is written before the end"
    assert (await session.window(**bounds)).summary == first.summary
    assert len(told) == made, "the turn has committed its summary"
    assert len(await session.messages()) == 17, "raw messages stay"
