"""The values between the tiers: addresses, steps, the one fold."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_state import CorruptState, InvalidValue, TooLarge
from distributed_state.results import Event
from distributed_state.values.journal import Op, fold, pack, unpack
from distributed_state.values.model import MAX_ID_BYTES, NEXT, SCOPES, SEGMENTS, START, Ref, escape, unescape

pytestmark = pytest.mark.unit

always = settings(derandomize=True, deadline=None, database=None)
letters = st.characters(exclude_categories=()) | st.sampled_from("%:0123456789ABCDEFud\0\n\ud800{}")
texts = st.text(letters, max_size=40)


@always
@given(texts, texts)
def test_two_texts_never_escape_to_the_same(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@always
@given(texts)
def test_an_escaped_text_is_storable_anywhere_and_comes_back(text: str) -> None:
    escaped = escape(text)
    assert unescape(escaped) == text
    assert ":" not in escaped
    assert all(letter >= " " and letter != "\x7f" for letter in escaped)
    escaped.encode()  # no lone surrogate is left


def test_texts_made_to_collide_do_not() -> None:
    tricky = ["a:b", "a%3Ab", "a%253Ab", "%", "%25", "%2", "%3A", ":", "\x00", "%00", "\ud800", "%uD800", "%u", "%uD80"]
    assert len({escape(text) for text in tricky}) == len(tricky)


@always
@given(st.sampled_from(SCOPES), texts.filter(bool))
def test_an_address_comes_back_from_its_text(scope: str, id: str) -> None:
    ref = Ref(scope, id)
    assert Ref.parse(ref.text) == ref
    assert str(ref) == ref.text


def test_the_same_id_in_two_scopes_is_two_records() -> None:
    assert len({Ref(scope, "x").text for scope in SCOPES}) == len(SCOPES)


@pytest.mark.parametrize("id", ["", None, 7, b"bytes", ["x"]])
def test_an_id_is_a_non_empty_text(id: Any) -> None:
    with pytest.raises(InvalidValue, match="non-empty str"):
        Ref("session", id)


@pytest.mark.parametrize("scope", ["", "Session", "chat", None, "session:"])
def test_an_unknown_scope_is_refused(scope: Any) -> None:
    with pytest.raises(InvalidValue, match="is not one of session, user, app, task"):
        Ref(scope, "x")


@pytest.mark.parametrize(
    "id", ["x" * (MAX_ID_BYTES + 1), "x" * 10_000_000, "\0" * 10_000_000, "\U0001f600" * MAX_ID_BYTES]
)
def test_a_long_id_is_refused_in_a_short_message(id: str) -> None:
    with pytest.raises(TooLarge) as caught:
        Ref("session", id)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("letter", ["x", "\0", "%", "é", "\U0001f600", "\ud800"])
def test_the_longest_id_is_accepted_and_one_more_is_not(letter: str) -> None:
    longest = MAX_ID_BYTES // len(escape(letter).encode())
    assert Ref.parse(Ref("session", letter * longest).text).id == letter * longest
    with pytest.raises(TooLarge):
        Ref("session", letter * (longest + 1))


# Steps


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([b"s"]), st.binary(max_size=8), st.binary(max_size=30)),
        st.tuples(st.sampled_from([b"d"]), st.binary(max_size=8), st.just(b"")),
        st.tuples(st.just(b"m"), st.integers(0, 10**6).map(lambda n: b"%d" % n), st.binary(max_size=30)),
        st.tuples(st.just(b"w"), st.just(b""), st.integers(0, 10**6).map(lambda n: b"%d" % n)),
        st.tuples(st.sampled_from([b"c"]), st.just(b""), st.just(b"")),
        st.tuples(st.sampled_from([b"l"]), st.just(b""), st.binary(max_size=30)),
    ),
    max_size=8,
)


@always
@given(steps)
def test_steps_come_back_from_their_bytes(given_steps: list[tuple[bytes, bytes, bytes]]) -> None:
    assert unpack(pack(given_steps)) == given_steps


@always
@given(steps, steps)
def test_two_changes_never_have_the_same_bytes(one: list[Any], other: list[Any]) -> None:
    assert (pack(one) == pack(other)) == (one == other)


@always
@given(steps.filter(bool), st.data())
def test_a_change_that_was_cut_off_is_noticed(given_steps: list[Any], data: st.DataObject) -> None:
    """Unless it is cut exactly between two steps, which is a whole, shorter change."""
    packed = pack(given_steps)
    cut = packed[: data.draw(st.integers(0, len(packed) - 1))]
    if any(cut == pack(given_steps[:count]) for count in range(len(given_steps))):
        return
    with pytest.raises(CorruptState):
        unpack(cut)


@always
@given(st.binary(max_size=40) | st.text("smdc0123456789:-+_ ", max_size=20).map(str.encode))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """And reading ends: no length leads backwards."""
    with suppress(CorruptState):
        assert len(pack(unpack(data))) <= len(data)


@pytest.mark.parametrize(
    "data", [b"s0:-6:", b"s-1:1:x", b"s1:-1:x", b"s:1:x", b"s1:1", b"s1:2:ab", b"abc", b"s1:1:ab "]
)
def test_lengths_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptState):
        unpack(data)


# The fold


def folded(*changes: list[Any], start: dict[bytes, bytes] | None = None) -> dict[bytes, bytes]:
    fields = dict(start or {})
    for change in changes:
        fold(fields, [Op(*step) for step in change])
    return fields


@always
@given(st.lists(steps, max_size=6), st.integers(0, 6))
def test_folding_in_two_parts_is_folding_at_once(changes: list[Any], at: int) -> None:
    assert folded(*changes[at:], start=folded(*changes[:at])) == folded(*changes)
    assert folded([step for change in changes for step in change]) == folded(*changes)


@always
@given(steps, st.dictionaries(st.binary(max_size=4), st.binary(max_size=4)))
def test_folding_again_changes_nothing(change: list[Any], start: dict[bytes, bytes]) -> None:
    """So a change that was already applied may meet its own result."""
    once = folded(change, start=start)
    assert folded(change, start=once) == once


def test_each_kind_of_step() -> None:
    start = {b"a": b"1", b"b": b"2", b"#phase": b"busy", NEXT: b"3", SEGMENTS: b"[]"}
    assert folded([(b"s", b"a", b"9")], start=start) == {**start, b"a": b"9"}
    assert folded([(b"d", b"a", b""), (b"d", b"none", b"")], start=start) == {
        k: v for k, v in start.items() if k != b"a"
    }
    assert folded([(b"c", b"", b"")], start=start) == {b"#phase": b"busy", NEXT: b"3", SEGMENTS: b"[]"}
    assert folded([(b"m", b"3", b"{}"), (b"m", b"4", b"{}")], start=start) == {**start, NEXT: b"5"}
    wiped = {name: value for name, value in start.items() if name != SEGMENTS}
    assert folded([(b"w", b"", b"3")], start=start) == {**wiped, START: b"3"}
    assert folded([(b"l", b"", b"name")], start=start) == start


def told(subject: str = "session:a%3Ab", time: float = 1_700_000_000.007) -> Event:
    return Event("r.4.0", "conversation.cleared", subject, time, {"messages": True}, "r", 12, "1-x", 5, 3, "worker")


def test_an_event_knows_its_conversation() -> None:
    assert told().conversation_id == "a:b"
    assert told("user:a").conversation_id == told("").conversation_id == told("client:session:x").conversation_id == ""


def test_an_event_is_a_cloud_event() -> None:
    fields = told().to_dict()
    assert fields["time"] == "2023-11-14T22:13:20.007Z"
    assert fields["specversion"] == "1.0"
    assert {"id", "source", "type", "time", "subject", "datacontenttype", "data"} < set(fields)
    assert (fields["sequence"], fields["epoch"], fields["partition"], fields["version"]) == (12, "1-x", 5, 3)
    assert fields["data"] == {"messages": True}
    assert "subject" not in told("").to_dict()


def test_steps_that_tell_of_an_event_change_nothing() -> None:
    fields = {b"a": b"1"}
    fold(fields, unpack(pack([(b"e", b"7 conversation.created session:a", b"{}")])))
    assert fields == {b"a": b"1"}
