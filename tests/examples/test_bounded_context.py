"""Bounded context, as a user writes it: what of a long conversation a model is sent."""

from __future__ import annotations

from typing import Any

from distributed_state.formats import from_openai, to_anthropic, to_langchain, to_openai

SYSTEM = {"role": "system", "content": "You book trips."}


async def talk(session: Any, turns: int) -> None:
    for number in range(turns):
        await session.append(
            {"role": "user", "content": f"Question {number}: which flight is best, and why would you take it?"},
            {"role": "assistant", "content": f"Answer {number}: the one in the morning, because it is on time."},
        )


async def test_send_a_model_what_fits(store: Any) -> None:
    session = store.session("trip")
    await session.append(SYSTEM)
    await talk(session, 100)

    window = await session.window(max_tokens=1000)

    assert window.tokens <= 1000
    assert window.messages[0].content == "You book trips."
    assert window.messages[-1].content.startswith("Answer 99")
    assert window.dropped == 201 - len(window.messages)
    messages = to_openai(window.messages)  # for client.chat.completions.create(messages=messages, ...)
    assert messages[0] == SYSTEM


async def test_summarize_what_does_not_fit(store: Any) -> None:
    session = store.session("trip")

    def summarizer(messages: list[Any], previous: str | None) -> str:
        # Ask a model here, e.g. "Go on with this summary: {previous} by these messages: ...". May be async.
        return f"{previous or 'They speak of flights.'} {len(messages)} messages more."

    for _ in range(10):
        await talk(session, 10)
        window = await session.window(max_tokens=1000, strategy="summarize", summarizer=summarizer)
        assert window.tokens <= 1000

    assert window.summary.text.startswith("They speak of flights.")
    assert "They speak of flights." in window.messages[0].content
    assert (window.summary.start, window.summary.stop) == (0, window.dropped)
    assert len(await session.messages()) == 200  # the history keeps every one


async def test_count_tokens_as_your_model_does(store: Any) -> None:
    session = store.session("trip")
    await talk(session, 100)

    def counter(message: Any) -> int:  # or tiktoken_counter("gpt-4o"), with the extra `tokens`
        return len(message.content.split())

    window = await session.window(max_tokens=200, keep_last=2, counter=counter)
    assert window.tokens == sum(map(counter, window.messages)) <= 200


async def test_store_one_format_and_send_another(store: Any) -> None:
    session = store.session("trip")
    call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"to": "Oslo"}'}}
    await session.append(
        *from_openai(
            [
                SYSTEM,
                {"role": "user", "content": "To Oslo"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "3 flights"},
            ]
        )
    )
    system, messages = to_anthropic(await session.messages())
    assert system == "You book trips."
    use = {"type": "tool_use", "id": "call_1", "name": "search", "input": {"to": "Oslo"}}
    assert messages == [
        {"role": "user", "content": "To Oslo"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "3 flights"}]},
    ]
    assert [type(each).__name__ for each in to_langchain(await session.messages())] == [
        "SystemMessage", "HumanMessage", "AIMessage", "ToolMessage"]  # fmt: skip


async def test_a_crash_between_call_and_result_does_not_block_the_conversation(store: Any) -> None:
    """APIs refuse a call that has no result; what is sent has one."""
    session = store.session("trip")
    call = {"id": "call_1", "type": "function", "function": {"name": "book", "arguments": "{}"}}
    await session.append({"role": "user", "content": "Book it"}, {"role": "assistant", "tool_calls": [call]})
    await session.append({"role": "user", "content": "Did it work?"})

    sent = to_openai((await session.window(max_tokens=1000)).messages)

    assert [each["role"] for each in sent] == ["user", "assistant", "tool", "user"]
    assert sent[2]["content"].startswith("(no result was recorded")
