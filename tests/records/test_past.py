"""The past: versions, checkpoints, rollback, forks, export, purge, forget. Law: it is read, never rewritten."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from below import everything_in_sql, evict, held_in_redis, keys_of, redis_of, shift, tiers, until
from sync_api import core

from distributed_state import Conflict, Deleted, InvalidValue, Message, NotFound, StateError
from distributed_state.cold import blocks
from distributed_state.store import export
from distributed_state.tiers import ambient

HOSTILE = {
    "nul\x00key": "nul\x00value",
    "lone \ud800": "\udfff \ud83d",
    "numbers": [10**30, -(2**63), 1e300, 0.1, 1.0, True, None],
    "empty": [{}, [], "", {"": ""}],
    "new\nline : {} %3A": "\r\n\t\u2028",
    "deep": {"a": {"b": {"c": [{"d": "ü🦆"}]}}},
}


def said(text: Any, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": str(text)}


async def texts(session: Any, **options: Any) -> list[str]:
    return [message.content for message in await session.messages(**options)]


def shown(snapshot: Any) -> tuple[dict[str, Any], list[str], str | None]:
    return snapshot.fields, [message.content for message in snapshot.messages], snapshot.phase


async def now(session: Any) -> tuple[dict[str, Any], list[str], str | None]:
    return await session.get_all(fresh=True), await texts(session, fresh=True), await session.phase(fresh=True)


# History and versions


async def test_history_says_who_did_what_and_when(store: Any) -> None:
    session, begun = store.session("s", user="u", actor="worker:1\n"), time.time()
    await session.write(set={"a": 1}, append=[said("hi"), said("ho", "assistant")], phase="planning")
    await session.delete("a")
    async with session.lock() as lease:
        await session.checkpoint("half way")
    await session.set("b", HOSTILE)
    first, second, third, fourth = await session.history()
    assert (first.version, first.kind, first.actor, first.token, first.set) == (1, "write", "worker:1\n", 0, {"a": 1})
    assert [(m.role, m.content) for m in first.appended] == [("user", "hi"), ("assistant", "ho")]
    assert (first.phase, second.deleted, second.kind) == ("planning", ("a",), "delete")
    assert (third.label, third.token) == ("half way", lease.token)
    assert fourth.set == {"b": HOSTILE}
    assert all(begun - 5 < change.time < time.time() + 5 for change in (first, second, third, fourth))
    assert [change.version for change in await session.history(after=1, before=4)] == [2, 3]
    assert [change.version for change in await session.history(limit=2)] == [1, 2]
    assert [change.version for change in await session.history(after=2, limit=1)] == [3]
    assert await store.session("never").history() == []


@pytest.mark.parametrize("by_handle", [True, False])
async def test_who_acted_stands_with_each_kind_of_write(opener: Any, by_handle: bool) -> None:
    store = await opener()
    actor = {"actor": "ann"} if by_handle else {}
    with nullcontext() if by_handle else store.acting_as("ann"):
        session = store.session("s", user="u", **actor)
        await session.create({"a": 1})
        await session.append(said("hi"))
        await session.write(set={"b": 1}, phase="planning")
        await session.delete("b")
        await session.items("notes").put("k", 1)
        await session.items("notes").delete("k")
        await session.checkpoint("half way")
        await session.rollback(version=2)
        async with store.batch() as batch:
            batch.on(session).set("d", 1)
        await session.clear()
        await session.fork("f")
        await store.session("e", **actor).set("a", 1)
        erased: list[str] = []
        commit_many = tiers(store).warm.commit_many

        async def noted(writes: Any, *rest: Any, **options: Any) -> Any:
            erased.extend(draft.actor or ambient.actor() for _, draft, *_ in writes)
            return await commit_many(writes, *rest, **options)

        tiers(store).warm.commit_many = noted
        with store.acting_as("ann"):
            await store.erase("e")
    for id in ("s", "f"):
        assert {change.actor for change in await store.session(id).history()} == {"ann"}
    assert erased == ["ann"]
    with store.acting_as("bob"):
        await store.delete("s")
    assert [(each.kind, each.actor) for each in await store.session("s").history()][-1] == ("delete", "bob")


async def test_any_version_can_be_read(opener: Any) -> None:
    store = await opener(snapshot_every=3, recent_messages=2)
    session, past = store.session("s"), []
    for number in range(10):
        await session.write(set={"n": number}, append=[said(number)], phase=f"p{number % 3}")
        past.append(await now(session))
    for version, state in enumerate(past, start=1):
        found = await session.at(version=version)
        assert shown(found) == state
        assert (found.version, found.deleted) == (version, False)
    for version in (11, 10**15):
        with pytest.raises(NotFound):
            await session.at(version=version)
    for version in (0, -1, True, 1.0, "1", None):
        with pytest.raises(InvalidValue):
            await session.at(version=version)
    with pytest.raises(NotFound):
        await store.session("never").at(version=1)


async def test_checkpoints_name_versions(store: Any) -> None:
    session = store.session("s")
    labels = ["before booking", "nul\x00 \ud800 🦆", "before booking"]
    for label in labels:
        await session.increment("n")
        await session.checkpoint(label)
    assert [(each.label, each.version) for each in await session.checkpoints()] == list(
        zip(labels, (2, 4, 6), strict=True)
    )
    for page, versions in (
        ({"limit": 2}, [2, 4]), ({"after": 2, "limit": 1}, [4]), ({"order": "desc", "limit": 2}, [6, 4]),
        ({"before": 4, "order": "desc"}, [2]), ({"after": 2, "before": 6}, [4]), ({"limit": 0}, []),
    ):  # fmt: skip
        assert [each.version for each in await session.checkpoints(**page)] == versions
    for wrong in {"limit": -1}, {"after": "1"}, {"before": 1.0}, {"order": "up"}:
        with pytest.raises(InvalidValue):
            await session.checkpoints(**wrong)
    assert await session.rollback(label="before booking") == 7
    assert await session.get("n") == 3
    assert await session.rollback(label=labels[1]) == 8
    assert await session.get("n") == 2
    with pytest.raises(NotFound):
        await session.rollback(label="never set")
    for label in ("", "x" * 501, 7):
        with pytest.raises(InvalidValue):
            await session.checkpoint(label)


# Rollback


async def test_rollback_brings_fields_messages_and_phase_back(store: Any) -> None:
    session = store.session("s", user="u")
    await session.write(set={"a": 1, "b": 2}, append=[said("one")], phase="planning")
    first = await now(session)
    await session.write(set={"a": 9, "c": 3}, delete=["b"], append=[said("two"), said("three")], phase="executing")
    second = await now(session)
    assert await session.rollback(steps=1) == 3
    assert await now(session) == first
    # A rollback is a new version, so it can be taken back as well: by the version that it took away.
    assert await session.rollback(version=2) == 4
    assert await now(session) == second
    assert await session.rollback(version=1) == 5
    await session.append(said("another two"))
    assert await texts(session) == ["one", "another two"]
    assert await session.rollback(version=4) == 7
    assert await now(session) == second
    assert await session.rollback(version=6) == 8
    assert await texts(session) == ["one", "another two"]
    await evict(store, "s")
    assert await texts(session) == ["one", "another two"]
    for version, state in ((1, first), (2, second), (3, first), (4, second), (5, first)):
        assert shown(await session.at(version=version)) == state
    assert len(await session.history()) == 8


async def test_each_step_back_goes_one_state_further(opener: Any) -> None:
    """3 -> 2 -> 1: a rollback is a new version, but no step; from it the way leads on from what it restored."""
    store = await opener(snapshot_every=4)
    session, past = store.session("s"), {}
    for number in (1, 2, 3):
        await session.write(set={"n": number}, append=[said(number)], phase=f"p{number}")
        past[number] = await now(session)
    for version, number in ((4, 2), (5, 1)):
        assert await session.rollback(steps=1) == version
        assert await now(session) == past[number]
    with pytest.raises(NotFound, match="version 5 has no state 1 steps back, only 0 steps"):
        await session.rollback(steps=1)
    assert await session.set("n", 6) == 6
    assert await session.rollback(steps=1) == 7
    assert await now(session) == past[1], "what was stepped over is not on the way any more"
    with pytest.raises(NotFound):
        await session.rollback(steps=1)
    assert await session.rollback(version=3) == 8
    assert await session.rollback(version=8) == 9, "a rollback to a rollback: to what that restored"
    assert await session.set("n", 10) == 10
    await evict(store, "s")
    assert await session.rollback(steps=3) == 11, (
        "10 -> 9, which is 3 -> 2 -> 1: several at once are as many single ones"
    )
    assert await now(session) == past[1]
    assert [change.kind for change in await session.history(after=3)] == [
        *["rollback"] * 2, "set", *["rollback"] * 3, "set", "rollback"
    ]  # fmt: skip


async def test_a_rollback_without_a_goal_is_one_step(store: Any) -> None:
    session = store.session("s")
    for number in (1, 2, 3):
        await session.set("n", number)
    await session.checkpoint("three")
    for version, number in ((5, 2), (6, 1)):
        assert await session.rollback() == version
        assert await session.get("n") == number
    with pytest.raises(NotFound):
        await session.rollback()


async def test_a_rollback_by_checkpoints_counts_from_the_last_one(store: Any) -> None:
    session = store.session("s")
    for number in (1, 2):
        await session.set("n", number)
        await session.checkpoint("same name")
    await session.set("n", 3)
    await session.set("n", 4)
    for version, back, number in ((7, 1, 2), (8, 1, 2), (9, 2, 1)):
        assert await session.rollback(checkpoints=back) == version
        assert await session.get("n") == number
    with pytest.raises(NotFound, match="has 2 checkpoints, not 3"):
        await session.rollback(checkpoints=3)


async def test_a_commit_that_changes_no_state_is_no_step(store: Any) -> None:
    session = store.session("s")
    await session.switch()
    await session.set("n", 1)
    await session.checkpoint("one")
    await session.switch()
    await session.set_lifetime(idle=3600)
    await session.set("n", 2)
    await session.checkpoint("two")
    assert await session.rollback(steps=1) == 8
    assert await session.get("n") == 1
    assert await session.rollback(label="two") == 9
    assert await session.get("n") == 2
    assert await session.rollback(steps=2) == 10
    assert await session.get_all(fresh=True) == {}, "as it began"
    with pytest.raises(NotFound):
        await session.rollback(steps=1)


async def test_no_step_leads_past_what_is_not_there(store: Any) -> None:
    """A deletion is a step that nobody can be left at; what was purged, and what a fork inherited, is out of reach."""
    session = store.session("s")
    for number in (1, 2):
        await session.set("n", number)
    await store.delete("s")
    assert await session.rollback(steps=1) == 4, "deleted, one step back: not deleted"
    assert await session.rollback(steps=1) == 5
    assert await session.get("n") == 1
    await store.delete("s")
    await session.create({"n": 7})
    with pytest.raises(Deleted, match="at version 6"):
        await session.rollback(steps=1)
    await session.set("n", 8)
    await session.fork("f")
    with pytest.raises(NotFound):
        await store.session("f").rollback(steps=1)
    assert await session.rollback(steps=1) == 9
    begun = time.time()
    await until(lambda: time.time() > begun + 0.005)
    await store.admin.purge(older_than=0)
    with pytest.raises(NotFound, match="1 steps back"):
        await session.rollback(steps=1)
    await session.set("n", 10)
    assert await session.rollback(steps=1) == 11
    assert await session.get("n") == 7
    await store.admin.import_(await store.admin.export("s"), id="copy")
    copy = store.session("copy")
    with pytest.raises(NotFound):
        await copy.rollback(steps=1)
    await copy.set("n", 12)
    assert await copy.rollback(steps=1) == 13
    assert await copy.get("n") == 7


async def test_a_step_back_costs_the_same_however_long_the_past_is(store: Any) -> None:
    session, asked = store.session("s"), []
    for number in range(40):
        await session.set("n", number)
    cold = core(store)._lifecycle.cold

    def counted(name: str) -> None:
        real = getattr(cold, name)

        def call(*given: Any) -> Any:
            asked.append(name)
            return real(*given)

        setattr(cold, name, call)

    counted("step_back")
    counted("state_at")
    for back in range(1, 10):
        await session.rollback(steps=1)
        assert await session.get("n") == 39 - back
        assert asked == ["step_back", "state_at"]
        asked.clear()


async def test_rollback_brings_back_messages_that_were_cleared(opener: Any) -> None:
    store = await opener(recent_messages=2)
    session = store.session("s")
    for number in range(6):
        await session.append(said(number))
    await session.clear(messages=True)
    assert await texts(session) == []
    await session.append(said("new"))
    assert await texts(session) == ["new"]
    await session.rollback(version=6)
    assert await texts(session) == list("012345")
    assert await texts(session, last=3) == list("345")
    await session.append(said("more"))
    assert await texts(session, last=3) == ["4", "5", "more"]
    await session.rollback(version=8)
    assert await texts(session) == ["new"]


async def test_rollback_takes_one_goal_at_most_and_only_one_that_was(store: Any) -> None:
    session = store.session("s")
    await session.set("a", 1)
    await session.set("a", 2)
    for goal in (
        {"steps": 1, "version": 1}, {"steps": 0}, {"steps": -1}, {"version": 0}, {"steps": "1"},
        {"checkpoints": 0}, {"checkpoints": True}, {"checkpoints": 1, "label": "one"},
    ):  # fmt: skip
        with pytest.raises(InvalidValue):
            await session.rollback(**goal)
    for goal in ({"steps": 2}, {"steps": 10**9}, {"version": 3}, {"label": "none"}, {"checkpoints": 1}):
        with pytest.raises(NotFound):
            await session.rollback(**goal)
    assert await session.version(fresh=True) == 2


async def test_rollbacks_that_meet_take_turns(store: Any) -> None:
    """Each is relative to what it finds; none is lost, versions stay dense."""
    session = store.session("s")
    for number in range(5):
        await session.set("n", number)
    await asyncio.gather(*(session.rollback(version=number + 1) for number in range(5)))
    assert [change.version for change in await session.history()] == list(range(1, 11))
    assert [change.kind for change in await session.history(after=5)] == ["rollback"] * 5
    assert await session.checkpoints() == []
    assert (await session.at(version=10)).fields == await session.get_all(fresh=True)


# Deleting


async def test_a_deleted_record_goes_on_with_its_versions(store: Any) -> None:
    session = store.session("s", user="u")
    await session.write(set={"a": 1}, append=[said("old")], phase="planning")
    assert await store.delete("s") == 2
    assert await store.delete("s") == 2
    assert not await session.exists()
    assert await now(session) == ({}, [], None)
    assert (await session.at(version=2)).deleted
    for write in (lambda: session.set("a", 2), lambda: session.append(said("x")), lambda: session.increment("n")):
        with pytest.raises(Deleted):
            await write()
    with pytest.raises(NotFound):
        await store.delete("never")
    await evict(store, "s")
    assert not await session.exists()
    assert await session.create({"b": 2}) == 3
    with pytest.raises(Conflict):
        await session.create({"b": 3})
    assert await now(session) == ({"b": 2}, [], None)
    await session.append(said("new"))
    await evict(store, "s")
    assert await texts(session) == ["new"]
    assert shown(await session.at(version=1)) == ({"a": 1}, ["old"], "planning")
    assert await session.rollback(version=1) == 5
    assert await now(session) == ({"a": 1}, ["old"], "planning")


async def test_rollback_brings_a_deleted_record_back(store: Any) -> None:
    session = store.session("s")
    await session.write(set={"a": 1}, append=[said("old")])
    await store.delete("s")
    with pytest.raises(Deleted):
        await session.rollback(version=2)
    assert await session.rollback(steps=1) == 3
    assert await now(session) == ({"a": 1}, ["old"], None)
    assert await session.set("a", 2) == 4


# Forks


async def test_a_fork_is_a_record_of_its_own(opener: Any) -> None:
    store = await opener(recent_messages=3)
    parent = store.session("parent", user="u")
    await parent.write(set={"a": 1}, append=[said(n) for n in range(5)], phase="planning")
    await parent.write(set={"a": 2}, append=[said(5)], phase="executing")
    assert await parent.fork("now") == 1
    assert await parent.fork("then", version=1) == 1
    recent, early = store.session("now"), store.session("then")
    assert await now(recent) == ({"a": 2}, list("012345"), "executing")
    assert await now(early) == ({"a": 1}, list("01234"), "planning")
    await asyncio.gather(
        parent.append(said("parent")), recent.append(said("recent")), early.append(said("early")), early.set("a", 9)
    )
    assert await texts(parent) == [*"012345", "parent"]
    assert await texts(recent) == [*"012345", "recent"]
    assert await texts(early) == [*"01234", "early"]
    assert await parent.get("a") == 2
    await evict(store, "now", "then", "parent")
    assert await texts(early, last=3) == ["3", "4", "early"]
    assert await texts(recent, last=2) == ["5", "recent"]
    assert await early.rollback(version=1) == 4
    assert await now(early) == ({"a": 1}, list("01234"), "planning")
    for id in ("now", "parent"):
        with pytest.raises(Conflict):
            await early.fork(id)
    with pytest.raises(NotFound):
        await parent.fork("x", version=4)
    with pytest.raises(NotFound):
        await store.session("never").fork("y")


async def test_a_fork_of_a_fork(opener: Any) -> None:
    """Each generation adds, and shows what it inherited through all of them, also after rollbacks on the way."""
    store = await opener(recent_messages=2, snapshot_every=3)
    session, expected = store.session("g0"), []
    for generation in range(1, 6):
        for number in range(3):
            await session.append(said(f"{generation}.{number}"))
            expected.append(f"{generation}.{number}")
        await session.rollback(steps=1)
        expected.pop()
        await session.fork(f"g{generation}")
        session = store.session(f"g{generation}")
        assert await texts(session) == expected
    await store.admin.archive()
    await evict(store, *(f"g{n}" for n in range(6)))
    assert await texts(session) == expected
    assert await texts(session, last=4) == expected[-4:]
    assert await texts(store.session("g0")) == expected[:2]


async def test_a_fork_never_lands_on_an_id_that_was_used(store: Any) -> None:
    """Message numbers of the earlier record would be used twice."""
    source, target = store.session("source"), store.session("target")
    await source.append(said("a"), said("b"))
    for number in range(5):
        await target.append(said(number))
    await store.delete("target")
    with pytest.raises((Conflict, Deleted)):
        await source.fork("target")
    await target.create()
    await target.append(said("again"))
    await store.admin.archive()
    await evict(store, "target")
    assert await texts(target) == ["again"]
    assert core(store)._lifecycle.cold.quarantined() == []


async def test_forks_stay_whole_when_their_parent_is_purged_or_deleted(opener: Any) -> None:
    store = await opener(recent_messages=2)
    parent = store.session("parent", user="u")
    for number in range(6):
        await parent.append(said(number))
    await parent.fork("child", version=4)
    child = store.session("child")
    await child.append(said("c"))
    await child.fork("grandchild")
    grandchild = store.session("grandchild")
    await grandchild.append(said("g"))
    await parent.clear(messages=True)
    await parent.append(said("after"))
    for step in ("purge", "delete", "purge", "create", "purge"):
        if step == "purge":
            await store.admin.purge(older_than=0)
        elif step == "delete":
            await store.delete("parent")
        else:
            await parent.create({"new": 1})
            await parent.append(said("new record"))
        await evict(store, "parent", "child", "grandchild")
        assert await texts(child) == [*"0123", "c"], step
        assert await texts(grandchild) == [*"0123", "c", "g"], step
        assert await texts(grandchild, last=3) == ["3", "c", "g"]
    assert await texts(parent) == ["new record"]
    await child.append(said("c2"))
    await grandchild.append(said("g2"))
    assert await texts(child) == [*"0123", "c", "c2"]
    assert await texts(grandchild) == [*"0123", "c", "g", "g2"]


# Purge


async def test_a_purge_keeps_the_present_and_what_is_newer(store: Any) -> None:
    session = store.session("s")
    for number in range(5):
        await session.write(set={"n": number}, append=[said(number)])
    await session.checkpoint("kept")
    removed = await store.admin.purge(older_than=3600)
    assert removed["changes"] == 0
    assert len(await session.history()) == 6
    begun = time.time()
    await until(lambda: time.time() > begun + 0.005)
    removed = await store.admin.purge(older_than=0)
    assert removed["changes"] == 6
    assert await now(session) == ({"n": 4}, list("01234"), None)
    await evict(store, "s")
    assert await now(session) == ({"n": 4}, list("01234"), None)
    assert await session.history() == []
    with pytest.raises(NotFound):
        await session.at(version=3)
    with pytest.raises(NotFound):
        await session.rollback(version=3)
    assert shown(await session.at(version=6)) == ({"n": 4}, list("01234"), None)
    assert await session.append(said("5")) == 7
    assert [change.version for change in await session.history()] == [7]
    assert await session.rollback(version=6) == 8
    assert await texts(session) == list("01234")
    for wrong in (-1, True, "1", float("nan"), None):
        with pytest.raises(InvalidValue):
            await store.admin.purge(older_than=wrong)


# Export and import


async def rich(store: Any, id: str = "rich") -> Any:
    """A session with everything in it: hostile values, a wipe, a rollback, a checkpoint, tool calls."""
    session = store.session(id, user="u\x00:ser", actor="an\x00actor")
    await session.write(set=HOSTILE, append=[said("one"), said("two \x00\ud800")], phase="p\x00")
    await session.append(
        Message(role="assistant", content=None, tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "{}"}}]),
        Message(role="tool", content=[{"type": "text", "text": "ü"}], tool_call_id="c", metadata={"a": {}}, odd=1),
    )
    await session.checkpoint("label\x00 🦆")
    await session.clear(messages=True)
    await session.append(said("after"))
    await session.rollback(version=3)
    await session.delete("empty")
    return session


async def everything(session: Any) -> list[Any]:
    """All that can be read of a session, but its id."""
    history = await session.history()
    states = [shown(await session.at(version=change.version)) for change in history]
    return [
        *(
            (c.version, c.time, c.kind, c.actor, c.token, c.set, c.deleted, c.appended, c.phase, c.label)
            for c in history
        ),
        states,
        await session.get_all(fresh=True),
        [message.to_dict() for message in await session.messages(fresh=True)],
        await session.version(),
        [(each.label, each.version) for each in await session.checkpoints()],
    ]


async def test_an_imported_record_is_the_exported_one(store: Any) -> None:
    session = await rich(store)
    lines = await store.admin.export("rich")
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert all("\n" not in line and line.isascii() for line in lines)
    assert await store.admin.import_(iter([f"{line}\n" for line in lines]), id="copy") == "copy"
    copy = store.session("copy")
    assert await everything(copy) == await everything(session)
    named = [line.replace('"id":"rich"', '"id":"copy"').replace("session:rich", "session:copy") for line in lines]
    assert await store.admin.export("copy") == named
    with pytest.raises(Conflict):
        await store.admin.import_(lines)
    with pytest.raises(Conflict):
        await store.admin.import_(lines, id="copy")
    # Two records from here on.
    version = await copy.version()
    assert await copy.append(said("more")) == version + 1
    assert (await texts(copy))[-1] == "more"
    assert (await texts(session))[-1] != "more"
    assert [info.user for info in await store.sessions() if info.id == "copy"] == ["u\x00:ser"]
    with pytest.raises(NotFound):
        await store.admin.export("never")


async def test_an_import_brings_a_purged_or_forked_record_whole(store: Any) -> None:
    session = await rich(store)
    await session.fork("child")
    child = store.session("child")
    await child.append(said("child"))
    await store.admin.import_(await store.admin.export("child"), id="child-copy")
    assert await everything(store.session("child-copy")) == await everything(child)
    await store.admin.purge(older_than=0)
    await child.append(said("later"))
    await session.append(said("later"))
    for id in ("rich", "child"):
        lines = await store.admin.export(id)
        assert '"base"' in lines[1]
        await store.admin.import_(lines, id=f"{id}-purged")
        copy, original = store.session(f"{id}-purged"), store.session(id)
        assert await everything(copy) == await everything(original)
        await evict(store, f"{id}-purged")
        assert await texts(copy) == await texts(original)


async def refused(store: Any, lines: list[str], id: str) -> str:
    """The message with which an import is refused, having changed nothing."""
    with pytest.raises((InvalidValue, Conflict)) as error:
        await store.admin.import_(lines, id=id)
    assert not await store.session(id).exists(fresh=True)
    assert core(store)._lifecycle.cold.version(f"session:{id}") is None
    return str(error.value)


@pytest.mark.parametrize("purged", [False, True])
async def test_a_file_that_is_cut_off_is_refused_wherever_it_is_cut(store: Any, purged: bool) -> None:
    session = await rich(store)
    await session.fork("child")
    await store.admin.archive()
    if purged:
        await store.admin.purge(older_than=0)
    lines = await store.admin.export("child")
    assert len(lines) > 3 if purged else len(lines) > 1
    for cut in range(len(lines)):
        message = await refused(store, lines[:cut], "new")
        assert "cut off" in message or "missing" in message or "no change" in message, (cut, message)
        message = await refused(store, [*lines[:cut], lines[cut][: len(lines[cut]) // 2]], "new")
        assert f"line {cut + 1}" in message
    await store.admin.import_(lines, id="new")


def changed(line: str, **fields: Any) -> str:
    return json.dumps(json.loads(line) | fields)


async def test_a_file_that_was_tampered_with_is_refused(store: Any) -> None:
    """Nothing but what export writes is taken: what Redis and SQL keep for themselves cannot be smuggled in."""
    session = store.session("s")
    await session.write(set={"a": 1}, append=[said("hi")])
    await session.set("a", 2)
    lines = await store.admin.export("s")
    head, first, second = lines
    await store.admin.purge(older_than=0)
    purged = await store.admin.export("s")
    base = next(at for at, line in enumerate(purged) if '"base"' in line)

    def with_field(name: str, value: str) -> list[str]:
        row = json.loads(purged[base])
        return [*purged[:base], json.dumps(row | {"fields": row["fields"] | {name: value}}), *purged[base + 1 :]]

    tampered = {
        "no header": [first, second],
        "another format": [changed(head, format="other/1"), first, second],
        "a scope that is none": [changed(head, scope="planet"), first, second],
        "not JSON": [head, "{", second],
        "not an object": [head, "[1]", second],
        "a gap": [head, changed(first, version=2), changed(second, version=3)],
        "twice the same": [head, first, first],
        "an unknown step": [head, changed(first, ops=[["x", "a", "1"]]), second],
        "a value that is no JSON": [head, changed(first, ops=[["s", "a", "{"]]), second],
        "a message that is none": [head, changed(first, ops=[["m", "0", "7"]]), second],
        "a message without a number": [head, changed(first, ops=[["m", "zero", '{"role":"user"}']]), second],
        "the version field": [head, changed(first, ops=[["s", "#v", "99"]]), second],
        "the op ids": [head, changed(first, ops=[["s", "#ops", "x"]]), second],
        "a number that is none": [head, changed(first, ops=[["s", "#mn", "many"]]), second],
        "segments that are none": [head, changed(first, ops=[["s", "#segments", "[[1]]"]]), second],
        "an event that is none": [head, first, changed(second, event="x; y", time_ms=int(time.time() * 1000))],
        "a time that is none": [head, first, changed(second, time_ms="soon")],
        "a time before time": [head, first, changed(second, time_ms=-1)],
        "a number too large": [head, first, changed(second, token=2**70)],
        "the version in the base": with_field("#v", "99"),
        "a message in the base": with_field("#m0", "{}"),
        "a value in the base that is no JSON": with_field("a", "{"),
    }
    taken = []
    for name, file in tampered.items():
        try:
            await store.admin.import_(file, id=f"new {name}")
            taken.append(name)
        except (InvalidValue, Conflict):
            assert not await store.session(f"new {name}").exists(fresh=True)
    assert taken == []
    await store.admin.import_(lines, id="new")


# Listings


async def test_sessions_are_listed_by_the_last_change_page_by_page(store: Any) -> None:
    for number in range(23):
        await store.session(f"s:{number}", user="u" if number % 2 else "v\x00:").set("n", number)
    await store.delete("s:5")
    await store.user("u").set("x", 1)
    await store.admin.archive()
    found: list[str] = []
    after = None
    while page := await store.sessions(limit=5, after=after):
        assert len(page) <= 5
        found += [info.id for info in page]
        after = page[-1].cursor
    assert sorted(found) == sorted(f"s:{number}" for number in range(23) if number != 5)
    assert len(found) == 22
    rows = await store.sessions(user="v\x00:", limit=1000)
    assert {info.id for info in rows} == {f"s:{number}" for number in range(0, 23, 2)}
    assert all(info.user == "v\x00:" and info.version == 1 and not info.deleted for info in rows)
    assert [info.updated for info in rows] == sorted((info.updated for info in rows), reverse=True)
    assert [info.id for info in await store.sessions(scope="user")] == ["u"]
    assert await store.sessions(user="nobody") == []
    for wrong in ({"limit": 0}, {"limit": 1001}, {"limit": True}, {"after": "x"}, {"scope": "planet"}, {"user": ""}):
        with pytest.raises(InvalidValue):
            await store.sessions(**wrong)


# Forgetting


MARK = "alice-7f3a"


async def person(store: Any) -> None:
    """All that a person leaves: sessions, forks, messages, a checkpoint, their own record, a task."""
    session = store.session(f"{MARK}-chat", user=MARK, actor=MARK)
    for number in range(40):
        await session.append(said(f"{MARK} says {number}"))
    await session.write(set={MARK: {"card": MARK}}, phase=MARK)
    await session.checkpoint(MARK)
    await session.clear(messages=True)
    await session.rollback(steps=1)
    await session.fork(f"{MARK}-fork")
    await store.session(f"{MARK}-fork").append(said(f"{MARK} again"))
    await store.session(f"{MARK}-gone", user=MARK).set("a", MARK)
    await store.delete(f"{MARK}-gone")
    await store.user(MARK).set("airline", MARK)
    await store.task(f"{MARK}-task", user=MARK).set("todo", MARK)


def traces(store: Any, opener: Any) -> list[str]:
    """Where the person can still be found."""
    found = []
    with redis_of(store) as client:
        names = list(client.scan_iter(f"{opener.namespace}*", count=1000))
        blobs = [held_in_redis(client, key) for key in names if not key.endswith(b":events")]
        # All that replicas which are away have still to hear is that the conversation is deleted.
        events = [repr(row).encode() for key in names if key.endswith(b":events") for row in client.xrange(key)]
        blobs += [row for row in events if b"\\nconversation.deleted\\nsession:" not in row]
        found += [f"redis: {blob[:300]!r}" for blob in blobs if MARK.encode() in blob]
    if opener.archive != "memory":
        tables = everything_in_sql(opener.archive, opener.namespace)
        found += [name for name, rows in tables.items() if MARK in repr(rows) or MARK.encode().hex() in repr(rows)]
    if opener.archive.startswith("sqlite"):
        path = Path(opener.archive.removeprefix("sqlite:///"))
        for file in path.parent.glob(f"{path.name}*"):
            if MARK.encode() in file.read_bytes():
                found.append(file.name)
    return found


def hot_traces(store: Any) -> bool:
    entries = tiers(store).hot.entries
    return any(
        MARK.encode() in repr((text, entry.fields, entry.messages, entry.values)).encode()
        for text, entry in entries.items()
    )


async def test_a_forgotten_person_is_nowhere(opener: Any) -> None:
    store = await opener()
    await person(store)
    await store.session("other", user="bob").write(set={"a": 1}, append=[said("bob")])
    await store.admin.archive()
    assert traces(store, opener)
    assert await store.forget(MARK) == 5
    assert traces(store, opener) == []
    assert not hot_traces(store)
    assert await texts(store.session("other")) == ["bob"]
    assert await store.sessions(user=MARK) == []
    assert await store.forget(MARK) == 0
    # What is left is the version, under a hash: it is not used twice.
    session = store.session(f"{MARK}-chat")
    assert not await session.exists()
    with pytest.raises(Deleted):
        await session.set("a", 1)
    assert await session.create({"a": 1}) > 44
    assert await session.history(after=44)
    with pytest.raises(NotFound):
        await session.at(version=3)


@pytest.mark.replicas
async def test_a_forgotten_person_is_in_no_other_replica_either(opener: Any) -> None:
    """Also not in one that read the record while it was being forgotten."""
    store, other = await opener(), await opener()
    await person(store)
    ids = [f"{MARK}-chat", f"{MARK}-fork"]

    async def is_hot() -> bool:
        for id in ids:
            await other.session(id).get_all()
        return all(f"session:{id}" in tiers(other).hot.entries for id in ids)

    await until(is_hot)
    cold, looked = core(store)._lifecycle.cold, []
    erase = cold.erase

    def erase_while_somebody_reads(texts: Any) -> Any:
        for id in ids:
            future = asyncio.run_coroutine_threadsafe(read(id), loop) if not blocking else None
            looked.append(future.result(5) if future else None)
        return erase(texts)

    async def read(id: str) -> Any:
        return await other.session(id).get_all()

    loop, blocking = asyncio.get_running_loop(), opener.api == "blocking"
    cold.erase = erase_while_somebody_reads
    await store.forget(MARK)
    await until(lambda: not hot_traces(other), 3)
    assert traces(store, opener) == []
    assert await other.session(ids[0]).get_all() == {}


async def test_forgetting_ends_under_load(opener: Any) -> None:
    """Others go on writing; neither forget nor purge waits for a moment of silence."""
    store = await opener(archive_every=0.02, partitions=2)
    await person(store)
    stop = asyncio.Event()

    async def write(id: str) -> int:
        number = 0
        while not stop.is_set():
            await store.session(id, user="bob").set("n", number)
            number += 1
            await asyncio.sleep(0.001)  # a loop that never rests leaves the threads of SQL no time
        return number

    writers = [asyncio.create_task(write(f"busy{n}")) for n in range(4)]
    try:
        assert await asyncio.wait_for(store.forget(MARK), 20) == 5
        await asyncio.wait_for(store.admin.purge(older_than=3600), 20)
    finally:
        stop.set()
        counts = await asyncio.gather(*writers)
    for number, count in enumerate(counts):
        assert await store.session(f"busy{number}").version(fresh=True) == count
    await store.admin.archive()
    assert traces(store, opener) == []


async def test_errors_of_the_past_are_state_errors(store: Any) -> None:
    for call in (
        lambda: store.session("never").rollback(steps=1),
        lambda: store.session("never").rollback(version=1),
        lambda: store.session("never").rollback(label="x"),
        lambda: store.admin.export("never"),
        lambda: store.admin.import_([]),
        lambda: store.admin.import_(["{}"]),
    ):
        with pytest.raises(StateError):
            await call()


async def test_no_version_is_too_large_to_be_asked_for(store: Any) -> None:
    session = store.session("s")
    await session.set("a", 1)
    for call in (
        lambda: session.at(version=2**63),
        lambda: session.rollback(version=10**30),
        lambda: session.fork("t", version=2**64),
        lambda: session.rollback(steps=10**30),
    ):
        with pytest.raises(NotFound):
            await call()
    with pytest.raises(NotFound, match="has no version"):
        await session.at(version=2**63 - 1)


# Compaction


async def readings(store: Any, *ids: str) -> list[Any]:
    """What users read of sessions that left Redis."""
    found: list[Any] = []
    for id in ids:
        await evict(store, id)
        session = store.session(id)
        found.append(await now(session))
        history = await session.history()
        found.append(history)
        found += [shown(await session.at(version=change.version)) for change in history]
        found.append(await session.checkpoints())
        found.append(json.loads(json.dumps(await store.admin.export(id))))
    return found


async def test_packed_history_is_read_rolled_back_forked_and_written_on(store: Any) -> None:
    """An old conversation that is packed is what it was, and goes on."""
    session = store.session("s", user="u")
    for number in range(12):
        await session.write(set={"n": number, "hostile": HOSTILE}, append=[said(number)])
    await session.checkpoint("half way")
    for number in range(12, 20):
        await session.write(set={"n": number}, append=[said(number)])
    await session.rollback(steps=3)
    await session.fork("f", version=9)
    await store.session("f").append(said("own"))
    before = await readings(store, "s", "f")
    assert (await store.admin.compact())["records"] == 0, "all of it is new"
    shift(store, 2 * 86_400)
    assert await store.admin.compact() == {"records": 1, "changes": 20, "messages": 20}
    assert await readings(store, "s", "f") == before
    assert (await store.admin.compact())["changes"] == 0
    shift(store, -2 * 86_400)
    assert await session.rollback(label="half way") == 23
    assert await session.get("n") == 11
    await session.append(said("after"))
    await session.fork("g")
    assert (await texts(store.session("g")))[-2:] == ["11", "after"]
    await evict(store, "s", "g")
    assert await texts(store.session("g")) == [*map(str, range(12)), "after"]
    await store.erase("s")
    assert await texts(store.session("g")) == [*map(str, range(12)), "after"]
    assert await texts(store.session("f")) == [*map(str, range(9)), "own"]


@pytest.mark.wide
async def test_large_history_is_read_and_exported_a_page_of_bytes_at_a_time(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large its changes, messages and items are, and packed or not, no more is in memory than that."""
    page = 200_000
    session, cold = store.session("s"), core(store)._lifecycle.cold
    for number, size in enumerate((90_000, 10, 90_000, 90_000, 300_000, 10, 10, 700_000)):
        await session.set("f", str(number) * size)
        await session.append(said(str(number) * size))
        await session.items("c").put("k", str(number) * size)
    await session.fork("f")
    await store.session("f").append(said("own"))
    whole = {id: await store.admin.export(id) for id in "sf"}

    def paged(read: Any) -> list[Any]:
        found: list[Any] = []
        while some := read("session:s", after=found[-1].version if found else 0, limit=20, most=page):
            assert len(some) == 1 or sum(len(entry.data) for entry in some) <= page + blocks.RAW_BYTES
            found += some
        return found

    async def check() -> None:
        assert paged(cold.history) == cold.history("session:s")
        assert paged(cold.outlines) == cold.outlines("session:s")
        for id in "sf":
            exported = export.Export(tiers(store), keys_of(store, id))
            lines = some = await exported.begin()
            while some := await exported.following():
                assert len(some) == 1 or sum(map(len, some)) <= 2 * page
                lines = lines + some
            assert lines == whole[id]

    monkeypatch.setattr(export, "PAGE", page)
    await check()
    shift(store, 2 * 86_400)
    assert (await store.admin.compact())["messages"] == 8
    await check()


