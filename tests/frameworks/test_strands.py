"""Strands: what any of its repositories does, ours beside its files; what only ours does; and agents on it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from following import plain, shown
from frameworks.examples import run_examples
from frameworks.strands_crew import Scripted, Words, agent, stream
from strands import Agent, tool
from strands.multiagent import GraphBuilder
from strands.session import FileSessionManager
from strands.types.exceptions import SessionException
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

from distributed_state import AsyncStateStore, Deleted, StateStore, formats
from distributed_state.adapters.strands import DistributedSessionManager

pytestmark = pytest.mark.only(api="asyncio")


KINDS = ("ours", "theirs")


async def made(kind: str, opener: Any, tmp_path: Path) -> Any:
    """A manager of session s."""
    return DistributedSessionManager("s", await opener()) if kind == "ours" else FileSessionManager("s", f"{tmp_path}")


def an_agent(id: str = "a", **state: Any) -> SessionAgent:
    return SessionAgent(agent_id=id, state=state, conversation_manager_state={"removed_message_count": 0})


def a_message(id: int, *content: Any, role: str = "user", **more: Any) -> SessionMessage:
    blocks: Any = [*content] or [{"text": f"m{id}"}]
    return SessionMessage.from_message({"role": role, "content": blocks, **more}, id)  # type: ignore[misc, typeddict-item]


BLOCKS: list[Any] = [
    {"text": "Where to?"}, {"text": ""}, {"image": {"format": "png", "source": {"bytes": b"\x00\xff"}}},
    {"toolUse": {"toolUseId": "c1", "name": "book", "input": {"type": "x", "n": 1.5}}},
    {"toolUse": {"toolUseId": "c2", "name": "book", "input": {}, "type": "odd", "reasoningSignature": "z"}},
    {"toolResult": {"toolUseId": "c1", "status": "error", "content": [{"text": "no"}, {"json": {"text": [None]}}]}},
    {"reasoningContent": {"reasoningText": {"text": "hm", "signature": "s"}}}, {"cachePoint": {"type": "default"}},
    {"text": "with more", "citations": []},
]  # fmt: skip


@pytest.mark.parametrize("content", [[each] for each in BLOCKS] + [BLOCKS, []], ids=range(len(BLOCKS) + 2))
@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_is_read_as_it_was_written(kind: str, content: list[Any], opener: Any, tmp_path: Path) -> None:
    manager = await made(kind, opener, tmp_path)
    manager.create_agent("s", an_agent())
    given = a_message(0, *content, metadata={"custom": {"k": [1]}}, tracking_id="t1")
    given.message["content"] = content
    manager.create_message("s", "a", given)
    assert manager.list_messages("s", "a") == [manager.read_message("s", "a", 0)] == [given]
    given.redact_message = {"role": "user", "content": [{"text": "gone"}]}
    manager.update_message("s", "a", given)
    assert manager.list_messages("s", "a") == [given]


@pytest.mark.parametrize("kind", KINDS)
async def test_sessions_agents_and_messages_are_created_read_and_updated(
    kind: str, opener: Any, tmp_path: Path
) -> None:
    manager = await made(kind, opener, tmp_path)
    assert manager.read_session("nowhere") is None
    assert manager.read_session("s").session_type == SessionType.AGENT
    with pytest.raises(SessionException, match="already exists"):
        manager.create_session(Session("s", SessionType.AGENT))
    assert manager.read_agent("s", "a") is None
    with pytest.raises(SessionException, match="does not exist"):
        manager.update_agent("s", an_agent())
    with pytest.raises(SessionException):
        manager.list_messages("s", "a")
    created = an_agent(k=1, other={"deep": [None]})
    manager.create_agent("s", created)
    assert manager.read_agent("s", "a") == created
    changed = an_agent(k=True, new="x")
    manager.update_agent("s", changed)
    assert manager.read_agent("s", "a") == changed
    assert changed.created_at == created.created_at
    assert manager.read_agent("s", "a").state["k"] is True
    assert manager.list_messages("s", "a") == []
    messages = [a_message(number) for number in range(5)]
    for each in messages:
        manager.create_message("s", "a", each)
    assert manager.list_messages("s", "a", limit=2, offset=1) == messages[1:3]
    assert manager.list_messages("s", "a", offset=9) == []
    assert manager.read_message("s", "a", 9) is None
    with pytest.raises(SessionException, match="does not exist"):
        manager.update_message("s", "a", a_message(9))
    edited = a_message(1, {"text": "edited"})
    manager.update_message("s", "a", edited)
    assert edited.created_at == messages[1].created_at
    assert manager.list_messages("s", "a") == [messages[0], edited, *messages[2:]]


@pytest.mark.parametrize("kind", KINDS)
async def test_agents_of_one_session_have_messages_and_state_of_their_own(
    kind: str, opener: Any, tmp_path: Path
) -> None:
    manager = await made(kind, opener, tmp_path)
    for id in "a", "b":
        manager.create_agent("s", an_agent(id, of=id))
    for number in range(3):
        manager.create_message("s", "a", a_message(number))
        manager.create_message("s", "b", a_message(number, role="assistant"))
    manager.update_message("s", "a", a_message(1, {"text": "edited"}))
    assert [each.message["content"][0]["text"] for each in manager.list_messages("s", "a")] == ["m0", "edited", "m2"]
    assert [each.message_id for each in manager.list_messages("s", "b", offset=1)] == [1, 2]
    assert {each.message["role"] for each in manager.list_messages("s", "b")} == {"assistant"}
    assert manager.read_agent("s", "b").state == {"of": "b"}


@pytest.mark.parametrize("kind", KINDS)
async def test_the_state_of_a_graph_is_created_read_and_updated(kind: str, opener: Any, tmp_path: Path) -> None:
    manager = await made(kind, opener, tmp_path)
    graph = SimpleNamespace(id="g", serialize_state=lambda: {"state": 1})
    assert manager.read_multi_agent("s", "g") is None
    with pytest.raises(SessionException, match="does not exist"):
        manager.update_multi_agent("s", graph)
    manager.create_multi_agent("s", graph)
    assert manager.read_multi_agent("s", "g") == {"state": 1}
    graph.serialize_state = lambda: {"state": (2, "x")}
    manager.update_multi_agent("s", graph)
    assert manager.read_multi_agent("s", "g") == {"state": [2, "x"]}


# What only ours does


async def test_what_needs_a_session_or_an_agent_is_refused_without_one(store: Any) -> None:
    ours = DistributedSessionManager("s", store)
    with pytest.raises(SessionException, match="the session does not exist"):
        ours.create_agent("nowhere", an_agent())
    with pytest.raises(SessionException, match="does not exist"):
        ours.create_multi_agent("nowhere", SimpleNamespace(id="g", serialize_state=dict))  # type: ignore[arg-type]
    with pytest.raises(SessionException, match="the agent does not exist"):
        ours.create_message("s", "nobody", a_message(0))
    ours.create_agent("s", an_agent())
    with pytest.raises(SessionException, match="already exists"):
        ours.create_agent("s", an_agent())
    assert not await store.session("nowhere").exists()


@pytest.mark.replicas
async def test_of_two_workers_that_begin_a_session_at_once_both_have_it(opener: Any, monkeypatch: Any) -> None:
    one, other = await opener(), await opener()
    read = DistributedSessionManager.read_session

    def late(self: Any, id: str, **more: Any) -> Any:
        found = read(self, id)
        monkeypatch.setattr(DistributedSessionManager, "read_session", read)
        DistributedSessionManager(id, other)
        return found

    monkeypatch.setattr(DistributedSessionManager, "read_session", late)
    assert DistributedSessionManager("s", one).session.session_id == "s"


@pytest.mark.replicas
async def test_an_agent_whose_conversation_went_on_elsewhere_is_refused_and_overwrites_nothing(opener: Any) -> None:
    one, other = await opener(), await opener()
    first = agent(DistributedSessionManager("s", one), "one", "two", state={"city": "Oslo", "n": 1})
    await first.invoke_async("hello")
    late = agent(DistributedSessionManager("s", other), "never")
    first.state.set("n", 2)
    first.state.delete("city")
    await first.invoke_async("and on")
    late.state.set("mine", True)
    with pytest.raises(SessionException, match="another worker has continued its conversation"):
        await late.invoke_async("lost?")
    again = agent(DistributedSessionManager("s", other), "three")
    assert [each["content"][0]["text"] for each in again.messages] == ["hello", "one", "and on", "two"]
    assert again.state.get() == {"n": 2, "mine": True}


async def test_a_message_that_is_replaced_while_another_is_added_loses_neither(store: Any, monkeypatch: Any) -> None:
    ours = DistributedSessionManager("s", store)
    ours.create_agent("s", an_agent())
    ours.create_message("s", "a", a_message(0))
    kind = type(store.aio.session("s"))
    replace = kind.replace_messages

    async def late(self: Any, *given: Any, **more: Any) -> Any:
        monkeypatch.setattr(kind, "replace_messages", replace)
        ours.create_message("s", "a", a_message(1))
        return await replace(self, *given, **more)

    monkeypatch.setattr(kind, "replace_messages", late)
    ours.update_message("s", "a", a_message(0, {"text": "edited"}))
    assert [each.message["content"][0]["text"] for each in ours.list_messages("s", "a")] == ["edited", "m1"]


async def test_messages_are_in_the_packages_fields_for_its_other_parts(store: Any) -> None:
    call = {"name": "look_up", "input": {"turn": "1"}}
    await agent(DistributedSessionManager("s", store), call, "Oslo.").invoke_async("Where to?")
    session = store.session("s")
    assert formats.to_openai(await session.messages()) == [
        {"role": "user", "content": "Where to?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"turn": "1"}'}},
        ]},
        {"role": "tool", "content": "found 1", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Oslo."},
    ]  # fmt: skip
    assert len((await session.window(max_tokens=1000)).messages) == 4
    # Others' messages are not the agent's.
    await session.append({"role": "user", "content": "from elsewhere"})
    assert len(DistributedSessionManager("s", store).list_messages("s", "default")) == 4


async def test_a_rollback_takes_the_agent_back_and_a_fork_is_a_session_of_its_own(store: Any) -> None:
    first = agent(DistributedSessionManager("s", store), "one", "two")
    await first.invoke_async("hello")
    version = await store.session("s").version()
    await first.invoke_async("and on")
    await store.session("s").fork("f", version=version)
    await store.session("s").rollback(version=version)
    for id in "s", "f":
        back = agent(DistributedSessionManager(id, store), "three")
        await back.invoke_async("again")
        assert [each["content"][0]["text"] for each in back.messages] == ["hello", "one", "again", "three"]


async def test_an_erased_session_begins_again_but_not_for_an_agent_that_knew_it(store: Any) -> None:
    known = agent(DistributedSessionManager("s", store, user="ada"), "one", "two")
    await known.invoke_async("hello")
    await store.forget("ada")
    with pytest.raises(Deleted):
        await known.invoke_async("and on")
    assert agent(DistributedSessionManager("s", store, user="ada"), "three").messages == []


async def test_an_interrupt_is_answered_at_another_worker(store: Any) -> None:
    @tool(context=True)
    def book(tool_context: Any, city: str) -> str:
        """Book a city."""
        return f"{city}: {tool_context.interrupt('sure', reason=city)}"

    def worker(*answers: Any) -> Agent:
        manager = DistributedSessionManager("s", store)
        return Agent(Scripted(*answers), tools=[book], session_manager=manager, callback_handler=None)

    asked = await worker({"name": "book", "input": {"city": "Oslo"}}).invoke_async("Book!")
    assert asked.stop_reason == "interrupt"
    (interrupt,) = asked.interrupts
    answer = {"interruptResponse": {"interruptId": interrupt.id, "response": "yes"}}
    resumed = worker("Booked.")
    said = await resumed.invoke_async([answer])
    assert said.stop_reason == "end_turn"
    assert "Oslo: yes" in json.dumps(resumed.messages)


async def test_a_graph_continues_from_a_session(store: Any) -> None:
    def graph(*answers: str) -> Any:
        builder = GraphBuilder()
        for name, said in zip("ab", answers, strict=True):
            builder.add_node(Agent(Scripted(said), callback_handler=None), name)
        builder.add_edge("a", "b")
        builder.set_session_manager(DistributedSessionManager("s", store))
        builder.set_graph_id("g")
        builder.set_max_node_executions(10)
        return builder.build()

    await graph("one", "two").invoke_async("Go")
    found = DistributedSessionManager("s", store).read_multi_agent("s", "g")
    assert found is not None
    assert sorted(found["node_results"]) == ["a", "b"]


async def test_blocking_code_in_a_turn_and_in_a_lock(tmp_path: Path) -> None:
    with StateStore.open(archive=f"sqlite:///{tmp_path}/own.db") as store:
        with store.session("s").turn(request_id="r") as turn:
            turn.outcome = str(agent(DistributedSessionManager("s", store), "one")("hello"))
        with store.session("s").lock(wait=1):
            agent(DistributedSessionManager("s", store), "two")("and on")
        assert [each.content for each in store.session("s").messages()] == ["hello", "one", "and on", "two"]


async def test_a_write_that_fails_ends_the_run(opener: Any) -> None:
    store = await opener()
    ours = agent(DistributedSessionManager("s", store), "one")
    await store.close()
    with pytest.raises(Exception, match="closed"):
        await ours.invoke_async("hello")


async def test_a_stream_shows_text_deltas_and_messages() -> None:
    async with AsyncStateStore.open(archive="memory") as store:
        async with store.session("s").turn(request_id="r") as turn:
            call = {"name": "look_up", "input": {"turn": "1"}}
            speaker = agent(DistributedSessionManager("s", store), call, Words(["Oslo ", "it is."]))
            said = stream(turn, speaker.stream_async("Where to?"))
            events = [event async for event in said]
            turn.outcome = said.text
        delta, call, result, *text, last = plain(await shown(store.session("s"), "r"))[:-1]
    assert delta == {"type": "delta", "delta": {"toolUse": {"input": '{"turn": "1"}'}}}
    assert (call["type"], call["message"]["content"][0]["toolUse"]["name"]) == ("message", "look_up")
    assert "toolResult" in result["message"]["content"][0]
    assert text == ["Oslo ", "it is."]
    assert last["message"]["content"] == [{"text": said.text}]
    assert "result" in events[-1]


async def test_the_example_runs(tmp_path: Path) -> None:
    with StateStore.open(archive=f"sqlite:///{tmp_path}/own.db") as store:
        names = {
            "store": store,
            "Agent": Agent,
            "model": Scripted("Oslo."),
            "DistributedSessionManager": DistributedSessionManager,
        }
        assert await run_examples(DistributedSessionManager, **names) == 1
    async with AsyncStateStore.open(archive="memory") as waiting:
        assert (
            await run_examples(stream, **{**names, "store": waiting, "model": Scripted("Oslo."), "stream": stream}) == 1
        )  # type: ignore[arg-type]
