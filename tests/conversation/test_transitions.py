"""The phase of a session moves along a table. Law: of two who leave the same phase, one gets where it wanted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from below import tiers, until
from controls import sabotage
from counting import asked

from distributed_state import (
    REASONING_MACHINE,
    TASK_MACHINE,
    AgentPhase,
    Conflict,
    Deleted,
    InvalidTransition,
    InvalidValue,
    StateMachine,
    Workflow,
)
from distributed_state.tiers import read as read_path
from distributed_state.warm.scripts import COMMIT

CHECK = "if mismatch then return"
TELL = "if not listening or listening[2] > listening[4] then"
ORDER = StateMachine(
    {("cart", "pay"): "paid", ("cart", "drop"): "dropped", ("paid", "ship"): "shipped"}, initial="cart", name="order"
)


async def kept_in_hot(store: Any, session: Any, phase: str | None) -> None:
    """From here on the phase is answered without asking the server."""
    hot = tiers(store).hot

    async def hit() -> bool:
        before = hot.hits
        assert await session.phase() == phase
        return hot.hits > before

    await until(hit)


async def test_a_session_walks_through_its_phases(store: Any) -> None:
    session = store.session("s")
    assert await session.phase() is None
    walk = [("new_task", "planning"), ("plan_ready", "executing"), ("reflect", "reflecting"), ("replan", "planning")]
    for event, phase in walk:
        assert await session.transition(event) == phase
        assert await session.phase() == phase
    assert [change.phase for change in await session.history()] == [phase for _, phase in walk]
    assert {change.kind for change in await session.history()} == {"transition"}


async def test_fields_and_messages_change_with_the_phase_in_one_commit(store: Any) -> None:
    session = store.session("s")
    said = {"role": "user", "content": "Book a flight"}
    assert await session.transition("new_task", set={"goal": "flight"}, append=iter([said])) == "planning"
    assert await session.version() == 1
    assert await session.get("goal") == "flight"
    assert [each.content for each in await session.messages()] == ["Book a flight"]


async def test_what_is_not_allowed_changes_nothing(store: Any) -> None:
    session = store.session("s")
    with pytest.raises(InvalidTransition) as caught:
        await session.transition("plan_ready", set={"a": 1})
    assert (caught.value.phase, caught.value.event) == ("idle", "plan_ready")
    assert await session.version(fresh=True) == 0
    await session.transition("new_task")
    for refused, error in (
        (lambda: session.transition("task_complete", machine=TASK_MACHINE), InvalidTransition),
        (lambda: session.transition(None), InvalidValue),
        (lambda: session.transition(["fail"]), InvalidValue),
        (lambda: session.transition("fail", machine={("planning", "fail"): "error"}), InvalidValue),
        (lambda: session.transition("fail", set={"a": {1, 2}}), InvalidValue),
        (lambda: session.transition("fail", set=[("a", 1)]), InvalidValue),
        (lambda: session.transition("fail", append=[{"role": "robot"}]), InvalidValue),
    ):
        with pytest.raises(error):
            await refused()
    assert await session.version(fresh=True) == 1
    assert await session.phase(fresh=True) == "planning"


async def test_an_agent_may_bring_its_own_table(store: Any) -> None:
    session = store.session("s")
    assert await session.transition("pay", machine=ORDER) == "paid"
    with pytest.raises(InvalidTransition, match=r"order: event 'drop' is not allowed in phase 'paid'.*: ship"):
        await session.transition("drop", machine=ORDER)
    with pytest.raises(InvalidTransition, match="allowed there: none"):
        await session.transition("plan_ready")
    assert await session.transition("ship", machine=ORDER) == "shipped"


async def test_a_deleted_session_has_no_phase_to_leave(store: Any) -> None:
    session = store.session("s")
    await session.transition("new_task")
    await store.delete("s")
    for event in ("new_task", "plan_ready"):
        with pytest.raises(Deleted):
            await session.transition(event)


@pytest.mark.only(warm="real")
async def test_a_transition_from_a_known_phase_is_one_round_trip(opener: Any) -> None:
    store = await opener(archiver=False)
    session = store.session("s")
    await session.transition("new_task")
    await kept_in_hot(store, session, "planning")
    with asked(store) as seen:
        await session.transition("plan_ready", set={"a": 1})
    [sent] = seen.sent
    assert COMMIT.sha.decode() in sent


# Races


async def both(opener: Any) -> list[Any]:
    stores = [await opener(), await opener()]
    sessions = [store.session("s") for store in stores]
    await sessions[0].set("a", 1)
    return sessions


async def race(sessions: list[Any], events: tuple[str, str], machine: StateMachine = TASK_MACHINE) -> list[Any]:
    """Two replicas that know the phase to be `executing` fire at the same moment; what came of each."""
    await sessions[0].write(phase="executing")
    for session in sessions:
        assert await session.phase(fresh=True) == "executing"
    calls = [session.transition(event, machine=machine) for session, event in zip(sessions, events, strict=True)]
    return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.replicas
async def test_of_two_conflicting_events_exactly_one_wins(opener: Any) -> None:
    sessions = await both(opener)
    led_to = {"task_complete": "done", "needs_input": "waiting_feedback"}
    for turn in range(60):
        events = ("task_complete", "needs_input") if turn % 2 else ("needs_input", "task_complete")
        outcomes = await race(sessions, events)
        [won] = [each for each in outcomes if isinstance(each, str)]
        [lost] = [each for each in outcomes if isinstance(each, Exception)]
        assert won == led_to[events[outcomes.index(won)]]
        assert isinstance(lost, InvalidTransition), lost
        assert (lost.phase, lost.event) == (won, events[outcomes.index(lost)])
        assert await sessions[0].phase(fresh=True) == won
    versions = [change.version for change in await sessions[0].history() if change.kind == "transition"]
    assert len(versions) == 60


@pytest.mark.replicas
async def test_without_the_check_in_the_commit_both_would_win(opener: Any) -> None:
    """The negative control of the test above."""
    sessions = await both(opener)
    with sabotage("commit", CHECK, "if mismatch and false then return"):
        for _ in range(60):
            outcomes = await race(sessions, ("task_complete", "needs_input"))
            if all(isinstance(each, str) for each in outcomes):
                return
    raise AssertionError("no race in 60 rounds")


@pytest.mark.replicas
async def test_an_event_that_still_fits_goes_on_from_where_the_other_left(opener: Any) -> None:
    sessions = await both(opener)
    for _ in range(30):
        outcomes = await race(sessions, ("reflect", "replan"), REASONING_MACHINE)
        # Planning does not lead to reflecting, but reflecting leads to planning.
        if "reflecting" in outcomes:
            assert outcomes == ["reflecting", "planning"]
        else:
            assert outcomes[1] == "planning"
            assert isinstance(outcomes[0], InvalidTransition)
        assert await sessions[0].phase(fresh=True) == "planning"


@pytest.mark.replicas
async def test_many_workers_take_a_session_once(opener: Any) -> None:
    """From no phase at all, which counts as the initial one and is expected to be absent."""
    stores = [await opener() for _ in range(3)]
    for number in range(15):
        sessions = [stores[each % 3].session(f"s{number}") for each in range(9)]
        calls = [session.transition("new_task") for session in sessions]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert outcomes.count("planning") == 1
        assert sum(isinstance(each, InvalidTransition) for each in outcomes) == 8, outcomes


# A hot phase that is behind


async def behind(opener: Any, moves: tuple[str, ...]) -> Any:
    """The session as held by a replica that did not hear of the last moves."""
    first, second = await opener(), await opener(max_staleness=60)
    mover, session = first.session("s"), second.session("s")
    await mover.transition("new_task")
    await kept_in_hot(second, session, "planning")
    with sabotage("commit", TELL, "if false then"):
        for event in moves:
            await mover.transition(event)
    assert await session.phase() == "planning", "hot is behind"
    return session


@pytest.mark.replicas
async def test_a_phase_that_hot_does_not_know_yet_does_not_refuse_an_event(opener: Any) -> None:
    session = await behind(opener, ("plan_ready",))
    assert await session.transition("reflect") == "reflecting"


@pytest.mark.replicas
async def test_without_asking_the_server_hot_would_refuse_it(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    session = await behind(opener, ("plan_ready",))
    read = read_path.read
    monkeypatch.setattr(read_path, "read", lambda tiers, keys, fresh=False: read(tiers, keys))
    with pytest.raises(InvalidTransition) as caught:
        await session.transition("reflect")
    assert caught.value.phase == "planning"


@pytest.mark.replicas
async def test_a_phase_that_hot_still_believes_in_allows_nothing_that_the_true_one_does_not(opener: Any) -> None:
    session = await behind(opener, ("plan_ready", "reflect"))
    with pytest.raises(InvalidTransition) as caught:
        await session.transition("plan_ready")
    assert caught.value.phase == "reflecting"
    assert await session.phase(fresh=True) == "reflecting"


@pytest.mark.replicas
async def test_an_event_allowed_in_both_phases_is_judged_by_the_true_one(opener: Any) -> None:
    session = await behind(opener, ("plan_ready", "reflect"))
    assert await session.transition("needs_input") == "waiting_feedback"
    assert [change.version for change in await session.history()] == [1, 2, 3, 4]


async def test_a_phase_written_past_the_table_is_the_one_found(store: Any) -> None:
    session = store.session("s")
    await session.write(phase="negotiating\ud800")
    with pytest.raises(InvalidTransition) as caught:
        await session.transition("new_task")
    assert caught.value.phase == "negotiating\ud800"
    with pytest.raises(Conflict):
        await session.write(phase="idle", expect_phase="planning")


async def test_a_phase_may_be_given_by_its_name_in_agent_phase(store: Any) -> None:
    session = store.session("s")
    await session.write(set={"n": 1}, phase=AgentPhase.PLANNING)
    await session.write(set={"n": 2}, phase=AgentPhase.EXECUTING, expect_phase=AgentPhase.PLANNING)
    assert await session.phase(fresh=True) == AgentPhase.EXECUTING
    async with session.turn() as turn:
        turn.move_to(AgentPhase.IDLE)
        assert turn.transition("new_task") == AgentPhase.PLANNING

    def plan(state: Any, turn: Any) -> Any:
        return state.to_done("42")

    state = await store.run(Workflow({AgentPhase.PLANNING: plan}), "6 * 7?", session_id="w")
    assert state.phase == AgentPhase.DONE
    assert type(await store.session("w").phase(fresh=True)) is str
    with pytest.raises(ValueError, match="allowed there: none"):
        await session.transition("fly", machine=StateMachine({("a", "b"): "c"}, initial="a"))
