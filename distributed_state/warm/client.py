"""The scripts about records: commit, read, hydrate, items. Law: a write has an op id, so that it may be sent again.

A write is applied once, even if it is sent several times or arrives late. Partitions have their own client,
`partitions`.

A record in Redis keeps the op ids of its commits since it was hydrated, until they can no longer be sent again.
Earlier op ids are in SQL only: a record leaves Redis only when it is archived, and hydration does not bring op ids
back. So each write carries `since_ms`, a time of the server's clock before which it cannot have been applied.

- If the record was hydrated before that time, its op ids show whether the write was applied.
- If it was hydrated later, the script changes nothing and answers `unsure`. The client asks SQL for the op id. SQL is
  read after the hydration, so a write that SQL does not have was not applied before it: it is sent again with the time
  of that answer as `since_ms`. If the record was evicted and hydrated again meanwhile, this is repeated.
- If Redis is too full to hydrate the record, SQL is asked before the write is refused, because a write that was applied
  must not be reported as refused.

A write without a lost answer gets a new time at each attempt, so it costs one round trip and no SQL. A write with a
lost answer keeps its time. It is not repeated later than half of `op_window` after it was first sent, and the server
refuses a write that is older than the whole window, which may have been delayed on its way.

`mark_archived.lua` drops the op ids of an archived record in the same way, if they do not fit into a small field.

Design: sections 4, 5.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Any, TypeVar
from zlib import crc32

from distributed_state.errors import Backpressure, DurabilityUnknown, StateError, WarmUnavailable
from distributed_state.port import Call, Port
from distributed_state.settings import Settings
from distributed_state.values.codec import Codec
from distributed_state.values.journal import Loaded, Operation
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import ITEMS, LIFETIME
from distributed_state.warm.answers import (
    REFUSALS,
    Answer,
    Cold,
    Draft,
    HasHandler,
    HeldItem,
    KnownItems,
    ListedItems,
    Posted,
    Swap,
    Uninitialised,
    UnknownItems,
    Unsure,
    committed,
    refusal,
)
from distributed_state.warm.clock import ServerClock
from distributed_state.warm.partitions import Partitions
from distributed_state.warm.scripts import COMMIT, HYDRATE, LIST_ITEMS, READ, READ_ITEMS, UNCHANGED, RetryingClient
from distributed_state.warm.telemetry import Telemetry, observed, several

T = TypeVar("T")
_MARGIN_MS = 2000  # how far the clocks of two servers may differ; one of them may never have answered
FULL = "Redis is at maxmemory and nothing more is evictable; nothing was written"
LOST = "a write may have been applied, its answer was lost"


class OpId:
    """Names one write of this replica, and has the arguments of commit.lua that may differ between its attempts.

    - `sequence`, `digest` name it; `oldest` is the sequence of this replica's first unanswered write to the record
      (RIFL, SOSP 2015).
    - `record` is the record's text, `size` the bytes of the operations, `first` its beginning by the monotonic clock.
    - `since_ms`: the write was not applied before that time of the server's clock. `doubted`: a reply was lost, so it
      may have been applied since. `eased_ms`: the last `since_ms` that was set back for another server's clock.
    - `lock_value`, `creation`: see commit.lua. `listening`: this replica's own channel, if it is subscribed to the
      record's.
    - `sql_versions`: operations 'V' and 'G', which say which items SQL has.
    - `events`: the draft's and a new session's, encrypted.
    - `sent`: all arguments of the last attempt.
    """

    # Class attributes, because setting each in __init__ would be the slowest part of making an op id.
    since_ms = 0
    doubted = False
    eased_ms = -1
    lock_value = ""
    creation = ""
    listening = b""
    sql_versions: Sequence[Operation] = ()
    events: Sequence[Operation] = ()
    sent: Sequence[Any] = ()

    def __init__(self, sequence: int, oldest: int, digest: str, first: float, size: int, record: bytes = b"") -> None:
        self.sequence = sequence
        self.oldest = oldest
        self.digest = digest
        self.first = first
        self.size = size
        self.record = record


class OpIds:
    """Makes the op ids of one replica, and keeps the unanswered ones."""

    def __init__(self, port: Port, clock: ServerClock, replica: str, count: itertools.count[int], window: float):
        self._port = port
        self._clock = clock
        self._replica = replica
        self._count = count
        self._window = window
        self._unanswered: dict[bytes, list[int]] = {}  # for each record that is being written, in order
        self._mutex = port.mutex()

    def begin(self, operations: Sequence[tuple[bytes, bytes, bytes]], record: bytes = b"") -> OpId:
        """Name a write to a record. `end` must follow in every case."""
        text = b"\0".join(chain.from_iterable(operations))
        with self._mutex:
            sequence = next(self._count)
            # A list for each record: with one list for all, a record would keep op ids because of another record's slow
            # write.
            unanswered = self._unanswered.get(record)
            if unanswered is None:
                unanswered = self._unanswered[record] = []
            unanswered.append(sequence)
            oldest = unanswered[0]
        return OpId(sequence, oldest, f"{crc32(text):x}", self._port.monotonic(), len(text), record)

    def end(self, op: OpId) -> None:
        """Note that the caller will not send this write again."""
        with self._mutex:
            unanswered = self._unanswered.get(op.record, ())
            if len(unanswered) > 1:
                self._unanswered[op.record].remove(op.sequence)
            elif op.sequence in unanswered:
                del self._unanswered[op.record]

    def event(self, op: OpId) -> str:
        """Return the id of the write's commit, in the journal and in SQL."""
        return f"{self._replica}.{op.sequence}.{op.digest}"

    def sending(self, op: OpId, what: str) -> None:
        """Note that a write is sent now: if no reply comes, it may have been applied.

        Raises DurabilityUnknown if it is too late to repeat it: half of the window after it was first sent. The other
        half is for a request that is delayed on its way.
        """
        if not op.doubted:
            since_ms = self._clock.earliest_ms()
            if since_ms > op.since_ms:
                op.since_ms = since_ms
        elif self._port.monotonic() - op.first > self._window / 2:
            raise DurabilityUnknown(f"{what[:200]}: {LOST}, and it is too late to ask")

    async def send(self, ops: Sequence[OpId], what: str, call: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Send writes by this call, and note that they may have been applied if no reply comes."""
        for op in ops:
            self.sending(op, what)
        try:
            return await call(*arguments)
        except WarmUnavailable:
            for op in ops:
                self.lost(op)
            raise

    def lost(self, op: OpId) -> None:
        """Note that a reply was lost, and set `since_ms` back once, because another server's clock may be behind.

        The other server is a promoted replica, or the new owner of the slot: it may have applied the write, or may
        answer its repetition. If its clock is behind, it may have hydrated the record, including this write, at a time
        that it counts as before `since_ms`; then SQL would not be asked.
        """
        op.doubted = True
        if self._port.several and op.since_ms != op.eased_ms:
            op.since_ms = op.eased_ms = op.since_ms - _MARGIN_MS


_CREATED = (b"E", b"conversation.created", b"{}")


class Warm(RetryingClient):
    """One replica's client for records in Redis or Valkey."""

    def __init__(self, port: Port, settings: Settings, replica: str, codec_of: Callable[[str], Codec]) -> None:
        super().__init__(port, settings.retry_for, settings.timeout)
        self.settings = settings
        self.replica = replica
        self.codec_of = codec_of
        self.clock = ServerClock(port)
        self.count = itertools.count(1)
        self.ops = OpIds(port, self.clock, replica, self.count, settings.op_window)
        self.partitions = Partitions(self, settings, replica, self.count)
        self.telemetry = Telemetry(settings, port.monotonic)
        self.refused = Counter(dict.fromkeys((*REFUSALS, "full"), 0))  # writes, by the word of the refusal
        self.emitted = 0
        self.full_at = 0.0
        """When a server last had no memory for a write of this replica, by the server's clock; 0 if never."""
        self._name_full_at = 0.0
        self.limits = (  # for an event that is written without a commit
            b"%d" % settings.publish_bytes,
            b"%d" % settings.journal_entries,
            b"%d" % settings.journal_bytes,
            b"%d" % settings.kept_events,
        )
        self._commit = COMMIT.given(
            publish_bytes=settings.publish_bytes,
            journal_entries=settings.journal_entries,
            journal_bytes=settings.journal_bytes,
            record_bytes=settings.max_record_bytes,
            window_ms=math.ceil(settings.op_window) * 1000,
            kept_events=settings.kept_events,
            output_ttl=math.ceil(settings.output_ttl * 1000),
            inbox_limit=settings.inbox_limit,
            inbox_bytes=settings.inbox_bytes,
        )
        self._constants = (replica,)
        self.ttl_ms = b"%d" % int(settings.warm_ttl * 1000)

    # Commits

    async def commit(self, keys: RecordKeys, draft: Draft, op: OpId, trailing_call: Call | None = None) -> Answer:
        """Send a write, repeatedly while replies are lost. Raises the server's refusal."""
        if draft.events or op.creation or op.events or draft.deleted != "refuse":
            self._seal(keys, draft, op)
        try:
            answer, trailing = await self._attempt(keys, draft, op, trailing_call)
        except WarmUnavailable as error:
            answer, trailing = await self.again(error, self._attempt, keys, draft, op, trailing_call)
        if type(answer) is bytes and not op.events:
            return committed(answer, draft.operations, trailing)  # the fast path
        return self._committed(keys, draft, op, answer, trailing)

    async def _attempt(self, keys: RecordKeys, draft: Draft, op: OpId, trailing_call: Call | None) -> tuple[Any, Any]:
        # The call is built for each attempt: it includes the earliest time at which the op id can have been applied.
        self.ops.sending(op, keys.ref.text)
        call = self._call(keys, draft, op)
        try:
            if trailing_call is None:
                return await self.port.script(*call), None
            return await self._ask(call, trailing_call)
        except WarmUnavailable:
            self.ops.lost(op)
            raise
        except Backpressure as error:
            self.full(error)
            raise

    def full(self, error: Backpressure) -> None:
        """Count a write for which a server had no memory, and log it once a minute."""
        self.refused["full"] += 1
        self.full_at = self.clock.now()
        if (now := self.port.monotonic()) >= self._name_full_at:
            self._name_full_at = now + 60.0
            logging.getLogger(__name__).error("writes are refused: %s", error)

    @observed("commit_many", "warm", several)
    async def commit_many(self, writes: Sequence[tuple[RecordKeys, Draft, OpId]]) -> list[Answer | StateError]:
        """Send writes to many records in one round trip; a refused write is returned as its error."""
        for keys, draft, op in writes:
            self._seal(keys, draft, op)
        answers = await self.missing(len(writes), lambda left: self._attempt_many([writes[at] for at in left]))
        results: list[Answer | StateError] = []
        for (keys, draft, op), answer in zip(writes, answers, strict=True):
            try:
                results.append(answer if isinstance(answer, StateError) else self._committed(keys, draft, op, answer))
            except StateError as error:
                results.append(error)
        return results

    async def _attempt_many(self, writes: Sequence[tuple[RecordKeys, Draft, OpId]]) -> list[Any]:
        for _, _, op in writes:
            self.ops.sending(op, f"a batch of {len(writes)}")
        try:
            answers = await self.port.scripts([self._call(*write) for write in writes])
        except WarmUnavailable as error:
            answers = [error] * len(writes)
        for (_, _, op), answer in zip(writes, answers, strict=True):
            if isinstance(answer, WarmUnavailable):
                self.ops.lost(op)
        return answers

    def _call(self, keys: RecordKeys, draft: Draft, op: OpId) -> Call:
        """Return the call of commit.lua."""
        events = op.events
        # The record may exist, or have been archived and evicted: only SQL knows.
        creation = "?" if op.doubted and op.creation == "*" else op.creation
        arguments: list[Any] = [
            self._constants, draft.epoch, op.sequence, op.oldest, op.digest, op.since_ms, op.lock_value, creation,
            "" if draft.expected is None else draft.expected, draft.deleted, draft.kind,
            draft.actor, draft.owner, keys.text, op.listening,
            len(draft.preconditions) + len(draft.expectations),
        ]  # fmt: skip
        for precondition in draft.preconditions:
            arguments += precondition
        for name, raw in draft.expectations:
            arguments += (name, b"-" if raw is None else b"=" + raw)
        op.sent = arguments
        for operation in draft.operations:
            arguments += operation
        if not events and not draft.items and draft.ends_output is None and not draft.handler:
            return self._commit, keys.commit_keys, arguments
        ends = False
        for event in events:
            arguments += event
            ends = ends or event[0] in (b"x", b"X")
        # These change nothing, so they are left out of `op.sent`.
        more: list[bytes] = []
        if draft.items:
            more += [word for operation in (*op.sql_versions, *draft.expected_items) for word in operation]
        touched = (*keys.commit_keys, *keys.event_keys)
        if draft.ends_output is not None or draft.handler:
            more += draft.ends_output or ()
            items = keys.items if draft.items else keys.output
            touched = (*touched, keys.lifetimes, items, keys.output, keys.output_channel)
            if draft.handler:
                touched = (*touched, keys.due_of(draft.handler), keys.due_channel)
        elif draft.items:
            touched = (*touched, keys.lifetimes, keys.items)
        elif ends:
            touched = (*touched, keys.lifetimes)  # an additional key costs the server as much as a word
        return self._commit, touched, [*arguments, *more] if more else arguments

    def _seal(self, keys: RecordKeys, draft: Draft, op: OpId) -> None:
        """Encrypt the additional operations of a change once for all attempts, so that the bytes stay the same."""
        op.events = events = _events(keys, draft, op.creation)
        if events:
            codec = self.codec_of(keys.ref.text)
            # The op id is known only now, and an event's data is authenticated with it.
            writer = f"{self.replica}.{op.sequence}"
            op.events = [
                (kind, type, codec.seal_event(data, type.decode(), writer) if kind in b"eE" else data)
                for kind, type, data in events
            ]

    def _committed(self, keys: RecordKeys, draft: Draft, op: OpId, answer: Any, trailing: Any = None) -> Answer:
        """Parse the answer of commit.lua, and keep that of the script which was sent after it."""
        if isinstance(answer, bytes):
            done = committed(answer, draft.operations, trailing)
            if op.events:
                written = (b"e", b"E") if done.begins else (b"e",)
                self.emitted += sum(operation in written for operation, _, _ in op.events)
            return done
        word = answer[0]
        if word == b"cold":
            return Cold(answer[1].decode(), answer[2].decode())
        if word == b"swap":
            return Swap(tuple(zip(answer[1::2], answer[2::2], strict=True)))
        if word == b"items":
            return UnknownItems(answer[1].decode(), int(answer[2]))
        if word == b"uninitialised":
            return Uninitialised()
        if word == b"handler":
            return HasHandler(answer[1].decode())
        if word in (b"unsure", b"late"):
            return Unsure(int(answer[1]), answer[2].decode(), word == b"late")
        if word == b"posted":
            raise Posted(int(answer[1]))
        self.refused[word.decode()] += 1
        raise refusal(keys, draft, op.lock_value, answer)

    # Scripts that are sent with another one

    async def ask(self, call: Call, trailing_call: Call | None = None) -> tuple[Any, Any]:
        """Send a script, and a second one after it, in one round trip; return both answers.

        Repeated while replies are lost. An error of the second is returned as its answer, None if there was no second;
        it runs even if the first fails.
        """
        return await self.retry(self._ask, call, trailing_call)  # type: ignore[no-any-return]  # what _ask returns

    async def _ask(self, call: Call, trailing_call: Call | None) -> tuple[Any, Any]:
        if trailing_call is None:
            return await self.port.script(*call), None
        answer, second = await self.port.scripts([call, trailing_call])
        if isinstance(answer, StateError):
            raise answer
        return answer, second

    # Reads and hydration

    async def read(
        self, keys: RecordKeys, epoch: str = "", version: int | None = None
    ) -> list[Any] | Cold | Uninitialised | None:
        """Return the epoch and the fields of a record as stored; None if the caller's version is the current one."""
        return self.read_answer(await self.script(READ, *self.read_call(keys, epoch, version)))

    @observed("read_many", "warm", several)
    async def read_many(
        self, many: Sequence[tuple[RecordKeys, str, int | None]]
    ) -> list[list[Any] | Cold | Uninitialised | StateError | None]:
        """Read several records in one round trip, each with the epoch and the version that the caller has."""
        calls = [(READ, *self.read_call(*each)) for each in many]
        answers = await self.scripts(calls)
        return [answer if isinstance(answer, StateError) else self.read_answer(answer) for answer in answers]

    async def unchanged(self, groups: Sequence[tuple[list[bytes], list[str]]]) -> list[list[bytes] | StateError]:
        """Check which records are at the versions that the caller has, in one exchange that is tried once.

        Each group has the keys and arguments of unchanged.lua for one partition. Returns a word for each record,
        "same", "other" or "absent"; an empty list for a partition that must be started.
        """
        found: list[list[bytes] | StateError] = []
        for answer in await self.port.scripts([(UNCHANGED, *group) for group in groups]):
            if isinstance(answer, StateError):
                found.append(answer)
            else:
                found.append(answer[1].split() if answer[0] == b"ok" else [])
        return found

    def read_call(self, keys: RecordKeys, epoch: str, version: int | None) -> tuple[list[bytes], list[Any]]:
        """Return keys and arguments of read.lua."""
        known = "" if version is None else version
        arguments = [epoch, known, f"{self.replica}.{next(self.count)}", self.ttl_ms]
        return [keys.record, keys.hydration, keys.meta], arguments

    def read_answer(self, answer: list[Any]) -> list[Any] | Cold | Uninitialised | None:
        """Parse the answer of read.lua."""
        if answer[0] == b"ok":
            return [answer[1].decode(), *answer[2]]
        if answer[0] == b"same":
            return None
        if answer[0] == b"cold":
            return Cold(answer[1].decode(), answer[2].decode())
        return Uninitialised()

    async def hydrate(self, keys: RecordKeys, cold: Cold, loaded: Loaded) -> int:
        """Put an archived record back; return the server's time in ms, 0 if it changed since `cold` was read."""
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
        if ITEMS in state.fields:
            fields += (b"#kv", state.version)
        touched = [keys.record, keys.hydration, keys.meta, keys.items]
        answer = await self.script(HYDRATE, touched, [cold.epoch, cold.token, self.ttl_ms, *fields])
        return int(answer[1]) if answer[0] == b"ok" else 0

    # Items: those that Redis lacks and does not know to be absent are read from SQL

    async def read_items(self, keys: RecordKeys, wanted: Sequence[bytes]) -> KnownItems | Cold | Uninitialised:
        """Read items by name: collection, NUL, key."""
        answer = await self.script(READ_ITEMS, [keys.record, keys.items, keys.meta], [self.ttl_ms, *wanted])
        if answer[0] != b"ok":
            return _absent(answer)
        _, epoch, version, since, *items = answer
        found = {
            name: None if item == b"-" else _held(item) for name, item in zip(wanted, items, strict=True) if item != b""
        }
        return KnownItems(epoch.decode(), int(version), int(since or 0), found)

    async def list_items(
        self,
        keys: RecordKeys,
        collection: bytes,
        prefix: bytes,
        after: bytes | None,
        before: bytes | None,
        *,
        reverse: bool,
        limit: int,
        size: int,
    ) -> ListedItems | Cold | Uninitialised:
        """Return the first items of a range of keys, at most `limit` items and `size` bytes."""
        bounds = [b"" if bound is None else b"=" + bound for bound in (after, before)]
        arguments = [self.ttl_ms, collection, prefix, *bounds, b"1" if reverse else b"", limit, size]
        answer = await self.script(LIST_ITEMS, [keys.record, keys.items, keys.meta], arguments)
        if answer[0] != b"ok":
            return _absent(answer)
        _, epoch, version, since, whole, more, *pairs = answer
        items = {key: _held(text) for key, text in zip(pairs[::2], pairs[1::2], strict=True)}
        return ListedItems(epoch.decode(), int(version), int(since or 0), whole == b"1", more == b"1", items)


def _events(keys: RecordKeys, draft: Draft, creation: str) -> list[Operation]:
    """Return the additional operations of a change, with those that a new session adds."""
    events = list(draft.events)
    if keys.ref.scope == "session" and (creation or draft.deleted != "refuse"):
        # These are written only if the session begins with this commit. A rollback that restores a deleted session has
        # the rollback's event, and begins a new lifetime.
        if draft.deleted != "revive" and not any(type == _CREATED[1] for _, type, _ in events):
            events.insert(0, _CREATED)
        if any(draft.lifetime) and not any(operation == b"x" for operation, _, _ in events):
            events.append((b"X", b"%d" % draft.lifetime[0], b"%d" % draft.lifetime[1]))
    return events


def _held(text: bytes) -> HeldItem:
    version, _, frame = text.partition(b" ")
    return HeldItem(int(version), frame)


def _absent(answer: list[Any]) -> Cold | Uninitialised:
    return Cold(answer[1].decode(), "") if answer[0] == b"cold" else Uninitialised()
