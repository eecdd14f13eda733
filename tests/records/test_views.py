"""A view shows a record at one moment and decodes what is asked for; a write can begin a deleted record again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from below import keys_of, redis_of, tiers, until
from controls import sabotage
from pydantic import BaseModel

from distributed_state import CorruptState, Deleted
from distributed_state.records.record import RecordView
from distributed_state.values import codec


async def test_a_view_shows_one_moment(store: Any) -> None:
    session = store.session("s")
    assert dict(await session.view()) == {}
    assert not (await session.view()).exists
    await session.write(set={"a": {"n": 1}, "b": b"\x00x"}, phase="open")
    view = await session.view()
    await session.write(set={"a": 2}, delete=["b"], phase="closed")
    assert isinstance(view, RecordView)
    assert (view.version, view.phase, view.exists) == (1, "open", True)
    assert view == {"a": {"n": 1}, "b": b"\x00x"}
    assert list(view) == ["a", "b"]
    assert "b" in view
    assert "c" not in view
    assert 3 not in view
    view["a"]["n"] = 5
    assert view["a"] == {"n": 1}
    with pytest.raises(KeyError):
        view["c"]
    later_view = await session.view(fresh=True)
    assert (later_view.version, later_view.phase, dict(later_view)) == (2, "closed", {"a": 2})
    await store.delete("s")
    gone = await session.view()
    assert (gone.version, gone.exists, gone.phase, len(gone)) == (3, False, None, 0)


async def test_a_view_decodes_only_what_is_asked_for(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = store.session("s")
    await session.set_many({f"k{number}": [number] for number in range(50)})
    await session.get("k0")
    decoded: list[str] = []
    kept = codec.Codec.decode

    def counted(self: Any, data: bytes, key: str) -> Any:
        decoded.append(key)
        return kept(self, data, key)

    monkeypatch.setattr(codec.Codec, "decode", counted)
    view = await session.view()
    assert view["k7"] == [7]
    assert len(view) == 50
    assert decoded == ["k7"]
    assert len(dict(await session.get_all())) == 50
    assert len(decoded) == 51  # the control: all of them


async def test_what_cannot_be_read_is_met_where_it_is_looked_at(store: Any) -> None:
    session = store.session("s")
    await session.set_many({"good": 1, "bad": 2})
    with redis_of(store) as client:
        client.hset(keys_of(store, "s").record, "bad", b"{")
    view = await session.view(fresh=True)
    assert view["good"] == 1
    with pytest.raises(CorruptState):
        view["bad"]


async def test_get_many_asks_the_server_if_it_is_to_be_fresh(store: Any) -> None:
    sessions = [store.session(f"s{number}") for number in range(3)]
    for each in sessions:
        await each.set("n", 1)

    async def all_are_hot() -> bool:
        before = tiers(store).hot.hits
        assert await store.get_many(sessions) == [{"n": 1}] * 3
        return bool(tiers(store).hot.hits == before + 3)

    await until(all_are_hot)  # the control: nobody was asked
    # Changed beside the store, so that only who asks can know.
    with redis_of(store) as client:
        client.hset(keys_of(store, "s1").record, mapping={"n": "2", "#v": "2"})
    assert await store.get_many(sessions) == [{"n": 1}] * 3
    assert await store.get_many(sessions, fresh=True) == [{"n": 1}, {"n": 2}, {"n": 1}]


async def test_a_write_begins_a_deleted_record_again(store: Any) -> None:
    session = store.session("s", user="u")
    await session.write(set={"a": 1}, append=[{"role": "user", "content": "x"}], revive=True)
    await store.delete("s")
    with pytest.raises(Deleted):
        await session.write(set={"b": 2})
    written = await session.write(set={"b": 2}, append=[{"role": "user", "content": "y"}], revive=True)
    assert written.version == 3
    assert await session.get_all() == {"b": 2}
    assert await session.get_all(fresh=True) == {"b": 2}
    assert [message.content for message in await session.messages()] == ["y"]
    assert (await session.write(set={"c": 3}, revive=True)).version == 4
    await store.admin.archive()
    assert [row.id for row in await store.sessions(user="u")] == ["s"]
    assert (await session.at(version=2)).deleted
    assert not (await session.at(version=3)).deleted
    begun = [each for each in await store.admin.audit(type="conversation.created") if each.subject == "session:s"]
    assert [each.version for each in begun] == [1, 3]


async def test_of_several_that_revive_at_once_each_is_applied(store: Any) -> None:
    for _ in range(5):
        session = store.session()
        await session.set("a", 1)
        await store.delete(session.id)
        await asyncio.gather(*(session.write(increment={"n": 1}, revive=True) for _ in range(4)))
        assert await session.get_all(fresh=True) == {"n": 4}


async def test_without_the_scripts_word_nobody_revives(store: Any) -> None:
    """The control."""
    session = store.session("s")
    await session.set("a", 1)
    await store.delete("s")
    with sabotage("commit", "if head[3] and deleted == 'refuse' then", "if head[3] then"), pytest.raises(Deleted):
        await session.write(set={"b": 2}, revive=True)


class Trip(BaseModel):
    city: str = "Oslo"
    nights: int = 1


async def test_a_typed_record_is_viewed_and_begun_again_as_its_schema_has_it(store: Any) -> None:
    trip = store.task("t", schema=Trip)
    await trip.create(Trip(city="Bergen"))
    assert (await trip.view())["city"] == "Bergen"
    await store.delete("t", scope="task")
    await trip.write(set={"nights": 3}, revive=True)
    assert (await trip.load()) == Trip(nights=3)
