"""Followers, stops and takeovers of running turns, from other tasks and replicas. Law: what they see is the truth."""

from __future__ import annotations

import asyncio
import random
from contextvars import Context
from typing import Any

import pytest
from below import everything_in_redis, keys_of, redis_of, server_with, tiers, until
from controls import sabotage
from following import attempts, chunk_of, plain, shown, streamed

from distributed_state import (
    AccessDenied,
    DecryptionFailed,
    Encryption,
    Fenced,
    KeyRing,
    Stopped,
)
from distributed_state.results import Chunk, Ended, StopResult
from distributed_state.values import as_text
from distributed_state.warm.output import Received
from distributed_state.warm.scripts import FOLLOW

KEYS = KeyRing({"k": bytes(32)})


# Many followers


@pytest.mark.only(api="asyncio")
async def test_two_hundred_followers_of_a_turn_are_shown_the_same(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each receives the published entries, which save reads of the stream."""
    monkeypatch.setattr("distributed_state.conversation.output._LOOK_SECONDS", 600.0)
    session, warm, looks = store.session("s"), tiers(store).warm, []
    script = warm.script

    async def counted(called: Any, *given: Any) -> Any:
        if called is FOLLOW:
            looks.append(given)
        return await script(called, *given)

    monkeypatch.setattr(warm, "script", counted)
    began = asyncio.Event()

    async def follow(number: int) -> list[Any]:
        if number % 4 == 0:
            await began.wait()
        return await shown(store.session("s"), "r", wait=600)

    followers = [asyncio.create_task(follow(number)) for number in range(200)]
    async with session.turn(request_id="r") as turn:
        for number in range(1, 101):
            await turn.stream(chunk_of("a", number))
            if number % 5 == 0:
                await turn.flush()
                await asyncio.sleep(0.01)
            if number == 50:
                began.set()
        turn["n"] = 1
        turn.outcome = "all"
    async with asyncio.timeout(60):
        first, *others = await asyncio.gather(*followers)
    assert attempts(first) == [("a", list(range(1, 101)))]
    assert plain(first)[-1] == ("Ended", 1, "all")
    assert all(each == first for each in others)
    assert len(looks) <= 200 * 8, "there were 20 batches"
    assert len(tiers(store).followers) == 0


async def test_a_follower_that_does_not_read_keeps_a_bounded_part(opener: Any) -> None:
    """Its replica keeps 256 KiB, Redis `output_bytes`; when it reads, it is shown the rest with a mark."""
    store = await opener(output_bytes=2**20)
    session = store.session("s")
    async with store.session("s").output("r", wait=5) as output:
        async with session.turn(request_id="r") as turn:
            await turn.stream(chunk_of("a", 1))
            await turn.flush()
            first = await output.next(5)
            most = 0
            for number in range(2, 402):
                await turn.stream("x" * 10_000 if number < 400 else chunk_of("a", number))
                if number % 20 == 0:
                    await turn.flush()
                most = max(most, *(each._bytes for each in _received(store)))
            turn["n"] = 1
        rest = [part async for part in output]
    assert 0 < most <= 256 * 1024
    with redis_of(store) as client:
        held = client.xrange(keys_of(store, "s").output)
    assert sum(len(fields[b"d"]) for _, fields in held) <= 2**20
    assert plain([first]) == ["a:1"]
    assert plain(rest)[0] == "Truncated"
    assert plain(rest)[-3:] == ["a:400", "a:401", ("Ended", 1, None)]
    positions = [int(part.position.partition("-")[2]) for part in rest if isinstance(part, Chunk)]
    assert positions == list(range(positions[0], 402)), "after the mark nothing is missing"


def _received(store: Any) -> list[Received]:
    return [each for some in tiers(store).followers._receiving.values() for each in some]


# Stops


@pytest.mark.only(api="asyncio", warm="fake")
@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.wide)])
@pytest.mark.timeout(600)
async def test_a_stop_that_races_the_commit_reports_the_truth(store: Any, rounds: int) -> None:
    await race(store, store, rounds)


@pytest.mark.only(warm="real")
@pytest.mark.replicas
@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.timeout(1200)
async def test_a_stop_from_another_replica_that_races_the_commit_reports_the_truth(opener: Any, rounds: int) -> None:
    await race(await opener(), await opener(), rounds)


async def race(store: Any, other: Any, rounds: int) -> None:
    """Stop turns at a random moment, and compare each result with the history."""
    chance = random.Random(37)
    results = dict[str, StopResult]()
    kept = dict[str, str]()
    seen = dict[str, list[Any]]()

    async def answer(id: str, request: str, keeps: bool, pauses: int) -> str:
        try:
            async with store.session(id).turn(request_id=request) as turn:
                try:
                    async with turn.stoppable():
                        await turn.stream("half")
                        for _ in range(pauses):
                            await asyncio.sleep(0)
                        await turn.messages()
                except Stopped:
                    if not keeps:
                        raise
                turn.append({"role": "assistant", "content": request})
                turn.outcome = request
        except Stopped:
            return "stopped"
        return "wrote"

    async def stop(id: str, request: str, pauses: int) -> StopResult:
        for _ in range(pauses):
            await asyncio.sleep(0)
        result: StopResult = await other.session(id).stop(request, wait=60)
        return result

    for number in range(rounds):
        id, request = f"s{number // 20}", f"r{number}"
        turn = asyncio.create_task(answer(id, request, bool(number % 2), chance.randrange(40)), context=Context())
        results[request] = await asyncio.create_task(stop(id, request, chance.randrange(80)), context=Context())
        kept[request] = await turn
        seen[request] = await shown(other.session(id), request, wait=0.01)
    written = dict[str, int]()
    for at in range(-(-rounds // 20)):
        await store.admin.archive()
        for change in await store.session(f"s{at}").history():
            written |= {message.content: change.version for message in change.appended}
    for number, (request, result) in enumerate(results.items()):
        told = number, request, result, kept[request], seen[request]
        version = written.get(request)
        assert (kept[request] == "wrote") == (version is not None), told
        if result.state == "finished":
            assert result.version == version, told
            assert version is not None, told
        elif result.state == "stopped":
            assert result.version == version, told
            assert version is None or number % 2, told
        else:
            assert result == StopResult("nothing ran"), told
            assert version is not None, told
        end = seen[request][-1] if seen[request] else None
        assert end is None or (isinstance(end, Ended) and end.version == version), told
        assert end is not None or version is None, told
    assert {result.state for result in results.values()} >= {"stopped", "finished"}, "the moments differ"


@pytest.mark.only(api="asyncio", warm="fake")
@pytest.mark.parametrize("reason", [None, "enough"])
async def test_a_stop_whose_message_was_lost_arrives_with_the_next_renewal(store: Any, reason: str | None) -> None:
    began = asyncio.Event()

    async def turn() -> None:
        async with store.session("s").turn(ttl=0.3):
            began.set()
            await asyncio.Event().wait()

    with sabotage("stop", "call('SPUBLISH', channel, current .. ' 0 ' .. holder .. ' ?' .. reason)", ""):
        served = asyncio.create_task(turn(), context=Context())
        await began.wait()
        assert (await store.session("s").stop(reason=reason, wait=20)).state == "stopped"
    with pytest.raises(Stopped):
        await served


async def test_two_stops_at_once_report_the_same(store: Any) -> None:
    session = store.session("s")
    for keeps in (False, True):
        began = asyncio.Event()
        request = f"r{keeps}"

        async def turn(keeps: bool = keeps, request: str = request, began: asyncio.Event = began) -> None:
            async with session.turn(request_id=request) as turn:
                began.set()
                try:
                    async with turn.stoppable():
                        while True:
                            await asyncio.sleep(0.005)
                            await turn.messages(last=1)
                except Stopped:
                    await until(lambda: len(tiers(store).followers) == 2)  # both stops wait for the end
                    if not keeps:
                        raise
                turn["partial"] = True

        served = asyncio.create_task(turn())
        await began.wait()
        others = [asyncio.create_task(store.session("s").stop(request, reason=why, wait=30)) for why in ("a", "b")]
        results = await asyncio.gather(*others)
        assert results == [StopResult("stopped", 1 if keeps else None)] * 2
        error = (await asyncio.gather(served, return_exceptions=True))[0]
        assert (error is None) if keeps else (isinstance(error, Stopped) and error.reason in ("a", "b"))
        assert await session.stop(request) == (StopResult("finished", 1) if keeps else StopResult("nothing ran"))


async def left_over(store: Any) -> bool:
    """Whether the stop of a turn whose worker died reaches the next turn, at the renewal of its lease."""
    session = store.session("s")
    began = asyncio.Event()

    async def dies() -> None:
        async with session.turn(request_id="dead") as turn:
            await turn.stream("x")
            began.set()
            await asyncio.sleep(3600)

    dead = asyncio.create_task(dies(), context=Context())
    await began.wait()
    home = tiers(store).leases
    kept, home.stop = home.stop, lambda lock_value, reason: None  # type: ignore[method-assign]
    home.renewal._stop = home.stop
    assert (await store.session("s").stop("dead", wait=0)).state == "stopping"
    lose(store, "s")
    home.stop = home.renewal._stop = kept  # type: ignore[method-assign]
    try:
        async with session.turn(request_id="next", ttl=0.3) as turn:
            deadline = turn._lease.deadline
            await until(lambda: turn._lease.deadline > deadline or turn.stopping)
            stopping = bool(turn.stopping)
    except Stopped:
        stopping = True
    dead.cancel()
    await asyncio.gather(dead, return_exceptions=True)
    return stopping


@pytest.mark.only(api="asyncio")
async def test_the_stop_of_a_turn_that_is_gone_does_not_reach_the_next_one(store: Any) -> None:
    assert not await left_over(store)


@pytest.mark.only(api="asyncio", warm="fake")
async def test_without_the_holder_in_the_stop_it_would(store: Any) -> None:
    """Negative control."""
    with sabotage(
        "renew", "if asked and string.sub(asked, 1, #lock_value + 1) == lock_value .. '\\n' then", "if asked then"
    ):
        assert await left_over(store)


# A lease that is taken over, or has expired


def lose(store: Any, id: str) -> None:
    """Take the lock away, as its TTL would."""
    with redis_of(store) as client:
        assert client.delete(keys_of(store, id).lock) == 1


async def late(store: Any) -> tuple[list[Any], list[Any], bytes]:
    """A holder that was paused streams after another one began; what both followers are shown, and the stream."""
    session = store.session("s")
    held, ended = asyncio.Event(), asyncio.Event()

    async def paused() -> None:
        async with session.turn(request_id="first", ttl=600) as turn:
            await turn.stream(chunk_of("first", 1))
            await turn.flush()
            held.set()
            await ended.wait()
            await turn.stream(chunk_of("first", 2))
            await turn.flush()
            turn["first"] = 1

    followers = [asyncio.create_task(shown(store.session("s"), each, wait=20)) for each in ("first", "second")]
    first = asyncio.create_task(paused(), context=Context())
    await held.wait()
    lose(store, "s")
    async with session.turn(request_id="second") as turn:
        ended.set()
        with pytest.raises(Fenced):
            await first
        await turn.stream(chunk_of("second", 1))
        turn["second"] = 1
    with redis_of(store) as client:
        return await followers[0], await followers[1], everything_in_redis(client, keys_of(store, "s").output.decode())


async def test_nothing_appears_of_a_paused_holder_that_streams_after_another_one_began(store: Any) -> None:
    first, second, held = await late(store)
    assert plain(first) == ["first:1", "Abandoned"]
    assert plain(second) == ["second:1", ("Ended", 1, None)]
    assert b"first:1" in held
    assert b"first:2" not in held


@pytest.mark.only(api="asyncio", warm="fake")
async def test_without_the_check_of_the_lock_it_would_appear(store: Any) -> None:
    """Negative control."""
    check = "if holder ~= lock_value or not string.find(lock_value, '@' .. current .. ':', 1, true) then return"
    with sabotage("output", check, "if false then return"):
        assert b"first:2" in (await late(store))[2]


async def test_the_next_attempt_is_shown_though_another_request_was_served_in_between(store: Any) -> None:
    session = store.session("s")
    held = asyncio.Event()

    async def dies() -> None:
        async with session.turn(request_id="r", ttl=600) as turn:
            await turn.stream(chunk_of("a", 1))
            await turn.flush()
            held.set()
            await asyncio.Event().wait()

    dead = asyncio.create_task(dies(), context=Context())
    await held.wait()
    async with session.output("r", wait=5) as output:
        first = await output.next(5)
    lose(store, "s")
    await streamed(session, "q", chunk_of("b", 1))
    await streamed(session, "r", chunk_of("c", 1), outcome="again")
    rest = ["Restarted", "c:1", ("Ended", 2, "again")]
    assert plain(await shown(session, "r")) == ["a:1", *rest]
    assert plain(await shown(session, "r", after=first.position)) == rest
    dead.cancel()
    await asyncio.gather(dead, return_exceptions=True)


@pytest.mark.replicas
async def test_followers_of_a_request_that_is_interrupted_see_that_and_its_next_attempt(opener: Any) -> None:
    one, two, three = [await opener() for _ in range(3)]
    held, late = asyncio.Event(), asyncio.Event()

    async def interrupted() -> None:
        async with one.session("s").turn(request_id="r") as turn:
            await turn.stream(chunk_of("a", 1))
            await turn.flush()
            held.set()
            await late.wait()
            await turn.stream(chunk_of("a", 2))
            await turn.flush()
            turn["n"] = 1

    async with three.session("s").output(wait=20) as every:
        follower = asyncio.create_task(shown(three.session("s"), "r", wait=20))
        first = asyncio.create_task(interrupted())
        await held.wait()
        seen = [await every.next(20)]
        async with two.session("s").turn(request_id="q", busy="interrupt") as turn:
            late.set()
            with pytest.raises(Fenced):
                await first
            await turn.stream(chunk_of("b", 1))
            turn["n"] = 2
        seen += [await every.next(20) for _ in range(3)]
    assert plain(seen) == ["a:1", "Abandoned", "b:1", ("Ended", 1, None)]
    parts = await follower
    assert plain(parts) == ["a:1", "Abandoned"]
    await streamed(one.session("s"), "r", chunk_of("c", 1), chunk_of("c", 2), outcome="again")
    rest = await shown(three.session("s"), "r", after=parts[-1].position)
    assert plain(rest) == ["Restarted", "c:1", "c:2", ("Ended", 2, "again")]


# Encryption and access


@pytest.mark.replicas
async def test_chunks_and_the_reason_of_a_stop_lie_nowhere_readable(opener: Any) -> None:
    assert await told_of_secrets(opener, Encryption(KEYS)) == set()


@pytest.mark.replicas
async def test_without_encryption_the_same_search_finds_them(opener: Any) -> None:
    """Negative control."""
    assert await told_of_secrets(opener, None) == {"chunk-5ecret", "reason-5ecret"}


async def told_of_secrets(opener: Any, encryption: Encryption | None) -> set[str]:
    """Which secrets lie open in Redis, or in what is published, while a follower reads them."""
    store, other = [await opener(encryption=encryption, stream_interval=0) for _ in range(2)]
    session = store.session("s")
    channel = keys_of(store, "s").output_channel
    record_channel = keys_of(store, "s").channel
    began = asyncio.Event()
    blob = b""

    async def turn() -> None:
        async with session.turn(request_id="r") as turn:
            await turn.stream("chunk-5ecret")
            await turn.stream({"deep": ["chunk-5ecret"]})
            began.set()
            while not turn.stopping:
                await asyncio.sleep(0.005)

    with server_with(store, channel) as client:
        listener = client.pubsub(ignore_subscribe_messages=True)
        listener.ssubscribe(channel, record_channel)
        listener.get_message(timeout=5)
        follower = asyncio.create_task(shown(other.session("s"), "r", wait=20))
        served = asyncio.create_task(turn())
        await began.wait()
        stopping = asyncio.create_task(other.session("s").stop("r", reason="reason-5ecret", wait=20))
        with redis_of(store) as everywhere:
            stop = keys_of(store, "s").stop
            await until(lambda: everywhere.exists(stop))
            blob += everything_in_redis(everywhere, opener.namespace)
        assert (await stopping).state == "stopped"
        with pytest.raises(Stopped) as caught:
            await served
        assert caught.value.reason == "reason-5ecret"
        while message := listener.get_sharded_message(timeout=0.5):
            if message["type"] == "smessage":
                blob += message["data"]
        listener.close()
    parts = plain(await follower)
    assert parts[:2] == ["chunk-5ecret", {"deep": ["chunk-5ecret"]}]
    assert parts[-2:] == [("StopRequested", "reason-5ecret"), ("Ended", None, None)]
    sought = {
        secret: (secret.encode(), as_text.text_of(f'"{secret}"'.encode()).encode())
        for secret in ("chunk-5ecret", "reason-5ecret")
    }
    return {secret for secret, forms in sought.items() if any(form in blob for form in forms)}


@pytest.mark.replicas
async def test_output_that_is_not_encrypted_is_read_only_where_that_is_accepted(opener: Any) -> None:
    open_one = await opener()
    await streamed(open_one.session("s"), "r", "in the open", outcome=1)
    strict = await opener(encryption=Encryption(KEYS))
    with pytest.raises(DecryptionFailed):
        await shown(strict.session("s"), "r")
    migrating = await opener(encryption=Encryption(KEYS, accept_plaintext=True))
    assert plain(await shown(migrating.session("s"), "r")) == ["in the open", ("Ended", 1, 1)]
    await streamed(migrating.session("t"), "r", "sealed", outcome=1)
    assert plain(await shown(strict.session("t"), "r")) == ["sealed", ("Ended", 1, 1)]
    with pytest.raises(DecryptionFailed):
        await shown(open_one.session("t"), "r")


async def test_output_of_another_session_does_not_open(opener: Any) -> None:
    """A batch is bound to its session and its place."""
    store = await opener(encryption=Encryption(KEYS))
    for id in ("s", "t"):
        await streamed(store.session(id), "r", id)
    with redis_of(store) as client:
        first, second = (keys_of(store, id).output for id in ("s", "t"))
        moved = client.xrange(first)
        client.delete(second)
        for entry, fields in moved:
            client.xadd(second, fields, id=entry)
    with pytest.raises(DecryptionFailed):
        await shown(store.session("t"), "r")


async def test_a_turn_that_may_not_write_messages_streams_nothing(opener: Any) -> None:
    store = await opener(access=lambda request: (request.action, request.field) != ("write", "#messages"))
    session = store.session("s")
    async with session.turn(request_id="r") as turn:
        with pytest.raises(AccessDenied):
            await turn.stream("x")
        turn["n"] = 1
    assert plain(await shown(session, "r")) == [("Ended", 1, None)]
