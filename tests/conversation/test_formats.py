"""Messages to and from other formats, checked by the types of the libraries that define them."""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import Any

import langchain_core.messages as core
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from distributed_state import ConfigurationError, InvalidValue, Message
from distributed_state.formats import (
    BEGINNING,
    NO_RESULT,
    from_anthropic,
    from_langchain,
    from_openai,
    to_anthropic,
    to_langchain,
    to_openai,
)

pytestmark = pytest.mark.unit


# Imported where they are used: every process of a run collects this file, and they take it three seconds.
@cache
def openai_types() -> Any:
    from openai.types import chat

    return chat


@cache
def anthropic_types() -> Any:
    from anthropic import types

    return types


@cache
def of_openai() -> TypeAdapter[Any]:
    return TypeAdapter(list[openai_types().ChatCompletionMessageParam])


@cache
def of_anthropic() -> TypeAdapter[Any]:
    return TypeAdapter(list[anthropic_types().MessageParam])


def call(id: str, name: str = "search", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def answer(id: str, content: Any = "found") -> Message:
    return Message(role="tool", tool_call_id=id, content=content)


def user(content: Any = "?") -> Message:
    return Message(role="user", content=content)


def calling(*ids: str, content: Any = None) -> Message:
    return Message(role="assistant", content=content, tool_calls=[call(id, at=id) for id in ids])


def said(content: Any = "!") -> Message:
    return Message(role="assistant", content=content)


SYSTEM = Message(role="system", content="Be brief.")
TRIP = [SYSTEM, user("to Oslo"), calling("a", "b", content="I look."), answer("a"), answer("b", "none"), said("done")]


def openai_law(made: list[dict[str, Any]]) -> None:
    """As its API checks: every call is answered directly behind it, and nothing else is."""
    of_openai().validate_python(made, strict=False)
    json.dumps(made)
    waiting: list[str] = []
    for each in made:
        if each["role"] == "tool":
            waiting.remove(each["tool_call_id"])
        else:
            assert not waiting
            waiting = [one["id"] for one in each.get("tool_calls") or []]
    assert not waiting


def anthropic_law(made: list[dict[str, Any]]) -> None:
    """As its API checks: a user begins, roles alternate, results stand first and answer what was just called."""
    of_anthropic().validate_python(made)
    json.dumps(made)
    assert [each["role"] for each in made] == [["user", "assistant"][n % 2] for n in range(len(made))]
    waiting: list[str] = []
    used: list[str] = []
    for each in made:
        parts = each["content"] if isinstance(each["content"], list) else [{"type": "text", "text": each["content"]}]
        assert parts
        assert all(part["text"].strip() for part in parts if part["type"] == "text")
        answered = [part["tool_use_id"] for part in parts if part["type"] == "tool_result"]
        assert all(part["type"] == "tool_result" for part in parts[: len(answered)])
        assert sorted(answered) == sorted(waiting)
        waiting = [part["id"] for part in parts if part["type"] == "tool_use"]
        used += waiting
        assert all(isinstance(part["input"], dict) for part in parts if part["type"] == "tool_use")
    assert not waiting
    assert len(used) == len(set(used))


# Any conversation, however broken, may be sent


ids = st.sampled_from(["a", "b", "c.1", "call_1", ""])
words = st.text(max_size=8)
arguments = st.one_of(
    st.dictionaries(words, st.integers(), max_size=2).map(json.dumps), st.sampled_from(["", "{", "[]"])
)
calls = st.builds(lambda i, a: {"id": i, "type": "function", "function": {"name": "f", "arguments": a}}, ids, arguments)
anything = st.lists(
    st.one_of(
        st.builds(Message, role=st.sampled_from(["system", "developer", "user", "assistant"]), content=words),
        st.builds(
            Message, role=st.just("assistant"), content=st.none() | words, tool_calls=st.lists(calls, max_size=3)
        ),
        st.builds(Message, role=st.just("tool"), content=words, tool_call_id=st.none() | ids),
        st.builds(Message, role=st.just("function"), content=words, name=st.just("f")),
    ),
    max_size=12,
)


@given(anything)
def test_no_orphan_is_ever_sent(messages: list[Message]) -> None:
    openai_law(to_openai(messages))
    anthropic_law(to_anthropic(messages)[1])
    waiting: set[str] = set()
    for each in to_langchain(messages):
        if isinstance(each, core.ToolMessage):
            waiting.remove(each.tool_call_id)
        else:
            assert not waiting
            if isinstance(each, core.AIMessage):
                waiting = {one["id"] or "" for one in [*each.tool_calls, *each.invalid_tool_calls]}
    assert not waiting


@given(anything)
def test_what_is_refused_would_have_been_repaired(messages: list[Message]) -> None:
    """Where nothing is refused, nothing is repaired either."""
    try:
        strict = to_openai(messages, orphans="refuse")
    except InvalidValue:
        return
    assert strict == to_openai(messages)
    assert all(each["content"] != NO_RESULT for each in strict)
    assert sum(each["role"] == "tool" for each in strict) == sum(m.role in ("tool", "function") for m in messages)


def test_orphans_are_repaired_or_refused() -> None:
    lost = [user(), calling("a", "b"), answer("b"), user("and?")]
    made = to_openai(lost)
    assert [each.get("tool_call_id") for each in made] == [None, None, "a", "b", None]
    assert made[2]["content"] == NO_RESULT
    for convert in (to_openai, to_anthropic, to_langchain):
        with pytest.raises(InvalidValue, match=r"messages\[1\]: the call 'a' has no result"):
            convert(lost, orphans="refuse")
        with pytest.raises(InvalidValue, match=r"messages\[1\]: a result of the call 'x', which is missing"):
            convert([user(), answer("x")], orphans="refuse")
        with pytest.raises(InvalidValue, match="orphans is 'repair' or 'refuse', not 'send'"):
            convert(lost, orphans="send")  # type: ignore[operator]  # the wrong value is what is tested
    assert to_openai([user(), answer("x")]) == [{"role": "user", "content": "?"}]
    late = to_openai([user(), calling("a"), user("hurry"), answer("a")], orphans="refuse")
    assert [each["role"] for each in late] == ["user", "assistant", "tool", "user"]


def test_an_id_that_a_model_uses_twice_is_told_apart() -> None:
    system, made = to_anthropic([user(), calling("1"), answer("1", "one"), user(), calling("1"), answer("1", "two")])
    anthropic_law(made)
    assert system == ""
    answered = [each["content"][0]["tool_use_id"] for each in made if isinstance(each["content"], list)
                and each["role"] == "user"]  # fmt: skip
    assert answered == ["1", "1-2"]
    assert made[-1]["content"][0]["content"] == "two"


# There and back


text = st.text(min_size=1, max_size=8).filter(lambda text: bool(text.strip()) and text != BEGINNING)


@st.composite
def conversations(draw: Any) -> list[Message]:
    """Proper ones: system, then a user and an assistant in turn, calls with their results between them."""
    made, number = [Message(role="system", content=draw(text))] if draw(st.booleans()) else [], 0
    for _ in range(draw(st.integers(0, 4))):
        made.append(user(draw(text)))
        for _ in range(draw(st.integers(0, 2))):
            several = [f"call_{number + n}" for n in range(draw(st.integers(1, 3)))]
            number += len(several)
            made.append(calling(*several, content=draw(st.none() | text)))
            made += [answer(id, draw(text)) for id in several]
        made.append(said(draw(text)))
    return made


@given(conversations())
def test_messages_survive_the_way_there_and_back(messages: list[Message]) -> None:
    as_dicts = [message.to_dict() for message in messages]

    def same(back: list[Message]) -> bool:
        return [message.model_dump() for message in back] == [message.model_dump() for message in messages]

    assert same(from_openai(to_openai(messages, orphans="refuse")))
    assert same(from_anthropic(*to_anthropic(messages, orphans="refuse")))
    assert same(from_langchain(to_langchain(messages, orphans="refuse")))
    assert to_openai(as_dicts) == to_openai(messages), "dicts are taken too"
    openai_law(to_openai(messages))
    anthropic_law(to_anthropic(messages)[1])


def test_openai_messages_hold_what_its_api_knows() -> None:
    assert to_openai(TRIP) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "to Oslo"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call("a", at="a"), call("b", at="b")]},
        {"role": "tool", "content": "found", "tool_call_id": "a"},
        {"role": "tool", "content": "none", "tool_call_id": "b"},
        {"role": "assistant", "content": "done"},
    ]
    noted = Message(role="user", content="hi", name="ann", timestamp=1.0, metadata={"a": 1}, internal="x")  # type: ignore[call-arg]  # unknown fields are kept
    assert to_openai([noted]) == [{"role": "user", "content": "hi", "name": "ann"}]
    returned = openai_types().ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": None, "tool_calls": [call("a")]}
    )
    (message,) = from_openai([returned])
    assert message.tool_calls == [call("a")]
    for bad in ({"role": "robot", "content": "x"}, {"content": "x"}, "x", None):
        with pytest.raises(InvalidValue, match=r"messages\[0\]"):
            from_openai([bad])


