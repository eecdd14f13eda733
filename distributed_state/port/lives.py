"""Which life of its data a server is in. Law: a script is told the life that its own connection was made in.

A server that was started anew, a replica that was promoted, one that was made a replica and promoted again: each may
hold data that is older than what was acknowledged. All of them have another `master_replid` or another `run_id` then,
which are asked for when a connection is made. The first argument of a script that depends on the data is the life of
the connection that it is sent on, put in when it is sent, and the script compares it with what the partition keeps. So
a changed life is met by the first script, and costs no round trip.

Design: section 14.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from distributed_state.port import Filled, Words
from distributed_state.port.facts import Life

log = logging.getLogger(__name__)
INFO: Filled = (b"INFO", b"server", b"replication")
_NOBODY = "0" * 40


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
    data = facts.get("master_replid", "")
    former = facts.get("master_replid2", _NOBODY).replace(_NOBODY, "")
    return Life(data, facts.get("run_id", ""), facts.get("role", "master") == "master", former)


def filled(words: Words, life: str) -> Filled:
    """A command as it is sent on a connection of this life."""
    if type(words) is tuple:
        return words
    words[3 + words[2]] = life  # type: ignore[index]  # a list: what stood there was of an earlier sending
    return tuple(words)


def all_filled(commands: Sequence[Words], life: str) -> list[Filled]:
    """The same of many."""
    return [filled(words, life) for words in commands]
