"""What is imported. Law: nothing in a file is believed; it is refused and changes nothing, or all of it reads well."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from below import keys_of, redis_of, tiers
from sync_api import core

from distributed_state import DecryptionFailed, InvalidValue, Locked, TooLarge

VICTIM = "what the victim said"
DEEP = "[" * 100_000 + "]" * 100_000
HOSTILE: list[Any] = [
    -3, -1, 0, 1, 7, 2**31, 2**53, 2**63, 2**70, 10**400, 0.5, 1e308, float("nan"), float("inf"), True, False, None, "",
    "1", "-3", "\ud800", "\udc80\udcff", "a\x00b", "x" * 5000, "#", "#mn", "#v", "session:victim", "session:victim@2",
    "planet:x", DEEP[:400], [], {}, [[]], [1, 2], {"a": 1}, "s", "d", "c", "m", "w", "l", "e", "x",
    {"base64": "Av8="}, {"base64": "/w=="}, {"base64": "?"},
]  # fmt: skip
STEPS: list[list[Any]] = [
    ["s", "#segments", '[["session:victim",0,2]]'],
    ["s", "#segments", '[["session:s",0,1],["session:victim",1,2]]'],
    ["s", "#segments", '[["session:s",0,1000000000000]]'],
    ["s", "#segments", '[["session:s",0,1e400]]'],
    ["s", "#segments", '[["session:s",-3,1]]'],
    ["s", "#segments", '[["session:s",0,1],["session:s",0,1]]'],
    ["s", "#segments", "[]"],
    ["d", "#segments", ""],
    ["s", "#segments", "null"],
    ["s", "#segments", DEEP],
    ["s", "#items", "99999 0"],
    ["d", "#items", ""],
    ["p", "x\0k", "1"],
    ["s", "#mn", "1000000000000"],
    ["s", "#mn", "0"],
    ["d", "#mn", ""],
    ["s", "#ms", "0"],
    ["s", "#ms", "99"],
    ["d", "#ms", ""],
    ["s", "#ms", "9" * 5000],
    ["w", "", "0"],
    ["w", "", "99"],
    ["w", "", "many"],
    ["c", "", ""],
    ["c", "x", "y"],
    ["m", "0", '{"role":"user","content":"again"}'],
    ["m", "99", '{"role":"user","content":"later"}'],
    ["m", "-1", '{"role":"user","content":"before"}'],
    ["m", "5", '{"content":"nobody"}'],
    ["m", "5", '{"role":"user","content":' + DEEP + "}"],
    ["l", "", "\udcff"],
    ["l", "", ""],
    ["l", "", "x" * 501],
    ["s", "#phase", "\udcff"],
    ["s", "#phase", ""],
    ["s", "#owner", "a:b"],
    ["s", "#owner", "\udcff"],
    ["s", "#owner", ""],
    ["s", "#parent", "session:victim@-1"],
    ["s", "#parent", "victim"],
    ["s", "#parent", "\udcff@1"],
    ["s", "#schema", "x"],
    ["s", "#schema", "0"],
    ["s", "a", {"base64": "Av8="}],
    ["s", "a", {"base64": "ITkgAv8="}],
    ["s", "a", {"base64": "/w=="}],
    ["s", "a", {"base64": "AQNrZXk="}],
    ["s", "#qr", {"base64": "Ag=="}],
    ["s", "#summary", {"base64": "Ag=="}],
    ["s", "#segments", {"base64": "Ag=="}],
    ["s", {"base64": "YQ=="}, "1"],
    ["m", "5", {"base64": "Ag=="}],
    ["s", "#deleted", "1"],
    ["s", "#deleted", ""],
    ["s", "#timed", "1"],
    ["s", "#lifetime", "-5 x"],
    ["s", "#lifetime", "5 5"],
    ["s", "#summary", "1"],
    ["s", "#summary", '{"text":1,"start":0,"stop":9}'],
    ["s", "#summary", '{"text":"t","start":0,"stop":9}'],
    ["s", "#summary", '{"text":"t","start":1e400,"stop":9}'],
    ["s", "#qr", "1"],
    ["s", "#qr", "[]"],
    ["s", "#qr", '["x",1,"r",null]'],
    ["s", "#qr", '[1,1,"r",{"user":"victim","version":0,"mark":"m","fields":{"a":{"mine":"forged"}}}]'],
    ["s", "#q\udcff", "[1]"],
    ["s", "#qr", "!" + "9" * 400 + ' [1,1,"r",null]'],
    ["s", "#qr", '!5 [1,1,"r",null]'],
    ["s", "#b", "9" * 400],
    ["s", "#b", "2 1"],
    ["s", "#b", "1 0 0"],
    ["s", "#b", "2 1 5"],
    ["s", "#b", "1000000000000000 1 5"],
    ["d", "#b", ""],
    ["s", "#b1", '!1000000000000001 [{"role":"user","content":"x"},"r"]'],
    ["s", "#b1", '!5 [{"role":"user","content":"x"},"r"]'],
    ["s", "#b01", '[{"role":"user","content":"x"},null]'],
    ["s", "#b1", "[1,2]"],
    ["s", "#b1", "7"],
    ["d", "#b1", ""],
    ["s", "#bqx", "1"],
    ["s", "#bx", "1"],
    ["s", "a", DEEP],
    ["s", "a", " " + DEEP],
    ["s", "a", " NaN"],
    ["s", "a", " 1e999"],
    ["s", "a", "!" + "9" * 400 + " 1"],
    ["s", "a", "!5 1"],
    ["s", "a", "\u0001\u0003keyxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"],
    ["s", "\udcff", "1"],
    ["s", "k" * 1025, "1"],
    ["s", "k", '"' + "v" * 3000 + '"'],
    ["d", "k", "x"],
    ["e", "x y z", "{}"],
    [],
    ["s"],
    ["s", "a", "1", "2"],
]


def mutated(lines: list[str], dice: random.Random) -> list[str]:
    """The file with one thing in it changed, or a few."""
    rows = [json.loads(line) for line in lines]
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        how = dice.random()
        at = dice.randrange(len(rows))
        if how < 0.4:
            owners: list[tuple[Any, Any]] = []
            _places(rows[at], owners)
            if owners:
                owner, key = dice.choice(owners)
                owner[key] = dice.choice(HOSTILE)
        elif how < 0.8:
            step = dice.choice(STEPS)
            changes = [row for row in rows if isinstance(row, dict) and isinstance(row.get("ops"), list)]
            bases = [row for row in rows if isinstance(row, dict) and isinstance(row.get("fields"), dict)]
            if bases and step[:1] == ["s"] and len(step) == 3 and dice.random() < 0.5:
                dice.choice(bases)["fields"][step[1]] = step[2]
            elif changes:
                ops = dice.choice(changes)["ops"]
                ops.insert(dice.randint(0, len(ops)), list(step))
        elif how < 0.87:
            rows.insert(dice.randint(0, len(rows)), json.loads(json.dumps(dice.choice(rows))))
        elif how < 0.94 and len(rows) > 1:
            del rows[at]
        else:
            other = dice.randrange(len(rows))
            rows[at], rows[other] = rows[other], rows[at]
    return [json.dumps(row) for row in rows]


def _places(value: Any, found: list[tuple[Any, Any]]) -> None:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        found.append((value, key))
        _places(item, found)


async def exports(store: Any) -> list[list[str]]:
    """Of a session with everything in it, of a fork of it, of both when their past is purged, of a user's record."""
    session = store.session("s", user="bob", actor="w")
    await session.write(
        set={"a": 1, "b": [None], "raw": b"\xff"}, append=[{"role": "user", "content": "one"}], phase="p"
    )
    await session.append({"role": "assistant", "content": "two", "tool_calls": [{"id": "c"}]})
    async with session.turn(request_id="r") as turn:
        turn["c"] = 2
        turn.outcome = {"x": 1}
    await session.checkpoint("here")
    await session.post({"role": "user", "content": "waits"}, request_id="w")
    await session.set("t", 1, ttl=3600)
    await session.clear(messages=True)
    await session.append({"role": "user", "content": "three"})
    await session.rollback(version=2)
    await session.fork("f")
    fork = store.session("f")
    await fork.append({"role": "user", "content": "four"})
    await store.user("bob").set("x", 1)
    whole = [
        await store.admin.export("s"),
        await store.admin.export("f"),
        await store.admin.export("bob", scope="user"),
    ]
    await store.admin.archive()
    await store.admin.purge(older_than=0)
    for each in (session, fork):
        await each.append({"role": "user", "content": "later"})
        await each.rollback(steps=1)
    return [*whole, await store.admin.export("s"), await store.admin.export("f")]


