"""What is kept of a conversation: decided by a pure function. Law: whole turns, and no result without its call."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_state import InvalidValue, Message, truncate_history
from distributed_state.conversation.window import choose, turns, with_calls
from distributed_state.formats import calls, results

pytestmark = pytest.mark.unit


def user(text: str = "?") -> Message:
    return Message(role="user", content=text)


def said(text: str = "!") -> Message:
    return Message(role="assistant", content=text)


def call(*ids: str) -> Message:
    made = [{"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in ids]
    return Message(role="assistant", tool_calls=made)


def result(id: str) -> Message:
    return Message(role="tool", tool_call_id=id, content="found")


ids = st.sampled_from("abcd")
message = st.one_of(
    st.builds(user), st.builds(said), st.builds(result, ids),
    st.lists(ids, max_size=2, unique=True).map(lambda several: call(*several)),
    st.just(Message(role="system", content="s")),
)  # fmt: skip
conversation = st.lists(st.tuples(message, st.integers(0, 20)), max_size=40)


def chosen(pairs: Any, **options: Any) -> int | None:
    given = {"room": 0, "keep_last": 0, "complete": True} | options
    return choose([message for message, _ in pairs], [count for _, count in pairs], **given)


@given(conversation, st.integers(0, 300), st.integers(0, 5))
def test_only_the_last_turns_may_break_the_budget(pairs: Any, room: int, keep_last: int) -> None:
    messages = [message for message, _ in pairs]
    cut = chosen(pairs, room=room, keep_last=keep_last)
    assert cut is not None
    starts = sorted({0, *turns(messages)}) if messages else []
    kept = [start for start in starts if start >= cut]
    assert cut == (kept[0] if kept else len(pairs)), "whole turns"
    assert len(kept) >= min(keep_last, len(starts))
    assert sum(count for _, count in pairs[cut:]) <= room or len(kept) <= keep_last


@given(conversation, st.integers(0, 300), st.integers(0, 300), st.integers(0, 5), st.integers(0, 5))
def test_more_room_never_keeps_less(pairs: Any, room: int, more: int, keep_last: int, longer: int) -> None:
    less, much = chosen(pairs, room=room, keep_last=keep_last), chosen(pairs, room=room + more, keep_last=keep_last)
    assert less is not None
    assert much is not None
    assert much <= less
    wider = chosen(pairs, room=room, keep_last=keep_last + longer)
    assert wider is not None
    assert wider <= less


@given(conversation, st.integers(0, 300), st.integers(0, 5), st.integers(0, 40))
def test_what_a_part_decides_the_whole_decides_too(pairs: Any, room: int, keep_last: int, unread: int) -> None:
    """Pages of a conversation lead to the same window, wherever their borders fall."""
    unread = min(unread, len(pairs))
    part = chosen(pairs[unread:], room=room, keep_last=keep_last, complete=False)
    if part is not None:
        assert unread + part == chosen(pairs, room=room, keep_last=keep_last)


@given(conversation, st.integers(0, 300), st.integers(0, 5))
def test_no_result_is_left_without_its_call(pairs: Any, room: int, keep_last: int) -> None:
    messages = [message for message, _ in pairs]
    cut = chosen(pairs, room=room, keep_last=keep_last)
    places = with_calls(messages[cut:])
    assert places == sorted(places), "in order"
    kept = [messages[cut:][place] for place in places]
    known: set[str] = set()
    for each in kept:
        assert known.issuperset(results(each))
        known.update(made.id for made in calls(each))
    assert sum(each.role != "tool" for each in kept) == sum(each.role != "tool" for each in messages[cut:])


@given(conversation, st.integers(0, 300), st.integers(0, 5), st.integers(0, 40))
def test_what_must_be_kept_is_kept(pairs: Any, room: int, keep_last: int, must: int) -> None:
    must = min(must, len(pairs))
    cut = chosen(pairs, room=room, keep_last=keep_last, must=must)
    assert cut is not None
    assert cut <= must


def test_a_call_and_its_late_result_are_one_turn() -> None:
    """A user who speaks while a tool runs stands between the two."""
    assert turns([user(), call("a"), user(), result("a"), said(), user()]) == [0, 5]
    assert turns([user(), call("a"), result("a"), user(), result("a")]) == [0, 3], "answered already: an orphan"
    assert turns([user(), call("a"), user(), said(), user(), result("a")]) == [0, 2, 4], "looked for one turn back"
    assert turns([user(), call("a"), user(), call("a"), result("a")]) == [0, 2], "an id may be used again"
    blocks = [{"type": "tool_result", "tool_use_id": "a", "content": "found"}]
    uses = Message(role="assistant", content=[{"type": "tool_use", "id": "a", "name": "f", "input": {}}])
    assert turns([user(), uses, Message(role="user", content=blocks), said()]) == [0], "as Anthropic writes results"


def test_an_orphan_does_not_join_all_turns() -> None:
    messages = [message for _ in range(50) for message in (user(), said())] + [user(), result("never called")]
    assert choose(messages, [1] * len(messages), room=10, keep_last=1, complete=True) == 92
    assert choose(messages[-30:], [1] * 30, room=10, keep_last=1, complete=False) == 20


def test_what_comes_before_the_first_user_message_is_a_turn() -> None:
    messages = [said("hello"), user(), said()]
    assert choose(messages, [5, 5, 5], room=15, keep_last=0, complete=True) == 0
    assert choose(messages, [5, 5, 5], room=10, keep_last=0, complete=True) == 1
    assert choose(messages, [5, 5, 5], room=10, keep_last=2, complete=True) == 0


# Plain lists


def tens(message: Message) -> int:
    return 10


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1"},
    call("c").to_dict(),
    result("c").to_dict(),
    {"role": "assistant", "content": "one"},
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "3"},
]


@pytest.mark.parametrize(
    ("max_tokens", "left"),
    [(90, range(9)), (89, [0, 5, 6, 7, 8]), (50, [0, 5, 6, 7, 8]), (49, [0, 5, 8]), (30, [0, 5, 8]), (1, [0, 5, 8])],
)
def test_a_plain_list_keeps_its_system_messages_and_the_newest_turns_that_fit(max_tokens: int, left: Any) -> None:
    before = list(HISTORY)
    kept = truncate_history(HISTORY, max_tokens, counter=tens)
    assert [HISTORY.index(each) for each in kept] == list(left)
    assert all(each is HISTORY[place] for each, place in zip(kept, left, strict=True)), "as they were given"
    assert before == HISTORY
    objects = [Message(**each) for each in HISTORY]
    assert [objects.index(each) for each in truncate_history(objects, max_tokens, counter=tens)] == list(left)


def test_a_plain_list_may_keep_more_than_fits() -> None:
    assert truncate_history(HISTORY, 1, counter=tens, keep_last=2) == [HISTORY[n] for n in (0, 5, 6, 7, 8)]
    assert truncate_history(HISTORY) == HISTORY
    assert truncate_history([], max_tokens=5) == []
    assert truncate_history([HISTORY[3]], 100) == [], "a result whose call is not there"
    for wrong in ({"max_tokens": 0}, {"max_tokens": "many"}, {"keep_last": -1}, {"counter": 5}):
        with pytest.raises(InvalidValue):
            truncate_history(HISTORY, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"messages\[1\]"):
        truncate_history([HISTORY[0], {"role": "alien"}])


@given(st.lists(st.sampled_from(HISTORY)), st.integers(1, 200))
def test_a_plain_list_never_counts_more_than_it_may_but_for_the_last_turn(
    history: list[dict[str, Any]], most: int
) -> None:
    kept = truncate_history(history, most, counter=tens)
    systems = [each for each in history if each["role"] == "system"]
    assert [each for each in kept if each["role"] == "system"] == systems
    said = [Message(**each) for each in kept if each["role"] != "system"]
    assert len(kept) * 10 <= most or len(turns(said)) <= 1
