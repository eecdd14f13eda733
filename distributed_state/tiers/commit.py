"""The write path: one change of one record, in one round trip. Law: only a commit changes a record.

`commit` sends a change to warm under an op id, keeps it until it is archived (`unarchived.py`), merges it into hot, and
waits for its durability; the archiver writes it to cold later. Before the server applies the change, it may need the
record from SQL, a started partition, or the information whether a write whose reply was lost had been applied.
`_supply_and_resend` supplies this, and sends the change again under the same op id, so that it is applied once.

A record that left Redis and was hydrated has lost its op ids; SQL has all of them. A write that is in neither Redis nor
SQL was not applied and may be sent again. While SQL is down the caller gets DurabilityUnknown: if the write were
reported as refused, the caller would repeat it, and it could be applied twice.

Design: sections 4, 5.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from distributed_state.errors import (
    Backpressure,
    ColdUnavailable,
    Conflict,
    DurabilityUnknown,
    InvalidValue,
    NotFound,
    StateError,
    Unavailable,
    WarmUnavailable,
)
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import Call, retrying
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.durability import Applied, admit, ensure_durability, ensure_many
from distributed_state.tiers.items import sql_versions
from distributed_state.tiers.read import ROUNDS, hydrate, reach, read
from distributed_state.values import codec, field_ttl
from distributed_state.values.field_ttl import NEVER
from distributed_state.values.journal import unpack
from distributed_state.values.keys import RecordKeys
from distributed_state.values.levels import MEMORY
from distributed_state.warm.answers import (
    Answer,
    Cold,
    Committed,
    Draft,
    Expectations,
    HasHandler,
    Swap,
    Uninitialised,
    UnknownItems,
    Unsure,
)
from distributed_state.warm.client import FULL, LOST, OpId
from distributed_state.warm.lease import AsyncLease
from distributed_state.warm.telemetry import record as of_record

T = TypeVar("T")
_SWEPT = 500  # maximum of expired fields that one commit deletes; later commits delete the rest
_REPLACED = 0.05  # seconds after which the port no longer asks a server that was replaced
Sent = tuple[RecordKeys, Draft, OpId]


def commit(
    tiers: Tiers, keys: RecordKeys, draft: Draft, *, last: AsyncLease | None = None
) -> Coroutine[Any, Any, Committed]:
    """Apply one change, or raise the server's refusal, after which nothing has changed.

    `last` is a lease that is released in the same round trip, because this is the last change under it.
    """
    work = _commit(tiers, keys, draft, last)
    if not tiers.telemetry.on:
        return work
    return tiers.telemetry.watch("commit", "warm", lambda: of_record(tiers, keys, draft), work)


async def _commit(tiers: Tiers, keys: RecordKeys, draft: Draft, last: AsyncLease | None) -> Committed:
    if draft.events and tiers.handlings:
        await tiers.listening()
    level = draft.level or tiers.confirming.level
    if level is not MEMORY:
        await admit(tiers, level)
    unarchived = tiers.unarchived
    if unarchived.bytes >= unarchived.limit:
        await unarchived.make_room(keys.ref.text)
    op = _begin(tiers, keys, draft)
    trailing_call = last.release_call(op) if last else None
    try:
        answer = await tiers.warm.commit(keys, draft, op, trailing_call)
        if isinstance(answer, Committed) and unarchived.add(keys, op, answer):
            done = answer
        else:
            done = await _supply_and_resend(tiers, keys, draft, op, answer, trailing_call)
        if last:
            last.release_answered(done.trailing)
    except BaseException as error:
        invalidate_cached(tiers, keys, error)
        raise
    finally:
        tiers.warm.ops.end(op)
    _update_cached(tiers, keys, draft, op, done)
    if level is not MEMORY:
        await ensure_durability(tiers, keys, done, op, level)
    return done


async def check(tiers: Tiers, keys: RecordKeys, draft: Draft) -> None:
    """Ask whether a change would be applied now, or raise the server's refusal; nothing is changed."""
    draft = draft._replace(kind="")
    op = tiers.warm.ops.begin(draft.operations, keys.text)
    try:
        op.lock_value = tiers.leases.lock_value(keys.ref.text)
        op.creation = draft.creation
        answer = await tiers.warm.commit(keys, draft, op)
        await _supply_and_resend(tiers, keys, draft, op, answer)
    finally:
        tiers.warm.ops.end(op)


