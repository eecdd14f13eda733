"""What is said of a partition that cannot be seen (values in, values out)."""

from __future__ import annotations

import pytest

from distributed_state.store.doctor import Journals
from distributed_state.store.watch import carried_on
from distributed_state.warm.answers import PartitionState

pytestmark = pytest.mark.unit

IDLE, BUSY = PartitionState("1-a", 7, 7, 0), PartitionState("1-a", 9, 7, 100)


def test_one_whose_server_is_away_grows_older_by_what_has_passed() -> None:
    before = Journals({1: BUSY, 2: IDLE}, {1: 4.0})
    found = carried_on(Journals({}, {}), before, 2.0, [1, 2])
    assert found == Journals({1: BUSY, 2: IDLE}, {1: 6.0})
    assert carried_on(Journals({}, {}), found, 2.0, [1, 2]).ages == {1: 8.0}


def test_one_that_is_somebody_elses_is_forgotten() -> None:
    assert carried_on(Journals({}, {}), Journals({1: BUSY}, {1: 4.0}), 2.0, [2]) == Journals({}, {})


def test_what_waits_and_is_not_in_the_journal_has_no_lag_of_nothing() -> None:
    found = carried_on(Journals({1: BUSY}, {}), Journals({1: IDLE}, {}), 2.0, [1])
    assert found.ages == {1: 2.0}


def test_what_is_seen_is_as_it_is_seen() -> None:
    now = Journals({1: BUSY, 2: IDLE}, {1: 0.5})
    assert carried_on(now, Journals({1: BUSY, 2: BUSY}, {1: 4.0, 2: 4.0}), 2.0, [1, 2]) == now
