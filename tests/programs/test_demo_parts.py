"""The demo's verification, on lists that were tampered with, and what it shows."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from distributed_state import Event, InvalidValue
from distributed_state.events.config import digest
from distributed_state.programs.demo import replica
from distributed_state.programs.demo.lifecycle import AGAIN, AWAY, TOGETHER, Plan, Report, Screen, Shown
from distributed_state.programs.demo.replica import Account, Called, Received, account, differences

pytestmark = pytest.mark.unit


def event(number: int, type: str, subject: str, **data: Any) -> Event:
    return Event(
        id=f"r.{number}.0", type=type, subject=subject, time=1.0, data=data, source="r", sequence=number, epoch="e",
        partition=0, version=1, actor="",
    )  # fmt: skip


STREAM = [
    event(1, "conversation.created", "session:a"),
    event(2, "conversation.created", "session:b"),
    event(3, "conversation.switched", "session:a", conversation_id="a", previous_id="b", message_count=2),
    event(4, "conversation.cleared", "session:a", messages=True),
    event(5, "conversation.deleted", "session:a"),
    event(6, "config.changed", "app:agent-config", digest=digest({"model": "large"})),
    event(7, "replica.lost", "replica:x", replica="x"),
]
NEW, SWITCHED, DELETED = "on_new_conversation", "on_conversation_switched", "on_conversation_deleted"
HOOKS = (
    Called(NEW, {"conversation_id": "a", "is_clear": False}, {}),
    Called(NEW, {"conversation_id": "b", "is_clear": False}, {}),
    Called(SWITCHED, {"conversation_id": "a", "previous_id": "b", "message_count": 2}, {}),
    Called(NEW, {"conversation_id": "a", "is_clear": True}, {}),
    Called(DELETED, {"conversation_id": "a"}, {"there": False, "notes": ["seat"]}),
    Called("on_config_update", {"model": "large"}, {}),
    Called("on_event", {"type": "replica.lost", "id": "r.7.0"}, {}),
)
RECEIVED = tuple(Received(each.id, each.type, each.subject) for each in STREAM)
BEN = Account("ben", RECEIVED, HOOKS, ("small", "large"))
ADA = replace(
    BEN, name="ada", called=(*HOOKS[:4], replace(HOOKS[4], found=HOOKS[4].found | {"there": True}), *HOOKS[5:])
)


def found(ben: Account = BEN, ada: Account = ADA) -> list[str]:
    return differences(STREAM, STREAM, [ada, ben])


def test_what_is_as_it_should_be_differs_in_nothing() -> None:
    assert found() == []


@pytest.mark.parametrize("at", range(len(RECEIVED)))
def test_an_event_that_one_replica_missed_is_named(at: int) -> None:
    (text,) = found(replace(BEN, received=RECEIVED[:at] + RECEIVED[at + 1 :]))
    assert text == f"ben: missed: {STREAM[at].type} of {STREAM[at].subject}"


@pytest.mark.parametrize("at", range(len(RECEIVED)))
def test_an_event_received_twice_is_named(at: int) -> None:
    (text,) = found(replace(BEN, received=(*RECEIVED, RECEIVED[at])))
    assert text == f"ben: received 2 times: {STREAM[at].type} of {STREAM[at].subject}"


def test_order_counts_within_a_conversation_only() -> None:
    assert found(replace(BEN, received=(RECEIVED[1], RECEIVED[0], *RECEIVED[2:]))) == []
    assert found(replace(BEN, received=(*RECEIVED[:3], RECEIVED[4], RECEIVED[3], *RECEIVED[5:]))) == [
        "ben: events of session:a came in another order"
    ]


def test_an_event_that_was_never_told_is_named() -> None:
    stray = Received("r.9.0", "conversation.deleted", "session:b")
    assert found(replace(BEN, received=(*RECEIVED, stray))) == [
        "ben: received an event that is not in the stream: conversation.deleted of session:b"
    ]


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 6])
def test_a_hook_that_did_not_run_or_ran_twice_is_named(at: int) -> None:
    for called in (HOOKS[:at] + HOOKS[at + 1 :], (*HOOKS[:at], HOOKS[at], *HOOKS[at:])):
        (text,) = found(replace(BEN, called=called))
        assert text.startswith(f"ben: hooks of {STREAM[at].subject} were ")


def test_hooks_in_another_order_or_with_other_arguments_are_named() -> None:
    assert found(replace(BEN, called=(HOOKS[1], HOOKS[0], *HOOKS[2:]))) == []
    (text,) = found(replace(BEN, called=(*HOOKS[:2], HOOKS[3], HOOKS[2], *HOOKS[4:])))
    assert text.endswith(f"expected {NEW}, {SWITCHED}, {NEW}, {DELETED}")
    wrong = replace(HOOKS[2], given=HOOKS[2].given | {"message_count": 3})
    (text,) = found(replace(BEN, called=(*HOOKS[:2], wrong, *HOOKS[3:])))
    assert text.endswith("with other arguments")


def test_the_config_is_followed_but_by_who_was_away() -> None:
    assert found(replace(BEN, models=("small", "large", "large"), lives=2, called=HOOKS[:5] + HOOKS[6:])) == []
    assert found(replace(BEN, models=("small",))) == ["ben: configs were none, not the 1 that the fleet was given"]
    assert found(replace(BEN, models=("small", "small"), lives=2)) == [
        "ben: ended with the config small, not with the fleet's last"
    ]


def test_just_the_deleter_finds_the_conversation_and_all_its_last_state() -> None:
    assert "session:a was there for the hooks of nobody" in found(ada=replace(BEN, name="ada"))[0]
    assert "session:a was there for the hooks of ada and ben" in found(replace(ADA, name="ben"))[0]
    other = replace(HOOKS[4], found={"there": False, "notes": []})
    (text,) = found(replace(BEN, called=(*HOOKS[:4], other, *HOOKS[5:])))
    assert text.startswith("session:a had another last state for some")


def test_sql_and_the_stream_hold_the_same() -> None:
    assert differences(STREAM, STREAM[:-1], [ADA, BEN]) == ["SQL: replica.lost of replica:x is missing"]
    (text, *_) = differences(STREAM[:-1], STREAM, [ADA, BEN])
    assert text == "SQL: replica.lost of replica:x was never in the stream"


def test_a_notebook_tells_where_to_go_on_whatever_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "ben.jsonl"
    assert replica.read(file) == []
    assert replica.position([]) is None
    start = {"kind": "start", "position": "1=e@0", "model": "small"}
    told = {"kind": "event", "id": "r.1.0", "type": "t", "subject": "s", "position": "1=e@1"}
    hook = {"kind": "hook", "hook": "on_config_update", "given": {"model": "large"}, "found": {}}
    whole = "".join(json.dumps(each) + "\n" for each in (start, told, hook, start | {"model": "large"}))
    file.write_text(whole + '{"kind": "event", "id": "r.2')
    lines = replica.read(file)
    assert replica.position(lines[:3]) == "1=e@1"
    seen = account("ben", lines)
    assert (seen.received, seen.models, seen.lives) == ((Received("r.1.0", "t", "s"),), ("small", "large", "large"), 2)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_fits_the_terminal_and_says_what_differs(width: int) -> None:
    shown = Console(file=io.StringIO(), width=width)
    screen = Screen(shown)
    screen.open({"ada": 1, "ben": 2, "cleo": 3}, "valkey-server", "SQLite")
    screen.act("all")
    for number, step in enumerate((*TOGETHER, *AWAY, *AGAIN), 1):
        screen.step(number, step.who, step.words, step.code)
    hooks = [{"hook": each.hook, "given": each.given, "found": each.found} for each in HOOKS]
    screen.received({"ada": hooks, "ben": hooks[:2], "cleo": None})
    screen.caught_up("cleo", 5, "large", hooks)
    report = Report("n", [], [{}] * 7, [Shown("ada", 1, [1], 7, 0, 7, 0), Shown("cleo", 2, [3], 6, 5, 7, -9)], 9.0, [])
    screen.close(report)
    screen.close(replace(report, differences=["cleo: missed: [red]x[/]"]))
    text = shown.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for expected in ("VERIFIED in 9.0 s", "NOT VERIFIED in 9.0 s: 1 difference", "cleo: missed: [red]x[/]", "(dead)"):
        assert expected in words


def test_a_plan_that_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="in memory"):
        Plan(archive="memory")
    (tmp_path / "ben.jsonl").write_text("")
    with pytest.raises(InvalidValue, match="earlier run"):
        Plan(keep=tmp_path)
