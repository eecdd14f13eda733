"""Microsoft Agent Framework: what any of its storages does, ours beside those that it brings; and what only ours does.

The framework's source archive has no tests, so its contract stands here, run on both in one run.
"""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from agent_framework import (
    AgentSession,
    Content,
    Executor,
    FileCheckpointStorage,
    FileHistoryProvider,
    FileSessionStore,
    InMemoryCheckpointStorage,
    InMemoryHistoryProvider,
    Message,
    SessionStore,
    WorkflowBuilder,
    WorkflowCheckpoint,
    WorkflowCheckpointException,
    WorkflowContext,
    handler,
    response_handler,
)
from frameworks.agent_framework_crew import agent

from distributed_state import Deleted, Fenced, InvalidValue
from distributed_state.adapters.agent_framework import (
    DistributedCheckpointStorage,
    DistributedHistoryProvider,
    DistributedSessionStore,
)

pytestmark = [
    pytest.mark.only(api="asyncio"),
    pytest.mark.filterwarnings("ignore:.* is experimental and may change"),
]

CONTENTS = [
    Content.from_text("Oslo \x00\ud800 …"),
    Content.from_function_call(call_id="c", name="look_up", arguments={"city": "Oslo", "n": 1}),
    Content.from_function_result(call_id="c", result="12"),
    Content.from_uri(uri="https://host/a.png", media_type="image/png"),
    Content.from_data(data=b"\x00\xff", media_type="application/octet-stream"),
    Content.from_text_reasoning(text="hm"),
]
MESSAGES = [
    Message("system", ["Be short."]),
    Message("user", ["Where to?", "By train."], author_name="ada", message_id="m1"),
    Message("assistant", CONTENTS, additional_properties={"deep": [1, None, {"a": 1.5}]}),
    Message("tool", [CONTENTS[2]]),
    Message("critic", ["no"]),
    Message("assistant", []),
    Message("user", ["excluded"], additional_properties={"_excluded": True}),
]


def as_said(messages: list[Message]) -> list[Any]:
    return [message.to_dict() for message in messages]


# History


@pytest.mark.parametrize("kind", ["ours", "file", "in memory"])
async def test_messages_come_back_as_they_were_saved(kind: str, opener: Any, tmp_path: Path) -> None:
    history = {
        "ours": DistributedHistoryProvider(await opener()),
        "file": FileHistoryProvider(tmp_path),
        "in memory": InMemoryHistoryProvider(),
    }[kind]
    said = MESSAGES if kind == "ours" else [each for each in MESSAGES if "\ud800" not in each.text]  # not of UTF-8
    state: dict[str, Any] = {}
    assert await history.get_messages("s", state=state) == []
    await history.save_messages("s", said[:2], state=state)
    await history.save_messages("s", [], state=state)
    await history.save_messages("s", said[2:], state=state)
    assert as_said(await history.get_messages("s", state=state)) == as_said(said)
    assert await history.get_messages("another", state={}) == []


async def test_they_are_the_messages_of_the_stores_session(opener: Any) -> None:
    store = await opener()
    history = DistributedHistoryProvider(store, owner=lambda id: f"owner of {id}", skip_excluded=True)
    await history.save_messages("s", MESSAGES)
    record = store.session("agent-framework/s")
    assert await record.version() == 1
    stored = await record.messages()
    assert [each.role for each in stored][:4] == ["system", "user", "assistant", "tool"]
    assert stored[1].content == "Where to? By train."
    for said in {"role": "user", "content": "mine"}, {"type": "note", "text": "no message"}:
        await record.append(said)
    assert [each.text for each in await history.get_messages("s")][-2:] == ["", "mine"]
    for wrong in None, "", 7:
        with pytest.raises(InvalidValue, match="a session's id must be"):
            await history.get_messages(wrong)  # type: ignore[arg-type]
    await store.forget("owner of s")
    assert await history.get_messages("s") == []


async def test_numbers_that_are_not_of_json_are_refused(opener: Any) -> None:
    """A difference: the framework's files keep them."""
    history = DistributedHistoryProvider(await opener())
    with pytest.raises(InvalidValue, match="nan"):
        await history.save_messages("s", [Message("user", ["x"], additional_properties={"n": float("nan")})])


@pytest.mark.replicas
async def test_an_agent_goes_on_at_another_replica(opener: Any) -> None:
    agents = [agent(DistributedHistoryProvider(await opener())) for _ in range(2)]
    said = [
        (await agents[at % 2].run("hello", session=AgentSession(session_id="s"))).text for at in range(4)
    ]  # fmt: skip
    assert said == ["1 messages", "3 messages", "5 messages", "7 messages"]


async def test_a_run_whose_session_is_deleted_meanwhile_brings_nothing_back(opener: Any) -> None:
    store = await opener()
    history = DistributedHistoryProvider(store)
    for begun in False, True:
        session = AgentSession(session_id="s")
        if begun:
            await history.save_messages("s", MESSAGES[:1])
        state = session.state.setdefault(history.source_id, {})
        await history.get_messages("s", state=state)
        await history.save_messages("s", MESSAGES[:1], state=state)
        await store.erase("agent-framework/s")
        with pytest.raises(Deleted):
            await history.save_messages("s", MESSAGES[:1], state=state)
        assert session.to_dict()["state"], "what it knows can be stored with the session"
        await agent(history).run("hello", session=session)
        assert len(await history.get_messages("s")) == 2, "the next run begins it again"
        await store.erase("agent-framework/s")


