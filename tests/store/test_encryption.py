"""Encrypted stores: nothing readable lies in any tier, nothing opens in another place, keys can be replaced."""

from __future__ import annotations

import asyncio
import json
import traceback
from pathlib import Path
from typing import Any

import pytest
from below import everything_in_redis, everything_in_sql, keys_of, redis_of, server_with, tiers, until
from pydantic import BaseModel
from sync_api import core, in_thread

from distributed_state import (
    ColdUnavailable,
    ConfigurationError,
    CorruptState,
    DecryptionFailed,
    Encryption,
    InvalidValue,
    KeyRing,
    NotFound,
    TooLarge,
    tool,
)
from distributed_state.events.audit import sought

OLD, NEW = KeyRing({"old": bytes(32)}), KeyRing({"old": bytes(32), "new": b"n" * 32})
ONLY_NEW = KeyRing({"new": b"n" * 32})
SECRETS = ("hunter2", "4111-1111", "tok-5ecret", "my password is", "moved-se", "inner-se")
on_disk = pytest.mark.only(cold=("sqlite", "postgres"))


@tool(name="like")
def like(user_state: Any, what: str) -> str:
    """Remember what the user likes."""
    user_state["likes"] = [what]
    return f"hunter2 likes {what}"


def summed_up(messages: Any, before: Any) -> str:
    return "my password is hunter2"


async def tell_secrets(store: Any) -> None:
    """Everything that writes, with what must not be found."""
    session = store.session("s", user="u", actor="a")
    await session.set("password", "hunter2")
    await session.set_many({"card": {"number": "4111-1111", "of": ["hunter2"]}, "list": []})
    await session.update("card", {"cvv": "tok-5ecret"})
    await session.append_to("list", "hunter2", {"inner-se": 1})
    await session.append({"role": "user", "content": "my password is hunter2"})
    await session.checkpoint("before")
    async with session.transaction() as view:
        view["moved-key"] = "moved-se"
        view["card"]["number"] = "4111-1111 again"
        view.append({"role": "assistant", "content": "I forget 4111-1111"})
    async with store.batch() as batch:
        batch.on(session).set("x", "tok-5ecret")
        batch.on(store.user("u")).set("y", "hunter2")
    await session.write(set={"z": "hunter2"}, append=[{"role": "user", "content": "tok-5ecret"}], phase="asking")
    async with session.turn(request_id="r1") as turn:
        turn["w"] = "hunter2"
        turn.outcome = {"token": "tok-5ecret"}
    await session.call(like, {"what": "inner-se"}, call_id="c1")
    await session.fork("f")
    await store.session("f").append({"role": "user", "content": "hunter2 in the fork"})
    talk = store.session("talk")
    for number in range(8):
        await talk.append({"role": "user", "content": f"hunter2 {number} " * 20})
    window = await talk.window(max_tokens=200, keep_last=1, strategy="summarize", summarizer=summed_up)
    assert "my password is" in str(window.messages)
    await session.rollback(label="before")
    await store.session("new").create({"password": "hunter2"})
    await store.emit("note.made", {"of": "hunter2"}, subject=session)
    await store.emit("mail.sent", {"to": "tok-5ecret"}, subject="nobody's")
    await store.admin.reload_config({"api_key": "4111-1111"})
    await store.admin.archive()


def found(store: Any, archive: str) -> set[str]:
    """The secrets that lie open in Redis or SQL."""
    settings = core(store).settings
    with redis_of(store) as client:
        held = everything_in_redis(client, settings.namespace)
    # Bytes as such, and as hex or base64 should a driver show them so.
    held += b"".join(
        cell if isinstance(cell, bytes) else repr(cell).encode()
        for rows in everything_in_sql(archive, settings.namespace).values()
        for row in rows
        for cell in row
    )
    assert b"password" in held, "the names of fields are not encrypted: this search sees what is there"
    return {secret for secret in SECRETS if secret.encode() in held}


