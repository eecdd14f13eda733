"""Records of a schema: what is checked, what is written, and old workers beside new ones."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from below import everything_in_redis, redis_of
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from sync_api import core

from distributed_state import (
    AccessDenied,
    Conflict,
    CorruptState,
    Deleted,
    Encryption,
    InvalidValue,
    KeyRing,
    NotFound,
    Schema,
    SchemaMismatch,
    StateError,
)
from distributed_state.records.context import RecordContext
from distributed_state.records.typed import TypedContext


class Old(BaseModel):
    n: int = 0
    name: str = "anon"
    tags: list[str] = []


class New(BaseModel):
    total: int = 0
    name: str = "anon"
    tags: list[str] = []
    limited: int = Field(default=5, ge=1, le=9)
    options: dict[str, int] = {}


def rename(fields: dict[str, Any]) -> dict[str, Any]:
    n = fields.pop("n", 0)
    return {**fields, "total": 1000 + n}


NEW = Schema(New, version=2, upcasters={1: rename})
NEWER = Schema(New, version=3, upcasters={1: rename, 2: lambda fields: fields})


async def stamp(store: Any, id: str = "s") -> bytes | None:
    entry = await core(store.session(id))._context.read(True)
    return entry.fields.get(b"#schema")


# Checked


async def test_the_first_write_of_a_schema_carries_its_version(store: Any) -> None:
    await store.session("s", schema=Old).set("n", 1)
    assert await stamp(store) == b"1"
    fresh = store.session(schema=NEW)
    assert await fresh.set("total", 1) == 1
    assert await stamp(store, fresh.id) == b"2"
    assert await store.session("talk", schema=NEW).append({"role": "user", "content": "hi"}) == 1
    assert await stamp(store, "talk") == b"2"
    for scope in ("user", "app", "task"):
        handle = getattr(store, scope)("x", schema=NEW)
        await handle.set("total", 3)
        assert (await handle.load()).total == 3


REFUSED: dict[str, Callable[[Any], Any]] = {
    "set": lambda s: s.set("total", "many"),
    "set of an unknown field": lambda s: s.set("totle", 1),
    "set_many": lambda s: s.set_many({"name": "a", "limited": 10}),
    "update": lambda s: s.update("options", {"a": "x"}),
    "append_to": lambda s: s.append_to("tags", 1),
    "append_to what is no list": lambda s: s.append_to("total", 1),
    "increment past a limit": lambda s: s.increment("limited", 5),
    "increment of a text": lambda s: s.increment("name"),
    "increment by a part": lambda s: s.increment("total", 0.5),
    "increment of an unknown field": lambda s: s.increment("totle"),
    "write": lambda s: s.write(set={"limited": 0}, phase="planning"),
    "write an increment unseen": lambda s: s.write(increment={"limited": 1}),
    "apply": lambda s: s.apply(lambda view: view.update(limited=0)),
    "create": lambda s: s.create({"total": None}),
    "modify": lambda s: s.modify(lambda model: setattr(model, "total", "many")),
    "modify to something else": lambda s: s.modify(lambda model: {"total": 1}),
}


@pytest.mark.parametrize("way", REFUSED)
async def test_an_invalid_write_is_refused_and_changes_nothing(store: Any, way: str) -> None:
    session = store.session("s", schema=NEW)
    await session.set("name", "a")
    with pytest.raises(InvalidValue):
        await REFUSED[way](session)
    assert await session.version(fresh=True) == 1
    assert await session.phase() is None


async def test_a_batch_and_a_transaction_check_too(store: Any) -> None:
    one, two = store.session("1", schema=NEW), store.session("2", schema=Old)
    with pytest.raises(InvalidValue, match="limited"):
        async with store.batch() as batch:
            batch.on(one).set("limited", 0)
    with pytest.raises(InvalidValue, match="limited"):
        async with one.transaction() as view:
            view["limited"] = 0
    async with store.batch() as batch:
        batch.on(one).set("limited", "7")
        batch.on(one).increment("total", 3)
        batch.on(two).set("tags", ("a",))
    assert (await one.load()).limited == 7
    assert await store.get_many([one, two]) == [{"limited": 7, "total": 3}, {"tags": ["a"]}]
    # Both records are of an older schema now, or of a newer one: each is settled by itself.
    async with store.batch() as batch:
        batch.on(store.session("1", schema=NEWER)).increment("total", 1)
        batch.on(store.session("2", schema=NEWER)).increment("total", 1)
    assert [await stamp(store, id) for id in "12"] == [b"3", b"3"]
    assert (await store.session("2", schema=NEWER).load()).total == 1001
    with pytest.raises(SchemaMismatch):
        async with store.batch() as batch:
            batch.on(two).set("name", "x")
            batch.on(store.session("3")).set("a", 1)
    assert await store.session("3").get("a") == 1
    with pytest.raises(SchemaMismatch):
        await store.get_many([two])


async def test_an_absent_field_counts_as_its_default(store: Any) -> None:
    session = store.session("s", schema=NEW)
    assert await session.load() == New()
    assert await session.increment("limited", 2) == 7
    assert await session.increment("total", 10**16) == 10**16
    assert await session.get_all() == {"limited": 7, "total": 10**16}
    assert await session.get("name") is None, "get tells what is stored"


async def test_what_is_stored_and_does_not_fit_is_reported_not_replaced(store: Any) -> None:
    session, plain = store.session("s", schema=NEW), store.session("s")
    await session.set("name", "a")
    await plain.set("total", "many")
    reads = (session.load, session.get_all, lambda: session.get("total"), lambda: session.modify(lambda model: None))
    for read in reads:
        with pytest.raises(CorruptState, match=r"total: .*integer.* \(given a str\)") as refused:
            await read()
        assert (refused.value.field, refused.value.data) == ("total", b'"many"')
    assert await session.get("name") == "a", "the other fields can be read"
    await session.set("total", 1)
    assert (await session.load()).total == 1
    await plain.delete("name")
    await plain.set("stray", 1)
    assert (await session.load()).name == "anon"


async def test_nothing_yet_is_the_defaults_or_said_to_be_missing(store: Any) -> None:
    class Strict(BaseModel):
        goal: str
        done: bool = False

    session = store.session("s", schema=Strict)
    for attempt in (session.load, lambda: session.modify(lambda model: None)):
        with pytest.raises(NotFound, match="goal: Field required"):
            await attempt()
    with pytest.raises(InvalidValue, match="goal: Field required"):
        await session.create({"done": True})
    await session.set("done", True)
    with pytest.raises(CorruptState, match="goal: Field required"):
        await session.load()
    await session.set("goal", "x")
    with pytest.raises(InvalidValue, match="'goal': Strict requires it"):
        await session.delete("goal")
    assert await session.load() == Strict(goal="x", done=True)
    await session.clear()
    with pytest.raises(NotFound):
        await session.load()
    await store.delete("s")
    with pytest.raises(Deleted):
        await session.set("goal", "y")
    assert await session.create(Strict(goal="z")) > 4
    with pytest.raises(Conflict):
        await session.create(Strict(goal="again"))


async def test_fields_that_are_checked_together_change_together(store: Any) -> None:
    class Span(BaseModel):
        model_config = ConfigDict(extra="forbid")
        first: int = 0
        last: int = 0

        @model_validator(mode="after")
        def in_order(self) -> Span:
            if self.first > self.last:
                raise ValueError("first comes after last")
            return self

    session = store.session("s", schema=Span)
    with pytest.raises(InvalidValue, match="edit"):
        await session.set("first", 3)
    with pytest.raises(InvalidValue, match="edit"):
        await session.write(increment={"first": 1})
    async with session.edit() as span:
        span.first = 3
        span.last = 4
    with pytest.raises(InvalidValue, match="first comes after last"):
        async with session.edit() as span:
            span.first = 5
    assert await session.load() == Span(first=3, last=4)


async def test_an_edit_commits_only_if_nobody_was_faster(store: Any) -> None:
    session = store.session("s", schema=NEW)
    with pytest.raises(Conflict):
        async with session.edit() as model:
            model.total = 5
            await store.session("s", schema=NEW).set("name", "b")
    with pytest.raises(ZeroDivisionError):
        async with session.edit() as model:
            model.total = 5
            raise ZeroDivisionError
    async with session.edit():
        pass
    assert await session.version(fresh=True) == 1

    async def some() -> None:
        for _ in range(5):
            await store.session("s", schema=NEW).modify(lambda model: setattr(model, "total", model.total + 1))

    await asyncio.gather(*(some() for _ in range(4)))
    assert (await session.load(fresh=True)).total == 20


async def test_fields_that_the_model_lets_pass_come_and_go(store: Any) -> None:
    class Open(BaseModel):
        model_config = ConfigDict(extra="allow")
        n: int = 0

    session = store.session("s", schema=Open)
    await session.set("colour", {"r": 1})
    await session.increment("hits", 2)
    model = await session.load()
    assert model.model_extra == {"colour": {"r": 1}, "hits": 2}
    await session.modify(lambda model: Open(n=model.n, hits=3))
    assert await session.get_all() == {"hits": 3}


async def test_values_that_json_has_no_name_for_round_trip(store: Any) -> None:
    class Odd(BaseModel):
        anything: Any = None
        key: bytes = b""
        big: int = 0
        named: str = Field(default="", alias="as")

    session = store.session("s", schema=Odd)
    odd = Odd.model_validate({"anything": ["\udc80", 2**70], "key": b"abc", "big": 2**70, "as": "x"})
    await session.create(odd)
    assert await session.load(fresh=True) == odd
    await session.set("as", "y")
    assert (await session.load()).named == "y"
    with pytest.raises(InvalidValue, match="'named': Odd has no such field"):
        await session.set("named", "y")
    for bad in (float("nan"), object(), {1: 2}, {1}):
        with pytest.raises(InvalidValue):
            await session.modify(lambda model, bad=bad: setattr(model, "anything", bad))
        with pytest.raises(InvalidValue):
            await session.set("anything", bad)


async def test_what_a_model_hides_from_json_is_refused_rather_than_lost(store: Any) -> None:
    class Login(BaseModel):
        token: SecretStr = SecretStr("")
        pair: Any = None
        cache: int = Field(default=0, exclude=True)

    session = store.session("s", schema=Login)
    with pytest.raises(InvalidValue, match="token: this SecretStr changes when"):
        await session.set("token", "hunter2")
    with pytest.raises(InvalidValue, match="pair: this tuple"):
        await session.create({"pair": (1, 2)})
    await session.create({"pair": [1, 2], "cache": 3})
    assert await session.load() == Login(pair=[1, 2]), "a field that is excluded on purpose is not kept"


# Versions


async def test_an_older_record_is_brought_up_on_read_and_stored_so_by_the_next_write(store: Any) -> None:
    await store.session("s").set_many({"n": 3, "name": "a"})
    session = store.session("s", schema=NEW)
    assert await session.load() == New(total=1003, name="a")
    assert await session.get_all() == {"name": "a", "total": 1003}
    assert await session.has("total")
    assert await session.version(fresh=True) == 1, "reading writes nothing"
    assert await session.set("name", "b", expect_version=1) == 3
    upcast, change = (await session.history())[-2:]
    assert (upcast.kind, upcast.set, upcast.deleted) == ("upcast", {"total": 1003}, ("n",))
    assert change.set == {"name": "b"}
    assert await stamp(store) == b"2"


WRITES: dict[str, Callable[[Any], Any]] = {
    "set": lambda s: s.set("total", 7),
    "delete": lambda s: s.delete("name"),
    "clear": lambda s: s.clear(),
    "update": lambda s: s.update("options", {"a": 1}),
    "append_to": lambda s: s.append_to("tags", "x"),
    "increment": lambda s: s.increment("total"),
    "increment within limits": lambda s: s.increment("limited"),
    "write": lambda s: s.write(increment={"total": 1}, append=[{"role": "user", "content": "x"}]),
    "apply": lambda s: s.apply(lambda view: view.update(total=view["total"] + 1)),
    "modify": lambda s: s.modify(lambda model: setattr(model, "total", 1)),
    "append": lambda s: s.append({"role": "user", "content": "x"}),
    "checkpoint": lambda s: s.checkpoint("here"),
}


@pytest.mark.parametrize("way", WRITES)
async def test_every_write_brings_up_an_older_record_and_spares_a_newer_one(store: Any, way: str) -> None:
    await store.session("s", schema=Old).set_many({"n": 3, "name": "a"})
    session = store.session("s", schema=NEW)
    await WRITES[way](session)
    assert await stamp(store) == b"2"
    fields = await store.session("s").get_all(fresh=True)
    assert "n" not in fields
    if way in ("increment", "write", "apply"):
        assert fields["total"] == 1004
    await store.session("s", schema=NEWER).set("name", "newer")
    before = await store.session("s").version(fresh=True)
    with pytest.raises(SchemaMismatch, match="schema version 3, this worker knows New version 2") as refused:
        await WRITES[way](session)
    assert (refused.value.stored, refused.value.known) == (3, 2)
    assert await store.session("s").version(fresh=True) == before
    for read in (session.load, session.get_all, session.phase, lambda: session.get("name")):
        with pytest.raises(SchemaMismatch):
            await read()


async def test_a_write_that_is_refused_brings_nothing_up(store: Any) -> None:
    await store.session("s").set("n", 3)
    session = store.session("s", schema=NEW)
    for attempt in (
        lambda: session.set("name", "b", expect_version=0),
        lambda: session.create({"name": "b"}),
    ):
        with pytest.raises(Conflict):
            await attempt()
    assert await session.version(fresh=True) == 1
    with pytest.raises(Conflict):
        await session.write(set={"name": "b"}, expect_phase="planning")
    assert await session.get("name") is None


def nothing(fields: dict[str, Any]) -> Any:
    return None


@pytest.mark.parametrize(
    ("upcaster", "said"),
    [
        (lambda fields: fields["missing"], r"from version 1 to 2 of New raised KeyError\('missing'\)"),
        (nothing, "from version 1 to 2 of New returned a NoneType, not a dict"),
        (lambda fields: {"total": {1}}, "returned what cannot be stored: total: a set"),
        (lambda fields: {"#phase": 1}, "returned what cannot be stored: field '#phase'"),
    ],
)
async def test_an_upcaster_that_fails_is_named_and_nothing_is_written(store: Any, upcaster: Any, said: str) -> None:
    await store.session("s").set("n", 1)
    session = store.session("s", schema=Schema(New, version=2, upcasters={1: upcaster}))
    for attempt in (session.load, lambda: session.set("name", "x"), session.upcast):
        with pytest.raises(SchemaMismatch, match=f"session:s: the upcaster .*{said}"):
            await attempt()
    assert await store.session("s").get_all(fresh=True) == {"n": 1}


async def test_what_an_upcaster_makes_must_fit_the_model(store: Any) -> None:
    await store.session("s").set("n", 1)
    session = store.session("s", schema=Schema(New, version=2, upcasters={1: lambda fields: {"total": "many"}}))
    for attempt in (session.load, lambda: session.set("name", "x")):
        with pytest.raises(CorruptState, match=r"session:s: does not match New version 2: total: .* \(given a str\)"):
            await attempt()
    assert await store.session("s").version(fresh=True) == 1


async def test_the_past_comes_back_with_its_schema(store: Any) -> None:
    await store.session("s", schema=Old).set("n", 1)
    session = store.session("s", schema=NEW)
    await session.set("name", "x")
    await session.rollback(version=1)
    assert await stamp(store) == b"1"
    assert (await session.load()).total == 1001
    assert await session.increment("total") == 1002
    await session.fork("copy")
    assert (await store.session("copy", schema=NEW).load()).total == 1002
    await store.delete("s")
    await session.rollback(version=1)
    assert (await session.load()).total == 1001
    await store.session("s", schema=NEWER).set("name", "y")
    with pytest.raises(SchemaMismatch):
        await session.rollback(version=1)


async def test_a_version_that_is_none_is_reported(store: Any) -> None:
    plain = core(store.session("s", schema=NEW))._context
    changes = RecordContext.changes(plain)
    changes.reserved(b"#schema", b"x")
    draft = changes.draft("set")
    if core(store) is store:
        await RecordContext.send(plain, draft)
    else:
        from distributed_state.port.blocking import finish

        finish(RecordContext.send(plain, draft))
    for attempt in (store.session("s", schema=NEW).load, lambda: store.session("s", schema=NEW).set("name", "x")):
        with pytest.raises(CorruptState, match="#schema holds no version"):
            await attempt()


async def test_what_is_encrypted_is_typed_all_the_same(opener: Any) -> None:
    store = await opener(encryption=Encryption(KeyRing({"k": bytes(32)})))
    await store.session("s", schema=Old).set_many({"n": 3, "name": "hunter2"})
    session = store.session("s", schema=NEW)
    assert await session.load() == New(total=1003, name="hunter2")
    assert await session.increment("total") == 1004
    assert await session.increment("limited") == 6
    await session.append_to("tags", "a")
    async with session.edit() as model:
        model.tags.append("b")
    async with session.turn() as turn:
        turn["options"] = {"x": 1}
    assert await session.load() == New(total=1004, name="hunter2", limited=6, tags=["a", "b"], options={"x": 1})
    assert await stamp(store) == b"2"
    with redis_of(store) as client:
        assert b"hunter2" not in everything_in_redis(client, core(store).settings.namespace)


async def test_a_policy_is_asked_for_the_fields_of_a_model(opener: Any) -> None:
    store = await opener(access=lambda request: request.actor == "root" or request.field not in ("limited", None))
    await store.session("s", schema=Old, actor="root").set("n", 3)
    session, root = store.session("s", schema=NEW), store.session("s", schema=NEW, actor="root")
    assert await session.set("total", 5) == 3, "a write brings the record up, whoever writes"
    await root.set("limited", 7)
    for denied in (
        session.load,
        session.get_all,
        session.upcast,
        lambda: session.set("limited", 1),
        lambda: session.increment("limited"),
        lambda: session.modify(lambda model: None),
    ):
        with pytest.raises(AccessDenied):
            await denied()
    assert await root.load() == New(total=5, limited=7)


# Old and new workers side by side


@pytest.mark.replicas
async def test_old_and_new_workers_lose_nothing_between_them(opener: Any) -> None:
    """Two old and two new workers count on; every acknowledged count is there in the end, and was upcast once."""
    replicas = [await opener(archiver=number == 0) for number in range(2)]
    for round in range(5):
        id, said = f"s{round}", {"old": 0, "new": 0}

        async def old(store: Any, id: str = id, said: dict[str, int] = said) -> None:
            session = store.session(id, schema=Old)
            try:
                while True:
                    await session.increment("n")
                    said["old"] += 1
                    await asyncio.sleep(0.002)  # workers that never pause leave no room for a read and a commit
            except SchemaMismatch:
                pass

        async def new(store: Any, id: str = id, said: dict[str, int] = said) -> None:
            session = store.session(id, schema=NEW)
            for _ in range(10):
                await session.increment("total")
                said["new"] += 1
                await session.modify(lambda model: setattr(model, "total", model.total + 1))
                said["new"] += 1

        await replicas[0].session(id, schema=Old).set("name", "a")
        await asyncio.gather(*(work(store) for store in replicas for work in (old, new)))
        assert (await replicas[0].session(id, schema=NEW).load(fresh=True)).total == 1000 + said["old"] + said["new"]
        kinds = [change.kind for change in await replicas[0].session(id).history()]
        assert kinds.count("upcast") == 1


async def _old_worker_meets_a_newer_record(first: Any, second: Any) -> dict[str, Any]:
    """The old worker has read the record, and the new one brings it up, before the old one writes."""
    old = first.session("s", schema=Old)
    await old.set("n", 1)
    assert (await old.load()).n == 1
    await second.session("s", schema=NEW).set("name", "new")
    with contextlib.suppress(SchemaMismatch):
        await old.set("n", 2)
    found: dict[str, Any] = await second.session("s").get_all(fresh=True)
    return found


@pytest.mark.replicas
async def test_an_old_worker_cannot_half_overwrite_even_with_an_older_hot_copy(opener: Any) -> None:
    found = await _old_worker_meets_a_newer_record(await opener(), await opener())
    assert found == {"name": "new", "total": 1001}


@pytest.mark.replicas
async def test_control_without_the_guard_it_does(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TypedContext, "_guarded", lambda self, draft, known: draft)
    found = await _old_worker_meets_a_newer_record(await opener(), await opener())
    assert found == {"n": 2, "name": "new"}, "half old, and never brought up"


async def _old_worker_writes_while_it_is_brought_up(
    first: Any, second: Any, monkeypatch: pytest.MonkeyPatch, unguarded: bool
) -> int:
    """The old worker counts after the new one has read and before it commits."""
    old, new = first.session("s", schema=Old), second.session("s", schema=NEW)
    await old.set("n", 1)
    send, late = RecordContext.send, [core(old)]

    async def _send(self: Any, draft: Any) -> Any:
        if draft.kind == "upcast" and late:
            await late.pop().increment("n")
        if draft.kind == "upcast" and unguarded:
            draft = draft._replace(expected=None, expectations=())
        return await send(self, draft)

    monkeypatch.setattr(RecordContext, "send", _send)
    await new.set("name", "new")
    assert not late
    found: int = (await new.load(fresh=True)).total
    return found


@pytest.mark.replicas
async def test_what_an_old_worker_writes_meanwhile_is_brought_up_too(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await opener(), await opener()
    assert await _old_worker_writes_while_it_is_brought_up(first, second, monkeypatch, False) == 1002


@pytest.mark.replicas
async def test_control_without_the_expected_version_it_is_lost(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = await opener(), await opener()
    assert await _old_worker_writes_while_it_is_brought_up(first, second, monkeypatch, True) == 1001


@pytest.mark.replicas
async def test_a_record_that_an_old_worker_starts_first_is_brought_up(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new worker found nothing; the old one's fields must not pass for new ones."""
    first, second = await opener(), await opener()
    new = second.session("s", schema=NEW)
    assert await new.load() == New()
    await first.session("s").set("n", 1)  # without schema, so no version stands in the way
    await new.set("name", "new")
    assert await new.load(fresh=True) == New(total=1001, name="new")


