"""Sessions of the OpenAI Agents SDK on a store: its protocol, its Runner, several replicas and event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest
from agents import Agent, Runner, SessionSettings
from agents.extensions.memory.encrypt_session import EncryptedSession
from agents.memory import OpenAIResponsesCompactionSession, Session
from agents.testing import ScriptedModel
from below import keys_of, redis_of, tiers, until
from controls import sabotage
from frameworks.examples import run_examples
from frameworks.openai_agents_crew import QUIET, agent, called, look_up, spoken, turn_of
from reaping import Sweeps, quiet
from sync_api import Blocking

from distributed_state import Conflict, CorruptState, Deleted, InvalidValue
from distributed_state.adapters import openai_agents
from distributed_state.adapters.openai_agents import DistributedSession

pytestmark = pytest.mark.servers

CALL = {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "{}", "id": "f", "status": "completed"}
ITEMS: list[Any] = [
    {"role": "user", "content": "Where to?"},
    {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}]},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"},
    CALL,
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "12 \x00\ud800"}]},
    {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [
        {"type": "output_text", "text": "Oslo.", "annotations": [], "logprobs": []}]},
    {"type": "compaction", "id": "cmp", "encrypted_content": "…"},
]  # fmt: skip
# What is a message of the store's only inside of one.
ODD: list[Any] = [
    {"role": "user", "content": "n", "number": 7, "timestamp": "yesterday"},
    {"role": "critic", "content": "no"},
    {"role": None, "content": "no"},
    {"role": ["user"], "content": {"text": "no"}},
    {"content": "neither"},
    {"type": "item", "item": {"type": "item"}},
    {"type": 7, "name": 8},
    {"role": "assistant", "tool_calls": {"a": 1}, "tool_call_id": 3, "metadata": [1], "content": None},
    {},
]


def session_of(store: Any, id: str = "s", **options: Any) -> DistributedSession:
    """One on either API of a store."""
    return DistributedSession(id, store.it if isinstance(store, Blocking) else store, **options)


def said(*numbers: int | str) -> list[Any]:
    return [{"role": "user", "content": str(number)} for number in numbers]


async def test_items_come_back_as_they_were_given_from_every_tier(store: Any) -> None:
    session = session_of(store)
    assert isinstance(session, Session)
    await session.add_items(ITEMS + ODD)
    assert await session.get_items() == ITEMS + ODD
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(keys_of(store, "s").record)
        tiers(store).hot.forget("session:s")
    assert await session.get_items() == ITEMS + ODD
    assert [await session.pop_item() for _ in ODD] == ODD[::-1]
    assert [await session.pop_item() for _ in ITEMS] == ITEMS[::-1]
    assert await session.pop_item() is None


async def test_they_are_the_messages_of_the_stores_session(store: Any) -> None:
    session = session_of(store, user="u1")
    await session.add_items(ITEMS)
    messages = await store.session("s").messages()
    assert [each.role for each in messages] == ["user", "user", None, None, None, "assistant", None]
    assert (await store.session("s").history())[-1].kind == "write"
    await store.session("s").append({"role": "assistant", "content": "mine", "item": 7})
    assert await session.get_items(1) == [{"role": "assistant", "content": "mine", "item": 7}]
    await store.admin.archive()
    assert [each.id for each in await store.sessions(user="u1")] == ["s"]


async def test_limits_are_those_of_the_protocol(store: Any) -> None:
    session = session_of(store, session_settings={"limit": 2})
    await session.add_items(said(*range(50)))
    await store.admin.archive()  # so that all but the recent ones are in SQL alone
    assert await session.get_items() == said(48, 49), "the setting's"
    assert await session.get_items(3) == said(47, 48, 49)
    assert await session.get_items(0) == await session.get_items(-1) == []
    assert await session.get_items(1000) == said(*range(50))
    session.session_settings = SessionSettings()
    assert await session.get_items() == said(*range(50))
    assert await session_of(store, "never written").get_items() == []
    with pytest.raises(ValueError, match="limit"):
        session_of(store, session_settings={"limit": "many"})


async def test_items_are_added_in_one_commit_or_not_at_all(store: Any) -> None:
    session = session_of(store)
    await session.add_items(said(*range(10)))
    assert await store.session("s").version() == 1
    await session.add_items([])
    with pytest.raises(InvalidValue, match="content"):
        await session.add_items([*said(11), {"role": "user", "content": [{1, 2}]}])  # type: ignore[list-item]
    assert await store.session("s").version() == 1
    assert len(await session.get_items()) == 10


@pytest.mark.replicas
async def test_what_another_replica_wrote_is_read_at_once(opener: Any) -> None:
    """Not when its message arrives: a run that reads too early has lost a turn."""
    one, other = session_of(await opener()), session_of(await opener())
    for number in range(30):
        await one.add_items(said(number))
        assert (await other.get_items(1)) == said(number)
        assert await other.pop_item() == said(number)[0]
        assert await one.get_items() == []


@pytest.mark.replicas
async def test_of_several_who_pop_at_once_each_gets_another(opener: Any) -> None:
    sessions = [session_of(await opener()), session_of(await opener())]
    await sessions[0].add_items(said(*range(24)))
    popped = await asyncio.gather(*(sessions[at % 2].pop_item() for at in range(24)))
    assert sorted(int(each["content"]) for each in popped) == list(range(24))
    assert await sessions[0].pop_item() is None


@pytest.mark.replicas
async def test_without_the_expectation_two_would_get_the_same(opener: Any) -> None:
    """The control of the test above: the script that compares nothing gives an item twice."""
    sessions = [session_of(await opener()), session_of(await opener())]
    with sabotage("commit", "      mismatch = mismatch or wanted ~= '=' .. stored", ""):
        await sessions[0].add_items(said(*range(24)))
        popped = await asyncio.gather(*(sessions[at % 2].pop_item() for at in range(24)))
        assert len({each["content"] for each in popped if each}) < 24


async def test_clearing_leaves_fields_and_history(store: Any) -> None:
    session = session_of(store)
    await session.clear_session()
    assert not await store.session("s").exists(fresh=True)
    await session.add_items(said(1, 2))
    await store.session("s").set("city", "Oslo")
    await session.clear_session()
    assert await session.get_items() == []
    assert await store.session("s").get("city", fresh=True) == "Oslo"
    await session.add_items(said(3))
    assert await session.get_items() == said(3)
    assert len((await store.session("s").at(version=1)).messages) == 2


async def test_what_was_deleted_begins_again(store: Any) -> None:
    """An id comes back: a session that expired, and nobody of the SDK would call another method for it."""
    session = session_of(store)
    await session.add_items(said(1, 2))
    await store.delete("s")
    assert await session.get_items() == []
    assert await session.pop_item() is None
    await session.clear_session()
    await asyncio.gather(session.add_items(said(3)), session.add_items(said(4)))
    assert sorted(each["content"] for each in await session.get_items()) == ["3", "4"]
    await store.delete("s")
    assert await session.get_items() == []
    assert await session._atomic_replace_items(said(5))
    assert await session.get_items() == said(5)


@pytest.mark.parametrize("expired", ["refuse", "begin again"])
async def test_by_the_setting_a_run_goes_on_whose_session_expired_meanwhile(opener: Any, expired: str) -> None:
    store = await quiet(opener, session_idle=0.05, expired=expired)
    session = session_of(store)
    await session.add_items(said(1))
    await until(Sweeps(store))
    if expired == "refuse":
        with pytest.raises(Deleted, match="expired at"):
            await session.add_items(said(2))
        assert await session.get_items() == []
    await session.add_items(said(2))
    assert await session.get_items() == said(2)


async def test_a_run_whose_session_is_deleted_meanwhile_brings_nothing_back(store: Any) -> None:
    """Whether it had read items of it or found none; the next run begins it again."""
    for begun in False, True:
        session = session_of(store)
        if begun:
            await session.add_items(said("a secret"))
        await session.get_items()
        await session.add_items(said("one more secret"))
        await store.erase("s")
        with pytest.raises(Deleted):
            await session.add_items(said("the secret again"))
        with pytest.raises(Deleted):
            await session._atomic_replace_items(said("the secret again"))
        assert await session.get_items() == []
        await session.add_items(said("hello"))
        assert await session.get_items() == said("hello")
        await store.erase("s")
    await session_of(store).add_items(said("by an object that knew nothing of it"))


async def test_an_item_that_cannot_be_read_is_not_passed_over(store: Any) -> None:
    """The SDK's own sessions skip it: a call without its result, or the reverse, for the rest of the conversation."""
    session = session_of(store)
    await session.add_items(said(1, 2))
    with redis_of(store) as client:
        client.hset(keys_of(store, "s").record, "#m1", b"\xff")
    tiers(store).hot.clear()
    for call in (session.get_items, session.pop_item, lambda: session._get_compaction_snapshot(5)):
        with pytest.raises(CorruptState, match="message 1"):
            await call()
    await session.clear_session()
    assert await session.get_items() == []


