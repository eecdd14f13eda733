"""The warm tier: one function per script. Law: a write is sent with an op id, so that sending it again is harmless."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

from distributed_state.errors import (
    Backpressure,
    Conflict,
    Deleted,
    Fenced,
    Locked,
    StateError,
    TooLarge,
    WarmUnavailable,
)
from distributed_state.keys import PartitionKeys, RecordKeys
from distributed_state.model import LIFETIME, Entry, Loaded
from distributed_state.port import Call, Port, Script, Words
from distributed_state.settings import Settings
from distributed_state.telemetry import Telemetry, observed, several

log = logging.getLogger(__name__)

COMMIT, READ, HYDRATE = Script("commit"), Script("read"), Script("hydrate")
SETTLE, TRIM, MARK, CLAIM = Script("settle"), Script("trim"), Script("mark"), Script("claim")
MINT, INSTALL, DROP, EVICT = Script("mint"), Script("install"), Script("drop"), Script("evict")
EMIT, ADVANCE, BEAT, PRUNE = Script("emit"), Script("advance"), Script("beat"), Script("prune")
DUE, DEFER, FILL, REDACT = Script("due"), Script("defer"), Script("fill"), Script("redact")
ACQUIRE, RELEASE, RENEW = Script("acquire"), Script("release"), Script("renew")

Journal = tuple[str, int, list[Entry]]
_TOKEN_MS = 30_000
_REFUSALS = (
    *("backpressure", "conflict", "deleted", "epoch", "exists"),
    *("fenced", "forgotten", "locked", "misused", "toolarge"),
)
_CREATED = (b"E", b"conversation.created", b"{}")


@dataclass(slots=True)
class Draft:
    """A change ready to be sent. `steps` are as in model.Op; `expectations` pairs a field with its stored bytes.

    `told` are steps beside it, as commit.lua has them: lifecycle events written with the change ('e'), another lifetime
    ('x'). `lifetime` is what the session has if it begins with this: idle and whole, in ms, 0 for no end.
    """

    kind: str
    steps: list[tuple[bytes, bytes, bytes]]
    expected: int | None = None
    expectations: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    deleted: str = "refuse"
    epoch: str = ""
    creation: str = ""
    actor: str = ""
    owner: str = ""
    grip: str = ""
    told: list[tuple[bytes, bytes, bytes]] = field(default_factory=list)
    lifetime: tuple[int, int] = (0, 0)


class OpId(NamedTuple):
    """Names one write of this replica; `oldest` is its first that is still unanswered (RIFL, Lee et al., SOSP 2015)."""

    sequence: int
    oldest: int
    digest: str


class Committed(NamedTuple):
    """What a write came to. `first_message` and `results` are None if only SQL remembers them (see `_remember`)."""

    version: int
    epoch: str
    first_message: int | None
    results: tuple[int, ...] | None
    offset: int


@dataclass(frozen=True, slots=True)
class Uninitialised:
    """The partition holds no epoch: Redis is new or was emptied."""


@dataclass(frozen=True, slots=True)
class Place:
    """How far a partition was written and archived; epoch '' if Redis knows nothing of it. `waiting`: bytes."""

    epoch: str
    offset: int
    archived: int
    waiting: int

    def fill(self, settings: Settings) -> float:
        """How full the journal is, 0 to 1; at 1 writes are refused."""
        return max(0.0, (self.offset - self.archived) / settings.journal_entries, self.waiting / settings.journal_bytes)


@dataclass(frozen=True, slots=True)
class Cold:
    """The record is not in Redis. `token` was left there before anything else."""

    epoch: str
    token: str


@dataclass(frozen=True, slots=True)
class Swap:
    """An increment that the server cannot do exactly; `raw` is what is stored."""

    name: bytes
    raw: bytes


class Warm:
    """Redis or Valkey, as seen by one replica."""

    def __init__(self, port: Port, settings: Settings, replica: str) -> None:
        self.port, self._settings, self.replica = port, settings, replica
        self.count = itertools.count(1)
        self.telemetry = Telemetry(settings, port.monotonic)
        self.refused = Counter(dict.fromkeys(_REFUSALS, 0))  # writes, by the word that the server answered
        self.retried = self.emitted = 0
        self._unanswered: dict[int, None] = {}
        self._mutex = port.mutex()
        self.limits = (
            b"%d" % settings.publish_bytes,
            b"%d" % settings.journal_entries,
            b"%d" % settings.journal_bytes,
            b"%d" % settings.max_record_bytes,
            b"%d" % math.ceil(settings.op_window),
            b"%d" % settings.kept_events,
        )
        self._ttl_ms = b"%d" % int(settings.warm_ttl * 1000)

    # Commits

    def begin(self, draft: Draft) -> OpId:
        """Name a write. `end` must follow, whatever comes of it."""
        digest = 0
        for step, name, value in draft.steps:
            digest = crc32(value, crc32(name, crc32(step, digest)))
        with self._mutex:
            sequence = next(self.count)
            self._unanswered[sequence] = None
            oldest = next(iter(self._unanswered))
        return OpId(sequence, oldest, f"{digest:x}")

    def end(self, op: OpId) -> None:
        """The caller will not send this write again."""
        with self._mutex:
            self._unanswered.pop(op.sequence, None)

    async def ask(self, call: Call, behind: Call | None = None) -> tuple[Any, Any]:
        """The answers of a script and of one sent behind it, in one round trip; repeated while they are lost.

        What fails behind is its answer, None if there was nothing.
        """
        return await self.patiently(self._ask, call, behind)  # type: ignore[no-any-return]  # what _ask returns

    async def _ask(self, call: Call, behind: Call | None) -> tuple[Any, Any]:
        if behind is None:
            return await self.port.script(*call), None
        answer, second = await self.port.scripts([call, behind])
        if isinstance(answer, StateError):
            raise answer
        return answer, second

    async def commit(
        self, names: RecordKeys, draft: Draft, op: OpId, *, listening: bytes, behind: Call | None = None
    ) -> Committed | Cold | Swap | Uninitialised:
        """Send a write, again and again while answers are lost. Raises what the server refused it for."""
        if draft.creation == "*" and self._settings.retry_for > 0:
            try:
                answer, _ = await self._ask(self._call(names, draft, op, listening), behind)
                return self.committed(names, draft, answer)
            except WarmUnavailable:
                draft.creation = ""  # the record may be there, or have been archived and evicted: only SQL knows
        answer, _ = await self.ask(self._call(names, draft, op, listening), behind)
        return self.committed(names, draft, answer)

    @observed("commit_many", "warm", several)
    async def commit_many(
        self, writes: Sequence[tuple[RecordKeys, Draft, OpId, bytes]]
    ) -> list[Committed | Cold | Swap | Uninitialised | StateError]:
        """Send writes to many records in one round trip; what was refused comes back as its error."""
        calls = [self._call(*write) for write in writes]
        answers = await self.patiently(self.port.scripts, calls)
        results: list[Committed | Cold | Swap | Uninitialised | StateError] = []
        for (names, draft, _, _), answer in zip(writes, answers, strict=True):
            try:
                results.append(answer if isinstance(answer, StateError) else self.committed(names, draft, answer))
            except StateError as error:
                results.append(error)
        return results

    def _call(self, names: RecordKeys, draft: Draft, op: OpId, listening: bytes) -> Call:
        """The call of commit.lua."""
        told = self.told(names, draft)
        arguments: list[Any] = [
            draft.epoch, self.replica, op.sequence, op.oldest, op.digest,
            draft.grip, draft.creation, f"{self.replica}.{op.sequence}", _TOKEN_MS,
            "" if draft.expected is None else draft.expected, draft.deleted, draft.kind,
            draft.actor, draft.owner, names.text, listening, *self.limits, len(draft.expectations),
        ]  # fmt: skip
        for name, raw in draft.expectations:
            arguments += (name, b"-" if raw is None else b"=" + raw)
        for step in draft.steps:
            arguments += step
        for step in told:
            arguments += step
        return COMMIT, (*names.commit_keys, *names.event_keys) if told else names.commit_keys, arguments

    def told(self, names: RecordKeys, draft: Draft) -> list[tuple[bytes, bytes, bytes]]:
        """The steps beside the change, with those that go with a beginning."""
        told = draft.told
        if names.ref.scope == "session" and (draft.creation or draft.deleted != "refuse"):
            # A rollback brings back a deleted one: that is told as what it is, and begins another lifetime.
            told = [_CREATED, *told] if draft.deleted != "revive" else list(told)
            if any(draft.lifetime) and not any(step == b"x" for step, _, _ in told):
                told.append((b"X", b"%d" % draft.lifetime[0], b"%d" % draft.lifetime[1]))
        return told

    def committed(self, names: RecordKeys, draft: Draft, answer: list[Any]) -> Committed | Cold | Swap | Uninitialised:
        """Read the answer of commit.lua."""
        word = answer[0]
        if word == b"ok":
            _, version, epoch, first, results, offset = answer
            unknown = first == b"?"
            sums = None if unknown else tuple(int(each) for each in results.split(b",") if each)
            if draft.told or draft.creation or draft.deleted != "refuse":
                self.emitted += sum(step in (b"e", b"E") for step, _, _ in self.told(names, draft))
            return Committed(int(version), epoch.decode(), None if unknown else int(first), sums, int(offset))
        if word == b"cold":
            return Cold(answer[1].decode(), answer[2].decode())
        if word == b"swap":
            return Swap(answer[1], answer[2])
        if word == b"uninitialised":
            return Uninitialised()
        self.refused[word.decode()] += 1
        raise _refusal(names, draft, answer)

    async def patiently(self, call: Any, *arguments: Any) -> Any:
        """Repeat while Redis does not answer, with jitter, for `retry_for` seconds."""
        try:
            return await call(*arguments)
        except WarmUnavailable as error:
            if self._settings.retry_for == 0:
                raise
            first = error
        deadline = self.port.monotonic() + self._settings.retry_for
        pause = 0.02
        while True:
            self.retried += 1
            await self.port.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, 0.5)
            try:
                return await call(*arguments)
            except WarmUnavailable:
                if self.port.monotonic() >= deadline:
                    raise first from None

    # Reads and hydration

    async def read(
        self, names: RecordKeys, epoch: str = "", version: int | None = None
    ) -> list[Any] | Cold | Uninitialised | None:
        """The fields of a record as stored, preceded by its epoch; None if the caller's version is the current one."""
        keys, arguments = self.read_call(names, epoch, version)
        return self.found(await self.patiently(self.port.script, READ, keys, arguments))

    @observed("read_many", "warm", several)
    async def read_many(self, many: Sequence[RecordKeys]) -> list[list[Any] | Cold | Uninitialised | StateError | None]:
        """Several records in one round trip."""
        calls = [(READ, *self.read_call(names, "", None)) for names in many]
        answers = await self.patiently(self.port.scripts, calls)
        return [answer if isinstance(answer, StateError) else self.found(answer) for answer in answers]

    def read_call(self, names: RecordKeys, epoch: str, version: int | None) -> tuple[list[bytes], list[Any]]:
        """Keys and arguments of read.lua."""
        known = "" if version is None else version
        arguments = [epoch, known, f"{self.replica}.{next(self.count)}", _TOKEN_MS, self._ttl_ms]
        return [names.record, names.hydration, names.meta], arguments

    def found(self, answer: list[Any]) -> list[Any] | Cold | Uninitialised | None:
        """Read the answer of read.lua."""
        if answer[0] == b"ok":
            return [answer[1].decode(), *answer[2]]
        if answer[0] == b"same":
            return None
        if answer[0] == b"cold":
            return Cold(answer[1].decode(), answer[2].decode())
        return Uninitialised()

    async def hydrate(self, names: RecordKeys, cold: Cold, loaded: Loaded) -> bool:
        """Put an archived record back; False if something happened to it since `cold` was answered."""
        state = loaded.state
        lowest = loaded.messages[0][0] if loaded.messages else int(state.fields.get(b"#mn", b"0"))
        size = sum(len(name) + len(value) for name, value in state.fields.items() if name[:1] != b"#")
        fields: list[Any] = [b"#v", state.version, b"#md", lowest, b"#size", size]
        for name, value in state.fields.items():
            fields += (name, value)
        for number, data in loaded.messages:
            fields += (b"#m%d" % number, data)
        if LIFETIME in state.fields:
            fields += (b"#t", loaded.time_ms)
        remembered = _remember(loaded.ops)
        if remembered:
            fields += (b"#ops", remembered)
        keys = [names.record, names.hydration, names.meta]
        answer = await self.patiently(self.port.script, HYDRATE, keys, [cold.epoch, cold.token, self._ttl_ms, *fields])
        return bool(answer[0] == b"ok")

    # Partitions

    async def mint(self, keys: PartitionKeys, token: str) -> str:
        """Ask to start a partition: 'ok', 'busy' or 'live'."""
        return _word(await self.patiently(self.port.script, MINT, [keys.meta, keys.mint], [token, 5000]))

    async def install(self, keys: PartitionKeys, token: str, epoch: str) -> str:
        """Start a partition: 'ok', 'live' or 'lost'."""
        names = [keys.meta, keys.mint, keys.journal, keys.events]
        return _word(await self.patiently(self.port.script, INSTALL, names, [token, epoch]))

    async def mark(self, keys: PartitionKeys, epoch: str) -> None:
        """Write a journal entry that changes nothing."""
        event = f"{self.replica}.{next(self.count)}.mark"
        await self.port.script(MARK, [keys.journal, keys.meta], [epoch, event])

    async def places(self, partitions: Sequence[PartitionKeys]) -> dict[int, Place]:
        """How far each partition was written, and archived."""
        fields = (b"epoch", b"offset", b"archived_offset", b"bytes", b"archived_bytes")
        answers = await self.port.exchange([(b"HMGET", keys.meta, *fields) for keys in partitions])
        places = {}
        for keys, answer in zip(partitions, answers, strict=True):
            if isinstance(answer, Exception):
                raise WarmUnavailable(f"partition {keys.partition}: {answer}") from answer
            offset, archived, written, settled = (int(each or 0) for each in answer[1:])
            places[keys.partition] = Place((answer[0] or b"").decode(), offset, archived, written - settled)
        return places

    async def journals(self, partitions: Sequence[PartitionKeys], count: int) -> list[Journal]:
        """The epochs and last offsets of partitions and the oldest entries of their journals; '' if it was emptied."""
        commands: list[Words] = []
        for keys in partitions:
            commands += [
                (b"HMGET", keys.meta, b"epoch", b"offset"),
                (b"XRANGE", keys.journal, b"-", b"+", b"COUNT", count),
                (b"HGET", keys.meta, b"epoch"),
            ]
        answers = await self.port.exchange(commands)
        return [self._journal(keys, *answers[at * 3 : at * 3 + 3]) for at, keys in enumerate(partitions)]

    def _journal(self, keys: PartitionKeys, before: Any, rows: Any, after: Any) -> Journal:
        for answer in (before, rows, after):
            if isinstance(answer, Exception):
                raise WarmUnavailable(f"partition {keys.partition}: {answer}") from answer
        epoch, end = before
        # Entries read between two equal epochs belong to that epoch: none ever comes back.
        if epoch is None or epoch != after:
            return "", 0, []
        return epoch.decode(), int(end), [Entry.read(*row) for row in rows]

    async def settle(self, calls: Sequence[tuple[RecordKeys, str, int, int]]) -> list[Any]:
        """Tell records (with epoch, version, next message) that they are archived so far."""
        recent = self._settings.recent_messages
        return await self.port.scripts(
            [
                (SETTLE, [names.record, names.meta], [epoch, version, self._ttl_ms, messages, recent])
                for names, epoch, version, messages in calls
            ]
        )

    async def trim(self, calls: Sequence[tuple[PartitionKeys, str, Entry]]) -> list[Any]:
        """Drop journal entries before the given one, which is archived."""
        return await self.port.scripts(
            [(TRIM, [keys.journal, keys.meta], [epoch, last.offset, last.total_bytes]) for keys, epoch, last in calls]
        )

    async def claim(self, claims: Sequence[bytes], member: str, ttl_ms: int) -> list[bool]:
        """Take or keep for a member the right that each of these keys stands for; whether it is its now."""
        answers = await self.port.scripts([(CLAIM, [claim], [member, ttl_ms]) for claim in claims])
        return [not isinstance(answer, StateError) and answer[0] == b"ok" for answer in answers]


