"""The inbox of a session: inputs that wait for a turn. Law: each is served by exactly one committed turn.

An input is a message that is posted while somebody else may hold the lease, so its commit passes an exclusive lock. It
is a reserved field of the record: it survives what a commit survives, and `rollback`, `restore_state` and `clear` leave
it alone. The commit of a turn removes the inputs that the turn took. A turn that ends without a commit removes none.

A request id is not accepted twice while its input waits, or is among the last `remembered_requests`.

Design: section 30.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distributed_state.conversation import request_log
from distributed_state.errors import CorruptState, InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records import history
from distributed_state.records.access import MESSAGES
from distributed_state.records.context import RecordContext
from distributed_state.results import Input
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.changes import Changes
from distributed_state.tiers.durability import ensure_version
from distributed_state.values import codec, field_ttl
from distributed_state.values.codec import MESSAGE
from distributed_state.values.model import FAILURE, INBOX, SCHEDULE, Message, is_input
from distributed_state.values.schedule import Failure, Schedule, checked_handler
from distributed_state.warm.answers import Draft, Posted

_TAG = INBOX + b"q"
AHEAD = 0.25  # seconds by which a replica's estimate of the server's clock may be late
_NAME_BYTES = 200
_SHORTEST = 1.0  # seconds between two repetitions of a wake
_LONGEST = 1e11


def waiting(entry: CachedRecord, now: float) -> list[Input]:
    """The inputs that wait and are due, in the order in which they were accepted.

    Raises CorruptState or DecryptionFailed.
    """
    later = {number for number, due in _wakes(entry).items() if due > (now + AHEAD) * 1000}
    numbers = sorted(int(name[2:]) for name in entry.fields if is_input(name))
    return [] if entry.deleted else [_input(entry, number) for number in numbers if number not in later]


def wakes(entry: CachedRecord) -> list[Input]:
    """The wakes of a session, the next one first. Raises CorruptState or DecryptionFailed."""
    found = sorted(_wakes(entry).items(), key=lambda each: each[1])
    return [] if entry.deleted else [_input(entry, number) for number, _ in found]


def _wakes(entry: CachedRecord) -> dict[int, int]:
    """When each wake is due, in ms, by the number of its input."""
    pairs = (each.split(b":") for each in entry.fields.get(INBOX, b"").split(b" ")[3:])
    return {int(number): int(due) for number, due in pairs if INBOX + number in entry.fields}


def tag_of(input: Input) -> str:
    """The tag of an input's request, or of a wake's name; or an empty one."""
    if input.wake is not None:
        return _tag_of_wake(input.wake)
    name = request_log.name_of(input.request_id)
    return "" if name is None else request_log.tag_of(name)


def _tag_of_wake(name: str) -> str:
    if not isinstance(name, str) or len(name.encode("utf-8", "surrogatepass")) > _NAME_BYTES:
        raise InvalidValue(f"a wake's name is a str of at most {_NAME_BYTES} bytes, not {name!r:.80}")
    return request_log.tag_of(request_log.slot_of(f"wake {name}"))


def fate_of(entry: CachedRecord, tag: str) -> int | None:
    """The version that served the input of this request; 0: it waits, -1: it was withdrawn, None: it is not known."""
    stored = entry.fields.get(_TAG + tag.encode())
    if stored is None:
        return None
    number, _, version = stored.partition(b" ")
    return int(version) if version else 0 if INBOX + number in entry.fields else -1


def _input(entry: CachedRecord, number: int) -> Input:
    data = entry.fields[INBOX + b"%d" % number]
    text = entry.codec.open(data, MESSAGE)
    kept = codec.decode(text, "input")
    if not isinstance(kept, list) or len(kept) not in (2, 4):
        raise CorruptState(f"input {number}: {len(text)} stored bytes are not an input", field="input", data=text)
    message, request_id, *wake = kept
    return Input(number, codec.as_message(message), request_id, (field_ttl.noted(data) or 0) / 1000, *wake)


async def post(
    context: RecordContext,
    message: Message | dict[str, Any],
    request_id: str | None,
    handler: str | None,
    durability: str | None,
) -> int:
    """Store an input, and return its number: see `session.post`."""
    draft = _posting(context, message, request_id, handler, durability)
    try:
        done = await write_path.commit(context.tiers, context.keys, draft)
    except Posted as known:
        with context.durable(durability):
            entry = await read_path.read(context.tiers, context.keys, fresh=True)
            await ensure_version(context.tiers, context.keys, entry.epoch, entry.version)
        return known.number
    if done.results is not None:
        return done.results[0] - 1
    # The answer was lost, and only SQL had the commit. Its state has the number of the next input.
    state = await history.state_at(context.tiers, context.keys, done.version)
    return int(state.fields[INBOX].split()[0]) - 1


async def post_first(
    context: RecordContext, message: Message | dict[str, Any], request_id: str, durability: str | None
) -> bool:
    """Store an input, unless one of this request was accepted before; return whether it was stored."""
    draft = _posting(context, message, request_id, None, durability)
    try:
        await write_path.commit(context.tiers, context.keys, draft)
    except Posted:
        return False
    return True


def _posting(
    context: RecordContext,
    message: Message | dict[str, Any],
    request_id: str | None,
    handler: str | None,
    durability: str | None,
) -> Draft:
    """The change that stores an input."""
    name = request_log.name_of(request_id)
    changes = context.changes()
    changes.post(message, request_id, b"" if name is None else request_log.tag_of(name).encode())
    return context.sign(_scheduled(context, changes.draft("post", durability=durability), handler))


def _scheduled(context: RecordContext, draft: Draft, handler: str | None) -> Draft:
    """The change with the session's handler: the given one, or the one that this replica knows."""
    if handler is not None:
        return draft.scheduled(checked_handler(handler), b"h")
    known = context.tiers.handlers.get(context.text)
    return draft if known is None else draft.scheduled(known)


