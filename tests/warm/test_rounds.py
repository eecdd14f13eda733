"""The moments at which a replica asks for what may wait."""

from __future__ import annotations

import random

import pytest

from distributed_state.warm.rounds import SECONDS, Rounds

pytestmark = pytest.mark.unit


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = random.uniform(0, 1e5)
        self.rounds = Rounds(lambda: self.now)


def moments(clock: Clock, pauses: list[float], seconds: float) -> set[float]:
    """When jobs with these pauses, which begin at any time, ask once they have done so once."""
    found = set()
    for pause in pauses:
        clock.now = began = 1000.0 + random.random() * 7
        while clock.now < began + seconds:
            # A timer is a little late, or a nanosecond early.
            clock.now += clock.rounds.pause(pause) + random.choice((-1e-9, 1e-4))
            found.add(round(clock.now, 1))
    return found


def test_jobs_of_a_replica_ask_at_the_same_moments() -> None:
    clock = Clock()
    assert len(moments(clock, [3.0, 3.34, 6.0, 10.0], 60.0)) <= 24


def test_each_alone_would_ask_at_moments_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    clock = Clock()
    monkeypatch.setattr(clock.rounds, "pause", lambda seconds: seconds)
    assert len(moments(clock, [3.0, 3.34, 6.0, 10.0], 60.0)) > 40


@pytest.mark.parametrize("seconds", [3.0, 3.34, 6.7, 10.0, 30.0])
def test_none_asks_later_than_it_was_to_but_for_an_instant_nor_much_sooner(seconds: float) -> None:
    for _ in range(200):
        clock = Clock()
        assert seconds - SECONDS < clock.rounds.pause(seconds) <= seconds + 0.05


def test_what_is_to_be_asked_within_less_than_a_round_does_not_wait_for_one() -> None:
    assert Clock().rounds.pause(2.0) == 2.0


def test_a_moment_has_passed_once() -> None:
    clock = Clock()
    clock.now += clock.rounds.left
    at = clock.now
    assert not clock.rounds.passed(at)
    clock.now = at + SECONDS - 0.1
    assert not clock.rounds.passed(at)
    assert clock.rounds.left == pytest.approx(0.1)
    clock.now = at + SECONDS - 1e-9
    assert clock.rounds.passed(at)
    assert not clock.rounds.passed(clock.now)


@pytest.mark.parametrize(("members", "seconds"), [(1, 3.0), (300, 3.0), (600, 6.0), (900, 9.0), (5000, 9.0)])
def test_in_a_large_fleet_the_moments_lie_further_apart(members: int, seconds: float) -> None:
    """So that a thousand wake a server no more often than three hundred do."""
    clock = Clock()
    clock.rounds.spread(members)
    clock.now += clock.rounds.left
    assert clock.rounds.left == pytest.approx(seconds, abs=0.1)
    at = clock.now
    clock.now = at + seconds - 0.1
    assert not clock.rounds.passed(at)
    clock.now = at + seconds
    assert clock.rounds.passed(at)
    assert clock.rounds.pause(2.9) == 2.9
