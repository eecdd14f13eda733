"""Servers that do not know a script: new, restarted, promoted or flushed ones. Law: nobody notices, in any order.

Each server has a script cache of its own, so that of two scripts in one exchange it may know the second and not the
first.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from below import keys_of, redis_of, tiers
from controls import sabotage
from sync_api import Blocking

from distributed_state import Fenced, InvalidValue, TooLarge
from distributed_state.tiers import commit as write_path
from distributed_state.warm.answers import Draft
from distributed_state.warm.scripts import ACQUIRE, COMMIT, READ, RELEASE


def knowing(store: Any, *scripts: Any) -> None:
    """From here on the server knows these scripts and no other."""
    with redis_of(store) as client:
        client.script_flush()
        for each in scripts:
            client.script_load(each.text.decode())


def between(store: Any, script: Any, meanwhile: Any) -> None:
    """Let something happen as soon as the next exchange that begins with this script is answered."""
    port = tiers(store).port
    exchange = port.exchange

    async def once(commands: Any) -> Any:
        answers = await exchange(commands)
        if commands[0][1] == script.sha:
            port.exchange = exchange
            await meanwhile()
        return answers

    port.exchange = once


async def turn_after_release_was_loaded(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 1)
    knowing(store, RELEASE)
    async with session.turn() as turn:
        turn["n"] += 1
    assert await session.get("n", fresh=True) == 2
    assert tiers(store).leases.lost == 0
    with redis_of(store) as client:
        assert not client.exists(keys_of(store, "s").lock)


async def test_the_lease_is_not_given_back_before_the_commit_that_it_protects(store: Any) -> None:
    await turn_after_release_was_loaded(store)


@pytest.mark.only(api="asyncio", warm="redis")
async def test_given_back_whatever_became_of_the_commit_it_would_be_fenced(store: Any) -> None:
    """The negative control."""
    with sabotage("release", "if sequence ~= '' then", "if false then"), pytest.raises(Fenced):
        await turn_after_release_was_loaded(store)


async def test_a_refused_commit_leaves_the_lock_to_the_end_of_the_turn(opener: Any) -> None:
    """It is given back there, and nothing is lost."""
    store = await opener(max_record_bytes=2000)
    session = store.session("s")
    await session.set("text", "x" * 1500)
    with pytest.raises(TooLarge):
        async with session.turn() as turn:
            turn["more"] = "y" * 800
    with redis_of(store) as client:
        assert not client.exists(keys_of(store, "s").lock)
    assert tiers(store).leases.lost == 0


@pytest.mark.replicas
async def test_what_a_holder_reads_is_not_from_before_it_held_the_lock(opener: Any) -> None:
    """The read that went out behind the lock ran, the lock had to be sent again, and somebody wrote in between."""
    one, two = [await opener(max_staleness=0) for _ in range(2)]
    session = one.session("s")
    await session.set("n", 1)

    async def write() -> None:
        if isinstance(two, Blocking):
            two.it.session("s").set("n", 5)
        else:
            await two.session("s").set("n", 5)

    knowing(one, READ, COMMIT)
    between(one, ACQUIRE, write)
    async with session.turn() as turn:
        assert turn["n"] == 5
        turn["n"] += 1
    assert await session.get("n", fresh=True) == 6


async def test_a_server_that_forgets_every_script_at_once_serves_all_the_same(store: Any) -> None:
    """Flushed before each command, so that what was just loaded is unknown to the next one."""
    port = tiers(store).port
    exchange = port.exchange

    async def forgetful(commands: Any) -> Any:
        answers = []
        for each in commands:
            await exchange([(b"SCRIPT", b"FLUSH")])
            answers += await exchange([each])
        return answers

    port.exchange = forgetful
    session = store.session("s")
    for number in range(3):
        async with session.turn(request_id=f"r{number}") as turn:
            turn["n"] = turn.get("n", 0) + 1
        async with session.lock():
            await session.increment("m")
    async with store.batch() as batch:
        for number in range(5):
            batch.on(store.session(f"b{number}")).set("n", number)
    await store.admin.archive()
    assert await session.get_all(fresh=True) == {"n": 3, "m": 3}
    assert [await store.session(f"b{number}").get("n", fresh=True) for number in range(5)] == list(range(5))
    assert [change.version for change in await session.history()] == list(range(1, 7))
    assert tiers(store).leases.lost == 0
    port.exchange = exchange


async def test_two_releases_that_differ_in_their_scripts_share_a_server(store: Any) -> None:
    """Each sends its own where the server does not know it, and asks for it by its hash: neither runs the other's."""
    session, line = store.session("s"), "-- Limits of the store's settings, here the defaults,"
    hashes = [COMMIT.sha]
    for number in range(1, 7):
        if number % 2:
            assert await session.set("n", number) == number
            continue
        with sabotage("commit", line, f"-- Of the next release. {line[3:]}"):
            hashes.append(COMMIT.sha)
            assert await session.set("n", number) == number
    assert len(set(hashes)) == 2
    with redis_of(store) as client:
        assert all(client.script_exists(*map(bytes.decode, set(hashes))))
    assert await session.get("n", fresh=True) == 6


@pytest.mark.only(api="asyncio")
async def test_a_batch_changes_a_record_once(store: Any) -> None:
    """Of two changes sent together the second may be carried out first, where the script has to be sent again."""
    home, keys = tiers(store), keys_of(store, "s")
    writes = [(keys, Draft("set", [(b"s", b"n", b"%d" % number)])) for number in range(2)]

    with pytest.raises(InvalidValue, match="occurs twice"):
        await write_path.commit_many(home, writes)
    assert await store.session("s").version(fresh=True) == 0


@pytest.mark.only(warm="real")
async def test_turns_go_on_while_scripts_are_flushed(opener: Any) -> None:
    store, over = await opener(), asyncio.Event()

    async def flush() -> None:
        with redis_of(store) as client:
            while not over.is_set():
                client.script_flush()
                await asyncio.sleep(0.001)

    async def serve(name: str) -> None:
        session = store.session(name)
        for _ in range(6):
            async with session.turn() as turn:
                turn["n"] = turn.get("n", 0) + 1
            async with session.lock():
                pass  # its release loads that script alone

    flusher = asyncio.create_task(flush())
    try:
        await asyncio.gather(*(serve(f"s{number % 4}") for number in range(12)))
    finally:
        over.set()
        await flusher
    assert [await store.session(f"s{number}").get("n", fresh=True) for number in range(4)] == [18] * 4
    assert tiers(store).leases.lost == 0
