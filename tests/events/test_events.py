"""Lifecycle events: written with the change that they tell of, heard by every replica once and in order (G6)."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest
from below import keys_of, own_server, redis_of, tiers, until
from controls import sabotage
from counting import asked
from proxy import Proxy
from reaping import run

from distributed_state import Conflict, Event, Fenced, InvalidValue, TooLarge
from distributed_state.warm.consumers import RESYNC
from distributed_state.warm.scripts import COMMIT, EMIT

real = pytest.mark.only(warm="real")
single = pytest.mark.only(warm="single")


async def taken(events: Any, count: int) -> list[Event]:
    """The next events, which have to come soon; and no more than these."""
    found = []
    for _ in range(count):
        event = await events.next(10)
        assert event is not None, f"{len(found)} of {count} came: {found}"
        found.append(event)
    assert await events.next(0.05) is None
    return found


def created(store: Any, id: str) -> int:
    """How often the stream says that a session was created."""
    head = b"\nconversation.created\n" + keys_of(store, id).text + b"\n"
    with redis_of(store) as client:
        return sum(head in fields[b"h"] for _, fields in client.xrange(keys_of(store, id).event_keys[0]))


# What is told


async def test_a_sessions_life_is_told_in_order(store: Any) -> None:
    async with store.events() as events:
        session = store.session("a:1", user="u")
        await session.set("n", 1)
        await session.append({"role": "user", "content": "hi"})
        await session.write(phase="planning")
        await session.checkpoint("here")
        await session.switch(previous_id="b", client="tui")
        await session.rollback(label="here")
        await session.clear(messages=True)
        await store.delete("a:1")
        await session.create({"n": 2})
        found = await taken(events, 8)
    assert [(each.type, each.data, each.version) for each in found] == [
        ("conversation.created", {}, 1),
        ("session.phase", {"phase": "planning"}, 3),
        ("session.checkpoint", {"label": "here"}, 4),
        (
            "conversation.switched",
            {"conversation_id": "a:1", "previous_id": "b", "message_count": 1, "client": "tui"},
            5,
        ),
        ("session.rollback", {"version": 4}, 6),
        ("conversation.cleared", {"messages": True}, 7),
        ("conversation.deleted", {}, 8),
        ("conversation.created", {}, 9),
    ]
    assert {each.conversation_id for each in found} == {"a:1"}
    assert {each.subject for each in found} == {session.ref.text}
    assert {each.source for each in found} == {store.replica}
    assert [each.sequence for each in found] == list(range(1, 9))
    assert len({each.id for each in found}) == 8


async def test_ordinary_changes_and_other_records_tell_nothing(store: Any) -> None:
    await store.session("s").set("n", 1)
    async with store.events() as events:
        await store.session("s").set("n", 2)
        await store.session("s").increment("n")
        for record in (store.user("u"), store.app("a"), store.task("t")):
            await record.set("n", 1)
            await record.clear()
        await store.delete("u", scope="user")
        await store.emit("end")
        assert [each.type for each in await taken(events, 1)] == ["end"]


async def test_a_change_that_is_refused_tells_nothing(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 1)
    async with store.events() as events:
        with pytest.raises(Conflict):
            await session.write(phase="busy", expect_version=7)
        with pytest.raises(Conflict):
            await session.create()
        await store.emit("end", subject=session)
        assert [each.type for each in await taken(events, 1)] == ["end"]


async def test_a_turn_tells_what_it_changed_when_it_is_committed(store: Any) -> None:
    session = store.session("s")
    async with store.events() as events:
        async with session.turn() as turn:
            turn.append({"role": "user", "content": "go"})
            turn.transition("new_task")
            assert await events.next(0.05) is None
        assert [each.type for each in await taken(events, 2)] == ["conversation.created", "session.phase"]
        with pytest.raises(ZeroDivisionError):
            async with session.turn() as turn:
                turn.transition("fail")
                raise ZeroDivisionError
        assert await events.next(0.05) is None


async def test_a_batch_tells_of_each_of_its_records(store: Any) -> None:
    async with store.events("conversation.created") as events:
        async with store.batch() as batch:
            for n in range(5):
                batch.on(store.session(f"s{n}")).set("n", n)
        assert {each.conversation_id for each in await taken(events, 5)} == {f"s{n}" for n in range(5)}


async def test_a_fork_is_a_new_conversation(store: Any) -> None:
    await store.session("s").set("n", 1)
    async with store.events() as events:
        await store.session("s").fork("t")
        found = await taken(events, 1)
    assert [(each.type, each.conversation_id) for each in found] == [("conversation.created", "t")]


@pytest.mark.only(warm="real", api="asyncio")
async def test_who_creates_at_the_same_time_tells_of_it_once(opener: Any) -> None:
    """The server decides who was first; negative control: told by whoever thinks that he is."""
    replicas = [await opener() for _ in range(4)]

    async def race(id: str) -> int:
        await asyncio.gather(*(each.session(id).set(f"f{n}", n) for n, each in enumerate(replicas)))
        return created(replicas[0], id)

    async with replicas[0].events() as events:
        assert [await race(f"s{n}") for n in range(20)] == [1] * 20
        told = [each.conversation_id for each in await taken(events, 20)]
        assert sorted(told) == sorted(f"s{n}" for n in range(20))
    with sabotage(
        "commit", "if (operation == 'E' or operation == 'X') and (not version or head[3])", "if operation == 'E'"
    ):
        assert max([await race(f"t{n}") for n in range(20)]) > 1


# Emitting


async def test_what_is_emitted_comes_back_as_it_was_given(store: Any) -> None:
    data = {"n": 2**70, "f": 1.0, "deep": [[], {}], "text": "a\nb\u2028", "lone": "\ud800", "nul": "\0"}
    async with store.events("mail.*") as events:
        written = await store.emit("mail.sent", data, subject=store.user("u 1"))
        other = await store.emit("mail.sent", subject="client:tui 7")
        bare = await store.emit("mail.sent")
        await store.emit("post.sent")
        found = await taken(events, 3)
    assert {each.id for each in found} == {written.id, other.id, bare.id}
    assert written in found
    assert other in found
    assert bare in found
    assert written.data == data
    assert (written.subject, other.subject, bare.subject) == ("user:u 1", "client:tui 7", "")
    assert written.conversation_id == ""


async def test_who_emits_is_told(store: Any) -> None:
    async with store.events() as events:
        with store.acting_as("user:7 ü"):
            assert (await store.emit("mail.sent")).actor == "user:7 ü"
        assert [each.actor for each in await taken(events, 1)] == ["user:7 ü"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("",), InvalidValue),
        (("with space",), InvalidValue),
        (("conversation.*",), InvalidValue),
        (("resync",), InvalidValue),
        ((7,), InvalidValue),
        (("ok", [1]), InvalidValue),
        (("ok", {"a": {1, 2}}), InvalidValue),
        (("ok", {1: 2}), InvalidValue),
        (("ok", {"a": "x" * 300_000}), TooLarge),
    ],
)
async def test_what_cannot_be_emitted_is_refused_by_name(store: Any, arguments: Any, error: type[Exception]) -> None:
    async with store.events() as events:
        with pytest.raises(error):
            await store.emit(*arguments)
        for subject in ("a\nb", "x" * 2000, 5, None):
            with pytest.raises(InvalidValue, match="subject"):
                await store.emit("ok", subject=subject)
        assert await events.next(0.02) is None


async def test_an_event_larger_than_what_is_published_is_read_from_the_stream(store: Any) -> None:
    async with store.events() as events:
        for n in range(5):
            await store.emit("big", {"n": n, "x": "x" * 20_000}, subject="s")
            await store.emit("small", {"n": n}, subject="s")
        found = await taken(events, 10)
    assert [each.data["n"] for each in found] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@single
async def test_a_lost_reply_is_asked_for_again_and_the_event_is_written_once(opener: Any) -> None:
    store = await opener(archiver=False)
    await store.emit("first", subject="s")
    await store.session("first").set("n", 1)
    with Proxy(opener.url) as proxy:
        other = await opener(url=proxy.url, archiver=False)
        await other.session("s").exists()

        async def count(type: str) -> int:
            async with store.events(type, since="oldest") as events:
                found = []
                while (event := await events.next(0.2)) is not None:
                    found.append(event.id)
            return len(found)

        async def answer_lost(sha: bytes, work: Any) -> Any:
            loss = proxy.lose(sha)
            task = asyncio.ensure_future(work)
            await until(loss.happened.is_set)
            loss.go.set()
            return await task

        written = await answer_lost(EMIT.sha, other.emit("mail.sent", {"n": 1}, subject="s"))
        assert await count("mail.sent") == 1
        assert written.data == {"n": 1}
        await answer_lost(COMMIT.sha, other.session("s").write(phase="p"))
        assert await count("session.phase") == 1
        guards = [
            ("if string.sub(head, 1, #id + 1) == id .. '\\n' then", "if false then"),
            ("since > event_ms + 0 and since > floor_ms", "true"),
        ]
        for guard, broken in guards:
            with sabotage("emit", guard, broken):
                await other.emit("load", subject="s")
                await answer_lost(EMIT.sha, other.emit("mail.doubled", subject="s"))
        assert await count("mail.doubled") == 4
        await other.close()


async def reads_of_the_stream(opener: Any) -> int:
    """How often ten events that follow one another made their script read what was written before."""
    store = await opener(archiver=False, partitions=1)
    await store.emit("first", subject="s")
    await asyncio.sleep(0.01)  # the newest is older than the next to a millisecond, by the clock that is asked now
    await tiers(store).clock.ask()
    with asked(store) as seen:
        for _ in range(10):
            await asyncio.sleep(0.01)
            await store.emit("next", subject="s")
    return sum(each.startswith("XREVRANGE") for each in seen.inside)


@single
async def test_an_event_whose_stream_has_none_since_it_was_sent_reads_none(opener: Any) -> None:
    assert await reads_of_the_stream(opener) == 0


@single
async def test_without_the_note_of_the_newest_each_would_read_the_stream(opener: Any) -> None:
    """Negative control."""
    with sabotage("emit", "local seen = event_ms and", "local seen = false and"):
        assert await reads_of_the_stream(opener) == 10


@pytest.mark.parametrize("how", ["trimmed", "emptied", "dropped"])
@single
async def test_an_event_whose_reply_was_lost_is_written_once_though_redis_does_not_keep_it(
    opener: Any, how: str
) -> None:
    """However much is told meanwhile, and though it left the stream: what Redis does not keep, SQL has."""
    with own_server(opener) as server, Proxy(server.url) as proxy:
        other = await opener(url=server.url, archiver=False, kept_events=64, partitions=1)
        store = await opener(url=proxy.url, archiver=False, kept_events=64, partitions=1)
        await other.emit("first", subject="s")
        loss = proxy.lose(EMIT.sha)
        task = asyncio.ensure_future(store.emit("mail.sent", {"n": 1}, subject="s"))
        await until(loss.happened.is_set)
        if how == "emptied":
            await other.admin.archive()
            with redis_of(other) as client:
                client.flushall()
            await other.emit("later", subject="s")
        elif how == "dropped":  # as reencrypt() does, up to the last that an old worker wrote
            keys = tiers(other).keys.partition(0)
            await run(other, tiers(other).stream.drop(keys, lambda told: True, keep=False))
        else:
            await asyncio.gather(*(other.emit("later", subject="s") for _ in range(140)))
        loss.go.set()
        written = await task
        [found] = await other.admin.audit(type="mail.sent")
        assert (written.id, written.sequence, written.epoch, written.time) == (
            found.id, found.sequence, found.epoch, found.time
        )  # fmt: skip
        await store.close()
        await other.close()


@single
async def test_an_event_that_lay_about_is_not_written_after_its_repetition(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False, timeout=0.5)
        await store.emit("first", subject="s")
        delay = proxy.hold(EMIT.sha)
        await store.emit("mail.sent", subject="s")
        assert delay.arrived.is_set()
        delay.go.set()
        await until(delay.happened.is_set)
        assert len(await store.admin.audit(type="mail.sent", subject="s")) == 1
        await store.close()


# Hearing


@pytest.mark.replicas
async def test_every_replica_hears_each_event_once(opener: Any) -> None:
    replicas = [await opener() for _ in range(3)]
    received: list[list[tuple[str, int]]] = [[], [], []]
    for each, mine in zip(replicas, received, strict=True):
        each.on("mail.*", lambda event, mine=mine: mine.append((event.source, event.data["n"])))
        await each.ready()
    for n in range(30):
        await replicas[n % 3].emit("mail.sent", {"n": n}, subject="one subject")
    await until(lambda: all(len(mine) == 30 for mine in received))
    expected = [(replicas[n % 3].replica, n) for n in range(30)]
    assert received == [expected, expected, expected]


@single
async def test_who_handles_nothing_subscribes_to_no_events(opener: Any) -> None:
    """To publish to who does not listen costs nothing, there and here."""
    store = await opener(partitions=4)
    channels = [tiers(store).keys.partition(each).events_channel for each in range(4)]

    def subscribed() -> list[int]:
        with redis_of(store) as client:
            return [count for _, count in client.pubsub_shardnumsub(*channels)]

    await store.session("s").set("n", 1)
    assert await store.session("s").get("n") == 1
    assert subscribed() == [0] * 4
    store.on("*", print)
    await store.ready()
    await until(lambda: subscribed() == [1] * 4)
    await store.off(print)
    await until(lambda: subscribed() == [0] * 4)


async def test_handlers_take_names_patterns_and_lists_of_them(store: Any) -> None:
    received: dict[str, list[str]] = {}

    def noting(name: str) -> Any:
        return lambda event: received.setdefault(name, []).append(event.type)

    chosen = {"one": "a.b", "wild": "a.*", "all": "*", "two": ["a.b", "c.d"], "none": "a"}
    for name, types in chosen.items():
        store.on(types, noting(name))
    await store.ready()
    for type in ("a.b", "a.c", "c.d", "axb"):
        await store.emit(type, subject="s")
    await until(lambda: len(received.get("all", [])) == 4)
    await until(lambda: sum(map(len, received.values())) == 9)
    assert received == {
        "one": ["a.b"],
        "wild": ["a.b", "a.c"],
        "all": ["a.b", "a.c", "c.d", "axb"],
        "two": ["a.b", "c.d"],
    }


async def test_what_only_a_newer_release_publishes_is_passed_on(store: Any) -> None:
    """Another type comes to handlers of that type and of all, and another name in the data to all that ask for it."""
    received: dict[str, list[Any]] = {"all": [], "new": [], "known": []}
    for name, types in {"all": "*", "new": "session.folded", "known": "conversation.switched"}.items():
        store.on(types, lambda event, name=name: received[name].append((event.type, event.data)))
    await store.ready()
    given: list[tuple[str, dict[str, Any]]] = [
        ("session.folded", {"into": "b"}),
        ("conversation.switched", {"message_count": 1, "of_the_next": {"a": [1]}}),
    ]
    for type, data in given:
        await store.emit(type, data, subject="session:a")
    await until(lambda: len(received["all"]) == 2 and received["new"] and received["known"])
    assert received == {"all": given, "new": given[:1], "known": given[1:]}


async def test_on_is_a_decorator_too_and_off_ends_it(store: Any) -> None:
    received = []

    @store.on("a")
    def hear(event: Event) -> None:
        received.append(event.data["n"])

    await store.emit("a", {"n": 1})
    await until(lambda: received == [1])
    await store.off(hear)
    await store.emit("a", {"n": 2})
    async with store.events(since="oldest") as events:
        await taken(events, 2)
    assert received == [1]


async def test_what_a_replica_writes_after_on_is_heard(store: Any) -> None:
    """No race between registering and the first event, on whatever path it is written."""
    for n in range(10):
        received: list[str] = []

        def hear(event: Event, received: list[str] = received) -> None:
            received.append(event.type)

        store.on("*", hear)
        await (store.emit("a") if n % 2 else store.session(f"s{n}").write(phase="p"))
        await until(lambda received=received: len(received) == 1 + (n % 2 == 0))  # noqa: B023 - awaited here
        await store.off(hear)


async def test_a_handler_that_fails_or_is_slow_is_logged_and_stops_nobody(store: Any, caplog: Any) -> None:
    received = []

    @store.on("*")
    def poor(event: Event) -> None:
        if event.data["n"] == 1:
            raise ZeroDivisionError("poison")
        if event.data["n"] == 2:
            time.sleep(0.15)

    @store.on("*")
    def good(event: Event) -> None:
        received.append(event.data["n"])

    await store.ready()
    with caplog.at_level(logging.WARNING):
        for n in range(5):
            await store.emit("a.b", {"n": n}, subject="s")
        handlings = tiers(store).handlings
        await until(lambda: all(each.handled == 5 for each in handlings))
    assert received == [0, 1, 2, 3, 4]
    assert [(each.failed, each.slowed) for each in handlings] == [(1, 1), (0, 0)]
    said = [record.getMessage() for record in caplog.records]
    assert sum("poor failed on a.b" in each and "'s'" in each for each in said) == 1
    assert sum("poor took" in each and "a.b" in each for each in said) == 1


async def test_a_handler_that_hangs_holds_up_nobody_else(store: Any) -> None:
    received, release = [], threading.Event()

    def hanging(event: Event) -> None:
        release.wait(20)

    for _ in range(12):
        store.on("*", hanging)

    @store.on("*")
    def good(event: Event) -> None:
        received.append(event.data["n"])

    try:
        for n in range(50):
            await store.emit("a", {"n": n}, subject="s")
        await until(lambda: received == list(range(50)))
        assert await store.session("s").set("n", 1) == 1
    finally:
        release.set()


async def test_a_handler_that_hangs_is_named_in_the_log(store: Any, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("distributed_state.events.handlers._HANGING", 0.2)
    monkeypatch.setattr("distributed_state.warm.consumers._CHECK", 0.1)
    release = threading.Event()

    @store.on("*")
    def hanging(event: Event) -> None:
        release.wait(20)

    try:
        for n in range(3):
            await store.emit("a.b", {"n": n}, subject="s")

        def said() -> list[str]:
            return [each for each in caplog.messages if "hanging has been handling a.b" in each]

        await until(said)
        await asyncio.sleep(0.4)
        assert len(said()) == 1
        assert "2 events are waiting" in said()[0]
    finally:
        release.set()


async def test_who_hears_of_a_change_does_not_read_what_was_before_it(store: Any) -> None:
    """The event overtakes the reply, and on the writer's replica nothing else tells hot."""
    session, older, received = store.session("s"), [], []
    await session.write(phase="0")

    async with store.events("session.phase") as events:

        async def listen() -> None:
            async for event in events:
                seen = await session.phase()
                received.append(event.data["phase"])
                if int(seen) < int(event.data["phase"]):
                    older.append((seen, event.data["phase"]))
                if event.data["phase"] == "100":
                    return

        listening = asyncio.create_task(listen())
        for n in range(1, 101):
            await session.write(phase=str(n))
        await asyncio.wait_for(listening, 20)
    assert len(received) == 100
    assert older == []


