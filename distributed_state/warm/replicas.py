"""How many replicas must have a write before it outlives its primary. Law: each one that may be promoted counts.

A count is worth nothing by itself: what one of two replicas has is gone when the other one is promoted. So "replicated"
waits for all that are attached, and for all that Sentinels or the cluster know and may promote although they are away
now. Where nobody but the primary knows of replicas, the most that were ever seen attached count: a primary forgets the
one whose connection ended.

Design: section 14.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Port, Words
from distributed_state.port.addresses import node_name
from distributed_state.port.lives import KnownReplicas

_LOOK_EVERY = 5.0  # seconds for which is believed what Sentinels or the cluster said
_LISTED = re.compile(r"slave\d+")
_ASK: Words = (b"INFO", b"replication")


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is known of the replicas of a primary. `known`: None if only the primary knows of them."""

    known: KnownReplicas | None
    attached: frozenset[str]
    at: float

    @property
    def promotable(self) -> frozenset[str]:
        """Those that may take the primary's place."""
        return self.attached if self.known is None else self.known.promotable | (self.attached - self.known.others)


class Replicated:
    """Waits for so many replicas; `every` waits for all that may be promoted."""

    def __init__(self, port: Port, wait_ms: int, replicas: int, *, every: bool) -> None:
        self._port = port
        self._wait_ms = wait_ms
        self._replicas = replicas
        self._every = every
        self._seen: dict[str, _Seen] = {}
        self._most: dict[str, int] = {}  # attached at one time, where only the primary knows

    async def possible(self, node: str) -> str:
        """What is missing now for this level, '' if nothing. Raises ConfigurationError if it never can be reached."""
        said, acknowledged = await self._port.apart(node, [], [_ASK, (b"WAIT", 0, 1)])
        for answer in (said, acknowledged):
            if isinstance(answer, StateError):
                raise answer
        attached = _attached(said)
        if not self._every:
            return self._short(len(attached), self._replicas)
        seen = await self._look(node, attached)
        away = sorted(seen.promotable - attached)
        return self._short(len(attached), self._needed(node, seen)) + (f": {', '.join(away)}" if away else "")

    async def behind(self, node: str) -> list[Words]:
        """What is sent behind the scripts that write."""
        if not self._every:
            return [(b"WAIT", self._replicas, self._wait_ms)]
        seen = self._seen.get(node)
        if seen is None or self._port.monotonic() - seen.at > _LOOK_EVERY:
            seen = await self._look(node, _attached(await self._port.command_with(node, *_ASK)))
        return [(b"WAIT", self._needed(node, seen), self._wait_ms), _ASK]

    async def reached(self, node: str, sent: list[Words], answers: list[Any]) -> str | None:
        """'' if the level was reached, else why not; None: there are others than was known, so ask again."""
        needed, acknowledged = int(sent[0][1]), int(answers[0])
        if self._every:
            attached = _attached(answers[1])
            seen = self._seen.get(node)
            if seen is None or attached != seen.attached:
                # One that came may be promoted; where one left, Sentinels or the cluster say whether it still may be.
                seen = await self._look(node, attached)
            if self._needed(node, seen) > needed:
                return None
        return "" if acknowledged >= needed else self._short(acknowledged, needed)

    def forget(self, node: str) -> None:
        """Another server may answer there from now on."""
        self._seen.pop(node, None)

    async def _look(self, node: str, attached: frozenset[str]) -> _Seen:
        before = self._seen.get(node)
        try:
            known = await self._port.thread(self._port.replicas, node)
        except WarmUnavailable:
            # Nobody who could promote one answers. What they said last still holds, if they ever did.
            if before is None:
                raise
            known = before.known
        seen = self._seen[node] = _Seen(known, attached, self._port.monotonic())
        self._most[node] = max(self._most.get(node, 0), len(attached))
        return seen

    def _needed(self, node: str, seen: _Seen) -> int:
        """How many must acknowledge, so that all that may be promoted do, whichever else do."""
        if seen.known is None:
            return max(1, self._most[node])
        return max(1, len(seen.promotable | seen.attached))

    def _short(self, found: int, needed: int) -> str:
        return "" if found >= needed else f"{found} of {needed} replicas have it"


def _attached(text: bytes) -> frozenset[str]:
    """The replicas that follow a primary now, as its INFO has them. Raises WarmUnavailable if it is none."""
    info = dict(line.split(":", 1) for line in text.decode(errors="replace").splitlines() if ":" in line)
    if info.get("role") != "master":
        raise WarmUnavailable("it is no primary any more")
    listed = [dict(each.split("=", 1) for each in info[name].split(",")) for name in info if _LISTED.fullmatch(name)]
    return frozenset(node_name(each["ip"], int(each["port"])) for each in listed if each["state"] == "online")