# A release in two steps: the new worker writes the old version until the last old one has ended


def rename_back(fields: dict[str, Any]) -> dict[str, Any]:
    total = fields.pop("total", 0)
    return {**{key: fields[key] for key in ("name", "tags") if key in fields}, "n": total - 1000}


STEP = Schema(New, version=2, upcasters={1: rename}, write_version=1, downcasters={1: rename_back})


@pytest.mark.replicas
async def test_in_two_steps_old_and_new_workers_read_each_other(opener: Any) -> None:
    """No SchemaMismatch on either side, and no count is lost; then the second step, beside workers of the first."""
    first, second = await opener(archiver=True), await opener(archiver=False)
    said = {"old": 0, "new": 0}
    await first.session("s", schema=Old).set("name", "a")

    async def old(store: Any) -> None:
        session = store.session("s", schema=Old)
        for _ in range(10):
            await session.increment("n")
            await session.modify(lambda model: setattr(model, "n", model.n + 1))
            said["old"] += 2
            await asyncio.sleep(0.005)  # workers that never pause leave no room for a read and a commit

    async def new(store: Any, schema: Any = STEP) -> None:
        session = store.session("s", schema=schema)
        for _ in range(4):
            await session.increment("total")
            await session.modify(lambda model: setattr(model, "total", model.total + 1))
            assert (await session.write(increment={"total": 1})).results["total"] > 1000
            async with store.batch() as batch:
                batch.on(session).increment("total", 1)
            await session.apply(lambda view: view.update(total=view["total"] + 1))
            said["new"] += 5
            await asyncio.sleep(0.005)

    await asyncio.gather(*(work(store) for store in (first, second) for work in (old, new)))
    async with second.session("s", schema=STEP).turn() as turn:
        turn["total"] += 1
    said["new"] += 1
    assert await stamp(first) == b"1"
    assert (await second.session("s", schema=Old).load(fresh=True)).n == said["old"] + said["new"]
    assert (await first.session("s", schema=STEP).load(fresh=True)).total == 1000 + said["old"] + said["new"]
    assert "upcast" not in [change.kind for change in await first.session("s").history()]
    await asyncio.gather(new(first), new(second, NEW))
    assert (await second.session("s", schema=NEW).load(fresh=True)).total == 1000 + said["old"] + said["new"]
    assert await second.session("s", schema=STEP).upcast() is None or await stamp(first) == b"1"
    await second.session("s", schema=NEW).set("name", "b")
    assert await stamp(first) == b"2"
    with pytest.raises(SchemaMismatch):
        await first.session("s", schema=Old).load(fresh=True)
    assert await first.session("s", schema=STEP).upcast() is not None, "the way back, for a release that is taken back"
    assert (await first.session("s", schema=Old).load(fresh=True)).name == "b"