@on_disk
async def test_nothing_readable_lies_in_any_tier(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW))
    await tell_secrets(store)
    assert found(store, opener.archive) == set()
    exported = "".join(await store.admin.export("s")) + "".join(await store.admin.export("f"))
    assert not any(secret in exported for secret in SECRETS)
    session = store.session("s")
    assert await session.get("password") == "hunter2"
    async with store.session("f").turn(request_id="r1") as turn:
        assert turn.repeated, "a fork knows what was answered"
        assert turn.outcome == {"token": "tok-5ecret"}
    assert (await session.call(like, {"what": "inner-se"}, call_id="c2")).result == "hunter2 likes inner-se"
    assert [message.content for message in await store.session("f").messages()] == [
        "my password is hunter2", "I forget 4111-1111", "tok-5ecret", "hunter2 in the fork",
    ]  # fmt: skip


@on_disk
async def test_without_encryption_the_same_search_finds_all_of_it(opener: Any) -> None:
    """The control of the test above."""
    store = await opener()
    await tell_secrets(store)
    assert found(store, opener.archive) == set(SECRETS)


@on_disk
async def test_only_what_is_chosen_is_encrypted(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW, fields=("pass*", "card"), messages=False))
    session = store.session("s")
    await session.set_many({"password": "hunter2", "card": "4111-1111", "other": "moved-se"})
    await session.append({"role": "user", "content": "tok-5ecret"})
    await store.admin.archive()
    assert found(store, opener.archive) == {"moved-se", "tok-5ecret"}
    assert await session.get_all(fresh=True) == {"password": "hunter2", "card": "4111-1111", "other": "moved-se"}


@pytest.mark.replicas
async def test_what_replicas_tell_one_another_is_encrypted(opener: Any) -> None:
    first, second = await opener(encryption=Encryption(NEW)), await opener(encryption=Encryption(NEW))
    session, elsewhere = first.session("s"), second.session("s")
    await session.set("password", "x")
    await until(lambda: elsewhere.get("password"))
    channel = keys_of(first, "s").channel
    with server_with(first, channel) as client:
        listener = client.pubsub(ignore_subscribe_messages=True)
        listener.ssubscribe(channel)
        listener.get_message(timeout=5)
        await session.set("password", "hunter2")
        await session.append({"role": "user", "content": "my password is"})

        async def seen() -> bool:
            return await elsewhere.get("password") == "hunter2" and len(await elsewhere.messages()) == 1

        await until(seen)
        payloads = []
        while message := listener.get_sharded_message(timeout=0.5):
            if message["type"] == "smessage":
                payloads.append(message["data"])
        listener.close()
    assert len(payloads) == 2
    assert all(b"+" in payload and b"\x01\x03new" in payload for payload in payloads)
    assert not any(b"hunter2" in payload or b"my password" in payload for payload in payloads)


async def test_all_that_a_record_can_do_works_encrypted(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW), recent_messages=2)
    session = store.session("s", user="u")
    assert await session.set("a", {"x": [1, None, 2**70, "\ud800"]}) == 1
    assert await session.get("a") == {"x": [1, None, 2**70, "\ud800"]}
    assert await session.increment("n", 2) == 2
    assert await session.increment("n") == 3
    assert await session.increment("n", 0.5) == 3.5
    for number in range(5):
        await session.append({"role": "user", "content": f"m{number}"})
    await session.set("gone", 1)
    await session.delete("gone")
    assert await session.has("n")
    assert await session.get_all(fresh=True) == {"a": {"x": [1, None, 2**70, "\ud800"]}, "n": 3.5}
    assert [m.content for m in await session.messages(last=2)] == ["m3", "m4"]
    past = await session.at(version=2)
    assert past.fields == {"a": {"x": [1, None, 2**70, "\ud800"]}, "n": 2}
    history = await session.history()
    assert [change.set for change in history[:4]] == [
        {"a": {"x": [1, None, 2**70, "\ud800"]}},
        {"n": 2},
        {"n": 3},
        {"n": 3.5},
    ]
    assert history[4].appended[0].content == "m0"
    await session.fork("f", version=6)
    fork = store.session("f")
    await fork.append({"role": "user", "content": "own"})
    assert await fork.get_all() == await session.get_all()
    assert [m.content for m in await fork.messages()] == ["m0", "m1", "own"]
    assert [m.content for m in (await fork.at(version=2)).messages] == ["m0", "m1", "own"]
    await session.rollback(version=1)
    assert await session.get_all() == {"a": {"x": [1, None, 2**70, "\ud800"]}}
    assert await session.messages() == []
    assert (await store.get_many([session, fork]))[1]["n"] == 3.5
    # From SQL again.
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(keys_of(store, "f").record)
    tiers(store).hot.clear()
    assert [m.content for m in await fork.messages()] == ["m0", "m1", "own"]
    assert await fork.get("n") == 3.5