async def read_whole(store: Any, handle: Any, id: str, scope: str) -> list[str]:
    """Everything that can be read of a record, and then some; its export."""
    told: list[Any] = []
    with redis_of(store) as client:
        client.delete(keys_of(store, id, scope).record)
    tiers(store).hot.forget(keys_of(store, id, scope).ref.text)
    told += [await handle.get_all(), await handle.version(), await handle.exists(), await handle.checkpoints()]
    history = await handle.history()
    told += history
    for version in range(history[0].version if history else await handle.version(), await handle.version() + 1):
        told.append(await handle.at(version=version))
    if scope == "session":
        told += [await handle.messages(), await handle.phase(), await handle.messages(last=2, fresh=True)]
        told.append(await handle.window(max_tokens=100))
        told.append(await handle.export_state(messages=True))
        told.append(await handle.inbox())
    lines: list[str] = await store.admin.export(id, scope=scope)
    assert VICTIM not in repr(told) + repr(lines)
    return lines


async def goes_on(store: Any, handle: Any, id: str, scope: str) -> None:
    """It is a record as any other from here on."""
    if not await handle.exists():
        return
    await handle.set("more", 1)
    if scope == "session":
        await handle.fork(f"{id} fork")
        told = [message.content for message in await store.session(f"{id} fork").messages()]
        assert VICTIM not in told
        assert told == [message.content for message in await handle.messages()]
        async with handle.turn(request_id="r") as turn:
            assert turn.messages is not None
        number = await handle.post({"role": "user", "content": "posted"})
        async with handle.turn() as turn:
            taken = turn.take()
            turn.append(*(each.message for each in taken))
        assert (taken[-1].number, taken[-1].message.content, await handle.inbox()) == (number, "posted", [])
        assert await handle.post({"role": "user", "content": "next"}) == number + 1
    await store.admin.archive()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in (1, 2))])