@dataclass(frozen=True, slots=True)
class Later:
    """When a wake is due: at a time, or after some seconds, and whether it repeats; see `session.wake`."""

    text: str
    after: float | None
    at: float | None
    every: float | None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidValue(f"a wake's text is a str, not {self.text!r:.80}")
        for name in ("after", "at", "every"):
            value = getattr(self, name)
            least = _SHORTEST if name == "every" else 0.0
            if value is not None and (type(value) not in (int, float) or not least <= value <= _LONGEST):
                raise InvalidValue(f"{name} is a number of seconds from {least:g} on, not {value!r:.80}")
        if (self.after is None) + (self.at is None) + (self.every is None) not in (1, 2) or None not in (
            self.after, self.at,
        ):  # fmt: skip
            raise InvalidValue("give a wake after= or at=, every=, or every= with one of them")

    def add(self, changes: Changes, name: str, *, again: bool = False) -> None:
        """Let this change set the wake of this name. `again`: only if this change takes it."""
        if self.at is not None:
            when = b"%b%d" % (b"~" if again else b"@", max(1, round(self.at * 1000)))
        else:
            seconds = self.every if self.after is None else self.after
            assert seconds is not None
            when = b"+%d" % round(seconds * 1000)
        changes.wake(_tag_of_wake(name).encode(), when, self.text, name, self.every)


async def wake(context: RecordContext, later: Later, name: str, handler: str | None, durability: str | None) -> None:
    """Set a wake: see `session.wake`."""
    changes = context.changes()
    later.add(changes, name)
    draft = context.sign(_scheduled(context, changes.draft("wake", durability=durability), handler))
    await write_path.commit(context.tiers, context.keys, draft)


async def cancel_wake(context: RecordContext, name: str) -> bool:
    """Remove a wake: see `session.cancel_wake`."""
    tag = _tag_of_wake(name)
    before = None
    while True:
        entry = await context.read(fresh=True, field=MESSAGES)
        number = entry.fields.get(_TAG + tag.encode())
        if number is None or not number.isdigit() or number == before:
            return False
        if await withdraw(context, int(number), tag):
            return True
        before = number  # a turn may have set it again meanwhile, under another number


async def forget_failures(context: RecordContext, handler: str) -> None:
    """Let a worker call the session's handler again now."""
    changes = context.changes()
    changes.reserved(FAILURE, None)
    draft = changes.draft("schedule").scheduled(handler, b"r")
    await write_path.commit(context.tiers, context.keys, context.sign(draft))


def schedule_of(entry: CachedRecord) -> Schedule | None:
    """When the session is served, None if it has no handler."""
    stored = entry.fields.get(SCHEDULE)
    return None if stored is None or entry.deleted else Schedule.read(stored)


def failure_of(entry: CachedRecord) -> Failure | None:
    """How the last turn of its handler failed, None if it did not."""
    stored = entry.fields.get(FAILURE)
    return None if stored is None or entry.deleted else Failure.read(stored)


async def withdraw(context: RecordContext, number: int, tag: str = "") -> bool:
    """Take an input out of the inbox unserved; False if it is not there."""
    if type(number) is not int or number < 1:
        raise InvalidValue(f"an input's number is an int from 1 on, not {number!r:.80}")
    context.allow("write", MESSAGES)
    changes = context.changes()
    entry = await read_path.read(context.tiers, context.keys)
    forgotten = _forgotten(entry, context.store.settings.remembered_requests)
    changes.take({number: b""}, forgotten | ({number: tag.encode()} if tag else {}))
    try:
        draft = _scheduled(context, changes.draft("post"), None)
        await write_path.commit(context.tiers, context.keys, context.sign(draft))
    except Posted:
        return False
    return True


async def read(context: RecordContext) -> list[Input]:
    """The inputs that wait now; one round trip."""
    entry = await context.read(fresh=True, field=MESSAGES)
    await context.tiers.clock.know()
    return waiting(entry, context.tiers.clock.now())


async def read_wakes(context: RecordContext) -> list[Input]:
    """The wakes of the session; one round trip."""
    return wakes(await context.read(fresh=True, field=MESSAGES))


def take(
    changes: Changes, entry: CachedRecord, taken: Iterable[Input], later: Mapping[str, Later], most: int, now: float
) -> None:
    """Let this change take inputs out of the inbox, and forget old requests so that `most` are remembered.

    A wake that repeats is set again, unless the change sets it: `later`, by name.
    """
    taken = list(taken)
    if taken:
        changes.take({each.number: tag_of(each).encode() for each in taken}, _forgotten(entry, most))
    again: dict[str, Later] = {}
    for each in taken:
        if each.wake is not None and each.every is not None:
            due = each.time + each.every * max(1, math.ceil((now - each.time) / each.every))
            again[each.wake] = Later(_text_of(each), None, due, each.every)
    for name, wake in again.items():
        if name not in later:
            wake.add(changes, name, again=True)
    for name, wake in later.items():
        wake.add(changes, name)


def _text_of(input: Input) -> str:
    return input.message.content if isinstance(input.message.content, str) else ""


def _forgotten(entry: CachedRecord, most: int) -> dict[int, bytes]:
    """The requests to forget so that the newest `most` are remembered, and those of inputs that wait."""
    requests = {int(kept.split()[0]): name[len(_TAG) :] for name, kept in entry.fields.items() if name[:3] == _TAG}
    older = sorted(requests)[: max(0, len(requests) - most)]
    return {number: requests[number] for number in older if INBOX + b"%d" % number not in entry.fields}
