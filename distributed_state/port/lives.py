"""What servers report about themselves: which data they hold, their replicas, and what a Sentinel knows.

A server that was restarted, a replica that was promoted, one that was demoted and promoted again: each may hold data
that is older than what was acknowledged. Its `master_replid` or its `run_id` has changed then, so both are asked for
when a connection is made. The first argument of a script that depends on the data is the life of the connection that
it is sent on, filled in when it is sent, and the script compares it with the one that the partition keeps. So the first
script notices a changed life, and that needs no extra round trip.

Design: sections 14, 19.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distributed_state.port.commands import Filled, Words, packed, write


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
_KEPT = 1000  # beginnings of calls, for each connection; of some 500 bytes


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


def filled(words: Words, life: str) -> Filled:
    """A command as it is sent on a connection of this life."""
    if type(words) is tuple:
        return words
    at = 3 + words[2]
    words[at] = life  # type: ignore[index]  # a list: what stood there was of an earlier sending
    if len(words) > at + 1 and type(words[at + 1]) is tuple:  # its constants
        return (*words[: at + 1], *words[at + 1], *words[at + 2 :])
    return tuple(words)


class Packer:
    """Writes commands as they are sent on one connection, in one life.

    What every call of a script on a record begins with, its constants included (see `Script.call`), is written once and
    kept for the next: to write thirty words takes as long as a tenth of a commit.
    """

    __slots__ = ("_beginnings", "life")

    def __init__(self, life: str = "") -> None:
        self.life = life
        self._beginnings: dict[tuple[Any, ...], bytes] = {}

    def pack(self, commands: Sequence[Words]) -> bytes:
        """The bytes of commands."""
        if len(commands) == 1:
            return self._packed(commands[0])
        return b"".join(map(self._packed, commands))

    def _packed(self, words: Words) -> bytes:
        if type(words) is tuple:
            return packed(words)
        at = 4 + words[2]  # behind the life
        constants = words[at] if len(words) > at else None
        if type(constants) is not tuple or words[0] != b"EVALSHA":
            return packed(filled(words, self.life))
        name = (words[1], words[2], words[3], constants)
        beginning = self._beginnings.get(name)
        if beginning is None:
            beginning = self._begin(name, (*words[: at - 1], self.life, *constants))
        count = len(words) - 1 + len(constants)
        return b"*%d\r\n%b%b" % (count, beginning, write(words[at + 1 :]))

    def _begin(self, name: tuple[Any, ...], words: Filled) -> bytes:
        if len(self._beginnings) >= _KEPT:
            self._beginnings.clear()
        beginning = self._beginnings[name] = write(words)
        return beginning