STEP_WRITES = WRITES | {
    "create": lambda s: s.create({"total": 1004}),
    "set_many": lambda s: s.set_many({"total": 1009, "name": "b"}),
    "initialize": lambda s: s.initialize({"total": 1001}),
    "restore_state": lambda s: s.restore_state({"fields": {"total": 1002}}),
    "rollback": lambda s: s.rollback(version=1),
}


@pytest.mark.parametrize("begun", [True, False])
async def test_every_write_of_the_first_step_is_one_that_old_workers_read(store: Any, begun: bool) -> None:
    """What a worker of the second step would store is what both read."""
    for way, write in STEP_WRITES.items():
        step, new = store.session(f"step {way}", schema=STEP), store.session(f"new {way}", schema=NEW)
        for session in step, new:
            if begun and way != "create":
                await store.session(session.id, schema=Old).set_many({"n": 3, "name": "a"})
            elif way in ("rollback", "apply"):
                await session.set("total", 3)
            if session is step and way in ("update", "increment within limits"):
                with pytest.raises(InvalidValue, match="still written, cannot hold this"):
                    await write(session)
                break
            await write(session)
        else:
            assert await step.load(fresh=True) == await new.load(fresh=True), way
            assert await stamp(store, step.id) in (b"1", None), way
            assert await stamp(store, new.id) == (b"1" if way == "rollback" and begun else b"2"), way
            loaded = await store.session(step.id, schema=Old).load(fresh=True)
            fields = await store.session(step.id).get_all(fresh=True)
            assert not fields or loaded.n == (await new.load()).total - 1000, way
            assert "total" not in fields, way