def test_calls_are_understood_however_they_were_stored() -> None:
    shapes = [
        {"id": "a", "type": "function", "function": {"name": "search", "arguments": '{"q": 1}'}},
        {"call_id": "a", "tool_name": "search", "arguments": {"q": 1}, "result": "x", "duration_ms": 3.0},
        {"id": "a", "name": "search", "args": {"q": 1}, "type": "tool_call"},
    ]
    for shape in shapes:
        made = to_openai([user(), Message(role="assistant", tool_calls=[shape]), answer("a")], orphans="refuse")
        assert made[1]["tool_calls"] == [call("a", q=1)]
    block = {"type": "tool_use", "id": "a", "name": "search", "input": {"q": 1}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "found"}]}
    stored = [user(), Message(role="assistant", content=[block]), user([result, {"type": "text", "text": "and?"}])]
    assert to_openai(stored, orphans="refuse")[1:] == [
        {"role": "assistant", "content": None, "tool_calls": [call("a", q=1)]},
        {"role": "tool", "content": "found", "tool_call_id": "a"},
        {"role": "user", "content": "and?"},
    ]
    old = [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
           {"role": "function", "name": "f", "content": "found"}]  # fmt: skip
    openai_law(to_openai([user(), *old], orphans="refuse"))


def test_anthropic_gets_its_system_apart_and_roles_in_turn() -> None:
    middle = Message(role="developer", content=[{"type": "text", "text": "In Norwegian."}])
    system, made = to_anthropic([*TRIP[:-1], middle, user("and?"), user("please"), said("  "), said()])
    assert system == "Be brief.\n\nIn Norwegian."
    anthropic_law(made)
    assert made == [
        {"role": "user", "content": "to Oslo"},
        {"role": "assistant", "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "a", "name": "search", "input": {"at": "a"}},
            {"type": "tool_use", "id": "b", "name": "search", "input": {"at": "b"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "found"},
            {"type": "tool_result", "tool_use_id": "b", "content": "none"},
            {"type": "text", "text": "and?"}, {"type": "text", "text": "please"}]},
        {"role": "assistant", "content": "!"},
    ]  # fmt: skip
    assert to_anthropic([said("hello"), user()])[1][0] == {"role": "user", "content": BEGINNING}
    assert [m.role for m in from_anthropic(*to_anthropic([said("hello"), user()]))] == ["assistant", "user"]
    blocks = [
        anthropic_types().TextBlock(type="text", text="I look."),
        anthropic_types().ToolUseBlock(type="tool_use", id="a", name="f", input={"q": 1}),
    ]
    answered = {"role": "assistant", "content": blocks}
    failed = {"type": "tool_result", "tool_use_id": "a", "content": "no", "is_error": True}
    read = from_anthropic(
        [{"type": "text", "text": "Be brief."}], [user().to_dict(), answered, {"role": "user", "content": [failed]}]
    )
    assert [m.role for m in read] == ["system", "user", "assistant", "tool"]
    assert to_anthropic(read)[1][-1] == {"role": "user", "content": [failed]}
    assert to_langchain(read)[-1].status == "error"


