"""Waits until commits have the requested durability. Law: on a separate connection, after checking for the commit.

WAIT and WAITAOF block all later commands on their connection (a GET after WAIT 1 1500 waits 1.5 s), and they cover only
the writes of their own connection. So they do not follow the commit, but a script that checks whether the server has
that very commit, and writes something. The tasks of an event loop share one such exchange: a task that comes during one
joins the next.

A level is a class with the same methods, which gives the commands after these scripts and judges the replies: `Fsynced`
waits for the primary's disk, `Replicated` for replicas. `possible` returns what is missing now, '' if nothing, and
raises ConfigurationError if the level can never be reached there. `behind` returns the commands to send after the
scripts that write. `reached` returns '' if the level was reached, None to ask again, else the reason. `forget` is
called when another server may answer at an address.

Design: section 14.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distributed_state.errors import ConfigurationError, StateError, WarmUnavailable
from distributed_state.port import Call, Port, Signal, Words, waited
from distributed_state.port.addresses import node_name
from distributed_state.port.identities import KnownReplicas
from distributed_state.settings import Settings
from distributed_state.values.levels import ARCHIVED, EVERY, FSYNCED, MEMORY, Level, level_of
from distributed_state.warm.scripts import CONFIRM, RetryingClient

REACHED = ""
ABSENT = "Redis no longer holds it"
_SHARE = 0.8  # of the time for a reply: WAIT must time out before the connection does
_ROUNDS = 5
_BACK = 16
_ALWAYS = "appendonly yes, appendfsync always and no-appendfsync-on-rewrite no"
_NEEDED = {b"appendonly": b"yes", b"appendfsync": b"always", b"no-appendfsync-on-rewrite": b"no"}
_POLICY: Words = (b"CONFIG", b"GET", *_NEEDED)
_WAITAOF = (7, 2)
_LOOK_EVERY = 5.0  # seconds for which an answer of Sentinels or the cluster stays valid
_REPLICA = re.compile(r"slave\d+")
_INFO: Words = (b"INFO", b"replication")


@dataclass(frozen=True, slots=True)
class Claim:
    """A commit to be confirmed: the keys of its partition and record, and its entry in the journal.

    Without an event, it is the commit that made this version of the record. `again`: it was sent again, and `offset` is
    that of the journal's end at that time.
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
        """Return the call of confirm.lua."""
        back = _BACK if self.again else 0
        keys = [self.journal, self.meta, self.record]
        return CONFIRM, keys, [self.epoch, self.offset, self.event, self.version, back]


