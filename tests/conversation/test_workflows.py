"""Agents that go on where their worker died. Law: each step is committed once, whoever runs it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from below import keys_of, own_server, tiers, until
from counting import round_trips
from three_steps import STEPS, plan, work

from distributed_state import (
    AgentState,
    AsyncStateStore,
    DurabilityUnknown,
    Fenced,
    InvalidValue,
    NotFound,
    Stopped,
    ToolCall,
    WarmUnavailable,
    Workflow,
    tool,
)
from distributed_state.tiers import commit as write_path


@tool
def tick(state: Any, user_state: Any) -> int:
    """Count, for the session and for the user."""
    state["ticks"] = state.get("ticks", 0) + 1
    user_state["ticks"] = user_state.get("ticks", 0) + 1
    return int(state["ticks"])


AGENT = Workflow(STEPS)


async def test_an_agent_runs_to_its_answer(store: Any) -> None:
    state = await store.run(AGENT, "look", session_id="s", user="u1")
    assert (state.phase, state.final_answer, state.memory.goal) == ("done", "saw 3", "look")
    assert [call.result for call in state.memory.tool_calls] == ["s/1", "s/2", "s/3"]
    session = store.session("s")
    assert await session.load_state() == state
    assert await session.phase() == "done"
    assert [message.role for message in await session.messages()] == ["user", *["tool"] * 3, "assistant"]
    # One commit to begin, then one a step.
    assert await session.version() == 1 + 6
    assert [change.kind for change in await session.history()] == ["turn"] * 7
    assert (await store.sessions(user="u1"))[0].id == "s"


async def test_without_an_id_a_session_starts_fresh(store: Any) -> None:
    first, second = [await store.run(AGENT, "look") for _ in range(2)]
    assert first.session_id != second.session_id
    assert first.phase == second.phase == "done"


async def test_the_next_task_goes_on_in_the_same_conversation(store: Any) -> None:
    await store.session("s").append({"role": "system", "content": "Be kind."})
    await store.run(AGENT, "one", session_id="s")
    state = await store.run(AGENT, "two", session_id="s")
    assert (state.memory.goal, state.final_answer, len(state.memory.tool_calls)) == ("two", "saw 3", 3)
    contents = [message.content for message in state.history if message.role in ("system", "user")]
    assert contents == ["Be kind.", "one", "two"]


async def test_a_new_request_begins_again_after_a_failed_task(store: Any) -> None:
    failing = Workflow({**STEPS, "executing": lambda state, turn: state.to_error("no network")})
    assert (await store.run(failing, "one", session_id="s")).phase == "error"
    state = await store.run(AGENT, "two", session_id="s")
    assert (state.phase, state.final_answer, state.error_message) == ("done", "saw 3", None)
    contents = [message.content for message in await store.session("s").messages() if message.role != "tool"]
    assert contents[:3] == ["one", "[Error] no network", "two"]


async def test_a_step_may_change_its_memory_in_place(store: Any) -> None:
    def working(state: AgentState, turn: Any) -> AgentState:
        following = state.to_reflecting()
        state.memory.note("before", 1)
        state.memory.record_tool_call(ToolCall(tool_name="look", result="blue"))
        following.memory.note("after", 2)
        return following

    await store.run(Workflow({**STEPS, "executing": working}), "look", session_id="s")
    memory = (await store.session("s").load_state()).memory
    assert (memory.notes, [call.result for call in memory.tool_calls]) == ({"after": 2, "before": 1}, ["blue"])


async def test_what_a_failed_step_did_to_its_memory_is_not_kept(store: Any) -> None:
    def failing(state: AgentState, turn: Any) -> AgentState:
        state.memory.note("spoiled", True)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await store.run(Workflow({**STEPS, "executing": failing}), "look", session_id="s")
    assert (await store.run(AGENT, None, session_id="s")).memory.notes == {}


async def test_a_request_sent_twice_begins_one_task(store: Any) -> None:
    for _ in range(3):
        state = await store.run(AGENT, "look", session_id="s", request_id="r-1")
        assert state.final_answer == "saw 3"
    assert len([message for message in state.history if message.role == "user"]) == 1


async def test_a_step_that_fails_is_run_again_and_the_others_are_not(store: Any) -> None:
    ran: list[str] = []

    def failing(state: AgentState, turn: Any) -> AgentState:
        ran.append(turn.request_id)
        if len(ran) == 2:
            turn["spoiled"] = True
            raise ZeroDivisionError
        return work(state, turn)

    agent = Workflow({**STEPS, "executing": failing})
    with pytest.raises(ZeroDivisionError):
        await store.run(agent, "look", session_id="s")
    assert await store.session("s").phase(fresh=True) == "executing"
    state = await store.run(agent, None, session_id="s")
    assert state.final_answer == "saw 3"
    assert ran == ["s/1", "s/2", "s/2", "s/3", "s/4"], "the same name for the step that is repeated"
    assert not await store.session("s").has("spoiled", fresh=True)


async def test_the_same_input_goes_on_and_another_one_is_told(store: Any) -> None:
    stop = True

    def stopping(state: AgentState, turn: Any) -> AgentState:
        if stop and len(state.memory.tool_calls) == 1:
            raise ZeroDivisionError
        return work(state, turn)

    agent = Workflow({**STEPS, "executing": stopping})
    for text in ("look", "look", "and hurry"):
        with pytest.raises(ZeroDivisionError):
            await store.run(agent, text, session_id="s")
    stop = False
    state = await store.run(agent, session_id="s")
    assert [message.content for message in state.history if message.role == "user"] == ["look", "and hurry"]
    assert (state.memory.goal, state.final_answer) == ("look", "saw 3")


async def test_an_agent_waits_for_its_user(store: Any) -> None:
    def ask(state: AgentState, turn: Any) -> AgentState:
        answers = [message for message in state.history if message.role == "user"]
        if len(answers) == 1:
            return state.with_messages({"role": "assistant", "content": "Where to?"}).to_waiting()
        return state.to_done(f"To {answers[-1].content}!")

    agent = Workflow({"planning": lambda state, turn: state.to_executing(), "executing": ask})
    state = await store.run(agent, "book", session_id="s")
    assert (state.phase, state.history[-1].content) == ("waiting_feedback", "Where to?")
    assert (await store.run(agent, session_id="s")).phase == "waiting_feedback"
    assert (await store.run(agent, "Oslo", session_id="s")).final_answer == "To Oslo!"


async def test_a_task_has_a_limit_of_steps(store: Any) -> None:
    agent = Workflow(
        {"planning": lambda state, turn: state.to_executing(), "executing": lambda state, turn: state.to_planning()},
        max_steps=5,
    )
    state = await store.run(agent, "forever", session_id="s")
    assert (state.phase, state.error_message) == ("error", "no answer after 5 steps")
    assert await store.session("s").version() == 1 + 5 + 1
    state = await store.run(AGENT, "more", session_id="s")
    assert state.final_answer == "saw 3", "the steps of the failed task do not count"


async def test_the_steps_after_each_input_count_by_themselves(store: Any) -> None:
    """A conversation that never ends is not a task that takes too many steps."""

    def talk(state: AgentState, turn: Any) -> AgentState:
        return state.with_messages({"role": "assistant", "content": "And?"}).to_waiting()

    agent = Workflow({"planning": talk, "executing": talk}, max_steps=2)
    for number in range(5):
        assert (await store.run(agent, str(number), session_id="s")).phase == "waiting_feedback"


async def test_a_step_that_never_ends_is_given_up(store: Any) -> None:
    async def endless(turn: Any) -> None:
        await until(lambda: turn.lost, 20)

    entered: list[Any] = []

    def slow(state: AgentState, turn: Any) -> Any:
        entered.append(turn)
        deadline = 400
        while not turn.lost and deadline:
            deadline -= 1
            threading_sleep(0.01)
        return work(state, turn)

    async def slow_too(state: AgentState, turn: Any) -> Any:
        entered.append(turn)
        await endless(turn)
        return work(state, turn)

    blocking = type(store).__name__ == "Blocking"
    agent = Workflow({**STEPS, "executing": slow if blocking else slow_too}, step_timeout=0.2)
    with pytest.raises(Fenced):
        await store.run(agent, "look", session_id="s")
    assert len(entered) == 1
    state = await store.run(AGENT, session_id="s")
    assert state.final_answer == "saw 3"


def threading_sleep(seconds: float) -> None:
    import time

    time.sleep(seconds)


async def test_tools_of_a_step_count_once(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the worker dies between the two commits of a step."""
    blocking = type(store).__name__ == "Blocking"

    def blocking_step(state: AgentState, turn: Any) -> AgentState:
        turn.call(tick)
        return work(state, turn)

    async def step(state: AgentState, turn: Any) -> AgentState:
        await turn.call(tick)
        return work(state, turn)

    agent = Workflow({**STEPS, "executing": blocking_step if blocking else step})
    commit = write_path.commit
    died: list[int] = []

    async def half(tiers: Any, keys: Any, draft: Any, **more: Any) -> Any:
        if keys.ref.scope == "user" and len(died) < 3:
            died.append(1)
            raise WarmUnavailable("the worker died here")
        return await commit(tiers, keys, draft, **more)

    monkeypatch.setattr(write_path, "commit", half)
    # The step is applied; the next one, which takes its place, cannot begin before it is complete.
    for expected in DurabilityUnknown, WarmUnavailable, WarmUnavailable:
        with pytest.raises(expected):
            await store.run(agent, "look", session_id="s", user="u1")
    state = await store.run(agent, "look", session_id="s", user="u1")
    assert state.final_answer == "saw 3"
    assert await store.session("s").get("ticks", fresh=True) == 4
    assert await store.user("u1").get("ticks", fresh=True) == 4


