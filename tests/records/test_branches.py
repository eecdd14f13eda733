"""What diverged is kept: acknowledged commits that their record does not continue are read, forked, dropped."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from below import everything_in_sql, keys_of, redis_of, tiers, until
from diverging import CAUSE, QUIET, Lost, keep, lose
from sqlalchemy import update
from sync_api import core, in_thread

from distributed_state import Conflict, Deleted, Encryption, InvalidValue, KeyRing, NotFound
from distributed_state.cold import aside, erasure, tables
from distributed_state.port.blocking import finish
from distributed_state.values.encryption import Sealed
from distributed_state.values.journal import JournalEntry

MARK = "carol-51b0"


def said(text: Any, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": str(text)}


def texts(messages: Any) -> list[str]:
    return [message.content for message in messages]


async def trip(store: Any, id: str = "s", *, user: str | None = "u") -> tuple[Any, Lost]:
    """A session of two versions that goes on as 3 to 5, loses these, and goes on as 3 and 4 under another data id."""
    session = store.session(id, user=user, actor="ada")
    await session.write(set={"city": "Oslo", "n": 1}, append=[said("one"), said("two")], phase="planning")
    await session.write(set={"n": 2}, append=[said("three")])

    async def lost() -> None:
        await session.write(set={"city": "Bergen"}, append=[said("lost four"), said("lost five")])
        await session.write(set={"hotel": MARK}, delete=["n"], phase="executing")
        await session.append(said("lost six"))

    found = await lose(store, id, lost)
    await session.write(set={"city": "Narvik"}, append=[said("new four")])
    await session.set("n", 3)
    await store.admin.archive()
    return session, found


async def test_what_diverged_is_listed_and_read(opener: Any) -> None:
    store = await opener(recent_messages=2, **QUIET)
    session, lost = await trip(store)
    assert await store.admin.branches(session.id) == []
    kept = await keep(store, lost)
    assert [(each.record, each.branch, each.first, each.commits) for each in kept] == [("session:s", lost.epoch, 3, 3)]
    (branch,) = await store.admin.branches(session.id)
    assert (branch.id, branch.epoch, branch.base, branch.version, branch.commits) == (lost.epoch, lost.epoch, 2, 5, 3)
    assert (branch.scope, branch.record_id, branch.cause, branch.actors) == ("session", "s", CAUSE, ("ada",))
    assert branch.complete
    assert time.time() - 60 < branch.first_time <= branch.last_time < time.time() + 60
    assert await store.admin.branches() == [branch]
    assert await store.admin.branches(after=branch.cursor) == []

    there = await session.at(branch=branch.id)
    assert (there.version, there.fields) == (5, {"city": "Bergen", "hotel": MARK})
    assert texts(there.messages) == ["one", "two", "three", "lost four", "lost five", "lost six"]
    assert there.phase == "executing"
    earlier = await session.at(branch=branch.id, version=3)
    assert earlier.fields == {"city": "Bergen", "n": 2}
    assert texts(earlier.messages) == ["one", "two", "three", "lost four", "lost five"]
    assert [change.version for change in await session.history(branch=branch.id)] == [3, 4, 5]
    (middle,) = await session.history(branch=branch.id, after=3, before=5)
    assert (middle.set, middle.deleted, middle.phase) == ({"hotel": MARK}, ("n",), "executing")

    # The record itself is what it was.
    assert await session.get_all(fresh=True) == {"city": "Narvik", "n": 3}
    assert texts(await session.messages()) == ["one", "two", "three", "new four"]
    assert [change.version for change in await session.history()] == [1, 2, 3, 4]
    for wanted in (2, 6):
        with pytest.raises(NotFound, match=f"version {wanted} cannot be restored"):
            await session.at(branch=branch.id, version=wanted)
    for call in (session.at, session.history, partial(store.admin.drop_branch, "s")):
        with pytest.raises(NotFound, match=f"no branch '9-none'; it has {branch.id}"):
            await call(branch="9-none")
    for wrong in ("", 7, "x" * 101, "nul\x00"):
        with pytest.raises(InvalidValue):
            await session.at(branch=wrong)


async def test_a_branch_is_forked_with_its_messages(opener: Any) -> None:
    store = await opener(recent_messages=2, **QUIET)
    session, lost = await trip(store)
    await keep(store, lost)
    shown = await session.at(branch=lost.epoch)
    assert await session.fork("whole", branch=lost.epoch) == 1
    assert await session.fork("early", branch=lost.epoch, version=3) == 1
    whole, early = store.session("whole"), store.session("early")
    for _ in range(2):
        assert await whole.get_all(fresh=True) == shown.fields
        assert await whole.phase(fresh=True) == "executing"
        assert await whole.messages() == list(shown.messages)
        assert [message.timestamp for message in await whole.messages()] == [m.timestamp for m in shown.messages]
        assert await early.get_all(fresh=True) == {"city": "Bergen", "n": 2}
        assert texts(await early.messages()) == ["one", "two", "three", "lost four", "lost five"]
        # And again as it comes back from SQL.
        await store.admin.archive()
        tiers(store).hot.clear()
        evict(store, "whole", "early")
    await whole.append(said("seven"))
    assert texts(await whole.messages(last=2)) == ["lost six", "seven"]
    assert (await whole.messages(last=1))[0].number == 6
    await whole.rollback(version=1)
    assert texts(await whole.messages()) == texts(shown.messages)
    with pytest.raises(Conflict):
        await session.fork("whole", branch=lost.epoch)
    # What was shared is by reference, and stays when the record goes; the branch goes with it.
    assert [info.user for info in await store.sessions() if info.id == "whole"] == ["u"]
    assert await store.erase(session.id)
    tiers(store).hot.clear()
    assert texts(await early.messages()) == ["one", "two", "three", "lost four", "lost five"]
    assert texts(await whole.messages()) == texts(shown.messages)


def evict(store: Any, *ids: str) -> None:
    """What the TTL does to archived records."""
    with redis_of(store) as client:
        for id in ids:
            client.delete(keys_of(store, id).record)


async def items_of(store: Any, id: str) -> dict[str, Any]:
    page = await store.session(id).items("x").list()
    return {item.key: item.value for item in page.items}


@pytest.mark.parametrize("last", [2, 3, 4, 5, 6])
async def test_a_branch_is_forked_with_its_items(opener: Any, last: int) -> None:
    """Those of the record below, and its own upon them, also of what it cleared on the way."""
    store = await opener(**QUIET)
    session = store.session("s")
    items = session.items("x")
    await items.put_many({"a": 1, "b": 1})
    shown = {2: {"a": 2, "b": 1}, 3: {"a": 2}, 4: {"a": 2, "c": b"\0bytes"}, 5: {}, 6: {"d": 2}}

    async def work() -> None:
        await items.put("a", 2)
        await items.delete("b")
        await items.put("c", b"\0bytes")
        await session.clear(items=True)
        await items.put("d", 2)

    lost = await lose(store, "s", work)
    await items.put("a", 3)
    await keep(store, lost, lost.only(*range(2, last + 1)))
    (branch,) = await store.admin.branches(session.id)
    await session.fork("f", branch=branch.id)
    await store.erase(session.id)
    assert await items_of(store, "f") == shown[last]


async def test_a_branch_of_more_items_than_a_commit_may_put_is_forked(opener: Any) -> None:
    store = await opener(**QUIET)
    session = store.session("s")
    items = session.items("x")
    await session.set("n", 1)

    async def work() -> None:
        for start in range(0, 2500, 500):
            await items.put_many({f"k{number:04d}": number for number in range(start, start + 500)})

    lost = await lose(store, "s", work)
    await session.set("n", 2)
    await keep(store, lost, lost.only(*range(2, 7)))
    (branch,) = await store.admin.branches(session.id)
    await session.fork("f", branch=branch.id)
    fork = store.session("f").items("x")
    assert (await fork.get("k0000"), await fork.get("k2499"), await fork.get("k2500")) == (0, 2499, None)
    await store.admin.archive()
    evict(store, "f")
    seen, after = 0, ""
    while after is not None:
        page = await fork.list(limit=1000, after=after)
        assert [item.value for item in page.items] == [*range(seen, seen + len(page.items))]
        seen, after = seen + len(page.items), page.next
    assert seen == 2500


async def test_what_a_branch_brought_back_is_in_its_fork(opener: Any) -> None:
    store = await opener(**QUIET)
    session = store.session("s")
    items = session.items("x")
    await items.put_many({"a": 1, "b": 1})
    await items.put("a", 2)

    async def work() -> None:
        await session.rollback(version=1)
        await items.put("c", 4)

    lost = await lose(store, "s", work)
    await items.delete("b")
    await keep(store, lost)
    (branch,) = await store.admin.branches(session.id)
    await session.fork("f", branch=branch.id)
    assert await items_of(store, "f") == {"a": 1, "b": 1, "c": 4}
    assert await items_of(store, "s") == {"a": 2}


async def test_messages_that_were_taken_back_on_a_branch_stay_so_in_its_fork(opener: Any) -> None:
    store = await opener(**QUIET)
    session = store.session("s")
    await session.append(said("zero"), said("one"))
    await session.clear(messages=True)
    await session.append(said("two"))

    async def lost() -> None:
        await session.rollback(version=1)
        await session.append(said("lost three"))
        await session.clear(messages=True)
        await session.append(said("lost four"))

    found = await lose(store, "s", lost)
    await session.append(said("new three"))
    await keep(store, found)
    for version, shown in ((4, ["zero", "one"]), (5, ["zero", "one", "lost three"]), (6, []), (7, ["lost four"])):
        assert texts((await session.at(branch=found.epoch, version=version)).messages) == shown
        fork = store.session(f"f{version}")
        await session.fork(fork.id, branch=found.epoch, version=version)
        await fork.append(said("and on"))
        assert texts(await fork.messages(fresh=True)) == [*shown, "and on"]
        await store.admin.archive()
        tiers(store).hot.clear()
        evict(store, fork.id)
        assert texts(await fork.messages(fresh=True)) == [*shown, "and on"]


async def test_keeping_the_same_twice_changes_nothing(opener: Any) -> None:
    store = await opener(**QUIET)
    session, lost = await trip(store)
    # Piece by piece, in any order, from several who remember.
    assert [each.commits for each in await keep(store, lost, lost.only(5, 3))] == [2]
    (partly,) = await store.admin.branches(session.id)
    assert partly.missing == ((4, 4),)
    assert [each.commits for each in await keep(store, lost)] == [1]
    (branch,) = await store.admin.branches(session.id)
    assert await keep(store, lost) == []
    assert await store.admin.branches(session.id) == [branch]
    assert (branch.id, branch.commits, branch.complete) == (partly.id, 3, True)
    # What is in the archive did not diverge.
    archived = tiers(store).cold.history("session:s")
    assert await keep(store, replace(lost, epoch=tiers(store).cold.cursor(lost.partition).epoch), archived[2:]) == []


async def test_what_another_life_repeated_is_no_branch_unless_others_came_behind_it(opener: Any) -> None:
    store = await opener(**QUIET)
    session, lost = await trip(store)
    third, fourth, _ = lost.entries
    cold = tiers(store).cold
    changed = next(entry for entry in cold.history("session:s") if entry.version == 3)
    repeated = replace(third, event=changed.event)
    assert await keep(store, lost, [repeated]) == []
    assert [each.commits for each in await keep(store, lost, [repeated, fourth])] == [2]
    assert (await session.at(branch=lost.epoch)).fields == {"city": "Bergen", "hotel": MARK}


async def test_what_is_missing_is_said_and_nothing_is_invented(opener: Any) -> None:
    store = await opener(**QUIET)
    session, lost = await trip(store)
    await keep(store, lost, lost.only(3, 5))
    (branch,) = await store.admin.branches(session.id)
    assert (branch.complete, branch.missing, branch.commits, branch.version) == (False, ((4, 4),), 2, 5)
    there = await session.at(branch=branch.id)
    assert (there.version, there.fields) == (3, {"city": "Bergen", "n": 2})
    with pytest.raises(NotFound, match="of which 4 to 4 are lost"):
        await session.at(branch=branch.id, version=5)
    assert [change.version for change in await session.history(branch=branch.id)] == [3, 5]
    assert await session.fork("f", branch=branch.id) == 1
    assert texts(await store.session("f").messages()) == ["one", "two", "three", "lost four", "lost five"]
    other, lost = await trip(store, "t")
    await keep(store, lost, lost.only(5))
    (branch,) = await store.admin.branches(other.id)
    assert (branch.base, branch.missing) == (2, ((3, 4),))
    with pytest.raises(NotFound, match="of which 3 to 4 are lost"):
        await other.at(branch=branch.id)
    with pytest.raises(NotFound):
        await other.fork("g", branch=branch.id)
    assert texts((await other.history(branch=branch.id))[0].appended) == ["lost six"]


async def test_two_lines_of_one_epoch_are_two_branches(opener: Any) -> None:
    """Two servers took writes under one epoch until one of them noticed."""
    store = await opener(**QUIET)
    session, lost = await trip(store)
    await keep(store, lost)
    third, fourth, fifth = lost.entries

    def copy_of(entry: JournalEntry) -> JournalEntry:
        data = entry.data.replace(b"Bergen", b"Tromso").replace(MARK.encode(), b"Rica-Ishavs"[: len(MARK)])
        return replace(entry, event=f"0ther.{entry.offset}.1", offset=entry.offset + 10, data=data)

    await keep(store, lost, [copy_of(fifth), copy_of(third), copy_of(fourth)])
    first, second = await store.admin.branches(session.id)
    assert (first.id, second.id) == (lost.epoch, f"{lost.epoch}.2")
    assert (await session.at(branch=first.id)).fields["city"] == "Bergen"
    assert (await session.at(branch=second.id)).fields["city"] == "Tromso"
    assert (first.complete, second.complete, second.commits) == (True, True, 3)
    assert await store.admin.drop_branch(session.id, first.id) == 3
    assert await store.admin.branches(session.id) == [second]


async def test_a_record_that_is_in_a_branch_alone_is_found(opener: Any) -> None:
    """It was created on a server that was cut off, and nothing of it is anywhere else."""
    store = await opener(**QUIET)
    session = store.session("only", user=MARK)

    async def lost() -> None:
        await session.write(set={"a": MARK}, append=[said("hi")])

    found = await lose(store, "only", lost)
    await keep(store, found)
    assert not await session.exists(fresh=True)
    (branch,) = await store.admin.branches(session.id)
    assert (branch.base, branch.commits, branch.complete) == (0, 1, True)
    assert await session.fork("again", branch=branch.id) == 1
    assert await store.session("again").get_all() == {"a": MARK}
    assert texts(await store.session("again").messages()) == ["hi"]
    lines = await store.admin.export("only")
    assert json.loads(lines[-1])["branch"] == branch.id
    await store.admin.archive()
    assert await store.forget(MARK) == 2
    assert await store.admin.branches() == []
    assert await keep(store, found) == [], "and it does not come back"


# Erasing


async def test_an_erased_record_has_no_branches_and_gets_none(opener: Any) -> None:
    store = await opener(**QUIET)
    session, lost = await trip(store)
    await keep(store, lost, lost.only(3, 4))
    assert await store.erase(session.id)
    assert await store.admin.branches() == []
    assert await keep(store, lost) == [], "whoever remembers it comes too late"
    assert await store.admin.branches(session.id) == []
    # Begun again, it is another record; what was erased stays so.
    assert await session.create({"a": 1}) > 5
    await store.admin.archive()
    assert await keep(store, lost) == []
    if core(store).settings.archive != "memory":
        rows = everything_in_sql(core(store).settings.archive, core(store).settings.namespace)
        assert MARK not in repr(rows)


async def test_without_the_look_at_what_was_erased_it_would_come_back(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above."""
    store = await opener(**QUIET)
    session, lost = await trip(store)
    await store.erase(session.id)
    monkeypatch.setattr(aside, "_living", lambda rows, namespace, record, epoch, entries: entries)
    assert [each.commits for each in await keep(store, lost)] == [3]


