"""The chat history of LangChain on a store: each message as it was, on both APIs of one object, in chains."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from below import keys_of, redis_of, tiers, until
from frameworks.examples import run_examples
from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnableLambda
from langchain_core.runnables.history import RunnableWithMessageHistory
from sync_api import Blocking

from distributed_state import Deleted, InvalidValue
from distributed_state.adapters.langchain import DistributedChatMessageHistory
from distributed_state.formats import to_openai

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning"),
]

CALLS: Any = [{"name": "book", "args": {"city": "Oslo", "nights": 2}, "id": "c1", "type": "tool_call"}]
BROKEN: Any = [{"name": "book", "args": "{oops", "id": "c2", "error": "no JSON", "type": "invalid_tool_call"}]
MESSAGES: list[BaseMessage] = [
    SystemMessage("You book hotels."),
    HumanMessage("Oslo \x00\ud800", id="h", name="ann", additional_kwargs={"x": [1, {"y": None}]}),
    HumanMessage([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,"}}, "plain"]),
    AIMessage(
        "", id="a", tool_calls=CALLS, invalid_tool_calls=BROKEN, response_metadata={"model": "m", "finish": "tool"},
        usage_metadata={
            "input_tokens": 3, "output_tokens": 4, "total_tokens": 7, "input_token_details": {"cache_read": 1}
        },
        additional_kwargs={"refusal": None},
    ),
    AIMessage(
        [{"type": "tool_use", "id": "c1", "name": "book", "input": {}}, {"type": "text", "text": "…"}], tool_calls=CALLS
    ),
    ToolMessage("booked", tool_call_id="c1", status="success", artifact={"raw": [1, 2]}),
    ToolMessage("no", tool_call_id="c2", status="error"),
    FunctionMessage("f", name="book"),
    ChatMessage("in another role", role="critic"),
    AIMessageChunk("part", id="k"),
    SystemMessage("be brief", additional_kwargs={"__openai_role__": "developer"}),
    RemoveMessage(id="h"),
    AIMessage("Booked: 2 nights in Oslo."),
]  # fmt: skip


def history_of(store: Any, id: str = "s", **options: Any) -> DistributedChatMessageHistory:
    return DistributedChatMessageHistory(id, store.it if isinstance(store, Blocking) else store, **options)


async def test_messages_come_back_equal_and_of_their_class_from_every_tier(store: Any) -> None:
    history = history_of(store)
    assert isinstance(history, BaseChatMessageHistory)
    await history.aadd_messages(MESSAGES)
    assert await store.session("s").version() == 1, "one commit"
    await store.admin.archive()
    for forget in (False, True):
        if forget:
            with redis_of(store) as client:
                client.delete(keys_of(store, "s").record)
                tiers(store).hot.forget("session:s")
        found = await history.aget_messages()
        assert found == MESSAGES
        assert [type(each) for each in found] == [type(each) for each in MESSAGES]
        assert [each.model_dump() for each in found] == [each.model_dump() for each in MESSAGES]


async def test_both_kinds_of_methods_work_on_one_object_and_loop(store: Any) -> None:
    """Also the blocking ones from a coroutine, as LangChain calls them."""
    history = history_of(store, user="u1")
    history.add_user_message("one")
    await history.aadd_messages([AIMessage("two")])
    history.add_messages([HumanMessage("three"), AIMessage("four")])
    history.add_messages([])
    await history.aadd_messages([])
    texts = ["one", "two", "three", "four"]
    assert [each.content for each in history.messages] == texts
    assert [each.content for each in await history.aget_messages()] == texts
    assert [each.content for each in await asyncio.to_thread(lambda: history.messages)] == texts
    assert str(history).startswith("Human: one")
    await history.aclear()
    assert history.messages == []
    history.add_ai_message("five")
    history.clear()
    history.clear()
    assert await history.aget_messages() == []
    assert not await store.session("untouched").exists()
    history_of(store, "untouched").clear()
    assert not await store.session("untouched").exists(fresh=True), "what is not there is not begun by that"


async def test_what_was_deleted_begins_again(store: Any) -> None:
    history = history_of(store)
    for number in range(2):
        assert history.messages == []
        history.add_user_message(f"{number}")
        await store.delete("s")
        assert history.messages == []
        await history.aadd_messages([HumanMessage("after")])
        assert [each.content for each in history.messages] == ["after"]
        await store.delete("s")


async def test_a_chain_whose_conversation_is_deleted_meanwhile_brings_nothing_back(store: Any) -> None:
    history = history_of(store)
    history.add_user_message("a secret")
    assert len(history.messages) == 1
    await store.erase("s")
    with pytest.raises(Deleted):
        history.add_ai_message("the secret again")
    with pytest.raises(Deleted):
        await history.aadd_messages([HumanMessage("the secret again")])
    assert await history.aget_messages() == []
    history.add_user_message("hello")
    await store.erase("s")
    history_of(store).add_user_message("by an object that knew nothing of it")


async def test_by_the_setting_a_history_that_expired_begins_again(opener: Any) -> None:
    store = await opener(session_idle=0.1, sweep=0.02, expired="begin again")
    history = history_of(store)
    history.add_user_message("before")
    await until(lambda: gone(store))
    history.add_user_message("after")
    assert [each.content for each in history.messages] == ["after"]
    await store.delete("s")
    with pytest.raises(Deleted):
        history.add_user_message("not after a deletion")


async def gone(store: Any) -> bool:
    return not await store.session("s").exists(fresh=True)


@pytest.mark.replicas
async def test_what_another_replica_added_is_read_at_once(opener: Any) -> None:
    one, other = history_of(await opener()), history_of(await opener())
    for number in range(20):
        await one.aadd_messages([HumanMessage(str(number))])
        assert [each.content for each in other.messages] == [str(number)]
        await other.aclear()
        assert await one.aget_messages() == []


async def test_everything_else_reads_what_langchain_wrote_and_the_reverse(store: Any) -> None:
    history = history_of(store)
    await history.aadd_messages([HumanMessage("Oslo?"), AIMessage("", tool_calls=CALLS)])
    await store.session("s").append({"role": "tool", "tool_call_id": "c1", "content": "booked"})
    await store.session("s").append({"role": "assistant", "content": "Booked."})
    sent = to_openai(await store.session("s").messages())
    assert [each["role"] for each in sent] == ["user", "assistant", "tool", "assistant"]
    assert sent[1]["tool_calls"][0]["function"]["name"] == "book"
    assert (await store.session("s").window(max_tokens=1000)).messages
    await store.session("s").append({"type": "reasoning", "id": "r"})
    found = await history.aget_messages()
    assert len(found) == 4, "what is none of a chat is none of LangChain's"
    assert found[:2] == [HumanMessage("Oslo?"), AIMessage("", tool_calls=CALLS)]
    assert found[2].content == "booked"
    assert isinstance(found[3], AIMessage)


async def test_what_no_json_holds_is_refused_as_a_whole(store: Any) -> None:
    history = history_of(store)
    with pytest.raises(InvalidValue, match="artifact"):
        await history.aadd_messages([HumanMessage("x"), ToolMessage("y", tool_call_id="c", artifact=object())])
    assert history.messages == []
    with pytest.raises(InvalidValue, match=r"such as HumanMessage\(\.\.\.\), not a str"):
        history.add_messages([HumanMessage("x"), "y"])  # type: ignore[list-item]
    assert history.messages == []


async def test_a_chain_goes_on_with_its_history(store: Any) -> None:
    """`RunnableWithMessageHistory`, blocking and not, two sessions beside one another."""
    seen: list[list[str]] = []

    def look(prompt: Any) -> Any:
        seen.append([each.content for each in prompt.to_messages()])
        return prompt

    model = GenericFakeChatModel(messages=iter(AIMessage(f"answer {number}") for number in range(9)))
    prompt = ChatPromptTemplate([("system", "s"), MessagesPlaceholder("history"), ("human", "{question}")])
    chain = RunnableWithMessageHistory(
        prompt | RunnableLambda(look) | model, lambda id: history_of(store, id),
        input_messages_key="question", history_messages_key="history",
    )  # fmt: skip
    one: Any = {"configurable": {"session_id": "one"}}
    other: Any = {"configurable": {"session_id": "other"}}
    chain.invoke({"question": "a"}, one)
    await chain.ainvoke({"question": "b"}, other)
    await chain.ainvoke({"question": "c"}, one)
    assert seen == [["s", "a"], ["s", "b"], ["s", "a", "answer 0", "c"]]
    assert [each.content for each in history_of(store, "one").messages] == ["a", "answer 0", "c", "answer 2"]
    assert await store.session("one").version(fresh=True) == 2, "a turn is one commit"


async def test_the_example_is_true(store: Any) -> None:
    model = RunnableLambda(lambda messages: AIMessage("Booked."))
    names = {"store": store.it if isinstance(store, Blocking) else store, "HumanMessage": HumanMessage, "model": model}
    names |= {"RunnableWithMessageHistory": RunnableWithMessageHistory}
    names |= {"DistributedChatMessageHistory": DistributedChatMessageHistory}
    assert await run_examples(DistributedChatMessageHistory, **names) == 1
