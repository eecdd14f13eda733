"""The cells: faults on topologies, and the combinations that cannot be, each with its reason. Law: pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.load.matrix.faults import BY_NAME, FAULTS, PAIRS, Fault
from deploy.load.matrix.judge import Required
from deploy.load.matrix.topology import TOPOLOGIES

LEVELS = ("memory", "replicated", "replicated:1", "fsynced", "archived")
_NO_REPLICA = ("replicated", "replicated:1")


@dataclass(frozen=True, slots=True)
class Cell:
    """One or more faults on one topology: all at once, or one after the other."""

    faults: tuple[Fault, ...]
    topology: str
    at_once: bool = True

    @property
    def name(self) -> str:
        """The names of its faults."""
        return (" + " if self.at_once else ", ").join(each.name for each in self.faults)

    @property
    def levels(self) -> list[str]:
        """Those that are written at here."""
        chosen = next((each.levels for each in self.faults if each.levels), LEVELS)
        return [each for each in chosen if self.topology != "single" or each not in _NO_REPLICA]

    @property
    def options(self) -> tuple[str, ...]:
        """Of the servers; a later one wins."""
        return tuple(word for each in self.faults for word in each.options)

    @property
    def required(self) -> Required:
        """What has to survive here although its writer does not."""
        return Required(
            failover=any(each.failover for each in self.faults),
            same_data=all(each.same_data and not each.failover for each in self.faults),
            fsync_always="always" in self.options,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What its stores are opened with besides."""
        return {name: value for each in self.faults for name, value in each.settings.items()}

    @property
    def records(self) -> int:
        """Of each level."""
        return max(each.records for each in self.faults)

    @property
    def tasks(self) -> int:
        """That write at each level, in each writer."""
        return max(each.tasks for each in self.faults)

    @property
    def stretch(self) -> float:
        """How many times as long as others it is."""
        return max(each.stretch for each in self.faults)

    @property
    def sql(self) -> str:
        """Which PostgreSQL it needs: shared with other cells, its own, or a small one."""
        return max((each.sql for each in self.faults), key=("shared", "own", "small").index)

    @property
    def impossible(self) -> str:
        """Why it cannot be; "" if it can."""
        reasons = (each.not_on.get(self.topology) or each.unfit() for each in self.faults)
        return next(filter(None, reasons), "")


def all_cells(only: Iterable[str] = (), topologies: Sequence[str] = TOPOLOGIES) -> Iterator[Cell]:
    """Every cell, or those with one of the faults named, on these topologies; also those that cannot be."""
    wanted = set(only)
    if unknown := wanted - BY_NAME.keys():
        raise ValueError(f"{min(unknown)!r}: a fault is one of {', '.join(BY_NAME)}")
    combined = [(each,) for each in FAULTS] + [tuple(BY_NAME[name] for name in pair) for pair in PAIRS]
    for faults in combined:
        if not wanted or wanted & {each.name for each in faults}:
            for topology in topologies:
                yield Cell(faults, topology)


def random_cell(chance: random.Random, topologies: Sequence[str], length: int) -> Cell:
    """Some faults one after the other, of those that need no servers of a special kind."""
    topology = chance.choice(list(topologies))
    fit = [
        each for each in FAULTS
        if not each.options and not each.clocks and not each.levels and each.sql == "shared"
        and not Cell((each,), topology).impossible
    ]  # fmt: skip
    return Cell(tuple(chance.choice(fit) for _ in range(length)), topology, at_once=False)