def commit_and_sweep(tiers: Tiers, keys: RecordKeys, draft: Draft) -> Coroutine[Any, Any, Committed]:
    """Apply one change as `commit` does; it also deletes fields that hot knows to be expired, unless they changed."""
    entry = tiers.hot.entries.get(keys.ref.text)
    if entry is None or entry.expires == NEVER:
        return commit(tiers, keys, draft)
    return _sweep(tiers, keys, draft, entry)


async def _sweep(tiers: Tiers, keys: RecordKeys, draft: Draft, entry: CachedRecord) -> Committed:
    await tiers.clock.know()
    now = tiers.clock.now()
    # Fields with a precondition are left out: the server decides whether they have expired.
    touched = {name for _, name, _ in draft.operations} | {name for name, _ in draft.preconditions}
    over = (each for each in entry.fields.items() if field_ttl.over(each[1], now) and each[0] not in touched)
    gone = dict(islice(over, _SWEPT))
    begins = draft.deleted not in ("refuse", "expired")
    if not gone or begins or any(operation == b"c" for operation, _, _ in draft.operations):
        return await commit(tiers, keys, draft)
    operations = (*draft.operations, *((b"d", name, b"") for name in gone))
    try:
        return await commit(
            tiers, keys, draft._replace(operations=operations, expectations=(*draft.expectations, *gone.items()))
        )  # fmt: skip
    except Conflict:
        return await commit(tiers, keys, draft)


def _begin(tiers: Tiers, keys: RecordKeys, draft: Draft) -> OpId:
    """Give the write an op id, and the arguments that are not in its draft. The caller must end the op id."""
    text = keys.ref.text
    creation = draft.creation
    if not creation and tiers.known_ids.get(text) != "":
        entry = tiers.hot.entries.get(text)
        if entry is None or not entry.version:
            creation = "+"  # the server creates the record if it does not know the id either
    lock_value = tiers.leases.lock_value(text)
    listening = tiers.link.subscribed_as(keys.channel)
    op = tiers.warm.ops.begin(draft.operations, keys.text)
    op.lock_value = lock_value
    op.creation = creation
    op.listening = listening
    return op


async def commit_many(tiers: Tiers, writes: Sequence[tuple[RecordKeys, Draft]]) -> list[Committed | StateError]:
    """Apply one change each to several records, in one round trip. A refused change is returned as its error."""
    if len({keys.text for keys, _ in writes}) < len(writes):
        # Pipelined changes might run in another order if the server does not know the script yet.
        raise InvalidValue("a record occurs twice in a batch, which changes each record once")
    levels = [draft.level or tiers.confirming.level for _, draft in writes]
    for level in levels:
        await admit(tiers, level)
    unarchived = tiers.unarchived
    if unarchived.bytes >= unarchived.limit:
        await unarchived.make_room(f"a batch of {len(writes)}")
    sent: list[Sent] = []
    try:
        for keys, draft in writes:
            sent.append((keys, draft, _begin(tiers, keys, draft)))
        answers = await tiers.warm.commit_many(sent)
        results = [await _finish_one(tiers, each, answer) for each, answer in zip(sent, answers, strict=True)]
        applied = {
            at: Applied(keys, done, op, level)
            for at, ((keys, _, op), done, level) in enumerate(zip(sent, results, levels, strict=True))
            if isinstance(done, Committed)
        }
        for at, missed in zip(applied, await ensure_many(tiers, list(applied.values())), strict=True):
            results[at] = missed or results[at]
    except BaseException as error:
        for keys, _, _ in sent:
            invalidate_cached(tiers, keys, error)
        raise
    finally:
        for _, _, op in sent:
            tiers.warm.ops.end(op)
    return results


async def _finish_one(tiers: Tiers, sent: Sent, answer: Answer | StateError) -> Committed | StateError:
    """Finish one write of a batch as `commit` does; its error is returned, because the other writes continue."""
    keys, draft, op = sent
    try:
        if isinstance(answer, StateError):
            raise answer
        done = await _supply_and_resend(tiers, keys, draft, op, answer)
        _update_cached(tiers, keys, draft, op, done)
    except StateError as error:
        invalidate_cached(tiers, keys, error)
        return error
    return done


