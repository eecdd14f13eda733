"""Counting tokens. Law: what is not sent is not counted."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from distributed_state import ConfigurationError, InvalidValue, Message
from distributed_state.formats import counted, estimate, tiktoken_counter

pytestmark = pytest.mark.unit

# Every byte a token, and two words: enough to see that the counter counts what the encoding says.
RANKS = {bytes([byte]): byte for byte in range(256)} | {b"hello": 256, b" world": 257, b"he": 258, b"hel": 259}
BYTES = tiktoken.Encoding(
    "bytes", pat_str=r"hello| world|.|\n", mergeable_ranks=RANKS, special_tokens={"<|endoftext|>": 300}
)


def text(content: Any, **fields: Any) -> Message:
    return Message(role="user", content=content, **fields)


def test_an_estimate_lies_near_what_models_take_for_english() -> None:
    """The published rule of thumb is 75 words for 100 tokens; words as short as these take fewer."""
    words = (
        "The state of an agent is read at memory speed and changed by one commit, or it is not changed at all. " * 10
    )
    tokens = estimate(text(words))
    assert 0.85 <= tokens / (len(words.split()) / 0.75) <= 1.35


def test_an_estimate_errs_on_the_high_side_beyond_ascii() -> None:
    for letters in ("ü" * 50, "状态" * 25, "🦆" * 50, "سلام" * 10):
        assert estimate(text(letters)) >= len(letters)
    assert estimate(text("a 状 b")) > estimate(text("a b"))
    assert estimate(text("\ud800")) > estimate(text(""))


@given(st.text(), st.text())
def test_more_text_is_never_fewer_tokens(one: str, other: str) -> None:
    assert estimate(text(one + "\n" + other)) >= estimate(text(one))
    assert estimate(text(one)) <= len(one.encode("utf-8", "surrogatepass")) + estimate(text(""))


def test_calls_names_and_images_count_and_what_is_not_sent_does_not() -> None:
    plain = text("hello")
    assert estimate(text("hello", name="Ann")) > estimate(plain)
    assert estimate(text("hello", timestamp=1.0, metadata={"a": "b" * 1000}, extra="c" * 1000)) == estimate(plain)
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"city": "Oslo"}'}}
    calling = Message(role="assistant", tool_calls=[call])
    assert estimate(calling) > estimate(Message(role="assistant", tool_calls=[]))
    same = {"call_id": "c1", "tool_name": "search", "arguments": {"city": "Oslo"}}
    assert estimate(Message(role="assistant", tool_calls=[same])) == estimate(calling)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10**6}}
    assert 1000 < estimate(text([image])) < 3000
    blocks = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image", "source": {"data": "A" * 10**6}}]}
    ]
    assert 1000 < estimate(text(blocks)) < 3000
    assert estimate(text([{"type": "text", "text": "hello"}])) == estimate(plain)
    assert estimate(text([{"type": "new", "x": "y" * 100}])) > 30


def test_tiktoken_counts_exactly() -> None:
    count = tiktoken_counter(BYTES)
    nothing = count(text(""))
    assert count(text("hello world")) == nothing + 2
    assert count(text("hell")) == nothing + len(BYTES.encode("hell"))
    assert count(text("<|endoftext|>")) == nothing + 13, "text, not the special token"


def test_an_encoding_that_cannot_be_had_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="neither a model nor an encoding 'gpt-none'"):
        tiktoken_counter("gpt-none")
    with pytest.raises(InvalidValue, match=r"a name or a tiktoken.Encoding, not 7"):
        tiktoken_counter(7)

    def offline(name: str) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    for name in ("gpt-4o", "o200k_base"):
        with pytest.raises(
            ConfigurationError, match=r"o200k_base cannot be loaded: no route to host.*TIKTOKEN_CACHE_DIR"
        ):
            tiktoken_counter(name)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ConfigurationError, match=r"distributed-state\[tokens\]"):
        tiktoken_counter("gpt-4o")


@pytest.mark.parametrize("returned", [None, 1.5, "7", True, -1])
def test_a_counter_returns_a_count(returned: Any) -> None:
    with pytest.raises(InvalidValue, match="a counter returns an int from 0 on"):
        counted(lambda message: returned, text("hello"))


def test_a_named_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: asked.append(name) or BYTES)
    assert isinstance(tiktoken_counter("gpt-4o"), types.FunctionType)
    tiktoken_counter("cl100k_base")
    assert asked == ["o200k_base", "cl100k_base"]
