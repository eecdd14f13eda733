"""A record's branches: acknowledged commits outside its history. Law: a branch is read or dropped, never changed.

Design: section 14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distributed_state.cold.values import Branched, BranchState
from distributed_state.errors import InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records.context import RecordContext
from distributed_state.results import Branch
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import field_ttl, message_ranges
from distributed_state.values.codec import MESSAGE, Codec
from distributed_state.values.journal import JournalEntry, Operation, Segment, unpack
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import ITEMS, NEXT, Ref, unescape


async def branches(context: RecordContext) -> list[Branch]:
    """The branches of a record, the oldest epoch first."""
    context.allow("read", None)
    return [shown(each) for each in await context.tiers.port.sql(context.tiers.cold.branches.of, context.text)]


async def drop(context: RecordContext, branch: str) -> int:
    """Remove a branch; returns how many commits it had."""
    context.allow("admin", None)
    return await context.tiers.port.sql(context.tiers.cold.branches.drop, context.text, checked(branch))


async def page(tiers: Tiers, after: str, limit: int) -> list[Branch]:
    """A page of branches: those of the next records that have any."""
    return [shown(each) for each in await tiers.port.sql(tiers.cold.branches.page, after, limit)]


def checked(branch: str) -> str:
    """The id of a branch. Raises InvalidValue if it cannot be one."""
    if not isinstance(branch, str) or not branch.isascii() or not branch.isprintable() or not 0 < len(branch) <= 100:
        raise InvalidValue(f"a branch is named by its id, as branches() shows it, not {branch!r:.80}")
    return branch


def shown(found: Branched) -> Branch:
    """A branch in its public form."""
    ref = Ref.parse(found.record)
    return Branch(
        id=found.id,
        scope=ref.scope,
        record_id=ref.id,
        epoch=found.epoch,
        base=found.base,
        version=found.versions[-1],
        commits=len(found.versions),
        missing=found.missing,
        first_time=found.first_ms / 1000,
        last_time=found.last_ms / 1000,
        kept=found.kept_ms / 1000,
        cause=found.cause,
        actors=tuple(map(unescape, found.actors)),
        cursor=found.record,
    )


async def entries(tiers: Tiers, keys: RecordKeys, branch: str) -> list[JournalEntry]:
    """The commits of a branch, by version."""
    return await tiers.port.sql(tiers.cold.branches.entries, keys.ref.text, checked(branch))


async def items_of(tiers: Tiers, keys: RecordKeys, branch: str, found: BranchState) -> tuple[int, dict[bytes, bytes]]:
    """The items of a state on a branch: the version of the record whose items it inherits (0: none), and its own items.

    The own items are by collection, NUL and key; a deleted item has an empty frame.
    """
    shown: tuple[int, dict[bytes, bytes]] = (found.base, {})
    past = {found.base: shown}
    for entry in await entries(tiers, keys, branch):
        if entry.version > found.state.version:
            break
        for kind, name, value in unpack(entry.data):
            if name == ITEMS and (below := value.partition(b" ")[2]):
                # The state was rolled back to an earlier version, on the branch or before it.
                shown = past.get(int(below), (int(below), {}))
            elif kind in (b"p", b"q"):
                shown = (shown[0], {**shown[1], name: value})
        past[entry.version] = shown
    return shown


async def state_at(tiers: Tiers, keys: RecordKeys, branch: str, version: int | None) -> BranchState:
    """A state on a branch. Raises NotFound if the version does not exist, or too few commits are left for it."""
    if version is not None and (type(version) is not int or version < 1):
        raise InvalidValue(f"a version is an int from 1 on, not {version!r:.80}")
    return await tiers.port.sql(tiers.cold.branches.state_at, keys.ref.text, checked(branch), version)


@dataclass(frozen=True, slots=True)
class BranchMessages:
    """The messages that a state on a branch shows: `shared` are runs of the record, `own` are the branch's messages.

    `following` is the number after the last of them.
    """

    shared: list[Segment]
    own: list[int]
    stored: Mapping[int, bytes]
    following: int

    def runs(self, record: str) -> list[Segment]:
        """The runs of a record that has copies of the branch's own messages."""
        return [*self.shared, *(Segment(record, number, number + 1) for number in self.own)]

    def copied(self, form: Codec, to: Codec) -> list[Operation]:
        """Operations that append the branch's own messages to another record, with the same numbers and times."""
        operations = []
        for number in self.own:
            time, text = field_ttl.split(self.stored[number])
            data = form.carry(text, MESSAGE, to)
            if time != field_ttl.NEVER:
                data = field_ttl.dated(data, round(time * 1000))
            operations.append((b"m", b"%d" % number, data))
        return operations


def messages_of(record: str, found: BranchState) -> BranchMessages:
    """The messages of a state on a branch, and where they are stored."""
    runs = message_ranges.segments(record, found.state.fields)
    shared: list[Segment] = []
    own: list[int] = []
    for run in runs:
        cut = max(run.start, min(run.stop, found.first_message)) if run.source == record else run.stop
        shared.append(Segment(run.source, run.start, cut))
        own += range(cut, run.stop)
    following = own[-1] + 1 if own else int(found.state.fields.get(NEXT, b"0"))
    return BranchMessages([run for run in shared if run.start < run.stop], own, found.messages, following)


def entry(tiers: Tiers, keys: RecordKeys, found: BranchState) -> CachedRecord:
    """A state on a branch in the form of a read record, with the branch's own messages."""
    state = found.state
    # Numbers from `first_message` on belong to the branch: the record may have reused them for other messages.
    codec = tiers.codec_of(keys.ref.text)
    return CachedRecord(codec, state.epoch, state.version, state.fields, dict(found.messages))


def between(rows: Sequence[JournalEntry], after: int, before: int | None, limit: int | None) -> list[JournalEntry]:
    """The commits between two versions, both exclusive."""
    found = [row for row in rows if after < row.version and (before is None or row.version < before)]
    return found if limit is None else found[:limit]
