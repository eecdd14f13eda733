"""The judge of the fault matrix: each thing that can go wrong with a write is seen, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deploy.load.matrix import events_judge
from deploy.load.matrix.histories import Found, Read, Write, begun, marked, name_of, names_in
from deploy.load.matrix.judge import Required, Tally, longest_gap, missed, tallies
from deploy.load.matrix.linear import violations

pytestmark = pytest.mark.unit

RECORD = "memory/0"


def write(number: int, start: float, end: float, version: int, writer: str = "w0", error: str = "") -> Write:
    return Write(name_of(writer, "memory", number, start), RECORD, "memory", writer, start, end, version, error)


def read(start: float, end: float, of: Write | None, *, fresh: bool = True) -> Read:
    return Read("r0", RECORD, start, end, of.version if of else 0, of.name if of else "", fresh)


# Two writers in turn, one of them over the end of the other.
WRITES = [write(0, 1.0, 2.0, 1), write(0, 1.5, 3.0, 2, "w1"), write(1, 4.0, 5.0, 3)]
ORDER = [each.name for each in WRITES]
READS = [read(0.5, 1.2, None), read(2.5, 2.6, WRITES[1]), read(5.5, 5.6, WRITES[2])]


def judged(
    writes: list[Write] = WRITES, reads: list[Read] = READS, order: list[str] = ORDER, *, lossy: bool = False
) -> list[str]:
    return list(violations(order, writes, reads, max_staleness=1.0, lossy=lossy))


def test_a_history_with_an_order_passes() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("writes", "reads", "order", "said"),
    [
        (WRITES, [], [ORDER[1], ORDER[0], ORDER[2]], "stands as version 2"),
        ([replace(WRITES[0], start=3.5, end=3.6), *WRITES[1:]], [], ORDER, "had ended before it began"),
        (WRITES, [replace(READS[1], last=ORDER[0])], ORDER, "with the state of version 1"),
        (WRITES, [read(0.5, 0.9, WRITES[0])], ORDER, "before it was begun"),
        (WRITES, [read(5.5, 5.6, WRITES[1])], ORDER, "although version 3 had ended"),
        (WRITES, [read(2.5, 2.6, WRITES[1]), read(2.7, 2.8, WRITES[0])], ORDER, "although version 2 had ended"),
        (WRITES, [read(6.5, 6.6, WRITES[1], fresh=False)], ORDER, "from memory although version 3 had ended"),
    ],
)
def test_a_doctored_history_is_refused(writes: Any, reads: Any, order: Any, said: str) -> None:
    """Negative control for each of the five rules."""
    assert any(said in each for each in judged(writes, reads, order))


def test_a_read_from_memory_may_be_as_old_as_agreed() -> None:
    assert judged(reads=[read(5.5, 5.6, WRITES[1], fresh=False)]) == []


def test_a_write_that_was_seen_lost_and_repeated_has_the_place_where_it_was_carried_out_again() -> None:
    seen = read(4.1, 4.2, replace(WRITES[2], version=2))
    assert judged(reads=[*READS, seen], lossy=True) == []
    assert judged(reads=[*READS, seen]) != [], "nothing was lost"
    assert judged(reads=[*READS, replace(seen, start=5.1, end=5.2)], lossy=True) != [], "it was acknowledged"
    assert judged(reads=[*READS, replace(seen, count=4)], lossy=True) != [], "no later place was its first"


def test_a_write_of_unknown_outcome_may_have_taken_effect_or_not() -> None:
    unknown = write(2, 5.2, 9.0, 0, error="WarmUnavailable: x")
    late = read(9.5, 9.6, replace(unknown, version=4))
    assert judged([*WRITES, unknown], [*READS, late], [*ORDER, unknown.name]) == []
    assert judged([*WRITES, unknown]) == []


def test_a_name_stands_in_whatever_keeps_it() -> None:
    name = name_of("w0'", "replicated:1", 7, 12.5)
    assert names_in(b"\x00" + marked(name).encode() + b"\xff") == [name]
    assert begun(name) == 12.5
    assert names_in("<<nothing>>") == []


# What became of each write


def found(**changed: Any) -> Found:
    shown = tuple(ORDER)
    archived = tuple(("e", at, name) for at, name in enumerate(ORDER, 1))
    return replace(Found(RECORD, len(shown), len(shown), shown, archived), **changed)


def tally(there: Found, writes: list[Write] = WRITES) -> Tally:
    return tallies(writes, [], {RECORD: there}, max_staleness=1.0)["memory"]


def verdict(there: Found, *, dead: str = "", report: str = "", required: Required | None = None) -> list[str]:
    return list(missed(tally(there), "memory", required or Required(), {dead}, report))


def short(**changed: Any) -> Found:
    """The last write is not shown."""
    return found(**({"version": 2, "count": 2, "shown": tuple(ORDER[:2]), "archived": found().archived[:2]} | changed))


def test_what_is_shown_once_is_kept() -> None:
    assert verdict(found()) == []
    assert tally(found()).acknowledged == 3


def test_what_is_nowhere_is_lost() -> None:
    assert tally(short()).lost == [ORDER[2]]
    assert "1 of 3 acknowledged writes lost" in verdict(short())[0]


def test_what_sql_has_and_readers_are_not_shown_is_hidden() -> None:
    assert tally(short(archived=found().archived)).hidden == [ORDER[2]]
    assert "hidden" in verdict(short(archived=found().archived))[0]


def test_a_record_that_cannot_be_read_hides_what_sql_and_redis_have() -> None:
    there = found(shown=(), archived=found().archived[:1], warm=frozenset(ORDER[1:2]), problem="ColdUnavailable: x")
    assert tally(there).hidden == ORDER[:2]
    assert tally(there).lost == ORDER[2:]
    assert any("cannot be read" in each for each in verdict(there))


@pytest.mark.parametrize("where", ["branched", "quarantined"])
def test_what_was_put_aside_is_neither_lost_nor_hidden_if_it_has_a_cause(where: str) -> None:
    assert verdict(short(**{where: {ORDER[2]: "failover"}})) == []
    assert getattr(tally(short(**{where: {ORDER[2]: "failover"}})), where) == [ORDER[2]]
    assert verdict(short(**{where: {ORDER[2]: ""}})) == ["memory: 1 writes put aside without a cause"]


@pytest.mark.parametrize(
    "there",
    [
        found(shown=(*ORDER, ORDER[0]), version=4, count=4),
        found(archived=(*found().archived, ("e", 4, ORDER[0]))),
        found(count=4),
    ],
)
def test_what_is_there_twice_is_doubled(there: Found) -> None:
    assert tally(there).doubled
    assert any("doubled" in each for each in verdict(there))


def test_a_record_whose_version_and_content_differ_is_a_problem() -> None:
    assert "is at version 4" in verdict(found(version=4))[0]


def test_what_died_with_its_writer_is_forgiven_if_a_report_says_where() -> None:
    place = "partition 3: writes after offset 41 may be lost"
    assert "no report says where" in verdict(short(), dead="w0")[0]
    assert verdict(short(), dead="w0", report=place) == []
    assert verdict(short(), dead="w1", report=place) != [], "its writer lives, and had to put it back"


@pytest.mark.parametrize(
    ("level", "required", "keeps"),
    [
        ("archived", Required(failover=True, same_data=False), True),
        ("replicated", Required(failover=True), True),
        ("replicated", Required(), False),
        ("replicated:1", Required(failover=True), False),
        ("fsynced", Required(fsync_always=True), True),
        ("fsynced", Required(fsync_always=True, same_data=False), False),
        ("fsynced", Required(), False),
        ("memory", Required(failover=True, fsync_always=True), False),
    ],
)
def test_a_level_has_to_outlive_its_writer_where_it_promises_so(level: str, required: Required, keeps: bool) -> None:
    assert required.keeps(level) is keeps
    lost = tally(short())
    said = list(missed(lost, level, required, {"w0"}, "partition 3: writes after offset 41 may be lost"))
    assert bool(said) is keeps


def test_writes_that_do_not_go_on_are_missed() -> None:
    assert list(missed(Tally(went_on=False), "memory", Required(), (), "")) != []


def test_a_gap_is_looked_for_from_the_fault_on() -> None:
    assert longest_gap([1.0, 9.0, 10.0, 14.0], 8.0, 15.0) == 4.0
    assert longest_gap([], 8.0, 15.0) == 7.0


# Events


def event(sequence: int, epoch: str = "1-a", id: str = "") -> dict[str, Any]:
    return {"id": id or f"e{sequence}", "partition": 0, "epoch": epoch, "sequence": sequence}


def misheard(received: list[Any], places: dict[tuple[int, str, int], str] | None = None) -> list[str]:
    return list(events_judge.amiss(["e1", "e2"], {"l0": received}, (), places or {}))


def test_events_that_are_heard_once_and_in_order_pass() -> None:
    assert misheard([event(1), event(2)]) == []
    assert misheard([{"resync": "emptied"}, event(2)]) == []


@pytest.mark.parametrize("received", [[event(1)], [event(1), event(1), event(2)], [event(2), event(1)], []])
def test_events_that_are_missed_doubled_or_out_of_order_are_seen(received: list[Any]) -> None:
    assert misheard(received) != []


def test_a_number_under_which_something_came_again_may_be_missing_and_no_other() -> None:
    received = [event(1), event(2), {"resync": "epoch"}, event(2, "2-b", "e3"), event(4, "2-b", "e4")]
    assert misheard(received, {(0, "2-b", 3): "e2"}) == []
    assert misheard(received, {(0, "2-b", 3): "e5"}) != []
    assert misheard(received) != [], "SQL knows nothing of it"