async def test_the_past_is_read_in_one_visit_to_sql_and_only_if_sql_has_it(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQL may have been restored older under an open store: its cursor says so, in the transaction of the read."""
    store = await opener(archiver=False)
    session, cold, port = store.session("s"), core(store)._lifecycle.cold, tiers(store).port
    for number in range(3):
        await session.append(said(str(number)))
    await session.checkpoint("here")
    await session.history()
    visits: list[str] = []
    sql, cursor = port.sql, cold.cursor

    async def visited(call: Any, *arguments: Any) -> Any:
        visits.append(getattr(getattr(call, "func", call), "__name__", ""))
        return await sql(call, *arguments)

    with cold.database.one_read(), cold.database.read() as first, cold.database.long_read() as second:
        assert first is second
    with cold.database.read() as later:
        assert later is not first
    reads = session.history, lambda: session.at(version=3), session.checkpoints, lambda: session.rollback(steps=1)
    monkeypatch.setattr(port, "sql", visited)
    for read in reads[:3]:
        visits.clear()
        await read()
        assert [each for each in visits if each in ("read_if", "cursor", "history", "checkpoints")] == ["read_if"]
    for read in reads:
        given = iter([None])
        visits.clear()
        monkeypatch.setattr(cold, "cursor", lambda partition, given=given: next(given, cursor(partition)))
        found = await read()
        assert visits.count("read_if") > 1, "it looks again, after it has archived what may be lacking"
        monkeypatch.setattr(cold, "cursor", cursor)
        if read is session.history:
            assert [change.version for change in found] == [1, 2, 3, 4]


async def test_nothing_is_packed_that_a_retry_may_look_for(store: Any) -> None:
    """A write whose answer was lost is looked for by its event for as long as `op_window`."""
    for age in (core(store).settings.op_window - 1, -1, True, "1d", float("nan")):
        with pytest.raises(InvalidValue, match="op_window"):
            await store.admin.compact(older_than=age)


# Retention


async def test_a_purge_leaves_the_newest_messages_and_what_a_fork_shows(store: Any) -> None:
    """What is left out is history like anything else, until the versions that showed it go."""
    session = store.session("s")
    for number in range(10):
        await session.write(set={"n": number}, append=[said(number)])
    await session.fork("f")
    done = await store.admin.purge(keep_messages=4)
    assert (done["left_out"], done["messages"], done["changes"]) == (12, 0, 0)
    assert await texts(session) == await texts(store.session("f")) == ["6", "7", "8", "9"]
    assert [message.number for message in await session.messages()] == [6, 7, 8, 9]
    assert await texts(session, fresh=True) == ["6", "7", "8", "9"]
    assert [change.kind for change in await session.history()][-1] == "retention"
    assert [message.content for message in (await session.at(version=10)).messages] == [*map(str, range(10))]
    assert (await store.admin.purge(keep_messages=4))["left_out"] == 0
    await session.append(said("new"))
    await evict(store, "s", "f")
    assert await texts(session) == ["6", "7", "8", "9", "new"]
    assert await session.rollback(steps=1) == 13
    assert await texts(session) == ["6", "7", "8", "9"]
    done = await store.admin.purge(keep_changes=1)
    assert (done["messages"], done["left_out"]) == (6, 0)
    await evict(store, "s", "f")
    assert await texts(session) == await texts(store.session("f")) == ["6", "7", "8", "9"]
    exported = list(await store.admin.export("s"))
    assert await store.admin.import_(exported, id="copy") == "copy"
    assert await texts(store.session("copy")) == ["6", "7", "8", "9"]
    with pytest.raises(NotFound):
        await session.at(version=10)
    for id in ("s", "f"):
        assert await store.session(id).get("n") == 9


async def test_a_purge_leaves_out_messages_by_age(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = store.session("s")
    await session.append(said("old"))
    await store.admin.archive()
    begun = time.time()
    await until(lambda: time.time() > begun + 0.01)
    await session.append(said("young"))
    old, young = (message.timestamp for message in await session.messages())
    monkeypatch.setattr(tiers(store).clock, "now", lambda: young + 3600)
    assert (await store.admin.purge(messages_older_than=3601))["left_out"] == 0
    assert (await store.admin.purge(messages_older_than=3600 + (young - old) / 2))["left_out"] == 1
    assert await texts(session) == ["young"]
    await evict(store, "s")
    assert await texts(session) == ["young"]


async def test_messages_that_a_summary_does_not_stand_for_stay(store: Any) -> None:
    """Nor does the summary lose the last message, by which it is known."""
    session = store.session("s")
    for number in range(12):
        await session.append(said(f"{number} " + "word " * 40))

    def summarize(messages: list[Message], before: str | None) -> str:
        return f"{len(messages)} messages"

    options = {"max_tokens": 400, "strategy": "summarize", "summarizer": summarize}
    window = await session.window(**options)
    assert window.summary is not None
    stop = window.summary.stop
    assert 1 < stop < 11
    done = await store.admin.purge(keep_messages=1)
    assert done["left_out"] == stop - 1
    assert [message.number for message in await session.messages()] == [*range(stop - 1, 12)]
    again = await session.window(**options)
    assert again.summary == window.summary
    assert again.messages == window.messages


async def test_a_purge_leaves_so_many_changes_of_each_record(store: Any) -> None:
    for id, commits in (("long", 30), ("short", 3)):
        for number in range(commits):
            await store.session(id).set("n", number)
    await store.session("deleted").set("n", 1)
    await store.delete("deleted")
    assert (await store.admin.purge(keep_changes=5))["changes"] == 25
    assert [change.version for change in await store.session("long").history()] == [26, 27, 28, 29, 30]
    assert [change.version for change in await store.session("short").history()] == [1, 2, 3]
    assert (await store.session("long").at(version=25)).fields == {"n": 24}
    with pytest.raises(NotFound):
        await store.session("long").at(version=24)


async def test_events_have_an_age_of_their_own(store: Any) -> None:
    await store.emit("order.placed", {"n": 1})
    await store.session("s").set("n", 1)
    await store.admin.archive()
    begun = time.time()
    await until(lambda: time.time() > begun + 0.05)
    done = await store.admin.purge(older_than=3600, events_older_than=0.01)
    assert (done["changes"], done["events"] > 0) == (0, True)
    assert await store.admin.audit(type="order.placed") == []
    await store.emit("order.placed", {"n": 2})
    await store.admin.archive()
    assert (await store.admin.purge(older_than=0, events_older_than=3600))["events"] == 0


async def test_a_purge_without_sense_is_refused(store: Any) -> None:
    for wrong in ({}, {"keep_messages": 0}, {"keep_changes": True}, {"older_than": -1}, {"events_older_than": "1d"}):
        with pytest.raises(InvalidValue, match=r"purge takes|is an int|is a number"):
            await store.admin.purge(**wrong)