class Confirming:
    """Confirms commits at levels between memory and the archive. `level` is the default level of writes."""

    def __init__(self, port: Port, client: RetryingClient, settings: Settings) -> None:
        self.level = level_of(settings.durability or "memory")
        self.admitted: set[Level] = set()  # levels that the servers were found to support
        self.missed: Counter[str] = Counter()  # commits whose level was not reached, by level
        self._port = port
        self._client = client
        self._wait_ms = max(1, int(min(settings.timeout, settings.retry_for or math.inf) * 1000 * _SHARE))
        self._waits: dict[Level, Fsynced | Replicated] = {}
        self._next: dict[tuple[object, str, Level], _Wave] = {}  # the first part of the key is the event loop
        self._running: dict[tuple[object, str, Level], _Wave] = {}

    async def possible(self, level: Level) -> list[str]:
        """Return what is missing for a level now, by server.

        Raises ConfigurationError if it can never be reached here.
        """
        if level in (MEMORY, ARCHIVED):
            return []
        nodes = self._port.nodes()
        if nodes == [""]:
            raise ConfigurationError(never_embedded(level))
        wait = self._wait(level)
        found = [(node, await wait.possible(node)) for node in nodes]
        return [f"{node}: {missing}" for node, missing in found if missing]

    async def confirm(self, claims: Sequence[Claim], level: Level) -> list[str]:
        """Return for each commit REACHED, ABSENT if the server does not have it, or the reason why it lacks the level.

        Raises WarmUnavailable if a server did not answer for `retry_for` seconds.
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

        await self._client.retry(attempt)
        return results

    def _wait(self, level: Level) -> Fsynced | Replicated:
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
            # Shielded, because other tasks wait for it and the one that began it may be cancelled.
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
        """Wait for the exchange of another task. Raises WarmUnavailable when this call has used up its time."""
        began = self._port.monotonic()
        account = waited.present()
        if not await wave.done.wait(None if account is None else self._client.left()) and account is not None:
            account.add(began)
            raise WarmUnavailable("others wait for the same answer, and none came")

    async def _exchange(self, node: str, level: Level, claims: list[Claim]) -> list[str]:
        """Confirm at one server, in one round trip unless more replicas appear."""
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
            # The commit is applied: a later problem, such as a revoked right, must not look as if it was not.
            return [str(error)] * len(claims)


class _Wave:
    """Claims of several tasks that are confirmed together."""

    def __init__(self, done: Signal) -> None:
        self.done = done
        self.claims: list[Claim] = []
        self.results: list[str] = []
        self.lost = "the store was closed meanwhile"


def never_embedded(level: Level) -> str:
    """Return why the embedded server is refused."""
    return (
        f"durability {level.text!r} needs a server: the embedded one has neither replicas nor a file; "
        "its levels are 'memory' and 'archived'"
    )


# On the disk


class Fsynced:
    """Waits for the primary's disk. Law: a report of fsync counts only from servers known to report it correctly.

    With `appendfsync always` a reply leaves after the disk was written, so the reply to a script that wrote is enough.
    From 7.2 on, Redis reports by WAITAOF when a write is on the disk. Valkey (9.1 was measured) with `everysec` reports
    it too early, and loses confirmed writes when the power fails: it is believed only with `always`.
    """

    def __init__(self, port: Port, wait_ms: int) -> None:
        self._port = port
        self._wait_ms = wait_ms
        self._says: dict[str, bool] = {}  # by server: whether its WAITAOF is believed

    async def possible(self, node: str) -> str:
        """Return '': nothing can be missing temporarily.

        Raises ConfigurationError if this server cannot keep the level.
        """
        if await self._waits(node):
            policy, done = await self._port.apart(node, [], [_POLICY, (b"WAITAOF", 0, 0, 1)])
            if isinstance(done, StateError):
                raise done
            found = {} if isinstance(policy, StateError) else _pairs(policy)
            if found.get(b"appendonly") == b"no" or found.get(b"appendfsync") == b"no":
                raise ConfigurationError(f"{node}: {_policy(found)}: nothing is ever waited for; configure {_ALWAYS}")
            return ""
        why = _lacking(await self._port.command_with(node, *_POLICY))
        if why:
            raise ConfigurationError(f"{node}: durability 'fsynced' cannot be kept: {why}; configure {_ALWAYS}")
        return ""

    async def behind(self, node: str) -> list[Words]:
        """Return the commands to send after the scripts that write."""
        return [(b"WAITAOF", 1, 0, self._wait_ms) if await self._waits(node) else _POLICY]

    async def reached(self, node: str, sent: list[Words], answers: list[Any]) -> str | None:
        """Return '' if the level was reached, else the reason."""
        if sent[0][0] == b"WAITAOF":
            return "" if int(answers[0][0]) >= 1 else "the disk was not written in time"
        # Asked each time: a restart or a reconfiguration of a server is not announced.
        return _lacking(answers[0])

    def forget(self, node: str) -> None:
        """Forget the server's capability: another server may answer there from now on."""
        self._says.pop(node, None)

    async def _waits(self, node: str) -> bool:
        known = self._says.get(node)
        if known is None:
            text = (await self._port.command_with(node, b"INFO")).decode(errors="replace")
            info = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            known = self._says[node] = believed(info)
            if known and info.get("aof_enabled") != "1":
                del self._says[node]
                raise ConfigurationError(
                    f"{node}: durability 'fsynced' cannot be kept: no append-only file; configure appendonly yes"
                )
        return known


def believed(info: dict[str, str]) -> bool:
    """Whether this server's WAITAOF is reliable, according to INFO: Redis' is, from 7.2 on."""
    if "valkey_version" in info or info.get("server_name", "redis") != "redis":
        return False
    numbers = tuple(int(part) for part in info.get("redis_version", "0").split(".")[:2] if part.isdigit())
    return numbers >= _WAITAOF


def _pairs(answer: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(answer[::2], answer[1::2], strict=True))


def _lacking(answer: list[bytes]) -> str:
    """Return why this policy does not write the disk before each reply; '' if it does."""
    found = _pairs(answer)
    return "" if found.items() >= _NEEDED.items() else _policy(found)


def _policy(found: dict[bytes, bytes]) -> str:
    return ", ".join(f"{name.decode()} {found[name].decode()}" for name in _NEEDED if name in found)


# On replicas


