"""Conversations of Pydantic AI on a store: as its own store in memory keeps them, on several replicas."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from below import keys_of, redis_of, tiers, until
from following import plain, shown
from frameworks.examples import run_examples
from frameworks.fleet import fleet
from frameworks.pydantic_ai_crew import ID, agent, said, session, take_turns, turn_of
from pydantic_ai import BinaryContent, DeferredToolRequests, ImageUrl
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import (
    ConversationConflict,
    ConversationRecord,
    InMemoryConversationStore,
)
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import (
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import DeltaToolCall, FunctionModel
from pydantic_ai.usage import RequestUsage, RunUsage
from reaping import Sweeps, quiet
from sync_api import Blocking, core

from distributed_state import AsyncSession, AsyncStateStore, InvalidValue
from distributed_state.adapters.pydantic_ai import DistributedConversationStore, stream

pytestmark = pytest.mark.servers

RECORD = f"pydantic-ai/{ID}"
MESSAGES: list[Any] = [
    ModelRequest([SystemPromptPart("You book."), UserPromptPart("Oslo \x00\ud800?")], instructions="Be brief."),
    ModelResponse(
        [ThinkingPart("hm", signature="s"), TextPart(""), ToolCallPart("book", {"city": "Oslo", "n": 2**60}, "c1")],
        usage=RequestUsage(input_tokens=3, details={"x": 1}), model_name="m", provider_details={"a": [1.0]},
    ),
    ModelRequest([ToolReturnPart("book", {"deep": [[], {}, None]}, "c1", metadata={"m": 1}), UserPromptPart("And?")]),
    ModelRequest([UserPromptPart(["see", ImageUrl("https://x/y.png"), BinaryContent(b"\x00\xff", media_type="a/b")])]),
    ModelResponse([TextPart("one"), TextPart("two")], finish_reason="stop", metadata={"mine": True}),
    ModelResponse([]),
]  # fmt: skip


def conversations_of(store: Any, **options: Any) -> DistributedConversationStore:
    """One on either API of a store."""
    return DistributedConversationStore(store.it if isinstance(store, Blocking) else store, **options)


def prompts(*texts: str) -> list[Any]:
    return [ModelRequest([UserPromptPart(text)]) for text in texts]


async def test_a_conversation_comes_back_as_it_was_saved_from_every_tier(store: Any) -> None:
    conversations = conversations_of(store)
    requests = DeferredToolRequests(
        approvals=[ToolCallPart("book", '{"city": "Oslo"}', "c1")], metadata={"c1": {"why": "money"}}
    )
    given = Conversation(
        messages=MESSAGES, conversation_id=ID, deferred_tool_requests=requests,
        usage=RunUsage(requests=2, tool_calls=1, input_tokens=3, details={"x": 1}),
    )  # fmt: skip
    entries = await conversations.save(given, scope="ada")
    assert await store.session(RECORD).version() == 1, "one commit"
    await store.admin.archive()
    for forget in False, True:
        if forget:
            with redis_of(store) as client:
                client.delete(keys_of(store, RECORD).record)
                tiers(store).hot.forget(f"session:{RECORD}")
        found = await conversations.load(ID, scope="ada")
        assert found is not None
        for each, message in zip(found.messages, MESSAGES, strict=True):
            assert each == message
        assert found == given
        again = await conversations.load_entries(ID)
        assert again == entries
        assert await conversations.read_entry(again[2].id) == entries[2]
    assert await conversations.load(ID, scope="bob") is None
    assert [each.role for each in await store.session(RECORD).messages()] == ["user", "assistant", "user", *[None] * 3]
    (record,) = await conversations.list_conversations(scope="ada")
    assert (record.conversation_id, record.revision, record.head_id) == (ID, given.revision, entries[-1].id)
    await store.forget("ada")
    assert await conversations.load(ID) is None


# As theirs


class Both:
    """The same calls on our store and on theirs; the results are compared, but for what each draws for itself."""

    def __init__(self, ours: Any, theirs: Any) -> None:
        self.stores = (ours, theirs)
        self.held: dict[str, list[Any]] = {}

    async def load(self, id: str, limit: int | None) -> None:
        found = [await each.load(id, limit=limit) for each in self.stores]
        self._same(found)
        if found[0] is not None:
            self.held[id] = found
        entries = [await each.load_entries(id, limit=limit) for each in self.stores]
        ours, theirs = ([entry.message for entry in each or ()] for each in entries)
        assert ours == theirs

    async def save(self, id: str, added: list[Any], scope: str | None, *, rewritten: bool) -> None:
        held = self.held.setdefault(id, [Conversation(conversation_id=id), Conversation(conversation_id=id)])
        for each in held:
            if rewritten:
                del each.messages[len(each.messages) // 2 :]
                each.new_message_index = None
            each.messages += added
            each.usage = RunUsage(requests=len(each.messages))
        await self._do([lambda at=at: self.stores[at].save(held[at], scope=scope) for at in (0, 1)])

    async def branch(self, id: str, at: int | None, old: int | None) -> None:
        async def one(number: int) -> Any:
            store = self.stores[number]
            record = await store.read_record(id)
            held = self.held.get(id)
            tip = (
                record.branches[old % len(record.branches)] if record and old is not None and record.branches else None
            )
            return await store.branch(
                id, at=None if tip else at, from_entry=tip, expected_revision=held[number].revision if held else None
            )

        done = await self._do([lambda at=at: one(at) for at in (0, 1)])
        if done:
            self.held[id] = done

    async def fork(self, id: str, new: str, at: int | None) -> None:
        done = await self._do([lambda n=n: self.stores[n].fork(id, at=at, new_conversation_id=new) for n in (0, 1)])
        if done:
            self.held[new] = done

    async def delete(self, id: str, scope: str | None) -> None:
        await self._do([lambda at=at: self.stores[at].delete(id, scope=scope) for at in (0, 1)])

    async def listed(self, scope: str | None) -> None:
        found = [await each.list_conversations(scope=scope) for each in self.stores]
        rows = [[(r.conversation_id, r.scope, r.forked_from, len(r.branches), r.usage) for r in each] for each in found]
        assert rows[0] == rows[1]
        assert [r.conversation_id for r in await self.stores[0].list_conversations(limit=2)] == [
            r.conversation_id for r in await self.stores[1].list_conversations(limit=2)
        ]

    async def _do(self, calls: list[Any]) -> list[Any]:
        ended: list[Any] = []
        for call in calls:
            try:
                ended.append(await call())
            except UserError as error:
                ended.append(error)
        assert type(ended[0]) is type(ended[1]), ended
        if isinstance(ended[0], Exception):
            return []
        self._same(ended)
        return ended

    @staticmethod
    def _same(found: list[Any]) -> None:
        if isinstance(found[0], Conversation):
            assert found[0].messages == found[1].messages
            assert found[0].usage == found[1].usage
            assert found[0].deferred_tool_requests == found[1].deferred_tool_requests
            assert (found[0].revision is None) == (found[1].revision is None)
        elif isinstance(found[0], list):
            assert [each.message for each in found[0]] == [each.message for each in found[1]]
            assert [each.parent_id is None for each in found[0]] == [each.parent_id is None for each in found[1]]
        else:
            assert found == [None, None]


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_is_called_it_answers_as_theirs(store: Any, seed: int) -> None:
    """Their package has no tests for stores; so the store in memory, which they ship, is the contract."""
    chance = random.Random(seed)
    both = Both(conversations_of(store), InMemoryConversationStore())
    ids, scopes = ["a", "b", "c"], [None, None, "ada"]
    count = 0

    for count in range(120):
        id = chance.choice(ids)
        what = chance.choice(["load", "load", "save", "save", "save", "branch", "fork", "delete", "list"])
        if what == "load":
            await both.load(id, chance.choice([None, None, 0, 1, 3]))
        elif what == "save":
            added = prompts(*(f"{count}.{each}" for each in range(chance.randrange(3))))
            await both.save(id, added, chance.choice(scopes), rewritten=chance.random() < 0.3)
        elif what == "branch":
            await both.branch(id, chance.randrange(4), chance.choice([None, 0, 1]))
        elif what == "fork":
            await both.fork(id, chance.choice(ids), chance.choice([None, 0, 1, 2]))
        elif what == "delete" and chance.random() < 0.3:
            await both.delete(id, chance.choice(scopes))
        else:
            await both.listed(chance.choice([None, "ada"]))
        if chance.random() < 0.3:
            for each in ids:
                await both.load(each, None)


async def test_the_comparison_sees_a_store_that_forgets_branches(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr("distributed_state.adapters.pydantic_ai.replace", lambda found, **more: found)
    with pytest.raises((AssertionError, LookupError)):
        await test_whatever_is_called_it_answers_as_theirs(store, 0)


# Several workers


@pytest.mark.replicas
async def test_of_two_that_continue_a_conversation_one_is_refused_and_stores_nothing(opener: Any) -> None:
    one, other = conversations_of(await opener()), conversations_of(await opener())
    await turn_of(one, "first")
    loaded = [await one.load(ID), await other.load(ID)]
    results = [await agent.run(f"by {at}", conversation=each) for at, each in enumerate(loaded)]
    outcomes = await asyncio.gather(one.save(results[0]), other.save(results[1]), return_exceptions=True)
    refused = [at for at, each in enumerate(outcomes) if isinstance(each, ConversationConflict)]
    assert len(refused) == 1
    assert await said(other) == await said(one) == ["first", "first", *[f"by {1 - refused[0]}"] * 2]
    assert len(await one.session_record(ID).messages()) == 8
    with pytest.raises(ConversationConflict):
        await other.save(Conversation(conversation_id=ID, messages=prompts("as if there were none")))


@pytest.mark.replicas
@pytest.mark.only(api="asyncio")
async def test_without_the_expectation_a_turn_would_be_lost(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: commits that expect nothing."""
    one, other = conversations_of(await opener()), conversations_of(await opener())
    await turn_of(one, "first")
    results = [await agent.run(f"by {at}", conversation=await each.load(ID)) for at, each in enumerate((one, other))]
    write, read, everybody_read = AsyncSession.write, DistributedConversationStore.read_record, asyncio.Barrier(2)

    async def read_record(self: Any, id: str) -> Any:
        found = await read(self, id)
        await everybody_read.wait()
        return found

    monkeypatch.setattr(DistributedConversationStore, "read_record", read_record)
    monkeypatch.setattr(AsyncSession, "write", lambda self, expect=None, **more: write(self, **more))
    await asyncio.gather(one.save(results[0]), other.save(results[1]))
    monkeypatch.undo()
    texts = await said(one)
    assert ("by 0" in texts) != ("by 1" in texts)