@pytest.mark.replicas
async def test_workers_that_run_one_session_share_its_steps(opener: Any) -> None:
    replicas = [await opener() for _ in range(3)]
    for number in range(5):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(store.run(AGENT, "look", session_id=f"s{number}")) for store in replicas]
        states = [task.result() for task in tasks]
        assert all(state.phase == "done" for state in states)
        session = replicas[0].session(f"s{number}")
        calls = (await session.load_state()).memory.tool_calls
        assert [call.arguments["at"] for call in calls] == ["a", "b", "c"], "no step twice, none left out"


@pytest.mark.only(warm="single")
async def test_a_step_is_two_round_trips(opener: Any) -> None:
    with own_server(opener) as server:
        store = await opener(url=server.url, max_staleness=0, archiver=False, beat=0)
        await store.run(AGENT, "look", session_id="s")
        with round_trips(store) as trips:
            await store.run(AGENT, "look again", session_id="s")
        assert trips == [7 * 2]
        await opener.close()


async def test_bad_workflows_are_refused(store: Any) -> None:
    for steps in ({}, {"nowhere": plan}, {"done": plan}, {"planning": 5}, None):
        with pytest.raises(InvalidValue):
            Workflow(steps)  # type: ignore[arg-type]
    for wrong in ({"max_steps": 0}, {"max_steps": "5"}, {"step_timeout": 0}):
        with pytest.raises(InvalidValue):
            Workflow(STEPS, **wrong)
    with pytest.raises(NotFound):
        await store.run(AGENT, session_id="nobody")
    for workflow, text in ((None, "look"), (AGENT, 5)):
        with pytest.raises(InvalidValue):
            await store.run(workflow, text, session_id="s")
    wrong_steps = (
        lambda state, turn: None,
        lambda state, turn: turn.append({"role": "user", "content": "x"}) or state.to_executing(),
        lambda state, turn: turn.move_to("executing") or state.to_executing(),
    )
    for at, step in enumerate(wrong_steps):
        with pytest.raises(InvalidValue):
            await store.run(Workflow({"planning": step}), "look", session_id=f"s{at}")
        assert await store.session(f"s{at}").version(fresh=True) == 1
    with pytest.raises(InvalidValue, match="executing"):
        await store.run(Workflow({"planning": plan}), "look", session_id="half")
    assert keys_of(store, "s")