async def test_a_value_moved_to_another_place_does_not_open(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW))
    await store.session("s").set_many({"salary": 10, "bonus": 1_000_000})
    await store.session("t").set("salary", 20)
    mine, theirs = keys_of(store, "s").record, keys_of(store, "t").record
    with redis_of(store) as client:
        client.hset(mine, "salary", client.hget(mine, "bonus"))
        client.hset(theirs, "bonus", client.hget(mine, "bonus"))
    for id, key in ("s", "salary"), ("t", "bonus"):
        with pytest.raises(DecryptionFailed) as caught:
            await store.session(id).get(key, fresh=True)
        assert (caught.value.record, caught.value.field, caught.value.key) == (f"session:{id}", key, "new")
    with redis_of(store) as client:
        assert client.hget(mine, "salary") == client.hget(mine, "bonus"), "the bytes are kept"
    # Nobody builds upon what he cannot read, and a new value helps.
    with pytest.raises(DecryptionFailed):
        await store.session("s").increment("salary")
    await store.session("s").set("salary", 30)
    assert await store.session("s").get("salary", fresh=True) == 30


async def test_the_server_is_not_asked_to_add_to_what_it_cannot_read(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW, fields=("secret*",)))
    session = store.session("s")
    await session.write(set={"a": 1}, increment={"plain": 2})
    with pytest.raises(InvalidValue, match="is encrypted"):
        await session.write(increment={"secret": 1})
    with pytest.raises(InvalidValue, match="is encrypted"):
        async with store.batch() as batch:
            batch.on(session).increment("secret", 1)
    assert await session.version() == 1
    await asyncio.gather(*(session.increment("secret") for _ in range(20)))
    assert await session.get("secret", fresh=True) == 20
    assert await session.get("plain") == 2
    with pytest.raises(InvalidValue, match="a str is not a number"):
        await session.increment("secret", "hunter2")


async def test_what_was_only_looked_at_is_not_written(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW))
    session = store.session("s")
    await session.set("list", [1])
    async with session.transaction() as view:
        assert view["list"] == [1]
    assert await session.version(fresh=True) == 1
    async with session.transaction() as view:
        view["list"].append(2)
    assert await session.get("list", fresh=True) == [1, 2]


async def test_limits_count_what_is_stored(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW), max_field_bytes=100)
    await store.session("s").set("a", "x" * (100 - 2 - 33))
    with pytest.raises(TooLarge):
        await store.session("s").set("a", "x" * (100 - 2 - 32))


async def test_hot_keeps_small_values_decoded_in_the_memory_of_the_process(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW))
    session = store.session("s")
    await session.set("a", "hunter2")
    await until(lambda: "session:s" in tiers(store).hot.entries or session.get("a"))
    assert await session.get("a") == "hunter2"
    entry = tiers(store).hot.entries.get("session:s")
    if entry is not None:
        assert entry.values == {"a": "hunter2"}
        assert b"hunter2" not in b"".join(entry.fields.values())


class Card(BaseModel):
    number: str = ""
    limit: int = 0


class Tight(BaseModel):
    number: int = 0


async def test_a_schema_works_on_encrypted_fields_and_does_not_repeat_them(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW))
    session, secret = store.session("s", schema=Card), "4111-1111"
    await session.set("number", secret)
    async with session.edit() as card:
        card.limit = 5
    assert await session.increment("limit") == 6
    assert (await session.load(fresh=True)).model_dump() == {"number": "4111-1111", "limit": 6}
    with pytest.raises(InvalidValue) as caught:
        await session.set("limit", secret)
    assert "4111" not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(CorruptState) as corrupt:
        await store.session("s", schema=Tight).load(fresh=True)
    assert "4111" not in "".join(traceback.format_exception(corrupt.value))
    assert corrupt.value.data[:1] == b"\x01"