def test_images_are_translated_and_unknown_parts_refused() -> None:
    data = "data:image/png;base64,AAAA"
    openai = {"type": "image_url", "image_url": {"url": data}}
    _, made = to_anthropic([user([{"type": "text", "text": "see"}, openai])])
    anthropic_law(made)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    assert made[0]["content"][1] == image
    assert to_openai([user([image])])[0]["content"] == [openai]
    linked = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    assert to_openai(from_anthropic(*to_anthropic([user([linked])])))[0]["content"] == [linked]
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    assert to_openai([said([thought, {"type": "text", "text": "yes"}])])[0]["content"] == [
        {"type": "text", "text": "yes"}
    ]
    assert to_anthropic([user(), said([thought])])[1][1]["content"] == [thought]
    for convert in (to_openai, to_anthropic):
        with pytest.raises(InvalidValue, match="a part of type 'video' cannot be sent"):
            convert([user([{"type": "video"}])])
        with pytest.raises(InvalidValue, match="not a int"):
            convert([user([7])])
    with pytest.raises(InvalidValue, match="only text in a result"):
        to_openai([calling("a"), answer("a", [image])])


def test_langchain_gets_its_own_objects() -> None:
    made = to_langchain([Message(role="developer", content="Be brief."), *TRIP[1:]])
    kinds = [core.SystemMessage, core.HumanMessage, core.AIMessage, core.ToolMessage, core.ToolMessage, core.AIMessage]
    assert [type(each) for each in made] == kinds
    assert [each["args"] for each in made[2].tool_calls] == [{"at": "a"}, {"at": "b"}]
    assert from_langchain(made)[0].role == "developer"
    broken = Message(role="assistant", tool_calls=[{"id": "a", "function": {"name": "f", "arguments": "{oh"}}])
    (ai, _) = to_langchain([broken, answer("a")])
    assert [each["args"] for each in ai.invalid_tool_calls] == ["{oh"]
    assert to_openai(from_langchain([ai, core.ToolMessage("x", tool_call_id="a")]))[0]["tool_calls"][0]["function"] == {
        "name": "f", "arguments": "{oh"}  # fmt: skip
    mixed = core.AIMessage(content=["hi", {"type": "tool_use", "id": "a", "name": "f", "input": {}}])
    assert from_langchain([mixed])[0].content == [{"type": "text", "text": "hi"}]
    for bad in ({"role": "user"}, core.ChatMessage(role="robot", content="x"), core.RemoveMessage(id="1")):
        with pytest.raises(InvalidValue, match=r"messages\[0\]"):
            from_langchain([bad])


def test_langchain_missing_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langchain_core.messages", None)
    monkeypatch.delattr("langchain_core.messages", raising=False)
    for convert in (to_langchain, from_langchain):
        with pytest.raises(ConfigurationError, match=r"distributed-state\[langchain\]"):
            convert([])


def test_content_that_langchain_does_not_take_is_refused() -> None:
    with pytest.raises(InvalidValue, match="message"):
        to_langchain([Message(role="user", content=[1])])
