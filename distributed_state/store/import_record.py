"""Brings an exported record back: a file that was checked whole becomes a record, in one transaction, or nothing does.

Law: what the file names beyond its own record is not looked at. Messages become the record's own, and what a turn
wanted of its user is left out. So no record, and no other one's messages, can be read through it.

Design: section 11.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from distributed_state.errors import Conflict, CorruptState, InvalidValue, WarmUnavailable
from distributed_state.store.import_checks import WRONG, check_message, check_text, is_encrypted
from distributed_state.store.import_file import ImportedFile
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import codec, field_ttl, message_ranges
from distributed_state.values.codec import Codec
from distributed_state.values.journal import Op, pack, unpack
from distributed_state.values.model import ITEMS, LIFETIME, REQUEST, SEGMENTS, is_value


class Reencoded:
    """The contents of a file as the record to be stores them. Raises DecryptionFailed if a key for that is missing."""

    def __init__(self, given: ImportedFile, target: Codec) -> None:
        assert given.origin is not None
        self._target = target
        self._source = target.of(given.origin.text, given.namespace)
        self._writers: dict[int, str] = {}  # by which record a message was written, if it was another one
        # In this order: runs of messages say who wrote those that are met later.
        self.base = given.base
        if given.base is not None:
            # Without its lifetime: a copy that was kept for long would end at once.
            kept = {name: value for name, value in given.base.fields.items() if name != LIFETIME}
            if ITEMS in kept:
                kept[ITEMS] = b"%d" % given.base.version  # all that it showed then comes with it
            self.base = replace(given.base, fields={name: self._field(name, value) for name, value in kept.items()})
        self.entries = [
            replace(entry, record=given.ref.text, data=pack(self._ops(entry.data))) for entry in given.entries
        ]
        source = self._source.record
        self.items = [each._replace(data=self._item(each.name, each.data, each.origin)) for each in given.items]
        self.shared = [(n, self._message(data, self._writers.get(n, source))) for n, data in given.shared]

    def _ops(self, data: bytes) -> Iterator[Op]:
        for op in unpack(data):
            if op.name == LIFETIME:
                continue
            if op.kind == b"m":
                yield op._replace(value=self._message(op.value, self._source.record))
            elif op.kind == b"p":
                yield op._replace(value=self._item(op.name, op.value, self._source.record))
            elif op.kind == b"s":
                yield op._replace(value=self._field(op.name, op.value))
            else:
                yield op

    def _field(self, name: bytes, value: bytes) -> bytes:
        if name == SEGMENTS:
            for run in message_ranges.parse(value):
                self._writers.update(dict.fromkeys(range(run.start, run.stop), run.source))
            # All that is shown is in the file, and kept with this record: nobody else's is looked at.
            return message_ranges.taken_over(value, self._target.record)
        if not is_value(name):
            return value
        key = codec.decode_key(name)
        data = self._source.carry(value, key, self._target)
        hidden = is_encrypted(value)
        if not hidden and name[:2] != REQUEST:
            return data
        text = self._target.open(data, key)
        if hidden:
            check_text(name, text)
        kept = codec.decode(text, key) if name[:2] == REQUEST else [None]
        if len(kept) == 4 and kept[3]:
            # What the turn did beside, in its user's record, it did there and then.
            return field_ttl.wrap(self._target.encode([*kept[:3], None], key), field_ttl.split(data)[0])
        return data

    def _item(self, name: bytes, data: bytes, writer: str) -> bytes:
        key = codec.item_name(name)
        carried = self._source.of(writer).carry(data, key, self._target) if data else data
        if is_encrypted(data):
            codec.decode_value(self._target.open(carried, key), key)
        return carried

    def _message(self, data: bytes, writer: str) -> bytes:
        carried = self._source.of(writer).carry(data, codec.MESSAGE, self._target)
        if is_encrypted(data):
            check_message(self._target.open(carried, codec.MESSAGE))
        return carried


async def import_(tiers: Tiers, given: ImportedFile) -> str:
    """Insert an exported record into SQL in one transaction; the next access brings it to Redis."""
    try:
        taken = Reencoded(given, tiers.codec_of(given.ref.text))
    except CorruptState:
        raise
    except WRONG as error:
        raise InvalidValue(f"{given.ref.text[:200]}: an encrypted value is none that was written ({error})") from error
    ref = given.ref
    names = tiers.keys.of(ref)
    # Alone: nobody may create the record between the look and the transaction.
    async with tiers.lock(names, wait=10.0, ttl=30.0) as lease:
        entry = await read_path.read(tiers, names, fresh=True)
        if entry.version:
            raise Conflict(f"{ref.text[:200]}: exists already, at version {entry.version}", version=entry.version)
        if lease.lost:
            raise WarmUnavailable(f"{ref.text[:200]}: the lock was lost before the import began; nothing was changed")

        def adopt() -> None:
            tiers.cold.adopt(
                ref.text, partition=names.partition, epoch=entry.epoch, base=taken.base,
                base_messages=taken.shared, entries=taken.entries,
                items=taken.items,
            )  # fmt: skip

        if not await tiers.warm.partitions.reserve(names, entry.epoch):
            raise WarmUnavailable(f"{ref.text[:200]}: its partition began anew meanwhile; nothing was changed")
        await tiers.port.sql(adopt)
        # Whoever looked into SQL before, or keeps hot that there is nothing, must look again.
        notice = f"{entry.epoch} {given.version} {tiers.replica} -".encode()
        await tiers.warm.commands([(b"DEL", names.hydration), (b"SPUBLISH", names.channel, notice)])
        tiers.hot.forget(ref.text)
    return ref.id
