"""Preconditions: a change is made if the record is as its writer expects, decided by the server at that moment."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from below import keys_of, later, redis_of, tiers, until
from controls import sabotage
from counting import asked
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from sync_api import core

from distributed_state import (
    ABSENT,
    PRESENT,
    AccessDenied,
    Conflict,
    CorruptState,
    Deleted,
    Encryption,
    InvalidValue,
    KeyRing,
    Request,
    Schema,
    WarmUnavailable,
)
from distributed_state.records.transaction import equal

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=2), items, max_size=3),
    max_leaves=8,
)


class Task(BaseModel):
    state: str = "new"
    owner: str | None = None
    tries: int = 0


def test_absent_and_present_are_one_object_each_everywhere() -> None:
    for each in (ABSENT, PRESENT):
        assert pickle.loads(pickle.dumps(each)) is copy.deepcopy(each) is each
    assert repr({"a": ABSENT, "b": PRESENT}) == "{'a': ABSENT, 'b': PRESENT}"


@given(json_values)
def test_a_value_equals_itself_in_another_order_and_nothing_else(value: Any) -> None:
    def turned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return [turned(each) for each in value] if isinstance(value, list) else value

    assert equal(value, turned(value))
    assert not equal(value, [value])
    assert not equal({"a": value}, {"b": value})


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [(1, 1.0, True), (0.0, -0.0, True), (2**53 + 1, 2.0**53, False), (1, True, False), (0, False, False),
     ("1", 1, False), (None, False, False), ([1], [1.0], True), ([1, 2], [2, 1], False),
     ({"a": 1}, {"a": True}, False), (b"a", "a", False), (b"", b"", True), ({}, [], False), (None, None, True)],
)  # fmt: skip
def test_values_are_equal_as_json(one: Any, other: Any, same: bool) -> None:
    assert equal(one, other) is equal(other, one) is same


async def is_hot(store: Any, session: Any) -> None:
    async def hit() -> bool:
        before = tiers(store).hot.hits
        await session.get_all()
        return bool(tiers(store).hot.hits > before)

    await until(hit)


HELD: list[dict[str, Any]] = [
    {"state": "open"}, {"plan": {"b": [1.0], "a": None}}, {"owner": ABSENT, "state": PRESENT}, {"none": None},
    {"raw": b"\xff"},
]  # fmt: skip
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"state": "closed"}, "field 'state' holds another value"),
    ({"state": "open", "owner": PRESENT}, "field 'owner' is not there"),
    ({"owner": "me"}, "field 'owner' is not there"),
    ({"owner": None}, "field 'owner' is not there"),
    ({"state": ABSENT, "owner": PRESENT}, "field 'state' is there"),
    ({"plan": {"a": None, "b": [True]}}, "field 'plan' holds another value"),
    ({"raw": "\x02"}, "field 'raw' holds another value"),
]


@pytest.mark.only(warm="real")
@pytest.mark.parametrize("sealed", [False, True])
async def test_a_change_is_made_if_every_field_is_as_expected_and_else_says_which_is_not(
    opener: Any, sealed: bool
) -> None:
    options = {"encryption": Encryption(KeyRing({"k": bytes(32)}))} if sealed else {}
    store = await opener(**options)
    session = store.session("s")
    await session.set_many({"state": "open", "plan": {"a": None, "b": [1]}, "none": None, "raw": b"\xff"})
    cold = await opener(**options)
    version = 1
    for expect in HELD:
        for handle in (session, cold.session("s")):
            version += 1
            assert (await handle.write(set={"n": 1}, expect=expect)).version == version
            assert await handle.set("n", 2, expect=expect, expect_version=version) == version + 1
            version += 1
    for expect, said in BROKEN:
        for handle in (session, cold.session("s")):
            with pytest.raises(Conflict, match=said) as refused:
                await handle.write(set={"n": 3}, expect=expect)
            assert refused.value.version == version
            assert "closed" not in str(refused.value)
            with pytest.raises(Conflict, match=said):
                await handle.set("n", 3, expect=expect)
            async with store.batch() as batch:
                batch.on(handle)
            with pytest.raises(Conflict, match=said):
                async with store.batch() as batch:
                    batch.on(session, expect=expect).set("n", 3)
                    batch.on(store.user("u")).set("n", 1)
            with pytest.raises(Conflict, match=said):
                async with session.turn(expect=expect) as turn:
                    turn["n"] = 3
    assert (await session.get("n", fresh=True), await session.version(fresh=True)) == (2, version)


@pytest.mark.only(warm="real")
@pytest.mark.parametrize("sealed", [False, True])
async def test_an_expectation_that_holds_costs_one_round_trip(opener: Any, sealed: bool) -> None:
    """Where hot knew the record, however it is stored; where it did not, if it is plain and as it was written."""
    options = {"encryption": Encryption(KeyRing({"k": bytes(32)}))} if sealed else {}
    store = await opener(beat=0, archiver=False, **options)
    session = store.session("s")
    await session.set_many({"state": "open", "plan": {"a": 1, "b": 2}})
    await is_hot(store, session)
    with asked(store) as calls:
        await session.write(set={"n": 1}, expect={"plan": {"b": 2.0, "a": 1}, "state": "open", "owner": ABSENT})
    assert len(calls.sent) == 1
    tiers(store).hot.forget("session:s")
    with asked(store) as calls:
        await session.write(set={"n": 2}, expect={"plan": {"a": 1, "b": 2}})
    assert len([each for each in calls.sent if each.startswith("EVALSHA")]) == (2 if sealed else 1)


@pytest.mark.only(warm="real")
async def test_a_stale_copy_decides_nothing(opener: Any) -> None:
    """What this process holds is a guess: the server is asked, and says how the value is stored now."""
    store, other = await opener(), await opener()
    session = store.session("s")
    await session.set("a", {"x": 1, "y": 2})
    await is_hot(store, session)
    held = tiers(store).hot.entries["session:s"]
    await other.session("s").set("a", {"y": 2, "x": 1})
    tiers(store).hot.entries["session:s"] = held
    await session.write(set={"n": 1}, expect={"a": {"x": 1, "y": 2}})
    await other.session("s").set("a", 5)
    tiers(store).hot.entries["session:s"] = held
    with pytest.raises(Conflict, match="'a' holds another value"):
        await session.write(set={"n": 2}, expect={"a": {"x": 1, "y": 2}})
    await session.write(set={"n": 3}, expect={"a": 5})
    assert await session.get("n", fresh=True) == 3


async def test_a_record_is_expected_to_be_there_or_not(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    for there in (session, store.session()):
        with pytest.raises(Conflict, match="expected one, found no record"):
            await there.write(set={"a": 1}, expect_exists=True)
        assert not await there.exists(fresh=True)
    await session.write(set={"a": 1}, expect_exists=False, expect={"a": ABSENT})
    with pytest.raises(Conflict, match="expected none, found a record"):
        await session.write(set={"a": 2}, expect_exists=False)
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(keys_of(store, "s").record)
    tiers(store).hot.forget("session:s")
    with pytest.raises(Conflict, match="expected none"):
        await session.write(set={"a": 2}, expect_exists=False)
    await session.write(set={"a": 3}, expect_exists=True, expect={"a": 1})
    with pytest.raises(Conflict, match="found no record"):
        async with store.session("t").turn(expect_exists=True):
            pass
    async with session.turn(expect_exists=True, expect={"a": 3}) as turn:
        turn["a"] = 4
    await store.delete("s")
    for exists in (True, False):
        with pytest.raises(Deleted):
            await session.write(set={"a": 5}, expect_exists=exists)


@pytest.mark.only(warm="real")
async def test_past_its_deadline_a_field_is_absent_to_who_expects_it(opener: Any) -> None:
    """By the server's clock: this process does not know the record, or takes the field for living."""
    store, other = await opener(), await opener()
    session = store.session("s")
    await session.set("lease", {"by": "w1"}, ttl=3600)
    await session.write(set={"n": 1}, expect={"lease": {"by": "w1"}})
    await other.session("s").write(set={"n": 2}, expect={"lease": {"by": "w1"}})
    for wanted in (ABSENT, {"by": "w2"}):
        with pytest.raises(Conflict, match=r"'lease' (is there|holds another)"):
            await session.write(set={"n": 3}, expect={"lease": wanted})
    with redis_of(store) as client:
        raw = client.hget(keys_of(store, "s").record, "lease")
        client.hset(keys_of(store, "s").record, "lease", b"!5 " + raw.partition(b" ")[2])
    for home in (store, other):
        tiers(home).hot.forget("session:s")
    for wanted in (PRESENT, {"by": "w1"}):
        with pytest.raises(Conflict, match="'lease' is not there"):
            await session.write(set={"n": 3}, expect={"lease": wanted})
    with sabotage("commit", "if ends and ends + 0 <= now_ms then", "if false then"):
        assert (await session.write(set={"n": 4}, expect={"lease": PRESENT})).version == 4
    await session.write(set={"lease": {"by": "w2"}}, expect={"lease": ABSENT})
    assert await session.get_all(fresh=True) == {"n": 4, "lease": {"by": "w2"}}