@pytest.mark.only(api="asyncio")
async def test_a_coroutine_function_is_a_handler_under_asyncio(store: Any) -> None:
    received = []

    @store.on("a")
    async def hear(event: Event) -> None:
        await store.session(event.data["id"]).increment("n")
        received.append(event.type)

    await store.emit("a", {"id": "s"})
    await until(lambda: received == ["a"])
    assert await store.session("s").get("n") == 1


@pytest.mark.only(api="blocking")
async def test_a_coroutine_function_is_none_in_blocking_code(store: Any) -> None:
    async def hear(event: Event) -> None: ...

    with pytest.raises(InvalidValue, match="coroutine"):
        store.on("*", hear)


@pytest.mark.parametrize("types", ["", "a b", 5, ["ok", ""], "a/b"])
async def test_types_that_cannot_be_are_refused(store: Any, types: Any) -> None:
    with pytest.raises(InvalidValue):
        store.on(types, print)
    with pytest.raises(InvalidValue):
        store.events(*(types if isinstance(types, list) else [types]))


async def test_bad_options_are_refused(store: Any) -> None:
    for since in ("yesterday", "1=x", "999=1-ab@5", 5, ""):
        with pytest.raises(InvalidValue, match="since"):
            store.events(since=since)
    for group in ("", 5, "x" * 201):
        with pytest.raises(InvalidValue, match="group"):
            store.events(group=group)
    with pytest.raises(InvalidValue, match="handler"):
        store.on("*", 5)