# Sessions


@pytest.mark.parametrize("kind", ["ours", "file", "in memory"])
async def test_sessions_are_snapshots(kind: str, opener: Any, tmp_path: Path) -> None:
    sessions: Any = {
        "ours": DistributedSessionStore(await opener()),
        "file": FileSessionStore(tmp_path),
        "in memory": SessionStore(),
    }[kind]
    assert await sessions.get("s") is None
    session = AgentSession(session_id="other", service_session_id="svc")
    session.state |= {"": 0, "n": 1, "list": [1, {"a": None}], "message": Message("user", ["hi"])}
    await sessions.set("s", session)
    session.state["n"] = 2
    one, other = await sessions.get("s"), await sessions.get("s")
    assert (one.session_id, one.service_session_id, one.state["n"]) == ("other", "svc", 1), "an independent copy"
    assert one.state["message"].text == "hi"
    one.state["list"].append(3)
    assert other.state["list"] == [1, {"a": None}]
    one.state["n"] = True
    del one.state[""]
    await sessions.set("s", one)
    read = await sessions.get("s")
    assert (read.state["n"], read.state["list"], "" in read.state) == (True, [1, {"a": None}, 3], False)
    assert read.state["n"] is True
    await sessions.set("s", AgentSession(session_id="new"))
    assert (await sessions.get("s")).to_dict() == AgentSession(session_id="new").to_dict()
    await sessions.delete("s")
    await sessions.delete("s")
    assert await sessions.get("s") is None
    for call in (sessions.get, sessions.delete):
        with pytest.raises(ValueError, match="session_id"):
            await call("")
    await sessions.set("a/../b", session)
    assert (await sessions.get("a/../b")).state["n"] == 2


@pytest.mark.replicas
@pytest.mark.parametrize("kind", ["ours", "file"])
async def test_two_who_read_a_session_at_once_keep_what_both_did(kind: str, opener: Any, tmp_path: Path) -> None:
    """The framework's own: the second one undoes what the first one did."""
    made: Any = [FileSessionStore(tmp_path), FileSessionStore(tmp_path)]
    if kind == "ours":
        made = [DistributedSessionStore(await opener()), DistributedSessionStore(await opener())]
    await made[0].set("s", AgentSession(session_id="s"))
    one, other = [await each.get("s") for each in made]
    one.state["of one"] = 1
    other.state["of other"] = 2
    for sessions, session in zip(made, (one, other), strict=True):
        await sessions.set("s", session)
    expected = {"of other": 2} | ({"of one": 1} if kind == "ours" else {})
    assert (await made[0].get("s")).state == expected


@pytest.mark.replicas
async def test_two_who_begin_a_session_at_once_keep_what_both_did(opener: Any) -> None:
    made = [DistributedSessionStore(await opener()), DistributedSessionStore(await opener())]
    assert [await each.get("s") for each in made] == [None, None]
    for number, sessions in enumerate(made):
        session = AgentSession(session_id="s")
        session.state[f"of {number}"] = number
        await sessions.set("s", session)
    assert (await made[0].get("s")).state == {"of 0": 0, "of 1": 1}
    await made[0].set("s", AgentSession(session_id="s"))
    assert (await made[0].get("s")).state == {}, "what was not read is replaced"


async def test_a_session_that_was_deleted_meanwhile_is_not_brought_back(opener: Any) -> None:
    store = await opener()
    sessions = DistributedSessionStore(store, owner=lambda id: "ada")
    history = DistributedHistoryProvider(store, owner=lambda id: "ada")
    for end in (lambda: sessions.delete("s"), lambda: store.forget("ada")):
        await sessions.set("s", AgentSession(session_id="s"))
        await history.save_messages("s", MESSAGES[:1])
        read = await sessions.get("s")
        assert read is not None
        await end()
        read.state["n"] = 1
        with pytest.raises(Deleted):
            await sessions.set("s", read)
        assert await sessions.get("s") is None
    assert await history.get_messages("s") == []


# Checkpoints


@dataclasses.dataclass
class Trip:
    city: str
    days: tuple[int, ...]


def checkpoint(name: str = "w", at: int = 0, **more: Any) -> WorkflowCheckpoint:
    time = datetime(2026, 11, 1, tzinfo=UTC) + timedelta(microseconds=at)
    return WorkflowCheckpoint(workflow_name=name, graph_signature_hash="g", timestamp=time.isoformat(), **more)


async def storage_of(kind: str, opener: Any, tmp_path: Path) -> Any:
    types = [f"{Trip.__module__}:Trip"]
    if kind == "ours":
        return DistributedCheckpointStorage(await opener(), "s", allowed_checkpoint_types=types)
    return (
        InMemoryCheckpointStorage()
        if kind == "in memory"
        else FileCheckpointStorage(tmp_path, allowed_checkpoint_types=types)
    )