async def test_a_file_that_was_tampered_with_is_refused_or_reads_well(opener: Any, seed: int) -> None:
    store = await opener(partitions=1, archiver=False, beat=0, max_field_bytes=2000, durability="memory")
    victim = store.session("victim")
    await victim.append(*[{"role": "user", "content": VICTIM} for _ in range(6)])
    await store.user("victim").set("a", "untouched")
    files = await exports(store)
    taken = refused = 0
    for number in range(50):
        dice = random.Random(f"{seed} {number}")
        file = dice.choice(files)
        lines, id = mutated(file, dice), f"i{number}"
        scope = "user" if file is files[2] else "session"
        what = f"seed {seed}, number {number}"
        try:
            await store.admin.import_(lines, id=id)
        except (InvalidValue, DecryptionFailed):
            refused += 1
            for each in ("session", "user", "app", "task"):
                assert core(store)._lifecycle.cold.version(f"{each}:{id}") is None, what
            continue
        taken += 1
        handle = store.session(id) if scope == "session" else store.user(id)
        if core(store)._lifecycle.cold.version(f"{scope}:{id}") is None:
            continue  # as a record of another scope
        try:
            first = await read_whole(store, handle, id, scope)
            await store.admin.import_(first, id=f"{id}b")
            again = await store.admin.export(f"{id}b", scope=scope)
            assert [line.replace(f'{id}b"', f'{id}"').replace(f'{id}b\\"', f'{id}\\"') for line in again] == first
            await goes_on(store, handle, id, scope)
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
    assert taken > 1
    assert refused > 10
    assert core(store)._lifecycle.cold.quarantined() == []
    assert await store.user("victim").get_all(fresh=True) == {"a": "untouched"}
    assert [message.content for message in await victim.messages()] == [VICTIM] * 6


HEAD = {"format": "distributed_state/1", "namespace": "n", "scope": "session", "id": "x", "version": 1}


