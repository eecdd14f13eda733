"""On which APIs and servers a test runs. Law: its name alone decides, so every process of a run chooses alike."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

APIS, COLD = ("asyncio", "blocking"), ("memory", "sqlite", "postgres")
# "cluster" is of Valkey; "sentinel" of what "redis" is, the oldest server that the package serves.
WARM = ("fake", "valkey", "redis", "sentinel", "cluster")
# What a test may ask for by one word: any server there is, or one that stands alone, to be cut off, paused or emptied.
KINDS = {"real": WARM[1:], "single": ("valkey", "redis")}


@dataclass(frozen=True)
class Combination:
    """One value of each axis; another axis is another field, with its values in EVERY."""

    api: str
    warm: str
    cold: str

    def __str__(self) -> str:
        return "-".join(astuple(self))

    @property
    def fleet(self) -> bool:
        """Whether several stores can share these servers."""
        return self.warm != "fake" and self.cold != "memory"

    @property
    def one_store(self) -> bool:
        """Whether a second store is refused: an archive in memory is another each time, and the server remembers."""
        return self.warm != "fake" and self.cold == "memory"

    @property
    def quick(self) -> bool:
        """Whether no server has to be started."""
        return self.warm == "fake" and self.cold != "postgres"


# An archive in memory beside a server is what nobody keeps: one kind of server is enough for that.
EVERY = tuple(
    combination
    for combination in (Combination(*names) for names in itertools.product(APIS, WARM, COLD))
    if combination.cold != "memory" or combination.warm in ("fake", "valkey")
)
# One per API; the servers that a test meets beside it are on the other API.
EMBEDDED = (Combination("asyncio", "fake", "memory"), Combination("blocking", "fake", "sqlite"))
FLEETS = tuple(combination for combination in EVERY if combination.fleet)
PRODUCTION = tuple(combination for combination in FLEETS if combination.cold == "postgres")
# By default one server alone; the contracts and the tests of faults have Sentinels and clusters of their own.
SINGLE = tuple(combination for combination in PRODUCTION if combination.warm in KINDS["single"])

# What `--quick` runs beside the unit tests: what a record does, on the embedded server.
QUICK_FILES = (
    "test_commit.py",
    "test_messages.py",
    "test_reads.py",
    "test_turns.py",
    "test_typed.py",
)


def by_default(name: str, allowed: Sequence[Combination], kind: str = "embedded") -> list[Combination]:
    """One combination of the kind "embedded" or "servers", or of either "in turn" from test to test, where allowed."""
    turn = zlib.crc32(name.encode())
    kinds = [EMBEDDED, SINGLE]
    if kind == "servers" or (kind == "in turn" and turn % 2):
        kinds.reverse()
    return _first(turn // 2, allowed, *kinds, PRODUCTION, FLEETS, allowed)


def wide(name: str, allowed: Sequence[Combination], default: Sequence[Combination]) -> list[Combination]:
    """Two combinations: an embedded one, and servers with PostgreSQL. One is that of a default run."""
    turn = zlib.crc32(name.encode()) // 4  # the bits below it choose what a default run meets
    other_api = [each for each in allowed if each.api not in {met.api for met in default}]
    embedded, servers = (
        _first(turn, default, *kinds) or _first(turn, other_api, *kinds) or _first(turn, allowed, *kinds)
        for kinds in ([EMBEDDED], [PRODUCTION, FLEETS])
    )
    return [*embedded, *servers] or list(default)


def _first(turn: int, allowed: Sequence[Combination], *kinds: Sequence[Combination]) -> list[Combination]:
    """One of the first kind that has any that is allowed."""
    for kind in kinds:
        if found := [combination for combination in kind if combination in allowed]:
            return [found[turn % len(found)]]
    return []


def shared_out(case: int, combination: int, cases: int, combinations: int) -> bool:
    """Whether this case of a test meets this combination, as its cases share them out: each meets a third of many."""
    return (case + combination) % min(cases, combinations, 3) == 0


def quick(name: str, allowed: Iterable[Combination]) -> list[Combination]:
    """One that needs no server, if there is one; the API alternates."""
    found = [c for c in EMBEDDED if c in allowed] or [c for c in allowed if c.quick]
    return [found[zlib.crc32(name.encode()) % len(found)]] if found else []
