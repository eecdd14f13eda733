"""`bytes` as a value: they come back as they were given from every tier, and take no more room than they have."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from below import everything_in_redis, keys_of, later, redis_of, tiers
from pydantic import BaseModel
from sync_api import core

from distributed_state import Encryption, InvalidValue, KeyRing, merge, tool
from distributed_state.conversation import turn_user
from distributed_state.records.transaction import GONE
from distributed_state.values.codec import Codec

PICTURE = bytes(range(256)) * 8
ODD = [b"", b"\x00", b"\x01", b"\x02", b"!5 1", b'"text"', b"null", b"12", " \ud800".encode("utf-8", "surrogatepass")]
KEYS = KeyRing({"old": bytes(32)}), KeyRing({"old": bytes(32), "new": b"n" * 32})


class Trip(BaseModel):
    photo: bytes = b""
    city: str = ""


async def cold(store: Any, *ids: str) -> None:
    """Leave these sessions in SQL alone."""
    await store.admin.archive()
    with redis_of(store) as client:
        for id in ids:
            client.delete(keys_of(store, id).record)
            tiers(store).hot.forget(f"session:{id}")


@pytest.mark.only(warm="real")
async def test_bytes_come_back_as_they_were_given_from_every_tier(opener: Any) -> None:
    """Beside JSON values that look like them, through each way of writing."""
    writer, reader = await opener(), await opener()
    session = writer.session("s")
    given = {f"b{at}": data for at, data in enumerate(ODD)} | {"text": "\x02", "like": {"base64": "AA=="}}
    await session.set("picture", PICTURE)
    await session.set_many(given)
    await session.write(set={"w": b"\xff"}, append=[{"role": "user", "content": "see"}])
    async with session.transaction() as view:
        view["t"] = view["w"] + b"\x00"
    async with session.turn() as turn:
        assert turn["t"] == b"\xff\x00"
        turn["n"] = PICTURE
    async with writer.batch() as batch:
        batch.on(session).set("batch", b"\xfe")
    given |= {"picture": PICTURE, "w": b"\xff", "t": b"\xff\x00", "n": PICTURE, "batch": b"\xfe"}
    for _ in range(2):
        assert await session.get_all() == given
        assert await reader.session("s").get_all(fresh=True) == given
        assert type(await session.get("b0")) is bytes
        assert await session.get("b1") == await session.get("b1") == b"\x00"
        await cold(writer, "s")


async def test_bytes_go_through_history_forks_and_rollback(store: Any) -> None:
    session = store.session("s")
    first = await session.set("a", b"\xff1")
    await session.set("a", {"base64": "/zE="})
    await session.fork("f", version=first)
    assert (await session.at(version=first)).fields == {"a": b"\xff1"}
    assert [change.set for change in await session.history()] == [{"a": b"\xff1"}, {"a": {"base64": "/zE="}}]
    await session.rollback(version=first)
    await cold(store, "s", "f")
    assert await session.get("a") == await store.session("f").get("a") == b"\xff1"
    assert [mark.set for mark in await session.history(after=2)] == [{"a": b"\xff1"}]


@pytest.mark.parametrize("sealed", [False, True])
async def test_bytes_take_their_own_length_in_redis_and_in_sql(opener: Any, sealed: bool) -> None:
    """Base64 would take a third more: the stored form is one byte longer, an encrypted one by its key's id and tag."""
    data = bytes(7 * n % 256 for n in range(9000))
    store = await opener(partitions=1, archiver=False, **({"encryption": Encryption(KEYS[0])} if sealed else {}))
    await store.session("s").set("a", data)
    with redis_of(store) as client:
        stored = client.hget(keys_of(store, "s").record, "a")
    assert len(stored) - len(data) == (1 + 1 + 1 + 3 + 12 + 16 if sealed else 1)
    assert (stored == b"\x02" + data) is not sealed
    await store.admin.archive()
    (entry,) = tiers(store).cold.history("session:s")
    assert stored in entry.data
    assert len(entry.data) < len(data) + 200