# Keys


async def contents(session: Any) -> list[Any]:
    """What was said: a message is decrypted when somebody looks at it."""
    return [message.content for message in await session.messages(fresh=True)]


async def test_a_missing_or_wrong_key_is_named_and_nothing_else(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW))
    await store.session("s").set("password", "hunter2")
    await store.session("s").append({"role": "user", "content": "hunter2"})
    for keys, why in (OLD, "the key ring has old"), (KeyRing({"new": b"?" * 32}), "does not open"), (None, "no keys"):
        _with(store, keys)
        for call in (
            lambda: store.session("s").get("password", fresh=True),
            lambda: store.session("s").get_all(fresh=True),
            lambda: contents(store.session("s")),
            lambda: store.session("s").raw_messages(fresh=True),
            lambda: store.session("s").history(),
            lambda: store.session("s").at(version=2),
            lambda: store.session("s").fork("f"),
            lambda: store.session("s").update("password", {}),
        ):
            with pytest.raises(DecryptionFailed, match=why) as caught:
                await call()
            assert caught.value.record == "session:s"
            assert caught.value.key == "new"
            assert "hunter2" not in str(caught.value)
        assert await store.session("f").version(fresh=True) == 0
    _with(store, NEW)
    assert await store.session("s").get("password", fresh=True) == "hunter2"


def _with(store: Any, keys: KeyRing | None, **options: Any) -> Any:
    """The same store, as a worker with other keys would open it (an embedded store has only one opener)."""
    from distributed_state.values.codec import Codec
    from distributed_state.values.encryption import Sealed

    inner = core(store)
    namespace = inner.settings.namespace
    root = Codec(namespace, "") if keys is None else Sealed(Encryption(keys, **options), namespace, "")
    inner._context.codec_of = root.of
    home = inner._lifecycle.tiers()
    home.codec_of = home.warm.codec_of = root.of
    home.hot.clear()
    return store