# Compaction


@pytest.mark.replicas
async def test_items_are_replaced_at_once_for_every_reader(opener: Any) -> None:
    writer, reader = session_of(await opener()), session_of(await opener())
    await writer.add_items(said(*range(4)))
    seen: list[str] = []
    done = asyncio.Event()

    async def look() -> None:
        while not done.is_set():
            seen.append("".join(each["content"] for each in await reader.get_items()))

    looking = asyncio.create_task(look())
    for _ in range(20):
        assert await writer._atomic_replace_items(said(9))
        assert await writer._atomic_replace_items(said(*range(4)))
    done.set()
    await looking
    assert set(seen) <= {"0123", "9"}


@pytest.mark.replicas
@pytest.mark.parametrize("change", ["none", "append", "pop", "pop and append", "replace", "set", "clear"])
async def test_a_suffix_is_replaced_if_it_is_still_the_newest(opener: Any, change: str) -> None:
    store = await opener()
    session, other = session_of(store), session_of(await opener())
    await session.add_items(said(*range(6)))
    snapshot = await session._get_compaction_snapshot(3)
    assert snapshot is not None
    assert (snapshot.items, snapshot.complete) == (said(3, 4, 5), False)
    if change.startswith("pop"):
        await other.pop_item()
    if change.endswith("append"):
        await other.add_items(said(5))  # the same words, and another item
    if change == "replace":
        await other._atomic_replace_items(said(*range(6)))
    if change == "clear":
        await other.clear_session()
    if change == "set":
        await store.session("s").set("title", "no item")
    before = await session.get_items()
    replaced = await snapshot.replace_suffix(1, said(9))
    assert replaced == (change in ("none", "set"))
    assert await other.get_items() == (said(0, 1, 2, 3, 9) if replaced else before)
    assert not await snapshot.replace_suffix(1, said(9)), "a second time it is another suffix"
    assert not await snapshot.replace_suffix(3, said(9)), "nothing is replaced by something"