async def test_bytes_stand_alone(store: Any) -> None:
    """Inside a list or an object, or mutable, they are refused, and nothing is written."""
    session = store.session("s")
    for value in ([b"1"], {"a": {"b": b"1"}}):
        with pytest.raises(InvalidValue, match="bytes stand alone"):
            await session.set("a", value)
    for other in (bytearray(b"1"), memoryview(b"1")):
        with pytest.raises(InvalidValue, match="not a JSON value"):
            await session.set("a", other)
    with pytest.raises(InvalidValue, match="bytes"):
        await session.append({"role": "user", "content": "x", "data": b"1"})
    with pytest.raises(InvalidValue, match="bytes"):
        await store.emit("thing.happened", {"data": b"1"})
    assert await session.version() == 0


async def test_changes_in_place_of_bytes_say_what_is_there(store: Any) -> None:
    session = store.session("s")
    await session.set("a", b"12")
    for change in (session.increment("a"), session.update("a", {"x": 1}), session.append_to("a", 1)):
        with pytest.raises(InvalidValue, match="holds a bytes"):
            await change
    assert await session.get("a") == b"12"


async def test_bytes_with_a_deadline_end(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    await session.set("a", b"!9 \x02", ttl=60)
    await session.set("b", b"\x02")
    assert await session.get_all(fresh=True) == {"a": b"!9 \x02", "b": b"\x02"}
    state = await session.export_state()
    assert json.loads(json.dumps(state))["bytes"] == {"a": "ITkgAg==", "b": "Ag=="}
    await store.session("copy").restore_state(state)
    assert await store.session("copy").get_all() == {"a": b"!9 \x02", "b": b"\x02"}
    later(store, 61)
    assert await session.get_all() == await store.session("copy").get_all() == {"b": b"\x02"}


@pytest.mark.only(warm="real")
async def test_encrypted_bytes_are_found_nowhere_and_open_under_the_next_key(opener: Any) -> None:
    old = await opener(encryption=Encryption(KEYS[0]), partitions=1)
    await old.session("s").set("a", b"hunter2" + PICTURE)
    with redis_of(old) as client:
        assert b"hunter2" not in everything_in_redis(client, core(old).settings.namespace)
    await old.admin.archive()
    assert b"hunter2" not in tiers(old).cold.history("session:s")[0].data
    new = await opener(encryption=Encryption(KEYS[1]), partitions=1)
    await new.admin.reencrypt()
    await cold(new, "s")
    assert await new.session("s").get("a") == b"hunter2" + PICTURE
    with redis_of(new) as client:
        assert client.hget(keys_of(new, "s").record, "a")[:5] == b"\x01\x03new"


async def test_an_exported_record_has_its_bytes_in_base64_where_no_value_of_a_user_can_stand(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    forged = {"base64": base64.b64encode(PICTURE).decode()}
    await session.write(set={"a": PICTURE, "forged": forged, "text": json.dumps(forged), "plain": b"as text"})
    lines = await store.admin.export("s")
    ops = {name: value for _, name, value in json.loads(lines[1])["ops"]}
    assert base64.b64decode(ops["a"]["base64"]) == b"\x02" + PICTURE
    assert isinstance(ops["forged"], str)
    assert isinstance(ops["text"], str)
    assert await store.admin.import_(lines, id="copy") == "copy"
    expected = {"a": PICTURE, "forged": forged, "text": json.dumps(forged), "plain": b"as text"}
    assert await store.session("copy").get_all() == expected
    # A file as it was written before there was base64 in any.
    row = json.loads(lines[1])
    row["ops"] = [[k, n, v if isinstance(v, str) else (b"\x02" + PICTURE).decode("utf-8", "surrogateescape")]
                  for k, n, v in row["ops"]]  # fmt: skip
    await store.admin.import_([lines[0], json.dumps(row), *lines[2:]], id="older")
    assert await store.session("older").get_all() == expected


@pytest.mark.parametrize(
    "bad", [{"base64": "?"}, {"base64": 1}, {"base64": "AA==", "x": 1}, {"bytes": "AA=="}, {}, None]
)
async def test_a_file_with_another_form_of_bytes_is_refused(store: Any, bad: Any) -> None:
    await store.session("s").set("a", b"\xff")
    lines = await store.admin.export("s")
    row = json.loads(lines[1])
    row["ops"][0][2] = bad
    with pytest.raises(InvalidValue, match="line 2"):
        await store.admin.import_([lines[0], json.dumps(row)], id="copy")
    assert not await store.session("copy").exists()


async def test_a_state_to_restore_says_which_bytes_are_none(store: Any) -> None:
    session = store.session("s")
    with pytest.raises(InvalidValue, match=r"'a': is among the fields and among the bytes"):
        await session.restore_state({"fields": {"a": 1}, "bytes": {"a": "AA=="}})
    with pytest.raises(InvalidValue, match=r"'a': is not a string in base64"):
        await session.restore_state({"fields": {}, "bytes": {"a": "?"}})
    assert not await session.exists()


async def test_bytes_are_initialised_and_cleaned_as_any_value(opener: Any) -> None:
    seen: list[Any] = []

    def clean(key: str, value: Any) -> Any:
        seen.append(value)
        return value

    store = await opener(clean=clean)
    session = store.session("s", on_invalid="stringify")
    assert await session.initialize({"a": b"\xff", "nested": [b"\xff"]})
    assert seen == [b"\xff", ["b'\\xff'"]]
    assert await session.get_all() == {"a": b"\xff", "nested": ["b'\\xff'"]}


def test_bytes_that_two_writers_changed_are_merged_by_the_policy() -> None:
    mine = {b"a": (b"s", b"a", b"\x02x2")}
    policies = {"a": lambda base, theirs, mine: theirs + mine[len(base) :]}
    states = ({b"a": b"\x02x"}, {b"a": b"\x02x1"})
    assert merge.three_way(Codec("n", "session:s"), mine, *states, policies) == {"a": b"x12"}


async def test_a_model_keeps_its_bytes_as_text_as_before(store: Any) -> None:
    """A field of type `bytes` is JSON; it also reads what a handle without a model stored as bytes."""
    typed = store.session("s", schema=Trip)
    await typed.set("photo", b"small")
    assert await store.session("s").get("photo") == "small"
    assert (await typed.load()).photo == b"small"
    with pytest.raises(InvalidValue, match="JSON"):
        await typed.set("photo", b"\xff")
    await store.session("s").set("photo", b"\xff")
    assert (await typed.load()).photo == b"\xff"
    with pytest.raises(InvalidValue, match="JSON"):
        async with typed.edit() as model:
            model.city = "Oslo"
    await typed.set("city", "Oslo")
    assert await store.session("s").get_all() == {"photo": b"\xff", "city": "Oslo"}


async def test_a_prompt_says_how_many_bytes_there_are(store: Any) -> None:
    session = store.session("s")
    await session.set("photo", PICTURE)
    assert "photo: <2048 bytes>" in (await session.context()).render()


@tool(name="scan")
def scan(user_state: Any) -> str:
    """Keep a picture."""
    user_state["b"] = user_state.get("b", b"") + b"\xfe"
    return "done"


async def test_a_turn_writes_bytes_to_its_user(store: Any) -> None:
    session = store.session("s", user="u")
    for request in ("r1", "r2", "r2"):
        async with session.turn(request_id=request) as turn:
            if not turn.repeated:
                await turn.call(scan, {}, call_id="c")
    assert await store.user("u").get("b") == b"\xfe\xfe"


def test_what_a_turn_remembers_of_its_user_is_json() -> None:
    class View(dict[str, Any]):
        def differences(self) -> Any:
            yield from [("a", b"\xff", b"\xfe"), ("b", "text", b""), ("mine_base64", GONE, {"mine_base64": "AA=="})]

    found = turn_user.changes_of(View())
    state = {"a": b"\xff", "b": "other"}
    turn_user.apply_changes(json.loads(json.dumps(found)), state)
    assert state == {"a": b"\xfe", "b": b"", "mine_base64": {"mine_base64": "AA=="}}