def based(fields: dict[str, str], messages: int = 0, **more: Any) -> list[str]:
    """A file that begins with this state and some messages."""
    base = {"base": 1, "epoch": "1-a", "fields": fields} | more
    rows: list[Any] = [HEAD | {"messages": messages, "changes": 0}, base]
    rows += [{"message": n, "data": '{"role":"user","content":"said"}'} for n in range(messages)]
    return [json.dumps(row) for row in rows]


def changed(*ops: list[str], **more: Any) -> list[str]:
    """A file of one change."""
    row = {"version": 1, "time_ms": 1, "kind": "set", "actor": "", "token": 0, "event": "a.1.b", "ops": list(ops)}
    return [json.dumps(HEAD | {"messages": 0, "changes": 1}), json.dumps(row | more)]


INPUT = '[{"role":"user","content":"said"},null]'
REFUSED = {
    "messages of somebody else": changed(["s", "#segments", '[["session:victim",0,1]]'], ["s", "#mn", "1"],
                                         ["s", "#ms", "1"]),
    "messages that are nowhere": based({"#mn": "3", "#ms": "0"}, 2),
    "more messages than can be counted": based({"#mn": "999999999999999", "#ms": "0"}),
    "messages before the first": based({"#segments": '[["session:x",-1,1]]', "#mn": "1", "#ms": "1"}, 1),
    "the same message twice": based({"#segments": '[["session:x",0,1],["session:x",0,1]]', "#mn": "1", "#ms": "1"}, 1),
    "a message that was never appended": based({"#mn": "1", "#ms": "0"}, 2),
    "a version before the first": based({"a": "1"}, base=-3),
    "a version that is no int": based({"a": "1"}, base=True),
    "a line that is too deep": [changed()[0], DEEP],
    "a value that is too deep": changed(["s", "a", " " + "[" * 5000 + "]" * 5000]),
    "a value nested deeper than a write may": changed(["s", "a", " " + "[" * 300 + "]" * 300]),
    "a phase that is no text": changed(["s", "#phase", "\udcff"]),
    "a label that is no text": changed(["l", "", "\udcff"]),
    "a deadline without an end": changed(["s", "a", "!" + "9" * 400 + " 1"]),
    "a time that no calendar has": changed(["s", "a", "1"], time_ms=2**62),
    "an owner who is none": changed(["s", "#owner", "a:b"]),
    "an outcome that is none": changed(["s", "#qr", "7"]),
    "a message without a role": changed(["m", "0", '{"content":"x"}']),
    "a step that is none": changed([]),
    "items that are shown since a later version": based({"#items": "2 0"}),
    "items that are shown since another version": changed(["s", "#items", "9"], ["p", "x\0k", "1"]),
    "items that are shown no more": based({"#items": "1"}) + changed(["d", "#items", ""], version=2)[1:],
    "an item of a record that has none": changed(["p", "x\0k", "1"]),
    "inputs that are not counted": based({"#b1": INPUT}),
    "inputs that are counted wrong": based({"#b": "2 0 0", "#b1": INPUT}),
    "an input that comes later": based({"#b": "2 1 40", "#b2": INPUT}),
    "an input with another number": based({"#b": "2 1 40", "#b01": INPUT}),
    "an inbox without a size": based({"#b": "2 0"}),
    "an input without a message": based({"#b": "2 1 40", "#b1": "[7,null]"}),
    "an input that ends": based({"#b": "2 1 40", "#b1": "!5 " + INPUT}),
    "an outcome of a version that no counter has": based({"#qr": "!" + "9" * 400 + ' [1,1,"r",null]'}),
    "something else in an inbox": based({"#bx": "1"}),
    "an id of a commit that is none": changed(["s", "a", "1"], event="a.1.b_c"),
}  # fmt: skip
LARGE = {
    "a field": changed(["s", "a", '"' + "x" * 3000 + '"']),
    "a message": changed(["m", "0", '{"role":"user","content":"' + "x" * 3000 + '"}']),
    "a record": changed(*(["s", f"a{n}", '"' + "x" * 1500 + '"'] for n in range(4))),
    "a name": changed(["s", "a" * 2000, "1"]),
    "tags": changed(*(["s", f"##k:v{n}", "1"] for n in range(257))),
}