# Going on


async def test_since_goes_on_where_others_were(store: Any) -> None:
    async with store.events() as events:
        for n in range(6):
            await store.emit("a", {"n": n}, subject=f"s{n % 3}")
        await until(lambda: events.waiting == 6)
        first = [(await events.next(5)).id for _ in range(4)]
        position = events.position
        rest = [each.id for each in await taken(events, 2)]
    async with store.events(since=position) as events:
        assert sorted(each.id for each in await taken(events, 2)) == sorted(rest)
    async with store.events(since="oldest") as events:
        assert sorted(each.id for each in await taken(events, 6)) == sorted(first + rest)
    async with store.events() as events:
        assert await events.next(0.05) is None


async def test_a_position_skips_what_was_not_asked_for(store: Any) -> None:
    async with store.events("wanted") as events:
        for n in range(20):
            await store.emit("unwanted", {"n": n}, subject="s")
        await store.emit("wanted", subject="s")
        await taken(events, 1)
        position = events.position
    async with store.events(since=position) as events:
        assert await events.next(0.05) is None


async def test_events_are_iterated_until_they_are_closed(store: Any) -> None:
    events, found = store.events(), []
    async with events:
        for n in range(3):
            await store.emit("a", {"n": n}, subject="s")
        async for event in events:
            found.append(event.data["n"])
            if len(found) == 3:
                break
    assert found == [0, 1, 2]
    assert await events.next(0) is None