async def _supply_and_resend(
    tiers: Tiers,
    keys: RecordKeys,
    draft: Draft,
    op: OpId,
    answer: Answer,
    trailing_call: Call | None = None,
) -> Committed:
    """Supply the data that the server needs, and send the change again under the same op id.

    Returns the commit, which is by then kept among the unarchived commits. A check (kind "") is not kept.
    """
    for _ in range(ROUNDS):
        if isinstance(answer, Committed):
            if not draft.kind or tiers.unarchived.add(keys, op, answer):
                return answer
            # This answer repeats a lost one and lacks the time, so the journal's entry is kept instead. If the entry is
            # not found, a stalled primary had answered and was then replaced by one without the commit: the write is
            # sent again there.
            if await tiers.unarchived.add_from_journal(keys, op, answer):
                return answer
            await tiers.port.sleep(_REPLACED)
        elif isinstance(answer, Swap):
            await tiers.clock.know()
            draft = _with_swaps(keys, draft, answer, tiers.clock.now())
        elif isinstance(answer, Cold) and not answer.token:
            done = await applied(tiers, keys, op, answer.epoch)
            if done is not None:
                return done
            raise Backpressure(f"{keys.ref.text[:200]}: {FULL}")
        elif isinstance(answer, Cold):
            entry = await from_sql(keys, op, hydrate(tiers, keys, answer, op))
            op.creation = answer.token if entry is not None and entry.version == 0 else ""
        elif isinstance(answer, Uninitialised):
            await tiers.start(keys.partition)
        elif isinstance(answer, HasHandler):
            draft = _with_handler(tiers, keys, draft, answer.handler)
        elif isinstance(answer, UnknownItems):
            op.sql_versions = await sql_versions(tiers, keys, draft, answer)
        elif isinstance(answer, Unsure):
            done = await resolve(tiers, keys, op, answer)
            if done is not None:
                return done
        op.listening = tiers.link.subscribed_as(keys.channel)
        answer = await tiers.warm.commit(keys, draft, op, trailing_call)
    raise WarmUnavailable(f"{keys.ref.text[:200]}: comes and goes faster than it can be changed")


def _with_handler(tiers: Tiers, keys: RecordKeys, draft: Draft, handler: str) -> Draft:
    """The change with the session's handler. Raises Conflict if the caller named another one."""
    if draft.handler and any(kind == b"D" and mode == b"h" for kind, _, mode in draft.operations):
        raise Conflict(f"{keys.ref.text[:200]}: its handler is {handler!r}, not {draft.handler!r}")
    tiers.handlers.add(keys.ref.text, handler)
    return draft.scheduled(handler)


def _with_swaps(keys: RecordKeys, draft: Draft, swap: Swap, now: float) -> Draft:
    """Compute increments of numbers with a deadline here, and send swaps instead. Raises Conflict for other values.

    A number keeps its deadline; an expired one counts as absent.
    """
    operations = list(draft.operations)
    places = {name: at for at, (kind, name, _) in enumerate(operations) if kind == b"i"}
    for name, raw in swap.fields:
        deadline, number = field_ttl.split(raw)
        if deadline <= now:
            deadline = NEVER
            number = b"0"
        elif deadline == NEVER or not re.fullmatch(rb"-?\d{1,15}", number):
            held = f"field {codec.decode_key(name)!r:.80} does not hold an integer of at most 15 digits"
            raise Conflict(f"{keys.ref.text[:200]}: {held}, so that a write cannot add to it; increment() can")
        by = operations[places[name]][2]
        operations[places[name]] = (b"s", name, field_ttl.wrap(b"%d" % (int(number) + int(by)), deadline))
    # The last expectation is that of the schema.
    return draft._replace(operations=tuple(operations), expectations=(*swap.fields, *draft.expectations))


def invalidate_cached(tiers: Tiers, keys: RecordKeys, error: BaseException) -> None:
    """Drop the hot copy if the error leaves open whether the write was applied: the copy may be stale."""
    if not isinstance(error, StateError) or isinstance(error, Unavailable | DurabilityUnknown):
        tiers.hot.forget(keys.ref.text)