class Replicated:
    """Waits for this many replicas; `every`: it waits for all replicas that may be promoted.

    A count is not a guarantee: a write that one of two replicas has is lost when the other one is promoted. So
    "replicated" waits for all attached replicas, and for all that Sentinels or the cluster know and may promote
    although they are down now. Where only the primary knows its replicas, the highest number ever seen attached counts:
    a primary forgets a replica whose connection ended.
    """

    def __init__(self, port: Port, wait_ms: int, replicas: int, *, every: bool) -> None:
        self._port = port
        self._wait_ms = wait_ms
        self._replicas = replicas
        self._every = every
        self._seen: dict[str, _Seen] = {}
        self._most: dict[str, int] = {}  # attached at one time, where only the primary knows

    async def possible(self, node: str) -> str:
        """Return what is missing now for this level, '' if nothing.

        Raises ConfigurationError if it can never be reached.
        """
        info, acknowledged = await self._port.apart(node, [], [_INFO, (b"WAIT", 0, 1)])
        for answer in (info, acknowledged):
            if isinstance(answer, StateError):
                raise answer
        attached = _attached(info)
        if not self._every:
            return self._short(len(attached), self._replicas)
        seen = await self._look(node, attached)
        away = sorted(seen.promotable - attached)
        return self._short(len(attached), self._needed(node, seen)) + (f": {', '.join(away)}" if away else "")

    async def behind(self, node: str) -> list[Words]:
        """Return the commands to send after the scripts that write."""
        if not self._every:
            return [(b"WAIT", self._replicas, self._wait_ms)]
        seen = self._seen.get(node)
        if seen is None or self._port.monotonic() - seen.at > _LOOK_EVERY:
            seen = await self._look(node, _attached(await self._port.command_with(node, *_INFO)))
        return [(b"WAIT", self._needed(node, seen), self._wait_ms), _INFO]

    async def reached(self, node: str, sent: list[Words], answers: list[Any]) -> str | None:
        """Return '' if the level was reached, else the reason; None to ask again, as replicas changed."""
        needed, acknowledged = int(sent[0][1]), int(answers[0])
        if self._every:
            attached = _attached(answers[1])
            seen = self._seen.get(node)
            if seen is None or attached != seen.attached:
                # A new replica may be promoted. Sentinels or the cluster say whether one that left still may be.
                seen = await self._look(node, attached)
            if self._needed(node, seen) > needed:
                return None
        return "" if acknowledged >= needed else self._short(acknowledged, needed)

    def forget(self, node: str) -> None:
        """Forget the replicas: another server may answer there from now on."""
        self._seen.pop(node, None)

    async def _look(self, node: str, attached: frozenset[str]) -> _Seen:
        before = self._seen.get(node)
        try:
            known = await self._port.thread(self._port.replicas, node)
        except WarmUnavailable:
            # Neither Sentinels nor the cluster answer, so no replica can be promoted now: their last answer is still
            # valid.
            if before is None:
                raise
            known = before.known
        seen = self._seen[node] = _Seen(known, attached, self._port.monotonic())
        self._most[node] = max(self._most.get(node, 0), len(attached))
        return seen

    def _needed(self, node: str, seen: _Seen) -> int:
        """Return how many replicas must acknowledge, so that all that may be promoted are certainly among them."""
        if seen.known is None:
            return max(1, self._most[node])
        return max(1, len(seen.promotable | seen.attached))

    def _short(self, found: int, needed: int) -> str:
        return "" if found >= needed else f"{found} of {needed} replicas have it"


@dataclass(frozen=True, slots=True)
class _Seen:
    """The known replicas of a primary. `known`: None if only the primary knows of them."""

    known: KnownReplicas | None
    attached: frozenset[str]
    at: float

    @property
    def promotable(self) -> frozenset[str]:
        """The replicas that may be promoted."""
        return self.attached if self.known is None else self.known.promotable | (self.attached - self.known.others)


def _attached(text: bytes) -> frozenset[str]:
    """Return the replicas that follow a primary now, by its INFO. Raises WarmUnavailable if it is not a primary."""
    info = dict(line.split(":", 1) for line in text.decode(errors="replace").splitlines() if ":" in line)
    if info.get("role") != "master":
        raise WarmUnavailable("it is no longer a primary")
    listed = [dict(each.split("=", 1) for each in info[name].split(",")) for name in info if _REPLICA.fullmatch(name)]
    return frozenset(node_name(each["ip"], int(each["port"])) for each in listed if each["state"] == "online")
