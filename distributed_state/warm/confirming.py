"""Waits until commits are as durable as was asked. Law: on a connection of its own, for data that holds the commit.

WAIT and WAITAOF hold up everything that stands behind them on a connection (a GET behind WAIT 1 1500 waits 1.5 s), and
they wait only for what their own connection wrote. So they do not stand behind the commit, but behind a script that
looks whether the server has that very commit, and writes something. The tasks of an event loop share one such
exchange: while one is on its way, who comes meanwhile goes with the next.

Design: section 14.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from distributed_state.errors import ConfigurationError, StateError, WarmUnavailable
from distributed_state.port import Call, Port, Signal, Words, waited
from distributed_state.settings import Settings
from distributed_state.values.levels import ARCHIVED, EVERY, FSYNCED, MEMORY, Level, level_of
from distributed_state.warm.fsync import Fsynced
from distributed_state.warm.patience import Patience
from distributed_state.warm.replicas import Replicated
from distributed_state.warm.scripts import CONFIRM

REACHED = ""
ABSENT = "Redis does not hold it any more"
_SHARE = 0.8  # of the time that an answer may take: WAIT must give up before the connection is given up
_ROUNDS = 5
_BACK = 16


@dataclass(frozen=True, slots=True)
class Claim:
    """A commit that is to be confirmed: its partition's keys and its record's, and its entry in the journal.

    Without an event it is whatever made the record this version. `again`: it was sent again, and `offset` is that of
    the journal's end at the time.
    """

    journal: bytes
    meta: bytes
    record: bytes
    epoch: str
    offset: int
    event: str
    version: int
    again: bool = False

    def call(self) -> Call:
        """The call of confirm.lua."""
        back = _BACK if self.again else 0
        keys = [self.journal, self.meta, self.record]
        return CONFIRM, keys, [self.epoch, self.offset, self.event, self.version, back]


def never_embedded(level: Level) -> str:
    """Why the embedded server is refused."""
    return (
        f"durability {level.text!r} needs a server: the embedded one has neither replicas nor a file; "
        "its levels are 'memory' and 'archived'"
    )


class Wait(Protocol):
    """What one level waits for."""

    async def possible(self, node: str) -> str:
        """What is missing now, '' if nothing. Raises ConfigurationError if the level never can be reached there."""
        ...

    async def behind(self, node: str) -> list[Words]:
        """What is sent behind the scripts that write."""
        ...

    async def reached(self, node: str, sent: list[Words], answers: list[Any]) -> str | None:
        """'' if the level was reached, else why not; None: ask again."""
        ...

    def forget(self, node: str) -> None:
        """Another server may answer there from now on."""
        ...


class _Wave:
    """Claims of several tasks that are confirmed together."""

    def __init__(self, done: Signal) -> None:
        self.done = done
        self.claims: list[Claim] = []
        self.results: list[str] = []
        self.lost = "the store was closed meanwhile"


class Confirming:
    """Confirms commits at levels between memory and the archive. `level` is that of writes which say none."""

    def __init__(self, port: Port, patience: Patience, settings: Settings) -> None:
        self.level = level_of(settings.durability or "memory")
        self.admitted: set[Level] = set()  # those that the servers were seen to be able to keep
        self.missed: Counter[str] = Counter()  # commits whose level was not reached, by level
        self._port = port
        self._patience = patience
        self._wait_ms = max(1, int(min(settings.timeout, settings.retry_for or math.inf) * 1000 * _SHARE))
        self._waits: dict[Level, Wait] = {}
        self._next: dict[tuple[object, str, Level], _Wave] = {}  # by event loop as well
        self._running: dict[tuple[object, str, Level], _Wave] = {}

    async def possible(self, level: Level) -> list[str]:
        """What is missing for a level now, by server. Raises ConfigurationError if it never can be reached here."""
        if level in (MEMORY, ARCHIVED):
            return []
        nodes = self._port.nodes()
        if nodes == [""]:
            raise ConfigurationError(never_embedded(level))
        wait = self._wait(level)
        found = [(node, await wait.possible(node)) for node in nodes]
        return [f"{node}: {missing}" for node, missing in found if missing]

    async def confirm(self, claims: Sequence[Claim], level: Level) -> list[str]:
        """Of each commit whether it has the level: REACHED, ABSENT if this data does not have it, or why not.

        Raises WarmUnavailable if a server was away for `retry_for` seconds.
        """
        results = [""] * len(claims)
        left = list(range(len(claims)))
        attempts = 0

        async def attempt() -> None:
            nonlocal attempts, left
            attempts += 1
            if attempts > 1:
                await self._port.relocate()
            by_node: dict[str, list[int]] = {}
            for at in left:
                by_node.setdefault(self._port.node_of(claims[at].meta), []).append(at)
            for node, group in by_node.items():
                found = await self._at(node, level, [claims[at] for at in group])
                for at, result in zip(group, found, strict=True):
                    results[at] = result
                left = [at for at in left if at not in group]

        await self._patience.patiently(attempt)
        return results

    def _wait(self, level: Level) -> Wait:
        wait = self._waits.get(level)
        if wait is None:
            if level is FSYNCED:
                wait = Fsynced(self._port, self._wait_ms)
            else:
                wait = Replicated(self._port, self._wait_ms, level.replicas, every=level.replicas == EVERY)
            self._waits[level] = wait
        return wait

    async def _at(self, node: str, level: Level, claims: list[Claim]) -> list[str]:
        if not self._port.suspends:
            return await self._exchange(node, level, claims)  # a thread has a connection for itself
        key = (self._port.here(), node, level)
        wave = self._next.get(key)
        if wave is None:
            wave = self._next[key] = _Wave(self._port.signal())
            wave.claims += claims
            first = 0
            # Others wait for it, too: who began it may be cancelled.
            await self._port.shield(self._lead(key, wave))
        else:
            first = len(wave.claims)
            wave.claims += claims
            await self._over(wave)
        if len(wave.results) < len(wave.claims):
            raise WarmUnavailable(wave.lost)
        return wave.results[first : first + len(claims)]

    async def _lead(self, key: tuple[object, str, Level], wave: _Wave) -> None:
        try:
            await self._port.sleep(0)  # commits that were answered in one turn of the loop go together
            running = self._running.get(key)
            if running is not None:
                await self._over(running)
            del self._next[key]
            self._running[key] = wave
            wave.results = await self._exchange(key[1], key[2], wave.claims)
        except WarmUnavailable as error:
            wave.lost = str(error)
        finally:
            for waves in (self._next, self._running):
                if waves.get(key) is wave:
                    del waves[key]
            wave.done.set()

    async def _over(self, wave: _Wave) -> None:
        """Wait until others have asked. Raises WarmUnavailable when this call has waited for as long as it may."""
        began = self._port.monotonic()
        account = waited.present()
        if not await wave.done.wait(None if account is None else self._patience.left()) and account is not None:
            account.add(began)
            raise WarmUnavailable("others wait for the same answer, and none came")

    async def _exchange(self, node: str, level: Level, claims: list[Claim]) -> list[str]:
        """Confirm at one server, in one round trip unless more replicas come."""
        wait = self._wait(level)
        calls = [claim.call() for claim in claims]
        try:
            for _ in range(_ROUNDS):
                behind = await wait.behind(node)
                answers = await self._port.apart(node, calls, behind)
                for answer in answers:
                    if isinstance(answer, StateError):
                        raise answer
                held, waited = answers[: len(calls)], answers[len(calls) :]
                reached = await wait.reached(node, behind, waited)
                if reached is not None:
                    return [reached if answer[0] == b"ok" else ABSENT for answer in held]
            return ["replicas come and go faster than they can be waited for"] * len(claims)
        except WarmUnavailable:
            wait.forget(node)
            raise
        except StateError as error:
            # It is applied: whatever is wrong now, as a right that was taken away, must not look as if it was not.
            return [str(error)] * len(claims)