async def test_nothing_of_a_forgotten_person_comes_back_that_only_a_lost_server_knew(opener: Any) -> None:
    """Nothing in the archive bears these names: neither the conversation's, nor that of a fork of an erased one."""
    store = await opener(**QUIET)
    first = await lose(store, "c1", lambda: store.session("c1", user=MARK).set("a", MARK))
    own = await lose(store, MARK, lambda: store.user(MARK).set("a", MARK), "user")
    parent = store.session("parent", user=MARK)
    await parent.set("a", MARK)
    fork = await lose(store, "child", lambda: parent.fork("child"))
    other = await lose(store, "c2", lambda: store.session("c2", user="bob").set("a", 1))
    assert await store.forget(MARK) == 1
    for lost in (first, own, fork):
        assert lost.entries
        assert await keep(store, lost) == []
    assert len(await keep(store, other)) == 1
    # A new conversation of a person who came back is another matter.
    later = [replace(entry, time_ms=entry.time_ms + 3_600_000) for entry in first.entries]
    assert len(await keep(store, first, later)) == 1


async def test_without_the_note_of_who_was_forgotten_it_would_come_back(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above."""
    store = await opener(**QUIET)
    lost = await lose(store, "c1", lambda: store.session("c1", user=MARK).set("a", MARK))
    monkeypatch.setattr(erasure, "_note_when", lambda *given: None)
    assert await store.forget(MARK) == 0
    assert len(await keep(store, lost)) == 1


@pytest.mark.parametrize("again", [False, True], ids=["gone", "began-again"])
@pytest.mark.parametrize("noted", [True, False], ids=["noted", "control"])
async def test_nothing_of_an_erased_record_comes_back_that_only_a_lost_server_and_its_writer_knew(
    opener: Any, monkeypatch: pytest.MonkeyPatch, noted: bool, again: bool
) -> None:
    store = await opener(**QUIET)
    lost = await lose(store, "c1", lambda: store.session("c1").set("a", MARK))
    if not noted:
        monkeypatch.setattr(erasure, "_note_when", lambda *given: None)
    assert not await store.erase("c1")
    if again:
        await store.session("c1").set("b", 1)
        await store.admin.archive()
    assert len(await keep(store, lost)) == (not noted)


async def test_what_diverges_after_a_record_began_again_is_kept(opener: Any) -> None:
    store = await opener(**QUIET)
    session = store.session("s")
    await session.set("a", 1)
    await store.erase(session.id)
    version = await session.create({"a": 2})

    async def lost() -> None:
        await session.set("a", 3)

    found = await lose(store, "s", lost)
    await session.set("a", 4)
    assert [each.first for each in await keep(store, found)] == [version + 1]
    assert (await session.at(branch=found.epoch)).fields == {"a": 3}


async def test_what_is_to_be_erased_gets_no_branch(opener: Any) -> None:
    """Between the request and its end."""
    store = await opener(**QUIET)
    session, lost = await trip(store)
    tiers(store).cold.request("session:s")
    assert await keep(store, lost) == []
    assert await store.erase(session.id)


async def test_a_deleted_record_keeps_its_branches(opener: Any) -> None:
    store = await opener(**QUIET)
    session, lost = await trip(store)
    await keep(store, lost)
    await store.delete("s")
    assert not await session.exists()
    assert await session.fork("f", branch=lost.epoch) == 1
    assert await store.session("f").get("city") == "Bergen"
    with pytest.raises(Deleted):
        await session.fork("g")


async def test_a_purge_removes_old_branches_and_keeps_what_young_ones_continue(opener: Any) -> None:
    store = await opener(**QUIET)
    session, lost = await trip(store)
    other, others = await trip(store, "t")
    await keep(store, lost)
    young = [replace(entry, time_ms=entry.time_ms + 3_600_000) for entry in others.entries]
    await keep(store, others, young)
    begun = time.time()
    await until(lambda: time.time() > begun + 0.005)
    assert (await store.admin.purge(older_than=0))["changes"] >= 3 + 4
    assert [branch.record_id for branch in await store.admin.branches()] == ["t"]
    there = await other.at(branch=others.epoch)
    assert texts(there.messages) == ["one", "two", "three", "lost four", "lost five", "lost six"]
    assert there.fields == {"city": "Bergen", "hotel": MARK}
    with pytest.raises(NotFound):
        await session.at(version=2)
    assert (await other.at(version=2)).fields == {"city": "Oslo", "n": 2}
    assert await store.admin.drop_branch(other.id, others.epoch) == 3
    await store.admin.purge(older_than=0)
    with pytest.raises(NotFound):
        await other.at(version=2)
    assert await other.get_all() == {"city": "Narvik", "n": 3}


# Encryption, export, events


async def test_a_branch_is_encrypted_anew_and_forked_under_its_own_name(opener: Any) -> None:
    old, new = bytes(32), bytes(range(32))
    store = await opener(encryption=Encryption(KeyRing({"old": old})), **QUIET)
    session, lost = await trip(store)
    await keep(store, lost)
    if core(store).settings.archive != "memory":
        assert MARK not in repr(everything_in_sql(core(store).settings.archive, core(store).settings.namespace))
    shown = await session.at(branch=lost.epoch)
    assert shown.fields["hotel"] == MARK
    changing = Encryption(KeyRing({"old": old, "new": new}, current="new"))
    tiers(store).hot.clear()
    rekeyed(store, changing)
    done = await store.admin.reencrypt()
    assert done.failed == 0
    assert (await store.admin.reencrypt()).values == 0
    rekeyed(store, Encryption(KeyRing({"new": new})))
    assert await session.at(branch=lost.epoch) == shown
    await session.fork("f", branch=lost.epoch)
    assert await store.session("f").messages(fresh=True) == list(shown.messages)
    assert await store.session("f").get("hotel") == MARK


def rekeyed(store: Any, encryption: Encryption) -> None:
    """The same store as another process would open it, with other keys."""
    root = Sealed(encryption, tiers(store).keys.namespace, "")
    core(store)._context.codec_of = root.of
    home = tiers(store)
    home.codec_of = home.warm.codec_of = root.of
    home.hot.clear()


async def test_an_export_holds_branches_and_an_import_leaves_them_out(opener: Any) -> None:
    store = await opener(**QUIET)
    session, lost = await trip(store)
    before = await store.admin.export("s")
    await keep(store, lost)
    lines = await store.admin.export("s")
    assert lines[: len(before)] == before
    rows = [json.loads(line) for line in lines[len(before) :]]
    assert [(row["branch"], row["base"], row["version"], row["cause"]) for row in rows] == [
        (lost.epoch, 2, version, CAUSE) for version in (3, 4, 5)
    ]
    assert ["s", "hotel", f'"{MARK}"'] in rows[1]["ops"]
    assert await store.admin.import_(lines, id="copy") == "copy"
    assert await store.admin.branches("copy") == []
    assert await store.session("copy").get_all() == await session.get_all()


async def diverged_events(store: Any) -> list[Any]:
    found: list[Any] = await store.admin.audit(type="conversation.diverged")
    return found


async def test_one_event_tells_of_a_branch(opener: Any) -> None:
    store = await opener(**QUIET)
    _, lost = await trip(store)
    received: list[Any] = []
    store.on("conversation.diverged", received.append)
    await store.ready()
    branches = tiers(store).branches
    await through(store, branches.keep(lost.partition, lost.epoch, lost.only(3, 4), CAUSE))
    (event,) = await diverged_events(store)
    assert (event.subject, event.conversation_id) == ("session:s", "s")
    assert event.data == {"branch": lost.epoch, "base": 2, "commits": 2, "cause": CAUSE}
    assert branches.commits == 2
    # What is added to it later, or tried again, is told no more; nor by who died before that was noted.
    await through(store, branches.keep(lost.partition, lost.epoch, lost.entries, CAUSE))
    untold(store)
    await asyncio.gather(*(through(store, branches.tell(["session:s"])) for _ in range(3)))
    assert await diverged_events(store) == [event]
    await until(lambda: received)
    assert [each.id for each in received] == [event.id]
    assert await tiers(store).port.sql(tiers(store).cold.branches.survey, [lost.partition]) == (1, [])


async def through(store: Any, work: Any) -> Any:
    """Return the result of a coroutine of the core, through the API of the test."""
    return await work if core(store) is store else await in_thread(lambda: finish(work))


def untold(store: Any) -> None:
    """As it is when a process dies between publishing and noting that."""
    cold = tiers(store).cold
    mine = tables.branches.c.namespace == cold.namespace
    with cold.database.write() as connection:
        connection.execute(update(tables.branches).where(mine).values(told=False))


async def test_a_name_of_its_own_is_what_keeps_the_event_from_coming_twice(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above: under a name that is new each time there are two."""
    store = await opener(**QUIET)
    _, lost = await trip(store)
    await keep(store, lost)
    stream = tiers(store).stream
    emit_once, counted = stream.emit_once, iter("ab")

    async def named_anew(keys: Any, writer: str, *rest: Any) -> bool:
        return await emit_once(keys, writer + next(counted), *rest)

    monkeypatch.setattr(stream, "emit_once", named_anew)
    await through(store, tiers(store).branches.tell(["session:s"]))
    untold(store)
    await through(store, tiers(store).branches.tell(["session:s"]))
    assert len(await diverged_events(store)) == 2


@pytest.mark.replicas
async def test_who_archives_tells_of_what_was_kept_by_who_died(opener: Any) -> None:
    quiet = await opener(**QUIET)
    _, lost = await trip(quiet)
    await keep(quiet, lost)
    await opener(sweep=0.05)

    async def told() -> list[Any]:
        return await diverged_events(quiet)

    (event,) = await until(told, 60)
    assert event.data["branch"] == lost.epoch


async def test_the_doctor_counts_records_with_branches(opener: Any) -> None:
    store = await opener(**QUIET)

    async def finding() -> Any:
        (found,) = [each for each in await store.admin.doctor() if each.name == "branches"]
        return found

    assert (await finding()).ok
    session, lost = await trip(store)
    await keep(store, lost)
    found = await finding()
    assert not found.ok
    assert found.found == "1 records have branches"
    assert "distributed-state branches" in found.advice
    await store.admin.drop_branch(session.id, lost.epoch)
    assert (await finding()).ok


async def test_what_no_database_could_hold_is_set_aside_alone(opener: Any) -> None:
    store = await opener(**QUIET)
    session, lost = await trip(store)
    third, fourth, fifth = lost.entries
    assert [each.commits for each in await keep(store, lost, [third, replace(fourth, data=b"s1:"), fifth])] == [2]
    (aside,) = tiers(store).cold.quarantined()
    assert (aside.record, aside.version, aside.data) == ("session:s", 4, b"s1:")
    assert [branch.missing for branch in await store.admin.branches(session.id)] == [((4, 4),)]