async def test_plain_text_is_refused_until_it_is_accepted(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    await session.set("password", "hunter")
    await session.set_many({"password": "hunter2", "n": 1})
    await session.append({"role": "user", "content": "hunter2"})
    session = _with(store, NEW).session("s")
    for call in (
        lambda: session.get("password", fresh=True),
        lambda: contents(session),
        lambda: session.raw_messages(fresh=True),
        lambda: session.increment("n"),
        lambda: session.rollback(version=1),
        lambda: session.fork("f"),
    ):
        with pytest.raises(DecryptionFailed, match="is not encrypted as required"):
            await call()
    session = _with(store, NEW, accept_plaintext=True).session("s")
    assert await session.get("password", fresh=True) == "hunter2"
    assert await session.increment("n") == 2
    assert [m.content for m in await session.messages()] == ["hunter2"]
    session = _with(store, NEW).session("s")
    assert await session.get("n", fresh=True) == 2, "what is written is encrypted"


async def rotate(store: Any, keys: KeyRing, **options: Any) -> Any:
    _with(store, keys, **options)
    return await store.admin.reencrypt()


async def everything(store: Any) -> Any:
    """All that can be read of the records of `tell_secrets`."""
    tiers(store).hot.clear()
    read: list[Any] = [await store.user("u").get_all(fresh=True)]
    for id in ("s", "f", "new", "talk"):
        session = store.session(id)
        version = await session.version(fresh=True)
        read += [await session.get_all(), await session.messages(), await session.history(), await session.phase()]
        read += [await session.at(version=each) for each in range(1, version + 1)]
    return read


@pytest.mark.wide
async def test_a_key_can_be_replaced_and_thrown_away(opener: Any) -> None:
    store = await opener(encryption=Encryption(OLD), snapshot_every=3)
    await tell_secrets(store)
    before = await everything(store)
    _with(store, NEW)
    assert await everything(store) == before
    planned = await store.admin.reencrypt(dry_run=True)
    assert planned.records == 6
    assert planned.values > 20
    assert await store.admin.reencrypt(dry_run=True) == planned, "a dry run changes nothing"
    done = await store.admin.reencrypt()
    assert (done.records, done.values, done.failed) == (6, planned.values, 0)
    again = await store.admin.reencrypt()
    assert (again.records, again.values, again.copies, again.failed) == (6, 0, 0, 0)
    _with(store, ONLY_NEW)
    assert await everything(store) == before
    await store.session("s").set("more", 1)
    with redis_of(store) as client:
        assert b"\\x01\\x03old" not in everything_in_redis(client, core(store).settings.namespace)


async def test_without_re_encryption_the_old_key_is_still_needed(opener: Any) -> None:
    """The control of the test above."""
    store = await opener(encryption=Encryption(OLD), snapshot_every=3)
    await tell_secrets(store)
    _with(store, ONLY_NEW)
    with pytest.raises(DecryptionFailed):
        await everything(store)


@on_disk
async def test_a_plain_store_becomes_an_encrypted_one(opener: Any) -> None:
    store = await opener()
    await tell_secrets(store)
    before = await everything(store)
    assert found(store, opener.archive) == set(SECRETS)
    refused = await rotate(store, NEW)
    assert refused.failed == 6, "plain text is not taken for granted"
    done = await rotate(store, NEW, accept_plaintext=True)
    assert done.failed == 0
    assert done.copies >= 1
    assert found(store, opener.archive) == set()
    if opener.cold == "sqlite":
        path = Path(opener.archive.removeprefix("sqlite:///"))
        raw = path.read_bytes() + Path(f"{path}-wal").read_bytes()
        assert not any(secret.encode() in raw for secret in SECRETS), "not even in pages that are free now"
    _with(store, NEW)
    assert await everything(store) == before


async def test_messages_of_a_purged_parent_are_encrypted_anew(opener: Any) -> None:
    store = await opener(encryption=Encryption(OLD))
    await store.session("p").append({"role": "user", "content": "shared"})
    await store.session("p").fork("c")
    await store.session("c").append({"role": "user", "content": "own"})
    await store.delete("p")
    await store.admin.archive()
    await store.admin.purge(older_than=0)
    await rotate(store, NEW)
    _with(store, ONLY_NEW)
    tiers(store).hot.clear()
    assert [m.content for m in await store.session("c").messages()] == ["shared", "own"]
    assert [m.content for m in (await store.session("c").at(version=2)).messages] == ["shared", "own"]


async def test_re_encryption_goes_on_where_it_was_broken_off(opener: Any) -> None:
    store = await opener(encryption=Encryption(OLD))
    for number in range(5):
        await store.session(f"s{number}").set("a", number)
    await store.admin.archive()
    _with(store, NEW)
    cold, rewrite, calls = tiers(store).cold, tiers(store).cold.rewrite, []

    def stops(text: str, *rest: Any, **options: Any) -> int:
        calls.append(text)
        if len(calls) == 3:
            raise ColdUnavailable("gone in the middle")
        return rewrite(text, *rest, **options)

    cold.rewrite = stops  # type: ignore[method-assign]
    with pytest.raises(ColdUnavailable):
        await store.admin.reencrypt()
    del cold.rewrite
    assert (await store.admin.reencrypt(dry_run=True)).values == 3 + 5, "and an event each"
    done = await store.admin.reencrypt()
    assert (done.values, done.records) == (3 + 5, 5)
    _with(store, ONLY_NEW)
    assert [await store.session(f"s{n}").get("a", fresh=True) for n in range(5)] == list(range(5))


async def test_one_record_that_cannot_be_read_does_not_hold_up_the_others(opener: Any) -> None:
    store = await opener(encryption=Encryption(KeyRing({"lost": b"l" * 32})))
    await store.session("a").set("x", 1)
    _with(store, OLD)
    await store.session("b").set("x", 2)
    told: list[Any] = []
    _with(store, NEW)
    done = await store.admin.reencrypt(progress=told.append)
    assert (done.records, done.failed, done.values) == (2, 1, 2)
    assert told
    assert told[-1] == done
    with pytest.raises(DecryptionFailed, match="'lost'"):
        await store.session("a").get("x", fresh=True)
    _with(store, ONLY_NEW)
    assert await store.session("b").get("x", fresh=True) == 2


async def test_re_encryption_without_keys_is_a_configuration_error(store: Any) -> None:
    with pytest.raises(ConfigurationError, match="no keys"):
        await store.admin.reencrypt()


@pytest.mark.wide
async def test_writers_do_not_stop_for_re_encryption(opener: Any) -> None:
    store = await opener(encryption=Encryption(OLD))
    for number in range(4):
        await store.session(f"s{number}").set("n", 0)
    _with(store, NEW)
    over = asyncio.Event()

    async def write(number: int) -> int:
        written = 0
        while not over.is_set():
            await store.session(f"s{number}").increment("n")
            await store.session(f"s{number}").append({"role": "user", "content": str(written)})
            written += 1
            await asyncio.sleep(0.001)  # a loop that never rests leaves the threads of SQL no time
        return written

    writers = [asyncio.create_task(write(number)) for number in range(4)]
    await until(lambda: store.session("s3").get("n"))
    for _ in range(3):
        assert (await store.admin.reencrypt()).failed == 0
    over.set()
    counts = await asyncio.gather(*writers)
    await store.admin.reencrypt()
    _with(store, ONLY_NEW)
    for number, count in enumerate(counts):
        session = store.session(f"s{number}")
        assert await session.get("n", fresh=True) == count
        assert [m.content for m in await session.messages()] == [str(n) for n in range(count)]
        assert len(await session.history()) == 2 * count + 1


# Events


DATA = {"of": "hunter2", "lines": "a\nb", "list": [1, {}]}


async def read_again(store: Any, count: int) -> list[Any]:
    """What the audit trail says, then what Redis keeps."""
    found = [event.data for event in await store.admin.audit(type="note.*")]
    async with store.events("note.*", "resync", since="oldest") as events:
        for _ in range(count):
            found.append((await events.next(timeout=10)).data)
    return found


async def test_what_events_tell_is_read_by_whoever_has_the_keys(opener: Any) -> None:
    store, received = await opener(encryption=Encryption(NEW, fields=("ssn",), messages=False)), list[Any]()
    store.on("note.*", lambda event: received.append(event.data))
    await store.ready()
    keys = tiers(store).keys
    channel = keys.partition(keys.partition_of("s")).events_channel
    with server_with(store, channel) as client:
        listener = client.pubsub(ignore_subscribe_messages=True)
        listener.ssubscribe(channel)
        listener.get_message(timeout=5)
        assert (await store.emit("note.made", DATA, subject="s")).data == DATA
        payloads = []
        while message := listener.get_sharded_message(timeout=0.5):
            if message["type"] == "smessage":
                payloads.append(message["data"])
        listener.close()
    assert [b"\x01\x03new" in payload and b"hunter2" not in payload for payload in payloads] == [True]
    await until(lambda: received == [DATA])
    assert await read_again(store, 1) == [DATA, DATA]
    _with(store, OLD)
    with pytest.raises(DecryptionFailed, match=r"an event of type note\.made is encrypted with key 'new'"):
        await store.admin.audit()
    _with(store, None)
    async with store.events("note.*", since="oldest") as events:
        with pytest.raises(DecryptionFailed, match="no keys"):
            await events.next(timeout=10)
        await store.emit("note.next", {"n": 1}, subject="s")
        assert (await events.next(timeout=10)).data == {"n": 1}, "and it goes on"


async def test_an_event_from_before_there_were_keys_is_read(opener: Any) -> None:
    store = await opener()
    await store.emit("note.made", DATA, subject="s")
    _with(store, NEW)
    assert await read_again(store, 1) == [DATA, DATA]


async def test_what_an_event_tells_does_not_open_in_another_event(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW))
    for type, subject in (("note.made", "s"), ("note.made", "s"), ("note.kept", "s"), ("note.made", "t")):
        await store.emit(type, DATA, subject=subject)
    await store.admin.archive()
    wanted = sought(None, "note.*", None, None, 9, None)
    first, *others = await tiers(store).port.sql(tiers(store).cold.audit, wanted)
    assert len(others) == 3
    codec_of = tiers(store).codec_of
    assert codec_of("s").open_event(first.data, first.type, first.id)
    for each in others:
        with pytest.raises(DecryptionFailed, match="does not open"):
            codec_of(each.subject).open_event(first.data, each.type, each.id)


