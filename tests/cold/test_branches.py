"""What a branch is called, what of it is missing, and which of its messages are its own."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_state.cold.aside import _Line, gaps
from distributed_state.cold.epochs import ordinal
from distributed_state.cold.values import BranchState
from distributed_state.errors import InvalidValue
from distributed_state.records.branches import between, checked, messages_of
from distributed_state.values import field_ttl, message_ranges
from distributed_state.values.codec import Codec
from distributed_state.values.journal import JournalEntry, Segment, State
from distributed_state.values.model import NEXT, SEGMENTS, START

pytestmark = pytest.mark.unit


def entry(version: int, offset: int) -> JournalEntry:
    return JournalEntry(offset, f"e{offset}", "session:s", version, 1, "set", "", 0, b"", 0)


@pytest.mark.parametrize(
    ("base", "versions", "missing"),
    [
        (2, (3, 4, 5), ()),
        (2, (4, 5), ((3, 3),)),
        (0, (1, 4, 9), ((2, 3), (5, 8))),
        (7, (8,), ()),
        (0, (), ()),
    ],
)
def test_versions_that_are_not_there_are_named(base: int, versions: tuple[int, ...], missing: Any) -> None:
    assert gaps(base, versions) == missing


def test_an_epoch_is_told_from_another_by_its_number() -> None:
    assert [ordinal(each) for each in ("3-9f2c01ab", "12-00000000", "", "x-1", "3")] == [3, 12, 0, 0, 3]


def named(*commits: tuple[int, int]) -> list[str]:
    """The branch of each commit, given as version and offset, in the order in which they come."""
    line = _Line(None, "session:s", 0, "3-a", None)  # type: ignore[arg-type]  # naming asks no database
    names = []
    for version, offset in commits:
        names.append(line._name(entry(version, offset)))
        line._held.setdefault(names[-1], {})[version] = offset
    return names


def test_one_line_has_the_name_of_its_epoch_in_whatever_order_it_comes() -> None:
    assert named((3, 10), (4, 11), (5, 19)) == ["3-a"] * 3
    assert named((5, 19), (3, 10), (4, 11)) == ["3-a"] * 3


def test_what_has_a_version_twice_is_another_line() -> None:
    assert named((3, 10), (3, 12), (4, 11), (4, 13)) == ["3-a", "3-a.2", "3-a", "3-a.2"]
    assert named((3, 10), (4, 11), (3, 12), (4, 13), (5, 14)) == ["3-a", "3-a", "3-a.2", "3-a.2", "3-a.2"]
    assert named((3, 10), (3, 11), (3, 12)) == ["3-a", "3-a.2", "3-a.3"]


def branch(fields: dict[bytes, bytes], first_message: int, *own: int) -> BranchState:
    stored = {number: field_ttl.dated(b'{"role":"user"}', 1000 + number) for number in own}
    return BranchState(State("3-a", 9, fields), 5, first_message, stored)


def test_messages_from_before_a_branch_are_shared_and_later_ones_its_own() -> None:
    """In a run that goes across, and in one that the record had from another."""
    runs = [Segment("session:parent", 0, 4), Segment("session:s", 6, 9)]
    found = messages_of(
        "session:s", branch({SEGMENTS: message_ranges.dump(runs), START: b"10", NEXT: b"12"}, 8, 8, 9, 10, 11)
    )
    assert found.shared == [Segment("session:parent", 0, 4), Segment("session:s", 6, 8)]
    assert (found.own, found.following) == ([8, 10, 11], 12)
    assert message_ranges.parse(message_ranges.dump(found.runs("session:f"))) == [
        *found.shared, Segment("session:f", 8, 9), Segment("session:f", 10, 12)
    ]  # fmt: skip
    codec = Codec("n", "session:s")
    steps = found.copied(codec, codec.of("session:f"))
    assert steps == [(b"m", b"%d" % number, b'!%d {"role":"user"}' % (1000 + number)) for number in (8, 10, 11)]


def test_a_branch_without_messages_of_its_own_shares_all() -> None:
    found = messages_of("session:s", branch({NEXT: b"3"}, 3))
    assert (found.shared, found.own, found.following) == ([Segment("session:s", 0, 3)], [], 3)
    assert messages_of("user:u", branch({}, 0)).runs("user:f") == []


def test_part_of_a_branch_is_chosen_by_version() -> None:
    rows = [entry(version, version) for version in (3, 4, 7)]
    assert [row.version for row in between(rows, 3, 7, None)] == [4]
    assert [row.version for row in between(rows, 0, None, 2)] == [3, 4]


@pytest.mark.parametrize("wrong", ["", "é", "a\n", "x" * 101, 3, None])
def test_what_can_be_no_id_of_a_branch_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidValue):
        checked(wrong)
    assert checked("3-9f2c01ab.2") == "3-9f2c01ab.2"