async def test_a_conversation_that_was_deleted_is_not_continued_and_can_begin_again(store: Any) -> None:
    conversations = conversations_of(store)
    result = await turn_of(conversations, "a secret")
    fork = await conversations.fork(ID, new_conversation_id="fork")
    await conversations.delete(ID)
    assert await conversations.load(ID) is None
    assert await store.session(RECORD).history() == []
    with pytest.raises(ConversationConflict):
        await conversations.save(result)
    assert await said(conversations, "fork") == ["a secret", "a secret"], "which has its own entries"
    assert (await conversations.read_record("fork")).forked_from == ID  # type: ignore[union-attr]
    await turn_of(conversations, "again")
    assert await said(conversations) == ["again", "again"]
    # The entries of which a fork was about to be made are gone.
    await conversations.delete(ID)
    with pytest.raises(UserError, match="not in the store"):
        await conversations.fork(ID)
    orphan = ConversationRecord(conversation_id="new", head_id="of nobody")
    with pytest.raises(ConversationConflict):
        await conversations.write_record(orphan, expected_revision=None)
    for head in "of nobody", (await conversations.load_entries("fork"))[0].id + "x":  # type: ignore[index]
        with pytest.raises(LookupError):
            await conversations.read_entry(head)
    assert fork.messages == result.conversation.messages