async def test_what_the_old_version_cannot_hold_is_refused_not_lost(store: Any) -> None:
    session = store.session("s", schema=STEP)
    await session.set("name", "a", ttl=3600)
    for way in (
        lambda: session.set("limited", 7),
        lambda: session.update("options", {"a": 1}),
        lambda: session.modify(lambda model: setattr(model, "limited", 7)),
        lambda: session.set("total", 1001, ttl=60),
    ):
        with pytest.raises(InvalidValue, match="version 1"):
            await way()
    with pytest.raises(InvalidValue, match="version 1"):
        async with session.turn() as turn:
            turn["limited"] = 7
    assert await session.version(fresh=True) == 1
    assert "name" in (await store.session("s").export_state())["expires"], "its ttl is kept"
    with pytest.raises(Conflict):
        await session.set("total", 1, expect_version=7)
    assert await session.set("total", 1001, expect_version=1) == 2
    with pytest.raises(Conflict, match="phase"):
        await session.write(set={"total": 1002}, expect_phase="done")
    assert await session.phase() is None


def test_a_schema_says_how_it_writes_an_older_version() -> None:
    for wrong in (
        {"write_version": 0},
        {"write_version": 3},
        {"write_version": "1"},
        {"write_version": 1},
        {"write_version": 1, "downcasters": {2: rename_back}},
        {"write_version": 1, "downcasters": {1: "back"}},
    ):
        with pytest.raises(InvalidValue, match="New"):
            Schema(New, version=2, upcasters={1: rename}, **wrong)
    later = Schema(New, version=2, upcasters={1: rename}, downcasters={1: rename_back})
    assert (later.version, later.write_version) == (2, 2), "the second step leaves only write_version out"


