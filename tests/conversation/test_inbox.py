"""The inbox of a session. Law: an input is served by exactly one committed turn, in the order of acceptance."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextvars import Context
from typing import Any

import pytest
from below import evict, keys_of, redis_of, shift, tiers, until
from following import plain
from following import shown as shown_output
from proxy import Proxy

from distributed_state import (
    AccessDenied,
    AgentState,
    Backpressure,
    Deleted,
    Encryption,
    Fenced,
    InvalidValue,
    KeyRing,
    Locked,
    Stopped,
    TooLarge,
    Workflow,
)
from distributed_state.results import Input, StopResult
from distributed_state.warm.scripts import COMMIT


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def texts(inputs: Any) -> list[Any]:
    assert all(isinstance(each, Input) for each in inputs)
    return [each.message.content for each in inputs]


async def served(session: Any, request_id: str | None = None) -> list[Any]:
    """A turn that appends the inputs which it takes."""
    async with session.turn(request_id=request_id) as turn:
        taken = turn.take()
        turn.append(*(each.message for each in taken))
    return texts(taken)


async def taken_over(session: Any) -> list[Any]:
    async with session.turn(busy="interrupt") as turn:
        taken = turn.take()
        turn["by"] = "second"
    return texts(taken)


async def shown(session: Any) -> list[Any]:
    return [message.content for message in await session.messages()]


async def test_inputs_are_served_once_in_the_order_of_acceptance(store: Any) -> None:
    session = store.session("s")
    numbers = [await session.post(said(text), request_id=text) for text in "abc"]
    assert numbers == [1, 2, 3]
    assert texts(await session.inbox()) == ["a", "b", "c"]
    assert await served(session) == ["a", "b", "c"]
    assert await session.inbox() == []
    assert await served(session) == []
    assert await shown(session) == ["a", "b", "c"]


async def test_an_input_has_its_number_its_request_and_the_time_of_its_acceptance(store: Any) -> None:
    session = store.session("s")
    await session.post({**said("a"), "extra": [1, None]}, request_id="r")
    [found] = await session.inbox()
    assert (found.number, found.request_id, found.message.to_dict()) == (1, "r", {**said("a"), "extra": [1, None]})
    assert abs(found.time - tiers(store).clock.now()) < 60


@pytest.mark.replicas
async def test_an_input_is_posted_while_a_turn_runs_and_nothing_else_is_written(opener: Any) -> None:
    store, other = await opener(), await opener()
    session, elsewhere = store.session("s"), other.session("s")
    async with session.turn(request_id="r") as turn:
        assert await elsewhere.post(said("a")) == 1
        for work in (elsewhere.set("n", 1), elsewhere.append(said("b")), elsewhere.clear()):
            with pytest.raises(Locked):
                await work
        assert turn.inbox == ()
        assert texts(await turn.arrived()) == ["a"]
        assert await turn.arrived() == ()
        assert texts(turn.inbox) == ["a"]
        turn["n"] = 2
    assert texts(await session.inbox()) == ["a"], "it was not taken"
    assert await elsewhere.get("n", fresh=True) == 2


@pytest.mark.replicas
async def test_a_turn_knows_its_version_though_inputs_were_posted_meanwhile(opener: Any) -> None:
    store, other = await opener(), await opener()
    session = store.session("s")
    async with session.turn(request_id="r") as turn:
        for _ in range(3):
            await other.session("s").post(said("x"))
        turn["n"] = 1
    assert turn.written.version == 4
    for each in (session, other.session("s")):
        async with each.turn(request_id="r") as again:
            assert (again.repeated, again.answered_version) == (True, 4)
    assert (await session.history(after=3))[0].set == {"n": 1}
    assert await session.get("n") == await other.session("s").get("n", fresh=True) == 1


@pytest.mark.replicas
async def test_a_turn_that_writes_nothing_raises_or_is_taken_over_gives_its_inputs_back(opener: Any) -> None:
    store, other = await opener(), await opener()
    session = store.session("s")
    await session.post(said("a"))
    with pytest.raises(ZeroDivisionError):
        async with session.turn() as turn:
            assert texts(turn.take()) == ["a"]
            raise ZeroDivisionError
    with pytest.raises(Fenced):
        async with session.turn() as turn:
            assert texts(turn.take()) == ["a"]
            turn["by"] = "first"
            second = asyncio.create_task(taken_over(other.session("s")))
            while not second.done():
                await asyncio.sleep(0.01)
    assert await second == ["a"]
    assert await session.inbox() == []
    assert await session.get("by", fresh=True) == "second"


async def test_a_request_is_accepted_once_while_it_waits_and_after_it_was_served(opener: Any) -> None:
    store = await opener(remembered_requests=2)
    session = store.session("s")
    for _ in range(2):
        assert [await session.post(said("a"), request_id="a"), await session.post(said("b"), request_id="b")] == [1, 2]
    assert await served(session) == ["a", "b"]
    version = await session.version()
    assert await session.post(said("a"), request_id="a") == 1
    await session.rollback(version=1)
    assert await session.post(said("b"), request_id="b") == 2
    assert await session.inbox() == []
    assert await session.version() == version + 1, "a repetition is no commit"
    assert await session.post(said("none")) == 3, "without a request id each is another one"
    for text in "cde":
        await session.post(said(text), request_id=text)
    assert await served(session) == ["none", "c", "d", "e"]
    assert await session.post(said("d"), request_id="d") == 5
    assert await session.post(said("a"), request_id="a") == 7, "it is not remembered any longer"


async def test_restoring_an_earlier_state_neither_brings_a_served_input_back_nor_drops_one(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 1)
    state = await session.export_state()
    await session.post(said("served"))
    version = await session.version()
    assert await served(session) == ["served"]
    await session.post(said("waits"))
    for restore in (session.rollback(version=version), session.restore_state(state), session.clear(messages=True)):
        await restore
        assert texts(await session.inbox()) == ["waits"]
    assert await served(session) == ["waits"]


async def test_a_fork_starts_without_inputs_and_a_deleted_session_ends_them(store: Any) -> None:
    session = store.session("s")
    await session.post(said("a"), request_id="a")
    await session.set("n", 1)
    await session.fork("t")
    assert await store.session("t").inbox() == []
    assert await store.session("t").post(said("a"), request_id="a") == 1
    await store.delete("s")
    with pytest.raises(Deleted):
        await session.post(said("b"))
    async with session.turn(revive=True) as turn:
        assert turn.inbox == ()
        turn["n"] = 2
    assert await session.inbox() == []
    assert await session.post(said("a"), request_id="a") == 1


@pytest.mark.replicas
async def test_inputs_survive_the_loss_of_the_record_from_redis_and_of_redis(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    await session.post(said("a"), request_id="a")
    await store.admin.archive()
    with redis_of(store) as redis:
        redis.delete(keys_of(store, "s").record)
    store.invalidate()
    assert texts(await session.inbox()) == ["a"]
    assert await session.post(said("b"), request_id="b") == 2
    with redis_of(store) as redis:
        redis.flushall()
    store.invalidate()
    assert await session.post(said("c")) == 3
    assert texts(await session.inbox()) == ["a", "b", "c"]
    assert await session.post(said("b"), request_id="b") == 2
    assert await served(session) == ["a", "b", "c"]


@pytest.mark.only(warm="single")
async def test_a_post_whose_answer_was_lost_returns_its_number_though_only_sql_has_it(opener: Any) -> None:
    other = await opener()
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url)
        session = store.session("s")
        await session.post(said("a"))
        for number, request_id in (2, "b"), (5, None):
            loss = proxy.lose(COMMIT.sha)
            task = asyncio.ensure_future(session.post(said("b"), request_id=request_id))
            await until(loss.happened.is_set, 60.0)
            assert texts(await other.session("s").inbox())[-1] == "b"
            await served(other.session("s"))
            await other.session("s").post(said("later"))
            await other.session("s").withdraw(number + 1)
            await other.admin.archive()
            with redis_of(other) as redis:
                redis.delete(keys_of(other, "s").record)
            loss.go.set()
            assert await task == number
            await session.post(said("more"))


@pytest.mark.replicas
async def test_an_input_can_be_withdrawn_until_it_is_served(opener: Any) -> None:
    store, other = await opener(), await opener()
    session = store.session("s")
    for text in "abc":
        await session.post(said(text))
    async with session.turn() as turn:
        assert texts(turn.take()) == ["a", "b", "c"]
        assert await other.session("s").withdraw(2) is True
        assert await other.session("s").withdraw(2) is False
        turn["n"] = 1
    assert await session.inbox() == []
    assert await session.withdraw(1) is False
    await session.post(said("d"))
    assert [each.number for each in await session.inbox()] == [4]
    for number in (0, -1, "1", True, 1.0):
        with pytest.raises(InvalidValue, match="number"):
            await session.withdraw(number)


async def test_a_turn_whose_only_input_was_withdrawn_commits_the_rest(store: Any) -> None:
    session = store.session("s")
    await session.post(said("a"))
    await session.post(said("b"))
    async with session.turn() as turn:
        assert texts(turn.take(1)) == ["a"]
        assert await session.withdraw(1) is True
        turn["n"] = 1
    assert await session.get("n", fresh=True) == 1
    assert texts(await session.inbox()) == ["b"]


async def test_a_full_inbox_refuses_inputs_and_a_turn_makes_room(opener: Any) -> None:
    store = await opener(inbox_limit=3, inbox_bytes=1024)
    session = store.session("s")
    for text in "abc":
        await session.post(said(text))
    with pytest.raises(Backpressure, match="inbox"):
        await session.post(said("d"))
    assert await session.withdraw(2)
    await session.post(said("x" * 700))
    await session.withdraw(1)
    with pytest.raises(Backpressure, match="inbox"):
        await session.post(said("y" * 700))
    with pytest.raises(TooLarge, match="inbox_bytes"):
        await session.post(said("z" * 1100))
    assert await served(session) == ["c", "x" * 700]
    for _ in range(5):
        await session.post(said("y" * 700))
        assert await served(session) == ["y" * 700]


async def test_requests_of_withdrawn_inputs_are_forgotten_in_time(opener: Any) -> None:
    store = await opener(remembered_requests=2)
    session = store.session("s")
    await session.post(said("waits"), request_id="waits")
    for number in range(2, 12):
        assert await session.post(said("x"), request_id=f"r{number}") == number
        assert await session.withdraw(number)
    with redis_of(store) as redis:
        notes = [name for name in redis.hkeys(keys_of(store, "s").record) if name.startswith(b"#bq")]
    assert len(notes) <= 4
    assert await session.post(said("waits"), request_id="waits") == 1, "it is remembered while it waits"
    assert await session.post(said("x"), request_id="r11") == 11
    assert await session.post(said("x"), request_id="r2") == 12
    await store.admin.archive()
    with redis_of(store) as redis:
        redis.delete(keys_of(store, "s").record)
    store.invalidate()
    assert [each.number for each in await session.inbox()] == [1, 12]
    assert await served(session) == ["waits", "x"]


async def test_bad_inputs_are_refused(store: Any) -> None:
    session = store.session("s")
    for message in ({"content": "x"}, "x", None, {"role": "user", "content": b"x"}):
        with pytest.raises(InvalidValue):
            await session.post(message)
    for request_id in ("", "#x", "r" * 257, 7):
        with pytest.raises(InvalidValue):
            await session.post(said("a"), request_id=request_id)
    async with session.turn() as turn:
        turn["n"] = 1
    for call in (turn.take, turn.arrived):
        with pytest.raises(InvalidValue):
            found = call()
            await found
    assert await session.inbox() == []


@pytest.mark.replicas
async def test_inputs_are_encrypted_and_are_encrypted_anew(opener: Any) -> None:
    old, new = {"old": bytes(32)}, {"new": b"2" * 32}
    store = await opener(encryption=Encryption(KeyRing(old)))
    await store.session("s").post(said("a secret"), request_id="r")
    with redis_of(store) as redis:
        stored = b"".join(redis.hgetall(keys_of(store, "s").record).values())
    assert stored
    assert b"secret" not in stored
    await store.admin.archive()
    again = await opener(encryption=Encryption(KeyRing({**new, **old}, current="new")))
    await again.admin.reencrypt()
    assert texts(await again.session("s").inbox()) == ["a secret"]
    await again.admin.archive()
    alone = await opener(encryption=Encryption(KeyRing(new)))
    [found] = await alone.session("s").inbox()
    assert (found.message.content, found.request_id) == ("a secret", "r")
    assert found.time > 0
    assert await alone.session("s").post(said("a secret"), request_id="r") == 1


@pytest.mark.replicas
async def test_an_inbox_counts_on_after_its_inputs_grew_by_another_key(opener: Any) -> None:
    old, new = {"o": bytes(32)}, {"a-key-whose-id-is-much-longer-than-the-first": b"2" * 32}
    store = await opener(encryption=Encryption(KeyRing(old)))
    for text in "ab":
        await store.session("s").post(said(text))
    await store.admin.archive()
    again = await opener(encryption=Encryption(KeyRing({**new, **old}, current=next(iter(new)))), inbox_bytes=1024)
    await again.admin.reencrypt()
    session = again.session("s")
    assert await session.withdraw(1)
    assert await served(session) == ["b"]
    for _ in range(3):
        await session.post(said("x" * 700))
        assert await served(session) == ["x" * 700]


async def test_an_exported_state_has_the_deadlines_of_its_fields_only(store: Any) -> None:
    session = store.session("s")
    await session.set("short", 1, ttl=1000)
    await session.post(said("a"), request_id="a")
    async with session.turn(request_id="r") as turn:
        turn["n"] = 1
    state = await session.export_state()
    assert list(state["expires"]) == ["short"]
    await session.restore_state(state)
    assert await session.export_state() == state
    await session.delete("short")
    assert "expires" not in await session.export_state()


async def test_a_policy_that_allows_messages_alone_lets_a_turn_forget_old_requests(opener: Any) -> None:
    asked = set[Any]()
    store = await opener(access=lambda request: asked.add((request.action, request.field)) or True,
                         remembered_requests=1)  # fmt: skip
    session = store.session("s")
    for text in "abc":
        await session.post(said(text), request_id=text)
        await served(session)
    assert {field for action, field in asked if action == "write"} == {"#messages"}


async def test_a_policy_is_asked_to_post_and_to_read(opener: Any) -> None:
    allowed = {"write"}
    store = await opener(access=lambda request: request.action in allowed)
    session = store.session("s")
    await session.post(said("a"))
    with pytest.raises(AccessDenied):
        await session.inbox()
    allowed.clear()
    allowed.add("read")
    assert texts(await session.inbox()) == ["a"]
    for refused in (session.post(said("b")), session.withdraw(1)):
        with pytest.raises(AccessDenied):
            await refused


# Follow what was posted


async def answered(session: Any, *chunks: Any, request_id: str | None = None, outcome: Any = None) -> None:
    """A turn that streams something, takes the inputs, and streams these chunks."""
    async with session.turn(request_id=request_id) as turn:
        await turn.stream("before")
        turn.append(*(each.message for each in turn.take()))
        for chunk in chunks:
            await turn.stream(chunk)
        turn.outcome = outcome


async def test_who_posts_follows_the_turn_that_takes_the_input(store: Any) -> None:
    session = store.session("s")
    await session.post(said("a"), request_id="a")
    following = asyncio.create_task(shown_output(session, "a"))
    await answered(session, "Os", "lo", request_id="r", outcome="Oslo")
    expected = ["Os", "lo", ("Ended", 2, "Oslo")]
    assert plain(await following) == expected
    assert plain(await shown_output(session, "a")) == expected, "also afterwards"
    assert plain(await shown_output(session, "r")) == ["before", *expected]


async def test_an_input_posted_meanwhile_is_followed_from_where_it_is_taken(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    async with session.turn() as turn:
        await turn.stream("another's")
        await session.post(said("a"), request_id="a")
        following = asyncio.create_task(shown_output(session, "a"))
        await turn.flush()
        assert texts(await turn.arrived()) == ["a"]
        turn.take()
        await turn.stream("its own")
    assert plain(await following) == ["its own", ("Ended", 2, None)]
    await session.post(said("b"), request_id="b")
    await answered(session, "c")
    assert plain(await shown_output(session, "a")) == ["its own", ("Ended", 2, None)]
    assert plain(await shown_output(session, "b")) == ["c", ("Ended", 4, None)]


async def test_following_an_input_goes_on_after_any_position(store: Any) -> None:
    session = store.session("s")
    await answered(session, "earlier")
    await session.post(said("a"), request_id="a")
    await answered(session, *"xyz", request_id="r", outcome=1)
    parts = await shown_output(session, "a")
    assert len(parts) == 4
    for at, part in enumerate(parts[:-1]):
        assert await shown_output(session, "a", after=part.position) == parts[at + 1 :]


async def test_a_failed_turn_gives_its_followers_to_the_next_one(store: Any) -> None:
    session = store.session("s")
    await session.post(said("a"), request_id="a")
    following = asyncio.create_task(shown_output(session, "a"))
    with pytest.raises(ZeroDivisionError):
        async with session.turn() as turn:
            turn.take()
            await turn.stream("first")
            await turn.flush()
            raise ZeroDivisionError
    await answered(session, "second")
    found = plain(await following)
    assert found[-2:] == ["second", ("Ended", 2, None)]
    assert found in (["first", "Failed", "Restarted", "second", found[-1]], ["second", found[-1]])


async def test_a_follower_is_told_when_the_input_was_withdrawn_or_served_long_ago(opener: Any) -> None:
    store = await opener(output_ttl=1.0)
    session = store.session("s")
    for text in "ab":
        await session.post(said(text), request_id=text)
    await session.withdraw(1)
    assert plain(await shown_output(session, "a")) == ["Abandoned"]
    await answered(session, "x", request_id="r", outcome="answer")
    with redis_of(store) as redis:
        redis.delete(keys_of(store, "s").output)
    assert plain(await shown_output(session, "b"))[-1] == ("Ended", 4, None)


# Stops


async def until_stopped(turn: Any) -> None:
    """Work as a body does that calls the store."""
    while True:
        await asyncio.sleep(0.01)
        await turn.messages(last=1)


@pytest.mark.replicas
async def test_the_request_of_a_message_stops_the_turn_that_took_it(opener: Any) -> None:
    store, other = await opener(), await opener()
    session, elsewhere = store.session("s"), other.session("s")
    await session.post(said("q"), request_id="q")
    assert await elsewhere.stop("q", wait=0) == StopResult("nothing ran"), "no turn has taken it"
    with pytest.raises(Stopped, match="enough"):
        async with session.turn() as turn:
            assert texts(turn.take()) == ["q"]
            stopping = asyncio.create_task(elsewhere.stop("q", reason="enough"))
            try:
                async with turn.stoppable():
                    await until_stopped(turn)
            finally:
                turn.append(said("half"))
    assert await stopping == StopResult("stopped")
    assert texts(await session.inbox()) == ["q"], "nothing was written"
    assert await served(session) == ["q"]
    assert await elsewhere.stop("q", wait=0) == StopResult("finished", 2)


@pytest.mark.replicas
async def test_a_turn_beside_a_waiting_message_is_not_stopped_by_its_request(opener: Any) -> None:
    store, other = await opener(), await opener()
    session = store.session("s")
    await session.post(said("q"), request_id="q")
    async with session.turn() as turn:
        await turn.stream("about something else")
        assert await other.session("s").stop("q", wait=0) == StopResult("nothing ran")
        assert not turn.stopping
        turn["n"] = 1


async def test_a_stop_for_one_token_reaches_no_other_turn(store: Any) -> None:
    session = store.session("s")
    async with session.turn() as turn:
        token = turn.token
        turn["n"] = 1
    for request, own in (None, "r1"), ("r2", "r2"):
        async with session.turn(request_id=own) as turn:
            assert await session.stop(request, token=token, wait=0) == StopResult("nothing ran")
            assert not turn.stopping
    with pytest.raises(Stopped):
        async with session.turn(request_id="r") as turn:
            assert (await session.stop("other", token=turn.token, wait=0)).state == "nothing ran"
            assert (await session.stop(token=turn.token, wait=0)).state == "stopping"
            async with turn.stoppable():
                await until_stopped(turn)
    for bad in (0, -1, "1", True):
        with pytest.raises(InvalidValue, match="token"):
            await session.stop(token=bad)


# Many at once


@pytest.mark.only(api="asyncio", warm="fake")
@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.wide)])
@pytest.mark.timeout(600)
async def test_posts_that_race_the_end_of_turns_are_served_once(store: Any, rounds: int) -> None:
    await race(store, store, rounds)


@pytest.mark.only(warm="real")
@pytest.mark.replicas
@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.timeout(1200)
async def test_posts_of_another_replica_that_race_the_end_of_turns_are_served_once(opener: Any, rounds: int) -> None:
    await race(await opener(), await opener(), rounds)


async def race(store: Any, other: Any, rounds: int) -> None:
    """Post at random moments of turns that take what they find, and compare the conversation with what was accepted."""
    chance = random.Random(38)
    session, elsewhere = store.session("s"), other.session("s")
    accepted = dict[str, int]()
    late = 0

    async def serve(number: int, pauses: int) -> None:
        async with session.turn(request_id=f"t{number}") as turn:
            taken = [*turn.take()]
            for _ in range(pauses):
                await asyncio.sleep(0)
            if number % 2:
                await turn.arrived()
                taken += turn.take()
            turn.append(*(each.message for each in taken), said(f"answer {number}"))

    async def post(text: str, pauses: int) -> None:
        for _ in range(pauses):
            await asyncio.sleep(0)
        accepted[text] = await elsewhere.post(said(text), request_id=text)
        if chance.random() < 0.2:
            assert await elsewhere.post(said(text), request_id=text) == accepted[text]

    for number in range(rounds):
        turn = asyncio.create_task(serve(number, chance.randrange(20)), context=Context())
        await asyncio.create_task(post(f"q{number}", chance.randrange(40)), context=Context())
        await turn
        late += len(await session.inbox()) > 0
    await served(session)
    assert await session.inbox() == await elsewhere.inbox() == []
    found = Counter(text for text in await shown(session) if text.startswith("q"))
    assert found == Counter(accepted.keys())
    assert sorted(accepted.values()) == list(range(1, rounds + 1)), "the numbers of the inputs"
    order = [text for text in await shown(session) if text.startswith("q")]
    assert order == sorted(order, key=accepted.__getitem__), "in the order of acceptance"
    assert 0 < late < rounds, "the moments differ"


# Maintenance


async def test_inputs_are_there_after_each_work_on_many_records(opener: Any) -> None:
    store = await opener()
    session = store.session("s", user="u")
    for number in range(6):
        await session.write(set={"n": number}, append=[said(str(number))])
    await session.post(said("served"), request_id="served")
    assert await served(session) == ["served"]
    await session.post(said("waits"), request_id="waits")
    await store.admin.archive()
    shift(store, 2 * 86_400)
    assert (await store.admin.compact())["records"] == 1
    shift(store, -2 * 86_400)
    await evict(store, "s")
    assert texts(await session.inbox()) == ["waits"]
    await store.admin.purge(keep_changes=1, keep_messages=1)
    await evict(store, "s")
    assert texts(await session.inbox()) == ["waits"]
    assert await session.post(said("served"), request_id="served") == 1
    assert not (await store.admin.repair()).lost
    await store.admin.update_index()
    assert texts(await session.inbox()) == ["waits"]
    lines = await store.admin.export("s")
    await store.admin.import_(lines, id="copy")
    assert texts(await store.session("copy").inbox()) == ["waits"]
    assert await served(session) == ["waits"]


@pytest.mark.parametrize("raises", [False, True])
async def test_a_step_of_a_workflow_serves_inputs_once(store: Any, raises: bool) -> None:
    session = store.session("s")
    taken = list[str]()

    def work(state: AgentState, turn: Any) -> AgentState:
        found = texts(turn.take())
        taken.extend(found)
        if raises and len(taken) == 1:
            raise ZeroDivisionError
        return state.with_memory(state.memory.note("told", found)).to_done("done")

    async def run() -> Any:
        return await store.run(Workflow({"planning": work}), "look", session_id="s", request_id="r")

    await session.post(said("a"), request_id="a")
    if raises:
        with pytest.raises(ZeroDivisionError):
            await run()
        assert texts(await session.inbox()) == ["a"]
    state = await run()
    assert state.memory.notes == {"told": ["a"]}
    assert taken == ["a"] * (1 + raises)
    assert await session.inbox() == []
    assert await session.post(said("a"), request_id="a") == 1