def _word(answer: list[Any]) -> str:
    return str(answer[0].decode())


def _remember(ops: Sequence[tuple[str, int, int]]) -> bytes:
    """The op ids of a hydrated record, in the form of commit.lua. What they resulted in is left to SQL: '?'."""
    groups: dict[str, tuple[int, list[str]]] = {}
    for event, version, time_ms in ops:
        replica, sequence, digest = event.rsplit(".", 2)
        _, known = groups.get(replica, (0, []))
        groups[replica] = (time_ms // 1000, [*known, f"{sequence}:{version}:{digest}:?,"])
    return ";".join(f"{replica} 0 {time} {' '.join(known)}" for replica, (time, known) in groups.items()).encode()


def _shown(name: bytes, raw: bytes | None) -> str:
    # Never what is in a user's field: errors end up in logs.
    known = "nothing" if raw is None else f"{len(raw)} bytes"
    return repr(raw[:40].decode(errors="replace")) if raw is not None and name[:1] == b"#" else known


def _refusal(names: RecordKeys, draft: Draft, answer: list[Any]) -> StateError:
    """The error for what commit.lua refused."""
    word, rest = answer[0].decode(), answer[1:]
    record = names.ref.text[:200]
    if word == "epoch":
        return Conflict(f"{record}: read under epoch {draft.epoch}, now it is {rest[0].decode()}")
    if word == "exists":
        return Conflict(f"{record}: exists already, at version {int(rest[0])}", version=int(rest[0]))
    if word == "conflict":
        expected = f"version {draft.expected}" if draft.expected else "no record (version 0)"
        if draft.expected is None:
            expected = ", ".join(
                f"{name.decode(errors='replace')} = {_shown(name, raw)}" for name, raw in draft.expectations
            )
        return Conflict(f"{record}: expected {expected}, found version {int(rest[0])}",
                        version=int(rest[0]), found=tuple(rest[1:]))  # fmt: skip
    if word == "deleted":
        return Deleted(f"{record}: deleted at version {int(rest[0])}")
    if word == "fenced":
        held = rest[0].decode(errors="replace")
        text = f"{record}: the lease {draft.grip[:40]} is not held any more, {held[:80] or 'nobody'} holds it"
        return Fenced(text, holder=held)
    if word == "locked":
        return Locked(f"{record}: held by {rest[0].decode(errors='replace')[:80]}")
    if word == "backpressure":
        return Backpressure(f"{record}: {int(rest[0])} commits, {int(rest[1])} bytes of its partition are not archived")
    if word == "toolarge":
        return TooLarge(f"{record}: the record would grow to {int(rest[0])} bytes")
    if word == "forgotten":
        return WarmUnavailable(f"{record}: a repeated write came after its answer was forgotten; not applied again")
    return StateError(f"{record}: commit.lua answered {word}")