async def test_a_snapshot_knows_whether_it_is_all(store: Any) -> None:
    session = session_of(store)
    for limit in (0, 1, 3):
        empty = await session._get_compaction_snapshot(limit)
        assert empty is not None
        assert (empty.items, empty.complete) == ([], True)
        assert not await empty.replace_suffix(0, said(1))
    await session.add_items(said(*range(3)))
    for limit, complete in ((1, False), (2, False), (3, True), (4, True)):
        found = await session._get_compaction_snapshot(limit)
        assert found is not None
        assert (found.items, found.complete) == (said(*range(3))[-limit:], complete)
    assert found is not None
    assert await found.replace_suffix(0, said(9, 10))
    assert await session.get_items() == said(9, 10)


async def test_what_has_expired_before_a_suffix_goes_with_it(store: Any) -> None:
    """As far as no other item stands before it, and not at all if the suffix has changed."""
    session = session_of(store)
    await session.add_items(said(1, 2, 30, 4, 50, 60))
    changed = await session._get_compaction_snapshot(2, prune_prefix=lambda item: len(item["content"]) == 1)
    assert changed is not None
    await session.add_items(said(70))
    assert not await changed.replace_suffix(0, said(9))
    assert await session.get_items() == said(1, 2, 30, 4, 50, 60, 70)
    snapshot = await session._get_compaction_snapshot(3, prune_prefix=lambda item: len(item["content"]) == 1)
    assert snapshot is not None
    version = await store.session("s").version(fresh=True)
    assert await snapshot.replace_suffix(1, said(9))
    assert await session.get_items() == said(30, 4, 50, 9)
    assert await store.session("s").version(fresh=True) == version + 1
    assert await (await session._get_compaction_snapshot(1, prune_prefix=lambda item: True)).replace_suffix(0, said(8))  # type: ignore[union-attr]
    assert await session.get_items() == said(8)