@pytest.mark.parametrize("expired", ["refuse", "begin again"])
async def test_one_that_expired_begins_again(opener: Any, expired: str) -> None:
    store = await quiet(opener, session_idle=0.05, expired=expired)
    conversations = conversations_of(store)
    result = await turn_of(conversations, "one")
    await until(Sweeps(store))
    with pytest.raises(ConversationConflict):
        await conversations.save(result)
    await turn_of(conversations, "two")
    assert await said(conversations) == ["two", "two"]


async def test_a_fork_and_a_rollback_of_the_session_are_conversations(store: Any) -> None:
    conversations = conversations_of(store)
    await turn_of(conversations, "one")
    version = await store.session(RECORD).version()
    await turn_of(conversations, "two")
    await store.session(RECORD).fork("pydantic-ai/copy", version=version)
    assert await said(conversations, "copy") == ["one", "one"]
    await turn_of(conversations, "more", id="copy")
    late = await conversations.load(ID)
    await store.session(RECORD).rollback(version=version)
    with pytest.raises(ConversationConflict):
        await conversations.save(late)  # type: ignore[arg-type]
    await turn_of(conversations, "three")
    assert await said(conversations) == ["one", "one", "three", "three"]
    await store.session(RECORD).append({"role": "user", "content": "a note of somebody else's"})
    assert len(await said(conversations)) == 4
    assert len((await conversations.load(ID, limit=3)).messages) == 3  # type: ignore[union-attr]