async def test_the_server_would_not_refuse_without_its_check(opener: Any) -> None:
    """The negative control of all the others."""
    store = await opener()
    session = store.session("s")
    await session.set("a", 1)
    with sabotage("commit", "mismatch = mismatch or way == 43 or stored", "mismatch = mismatch"):
        await session.write(set={"n": 1}, expect={"a": ABSENT, "b": PRESENT})
    with sabotage("commit", "wanted ~= '+' and wanted ~= '+' .. stored", "false"):
        await session.write(set={"n": 1}, expect={"a": 2})


async def test_a_refusal_does_not_send_back_what_was_not_asked_for(store: Any) -> None:
    session = store.session("s")
    await session.set_many({"large": "x" * 100_000, "small": 1})
    with pytest.raises(Conflict) as refused:
        await session.write(set={"a": 1}, expect={"large": ABSENT, "small": PRESENT, "b": PRESENT})
    assert refused.value.preconditions == (b"+", b"+", None)


async def test_what_is_expected_to_be_there_is_not_swept_away_by_a_clock_that_is_fast(opener: Any) -> None:
    """By this process' clock the field is over; the server is asked, and says that it is there."""
    store = await opener()
    session = store.session("s")
    await session.set_many({"lease": "w1", "other": 1}, ttl=60)
    await session.get_all()
    later(store, 61)
    await session.write(set={"n": 1}, expect={"lease": PRESENT})
    with redis_of(store) as client:
        assert client.hget(keys_of(store, "s").record, "lease").endswith(b'"w1"')
    await session.write(set={"n": 2}, expect={"lease": "w1"})