@on_disk
async def test_events_are_encrypted_anew_and_who_has_yet_to_read_them_is_told(opener: Any) -> None:
    store = await opener(encryption=Encryption(OLD))
    async with store.events("note.*") as events:
        behind = events.position
    for subject in ("s", "", "session:x"):
        await store.emit("note.made", DATA, subject=subject)
    _with(store, NEW)
    planned = await store.admin.reencrypt(dry_run=True)
    assert (planned.values, planned.copies, planned.failed) == (3, 3, 0)
    assert await read_again(store, 3) == [DATA] * 6
    assert await store.admin.reencrypt() == planned
    assert (await store.admin.reencrypt()).values == 0
    _with(store, ONLY_NEW)
    await store.emit("note.last", {"n": 1}, subject="s")
    assert [event.data for event in await store.admin.audit(type="note.*")] == [*[DATA] * 3, {"n": 1}]
    async with store.events("note.*", since=behind) as events:
        assert {(await events.next(timeout=10)).type for _ in range(2)} == {"resync", "note.last"}


# Records that never rest


@pytest.mark.only(warm="real")
async def test_a_record_that_never_rests_is_encrypted_anew_all_the_same(opener: Any) -> None:
    """It is written between any two looks at it, so there is no moment when all of it is archived."""
    store = await opener(encryption=Encryption(OLD), archive_every=60)
    busy = store.session("busy")
    await busy.write(set={"secret": "hunter2", "n": 0}, append=[{"role": "user", "content": "0"}])
    await store.session("parent").append(
        {"role": "user", "content": "shared"}, {"role": "user", "content": "taken back"}
    )
    await store.session("parent").fork("busy-too")
    inherited = store.session("busy-too")
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(keys_of(store, "busy-too").record)
    tiers(store).hot.clear()
    assert len(await inherited.messages()) == 2
    await inherited.append({"role": "user", "content": "own"})
    assert await store.admin.cleanup("parent", days=0) == 2, "hidden, and still in Redis"
    archiver, written = tiers(store).archiver, 0
    drain, reach = archiver.drain, archiver.reach

    async def write() -> None:
        nonlocal written
        for id in "busy", "busy-too":
            await core(store.session(id)).increment("n")
        written += 1

    async def drained() -> int:
        done = await drain()
        await write()
        return done

    async def reached(*place: Any) -> bool:
        found = await reach(*place)
        await write()
        return found

    _with(store, NEW)
    archiver.drain, archiver.reach = drained, reached
    done = await asyncio.wait_for(store.admin.reencrypt(), 20)
    del archiver.drain, archiver.reach
    assert (done.records, done.failed, done.copies) == (3, 0, 6), "three records, and the event of each one's creation"
    with redis_of(store) as client:
        for id in ("busy", "busy-too", "parent"):
            assert b"old" not in b"".join(client.hgetall(keys_of(store, id).record).values())
    _with(store, ONLY_NEW)
    busy, inherited = store.session("busy"), store.session("busy-too")
    assert await busy.get_all(fresh=True) == {"secret": "hunter2", "n": written}
    assert [m.content for m in await busy.messages()] == ["0"]
    assert [m.content for m in await inherited.messages()] == ["shared", "taken back", "own"]
    assert await busy.increment("n") == written + 1
    assert await busy.update("o", {"a": 1}) == written + 3
    await store.session("parent").rollback(version=1)
    assert [m.content for m in await store.session("parent").messages()] == ["shared", "taken back"]
    await store.admin.archive()
    assert (await store.admin.reencrypt(dry_run=True)).values == 0
    assert len(await busy.history()) == written + 3


