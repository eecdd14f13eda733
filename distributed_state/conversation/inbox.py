"""The inbox of a session: inputs that wait for a turn. Law: each is served by exactly one committed turn.

An input is a message that is posted while somebody else may hold the lease, so its commit passes an exclusive lock. It
is a reserved field of the record: it survives what a commit survives, and `rollback`, `restore_state` and `clear` leave
it alone. The commit of a turn removes the inputs that the turn took. A turn that ends without a commit removes none.

A request id is not accepted twice while its input waits, or is among the last `remembered_requests`.

Design: section 30.
"""

from __future__ import annotations

from collections.abc import Iterable
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
from distributed_state.values.model import INBOX, Message, is_input
from distributed_state.warm.answers import Posted

_TAG = INBOX + b"q"


def waiting(entry: CachedRecord) -> list[Input]:
    """The inputs that wait, in the order in which they were accepted. Raises CorruptState or DecryptionFailed."""
    numbers = sorted(int(name[2:]) for name in entry.fields if is_input(name))
    return [] if entry.deleted else [_input(entry, number) for number in numbers]


def tag_of(input: Input) -> str:
    """The tag of an input's request, or an empty one."""
    name = request_log.name_of(input.request_id)
    return "" if name is None else request_log.tag_of(name)


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
    if not isinstance(kept, list) or len(kept) != 2:
        raise CorruptState(f"input {number}: {len(text)} stored bytes are not an input", field="input", data=text)
    message, request_id = kept
    return Input(number, codec.as_message(message), request_id, (field_ttl.noted(data) or 0) / 1000)


async def post(
    context: RecordContext, message: Message | dict[str, Any], request_id: str | None, durability: str | None
) -> int:
    """Store an input, and return its number: see `session.post`."""
    name = request_log.name_of(request_id)
    changes = context.changes()
    changes.post(message, request_id, b"" if name is None else request_log.tag_of(name).encode())
    draft = context.sign(changes.draft("post", durability=durability))
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


async def withdraw(context: RecordContext, number: int) -> bool:
    """Take an input out of the inbox unserved; False if it is not there."""
    if type(number) is not int or number < 1:
        raise InvalidValue(f"an input's number is an int from 1 on, not {number!r:.80}")
    context.allow("write", MESSAGES)
    changes = context.changes()
    entry = await read_path.read(context.tiers, context.keys)
    changes.take({number: b""}, _forgotten(entry, context.store.settings.remembered_requests))
    try:
        await write_path.commit(context.tiers, context.keys, context.sign(changes.draft("post")))
    except Posted:
        return False
    return True


async def read(context: RecordContext) -> list[Input]:
    """The inputs that wait now; one round trip."""
    return waiting(await context.read(fresh=True, field=MESSAGES))


def take(changes: Changes, entry: CachedRecord, taken: Iterable[Input], most: int) -> None:
    """Let this change take inputs out of the inbox, and forget old requests so that `most` are remembered."""
    changes.take({each.number: tag_of(each).encode() for each in taken}, _forgotten(entry, most))


def _forgotten(entry: CachedRecord, most: int) -> dict[int, bytes]:
    """The requests to forget so that the newest `most` are remembered, and those of inputs that wait."""
    requests = {int(kept.split()[0]): name[len(_TAG) :] for name, kept in entry.fields.items() if name[:3] == _TAG}
    older = sorted(requests)[: max(0, len(requests) - most)]
    return {number: requests[number] for number in older if INBOX + b"%d" % number not in entry.fields}