async def test_what_no_store_has_written_is_refused(opener: Any) -> None:
    store = await opener(max_field_bytes=2000, max_record_bytes=5000, max_message_bytes=2000)
    await store.session("victim").append({"role": "user", "content": VICTIM})
    await store.admin.archive()
    for kind, files in ((InvalidValue, REFUSED), (TooLarge, LARGE)):
        for what, lines in files.items():
            try:
                await store.admin.import_(lines)
                taken = True
            except kind:
                taken = False
            assert not taken, what
            assert core(store)._lifecycle.cold.version("session:x") is None, what
    await store.admin.import_(changed(["s", "a", '"' + "x" * 1900 + '"']))
    await store.admin.import_(changed(["s", "#items", "1"], ["p", "x\0k", "1"]), id="items")
    assert await store.session("items").items("x").get("k") == 1


async def test_an_input_may_be_larger_than_a_field(opener: Any) -> None:
    store = await opener(max_field_bytes=2000)
    await store.session("s").post({"role": "user", "content": "x" * 3000}, request_id="r")
    await store.admin.import_(await store.admin.export("s"), id="t")
    [found] = await store.session("t").inbox()
    assert (found.number, found.message.content, found.request_id) == (1, "x" * 3000, "r")


@pytest.mark.only(warm="single", api="asyncio")
async def test_nothing_is_posted_to_a_session_while_it_is_imported(opener: Any, monkeypatch: Any) -> None:
    store, other = await opener(), await opener()
    reserve = tiers(store).warm.partitions.reserve
    refused = list[Exception]()

    async def meanwhile(*given: Any) -> bool:
        try:
            await other.session("x").post({"role": "user", "content": "lost"})
        except Locked as error:
            refused.append(error)
        return bool(await reserve(*given))

    monkeypatch.setattr(tiers(store).warm.partitions, "reserve", meanwhile)
    await store.admin.import_(changed(["s", "a", "1"]))
    assert await other.session("x").post({"role": "user", "content": "kept"}) == 1
    await store.admin.archive()
    assert await store.session("x").get("a", fresh=True) == 1
    assert [each.message.content for each in await store.session("x").inbox()] == ["kept"]
    assert core(store)._lifecycle.cold.quarantined() == []
    assert len(refused) == 1


async def test_an_import_takes_over_no_reference_to_another_record(opener: Any) -> None:
    """What it shows is its own: a fork of it does not look at a record that the file names, nor does a turn."""
    store = await opener(partitions=1)
    await store.session("victim").append({"role": "user", "content": VICTIM})
    await store.user("victim").set("a", 1)
    effect = {"user": "victim", "version": 1, "mark": "m", "fields": {"a": {"base": 1, "mine": 9}}}
    outcome = json.dumps([1, "done", "r", effect])
    fields = {"#segments": '[["session:victim",0,1]]', "#mn": "1", "#ms": "1", "#qr": outcome}
    await store.admin.import_(based(fields, 1))
    session = store.session("x")
    assert [message.content for message in await session.messages()] == ["said"]
    await session.fork("y")
    assert [message.content for message in await store.session("y").messages()] == ["said"]
    async with session.turn(request_id="r") as turn:
        assert (turn.repeated, turn.outcome) == (True, "done")
    assert await store.user("victim").get("a", fresh=True) == 1


async def test_a_record_of_many_messages_that_went_costs_what_is_left(opener: Any) -> None:
    """The server does not walk over every number between an old message that is shown and the next one."""
    store = await opener(partitions=1, recent_messages=2, timeout=2.0, retry_for=0)
    number = str(10**15 - 10)
    fields = {"#segments": '[["session:x",0,3]]', "#mn": number, "#ms": number}
    await store.admin.import_(based(fields, 3))
    session = store.session("x")
    for text in ("four", "five", "six"):
        await session.append({"role": "user", "content": text})
    await store.admin.archive()
    assert [message.content for message in await session.messages(fresh=True)][2:] == ["said", "four", "five", "six"]
    with redis_of(store) as client:
        kept = [name for name in client.hkeys(keys_of(store, "x").record) if name[2:].isdigit() and name[:2] == b"#m"]
    assert len(kept) == 2