@pytest.mark.parametrize("kind", ["ours", "file", "in memory"])
async def test_checkpoints_are_saved_listed_and_deleted(kind: str, opener: Any, tmp_path: Path) -> None:
    storage = await storage_of(kind, opener, tmp_path)
    with pytest.raises(WorkflowCheckpointException, match="No checkpoint found with ID nowhere"):
        await storage.load("nowhere")
    assert await storage.get_latest(workflow_name="w") is None
    assert await storage.delete("nowhere") is False
    state = {
        "trip": Trip("Oslo", (1, 2)),
        "set": {1},
        "bytes": b"\xff",
        "none": None,
        "at": datetime(2026, 1, 1, tzinfo=UTC),
    }
    saved = [checkpoint(at=at, state=state, metadata={"n": at}, iteration_count=at) for at in (5, 3, 9)]
    saved += [checkpoint("w/x", 7), checkpoint("w%2Fx", 8), checkpoint("w/", 1)]
    for each in saved:
        assert await storage.save(each) == each.checkpoint_id
    assert await storage.load(saved[0].checkpoint_id) == saved[0]
    (await storage.load(saved[0].checkpoint_id)).state["none"] = 1
    assert await storage.load(saved[0].checkpoint_id) == saved[0], "a copy"
    ids = {each.checkpoint_id for each in saved[:3]}
    assert set(await storage.list_checkpoint_ids(workflow_name="w")) == ids
    listed = await storage.list_checkpoints(workflow_name="w")
    assert sorted(each.iteration_count for each in listed) == [3, 5, 9]
    if kind == "ours":
        assert [each.iteration_count for each in listed] == [3, 5, 9], "in their order"
    for name, expected in (("w", saved[2]), ("w/x", saved[3]), ("w%2Fx", saved[4]), ("w/", saved[5])):
        assert await storage.get_latest(workflow_name=name) == expected
    # The same again, with another time.
    await storage.save(dataclasses.replace(saved[2], timestamp=checkpoint(at=1).timestamp))
    assert await storage.get_latest(workflow_name="w") == saved[0]
    assert len(await storage.list_checkpoints(workflow_name="w")) == 3
    assert await storage.delete(saved[0].checkpoint_id) is True
    assert await storage.delete(saved[0].checkpoint_id) is False
    assert await storage.get_latest(workflow_name="w") == saved[1]


async def test_only_allowed_types_are_read(opener: Any) -> None:
    store = await opener()
    mine = checkpoint(state={"trip": Trip("Oslo", ())})
    await DistributedCheckpointStorage(store, "s").save(mine)
    with pytest.raises(WorkflowCheckpointException, match="Trip"):
        await DistributedCheckpointStorage(store, "s").load(mine.checkpoint_id)


class Ask(Executor):
    @handler
    async def begin(self, city: str, ctx: WorkflowContext) -> None:
        ctx.set_state("city", city)
        await ctx.request_info(request_data=f"Book {city}?", response_type=str)

    @response_handler
    async def end(self, question: str, answer: str, ctx: WorkflowContext[Any, str]) -> None:
        await ctx.yield_output(f"{ctx.get_state('city')}: {answer}")


def workflow() -> Any:
    ask = Ask(id="ask")
    return WorkflowBuilder(start_executor=ask, name="trips", output_from=[ask]).build()


@pytest.mark.replicas
async def test_a_workflow_that_asks_goes_on_at_another_replica(opener: Any) -> None:
    one, other = await opener(), await opener()
    asked = await workflow().run("Oslo", checkpoint_storage=DistributedCheckpointStorage(one, "s"))
    assert [each.data for each in asked.get_request_info_events()] == ["Book Oslo?"]
    storage = DistributedCheckpointStorage(other, "s")
    newest = await storage.get_latest(workflow_name="trips")
    assert newest is not None
    (request,) = newest.pending_request_info_events
    done = await workflow().run(
        checkpoint_id=newest.checkpoint_id, responses={request: "yes"}, checkpoint_storage=storage
    )
    assert done.get_outputs() == ["Oslo: yes"]


async def test_checkpoints_are_saved_under_the_lease_of_a_turn(opener: Any) -> None:
    store = await opener()
    storage = DistributedCheckpointStorage(store, "s", user="ada")
    turn = storage.record.turn(request_id="r", ttl=1.0)
    with pytest.raises(Fenced):
        async with turn:
            await storage.save(checkpoint())
            (lease,) = await store.admin.leases()
            await store.admin.end_lease("agent-framework/s", lease.token)
            await storage.save(checkpoint(at=1))
    assert len(await storage.list_checkpoint_ids(workflow_name="w")) == 1
    await store.forget("ada")
    with pytest.raises(Deleted):
        await storage.save(checkpoint(at=2))
    assert await storage.list_checkpoint_ids(workflow_name="w") == []
    again = DistributedCheckpointStorage(store, "s", user="ada")
    await again.save(checkpoint(at=3))
    assert len(await again.list_checkpoint_ids(workflow_name="w")) == 1
