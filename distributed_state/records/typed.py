"""Records that keep to a schema. Law: the server checks every commit of theirs against the record's schema version.

So a worker of an older version cannot half overwrite what a newer one wrote, even if its hot copy is older still.
Where a schema writes an older version than its own, a change is first made on the fields as a whole, then brought down
to that version, and holds for the version of the record that it was made on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Unpack

from distributed_state.errors import Conflict, InvalidValue
from distributed_state.hot.cached_record import MISSING, CachedRecord
from distributed_state.records.access import VERSION
from distributed_state.records.home import StoreContext
from distributed_state.records.record import AsyncRecord
from distributed_state.records.sanitizing import Sanitizing
from distributed_state.records.schema import M, Schema, TypedChanges, View
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.changes import Changes, add
from distributed_state.values import codec, field_ttl
from distributed_state.values.codec import Codec
from distributed_state.values.model import SCHEMA, Ref
from distributed_state.warm.answers import Committed, Draft

_ROUNDS = 100
_UNWRITTEN = CachedRecord(Codec("", ""), "", 0, {}, {})


class AsyncTypedRecord(AsyncRecord, Generic[M]):
    """A record whose fields are those of a pydantic model.

    Example::

        class Trip(BaseModel):
            city: str
            nights: int = 1

        trip = store.task("t1", schema=Trip)
        await trip.create(Trip(city="Oslo"))
        async with trip.edit() as model:
            model.nights = 3
        assert (await trip.load()).nights == 3

    `load`, `edit` and `modify` speak in models. All other methods are those of a plain record: they give and take JSON
    values, upcast and checked against the model field by field. Stored data that the model refuses raises CorruptState,
    a record of a newer schema SchemaMismatch, when its fields are read and on every write. Messages are of no schema. A
    handle without schema may do everything.
    """

    def __init__(
        self,
        home: StoreContext,
        ref: Ref,
        *,
        schema: type[M] | Schema[M],
        user: str | None = None,
        actor: str = "",
        fresh: bool = False,
        lifetime: tuple[int, int] = (0, 0),
        **options: Unpack[Sanitizing],
    ) -> None:
        super().__init__(home, ref, user=user, actor=actor, fresh=fresh, lifetime=lifetime, **options)
        self._schema: Schema[M] = Schema.of(schema)

    # Reading

    def _peek(self, key: str) -> Any:
        return MISSING  # what is read here is checked first

    async def _entry(self, fresh: bool = False, field: str | None = None) -> CachedRecord:
        return self._schema.view(self._text, await super()._entry(fresh, field))

    def _value(self, entry: CachedRecord, key: str, default: Any) -> Any:
        if codec.encode_key(key) not in entry.fields:
            return default
        fields = entry.all()
        self._schema.check(self._text, entry, fields, (key,))
        return fields[key]

    def _fields(self, entry: CachedRecord) -> dict[str, Any]:
        view = self._schema.view(self._text, entry)
        fields = super()._fields(view)
        self._schema.check(self._text, view, fields, fields)
        return fields

    async def load(self, *, fresh: bool = False) -> M:
        """Read all fields as a validated model.

        Absent fields take the model's defaults; NotFound if nothing was written yet and a field has none. Raises
        CorruptState naming the field and what is stored instead, SchemaMismatch if the record is newer.
        """
        return self._read(await self._entry(fresh))

    def _read(self, entry: CachedRecord) -> M:
        """The model, if all of it may be read."""
        self._allow("read", *(codec.decode_key(name) for name in entry.fields if name[:1] != b"#"))
        return self._schema.read(self._text, entry)

    # Changing

    def _changes(self) -> TypedChanges:
        settings = self._home.settings
        record_codec = self._home.codec_of(self._text)
        return TypedChanges(settings, record_codec, self._schema, self._prepare, self._prepare_message, self._now)

    def _unchecked(self, fields: Mapping[str, Any], before: Mapping[str, Any]) -> Changes:
        """What differs between two sets of fields, which were checked as a whole."""
        changes = super()._changes()
        for key, value in fields.items():
            if key not in before or codec.encode(value, key) != codec.encode(before[key], key):
                changes.set(key, value)
        for key in before.keys() - fields.keys():
            changes.delete(key)
        return changes

    async def create(self, values: M | Mapping[str, Any] | None = None, *, is_clear: bool = False) -> int:
        """Start the record as this model, checked as a whole, and return its version. Raises Conflict if it exists.

        A deleted record starts again; its version goes on counting. `is_clear` as in other records.
        """
        fields = self._schema.settle({} if values is None else values)
        changes = self._unchecked(fields, {})
        return (await self._commit(self._creation(changes, is_clear))).version

    def edit(self) -> AsyncEdit[M]:
        """Open the model for changes: `async with session.edit() as trip: trip.days = 3`.

        It is validated as a whole when the block ends, and the fields that changed are one commit; InvalidValue, or
        Conflict if the record changed meanwhile, and nothing is written. `modify` repeats.
        """
        return AsyncEdit(self)

    async def modify(self, change: Callable[[M], M | None]) -> M:
        """Run `change(model)` and commit what changed, repeated until nobody was faster; return the model as committed.

        `change` alters the model or returns another one, as it must if the model is frozen. It may run several times.
        """

        async def once() -> M:
            edit = AsyncEdit(self)
            model = await edit.__aenter__()
            changed = change(model)
            if changed is not None and not isinstance(changed, self._schema.model):
                kind = type(changed).__name__
                raise InvalidValue(f"a change returns a {self._schema.model.__name__} or None, not a {kind}")
            return await edit.finish(model if changed is None else changed)

        return await write_path.until_no_conflict(self._home.tiers(), once)

    def _counts(self, key: str) -> bool:
        return super()._counts(key) and self._schema.countable(key)

    async def _swap(self, key: str, kind: str, empty: Any, change: Callable[[Any], Any]) -> tuple[bytes, Committed]:
        name = codec.encode_key(key)
        empty = self._schema.default(key, empty)
        fresh = False
        self._allow("write", key)

        async def once() -> tuple[bytes, Committed]:
            nonlocal fresh
            stored = await read_path.read(self._home.tiers(), self._names, fresh=fresh)
            fresh = True
            view = self._schema.view(self._text, stored)
            changes = self._changes()
            before = empty if view.deleted else view.value(key, empty)
            value = changes.set(key, change(before), until=view.deadline(name))
            draft = changes.draft(kind)
            if view is stored:
                draft.expectations.append((name, None if stored.deleted else stored.raw(name)))
            else:
                draft.expected = stored.version
            return self._home.codec_of(self._text).encode(value, key), await self._commit(draft)

        return await write_path.until_no_conflict(self._home.tiers(), once)

    # The guard

    async def _send(self, draft: Draft) -> Committed:
        known = self._known(draft)
        lowers = self._lowers(draft)
        for lost in range(_ROUNDS):
            if known is not None and self._behind(known) and draft.deleted != "revive":
                await self._upcast_for(draft)
                known = None
            if lowers and (known is None or draft.expected not in (None, known.version)):
                known = await self._seen_by(draft)
            attempt, sums = self._lowered(draft, known) if lowers and known is not None else (draft, None)
            attempt = self._guarded(attempt, known)
            try:
                done = await super()._send(attempt)
                return done if sums is None else done._replace(results=sums)
            except Conflict as conflict:
                if not self._ours(draft, attempt, conflict):
                    raise
                if conflict.version == 0:
                    known = _UNWRITTEN
                    draft.creation = attempt.creation
                    continue
            if lowers:  # plain writes that meet at one record give way to one another
                await self._home.tiers().port.sleep(random.uniform(0, min(0.1, 0.001 * 2 ** min(lost, 10))))
            known = await read_path.read(self._home.tiers(), self._names, fresh=True)
        raise Conflict(f"{self._text[:200]}: its schema version changes faster than it can be written")

    def _attempt(self, draft: Draft) -> Draft:
        known = self._known(draft)
        if self._lowers(draft):
            # Refused for certain: it has to be made on the whole record first, which `_send` then does.
            return replace(draft, expectations=[*draft.expectations, (SCHEMA, b"")])
        # Whatever is wrong with this record must not keep the batch from the others: the server says so later.
        return self._guarded(draft, known if known is not None and not known.version else None)

    async def _ready(self, entry: CachedRecord) -> CachedRecord:
        if self._behind(entry):
            await self._upcast()
            entry = await read_path.read(self._home.tiers(), self._names, fresh=True)
        return self._schema.view(self._text, entry)

    def _stamp(self, draft: Draft, entry: CachedRecord) -> Draft:
        entry = entry.stored if isinstance(entry, View) else entry
        if self._lowers(draft):
            draft = replace(self._lowered(draft, entry)[0], expected=draft.expected)
        # No expectation: the turn's lease keeps others out, and what its own task writes beside it is no conflict.
        if entry.fields.get(SCHEMA) != self._schema.stamp:
            draft.steps.append((b"s", SCHEMA, self._schema.stamp))
        return draft

    def _known(self, draft: Draft) -> CachedRecord | None:
        """What this process takes the record for. The server checks it."""
        return _UNWRITTEN if draft.creation == "*" else self._home.tiers().hot.entries.get(self._text)

    def _behind(self, entry: CachedRecord) -> bool:
        return self._schema.behind(self._text, entry)

    def _lowers(self, draft: Draft) -> bool:
        """Whether this changes fields, and has to be brought down to the version that is written."""
        fields = any(step == b"c" or (step in (b"s", b"d", b"i") and name[:1] != b"#") for step, name, _ in draft.steps)
        return fields and self._schema.write_version < self._schema.version and draft.deleted != "revive"

    async def _seen_by(self, draft: Draft) -> CachedRecord:
        """The record that a change is to be made on. Raises Conflict if it is not at the version that was expected."""
        entry = await read_path.read(self._home.tiers(), self._names, fresh=draft.expected is not None)
        if draft.expected not in (None, entry.version):
            text = f"{self._text[:200]}: expected version {draft.expected}, found version {entry.version}"
            raise Conflict(text, version=entry.version)
        return entry

    def _lowered(self, draft: Draft, known: CachedRecord) -> tuple[Draft, tuple[int, ...]]:
        """The change as the version that is written has it, and what its increments come to; it holds for `known`."""
        record_codec = self._home.codec_of(self._text)
        view = self._schema.view(self._text, known)
        stored, fields = ({}, {}) if known.deleted else (known.all(), view.all())
        first = []
        last = []
        given = dict[str, bytes]()
        sums = list[int]()
        for step, name, value in draft.steps:
            if step in (b"c", b"w"):
                first.append((step, name, value))
                stored, fields = (stored, fields) if step == b"w" else ({}, {})
            elif name[:1] == b"#" or step not in (b"s", b"d", b"i"):
                last.append((step, name, value))
            elif step == b"d":
                fields.pop(codec.decode_key(name), None)
            else:
                key = codec.decode_key(name)
                if step == b"i":
                    fields[key] = add(fields.get(key, 0), int(value), key)
                    sums.append(fields[key])
                else:
                    fields[key] = record_codec.decode(value, key)
                    given[key] = value
        lower = self._schema.lowered(self._text, fields)
        changes = Changes(self._home.settings, record_codec)
        for key, value in lower.items():
            if key in given and codec.encode(fields[key], key) == codec.encode(value, key):
                changes.put(codec.encode_key(key), given.pop(key))
            elif key not in stored or codec.encode(stored[key], key) != codec.encode(value, key):
                changes.set(key, value)
        for key in stored.keys() - lower.keys():
            changes.delete(key)
        for key, data in given.items():
            if field_ttl.marked(data):
                what = f"version {self._schema.write_version}, which is still written, has no such field to carry a ttl"
                raise InvalidValue(f"{key!r:.80}: {what}")
        steps = [*first, *changes.fields.values(), *last]
        lowered = replace(draft, steps=steps, expected=known.version, epoch=draft.epoch or known.epoch)
        return lowered, tuple(sums)

    def _guarded(self, draft: Draft, known: CachedRecord | None) -> Draft:
        """The change under the condition that the record's schema is as known; unknown: the present one."""
        stored = self._schema.stamp if known is None else known.fields.get(SCHEMA)
        attempt = replace(draft, expectations=[*draft.expectations, (SCHEMA, stored)], steps=list(draft.steps))
        if known is not None:
            self._schema.version_of(self._text, stored)
            if stored != self._schema.stamp and draft.deleted != "revive":
                attempt.steps.append((b"s", SCHEMA, self._schema.stamp))
                # There are no fields yet. If an older worker writes some first, they are to be upcast.
                if self._schema.version > 1 and draft.expected is None:
                    attempt.expected = known.version
        return attempt

    def _ours(self, draft: Draft, attempt: Draft, conflict: Conflict) -> bool:
        """Whether a commit was refused for the schema's sake. Raises SchemaMismatch if the record is newer."""
        if not conflict.version and attempt.epoch != draft.epoch:
            return True  # another epoch than the one that it was brought down for
        if len(conflict.found) != len(attempt.expectations):
            return False
        self._schema.version_of(self._text, conflict.found[-1])
        if draft.expected not in (None, conflict.version):
            return False
        moved = attempt.expected not in (draft.expected, conflict.version)
        return conflict.found[-1] != attempt.expectations[-1][1] or moved

    async def _upcast_for(self, draft: Draft) -> None:
        """Make the stored record one of this version before `draft` is applied to it."""
        entry = await read_path.read(self._home.tiers(), self._names, fresh=True)
        if draft.expected not in (None, entry.version):
            text = f"{self._text[:200]}: expected version {draft.expected}, found version {entry.version}"
            raise Conflict(text, version=entry.version)
        done = await self._upcast()
        # A commit of ours came between; whoever expected the version before it still may.
        if done is not None and draft.expected == done - 1:
            draft.expected = done

    async def is_older(self) -> bool:
        """Tell whether `upcast` would change the record. Raises what it would raise."""
        self._allow("read", VERSION)
        return await self._is_older()

    async def _is_older(self) -> bool:
        stored = await read_path.read(self._home.tiers(), self._names, fresh=True)
        return self._upcasting(stored) is not None

    async def upcast(self) -> int | None:
        """Store the record as its present schema writes it; return the new version, None if it was stored so already.

        The first write does this on its own. Raises SchemaMismatch or CorruptState, and nothing is written.
        """
        self._allow("write", None)
        return await self._upcast()

    async def _upcast(self) -> int | None:
        # Whoever may write a field of an older record brings it up by that.
        async def once() -> int | None:
            draft = self._upcasting(await read_path.read(self._home.tiers(), self._names, fresh=True))
            return None if draft is None else (await super(AsyncTypedRecord, self)._send(draft)).version

        return await write_path.until_no_conflict(self._home.tiers(), once)

    def _upcasting(self, entry: CachedRecord) -> Draft | None:
        """The change that stores a record of an older schema as one of this; it holds for that version alone."""
        if not self._behind(entry):
            return None
        view = self._schema.view(self._text, entry)
        self._schema.read(self._text, view)
        changes = self._unchecked(self._schema.lowered(self._text, view.all()), entry.all())
        changes.reserved(SCHEMA, self._schema.stamp)
        draft = changes.draft("upcast")
        self._own(draft)
        draft.expected = entry.version
        draft.epoch = entry.epoch
        draft.expectations.append((SCHEMA, entry.fields.get(SCHEMA)))
        return draft


class AsyncEdit(Generic[M]):
    """The `async with` around a model that is edited."""

    def __init__(self, handle: AsyncTypedRecord[M]) -> None:
        self._handle = handle
        self._schema = handle._schema

    async def __aenter__(self) -> M:
        self._entry = await self._handle._entry(fresh=True)
        self._model = self._handle._read(self._entry)
        self._before = self._schema.dump(self._model)
        return self._model

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.finish(self._model)

    async def finish(self, model: M) -> M:
        """Commit what makes of the record this model."""
        fields = self._schema.settle(model)
        changes = self._handle._unchecked(fields, self._before)
        if changes:
            draft = changes.draft("edit")
            draft.expected = self._entry.version
            draft.epoch = self._entry.epoch
            await self._handle._commit(draft)
        return self._schema.parse(fields)


# Many records