# Export and import


async def exported(store: Any) -> list[str]:
    session = store.session("s")
    await session.set("password", "hunter2")
    await session.append({"role": "user", "content": "one"})
    await session.fork("f")
    fork = store.session("f")
    await fork.append({"role": "user", "content": "two"})
    await fork.set("more", [1])
    await fork.clear()
    await fork.rollback(steps=1)
    lines: list[str] = await store.admin.export("f")
    return lines


async def test_an_export_is_ciphertext_and_comes_back_under_the_same_id(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW))
    lines = await exported(store)
    assert "hunter2" not in "".join(lines)
    before = await store.session("f").history()
    await store.user("u").set("a", 1)
    await _erase(store, "f")
    assert await store.admin.import_(lines) == "f"
    fork = store.session("f")
    assert await fork.get_all(fresh=True) == {"password": "hunter2", "more": [1]}
    assert [m.content for m in await fork.messages()] == ["one", "two"]
    assert [change.set for change in await fork.history()] == [change.set for change in before]


async def _erase(store: Any, id: str) -> None:
    """Take a record out of all tiers as if it had never been there."""
    await store.admin.archive()
    text = keys_of(store, id).ref.text
    await in_thread(lambda: tiers_of_sql(store, text))
    with redis_of(store) as client:
        client.delete(keys_of(store, id).record)
    tiers(store).hot.clear()