# All records


async def test_all_records_of_a_scope_are_brought_up_and_the_bad_ones_named(store: Any) -> None:
    for number in range(7):
        await store.session(f"s{number}", user="u" if number < 2 else "v").set("n", number)
    await store.session("bad").set_many({"n": 1, "limited": 100})
    await store.session("newer", schema=NEWER).set("name", "x")
    await store.session("talk").append({"role": "user", "content": "hi"})
    await store.session("gone").set("n", 1)
    await store.delete("gone")
    await store.task("t").set("n", 1)
    seen: list[Any] = []
    dry = await store.admin.upcast(NEW, dry_run=True, progress=seen.append)
    assert (dry.upcast, dry.unchanged, dry.failed) == (7, 1, 2)
    assert seen[-1] == dry
    assert await stamp(store, "s1") is None
    assert (await store.admin.upcast(NEW, user="u")).upcast == 2
    assert (await store.admin.upcast(NEW, limit=2)).upcast == 2
    done = await store.admin.upcast(NEW)
    assert (done.upcast, done.unchanged, done.failed) == (3, 5, 2)
    assert sorted(said.split(":")[1] for said in done.failures) == ["bad", "newer"]
    again = await store.admin.upcast(NEW)
    assert (again.upcast, again.unchanged, again.failed) == (0, 8, 2)
    assert [(await store.session(f"s{n}", schema=NEW).load()).total for n in range(7)] == [1000 + n for n in range(7)]
    assert await store.task("t").get("n") == 1
    assert (await store.admin.upcast(NEW, scope="task")).upcast == 1
    for wrong in ({"limit": 0}, {"scope": "galaxy"}, {"user": ""}):
        with pytest.raises(InvalidValue):
            await store.admin.upcast(NEW, **wrong)
    with pytest.raises(InvalidValue, match="pydantic model"):
        await store.admin.upcast(dict)


