"""What is stored of a session's handler."""

from __future__ import annotations

import pytest

from distributed_state.values.schedule import Failure, Schedule

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "schedule",
    [Schedule("a"), Schedule("a.b", 5, 2, 7), Schedule("a", None, 8, None, True)],
)
def test_a_schedule_is_read_as_it_was_stored(schedule: Schedule) -> None:
    assert Schedule.read(schedule.stored) == schedule


@pytest.mark.parametrize("error", ["ValueError", "Größe", "two words"])
def test_a_failure_is_read_as_it_was_stored(error: str) -> None:
    assert Failure.read(Failure(error, 1_767_225_600_000).stored) == Failure(error, 1_767_225_600_000)


@pytest.mark.parametrize("stored", [b"", b"ValueError", b"5", b"x ValueError", b"5 a\nb", b"1" * 19 + b" E"])
def test_anything_else_is_not_a_failure(stored: bytes) -> None:
    with pytest.raises(ValueError, match="#be is"):
        Failure.read(stored)