@pytest.mark.only(api="asyncio")
async def test_steps_may_be_coroutines(store: Any) -> None:
    async def later(state: AgentState, turn: Any) -> AgentState:
        await asyncio.sleep(0)
        return plan(state, turn)

    assert (await store.run(Workflow({**STEPS, "planning": later}), "look")).final_answer == "saw 3"


@pytest.mark.only(api="blocking")
async def test_blocking_code_has_plain_steps(store: Any) -> None:
    async def later(state: AgentState, turn: Any) -> AgentState:
        return plan(state, turn)

    with pytest.raises(InvalidValue, match="asyncio"):
        await store.run(Workflow({**STEPS, "planning": later}), "look")


async def test_a_step_cannot_lead_into_a_phase_that_nobody_knows(store: Any) -> None:
    """Saved once, it would be the end of the session's work."""
    lost = Workflow({**STEPS, "planning": lambda state, turn: state.model_copy(update={"phase": "nowhere"})})
    with pytest.raises(InvalidValue, match="nowhere"):
        await store.run(lost, "look", session_id="s")
    assert (await store.run(AGENT, None, session_id="s")).phase == "done"
    for bad in ("1", 0, True, float("nan")):
        with pytest.raises(InvalidValue, match="step_timeout"):
            Workflow(STEPS, step_timeout=bad)


