"""What servers say of themselves.

Design: section 19.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class SentinelAnswer:
    """What one Sentinel says of its service. `problem`: why it said nothing; `no_failover`: why it could start none."""

    node: str
    primary: str = ""
    epoch: int = 0
    quorum: int = 0
    no_failover: str = ""
    problem: str = ""


class KnownReplicas(NamedTuple):
    """Of one primary, by name: those that may be promoted, and those that never are."""

    promotable: frozenset[str]
    others: frozenset[str]


class Life(NamedTuple):
    """One life of a server's data: `data` names the data, `process` the server that runs.

    `primary`: whether it takes writes. `former`: what the data was called before this server was promoted or started,
    as far as it remembers, else "".
    """

    data: str
    process: str
    primary: bool
    former: str = ""

    @property
    def name(self) -> str:
        """What scripts compare, "" for a replica, which shows its primary's name."""
        return f"{self.data}/{self.process}" if self.primary else ""

    def renames(self, name: str) -> bool:
        """Whether this is the life of that name under another one.

        A primary calls its data otherwise when its first replica comes, and some time after its last one left.
        """
        return not self.former and name.rpartition("/")[2] == self.process and name != self.name

    def follows(self, name: str) -> bool:
        """Whether the server was promoted, or started, with data of the life of that name."""
        return bool(self.former) and name.partition("/")[0] == self.former
