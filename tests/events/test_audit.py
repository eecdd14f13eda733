"""The audit trail: what was told is in SQL, each event once, in order, and found by whatever is asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from below import everything_in_sql, keys_of, tiers
from sync_api import core

from distributed_state import AccessDenied, ColdUnavailable, Encryption, InvalidValue, KeyRing, Request
from distributed_state.cold import erasure, tables
from distributed_state.results import Event


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def quiet(opener: Any, **settings: Any) -> Any:
    """A store that archives only when told to."""
    return await opener(**{"archiver": False, "durability": "memory"} | settings)


async def whole_history(store: Any, id: str = "s", **options: Any) -> list[tuple[str, int]]:
    """A session to which everything happens; the types of its events and the versions that they tell of."""
    session = store.session(id, **options)
    await session.append(said("hi"))
    await session.switch(previous_id="", client="web")
    await session.write(set={"a": 1}, phase="planning")
    await session.checkpoint("good")
    await session.clear()
    await session.rollback(label="good")
    await store.delete(id)
    return [
        ("conversation.created", 1),
        ("conversation.switched", 2),
        ("session.phase", 3),
        ("session.checkpoint", 4),
        ("conversation.cleared", 5),
        ("session.rollback", 6),
        ("conversation.deleted", 7),
    ]


def told(events: list[Event]) -> list[tuple[str, int]]:
    """Without phases that go with other changes: those have a test elsewhere."""
    kept = [event for event in events if event.type != "session.phase" or event.version == 3]
    return [(event.type, event.version) for event in kept]


async def everything(store: Any, **asked: Any) -> list[Event]:
    """Page by page, from the oldest event on."""
    found: list[Event] = []
    page = await store.admin.audit(after="oldest", limit=3, **asked)
    while page:
        assert len(page) <= 3
        found += page
        page = await store.admin.audit(after=found[-1].cursor, limit=3, **asked)
    return found


async def test_what_happens_to_a_conversation_is_kept_in_order(store: Any) -> None:
    with store.acting_as("wor:ker\x00"):
        expected = await whole_history(store, "a:b\x00")
    found = await store.admin.audit(conversation="a:b\x00")
    assert told(found) == expected
    assert await everything(store) == found
    ref = store.session("a:b\x00").ref
    for event in found:
        assert (event.conversation_id, event.subject, event.actor) == ("a:b\x00", ref.text, "wor:ker\x00")
        assert event.source == store.replica
        assert event.id.startswith(f"{store.replica}.")
        assert event.to_dict()["specversion"] == "1.0"
    assert len({event.id for event in found}) == len(found)
    assert [event.sequence for event in found] == list(range(1, len(found) + 1))
    assert [event.time for event in found] == sorted(event.time for event in found)
    assert {event.partition for event in found} == {keys_of(store, "a:b\x00").partition}
    by_type = {event.type: event.data for event in found}
    assert by_type["session.checkpoint"] == {"label": "good"}
    assert by_type["conversation.switched"]["client"] == "web"


async def test_an_event_that_was_written_alone_is_no_change_of_anything(store: Any) -> None:
    await store.session("s").set("a", 1)
    await store.emit("lock.lost", {"token": 7}, subject="session:s")
    await store.emit("agent.switched", {"next_agent": "b", "text": "é\U0001f600\x00"}, subject="client:web 1")
    await store.session("s").set("a", 2)
    assert [change.version for change in await store.session("s").history()] == [1, 2]
    created, lost, switched = await store.admin.audit()
    assert created.type == "conversation.created"
    assert (lost.type, lost.version, lost.data, lost.conversation_id) == ("lock.lost", 0, {"token": 7}, "s")
    assert (switched.subject, switched.conversation_id) == ("client:web 1", "")
    assert switched.data == {"next_agent": "b", "text": "é\U0001f600\x00"}
    assert [lost, created] == sorted(await store.admin.audit(conversation="s"), key=lambda event: event.version)
    assert await store.admin.audit(subject="client:web 1") == [switched]
    assert [row.id for row in await store.sessions()] == ["s"]
    assert core(store)._lifecycle.cold.quarantined() == []


async def test_events_are_found_by_what_they_are_about_and_of_which_type(store: Any) -> None:
    for id in ("s", "t", "u"):
        await whole_history(store, id)
    await store.user("s").set("a", 1)
    await store.emit("conversation", subject="session:s")
    await store.emit("conversations.x", subject="session:s")
    every = await store.admin.audit()
    assert await everything(store) == every
    assert await store.admin.audit(type="*") == every
    for asked, wanted in [
        ({"conversation": "t"}, lambda event: event.conversation_id == "t"),
        ({"subject": store.session("t")}, lambda event: event.conversation_id == "t"),
        ({"subject": "session:t"}, lambda event: event.conversation_id == "t"),
        ({"subject": store.user("s")}, lambda event: False),
        ({"type": "conversation.*"}, lambda event: event.type.startswith("conversation.")),
        ({"type": "conversation"}, lambda event: event.type == "conversation"),
        ({"type": "session.checkpoint"}, lambda event: event.type == "session.checkpoint"),
        (
            {"type": "session.*", "conversation": "u"},
            lambda event: event.type.startswith("session.") and event.conversation_id == "u",
        ),
        ({"type": "nothing.*"}, lambda event: False),
        ({"type": "*.c*ed"}, lambda event: event.type.partition(".")[2] in ("created", "cleared")),
        ({"since": every[4].time}, lambda event: event.time >= every[4].time),
        ({"until": every[4].time}, lambda event: event.time < every[4].time),
        (
            {"since": every[4].time, "until": every[12].time, "type": "conversation.*"},
            lambda event: event.type.startswith("conversation.") and every[4].time <= event.time < every[12].time,
        ),
    ]:
        expected = [event for event in every if wanted(event)]
        assert await store.admin.audit(**asked) == expected, asked
        assert await everything(store, **asked) == expected, asked
        assert await store.admin.audit(limit=2, **asked) == expected[-2:], asked
        assert await store.admin.audit(after=every[6].cursor, **asked) == [e for e in expected if e in every[7:]], asked


async def test_bad_questions_are_refused(store: Any) -> None:
    for asked in (
        {"limit": 0}, {"limit": 1001}, {"limit": True}, {"limit": "5"},
        {"conversation": ""}, {"conversation": 7}, {"conversation": "x" * 5000},
        {"conversation": "s", "subject": "session:s"},
        {"subject": 7}, {"subject": "a\0"}, {"subject": "\ud800"},
        {"type": ""}, {"type": 7}, {"type": "a b"}, {"type": "a?"}, {"type": "x" * 201}, {"type": "a\0"},
        {"since": "10m"}, {"since": -1}, {"since": float("nan")}, {"until": True}, {"until": 1e300},
        {"since": 20, "until": 10},
        {"after": ""}, {"after": 7}, {"after": "newest"}, {"after": "1.2.3"}, {"after": "1.2.x.-3"},
        {"after": "é.1.x.1"}, {"after": "1.1.x.1\n"},
    ):  # fmt: skip
        with pytest.raises(InvalidValue):
            await store.admin.audit(**asked)
    assert await store.admin.audit(limit=1000, since=0, until=10**11, after="oldest") == []
    assert await store.admin.audit(subject="client:web", type="x") == []


async def test_the_trail_is_whole_or_it_is_not_shown(opener: Any) -> None:
    """What was told before the call is in it, archived or not; if it cannot be archived, that is an error."""
    store = await quiet(opener)
    await store.session("s").set("a", 1)
    assert [event.type for event in await store.admin.audit()] == ["conversation.created"]
    cold = core(store)._lifecycle.cold
    archive = cold.archive

    def fail(batches: Any) -> Any:
        raise ColdUnavailable("away")

    cold.archive = fail
    await store.delete("s")
    with pytest.raises(ColdUnavailable):
        await store.admin.audit()
    cold.archive = archive
    assert [event.type for event in await store.admin.audit()] == ["conversation.created", "conversation.deleted"]


@pytest.mark.only(api="asyncio", warm="redis")
async def test_without_waiting_for_the_archive_the_trail_is_short(opener: Any) -> None:
    """Negative control: what is not archived yet is missing, and nobody is told."""
    store = await quiet(opener)
    await store.session("s").set("a", 1)

    async def at_once(partitions: Any = None) -> int:
        return 0

    tiers(store).archiver.drain = at_once
    assert await store.admin.audit() == []


async def test_the_policy_is_asked_for_the_record_or_for_all(opener: Any) -> None:
    asked: list[Request] = []
    store = await opener(access=lambda request: asked.append(request) is None and request.actor == "ok")
    for call, id in (
        ({}, None),
        ({"type": "conversation.*"}, None),
        ({"subject": "client:web"}, None),
        ({"conversation": "s"}, "s"),
        ({"subject": "session:s"}, "s"),
    ):
        asked.clear()
        with pytest.raises(AccessDenied):
            await store.admin.audit(**call)
        with store.acting_as("ok"):
            assert await store.admin.audit(**call) == []
        assert asked == [Request(actor, "read", "session", id, None, None) for actor in ("", "ok")]


# Removing, moving, encrypting


async def test_forgetting_a_user_takes_the_events_too(opener: Any) -> None:
    store = await opener()
    await whole_history(store, "s-mango", user="mango")
    await store.session("t-mango", user="mango").write(set={"a": 1}, phase="mango")
    await store.emit("lock.lost", {"why": "mango"}, subject="session:s-mango")
    await store.emit("note.added", {"note": "mango"}, subject="user:mango")
    await store.user("mango").set("a", 1)
    await store.session("other").set("a", 1)
    assert len(await store.admin.audit()) > 10
    assert await store.forget("mango") == 3
    assert [event.subject for event in await store.admin.audit()] == ["session:other"]
    assert await store.admin.audit(conversation="s-mango") == []
    if opener.cold != "memory":
        rows = everything_in_sql(opener.archive, opener.namespace)
        assert "mango" not in repr(rows)
        assert len(rows["events"]) == 1


@pytest.mark.only(api="asyncio", warm="redis")
async def test_erasing_records_without_their_events_leaves_traces(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the ids are in what was told."""
    store = await opener()
    await whole_history(store, "s-mango", user="mango")
    gone = erasure.delete
    never = tables.events.c.namespace == ""
    monkeypatch.setattr(
        erasure, "delete", lambda table: gone(table).where(never) if table is tables.events else gone(table)
    )
    assert await store.forget("mango") == 1
    assert "mango" in repr(everything_in_sql(opener.archive, opener.namespace))


