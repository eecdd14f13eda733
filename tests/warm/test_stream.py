"""Where a consumer goes on in a partition's events (values in, values out)."""

from __future__ import annotations

import pytest

from distributed_state.warm.consumers import RecentEvents
from distributed_state.warm.stream import BEGINNING, Head, Position, StreamEvent, parsed, shown

pytestmark = pytest.mark.unit

NOW = Head("4-d", 30, 5, "3-c@20 2-b@9")


@pytest.mark.parametrize(
    ("at", "lost", "next_"),
    [
        (Position("4-d", 25), "", None),
        (Position("4-d", 31), "rewound", Position("4-d", 30)),
        (Position("4-d", 4), "trimmed", Position("4-d", 5)),
        (Position("3-c", 20), "", None),
        (Position("3-c", 23), "epoch", Position("4-d", 20)),
        (Position("3-c", 2), "trimmed", Position("4-d", 5)),
        (Position("2-b", 9), "", None),
        (Position("2-b", 11), "epoch", Position("4-d", 9)),
        (Position("2-a", 3), "epoch", Position("4-d", 5)),
        (Position.behind(3), "trimmed", Position("4-d", 5)),
        (Position.behind(2), "epoch", Position("4-d", 5)),
        (Position.behind(3, 7), "trimmed", Position("4-d", 5)),
        (BEGINNING, "trimmed", Position("4-d", 5)),
    ],
)
def test_a_consumer_goes_on_where_it_was_or_is_told(at: Position, lost: str, next_: Position | None) -> None:
    assert NOW.lost(at) == lost
    if next_ is not None:
        assert NOW.next(at) == next_


@pytest.mark.parametrize("continues", ["", "3-c@20"])
def test_an_epoch_that_the_stream_does_not_continue_has_no_end_there(continues: str) -> None:
    assert NOW._replace(continues=continues).end_of("2-b") == -1
    assert NOW._replace(continues=continues).lost(Position("2-b", 9)) == "epoch"


def test_behind_an_epoch_that_seemed_over_a_consumer_is_told_of_events_that_it_did_not_know() -> None:
    nothing, new = Head("", 0, 0), Head("4-d", 2, 0, ended=7)
    for at, lost in ((Position.behind(3, 7), ""), (Position.behind(3, 6), "epoch"), (Position.behind(3), "")):
        assert nothing.lost(at) == ""
        assert new.lost(at) == lost
        assert new.next(at) == Position("4-d", 0)
        assert Position.parse(str(at).encode()) == at == parsed(shown({0: at}), 1)[0]
    for at in (Position("3-c", 6), Position.missed(3, 6)):
        assert nothing.lost(at) == "epoch"
        assert nothing.next(at) == Position.behind(3, 6)
    assert nothing.next(Position.missed(3)) == Position.behind(3)
    assert Head("4-d", 9, 0, "3-c@7").lost(Position.behind(3, 6)) == "", "the stream continues it"


def events(*offsets: int, origin: str = "a") -> list[StreamEvent]:
    return [StreamEvent(each, b"%s.%d\ntype" % (origin.encode(), each), b"") for each in offsets]


def test_what_was_taken_last_is_known_by_its_id_up_to_a_position() -> None:
    recent = RecentEvents()
    recent.note(0, "1-a", events(1, 2, 3))
    recent.note(0, "1-a", events(2))  # by a slower consumer
    recent.note(1, "1-a", events(1, origin="other"))
    recent.note(0, "2-b", events(3, origin="b"))
    assert recent.until(0, Position("1-a", 2)) == {b"a.1", b"a.2"}
    assert recent.until(0, Position("2-b", 3)) == {b"a.1", b"a.2", b"a.3", b"b.3"}
    assert recent.until(0, Position.behind(1)) == {b"a.1", b"a.2", b"a.3"}, "of an epoch that is over, all"
    assert recent.until(0, BEGINNING) == frozenset()
    assert recent.until(0, Position("1-a", 1), frozenset({b"a.3", b"c.9"})) == {b"a.1", b"a.3"}, "of two losses, both"
    assert recent.until(2, Position("1-a", 2)) == frozenset()


def test_it_is_known_in_whatever_order_it_was_taken_and_bounded() -> None:
    recent = RecentEvents()
    recent.note(0, "1-a", events(6))  # received
    recent.note(0, "1-a", events(*range(1, 6)))  # read, by who was behind
    assert len(recent.until(0, Position("1-a", 6))) == 6
    recent.note(0, "1-a", events(*range(7, 1000)))
    assert len(recent.until(0, Position("1-a", 1000))) == 256
    recent.note(0, "1-a", events(*range(1, 300)))  # who reads all that is kept drives out nothing
    assert recent.until(0, Position("1-a", 1000)) == {each.id for each in events(*range(744, 1000))}
    recent.note(0, "1-z", events(1, origin="z"))  # SQL and Redis were emptied, so epochs begin at 1 again
    assert b"z.1" in recent.until(0, Position("1-z", 1))