class Compacting:
    """A client of OpenAI whose model makes one item of all, while another worker does something."""

    def __init__(self) -> None:
        self.responses = self
        self.given: list[list[Any]] = []
        self.meanwhile: list[Awaitable[Any]] = []

    async def compact(self, *, input: list[Any], **more: Any) -> Any:
        self.given.append([each["content"] for each in input])
        while self.meanwhile:
            await self.meanwhile.pop()
        return SimpleNamespace(output=said("short"))


@pytest.mark.replicas
@pytest.mark.parametrize("budget", [None, 50])
@pytest.mark.parametrize("wrapped", ["plain", "encrypted"])
async def test_what_was_added_while_the_model_compacts_is_not_dropped(
    opener: Any, wrapped: str, budget: int | None
) -> None:
    """Not by the compaction of another worker, also not if the SDK remembers what it read before."""
    client = Compacting()
    sessions: list[Any] = [session_of(await opener()), session_of(await opener())]
    sessions[0] = OpenAIResponsesCompactionSession("s", sessions[0], client=client, max_rollback_items=budget)  # type: ignore[arg-type]
    if wrapped == "encrypted":
        sessions = [EncryptedSession("s", each, "a key that is long enough for a test") for each in sessions]
    session, other = sessions
    forced = {"force": True, "compaction_mode": "input"}
    await session.add_items(said(1, 2))
    await session.run_compaction({"compaction_mode": "input"})  # reads, and leaves it at that: there is too little
    await other.add_items(said(3))
    client.meanwhile = [other.add_items(said(4))]
    with pytest.raises(Conflict, match="'s': items were added or removed"):
        await session.run_compaction(forced)
    assert await session.get_items() == said(1, 2, 3, 4)
    await session.run_compaction(forced)
    assert await other.get_items() == said("short")
    assert client.given == [["1", "2", "3"], ["1", "2", "3", "4"]]
    # Empty, and reduced meanwhile.
    await session.clear_session()
    client.meanwhile = [other.clear_session()]
    await session.run_compaction(forced)
    assert await other.get_items() == said("short")
    await session.clear_session()
    client.meanwhile = [other.add_items(said(5, 6))]
    with pytest.raises(Conflict):
        await session.run_compaction(forced)
    client.meanwhile = [other.pop_item()]
    with pytest.raises(Conflict):
        await session.run_compaction(forced)
    assert await other.get_items() == said(5)


async def test_a_subclass_owns_what_it_stores(store: Any) -> None:
    class Mine(DistributedSession):
        pass

    session = Mine("s", store.it if isinstance(store, Blocking) else store)
    await session.add_items(said(1))
    assert await session._get_compaction_snapshot(1) is None
    assert not await session._atomic_replace_items(said(2))
    assert await session.get_items() == said(1)


# Cancellation, event loops