async def test_a_purge_takes_old_events(store: Any) -> None:
    expected = await whole_history(store)
    await store.emit("lock.lost", subject="session:s")
    assert (await store.admin.purge(older_than=3600))["events"] == 0
    assert told(await store.admin.audit())[:-1] == expected
    count = len(await store.admin.audit())
    home = tiers(store)
    wall, home.port.wall = home.port.wall, lambda: wall() + 60  # type: ignore[method-assign]
    assert (await store.admin.purge(older_than=0))["events"] == count
    assert await store.admin.audit() == []
    home.port.wall = wall  # type: ignore[method-assign]
    await store.session("s").create()
    assert [event.type for event in await store.admin.audit()] == ["conversation.created"]


async def test_an_import_tells_of_nothing(store: Any) -> None:
    """What happened, happened where it was exported; the stream of this store has numbers of its own."""
    await whole_history(store)
    await store.session("s").create({"b": 1})
    lines = await store.admin.export("s")
    assert not any('["e",' in line for line in lines)
    events = await store.admin.audit()
    last = json.loads(lines[-1])
    last["ops"].append(["e", "1 conversation.created session:s", "{}"])
    assert await store.admin.import_([*lines[:-1], json.dumps(last)], id="copy") == "copy"
    assert await store.admin.import_(lines, id="copy2") == "copy2"
    assert await store.admin.audit() == events
    history = await store.session("s").history()
    for id in ("copy", "copy2"):
        assert await store.session(id).history() == history
        assert await store.session(id).get_all() == {"b": 1}
    await store.session("copy").set("b", 2)
    await store.delete("copy")
    assert [event.type for event in await store.admin.audit(conversation="copy")] == ["conversation.deleted"]


