"""The parts of a replay that need no server: reading a file, cutting turns, judging what came back."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from distributed_state.errors import InvalidValue
from distributed_state.programs.replay.coordinator import (
    BEFORE,
    COMMITTED,
    IDLE,
    REPLY_LOST,
    Ack,
    Conversation,
    Kill,
    Tally,
    cut,
    parse_conversations,
    read_conversations,
)
from distributed_state.programs.replay.run import Kept, differences, latency, show, summarise
from distributed_state.values.model import Message

pytestmark = pytest.mark.unit


def line(id: str, *messages: dict[str, Any]) -> bytes:
    return json.dumps({"id": id, "messages": messages or [{"role": "user", "content": "hi"}]}).encode()


def test_a_turn_is_a_users_message_and_everything_up_to_the_next() -> None:
    roles = ["system", "assistant", "user", "assistant", "tool", "assistant", "user", "user", "assistant"]
    turns = cut(Message(role=role, content=str(at)) for at, role in enumerate(roles))
    assert [[message.role for message in turn] for turn in turns] == [roles[:6], roles[6:7], roles[7:]]


def test_a_conversation_without_a_user_is_one_turn() -> None:
    assert len(cut([Message(role="system", content="a"), Message(role="assistant", content="b")])) == 1


def test_the_sample_is_whole() -> None:
    conversations = read_conversations(None)
    assert len(conversations) >= 20
    for conversation in conversations:
        assert 8 <= len(conversation.messages) <= 31
        calls = [call["id"] for message in conversation.messages for call in message.tool_calls or []]
        assert calls == [message.tool_call_id for message in conversation.messages if message.role == "tool"]


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        (line("b")[:-9], "line 2: is not JSON, or is truncated"),
        (b"[1]", 'line 2: must have the form {"id"'),
        (b'{"id": "b", "messages": []}', "line 2: 'b' has no list of messages"),
        (b'{"id": "", "messages": []}', "line 2: must have the form"),
        (line("b", {"role": "user"}, {"role": "wizard"}), r"line 2: messages\.1\.role"),
        (line("b", {"role": "user", "content": 7}), r"line 2: messages\.0\.content"),
        (b'{"id": "b", "messages": ["hi"]}', r"line 2: messages\.0: "),
        (line("a"), "line 2: the id 'a' occurs twice"),
        (b"\xff\xfe", "line 2: is not JSON"),
        (b'{"id": "b", "messages": [{"role": "user", "content": "\xff"}]}', "line 2: is not JSON"),
    ],
)
def test_a_bad_line_is_named(second: bytes, complaint: str) -> None:
    with pytest.raises(InvalidValue, match=complaint):
        parse_conversations([line("a"), second], "here")


def test_a_file_that_is_not_there_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"nowhere\.jsonl: No such file"):
        read_conversations(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(InvalidValue, match="holds no conversation"):
        read_conversations(tmp_path / "empty.jsonl")


# Every kind of damage must be seen: this is the negative control of the replay's verdict.


CONVERSATION = Conversation(
    "c",
    cut(
        Message.model_validate(fields)
        for fields in (
            {"role": "system", "content": "rules"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "t", "n": 1}]},
            {"role": "tool", "tool_call_id": "t", "content": "{}"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "done"},
            {"role": "user", "content": "two"},
        )
    ),
)
ACKS = [Ack("c", 0, 1, 0), Ack("c", 1, 2, 4), Ack("c", 2, 3, None)]


def kept() -> Kept:
    turns = [[message.to_dict() for message in turn] for turn in CONVERSATION.turns]
    changes = [(version, copy.deepcopy(turn)) for version, turn in enumerate(turns, 1)]
    return Kept([fields for turn in copy.deepcopy(turns) for fields in turn], 3, changes, "done")


def test_what_was_kept_as_promised_is_no_difference() -> None:
    assert differences(CONVERSATION, ACKS, kept()) == []


def drop_last(messages: list[Any]) -> None:
    del messages[-1]


def repeat(messages: list[Any]) -> None:
    messages.insert(5, messages[4])


def swap(messages: list[Any]) -> None:
    messages[2], messages[3] = messages[3], messages[2]


def alter_text(messages: list[Any]) -> None:
    messages[5]["content"] = "done "


def alter_type(messages: list[Any]) -> None:
    messages[2]["tool_calls"][0]["n"] = 1.0


def drop_key(messages: list[Any]) -> None:
    del messages[2]["content"]


@pytest.mark.parametrize("damage", [drop_last, repeat, swap, alter_text, alter_type, drop_key])
def test_damaged_messages_are_seen(damage: Any) -> None:
    state = kept()
    damage(state.messages)
    found = differences(CONVERSATION, ACKS, state)
    assert found
    assert all(text.startswith("c: ") for text in found)


def test_damaged_versions_acks_and_counters_are_seen() -> None:
    good = kept()
    hole = Kept(good.messages, 3, [good.changes[0], (3, good.changes[1][1]), (4, good.changes[2][1])], "done")
    assert any("version 3 stands where version 2 should" in text for text in differences(CONVERSATION, ACKS, hole))
    behind = Kept(good.messages, 2, good.changes, "done")
    assert differences(CONVERSATION, ACKS, behind) == ["c: the turn counter is 2 instead of 3"]
    stuck = Kept(good.messages, 3, good.changes, "executing")
    assert differences(CONVERSATION, ACKS, stuck) == ["c: the phase is 'executing' instead of 'done'"]
    twice = [*ACKS, Ack("c", 1, 2, 4)]
    assert any("acknowledged twice" in text for text in differences(CONVERSATION, twice, good))
    elsewhere = [Ack("c", 1, 3, 4)]
    assert any("not what that version appended" in text for text in differences(CONVERSATION, elsewhere, good))
    misplaced = [Ack("c", 1, 2, 5)]
    assert any("is not at messages 5 to 6" in text for text in differences(CONVERSATION, misplaced, good))
    empty = Kept([], 0, [], None)
    assert any("0 messages instead of 7" in text for text in differences(CONVERSATION, ACKS, empty))


KILLS = [
    Kill(1, "c1", 0, BEFORE, 4, 2.06),
    Kill(2, "c2", 1, REPLY_LOST, 5, 0.6),
    Kill(3, "c3", 2, COMMITTED),
    Kill(4, "c4", 3, IDLE),
]


def test_the_report_says_who_was_killed_and_who_went_on() -> None:
    tally = Tally(turns=9, workers=7, began=1.0, ended=3.0, kills=KILLS, latencies={"turn": [0.001, 2.0]})
    shown = Console(file=io.StringIO(), width=80)
    show(summarise(tally, conversations=4, messages=30, lag=0.1, differences=[]), shown)
    assert shown.file.getvalue().splitlines() == [  # type: ignore[attr-defined]  # a StringIO
        "worker 1 was killed in c1, turn 1, before its commit;",
        "  worker 4 served the turn 2.1 s later",
        "worker 2 was killed in c2, turn 2, after its commit, before it could say so;",
        "  worker 5 found its answer 0.6 s later, and wrote nothing twice",
        "worker 3 was killed in c3, turn 3, after its commit;",
        "  nothing of the turn was left to do",
        "1 more was killed between two turns",
        "verified: 30 of 30 messages of 4 conversations are in SQL, each once, in order,",
        "  equal to the input; versions dense",
        "9 turns by 7 workers in 2.0 s",
        "a turn takes 2000.0 ms (median); one behind a killed worker waits for its lease,",
        "  up to 2 s",
    ]


def test_percentiles_are_of_the_nearest_rank() -> None:
    took = latency([at / 1000 for at in range(1, 201)])
    assert (took.p50_ms, took.p99_ms, took.count) == (101.0, 199.0, 200)
    assert latency([0.001]).p99_ms == 1.0