async def test_who_is_cancelled_hears_of_it_when_the_outcome_is_known(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(store)
    write, begun, may = session._session.write, asyncio.Event(), asyncio.Event()

    async def slow(**more: Any) -> Any:
        begun.set()
        await may.wait()
        return await write(**more)

    monkeypatch.setattr(session._session, "write", slow)
    adding = asyncio.create_task(session.add_items(said(1)))
    await begun.wait()
    for _ in range(3):
        adding.cancel("by me")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not adding.done()
    may.set()
    with pytest.raises(asyncio.CancelledError, match="by me"):
        await adding
    assert await session.get_items() == said(1)


def test_without_waiting_it_would_hear_of_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""

    async def scenario() -> bool:
        may = asyncio.Event()
        task = asyncio.create_task(openai_agents._settled(may.wait()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0.001)
        early = task.done()
        may.set()
        await asyncio.gather(task, return_exceptions=True)
        return early

    assert not asyncio.run(scenario())

    async def at_once(work: Any) -> Any:
        return await work

    monkeypatch.setattr(openai_agents, "_settled", at_once)
    assert asyncio.run(scenario())


async def test_one_object_works_on_several_event_loops_and_threads(store: Any) -> None:
    session = session_of(store)
    await session.add_items(said(0))

    def elsewhere(number: int) -> Any:
        async def both() -> Any:
            await session.add_items(said(number))
            return await session.get_items(1000)

        return asyncio.run(both())

    found = await asyncio.gather(*(asyncio.to_thread(elsewhere, number) for number in range(1, 7)))
    assert all(said(0)[0] in each for each in found)
    assert sorted(each["content"] for each in await session.get_items()) == [str(number) for number in range(7)]


async def test_a_run_that_blocks_works_as_well(store: Any) -> None:
    """`run_sync` makes an event loop of its own, in whichever thread; the session was used on another one before."""
    session = session_of(store)
    await session.add_items(said(0))

    def block() -> Any:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            return Runner.run_sync(agent("t"), "t", session=session, run_config=QUIET).final_output
        finally:
            loop.close()

    assert await asyncio.to_thread(block) == "t"
    assert [turn_of(each) for each in await session.get_items()] == ["0", *["t"] * 4]


# The Runner


@pytest.mark.replicas
async def test_a_run_goes_on_where_another_replica_ended(opener: Any) -> None:
    """With tools, streamed and not, each run on another replica: each sees all that was said."""
    sessions = [session_of(await opener(), user="u1"), session_of(await opener(), user="u1")]
    for number in range(6):
        asked = agent(f"t{number}")
        if number % 2:
            streamed = Runner.run_streamed(asked, f"t{number}", session=sessions[number % 2], run_config=QUIET)
            async for _ in streamed.stream_events():
                pass
            answer = streamed.final_output
        else:
            answer = (
                await Runner.run(asked, f"t{number}", session=sessions[number % 2], run_config=QUIET)
            ).final_output
        assert answer == f"t{number}"
        model = asked.model
        assert isinstance(model, ScriptedModel)
        assert len(model.calls[0].input) == 4 * number + 1
    items = await sessions[0].get_items()
    assert [turn_of(each) for each in items] == [f"t{number}" for number in range(6) for _ in range(4)]


@pytest.mark.replicas
async def test_runs_on_one_session_that_hold_it_do_not_mix(opener: Any) -> None:
    sessions = [session_of(await opener()), session_of(await opener())]

    async def run(number: int, held: bool) -> None:
        session = sessions[number % 2]
        if not held:
            await Runner.run(agent(f"{number}"), f"{number}", session=session, run_config=QUIET)
            return
        async with session.lock(wait=30):
            await run(number, held=False)

    await asyncio.gather(*(run(number, held=True) for number in range(8)))
    turns = [turn_of(each) for each in await sessions[0].get_items()]
    assert len(turns) == 32
    assert all(len(set(turns[at : at + 4])) == 1 for at in range(0, 32, 4))

    await sessions[0].clear_session()
    await asyncio.gather(*(run(number, held=False) for number in range(8)))
    turns = [turn_of(each) for each in await sessions[0].get_items()]
    assert len(turns) == 32
    assert any(len(set(turns[at : at + 4])) > 1 for at in range(0, 32, 4)), "the control: without the lock they mix"


async def test_a_failed_run_leaves_what_was_said(store: Any) -> None:
    """The SDK takes back by pop what it must; what had been said before stays."""
    session = session_of(store)
    await session.add_items(said(1))
    failing = Agent(name="f", model=ScriptedModel([[called("look_up", turn="t")]]), tools=[look_up])
    with pytest.raises(Exception, match=r"steps were consumed|no more|script"):
        await Runner.run(failing, "t", session=session, run_config=QUIET)
    assert (await session.get_items())[0] == said(1)[0]
    fine = Agent(name="f", model=ScriptedModel([[spoken("t")]]), tools=[look_up])
    assert (await Runner.run(fine, "t", session=session, run_config=QUIET)).final_output == "t"


async def test_the_examples_are_true(store: Any) -> None:
    names = {"store": store.it if isinstance(store, Blocking) else store, "DistributedSession": DistributedSession}
    assert await run_examples(DistributedSession, Runner=Runner, agent=agent("t"), **names) == 1