@pytest.mark.wide
async def test_who_was_away_longer_than_the_window_is_told_once(opener: Any) -> None:
    store = await opener(kept_events=100, partitions=4)
    async with store.events() as events:
        for n in range(20):
            await store.emit("a", {"n": n}, subject=f"s{n}")
        await taken(events, 20)
        position = events.position
    for n in range(20, 800):
        await store.emit("a", {"n": n}, subject=f"s{n % 20}")
    async with store.events(since=position) as events:
        found = []
        while (event := await events.next(0.5)) is not None:
            found.append(event)
    assert [each.type for each in found].count(RESYNC) == 1
    assert found[0].type == RESYNC
    assert found[0].data == {"reason": "trimmed", "partitions": [0, 1, 2, 3]}
    by_partition: dict[int, list[int]] = {}
    for each in found[1:]:
        by_partition.setdefault(each.partition, []).append(each.sequence)
    for numbers in by_partition.values():
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert 100 <= len(numbers) < 164
    assert found[-1].data["n"] >= 796


@pytest.mark.wide
async def test_a_lost_tail_is_found_without_another_event(opener: Any, monkeypatch: Any) -> None:
    """Nothing was published, as when the server dropped us: positions are compared all the same."""
    store = await opener()
    async with store.events() as events:
        await store.emit("a", subject="s")
        await taken(events, 1)
        with sabotage("emit", "call('SPUBLISH', events_channel, place", "call('SPUBLISH', journal, place"):
            await store.emit("b", subject="s")
        event = await events.next(8)
        assert event is not None
        assert event.type == "b"


