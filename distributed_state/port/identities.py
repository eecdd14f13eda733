"""Identities that servers report: which data they hold, their replicas, and what a Sentinel knows.

A server that was restarted, or promoted, or demoted and promoted again may hold data that is older than acknowledged
writes. Its `master_replid` or its `run_id` has changed then, so both are read when a connection is made. The first
argument of a script that depends on the data is the data id of its connection: `commands.Packer` fills it in, and the
script compares it with the one that the partition keeps. So the first script notices a changed data id, and that needs
no extra round trip.

Design: sections 14, 19.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

from distributed_state.port.commands import Filled


@dataclass(frozen=True, slots=True)
class SentinelAnswer:
    """The answer of one Sentinel for its service.

    `problem`: why it did not answer; `no_failover`: why it could start none.
    """

    node: str
    primary: str = ""
    epoch: int = 0
    quorum: int = 0
    no_failover: str = ""
    problem: str = ""


class KnownReplicas(NamedTuple):
    """The replicas of one primary, by name: those that may be promoted, and those that never are."""

    promotable: frozenset[str]
    others: frozenset[str]


class ServerIdentity(NamedTuple):
    """The identity of a server's data: `data` names the data, `process` the server that runs.

    `primary`: whether it takes writes. `former`: the name of the data before this server was promoted or started, if it
    remembers it, else "". `uptime`: for how many seconds it has been running.
    """

    data: str
    process: str
    primary: bool
    former: str = ""
    uptime: int = 0

    @property
    def data_id(self) -> str:
        """The data id that scripts compare, "" for a replica, which shows its primary's name."""
        return f"{self.data}/{self.process}" if self.primary else ""

    def renames(self, data_id: str) -> bool:
        """Whether this is the data of that id under a new name.

        A primary renames its data when its first replica connects, and some time after its last one left.
        """
        return not self.former and data_id.rpartition("/")[2] == self.process and data_id != self.data_id

    def follows(self, data_id: str) -> bool:
        """Whether the server was promoted, or started, with the data of that id."""
        return bool(self.former) and data_id.partition("/")[0] == self.former


log = logging.getLogger(__name__)
INFO: Filled = (b"INFO", b"server", b"replication")
_NOBODY = "0" * 40
_LETTERS = 12


EMBEDDED = ServerIdentity("embedded", "embedded", True)
UNKNOWN = ServerIdentity("", "", True)  # of a server that refuses INFO: only a complete loss is noticed


def read(answer: Any) -> ServerIdentity:
    """Parse the reply to `INFO`, or raise it if it is an error."""
    if isinstance(answer, Exception):
        if str(answer).startswith("NOPERM"):
            log.warning("the Redis user may not call INFO, so a restart of Redis with older data would not be noticed")
            return UNKNOWN
        raise answer
    text = answer.decode() if isinstance(answer, bytes) else str(answer)
    facts = dict(line.partition(":")[::2] for line in text.splitlines())
    former = facts.get("master_replid2", _NOBODY).replace(_NOBODY, "")
    # A part of each, of 160 random bits, is enough; every script reads and compares them.
    names = (facts.get("master_replid", "")[:_LETTERS], facts.get("run_id", "")[:_LETTERS])
    uptime = int(facts.get("uptime_in_seconds", "0"))
    return ServerIdentity(*names, facts.get("role", "master") == "master", former[:_LETTERS], uptime)
