"""Where the time of a turn goes: each second counts once, and what is written of it stays small."""

from __future__ import annotations

import pytest

from distributed_state import InvalidValue
from distributed_state.cold.record_index import parse
from distributed_state.conversation.turn_clock import TurnClock
from distributed_state.results import TimedRun, TurnTimes
from distributed_state.values import turn_times
from distributed_state.values.journal import KINDS, JournalEntry, fold, pack
from distributed_state.values.model import REQUEST, TIMES

pytestmark = pytest.mark.unit


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def turn(clock: Clock) -> TurnClock:
    """A turn that has waited for 0.25 s and then read for 0.5 s."""
    turn = TurnClock(clock)
    turn.begin()
    clock.now += 0.75
    turn.held(0.25)
    return turn


def test_waiting_reading_running_and_the_rest_are_told_apart(turn: TurnClock, clock: Clock) -> None:
    with turn.running("model", "gpt"):
        clock.now += 2
    clock.now += 0.125
    with turn.running("tool", "search"):
        clock.now += 4
    with turn.reading():
        clock.now += 0.5
    turn.stop()
    clock.now += 0.5
    turn.committed()
    assert turn.times == TurnTimes(
        total=7.375, lock=0.25, read=1.0, elsewhere=0.125,
        runs=(TimedRun("model", "gpt", 2), TimedRun("tool", "search", 4)), commit=0.5,
    )  # fmt: skip
    assert turn.parts == {"lock": 0.25, "read": 1.0, "elsewhere": 0.125, "model": 2, "tool": 4, "commit": 0.5}


def test_what_runs_at_the_same_time_leaves_no_less_than_nothing_for_elsewhere(turn: TurnClock, clock: Clock) -> None:
    first, second = turn.running("tool", "a"), turn.running("tool", "b")
    with first:
        clock.now += 1
        with second, turn.running("model", "m"):
            clock.now += 2
    clock.now += 0.5
    turn.stop()
    times = turn.times
    assert [(run.name, run.seconds) for run in times.runs] == [("m", 2), ("b", 2), ("a", 3)]
    assert (times.total, times.elsewhere) == (4.25, 0.5)


def test_a_turn_that_goes_on_can_be_looked_at(turn: TurnClock, clock: Clock) -> None:
    with turn.running("tool", "a"):
        clock.now += 1
        assert (turn.times.total, turn.times.elsewhere, turn.times.runs) == (1.75, 0, ())
    assert TurnClock(clock).times == TurnTimes(total=0)


def test_a_tool_that_fails_took_its_time_all_the_same(turn: TurnClock, clock: Clock) -> None:
    with pytest.raises(KeyError), turn.running("tool", "a"):
        clock.now += 1
        raise KeyError
    assert turn.times.runs == (TimedRun("tool", "a", 1),)
    assert turn.times.elsewhere == 0


def test_the_slowest_are_kept_one_by_one_and_the_others_as_a_sum(turn: TurnClock, clock: Clock) -> None:
    for number in range(100):
        with turn.running("tool", f"{number}" + "x" * 200):
            clock.now += 64 - number if number % 2 else 1
    turn.stop()
    times = turn.times
    assert len(times.runs) == turn_times.MOST_RUNS
    assert times.more == 100 - turn_times.MOST_RUNS
    assert sum(run.seconds for run in times.runs) + times.more_seconds == times.total - 0.75
    assert min(run.seconds for run in times.runs) > 1
    assert len(turn_times.operation_of(times)[1]) < 900, "a few hundred bytes, however many tools run"


def test_what_is_noted_is_read_back(turn: TurnClock, clock: Clock) -> None:
    with turn.running("model", "Ünicode " * 10):
        clock.now += 1.23456
    turn.stop()
    turn.committed()
    kind, name, value = turn_times.operation_of(turn.times)
    assert turn_times.read(name) == TurnTimes(
        total=1.9846, lock=0.25, read=0.5, runs=(TimedRun("model", ("Ünicode " * 10)[:40], 1.2346),)
    )
    assert len(turn_times.operation_of(TurnTimes(total=0.00123, read=0.0004))[1]) < 42
    # Whoever knows nothing of it finds the deletion of a field that no record has.
    assert (kind in KINDS, name[:2], value) == (True, REQUEST, b"")
    fields = {b"a": b"1"}
    fold(fields, [(kind, name, value)])
    assert fields == {b"a": b"1"}
    entry = JournalEntry(1, "w.1.x", "session:s", 1, 0, "turn", "", 0, pack([(kind, name, value)]), 0)
    parsed = parse(entry, 0, "e")
    assert (parsed.data, parsed.touched, parsed.label) == (entry.data, (), None)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"1", b'{"runs":1}', b'{"runs":[["x","a",1]]}', b'{"runs":[["t",5,1]]}', b'{"total":-1}',
     b'{"total":"a"}', b'{"more":[1]}', b'{"total":1e999}', b"\xff", b'{"runs":[["t","a"]]}'],
)  # fmt: skip
def test_what_cannot_be_read_is_no_reason_to_refuse_the_change_beside_it(data: bytes) -> None:
    assert turn_times.read(TIMES + data) is None
    later = turn_times.read(TIMES + b'{"total":1,"of_a_later_release":[2]}')
    assert later == TurnTimes(total=1), "the negative control"


def test_what_a_client_ran_before_it_sent_the_turn_counts_to_it(turn: TurnClock, clock: Clock) -> None:
    turn.reported(4.0, [TimedRun("tool", "search", 3.0)])
    clock.now += 0.125
    turn.stop()
    assert turn.times == TurnTimes(
        total=4.875, lock=0.25, read=0.5, elsewhere=1.125, runs=(TimedRun("tool", "search", 3.0),)
    )


@pytest.mark.parametrize("name", ["", None, 5])
def test_what_runs_has_a_name(turn: TurnClock, name: object) -> None:
    with pytest.raises(InvalidValue), turn.running("model", name):  # type: ignore[arg-type]
        pytest.fail("it ran")
