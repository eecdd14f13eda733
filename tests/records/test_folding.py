"""A state rebuilt from its history by `fold`. Law: for every n it is the state that `at(version=n)` has."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest
from below import until
from reaping import Sweeps, quiet

from distributed_state import Encryption, InvalidValue, KeyRing, NotFound, PutItem, fold
from distributed_state.results import Change


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def shuffled(dice: random.Random, many: int) -> Iterator[int]:
    """Each number below `many` in a random order, again and again: none is left out by chance."""
    while True:
        yield from dice.sample(range(many), many)


async def one_step(dice: random.Random, store: Any, session: Any, ways: Iterator[int], back: Iterator[int]) -> None:
    """A random change: the next of the `ways`, or of those `back` from a deletion."""
    key, value = dice.choice("abcd"), dice.choice([1, "x", [1, {"y": None}], {}, 2.5, None, b"\xff"])
    version = await session.version(fresh=True)
    if not await session.exists(fresh=True):
        match next(back):
            case 0:
                await session.create({"a": 1})
            case 1:
                await session.append(said("back"), revive=True)
            case 2:
                await session.rollback(version=1)
            case 3:
                async with session.turn(revive=True) as turn:
                    turn["b"] = 2
        return
    match next(ways):
        case 0:
            await session.set(key, value, ttl=dice.choice([None, 0.001, 3600]))
        case 1:
            await session.write(set={key: value, "n": 1}, delete=["a"], tag={"run": ["r1", key]}, untag={"run": "r2"})
        case 2:
            await session.delete(key)
        case 3 | 4:
            await session.append(*(said(f"{version}.{n}") for n in range(dice.randint(1, 4))))
        case 5:
            await session.clear(messages=dice.random() < 0.5, items=dice.random() < 0.5)
        case 6 | 7:
            await session.append(said("to be taken back"))
            await session.pop_message()
        case 8:
            shown = await session.messages()
            after = dice.choice([None, *(message.number for message in shown)])
            await session.replace_messages([said(f"instead {version}")] * dice.randint(0, 2), after=after)
        case 9:
            await session.write(phase=dice.choice(["planning", "executing"]))
        case 10:
            await session.restore_state({"fields": {"z": value if value != b"\xff" else 0}, "phase": None})
        case 11:
            await session.restore_state({"fields": {}, "messages": [said("restored")]})
        case 12:
            await session.checkpoint("here")
            await session.append(said("to be rolled back"))
            await session.rollback(**dice.choice([{"steps": 1}, {"label": "here"}, {"checkpoints": 1}]))
        case 13:
            target = dice.randint(1, version)
            if not (await session.at(version=target)).deleted:
                await session.rollback(version=target)
        case 14:
            await session.append(said("to be cleaned up"))
            while not await store.admin.cleanup(session.id, days=0):
                await asyncio.sleep(0.001)  # the clock of this replica may be milliseconds behind the server's
        case 15:
            await store.delete(session.id)
        case 16:
            async with session.turn(request_id=f"{session.id} {version}") as turn:
                turn.append(said("in a turn"))
                turn["t"] = version
        case 17:
            await session.write(items=[PutItem(collection="c", key=key, value=1)], increment={"i": 2})
        case 18:
            await session.update("o", {key: "u"})
        case 19:
            async with session.transaction() as view:
                view["k"] = value


WAYS, BACK = 20, 4


def whole(state: Any) -> Any:
    """A snapshot with what its comparison leaves out: the numbers and the times of messages."""
    return state, [(message.number, message.timestamp) for message in state.messages], list(state.tags.items())


async def folded(session: Any, start: Any = None) -> None:
    """Compare every state."""
    for change in await session.history():
        n = change.version
        assert whole(fold(await session.history(before=n + 1), start=start)) == whole(await session.at(version=n))


async def folded_from_within(session: Any) -> None:
    """Compare the last state with folds that begin later."""
    history = await session.history()
    for change in history[:: max(1, len(history) // 5)]:
        later, start = history[history.index(change) + 1 :], await session.at(version=change.version)
        with suppress(InvalidValue):  # a change shows messages again that were not shown at the start
            assert whole(fold(later, start=start)) == whole(await session.at(version=history[-1].version))


REACHED = {
    "append", "checkpoint", "cleanup", "clear", "delete", "pop", "replace", "restore", "rollback", "set", "transaction",
    "turn", "update", "write",
    "deleted", "appended", "phase", "tagged", "untagged", "items", "label", "cleared", "kept", "restored",
    "fields cleared", "items cleared", "messages cleared", "phase cleared", "tags cleared", "record cleared",
}  # fmt: skip

PARTS = [part.name for part in fields(Change)]


def reached(history: list[Any]) -> set[str]:
    """The kinds of these changes, and the parts that they name."""
    found = {change.kind for change in history}
    for change in history:
        found |= {part for part in PARTS if getattr(change, part) not in (None, (), {})}
        found |= {f"{part} cleared" for part in change.cleared}
    return found


async def program(opener: Any, seed: int, **settings: Any) -> None:
    dice, store = random.Random(seed), await opener(snapshot_every=7, recent_messages=5, **settings)
    session = store.session(f"s{seed}", user="u1")
    ways, back = shuffled(dice, WAYS), shuffled(dice, BACK)
    await session.set("a", 0)
    for _ in range(50):
        await one_step(dice, store, session, ways, back)
    assert reached(await session.history()) >= REACHED
    await folded(session)
    await folded_from_within(session)
    alive = [n for n in range(1, await session.version() + 1) if not (await session.at(version=n)).deleted]
    origin = dice.choice(alive)
    await session.fork(f"fork{seed}", version=origin)
    fork = store.session(f"fork{seed}", user="u1")
    for _ in range(12):
        await one_step(dice, store, fork, ways, back)
    assert (await fork.history())[0].from_version == origin
    await folded(fork, await session.at(version=origin))


@pytest.mark.parametrize("seed", range(6))
async def test_the_fold_of_a_history_is_the_state(opener: Any, seed: int) -> None:
    await program(opener, seed)


async def test_the_fold_of_an_encrypted_history_is_the_state(opener: Any) -> None:
    await program(opener, 200, encryption=Encryption(KeyRing({"k": bytes(32)}), fields=tuple("abcdkoz")))


@pytest.mark.only(warm="real")
async def test_the_fold_of_a_history_is_the_state_on_servers(opener: Any) -> None:
    await program(opener, 100)


@pytest.mark.parametrize("lost", ["cleared", "kept", "deleted"])
async def test_without_what_a_change_took_away_the_fold_is_noticed(opener: Any, lost: str) -> None:
    """The negative control: each part that a Change tells is needed."""
    store = await opener()
    session = store.session("s")
    await session.write(set={"a": 1, "b": 2}, append=[said("one"), said("two")], phase="planning")
    await session.delete("a")
    await session.pop_message()
    await session.clear()
    history = await session.history()
    state = await session.at(version=4)
    assert fold(history) == state
    blank = {"cleared": (), "kept": None, "deleted": ()}[lost]
    less = [replace(change, **{lost: blank}) for change in history]
    if lost == "deleted":
        less = less[:2]
        state = await session.at(version=2)
    assert fold(less) != state


async def test_changes_say_what_they_took_away(store: Any) -> None:
    session = store.session("s")
    await session.write(set={"a": 1}, append=[said("0"), said("1"), said("2")], phase="planning")
    await session.clear()
    await session.clear(messages=True, items=True)
    await session.append(said("3"), said("4"))
    await session.pop_message()
    await session.replace_messages([said("5")], after=3)
    await session.rollback(version=1)
    await session.restore_state({"fields": {}, "phase": None})
    await store.delete("s")
    await session.create()
    found = {change.version: change for change in await session.history()}
    assert (found[1].cleared, found[1].kept) == ((), None)
    assert (found[2].kind, found[2].cleared, found[2].kept) == ("clear", ("fields",), None)
    assert (found[3].kind, found[3].cleared, found[3].kept) == ("clear", ("fields", "messages"), ())
    assert found[5].kept == ((3, 3), (5, None)), "message 4 is gone, and the next one has number 5"
    assert [message.content for message in found[6].appended] == ["5"]
    assert (found[7].restored, found[7].kept) == (1, ((0, 2),))
    assert found[8].cleared == ("fields", "phase")
    assert {"record", "fields", "messages", "tags"} <= set(found[9].cleared)
    assert "record" not in found[10].cleared


async def test_a_fold_over_missing_changes_is_refused(store: Any) -> None:
    session = store.session("s")
    for n in range(5):
        await session.append(said(str(n)))
    history = await session.history()
    with pytest.raises(InvalidValue, match=r"version 3 comes after version 0: .* start=at"):
        fold(history[2:])
    with pytest.raises(InvalidValue, match="version 4 comes after version 2"):
        fold([*history[:2], *history[3:]])
    assert fold(history[2:], start=await session.at(version=2)) == await session.at(version=5)
    assert fold([]).version == 0
    await session.fork("t", version=3)
    fork = await store.session("t").history()
    with pytest.raises(InvalidValue, match=r"message 0.* start="):
        fold(fork)


async def test_the_history_that_a_purge_left_is_folded_from_its_oldest_state(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    for n in range(6):
        await session.append(said(str(n)))
    await session.pop_message()
    await store.admin.archive()
    await store.admin.purge(keep_changes=2)
    left = await session.history()
    assert [change.version for change in left] == [6, 7]
    with pytest.raises(NotFound):
        await session.at(version=4)
    assert fold(left, start=await session.at(version=5)) == await session.at(version=7)


async def test_a_session_that_expired_and_began_again_is_folded(opener: Any) -> None:
    store = await quiet(opener, session_idle=0.05, expired="begin again")
    session = store.session("s")
    await session.write(set={"a": 1}, append=[said("one")])
    await until(Sweeps(store))
    await session.append(said("two"))
    await folded(session)
    assert fold((await session.history())[:2]).deleted
    assert not fold(await session.history()).deleted
