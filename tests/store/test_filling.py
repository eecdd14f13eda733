"""When a journal would be full (values in, values out)."""

from __future__ import annotations

from math import inf

import pytest

from distributed_state.settings import Settings
from distributed_state.store.watch import Filling
from distributed_state.warm.answers import PartitionState

pytestmark = pytest.mark.unit


class Looks:
    """One partition, looked at now and then."""

    def __init__(self) -> None:
        self.moment = 100.0
        self.filling = Filling(Settings(journal_entries=1000, journal_bytes=2**20), lambda: self.moment)

    def at(self, moment: float, entries: int, *, waiting: int = 0, epoch: str = "1-a") -> float:
        self.moment = 100.0 + moment
        self.filling.note({7: PartitionState(epoch, 5000 + entries, 5000, waiting)})
        return self.filling.seconds_left()[7]


def test_a_journal_that_grows_evenly_is_full_when_its_rate_says() -> None:
    looks = Looks()
    assert looks.at(0, 0) == inf
    for second in range(1, 12):
        left = looks.at(second, 10 * second)
    assert left == pytest.approx((1000 - 110) / 10, rel=0.01)
    for second in range(12, 24):
        left = looks.at(second, 110, waiting=2**17 + 2**12 * second)
    assert left == pytest.approx((2**20 - 2**17 - 2**12 * 23) / 2**12, rel=0.01), "by its bytes"


def test_one_that_is_emptied_in_time_is_never_full() -> None:
    looks = Looks()
    for second in range(20):
        left = looks.at(second, 500 - 20 * second)
    assert left == inf


def test_a_burst_is_no_rate_and_another_epoch_begins_anew() -> None:
    looks = Looks()
    looks.at(0, 0)
    assert looks.at(0.01, 900) == inf
    assert looks.at(1.01, 900) < inf
    assert looks.at(2.1, 10, epoch="2-b") == inf


def test_one_that_is_full_refuses_now() -> None:
    looks = Looks()
    looks.at(0, 1000)
    assert looks.at(1, 1000) == 0.0


def test_what_somebody_else_archives_is_left_out() -> None:
    looks = Looks()
    looks.at(0, 1)
    looks.filling.note({})
    assert looks.filling.seconds_left() == {}
