"""The warm tier: one function per script. Law: a write is sent with an op id, so that sending it again is harmless.

How that holds when the record leaves Redis meanwhile, see `op_ids`.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from distributed_state.errors import (
    StateError,
)
from distributed_state.port import Call, Port, Words
from distributed_state.settings import Settings
from distributed_state.values.codec import Codec
from distributed_state.values.journal import Journal, JournalEntry, Loaded
from distributed_state.values.keys import PartitionKeys, RecordKeys
from distributed_state.values.model import LIFETIME
from distributed_state.warm.answers import Cold, Committed, Draft, PartitionState, Swap, Uninitialised
from distributed_state.warm.clock import ServerClock
from distributed_state.warm.op_ids import OpId, OpIds, Unsure
from distributed_state.warm.patience import Patience
from distributed_state.warm.refusals import REFUSALS, refusal
from distributed_state.warm.scripts import CLAIM, COMMIT, HYDRATE, INSTALL, JOIN, MARK, MINT, READ, SETTLE, TAIL, TRIM
from distributed_state.warm.telemetry import Telemetry, observed, several

log = logging.getLogger(__name__)


_TOKEN_MS = 30_000
_CREATED = (b"E", b"conversation.created", b"{}")


class Warm(Patience):
    """Redis or Valkey, as seen by one replica."""

    def __init__(self, port: Port, settings: Settings, replica: str, codec_of: Callable[[str], Codec]) -> None:
        super().__init__(port, settings.retry_for)
        self._settings = settings
        self.replica = replica
        self.codec_of = codec_of
        self.clock = ServerClock(port)
        self.count = itertools.count(1)
        self.ops = OpIds(port, self.clock, replica, self.count, settings.op_window)
        self.telemetry = Telemetry(settings, port.monotonic)
        self.refused = Counter(dict.fromkeys(REFUSALS, 0))  # writes, by the word that the server answered
        self.emitted = 0
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
        return self.ops.begin(draft.steps)

    def end(self, op: OpId) -> None:
        """The caller will not send this write again."""
        self.ops.end(op)

    async def ask(self, call: Call, trailing_call: Call | None = None) -> tuple[Any, Any]:
        """The answers of a script and of one sent behind it, in one round trip; repeated while they are lost.

        What fails behind is its answer, None if there was nothing. It runs whatever became of the first.
        """
        return await self.patiently(self._ask, call, trailing_call)  # type: ignore[no-any-return]  # what _ask returns

    async def _ask(self, call: Call, trailing_call: Call | None) -> tuple[Any, Any]:
        if trailing_call is None:
            return await self.port.script(*call), None
        answer, second = await self.port.scripts([call, trailing_call])
        if isinstance(answer, StateError):
            raise answer
        return answer, second

    async def commit(
        self, names: RecordKeys, draft: Draft, op: OpId, *, listening: bytes, trailing_call: Call | None = None
    ) -> Committed | Cold | Swap | Uninitialised | Unsure:
        """Send a write, again and again while answers are lost. Raises what the server refused it for."""

        async def once() -> tuple[Any, Any]:
            return await self._ask(self._call(names, draft, op, listening), trailing_call)

        sent = await self.patiently(self.ops.send, [op], names.ref.text[:200], once)
        return self.committed(names, draft, *sent)

    @observed("commit_many", "warm", several)
    async def commit_many(
        self, writes: Sequence[tuple[RecordKeys, Draft, OpId, bytes]]
    ) -> list[Committed | Cold | Swap | Uninitialised | Unsure | StateError]:
        """Send writes to many records in one round trip; what was refused comes back as its error."""

        async def once() -> list[Any]:
            return await self.port.scripts([self._call(*write) for write in writes])

        answers = await self.patiently(self.ops.send, [op for _, _, op, _ in writes], f"a batch of {len(writes)}", once)
        results: list[Committed | Cold | Swap | Uninitialised | Unsure | StateError] = []
        for (names, draft, _, _), answer in zip(writes, answers, strict=True):
            try:
                results.append(answer if isinstance(answer, StateError) else self.committed(names, draft, answer))
            except StateError as error:
                results.append(error)
        return results

    def _call(self, names: RecordKeys, draft: Draft, op: OpId, listening: bytes) -> Call:
        """The call of commit.lua."""
        told = self.told(names, draft)
        # The record may be there, or have been archived and evicted: only SQL knows.
        creation = "?" if op.doubted and draft.creation == "*" else draft.creation
        arguments: list[Any] = [
            draft.epoch, self.replica, op.sequence, op.oldest, op.digest,
            draft.lock_value, creation, f"{self.replica}.{op.sequence}", _TOKEN_MS,
            "" if draft.expected is None else draft.expected, draft.deleted, draft.kind,
            draft.actor, draft.owner, names.text, listening, *self.limits, op.since_ms, len(draft.expectations),
        ]  # fmt: skip
        for name, raw in draft.expectations:
            arguments += (name, b"-" if raw is None else b"=" + raw)
        for step in draft.steps:
            arguments += step
        record_codec = self.codec_of(names.ref.text)
        writer = f"{self.replica}.{op.sequence}"
        for kind, type, data in told:
            # Only now the id is known that an event's data is sealed under.
            arguments += (kind, type, record_codec.seal_event(data, type.decode(), writer) if kind in b"eE" else data)
        return COMMIT, (*names.commit_keys, *names.event_keys) if told else names.commit_keys, arguments

    def told(self, names: RecordKeys, draft: Draft) -> list[tuple[bytes, bytes, bytes]]:
        """The steps beside the change, with those that go with a beginning."""
        told = draft.events
        if names.ref.scope == "session" and (draft.creation or draft.deleted != "refuse"):
            # A rollback brings back a deleted one: that is told as what it is, and begins another lifetime.
            begun = draft.deleted == "revive" or any(type == _CREATED[1] for _, type, _ in told)
            told = list(told) if begun else [_CREATED, *told]
            if any(draft.lifetime) and not any(step == b"x" for step, _, _ in told):
                told.append((b"X", b"%d" % draft.lifetime[0], b"%d" % draft.lifetime[1]))
        return told

    def committed(
        self, names: RecordKeys, draft: Draft, answer: list[Any], trailing_call: Any = None
    ) -> Committed | Cold | Swap | Uninitialised | Unsure:
        """Read the answer of commit.lua, and keep that of what was sent behind it."""
        word = answer[0]
        if word == b"ok":
            _, version, epoch, first, results, offset, *time = answer
            sums = tuple(int(each) for each in results.split(b",") if each)
            if draft.events or draft.creation or draft.deleted != "refuse":
                self.emitted += sum(step in (b"e", b"E") for step, _, _ in self.told(names, draft))
            time_ms = int(time[0]) if time else None
            return Committed(int(version), epoch.decode(), int(first), sums, int(offset), time_ms, trailing_call)
        if word == b"cold":
            return Cold(answer[1].decode(), answer[2].decode())
        if word == b"swap":
            return Swap(answer[1], answer[2])
        if word == b"uninitialised":
            return Uninitialised()
        if word in (b"unsure", b"late"):
            return Unsure(int(answer[1]), answer[2].decode(), word == b"late")
        self.refused[word.decode()] += 1
        raise refusal(names, draft, answer)

    # Reads and hydration

    async def read(
        self, names: RecordKeys, epoch: str = "", version: int | None = None
    ) -> list[Any] | Cold | Uninitialised | None:
        """The fields of a record as stored, preceded by its epoch; None if the caller's version is the current one."""
        keys, arguments = self.read_call(names, epoch, version)
        return self.found(await self.script(READ, keys, arguments))

    @observed("read_many", "warm", several)
    async def read_many(self, many: Sequence[RecordKeys]) -> list[list[Any] | Cold | Uninitialised | StateError | None]:
        """Several records in one round trip."""
        calls = [(READ, *self.read_call(names, "", None)) for names in many]
        answers = await self.scripts(calls)
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

    async def hydrate(self, names: RecordKeys, cold: Cold, loaded: Loaded) -> int:
        """Put an archived record back; the server's time in ms, 0 if something happened to it since `cold` came."""
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
        keys = [names.record, names.hydration, names.meta]
        answer = await self.script(HYDRATE, keys, [cold.epoch, cold.token, self._ttl_ms, *fields])
        return int(answer[1]) if answer[0] == b"ok" else 0

    # Partitions

    async def mint(self, keys: PartitionKeys, token: str) -> str:
        """Ask to start a partition: 'ok', 'busy' or 'live'."""
        return _word(await self.script(MINT, [keys.meta, keys.mint], [token, 5000]))

    async def install(self, keys: PartitionKeys, token: str, epoch: str) -> str:
        """Start a partition: 'ok', 'live' or 'lost'."""
        names = [keys.meta, keys.mint, keys.journal, keys.events]
        return _word(await self.script(INSTALL, names, [token, epoch]))

    async def mark(self, keys: PartitionKeys, epoch: str) -> None:
        """Write a journal entry that changes nothing."""
        event = f"{self.replica}.{next(self.count)}.mark"
        await self.script(MARK, [keys.journal, keys.meta], [epoch, event])

    async def places(self, partitions: Sequence[PartitionKeys]) -> dict[int, PartitionState]:
        """How far each partition was written, and archived."""
        fields = (b"epoch", b"offset", b"archived_offset", b"bytes", b"archived_bytes")
        answers = await self.commands([(b"HMGET", keys.meta, *fields) for keys in partitions])
        places = {}
        for keys, answer in zip(partitions, answers, strict=True):
            offset, archived, written, settled = (int(each or 0) for each in answer[1:])
            places[keys.partition] = PartitionState((answer[0] or b"").decode(), offset, archived, written - settled)
        return places

    async def tail(self, keys: PartitionKeys | RecordKeys) -> tuple[str, int, str] | None:
        """Epoch, offset and event of the last entry of a journal; None if the partition holds no epoch."""
        answer = await self.script(TAIL, [keys.journal, keys.meta], [])
        if answer[0] != b"ok":
            return None
        return answer[1].decode(), int(answer[2]), answer[3].decode()

    async def journals(self, places: Sequence[tuple[PartitionKeys, int]], count: int) -> list[Journal]:
        """The journals of partitions about an offset each, at most `count` entries on either side of it."""
        commands: list[Words] = []
        for keys, offset in places:
            commands += [
                (b"HMGET", keys.meta, b"epoch", b"offset"),
                (b"XRANGE", keys.journal, b"-", b"%d-0" % max(0, offset - 1), b"COUNT", count),
                (b"XRANGE", keys.journal, b"%d-0" % offset, b"+", b"COUNT", count),
                (b"HGET", keys.meta, b"epoch"),
            ]
        answers = await self.commands(commands)
        return [self._journal(answers[at * 4 : at * 4 + 4]) for at in range(len(places))]

    def _journal(self, answers: Sequence[Any]) -> Journal:
        (epoch, end), before, onward, after = answers
        # Entries read between two equal epochs belong to that epoch: none ever comes back.
        if epoch is None or epoch != after:
            return Journal("", 0, [], [])
        entries = [[JournalEntry.read(*row) for row in rows] for rows in (before, onward)]
        return Journal(epoch.decode(), int(end), *entries)

    async def settle(
        self, calls: Sequence[tuple[PartitionKeys, str, JournalEntry, Sequence[tuple[RecordKeys, int, int]]]]
    ) -> list[Any]:
        """Tell records (with version and next message) that they are archived so far, if that entry is in the journal.

        Each call is of one partition under an epoch; its entry is at or behind what its records are told.
        """
        recent = self._settings.recent_messages
        return await self.scripts(
            [
                (
                    SETTLE,
                    [names.record, keys.journal, keys.meta],
                    [epoch, last.offset, last.event, version, self._ttl_ms, messages, recent],
                )
                for keys, epoch, last, records in calls
                for names, version, messages in records
            ]
        )

    async def trim(self, calls: Sequence[tuple[PartitionKeys, str, JournalEntry]]) -> list[Any]:
        """Drop journal entries before the given one, which is archived, if it is in the journal."""
        return await self.scripts(
            [
                (TRIM, [keys.journal, keys.meta], [epoch, last.offset, last.event, last.total_bytes])
                for keys, epoch, last in calls
            ]
        )

    async def join(self, team: bytes, member: str, ttl_ms: int) -> int:
        """Be a member of a team for so long; how many there are."""
        return int((await self.port.script(JOIN, [team], [member, ttl_ms]))[1])

    async def claim(self, claims: Sequence[bytes], member: str, ttl_ms: int) -> list[bool]:
        """Take or keep for a member the right that each of these keys stands for; whether it is its now."""
        answers = await self.port.scripts([(CLAIM, [claim], [member, ttl_ms]) for claim in claims])
        return [not isinstance(answer, StateError) and answer[0] == b"ok" for answer in answers]


def _word(answer: list[Any]) -> str:
    return str(answer[0].decode())