@pytest.mark.only(warm="real")
async def test_one_of_many_who_expect_a_field_to_be_absent_gets_it(opener: Any) -> None:
    stores = [await opener() for _ in range(3)]
    won = []
    for number in range(20):
        for store in stores:
            try:
                await store.session("s").write(set={f"o{number}": number}, expect={f"o{number}": ABSENT})
                won.append(number)
            except Conflict:
                pass
    assert won == list(range(20))


async def test_increments_and_the_rest_of_a_write_are_made_once_whatever_was_guessed(opener: Any) -> None:
    store = await opener(encryption=Encryption(KeyRing({"k": bytes(32)}), fields=("secret",)))
    session = store.session("s")
    await session.set("secret", 1)
    await session.set("n", 5, ttl=3600)
    tiers(store).hot.forget("session:s")
    written = await session.write(increment={"n": 2}, append=[{"role": "user", "content": "x"}], expect={"secret": 1})
    assert written.results == {"n": 7}
    assert len(await session.messages()) == 1
    async with store.batch() as batch:
        tiers(store).hot.forget("session:s")
        batch.on(session, expect={"secret": 1.0}).increment("n", 1)
        batch.on(store.user("u"), expect_exists=False).set("a", 1)
    assert await session.get("n") == 8
    assert batch.versions[session.ref] == 4


async def test_a_turn_that_was_answered_is_not_asked_again(store: Any) -> None:
    session = store.session("s")
    await session.set("state", "open")
    for _ in range(2):
        async with session.turn(request_id="r", expect={"state": "open"}) as turn:
            if not turn.repeated:
                turn["state"] = "closed"
                turn.outcome = "done"
        assert turn.outcome == "done"
    with pytest.raises(Conflict, match="state"):
        async with session.turn(request_id="r2", expect={"state": "open"}):
            pass
    await session.set("after", 1)  # the lease was given back


async def test_who_expects_a_field_has_to_be_allowed_to_read_it(opener: Any) -> None:
    def policy(request: Request) -> bool:
        return not (request.action == "read" and request.field in ("secret", "#version"))

    store = await opener(access=policy)
    session = store.session("s")
    await session.set("secret", 1)
    for expect in ({"secret": 2}, {"secret": ABSENT}, {"secret": PRESENT}):
        with pytest.raises(AccessDenied):
            await session.write(set={"a": 1}, expect=expect)
    with pytest.raises(AccessDenied):
        await session.write(set={"a": 1}, expect_exists=True)
    await session.write(set={"a": 1}, expect={"a": ABSENT})


