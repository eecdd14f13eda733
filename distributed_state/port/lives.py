"""What servers report about themselves: which data they hold, their replicas, and what a Sentinel knows.

A server that was restarted, a replica that was promoted, one that was demoted and promoted again: each may hold data
that is older than what was acknowledged. Its `master_replid` or its `run_id` has changed then, so both are asked for
when a connection is made. The first argument of a script that depends on the data is the life of the connection that
it is sent on: `commands.Packer` fills it in, and the script compares it with the one that the partition keeps. So the
first script notices a changed life, and that needs no extra round trip.

Design: sections 14, 19.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

from distributed_state.port.commands import Filled


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


log = logging.getLogger(__name__)
INFO: Filled = (b"INFO", b"server", b"replication")
_NOBODY = "0" * 40
_LETTERS = 12


EMBEDDED = Life("embedded", "embedded", True)
UNKNOWN = Life("", "", True)  # of a server that does not let us ask: what it loses is not noticed, unless it is all


def read(answer: Any) -> Life:
    """Read the answer to `INFO`, or raise the error that it is."""
    if isinstance(answer, Exception):
        if str(answer).startswith("NOPERM"):
            log.warning("the user lacks the right to INFO, so that older data of Redis would not be noticed")
            return UNKNOWN
        raise answer
    text = answer.decode() if isinstance(answer, bytes) else str(answer)
    facts = dict(line.partition(":")[::2] for line in text.splitlines())
    former = facts.get("master_replid2", _NOBODY).replace(_NOBODY, "")
    # Part of each is enough, of 160 random bits; every script reads and compares them.
    names = (facts.get("master_replid", "")[:_LETTERS], facts.get("run_id", "")[:_LETTERS])
    return Life(*names, facts.get("role", "master") == "master", former[:_LETTERS])