async def test_ids_that_are_no_names_are_refused(store: Any) -> None:
    for id in "", None, 5:
        with pytest.raises(InvalidValue, match="must be a non-empty str"):
            await conversations_of(store).load(id)  # type: ignore[arg-type]


async def test_messages_that_arrive_during_a_run_are_given_to_it(store: Any) -> None:
    conversations = conversations_of(core(store))
    async with conversations.session_record(ID).turn() as turn:
        async with agent.iter("one", conversation=Conversation(conversation_id=ID)) as run:
            async for node in run:
                if agent.is_user_prompt_node(node):
                    await conversations.session_record(ID).post({"role": "user", "content": "and two"})
                if await turn.arrived():
                    for each in turn.take():
                        run.enqueue(each.message.content)
        assert run.result is not None
        assert run.result.output == "and two"
        await conversations.save(run.result.conversation)
    assert await conversations.session_record(ID).inbox() == []
    assert await said(conversations) == ["one", "and two", "and two"]


async def test_texts_and_tools_of_a_run_are_shown() -> None:
    async def says(messages: Any, info: Any) -> Any:
        if len(messages) == 1:
            yield {0: DeltaToolCall("look_up", '{"what": "Oslo"}')}
        else:
            yield "Os"
            yield "lo"

    async with AsyncStateStore.open(archive="memory") as store:
        async with session(store).turn(request_id="r") as turn:
            run = agent.run_stream_events("Where?", model=FunctionModel(stream_function=says))
            async with run as events:
                answer = stream(turn, events)
                kinds = [event.event_kind async for event in answer]
            turn.outcome = answer.text
        call, result, *said_ = plain(await shown(session(store), "r"))[:-1]
    assert kinds[-1] == "agent_run_result"
    assert (call["event_kind"], call["part"]["args"]) == ("function_tool_call", '{"what": "Oslo"}')
    assert (result["event_kind"], result["part"]["content"]) == ("function_tool_result", "found Oslo")
    assert "".join(said_) == answer.text == "Oslo"


async def test_the_examples_are_true(store: Any) -> None:
    names = {"store": core(store), "DistributedConversationStore": DistributedConversationStore, "agent": agent}
    assert await run_examples(DistributedConversationStore, **names, Conversation=Conversation) == 1


@pytest.mark.timeout(300)
@pytest.mark.replicas
@pytest.mark.only(api="asyncio", warm="single")
async def test_a_fleet_loses_no_turn(opener: Any) -> None:
    """Four processes continue one conversation and are killed. What the framework brings itself is of one process."""
    store = core(await opener())
    settings = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    lines = await asyncio.to_thread(
        fleet, "pydantic_ai_crew.py", take_turns.__name__, enough=150, kills=4, settings=settings
    )
    texts = await said(DistributedConversationStore(store))
    assert [line for line in lines if texts.count(line) != 2] == []
    assert texts[::2] == texts[1::2], "each answer follows its question"
    theirs = InMemoryConversationStore()
    await turn_of(theirs, "one")
    assert await said(InMemoryConversationStore()) == [], "the control: another worker has nothing of theirs"
