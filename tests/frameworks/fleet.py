"""Four processes that work on the same things and are killed in the middle. Law: a line for each thing acknowledged."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

from below import Worker


class Member(Worker):
    """One of them: a function of a file beside this one."""

    def __init__(self, crew: str, function: str, **arguments: Any) -> None:
        self.crew = crew if "/" in crew else f"frameworks/{crew}"
        self.count = 0
        super().__init__(function, **arguments)

    def until_now(self) -> list[str]:
        """What it said since it was asked last."""
        lines = [self.line() for _ in range(self._said.qsize())]
        assert "" not in lines, f"a worker of {self.crew} ended by itself"
        self.count += len(lines)
        return lines

    def killed(self) -> list[str]:
        """Kill it; what it said before."""
        self.kill()
        return [*iter(self.line, "")]

    @property
    def busy(self) -> bool:
        return self.count > 5


def fleet(crew: str, function: str, *, enough: int, kills: int, seconds: float = 120.0, **arguments: Any) -> list[str]:
    """Kill one after the other, each when it is at work, and begin another; what they all acknowledged.

    That is `enough` lines at least, and each of the last four is at work with the others.
    """
    names = (f"w{number}" for number in itertools.count())
    members: list[Member] = []
    said: list[str] = []
    left, deadline = kills, time.monotonic() + seconds
    try:
        while len(members) < 4:
            members.append(Member(crew, function, me=next(names), **arguments))
        while left or len(said) < enough or not all(member.busy for member in members):
            assert time.monotonic() < deadline, f"{len(said)} lines of {enough}, {left} kills to come"
            for member in members:
                said += member.until_now()
            busy = [at for at, member in enumerate(members) if member.busy]
            if left and busy and len(said) * (kills + 1) >= enough * (kills + 1 - left):
                at = random.choice(busy)
                said += members[at].killed()
                members[at] = Member(crew, function, me=next(names), **arguments)
                left -= 1
            time.sleep(0.01)
    finally:
        rest = [member.killed() for member in members]
    return said + [line for lines in rest for line in lines]