async def test_the_past_can_be_read_and_restored_with_events_in_it(store: Any) -> None:
    await whole_history(store)
    session = store.session("s")
    await session.rollback(version=4)
    assert await session.get_all() == {"a": 1}
    assert [change.version for change in await session.history()] == list(range(1, 9))
    assert (await session.at(version=3)).phase == "planning"
    await session.fork("f", version=4)
    assert await store.session("f").get_all() == {"a": 1}
    assert (await store.admin.audit(conversation="f"))[0].type == "conversation.created"
    restored = [event for event in await store.admin.audit(conversation="s") if event.type == "session.rollback"]
    assert [(event.version, event.data) for event in restored][-1] == (8, {"version": 4})


async def test_encryption_anew_leaves_events_as_they_are(opener: Any) -> None:
    old = Encryption(KeyRing({"old": bytes(32)}))
    store = await opener(encryption=old)
    await whole_history(store)
    await store.session("t").write(set={"a": "secret"}, append=[said("x")], phase="p")
    before = await store.admin.audit()
    await store.close()
    new = Encryption(KeyRing({"old": bytes(32), "new": b"n" * 32}, current="new"))
    store = await opener(encryption=new)
    if opener.cold != "memory":
        assert (await store.admin.reencrypt()).failed == 0
        assert await store.admin.audit() == before
        assert await store.session("t").get_all() == {"a": "secret"}
        assert len(await store.session("s").history()) == 7