def _update_cached(tiers: Tiers, keys: RecordKeys, draft: Draft, op: OpId, done: Committed) -> None:
    """Merge the commit into the hot copy, or drop the copy if the answer does not contain all changes."""
    tiers.see(keys.partition, done.epoch)
    text = keys.ref.text
    tiers.known_ids.add(text)
    operations = None
    if text in tiers.hot.entries and not (op.events and _may_change_lifetime(op, done)):
        operations = done.applied()
        if operations is not None and (draft.items or draft.deleted == "expired"):
            # Without its text, the answer does not show which operations commit.lua added.
            operations = operations + done.first_items + done.begun_again if done.text else None
    tiers.hot.apply(text, done.epoch, done.version, operations)


def _may_change_lifetime(op: OpId, done: Committed) -> bool:
    """Whether the commit may have changed the record's lifetime, whose end only the server computes."""
    kinds = (b"x", b"X") if done.begins or not done.text else (b"x",)
    return any(operation in kinds and name + value != b"00" for operation, name, value in op.events)


async def sums(tiers: Tiers, keys: RecordKeys, done: Committed, names: Iterable[str]) -> dict[str, int]:
    """The sums of a commit's increments; read from SQL if the answer lacks them because only SQL had the commit."""
    if done.results is not None:
        results = iter(done.results)
        # Operations on items are left out: their names may equal those of fields. Results of fields come first.
        operations = [each for each in done.operations if each[0] in (b"i", b"s")]
        fields = {name: b"%d" % next(results) if operation == b"i" else value for operation, name, value in operations}
    else:
        await reach(tiers, keys)
        before = done.version + 1
        after = done.version - 1
        rows = await tiers.port.sql(partial(tiers.cold.history, keys.ref.text, after=after, before=before))
        fields = {name: value for kind, name, value in unpack(rows[0].data) if kind == b"s"}
    return {each: int(field_ttl.split(fields[codec.encode_key(each)])[1]) for each in names}


async def swap(
    tiers: Tiers,
    keys: RecordKeys,
    name: bytes,
    change: Callable[[bytes | None], T],
    draft: Callable[[T, Expectations], Draft],
) -> tuple[T, Committed]:
    """Replace a field by `change(stored bytes)`, atomically: one round trip if hot has the current value."""
    entry = await read(tiers, keys)
    raw = None if entry.deleted else entry.raw(name)

    async def once() -> tuple[T, Committed]:
        nonlocal raw
        data = change(raw)
        try:
            return data, await commit(tiers, keys, draft(data, [(name, raw)]))
        except Conflict as conflict:
            if conflict.found:
                raw = conflict.found[0]
            raise

    return await until_no_conflict(tiers, once)


async def until_no_conflict(tiers: Tiers, once: Callable[[], Awaitable[T]]) -> T:
    """Retry while other writers are faster, up to `conflict_retries` times."""
    return await retrying.until_no_conflict(once, tiers.settings.conflict_retries, tiers.port.sleep)


async def resolve(tiers: Tiers, keys: RecordKeys, op: OpId, unsure: Unsure) -> Committed | None:
    """Ask SQL whether a write was applied whose op id Redis may have dropped. None: the write may be sent again."""
    if op.doubted and unsure.late:
        raise DurabilityUnknown(f"{keys.ref.text[:200]}: {LOST} too long ago")
    done = await applied(tiers, keys, op, unsure.epoch)
    if done is None:
        if unsure.late:
            await tiers.clock.ask()  # the answer came at once, so the estimate of the server's time is wrong
        op.since_ms = unsure.time_ms
    return done


async def applied(tiers: Tiers, keys: RecordKeys, op: OpId, epoch: str) -> Committed | None:
    """Find in SQL the commit of a write whose reply was lost; None if it was not applied."""
    if not op.doubted:
        return None
    event = tiers.warm.ops.event(op)
    version = await from_sql(keys, op, tiers.port.sql(tiers.cold.applied, keys.ref.text, event, op.since_ms))
    return Committed(version, epoch, None, None, 0) if version else None


async def from_sql(keys: RecordKeys, op: OpId, asking: Awaitable[T]) -> T:
    """Await an answer of SQL. If it fails and the write's reply was lost, raises DurabilityUnknown."""
    try:
        return await asking
    except (ColdUnavailable, NotFound) as error:
        if not op.doubted:
            raise
        raise DurabilityUnknown(f"{keys.ref.text[:200]}: {LOST}, and only SQL knows: {error}") from error
