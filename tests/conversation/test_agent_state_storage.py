"""An agent's state is saved in one commit of what changed. Law: what is loaded equals what was saved."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import enum
import json
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from below import keys_of, redis_of, tiers
from controls import sabotage
from counting import asked
from pydantic import Field

from distributed_state import (
    AgentState,
    Conflict,
    CorruptState,
    Deleted,
    InvalidValue,
    Message,
    Role,
    TooLarge,
    ToolCall,
    Workflow,
    WorkingMemory,
)
from distributed_state.warm.scripts import COMMIT

CHECK = "if mismatch then return"


def a_state(id: str = "s") -> AgentState:
    return AgentState.from_user_input("Weather in Oslo?", session_id=id)


def a_call(number: int = 0) -> ToolCall:
    return ToolCall(tool_name="weather", arguments={"city": "Oslo", "n": number}, result={"t": [number, None, True]})


def rich() -> AgentState:
    """Something in every field, and what other encodings lose."""
    state = a_state().to_executing().record_observation("\ud800\0 thought", a_call()).record_observation("", a_call(1))
    memory = state.memory.plan("a", "b", "a").complete("a").note("", None).note("float", 1.0)
    memory = memory.note("k.\n#", {"deep": [[]], "n": 2**70}).note("one", 1).note("true", True)
    said = {"role": "user", "content": [{"type": "text", "text": "hm"}], "name": None, "unknown": [1.0]}
    return state.with_memory(memory).with_messages(said).to_waiting()


async def last_change(session: Any) -> Any:
    return (await session.history())[-1]


# There and back


@pytest.mark.parametrize("make", [lambda: AgentState(session_id="s"), a_state, rich])
async def test_a_state_comes_back_as_it_was_saved(store: Any, make: Callable[[], AgentState]) -> None:
    session, state = store.session("s"), make()
    assert await session.load_state() is None
    saved = await session.save_state(state)
    found = await session.load_state()
    for each in (saved, found):
        assert type(each) is AgentState
        assert each == state
        assert repr(each.model_dump()) == repr(state.model_dump()), "equal is not all: True equals 1"
    assert await session.version() == 1
    assert await session.phase() == state.phase
    assert [each.to_dict() for each in await session.messages()] == [each.to_dict() for each in state.history]


async def test_notes_come_back_in_the_order_of_their_names(store: Any) -> None:
    session, names = store.session("s"), [f"{n * 7919 % 1000}" for n in range(200)]
    memory = WorkingMemory(notes=dict.fromkeys(names, 1))
    await session.save_state(a_state().with_memory(memory))
    found = await session.load_state()
    assert found.memory == memory
    assert list(found.memory.notes) == sorted(names)


@pytest.mark.only(cold=("sqlite", "postgres"))
async def test_a_state_comes_back_from_the_archive(store: Any) -> None:
    session, state = store.session("s"), rich()
    state = state.with_messages(*[Message(role="user", content=str(n)) for n in range(100)])
    saved = await session.save_state(state)
    await store.admin.archive()
    with redis_of(store) as client:
        assert client.delete(keys_of(store, "s").record) == 1
    found = await session.load_state()
    assert found == saved == state
    assert (await session.save_state(found.to_error("enough"))).error_message == "enough"


async def test_every_step_of_a_run_can_be_saved_and_loaded(store: Any) -> None:
    session = store.session("s")
    state = await session.save_state(a_state())
    steps: list[Callable[[AgentState], AgentState]] = [
        lambda state: state.with_memory(state.memory.plan("look", "tell")),
        AgentState.to_executing,
        lambda state: state.record_observation("so", a_call()),
        lambda state: state.with_memory(state.memory.complete("look").note("t", 12)),
        AgentState.to_reflecting,
        AgentState.to_planning,
        AgentState.to_waiting,
        AgentState.to_executing,
        lambda state: state.with_memory(state.memory.note("t", 13).note("u", True)),
        lambda state: state.with_memory(state.memory.note("u", 1)),
        lambda state: state.with_memory(state.memory.model_copy(update={"notes": {"u": 1}})),
        lambda state: state.with_memory(state.memory.model_copy(update={"tool_calls": [a_call(7), a_call(8)]})),
        lambda state: state.with_memory(state.memory.model_copy(update={"tool_calls": state.memory.tool_calls[:1]})),
        lambda state: state.to_done("12 degrees"),
        lambda state: state.new_task("And tomorrow?"),
        lambda state: state.to_error("no forecast"),
    ]
    for version, step in enumerate(steps, 2):
        state = step(state)
        saved = await session.save_state(state)
        found = await session.load_state()
        assert saved == found == state, version
        assert repr(found) == repr(state), version
        assert await session.version() == version
        # Either may be gone on from.
        state = found if version % 2 else saved
    assert await session.phase() == "error"


async def test_a_save_writes_what_changed_and_nothing_else(store: Any) -> None:
    session = store.session("s")
    state = await session.save_state(rich().to_executing())
    state = await session.save_state(state.record_observation("so", a_call(2)))
    change = await last_change(session)
    assert set(change.set) == {"agent.iteration", "agent.updated_at", "agent.tool_call.2"}
    assert [each.role for each in change.appended] == ["tool"]
    assert (change.deleted, change.kind) == ((), "save_state")
    state = await session.save_state(state.with_memory(state.memory.note("k", 1).complete("b")))
    change = await last_change(session)
    assert set(change.set) == {"agent.updated_at", "agent.note.k", "agent.completed_steps"}
    assert (change.appended, change.phase) == ((), None)
    state = await session.save_state(state.to_done("42").new_task("next"))
    change = await last_change(session)
    assert set(change.deleted) == {
        "agent.note.k", "agent.note.", "agent.note.k.\n#", "agent.note.true", "agent.note.one", "agent.note.float",
        "agent.tool_call.0", "agent.tool_call.1", "agent.tool_call.2",
    }  # fmt: skip
    assert change.phase == "planning"
    assert await session.save_state(state) == state
    assert await session.version() == 4, "nothing changed, nothing was written"


async def test_the_fields_of_a_user_are_left_alone(store: Any) -> None:
    session = store.session("s")
    await session.set_many({"mine": 1, "agent.name": "Bob"})
    state = await session.save_state(a_state())
    await session.save_state(state.to_done("42").new_task("next"))
    fields = await session.get_all()
    assert (fields["mine"], fields["agent.name"]) == (1, "Bob")
    assert (await session.load_state()).memory == WorkingMemory(goal="next")


async def test_a_memory_that_was_changed_in_place_is_saved(store: Any) -> None:
    session = store.session("s")
    state = await session.save_state(a_state())
    state.memory.note("k", [1])
    state.memory.record_tool_call(ToolCall(tool_name="look"))
    state.memory.plan_steps.append("a")
    state = await session.save_state(state)
    state.memory.notes["k"].append(2)
    state.memory.completed_steps.append("a")
    state = await session.save_state(state)
    memory = (await session.load_state()).memory
    assert memory == state.memory
    assert (memory.notes, memory.completed_steps, len(memory.tool_calls)) == ({"k": [1, 2]}, ["a"], 1)
    state.memory.notes["k"] = {1, 2}
    with pytest.raises(InvalidValue, match="notes"):
        await session.save_state(state)


@pytest.mark.parametrize("copied", [lambda it: pickle.loads(pickle.dumps(it)), copy.deepcopy, copy.copy])
async def test_a_copy_knows_what_was_saved(store: Any, copied: Callable[[AgentState], AgentState]) -> None:
    session = store.session("s")
    state = copied(await session.save_state(rich()))
    await session.save_state(state.to_executing())
    assert set((await last_change(session)).set) <= {
        "agent.iteration", "agent.updated_at", "agent.tool_call.0", "agent.tool_call.1",
        *(f"agent.note.{key}" for key in state.memory.notes),
    }  # fmt: skip
    assert (await last_change(session)).appended == ()
    assert await session.load_state() is not None


async def test_forks_and_rollbacks_have_a_state_of_their_own(store: Any) -> None:
    session = store.session("s")
    state = await session.save_state(a_state())
    await session.save_state(state.to_done("42"))
    await session.fork("s-b", version=1)
    found = await store.session("s-b").load_state()
    assert found == state.model_copy(update={"session_id": "s-b"})
    assert (await store.session("s-b").save_state(found.to_error("no"))).phase == "error"
    await session.rollback(steps=1)
    assert await session.load_state() == state
    assert await store.session("s-b").save_state((await store.session("s-b").load_state()).with_messages())


# One of two


@pytest.mark.replicas
async def test_of_two_replicas_that_save_one_gets_conflict(opener: Any) -> None:
    sessions = [(await opener()).session("s"), (await opener()).session("s")]
    await sessions[0].save_state(a_state().to_executing())
    for turn in range(25):
        loaded = [await session.load_state() for session in sessions]
        assert loaded[0] == loaded[1]
        states = [state.with_memory(state.memory.note(f"n{turn}", who)) for who, state in enumerate(loaded)]
        calls = [session.save_state(state) for session, state in zip(sessions, states, strict=True)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        [loser] = [who for who, each in enumerate(outcomes) if isinstance(each, Exception)]
        assert isinstance(outcomes[loser], Conflict), outcomes[loser]
        assert await sessions[0].load_state() == states[1 - loser]
        # Who lost reads again, and then may.
        found = await sessions[loser].load_state()
        await sessions[loser].save_state(found.with_memory(found.memory.note(f"n{turn}", "both")))
    assert await sessions[0].version(fresh=True) == 51


@pytest.mark.replicas
async def test_without_the_check_in_the_commit_one_would_overwrite_the_other(opener: Any) -> None:
    """The negative control of the test above."""
    sessions = [(await opener()).session("s"), (await opener()).session("s")]
    await sessions[0].save_state(a_state())
    loaded = [await session.load_state() for session in sessions]
    with sabotage("commit", CHECK, "if mismatch and false then return"):
        for who, session in enumerate(sessions):
            await session.save_state(loaded[who].with_memory(loaded[who].memory.note("k", who)))
    assert (await sessions[0].load_state()).memory.notes == {"k": 1}


async def test_any_change_of_the_record_meanwhile_is_a_conflict(store: Any) -> None:
    session = store.session("s")
    state = await session.save_state(a_state())
    for change in (
        lambda: session.set("mine", 1),
        lambda: session.append({"role": "user", "content": "and?"}),
        lambda: session.transition("plan_ready"),
    ):
        await change()
        with pytest.raises(Conflict):
            await session.save_state(state.with_memory(WorkingMemory()))
        state = await session.load_state()
        await session.save_state(state)
    assert state.phase == "executing"
    assert state.history[-1].content == "and?"


async def test_a_value_that_was_gone_on_from_is_not_saved_twice(store: Any) -> None:
    session = store.session("s")
    first = await session.save_state(a_state())
    await session.save_state(first.to_executing())
    with pytest.raises(Conflict):
        await session.save_state(first.to_waiting())
    assert await session.phase(fresh=True) == "executing"


async def test_a_loop_may_drop_the_result_of_a_save(store: Any) -> None:
    """As with a function that writes a file."""
    session, state = store.session("s"), a_state().to_executing()
    for number in range(3):
        state = state.record_observation("so", a_call(number))
        await session.save_state(state)
    assert {"agent.tool_call.1"} == {name for name in (await session.history())[1].set if "tool_call" in name}
    found = await session.load_state()
    assert found == state
    assert [call.arguments["n"] for call in found.memory.tool_calls] == [0, 1, 2]


async def test_the_error_of_a_second_save_names_the_way(store: Any) -> None:
    session, state = store.session("s"), a_state()
    following = state.to_executing()
    await session.save_state(state)
    await refused(session, following, r"state = session.save_state\(state\), in asyncio await")
    loaded = await session.load_state()
    await session.save_state(loaded.to_executing())
    await refused(session, loaded.to_waiting(), r"state = session.save_state\(state\), in asyncio await", Conflict)


@pytest.mark.replicas
async def test_a_session_id_is_taken_once(opener: Any) -> None:
    stores = [await opener(), await opener()]
    for number in range(15):
        states = [a_state(f"s{number}"), a_state(f"s{number}")]
        calls = [store.session(f"s{number}").save_state(state) for store, state in zip(stores, states, strict=True)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        [won] = [each for each in outcomes if isinstance(each, AgentState)]
        [lost] = [each for each in outcomes if isinstance(each, Exception)]
        assert isinstance(lost, InvalidValue), lost
        assert await stores[0].session(f"s{number}").load_state() == won


# Bad input


async def refused(session: Any, state: Any, match: str, error: type[Exception] = InvalidValue) -> None:
    before = await session.version(fresh=True)
    with pytest.raises(error, match=match):
        await session.save_state(state)
    assert await session.version(fresh=True) == before


async def test_what_is_not_the_state_of_this_session_is_refused(store: Any) -> None:
    session = store.session("s")
    await refused(session, a_state("other"), "cannot hold the state of session 'other'; .* session_id='s'")
    await refused(session, None, "not <class .*NoneType'>")
    await refused(session, a_state().model_dump(), "not <class .*dict'>")
    await session.save_state(a_state())
    await refused(session, a_state(), "holds a state already, at version 1; go on from load_state()")


async def test_a_history_only_grows(store: Any) -> None:
    session = store.session("s")
    state = await session.save_state(a_state().with_messages({"role": "assistant", "content": "Yes?"}))
    other = Message(role="user", content="?")
    for history in ((), state.history[:1], (other, *state.history), (*state.history[:1], other), state.history[::-1]):
        await refused(session, state.model_copy(update={"history": history}), "holds 2 messages, .* only ever added")
    equal = tuple(Message(**each.to_dict()) for each in state.history)
    state = await session.save_state(state.model_copy(update={"history": [*equal, other]}))
    assert state.history == (*equal, other)


SMUGGLED: list[tuple[dict[str, Any], str]] = [
    ({"history": (Message.model_construct(role="robot", content="hi"),)}, "state.history.0.role"),
    ({"history": ({"role": "robot"},)}, "state.history.0.role"),
    ({"history": ("hello",)}, "state.history.0"),
    ({"history": 7}, "history"),
    ({"phase": ""}, "state.phase"),
    ({"phase": None}, "state.phase"),
    ({"iteration": "three"}, "state.iteration"),
    ({"final_answer": 42}, "state.final_answer"),
    ({"created_at": float("nan")}, "state.created_at"),
    ({"memory": None}, "state.memory"),
    ({"memory": WorkingMemory().model_copy(update={"notes": {"k": {1}}})}, "state.memory.notes"),
    ({"memory": WorkingMemory().model_copy(update={"notes": {7: 1}})}, "state.memory.notes"),
    ({"memory": WorkingMemory().model_copy(update={"notes": None})}, "notes"),
    ({"memory": WorkingMemory().model_copy(update={"plan_steps": (1,)})}, "state.memory.plan_steps.0"),
    ({"memory": WorkingMemory().model_copy(update={"tool_calls": ("f",)})}, "state.memory.tool_calls.0"),
    ({"memory": WorkingMemory().model_copy(update={"tool_calls": None})}, "tool_calls"),
    (
        {"memory": WorkingMemory(tool_calls=(a_call().model_copy(update={"result": {1}}),))},
        "state.memory.tool_calls.0.result",
    ),
]


async def test_what_was_smuggled_past_the_model_is_refused_at_the_save(store: Any) -> None:
    for number, (fields, match) in enumerate(SMUGGLED):
        id = f"s{number}"
        session = store.session(id)
        await refused(session, AgentState(session_id=id).model_copy(update=fields), match)
        state = await session.save_state(AgentState(session_id=id))
        await refused(session, state.model_copy(update=fields), match)


async def test_what_is_too_large_is_refused(opener: Any) -> None:
    store = await opener(max_field_bytes=1000, max_message_bytes=1000)
    session = store.session("s")
    await refused(session, AgentState.from_user_input("x" * 1001, "s"), "max_field_bytes", TooLarge)
    state = await session.save_state(a_state())
    await refused(session, state.with_messages({"role": "user", "content": "x" * 1001}), "max_message", TooLarge)
    await refused(session, state.with_memory(state.memory.note("k" * 1020, 1)), "field name", TooLarge)


async def test_a_deleted_session_holds_no_state_and_takes_none(store: Any) -> None:
    session = store.session("s")
    state = await session.save_state(a_state())
    await store.delete("s")
    assert await session.load_state() is None
    for each in (state.to_executing(), a_state()):
        with pytest.raises(Deleted):
            await session.save_state(each)
    await session.create()
    await session.save_state(a_state())
    assert (await session.load_state()).phase == "planning"


async def test_a_conversation_that_was_there_before_belongs_to_the_history(store: Any) -> None:
    session = store.session("s")
    await session.append({"role": "system", "content": "Be brief."})
    assert await session.load_state() is None
    await refused(session, a_state(), "holds 1 messages")
    state = AgentState(session_id="s", history=await session.messages()).new_task("Weather?")
    await session.save_state(state)
    assert await session.load_state() == state
    assert [each.role for each in await session.messages()] == [Role.SYSTEM, Role.USER]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("agent.iteration", "three"),
        ("agent.created_at", None),
        ("agent.plan_steps", {"a": 1}),
        ("agent.tool_call.1", {"tool_name": "f"}),
        ("agent.tool_call.x", {"tool_name": "f"}),
        ("agent.tool_call.0", {"tool_name": ""}),
    ],
)
async def test_stored_fields_that_are_no_state_are_reported_and_kept(store: Any, field: str, value: Any) -> None:
    session = store.session("s")
    await session.save_state(a_state())
    await session.set(field, value)
    with pytest.raises(CorruptState, match="session:s: its agent state cannot be read"):
        await session.load_state()
    assert await session.get(field, fresh=True) == value


# What a save costs


async def long_and_short(store: Any) -> list[tuple[Any, AgentState]]:
    """Sessions of 10 and of 1,000 messages, with half as many tool calls."""
    made = []
    for number in (10, 1000):
        state = a_state(f"s{number:04}").to_executing()
        said = [Message(role="user", content=f"message {n:04}") for n in range(number - 1)]
        memory = state.memory.model_copy(update={"tool_calls": tuple(a_call(n) for n in range(number // 2))})
        session = store.session(state.session_id)
        await session.save_state(state.with_messages(*said).with_memory(memory))
        made.append((session, await session.load_state()))
    return made


async def test_a_save_carries_as_much_however_long_the_conversation_is(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried: list[int] = []
    warm = tiers(store).warm
    call = warm._call

    def counted(*given: Any) -> Any:
        found = call(*given)
        carried.append(sum(len(each) if isinstance(each, (bytes, str)) else len(str(each)) for each in found[2]))
        return found

    sent, changes = [], []
    for session, state in await long_and_short(store):
        with monkeypatch.context() as patch:
            patch.setattr(warm, "_call", counted)
            await session.save_state(state.record_observation("so", a_call()))
        sent.append(carried.pop())
        assert not carried, "one commit"
        changes.append(await last_change(session))
    assert sent[1] <= 1.05 * sent[0]
    assert len(changes[0].set) == len(changes[1].set) == 3
    assert len(changes[0].appended) == len(changes[1].appended) == 1


@pytest.mark.only(warm="real")
async def test_a_save_is_one_round_trip(opener: Any) -> None:
    store = await opener(archiver=False)
    for session, state in await long_and_short(store):
        with asked(store) as seen:
            state = await session.save_state(state.with_messages({"role": "user", "content": "hi"}))
            state = await session.save_state(state.to_done("42"))
        assert len(seen.sent) == 2
        assert all(COMMIT.sha.decode() in each for each in seen.sent)


async def test_what_a_state_is_remembered_by_stays_with_the_process(store: Any) -> None:
    """What a save compares with is no part of the value: neither of its JSON nor of the record."""
    session = store.session("s")
    state = await session.save_state(a_state())
    assert set(json.loads(state.model_dump_json())) == set(AgentState.model_fields)
    assert "_saved" not in repr(state)
    again = AgentState.model_validate_json(state.model_dump_json())
    await refused(session, again, "go on from load_state()")


# Subclasses


class Mood(enum.StrEnum):
    """A text of a program."""

    CALM = "calm"
    HURRIED = "hurried"


@dataclasses.dataclass
class Offer:
    """A part of a state."""

    city: str
    price: Decimal


class Booking(AgentState):
    """A state with fields of its own, among them what JSON does not know."""

    mood: Mood = Mood.CALM
    until: datetime | None = datetime(2026, 5, 1, tzinfo=UTC)
    offers: list[Offer] = Field(default_factory=list)


async def test_a_subclass_with_fields_of_its_own_comes_back(store: Any) -> None:
    session = store.session("s")
    state = Booking.from_user_input("Oslo?", "s").model_copy(update={"mood": Mood.HURRIED, "until": None})
    state.memory.note("k", 1)
    state = await session.save_state(state)
    state.offers.append(Offer("Oslo", Decimal("12.50")))
    state = await session.save_state(state.to_executing())
    assert (await last_change(session)).set.keys() == {
        "agent.own.offers", "agent.iteration", "agent.updated_at"
    }  # fmt: skip
    found = await session.load_state(Booking)
    assert type(found) is Booking
    assert found == state
    assert (found.mood, found.until, found.offers) == (Mood.HURRIED, None, [Offer("Oslo", Decimal("12.50"))])
    plain = await session.load_state()
    assert type(plain) is AgentState
    await session.save_state(plain.to_reflecting())
    assert (await session.load_state(Booking)).offers == found.offers, "a plain state leaves them alone"
    for wrong in (dict, "Booking"):
        with pytest.raises(InvalidValue, match="AgentState"):
            await session.load_state(wrong)
    await refused(session, Offer("Oslo", Decimal(1)), "holds a state already")


async def test_a_workflow_runs_with_states_of_a_subclass(store: Any) -> None:
    def plan(state: Booking, turn: Any) -> AgentState:
        assert type(state) is Booking
        state.offers.append(Offer("Oslo", Decimal(len(state.offers))))
        return state.to_executing() if len(state.offers) == 1 else state.to_done("2 offers")

    agent = Workflow({"planning": plan, "executing": lambda state, turn: state.to_planning()}, state=Booking)
    await store.run(agent, "Oslo?", session_id="s")
    found = await store.session("s").load_state(Booking)
    assert (found.phase, [offer.price for offer in found.offers]) == ("done", [Decimal(0), Decimal(1)])
    wrong = Workflow({"planning": lambda state, turn: AgentState(session_id="t")}, state=Booking)
    with pytest.raises(InvalidValue, match="not the next Booking"):
        await store.run(wrong, "Oslo?", session_id="t")
