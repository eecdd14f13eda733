"""The clocks of several servers, of which the earliest counts, and the moments at which a replica asks."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from distributed_state.errors import WarmUnavailable
from distributed_state.port.blocking import finish
from distributed_state.warm.clock import ROUND_SECONDS, Rounds, ServerClock

pytestmark = pytest.mark.unit


class Servers:
    """A port: how far each server's clock is ahead of 1,000,000 s, None for one that does not answer."""

    def __init__(self, **ahead: float | None) -> None:
        self.ahead = ahead
        self.time = 100.0
        self.takes = 0.0
        self.asked: list[str] = []

    def monotonic(self) -> float:
        return self.time

    def nodes(self) -> list[str]:
        return sorted(self.ahead)

    async def command_with(self, node: str, *words: Any) -> Any:
        assert words == (b"TIME",)
        self.asked.append(node)
        ahead = self.ahead[node]
        if ahead is None:
            raise WarmUnavailable(node)
        shown = 1_000_000 + self.time + ahead + self.takes / 2
        self.time += self.takes
        return [b"%d" % shown, b"%d" % (shown % 1 * 1e6)]


def clock_of(servers: Servers) -> ServerClock:
    clock = ServerClock(servers)  # type: ignore[arg-type]
    finish(clock.know())
    return clock


def test_the_earliest_clock_counts() -> None:
    servers = Servers(a=0.0, b=-3.0, c=2.0)
    clock = clock_of(servers)
    assert servers.asked == ["a", "b", "c"]
    assert clock.now() == pytest.approx(1_000_000 + servers.time - 3, abs=0.01)
    assert clock.earliest_ms() == pytest.approx(clock.now() * 1000, abs=1)
    servers.time += 1
    assert clock.now() == pytest.approx(1_000_000 + servers.time - 3, abs=0.01)


def test_it_is_never_later_than_any_servers_clock() -> None:
    """Answers take their time, clocks drift, the monotonic one is read at another moment."""
    servers = Servers(a=0.0, b=-0.2)
    servers.takes = 0.5
    clock = clock_of(servers)
    for passed in (0, 10, 1000):
        servers.time += passed
        slowest = servers.time - 0.2 - passed * 0.0005
        assert clock.earliest_ms() / 1000 <= 1_000_000 + slowest
        assert clock.earliest_ms() / 1000 >= 1_000_000 + slowest - 0.5 - 0.001 * servers.time


def test_each_is_asked_once_a_minute() -> None:
    servers = Servers(a=0.0, b=0.0)
    clock = clock_of(servers)
    finish(clock.know())
    assert len(servers.asked) == 2
    servers.ahead["c"] = -7.0
    finish(clock.know())
    assert servers.asked[2:] == ["c"], "one that has come"
    assert clock.now() == pytest.approx(1_000_000 + servers.time - 7, abs=0.01)
    servers.time += 61
    finish(clock.know())
    assert servers.asked[3:] == ["a", "b", "c"]


def test_one_that_has_left_counts_no_more() -> None:
    servers = Servers(a=0.0, b=-3.0)
    clock = clock_of(servers)
    del servers.ahead["b"]
    finish(clock.know())
    assert clock.now() == pytest.approx(1_000_000 + servers.time, abs=0.01)


def test_one_that_does_not_answer_is_no_hindrance_unless_it_is_the_only_one() -> None:
    servers = Servers(a=None, b=1.0)
    clock = clock_of(servers)
    assert clock.now() == pytest.approx(1_000_001 + servers.time, abs=0.01)
    finish(clock.know())
    assert servers.asked == ["a", "b"], "nor is each question held up by it"
    alone = Servers(a=None)
    for asked in (1, 2):
        with pytest.raises(WarmUnavailable):
            clock_of(alone)
        assert len(alone.asked) == asked
    assert ServerClock(alone).earliest_ms() == 0  # type: ignore[arg-type]
    with pytest.raises(WarmUnavailable, match="time of Redis is not known"):
        ServerClock(alone).now()  # type: ignore[arg-type]


def test_what_proved_wrong_is_asked_anew() -> None:
    servers = Servers(a=0.0, b=0.0)
    clock = clock_of(servers)
    servers.ahead = {"a": 100.0, "b": 50.0}
    servers.takes = 2.0
    finish(clock.know())
    assert clock.now() == pytest.approx(1_000_000 + servers.time, abs=0.01)
    finish(clock.ask())
    assert clock.now() == pytest.approx(1_000_050 + servers.time, abs=0.01)
    assert math.isfinite(clock.earliest_ms())


# The moments at which a replica asks for what may wait


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
        assert seconds - ROUND_SECONDS < clock.rounds.pause(seconds) <= seconds + 0.05


def test_what_is_to_be_asked_within_less_than_a_round_does_not_wait_for_one() -> None:
    assert Clock().rounds.pause(2.0) == 2.0


def test_a_moment_has_passed_once() -> None:
    clock = Clock()
    clock.now += clock.rounds.left
    at = clock.now
    assert not clock.rounds.passed(at)
    clock.now = at + ROUND_SECONDS - 0.1
    assert not clock.rounds.passed(at)
    assert clock.rounds.left == pytest.approx(0.1)
    clock.now = at + ROUND_SECONDS - 1e-9
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