@pytest.mark.parametrize("keep", [False, True])
async def test_a_stop_ends_a_run_in_the_middle_of_a_step_and_before_the_next_one(store: Any, keep: bool) -> None:
    """Nothing of the step is written, unless it keeps what it has; then no other step begins."""
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work_until_stopped(state: AgentState, turn: Any) -> AgentState:
        loop.call_soon_threadsafe(began.set)
        try:
            with turn.stoppable():
                while True:
                    time.sleep(0.01)
                    turn.stream(".")
        except Stopped:
            if not keep:
                raise
        return state.to_reflecting()

    async def await_until_stopped(state: AgentState, turn: Any) -> AgentState:
        began.set()
        try:
            async with turn.stoppable():
                await asyncio.sleep(30)
        except Stopped:
            if not keep:
                raise
        return state.to_reflecting()

    step = await_until_stopped if isinstance(store, AsyncStateStore) else work_until_stopped
    agent = Workflow({**STEPS, "executing": step})
    run = asyncio.create_task(store.run(agent, "look", session_id="s", request_id="r"))
    await began.wait()
    result = await store.session("s").stop("r", reason="enough")
    assert result.state == "stopped"
    with pytest.raises(Stopped, match="enough"):
        await run
    state = await store.session("s").load_state()
    assert state.phase == ("reflecting" if keep else "executing")
    if keep:
        assert (await store.run(AGENT, None, session_id="s")).phase == "done", "it can be continued"


async def test_a_stop_reaches_a_run_whose_steps_are_short(store: Any) -> None:
    def again(state: AgentState, turn: Any) -> AgentState:
        return state.with_memory(state.memory.plan("a"))

    agent = Workflow({**STEPS, "executing": again}, max_steps=100_000)
    run = asyncio.create_task(store.run(agent, "look", session_id="s", request_id="r"))
    session = store.session("s")
    await until(lambda: tiers(store).hot.entries.get("session:s"))
    async with asyncio.timeout(20):
        while not run.done():
            await session.stop("r")
        with pytest.raises(Stopped):
            await run
