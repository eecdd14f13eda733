"""Several users in one session: who did what, and what becomes of changes made at the same time."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest
from controls import sabotage

from distributed_state import Conflict, Deleted, InvalidValue, StateStore, Transaction
from distributed_state.merge import append, last_writer, maximum, union

# Actors


async def actors(session: Any) -> list[str]:
    return [change.actor for change in await session.history()]


async def test_every_commit_notes_who_acts(store: Any) -> None:
    session = store.session("s", user="u")
    await session.set("before", 1)
    with store.acting_as("user:7"):
        await session.write(set={"a": 1}, append=[{"role": "user", "content": "hi"}])
        await session.increment("n")
        await session.update("d", {"x": 1})
        await session.append_to("l", 1)
        await session.apply(lambda tx: tx.update(b=2))
        await session.checkpoint("here")
        await session.rollback(steps=1)
        async with store.batch() as batch:
            batch.on(session).set("c", 3)
        await session.fork("other")
        await store.delete("s")
    assert await actors(session) == ["", *["user:7"] * 9]
    assert await actors(store.session("other")) == ["user:7"]


async def test_the_innermost_actor_counts_and_the_handles_own_before_it(store: Any) -> None:
    session, bot = store.session("s"), store.session("s", actor="bot")
    with store.acting_as("a"):
        with store.acting_as("b: ü\n"):
            await session.set("n", 1)
        await session.set("n", 2)
        await bot.set("n", 3)
        with pytest.raises(ZeroDivisionError), store.acting_as("c"):
            raise ZeroDivisionError
        await session.set("n", 4)
    await session.set("n", 5)
    assert await actors(session) == ["b: ü\n", "a", "bot", "a", ""]


async def test_an_actor_reaches_the_tasks_created_inside_and_no_others(store: Any) -> None:
    async def one(name: str) -> None:
        session = store.session(name)
        with store.acting_as(name):
            for number in range(5):
                await session.set("n", number)
                await asyncio.sleep(0)
            await asyncio.create_task(session.set("n", -1))

    await asyncio.gather(*(one(f"user:{number}") for number in range(5)))
    for number in range(5):
        assert await actors(store.session(f"user:{number}")) == [f"user:{number}"] * 6


def test_a_thread_has_the_actor_of_the_context_it_runs_in(tmp_path: Any) -> None:
    with StateStore.open(archive=f"sqlite:///{tmp_path}/a.db") as store:
        session = store.session("s")
        with store.acting_as("user:7"):
            context = contextvars.copy_context()
            for run in (lambda: session.set("n", 1), lambda: context.run(session.set, "n", 2)):
                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
        assert [change.actor for change in session.history()] == ["", "user:7"]


async def test_nobody_is_no_actor(store: Any) -> None:
    for nonsense in ("", None, 7, "x" * 1025):
        with pytest.raises(InvalidValue):
            store.acting_as(nonsense)


# Merging


async def meet(session: Any, first: Any, second: Any, **options: Any) -> int:
    """`second` has seen the record before `first` changes it, and commits after; how often `second` ran."""
    runs = 0

    async def late(tx: Transaction) -> None:
        nonlocal runs
        runs += 1
        second(tx)
        if runs == 1:
            await first(session)

    def late_in_a_thread(tx: Transaction) -> None:
        nonlocal runs
        runs += 1
        second(tx)
        if runs == 1:
            first(session.it)

    await session.apply(late_in_a_thread if hasattr(session, "it") else late, **options)
    return runs


async def test_both_changes_are_kept_and_the_change_runs_once(store: Any) -> None:
    session = store.session("s")
    await session.write(set={"budget": 100, "tags": ["a", "b"], "mine": 0, "theirs": 0}, phase="planning")

    def first(session: Any) -> Any:
        return session.write(
            set={"budget": 300, "tags": ["a", "c"], "theirs": 1, "new": 1}, append=[{"role": "user", "content": "1"}]
        )

    def second(tx: Transaction) -> None:
        tx["budget"] = 200
        tx["tags"].append("d")
        tx["mine"] = 1
        tx.append({"role": "user", "content": "2"})
        tx.move_to("ready")

    assert await meet(session, first, second, merge={"budget": maximum, "tags": union}) == 1
    found = await session.get_all(fresh=True)
    assert found == {"budget": 300, "tags": ["a", "c", "d"], "mine": 1, "theirs": 1, "new": 1}
    assert [message.content for message in await session.messages()] == ["1", "2"]
    assert await session.phase() == "ready"
    assert await session.version() == 3
    assert (await session.at(version=3)).fields == found


@pytest.mark.parametrize("options", [{}, {"merge": None}])
async def test_without_merge_the_change_runs_again(store: Any, options: dict[str, Any]) -> None:
    session = store.session("s")
    await session.set("a", 0)
    runs = await meet(session, lambda session: session.set("b", 1), lambda tx: tx.update(a=1), **options)
    assert runs == 2


async def test_what_a_merge_cannot_express_runs_again(store: Any) -> None:
    session, policies = store.session("s"), {"n": last_writer, "l": append}

    def second(tx: Transaction) -> None:
        tx["n"] = tx.get("n", 0) + 1
        tx["l"] = [*tx.get("l", []), "mine"]

    firsts = {
        "deleted": lambda session: session.delete("n"),
        "cleared": lambda session: session.clear(),
        "moved": lambda session: session.write(phase="done"),
        "rewritten": lambda session: session.set("l", 7),
    }
    for name, first in firsts.items():
        await session.write(set={"n": 5, "l": []}, phase="planning")
        policies["l"] = lambda base, theirs, mine: _refuse()
        runs = 0
        try:
            runs = await meet(session, first, second, merge=policies)
        except TypeError:
            assert name == "rewritten", "the change itself cannot go on from a number"
            continue
        assert runs == 2, name
        assert await session.get("n") == (1 if name in ("deleted", "cleared") else 6)


def _refuse() -> Any:
    raise Conflict("not by me")


async def test_a_field_without_policy_runs_again(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 0)
    runs = await meet(session, lambda session: session.set("n", 10), lambda tx: tx.update(n=tx["n"] + 1), merge={})
    assert runs == 2
    assert await session.get("n") == 11


async def test_a_record_deleted_meanwhile_is_not_brought_back(store: Any) -> None:
    session, raw = store.session("s"), getattr(store, "it", store)
    await session.set("n", 0)
    with pytest.raises(Deleted):
        await meet(session, lambda _: raw.delete("s"), lambda tx: tx.update(m=1), merge={"n": last_writer})
    assert await session.get_all() == {}


async def test_a_policy_that_fails_stores_nothing(store: Any) -> None:
    session = store.session("s")
    await session.write(set={"n": 0, "m": 0})
    with pytest.raises(InvalidValue, match="'n'"):
        await meet(
            session, lambda session: session.set("n", "text"), lambda tx: tx.update(n=1, m=1), merge={"n": maximum}
        )
    with pytest.raises(InvalidValue, match="JSON"):
        await meet(
            session, lambda session: session.set("n", 5), lambda tx: tx.update(n=1, m=1), merge={"n": lambda *_: {1, 2}}
        )
    with pytest.raises(InvalidValue, match="policy"):
        await session.apply(lambda tx: tx.update(n=1), merge={"n": "largest"})
    assert await session.get_all(fresh=True) == {"n": 5, "m": 0}


async def race(opener: Any, rounds: int) -> tuple[dict[str, Any], int, int]:
    """Replicas change one record at once; the fields it came to, the changes made, and how often they ran."""
    stores = [await opener(archiver=False) for _ in range(3)]
    runs = 0

    async def replica(number: int) -> None:
        session = stores[number].session("plan")
        for step in range(rounds):

            def change(tx: Transaction, step: int = step) -> None:
                nonlocal runs
                runs += 1
                name = f"{number}.{step}"
                tx["tags"] = [*tx.get("tags", []), name]
                tx["log"] = [*tx.get("log", []), name]
                tx["highest"] = max(tx.get("highest", 0), step * 3 + number)
                tx[f"by-{number}"] = step
                tx.append({"role": "user", "content": name})

            await session.apply(change, merge={"tags": union, "log": append, "highest": maximum})

    await asyncio.gather(*(replica(number) for number in range(3)))
    session = stores[0].session("plan")
    found = await session.get_all(fresh=True)
    found["messages"] = [message.content for message in await session.messages(fresh=True)]
    return found, 3 * rounds, runs


@pytest.mark.replicas
async def test_no_acknowledged_change_is_lost_in_a_race(opener: Any) -> None:
    found, made, runs = await race(opener, 40)
    names = sorted(f"{number}.{step}" for number in range(3) for step in range(40))
    assert sorted(found["tags"]) == sorted(found["log"]) == sorted(found["messages"]) == names
    assert found["log"] == found["messages"], "the log is in the order of the commits"
    assert found["highest"] == 39 * 3 + 2
    assert [found[f"by-{number}"] for number in range(3)] == [39] * 3
    assert made <= runs < made + 40, "most conflicts were merged"


@pytest.mark.replicas
async def test_without_the_guard_of_the_version_changes_are_lost(opener: Any) -> None:
    """The negative control of the race."""
    guard = "local mismatch = expected ~= '' and expected ~= (version or '0')"
    with sabotage("commit", guard, "local mismatch = false"):
        found, made, _ = await race(opener, 40)
    assert len(found["tags"]) < made