async def test_what_nobody_can_expect_is_refused(store: Any) -> None:
    session = store.session("s")
    for expect in ([], "a", {"#phase": "x"}, {"": 1}, {1: 1}, {"a": {1}}, {"a": [b"x"]}, {"a": float("nan")}):
        with pytest.raises(InvalidValue):
            await session.write(set={"a": 1}, expect=expect)
    with pytest.raises(InvalidValue, match="1001 fields"):
        await session.write(set={"a": 1}, expect=dict.fromkeys(map(str, range(1001)), ABSENT))
    await session.write(set={"a": 1}, expect=dict.fromkeys(map(str, range(1000)), ABSENT))
    with pytest.raises(InvalidValue, match="expect_exists"):
        await session.write(set={"a": 1}, expect_exists=1)
    with pytest.raises(InvalidValue, match="nothing to change"):
        await session.write(expect={"a": 1})
    with pytest.raises(InvalidValue, match="nothing to change"):
        async with store.batch() as batch:
            batch.on(session, expect={"a": 1})
    with pytest.raises(InvalidValue, match="only once"):
        async with store.batch() as batch:
            batch.on(session, expect={"a": 1}).set("a", 2)
            batch.on(session, expect={"b": 1})
    with redis_of(store) as client:
        client.hset(keys_of(store, "s").record, "a", b"no json")
    with pytest.raises(CorruptState):
        await session.write(set={"b": 1}, expect={"a": 2})


async def test_a_typed_record_expects_what_its_model_stores(opener: Any) -> None:
    store = await opener()
    task = store.task("t", schema=Task)
    await task.create(Task(state="open"))
    await task.write(set={"state": "taken"}, expect={"state": "open", "owner": None})
    with pytest.raises(Conflict, match="state"):
        await task.write(set={"state": "taken"}, expect={"state": "open"})
    with pytest.raises(InvalidValue, match="tries"):
        await task.write(set={"state": "taken"}, expect={"tries": "many"})
    async with task.edit() as model:
        model.tries = 1
    async with store.batch() as batch:
        batch.on(task, expect={"tries": 1}).set("tries", 2)
    with pytest.raises(Conflict, match="tries"):
        async with store.batch() as batch:
            batch.on(task, expect={"tries": 1}).set("tries", 3)
    assert core(task) is not None
    older = Schema(Task, version=2, upcasters={1: lambda fields: {**fields, "tries": fields.get("tries", 0) + 10}})
    await store.task("t", schema=older).write(set={"owner": "w"}, expect={"tries": 12})
    assert (await store.task("t", schema=older).load()).tries == 12


async def test_a_typed_number_with_a_deadline_is_added_to_beside_others(store: Any) -> None:
    """Its increment is sent as a swap, so that the server's sums are of the others alone."""
    task = store.task("t", schema=Task)
    await task.set("tries", 5, ttl=600)
    assert (await task.write(increment={"tries": 2})).results == {"tries": 7}
    assert (await task.write(increment={"tries": 2}, expect={"tries": 7})).results == {"tries": 9}


@pytest.mark.parametrize("remembered", [True, False])
async def test_an_op_that_was_applied_is_no_conflict_when_its_answer_was_lost(opener: Any, remembered: bool) -> None:
    """The repetition finds its own result before the preconditions, which its first try has changed."""
    store = await opener(archiver=False, beat=0)
    session = store.session("s")
    await session.set("state", "open")
    warm = tiers(store).warm
    attempt = warm.port.script
    lost = []

    async def losing(*given: Any, **options: Any) -> Any:
        answer = await attempt(*given, **options)
        if not lost and b'"closed"' in given[2]:
            lost.append(answer)
            raise WarmUnavailable("the answer was lost")
        return answer

    warm.port.script = losing
    change = {"set": {"state": "closed"}, "expect": {"state": "open", "x": ABSENT}, "expect_exists": True}
    if remembered:
        assert (await session.write(**change)).version == 2
    else:
        with sabotage("commit", "if at then", "if false then"), pytest.raises(Conflict):
            await session.write(**change)
    assert lost
    assert await session.get("state", fresh=True) == "closed"


async def test_what_is_expected_in_a_batch_is_what_it_was_when_that_was_said(store: Any) -> None:
    session = store.session("s")
    await session.set("a", {"x": [2, 1]})
    expected: dict[str, Any] = {"x": [2, 1]}
    async with store.batch() as batch:
        tiers(store).hot.forget("session:s")
        batch.on(session, expect={"a": expected}).set("b", 1)
        expected["x"].sort()
    assert await session.get("b") == 1
