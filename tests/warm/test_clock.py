"""The clocks of several servers, as one replica estimates them: the earliest counts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from distributed_state.errors import WarmUnavailable
from distributed_state.port.blocking import finish
from distributed_state.warm.clock import ServerClock

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
    assert clock.now() == pytest.approx(1_000_000 + servers.time - 3)
    assert clock.earliest_ms() == pytest.approx(clock.now() * 1000, abs=1)
    servers.time += 1
    assert clock.now() == pytest.approx(1_000_000 + servers.time - 3)


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
    assert clock.now() == pytest.approx(1_000_000 + servers.time - 7)
    servers.time += 61
    finish(clock.know())
    assert servers.asked[3:] == ["a", "b", "c"]


def test_one_that_has_left_counts_no_more() -> None:
    servers = Servers(a=0.0, b=-3.0)
    clock = clock_of(servers)
    del servers.ahead["b"]
    finish(clock.know())
    assert clock.now() == pytest.approx(1_000_000 + servers.time)


def test_one_that_does_not_answer_is_no_hindrance_unless_it_is_the_only_one() -> None:
    servers = Servers(a=None, b=1.0)
    clock = clock_of(servers)
    assert clock.now() == pytest.approx(1_000_001 + servers.time)
    finish(clock.know())
    assert servers.asked == ["a", "b"], "nor is each question held up by it"
    alone = Servers(a=None)
    for asked in (1, 2):
        with pytest.raises(WarmUnavailable):
            clock_of(alone)
        assert len(alone.asked) == asked
    assert ServerClock(alone).earliest_ms() == 0  # type: ignore[arg-type]
    with pytest.raises(WarmUnavailable, match="what time"):
        ServerClock(alone).now()  # type: ignore[arg-type]


def test_what_proved_wrong_is_asked_anew() -> None:
    servers = Servers(a=0.0, b=0.0)
    clock = clock_of(servers)
    servers.ahead = {"a": 100.0, "b": 50.0}
    servers.takes = 2.0
    finish(clock.know())
    assert clock.now() == pytest.approx(1_000_000 + servers.time)
    finish(clock.ask())
    assert clock.now() == pytest.approx(1_000_050 + servers.time)
    assert math.isfinite(clock.earliest_ms())