def tiers_of_sql(store: Any, text: str) -> None:
    from sqlalchemy import text as sql

    with core(store)._lifecycle.cold.database.write() as connection:
        mine = {"n": core(store).settings.namespace, "r": text}
        for table in ("changes", "messages", "snapshots"):
            key = "(SELECT key FROM records WHERE namespace = :n AND record = :r)"
            connection.execute(sql(f"DELETE FROM {table} WHERE record = {key}"), mine)
        for table in ("records", "shares"):
            connection.execute(sql(f"DELETE FROM {table} WHERE namespace = :n AND record = :r"), mine)


async def test_under_another_id_it_is_encrypted_anew(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW))
    lines = await exported(store)
    assert await store.admin.import_(lines, id="copy") == "copy"
    copy = store.session("copy")
    assert await copy.get_all(fresh=True) == {"password": "hunter2", "more": [1]}
    assert [m.content for m in await copy.messages()] == ["one", "two"]
    assert [m.content for m in (await copy.at(version=2)).messages] == ["one", "two"]
    assert [m.content for change in await copy.history() for m in change.appended] == ["two"]
    # It needs neither what it was copied from, nor the old key.
    for id in "sf":
        await store.delete(id)
    await store.admin.purge(older_than=0)
    _with(store, KeyRing({"new": b"n" * 32, "newest": b"N" * 32}))
    await store.admin.reencrypt()
    _with(store, KeyRing({"newest": b"N" * 32}))
    assert [m.content for m in await copy.messages(fresh=True)] == ["one", "two"]


async def test_without_the_key_nothing_of_it_is_imported(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW))
    lines = await exported(store)
    for keys, id in (OLD, None), (OLD, "copy"), (None, "copy"):
        _with(store, keys)
        with pytest.raises(DecryptionFailed):
            await store.admin.import_(lines, id=id)
    _with(store, NEW)
    assert not await store.session("copy").exists(fresh=True)
    bad = json.loads(lines[1])
    bad["fields" if "fields" in bad else "data"] = (
        {"password": "\u0001\u0003newxxx"} if "fields" in bad else "\u0001\u0003newx"
    )
    with pytest.raises((DecryptionFailed, InvalidValue)):
        await store.admin.import_([lines[0], json.dumps(bad), *lines[2:]], id="copy")
    assert not await store.session("copy").exists(fresh=True)


async def test_a_plain_export_is_encrypted_on_its_way_in_if_that_is_accepted(opener: Any) -> None:
    store = await opener()
    lines = await exported(store)
    _with(store, NEW)
    with pytest.raises(DecryptionFailed, match="is not encrypted"):
        await store.admin.import_(lines, id="copy")
    _with(store, NEW, accept_plaintext=True)
    await store.admin.import_(lines, id="copy")
    _with(store, NEW)
    assert await store.session("copy").get_all(fresh=True) == {"password": "hunter2", "more": [1]}
    assert [m.content for m in await store.session("copy").messages()] == ["one", "two"]


@pytest.mark.replicas
async def test_an_export_goes_to_another_namespace(opener: Any) -> None:
    store = await opener(encryption=Encryption(NEW))
    other = await opener(encryption=Encryption(NEW), namespace=f"{opener.namespace}-b")
    lines = await exported(store)
    await other.admin.import_(lines)
    assert await other.session("f").get_all() == {"password": "hunter2", "more": [1]}
    assert [m.content for m in await other.session("f").messages()] == ["one", "two"]
    with pytest.raises(NotFound):
        await other.admin.export("s")