async def test_bringing_up_all_may_end_anywhere_and_go_on(store: Any) -> None:
    for number in range(6):
        await store.session(f"s{number}").set("n", number)

    def stop(sofar: Any) -> None:
        if sofar.upcast == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await store.admin.upcast(NEW, progress=stop)
    rest = await store.admin.upcast(NEW)
    assert (rest.upcast, rest.unchanged) == (4, 2)


async def test_errors_survive_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(SchemaMismatch("s", stored=3, known=2)))
    assert isinstance(error, StateError)
    assert (str(error), error.stored, error.known) == ("s", 3, 2)


async def test_a_turn_keeps_to_the_schema(store: Any) -> None:
    await store.session("s").set("n", 3)
    session = store.session("s", schema=NEW)
    async with session.turn(request_id="r1") as turn:
        assert turn["total"] == 1003
        turn["total"] = 5
        turn.append({"role": "user", "content": "hi"})
    assert (await session.get_all(), await stamp(store)) == ({"total": 5}, b"2")
    with pytest.raises(InvalidValue, match="limited"):
        async with session.turn() as turn:
            turn["limited"] = 0
    async with store.session("new", schema=NEW).turn() as turn:
        turn["total"] = 1
        await store.session("new", schema=NEW).set("name", "beside")
    assert await store.session("new", schema=NEW).load() == New(total=1, name="beside")
    assert await stamp(store, "new") == b"2"
    await store.session("s", schema=NEWER).set("name", "x")
    with pytest.raises(SchemaMismatch):
        async with session.turn():
            raise AssertionError("not entered")
    async with store.session("s", schema=NEWER).turn(busy="reject") as turn:
        assert turn["name"] == "x"