@pytest.mark.wide
async def test_a_slow_consumer_is_read_for_when_it_has_room(opener: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("distributed_state.warm.consumers._ROOM", 50)
    store = await opener(partitions=4)
    async with store.events() as events:
        for n in range(400):
            await store.emit("a", {"n": n}, subject="s")
        assert events.waiting <= 50
        found = [(await events.next(10)).data["n"] for _ in range(400)]
    assert found == list(range(400))


async def test_large_events_wait_in_the_stream_not_in_memory(opener: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("distributed_state.warm.consumers._ROOM_BYTES", 200_000)
    monkeypatch.setattr("distributed_state.warm.consumers._AT_ONCE", 4)
    store = await opener(partitions=2)
    async with store.events() as events:
        for n in range(60):
            await store.emit("a", {"n": n, "x": "x" * 20_000}, subject="s")
        assert events.waiting <= 14
        found = [(await events.next(10)).data["n"] for _ in range(60)]
    assert found == list(range(60))


# Groups


@pytest.mark.wide
@pytest.mark.replicas
async def test_a_groups_members_share_the_events(opener: Any) -> None:
    replicas = [await opener(partitions=16) for _ in range(3)]
    received: list[tuple[int, str, int]] = []

    def handler(member: int) -> Any:
        return lambda event: received.append((member, event.subject, event.data["n"]))

    for member, each in enumerate(replicas):
        each.on("mail.*", handler(member), group="mailers")
        await each.ready()
    shares = [each.handlings for each in map(tiers, replicas)]
    assert all(shares)
    await until(lambda: all(_share(each) >= 4 for each in replicas), 20)
    for n in range(300):
        await replicas[0].emit("mail.sent", {"n": n}, subject=f"s{n % 40}")
    await until(lambda: len(received) >= 300)
    assert sorted(n for _, _, n in received) == list(range(300)), "each event is one member's"
    assert {member for member, _, _ in received} == {0, 1, 2}
    for subject in {subject for _, subject, _ in received}:
        numbers = [n for _, s, n in received if s == subject]
        assert numbers == sorted(numbers), "in order"


def _share(store: Any) -> int:
    group = tiers(store).handlings[0]._events._group
    return len(group._assignment.mine)


@pytest.mark.replicas
async def test_a_group_of_one_goes_on_after_a_restart(opener: Any) -> None:
    store = await opener()
    async with store.events("a", group="one") as events:
        await store.emit("a", {"n": 1}, subject="s")
        await store.emit("a", {"n": 2}, subject="s")
        await taken(events, 2)
    await store.emit("a", {"n": 3}, subject="s")
    other = await opener()
    async with other.events("a", group="one") as events:
        assert [each.data["n"] for each in await taken(events, 1)] == [3]
    async with other.events("a", group="one") as events:
        assert await events.next(0.1) is None


@pytest.mark.replicas
async def test_what_a_group_was_not_seen_to_handle_comes_again_with_the_same_id(opener: Any) -> None:
    store = await opener()
    await store.emit("a", {"n": 0}, subject="s")
    with pytest.raises(ZeroDivisionError):
        async with store.events("a", group="g", since="oldest") as events:
            first = await events.next(5)
            await store.emit("a", {"n": 1}, subject="s")
            second = await events.next(5)
            raise ZeroDivisionError
    async with store.events("a", group="g") as events:
        assert [each.id for each in await taken(events, 1)] == [second.id]
    assert first.id != second.id


@pytest.mark.replicas
async def test_two_groups_do_not_share(opener: Any) -> None:
    store = await opener()
    async with store.events(group="g") as one, store.events(group="h") as other:
        await store.emit("a", subject="s")
        assert (await taken(one, 1))[0] == (await taken(other, 1))[0]


@real
async def test_a_write_of_a_lost_lease_tells_nothing(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    await session.set("n", 1)
    async with store.events("session.*") as events:
        with pytest.raises(Fenced):
            async with session.lock(ttl=30):
                with redis_of(store) as client:
                    client.delete(keys_of(store, "s").lock)
                await session.write(phase="stolen")
        assert await events.next(0.1) is None


async def test_closing_the_store_ends_its_consumers(opener: Any) -> None:
    store = await opener()
    events = store.events()
    await events.next(0)
    waiting = asyncio.create_task(events.next())
    await asyncio.sleep(0.05)
    await store.close()
    assert await waiting is None