async def test_a_phase_moves_only_where_the_schema_fits(store: Any) -> None:
    await store.session("s").set("n", 3)
    assert await store.session("s", schema=NEW).transition("new_task") == "planning"
    assert await stamp(store) == b"2"
    with pytest.raises(SchemaMismatch):
        await store.session("s", schema=Old).transition("plan_ready")


# Dataclasses


class Pace(enum.StrEnum):
    """A text of a program."""

    SLOW = "slow"
    FAST = "fast"


@dataclasses.dataclass
class Stop:
    """A part of a journey."""

    city: str
    nights: int = 1


@dataclasses.dataclass
class Journey:
    """A dataclass with what JSON does not know."""

    name: str
    begins: datetime
    pace: Pace = Pace.SLOW
    stops: list[Stop] = dataclasses.field(default_factory=list)
    budget: Decimal | None = None
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Range:
    """A dataclass that checks its fields together."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")


MAY = datetime(2026, 5, 1, 9, 30, tzinfo=UTC)


async def test_a_dataclass_is_a_schema(store: Any) -> None:
    journey = Journey("north", MAY, Pace.FAST, [Stop("Oslo", 2)], Decimal("12.50"))
    task = store.task("t", schema=Journey)
    await task.create(journey)
    assert await task.load(fresh=True) == journey
    assert await store.task("t").get_all(fresh=True) == {
        "name": "north",
        "begins": "2026-05-01T09:30:00Z",
        "pace": "fast",
        "stops": [{"city": "Oslo", "nights": 2}],
        "budget": "12.50",
        "count": 0,
    }
    async with task.edit() as model:
        assert type(model) is Journey
        model.stops.append(Stop("Bergen"))
        model.pace = Pace.SLOW
    assert (await task.load()).stops == [Stop("Oslo", 2), Stop("Bergen")]
    assert (await task.history())[-1].set.keys() == {"stops", "pace"}
    await task.set("pace", Pace.FAST)
    assert await task.increment("count") == 1
    changed = await task.modify(lambda model: dataclasses.replace(model, name="south"))
    assert (changed.name, changed.pace, changed.count) == ("south", Pace.FAST, 1)
    for key, value in (("pace", "idle"), ("begins", "soon"), ("stops", [{"nights": 1}]), ("other", 1)):
        with pytest.raises(InvalidValue):
            await task.set(key, value)
    assert await task.load(fresh=True) == changed


async def test_a_dataclass_that_checks_its_fields_together_is_never_stored_wrong(store: Any) -> None:
    task = store.task("t", schema=Range)
    await task.create(Range(1, 2))
    with pytest.raises(InvalidValue, match="low is above high"):
        await task.create({"low": 3, "high": 2})
    with pytest.raises(InvalidValue, match="validates its fields together"):
        await task.set("low", 3)
    assert await task.modify(lambda model: dataclasses.replace(model, high=9)) == Range(1, 9)
    await store.task("t").set("low", 10)
    with pytest.raises(CorruptState, match="low is above high"):
        await task.load(fresh=True)


@dataclasses.dataclass
class Computed:
    """A field that no caller gives."""

    low: int
    high: int = dataclasses.field(init=False, default=1)


@pytest.mark.unit
@pytest.mark.parametrize("wrong", [Computed, Stop("Oslo"), int, dict])
def test_a_type_that_cannot_be_read_back_is_not_a_schema(wrong: Any) -> None:
    with pytest.raises(InvalidValue):
        Schema(wrong)
