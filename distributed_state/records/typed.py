"""Records whose fields are those of a pydantic model. Law: a model is validated as a whole before it is written.

Design: section 17.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Generic, Unpack

from distributed_state.errors import Conflict, InvalidValue
from distributed_state.hot.cached_record import MISSING, CachedRecord
from distributed_state.port.waited import bounded
from distributed_state.records.access import VERSION
from distributed_state.records.context import RecordContext, StoreContext
from distributed_state.records.lifecycle import creation
from distributed_state.records.record import AsyncRecord
from distributed_state.records.sanitizing import ContextOptions
from distributed_state.records.schema import M, Schema, View
from distributed_state.settings import Settings
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.changes import Changes, add
from distributed_state.values import chance, codec, field_ttl
from distributed_state.values.codec import Codec
from distributed_state.values.model import SCHEMA, Message, Presence, Ref
from distributed_state.warm.answers import Committed, Draft


class TypedChanges(Changes):
    """Changes that a schema allows."""

    def __init__(
        self,
        settings: Settings,
        form: Codec,
        schema: Schema[Any],
        prepare: Callable[[str, Any], Any] | None = None,
        prepare_message: Callable[[Message | dict[str, Any]], Message | dict[str, Any]] | None = None,
        now: Callable[[], float] | None = None,
        *,
        owner: str = "",
        actor: str = "",
        lifetime: tuple[int, int] = (0, 0),
    ) -> None:
        def prepared(key: str, value: Any) -> Any:
            return schema.prepare(key, value if prepare is None else prepare(key, value))

        super().__init__(settings, form, prepared, prepare_message, now, owner=owner, actor=actor, lifetime=lifetime)
        self._schema = schema

    def delete(self, key: str) -> None:
        """Delete a field, unless the model requires it."""
        self._schema.deletable(key)
        super().delete(key)

    def increment(self, key: str, by: int) -> None:
        """Add on the server, if the model takes any whole number for the field."""
        if not self._schema.countable(key):
            what = "is not an unlimited int that counts from 0, so the server cannot add to it without reading it"
            raise InvalidValue(f"{key!r}: {what}; use increment() or edit()")
        super().increment(key, by)


_ROUNDS = 100
_UNWRITTEN = CachedRecord(Codec("", ""), "", 0, {}, {})


class TypedContext(RecordContext, Generic[M]):
    """A record, its store, the actor, and the schema of its fields."""

    def __init__(
        self,
        store: StoreContext,
        ref: Ref,
        *,
        schema: type[M] | Schema[M],
        **options: Unpack[ContextOptions],
    ) -> None:
        super().__init__(store, ref, **options)
        self.schema: Schema[M] = Schema.of(schema)

    # Reading

    def peek(self, key: str) -> Any:
        """Always MISSING: values must be validated first."""
        return MISSING

    async def read(self, fresh: bool = False, field: str | None = None) -> CachedRecord:
        """The record as the schema shows it. Raises SchemaMismatch if the record is newer."""
        return self.schema.view(self.text, await super().read(fresh, field))

    def value(self, entry: CachedRecord, key: str, default: Any) -> Any:
        """One field, upcast and checked; `default` if it is absent."""
        if codec.encode_key(key) not in entry.fields:
            return default
        fields = entry.all()
        self.schema.check(self.text, entry, fields, (key,))
        return fields[key]

    def fields(self, entry: CachedRecord) -> dict[str, Any]:
        """All fields, upcast and checked."""
        view = self.schema.view(self.text, entry)
        fields = super().fields(view)
        self.schema.check(self.text, view, fields, fields)
        return fields

    def model(self, entry: CachedRecord) -> M:
        """The model, if the policy allows reading all of its fields."""
        self.allow("read", *(codec.decode_key(name) for name in entry.fields if name[:1] != b"#"))
        return self.schema.read(self.text, entry)

    # Changing

    def changes(self) -> TypedChanges:
        """A change whose operations the schema checks."""
        return TypedChanges(
            self.store.settings, self.codec, self.schema, self.prepare, self.prepare_message, self.now,
            owner=self.owner, actor=self.actor, lifetime=self.lifetime,
        )  # fmt: skip

    def differences(self, fields: Mapping[str, Any], before: Mapping[str, Any]) -> Changes:
        """The change between two sets of fields, both validated as a whole."""
        changes = super().changes()
        changes.whole()
        for key, value in fields.items():
            if key not in before or codec.encode_value(value, key) != codec.encode_value(before[key], key):
                changes.set(key, value)
        for key in sorted(before.keys() - fields.keys()):
            changes.delete(key)
        return changes

    def server_adds(self, key: str) -> bool:
        """Whether whole numbers are added to this field on the server."""
        return super().server_adds(key) and self.schema.countable(key)

    def expected_value(self, key: str, value: Any) -> Any:
        """The expected content of a field, as the model stores it."""
        if self.schema.write_version < self.schema.version:
            raise InvalidValue(
                f"{key!r:.80}: expectations about single fields are not possible while an older version is written"
            )
        return value if isinstance(value, Presence) else self.schema.prepare(key, value)

    async def swap(self, key: str, kind: str, empty: Any, change: Callable[[Any], Any]) -> tuple[bytes, Committed]:
        """Replace one field by the result of `change`, retried on conflicts."""
        name = codec.encode_key(key)
        empty = self.schema.default(key, empty)
        fresh = False
        self.allow("write", key)

        async def once() -> tuple[bytes, Committed]:
            nonlocal fresh
            stored = await read_path.read(self.tiers, self.keys, fresh=fresh)
            fresh = True
            view = self.schema.view(self.text, stored)
            changes = self.changes()
            before = empty if view.deleted else view.value(key, empty)
            value = changes.set(key, change(before), until=view.deadline(name))
            if view is stored:
                draft = changes.draft(kind, expectations=[(name, None if stored.deleted else stored.raw(name))])
            else:
                draft = changes.draft(kind, expected=stored.version)
            return self.codec.encode(value, key), await self.commit(draft)

        return await write_path.until_no_conflict(self.tiers, once)

    # The guard

    async def send(self, draft: Draft) -> Committed:
        """Commit the change, after an upcast if the record is older. Raises Conflict, SchemaMismatch."""
        known = self._known(draft)
        lowers = self._lowers(draft)
        for lost in range(_ROUNDS):
            if known is not None and self.schema.behind(self.text, known) and draft.deleted != "revive":
                draft = await self._upcast_for(draft)
                known = None
            if lowers and (known is None or draft.expected not in (None, known.version)):
                known = await self._seen_by(draft)
            attempt, sums = self._lowered(draft, known) if lowers and known is not None else (draft, None)
            attempt = self._guarded(attempt, known)
            try:
                done = await super().send(attempt)
                return done if sums is None else done._replace(results=sums, operations=draft.operations)
            except Conflict as conflict:
                if not self._ours(draft, attempt, conflict):
                    raise
                if conflict.version == 0:
                    known = _UNWRITTEN
                    draft = draft._replace(creation=self.tiers.known_ids.get(self.text) or draft.creation)
                    continue
            if lowers:  # concurrent plain writes to one record back off before they retry
                await self.tiers.port.sleep(chance.source.uniform(0, min(0.1, 0.001 * 2 ** min(lost, 10))))
            known = await read_path.read(self.tiers, self.keys, fresh=True)
        raise Conflict(f"{self.text[:200]}: its schema version changes faster than it can be written")

    def batched(self, draft: Draft) -> Draft:
        """The change for a batch; if it needs the whole record, a change that the server refuses."""
        known = self._known(draft)
        if self._lowers(draft):
            # The server always refuses this expectation. `send` then reads the whole record, which the change needs.
            return draft._replace(expectations=(*draft.expectations, (SCHEMA, b"")))
        # An error of this record must not stop the batch for the others; `send` raises it later.
        return self._guarded(draft, known if known is not None and not known.version else None)

    async def turn_begins(self, entry: CachedRecord) -> CachedRecord:
        """The entry that a turn shows: a view of the record, upcast first if its schema is older."""
        if self.schema.behind(self.text, entry):
            await self.upcast()
            entry = await read_path.read(self.tiers, self.keys, fresh=True)
        return self.schema.view(self.text, entry)

    def turn_ends(self, draft: Draft, entry: CachedRecord) -> Draft:
        """The draft that ends a turn, which began with `entry` and has held the lease since."""
        entry = entry.stored if isinstance(entry, View) else entry
        if self._lowers(draft):
            draft = self._lowered(draft, entry)[0]._replace(expected=draft.expected)
        # No expectation: the turn's lease excludes others, and other writes of its own task are not conflicts.
        if entry.fields.get(SCHEMA) != self.schema.stamp:
            return self._stamped(draft)
        return draft

    def _known(self, draft: Draft) -> CachedRecord | None:
        """This process's copy of the record. The server checks that it is current."""
        return _UNWRITTEN if draft.creation == "*" else self.tiers.hot.entries.get(self.text)

    def _lowers(self, draft: Draft) -> bool:
        """Whether this change sets fields that must be converted down to the written version."""
        fields = any(
            operation == b"c" or (operation in (b"s", b"d", b"i") and name[:1] != b"#")
            for operation, name, _ in draft.operations
        )
        return fields and self.schema.write_version < self.schema.version and draft.deleted != "revive"

    async def _seen_by(self, draft: Draft) -> CachedRecord:
        """The record as the change finds it. Raises Conflict if it is not at the expected version."""
        entry = await read_path.read(self.tiers, self.keys, fresh=draft.expected is not None)
        if draft.expected not in (None, entry.version):
            text = f"{self.text[:200]}: expected version {draft.expected}, found version {entry.version}"
            raise Conflict(text, version=entry.version)
        return entry

    def _lowered(self, draft: Draft, known: CachedRecord) -> tuple[Draft, tuple[int, ...]]:
        """The change converted to the written version, and the sums of its increments; it applies only to `known`."""
        form = self.codec
        view = self.schema.view(self.text, known)
        stored, fields = ({}, {}) if known.deleted else (known.all(), view.all())
        first = []
        last = []
        given = dict[str, bytes]()
        sums = list[int]()
        for operation, name, value in draft.operations:
            if operation in (b"c", b"w"):
                first.append((operation, name, value))
                stored, fields = (stored, fields) if operation == b"w" else ({}, {})
            elif name[:1] == b"#" or operation not in (b"s", b"d", b"i"):
                last.append((operation, name, value))
            elif operation == b"d":
                fields.pop(codec.decode_key(name), None)
            else:
                key = codec.decode_key(name)
                if operation == b"i":
                    fields[key] = add(fields.get(key, 0), int(value), key)
                    sums.append(fields[key])
                else:
                    fields[key] = form.decode(value, key)
                    given[key] = value
        lower = self.schema.lowered(self.text, fields)
        changes = Changes(self.store.settings, form)
        changes.whole()
        for key, value in lower.items():
            if key in given and codec.encode_value(fields[key], key) == codec.encode_value(value, key):
                changes.put(codec.encode_key(key), given.pop(key))
            elif key not in stored or codec.encode_value(stored[key], key) != codec.encode_value(value, key):
                changes.set(key, value)
        for key in sorted(stored.keys() - lower.keys()):
            changes.delete(key)
        for key, data in given.items():
            if field_ttl.marked(data):
                what = f"version {self.schema.write_version}, which is still written, has no such field to carry a ttl"
                raise InvalidValue(f"{key!r:.80}: {what}")
        operations = (*first, *changes.fields.values(), *last)
        lowered = draft._replace(operations=operations, expected=known.version, epoch=draft.epoch or known.epoch)
        return lowered, tuple(sums)

    def _guarded(self, draft: Draft, known: CachedRecord | None) -> Draft:
        """The change, on condition that the record has the known schema version (the present one if none is known)."""
        stored = self.schema.stamp if known is None else known.fields.get(SCHEMA)
        attempt = draft._replace(expectations=(*draft.expectations, (SCHEMA, stored)))
        if known is not None:
            self.schema.version_of(self.text, stored)
            if stored != self.schema.stamp and draft.deleted != "revive":
                attempt = self._stamped(attempt)
                # There are no fields yet. If an older worker writes some first, they must be upcast.
                if self.schema.version > 1 and draft.expected is None:
                    attempt = attempt._replace(expected=known.version)
        return attempt

    def _stamped(self, draft: Draft) -> Draft:
        return draft._replace(operations=(*draft.operations, (b"s", SCHEMA, self.schema.stamp)))

    def _ours(self, draft: Draft, attempt: Draft, conflict: Conflict) -> bool:
        """Whether a commit was refused because of the schema. Raises SchemaMismatch if the record is newer."""
        if not conflict.version and attempt.epoch != draft.epoch:
            return True  # the epoch is not the one that the change was converted for
        if len(conflict.found) != len(attempt.expectations):
            return False
        self.schema.version_of(self.text, conflict.found[-1])
        if draft.expected not in (None, conflict.version):
            return False
        moved = attempt.expected not in (draft.expected, conflict.version)
        return conflict.found[-1] != attempt.expectations[-1][1] or moved

    async def _upcast_for(self, draft: Draft) -> Draft:
        """Upcast the stored record; returns the change to apply after that."""
        entry = await read_path.read(self.tiers, self.keys, fresh=True)
        if draft.expected not in (None, entry.version):
            text = f"{self.text[:200]}: expected version {draft.expected}, found version {entry.version}"
            raise Conflict(text, version=entry.version)
        done = await self.upcast()
        # The upcast was a commit of its own: an expectation of the version before it is moved to the version after it.
        return draft._replace(expected=done) if done is not None and draft.expected == done - 1 else draft

    async def is_older(self) -> bool:
        """Whether the record is of an older schema version."""
        stored = await read_path.read(self.tiers, self.keys, fresh=True)
        return self._upcasting(stored) is not None

    async def upcast(self) -> int | None:
        """Upcast the record to this schema version; its new version, None if there was nothing to do."""

        # The right to write a field of an older record includes the right to upcast it.
        async def once() -> int | None:
            draft = self._upcasting(await read_path.read(self.tiers, self.keys, fresh=True))
            return None if draft is None else (await super(TypedContext, self).send(draft)).version

        return await write_path.until_no_conflict(self.tiers, once)

    def _upcasting(self, entry: CachedRecord) -> Draft | None:
        """The change that upcasts a record of an older schema; it applies only at that version."""
        if not self.schema.behind(self.text, entry):
            return None
        view = self.schema.view(self.text, entry)
        self.schema.read(self.text, view)
        changes = self.differences(self.schema.lowered(self.text, view.all()), entry.all())
        changes.reserved(SCHEMA, self.schema.stamp)
        expectations = [(SCHEMA, entry.fields.get(SCHEMA))]
        return changes.draft("upcast", expected=entry.version, epoch=entry.epoch, expectations=expectations)


@bounded("load")
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

    `load`, `edit` and `modify` use models. All other methods are those of a plain record: they take and return JSON
    values, upcast and checked against the model field by field. Stored data that the model refuses raises CorruptState;
    a record of a newer schema raises SchemaMismatch when its fields are read and on every write. Messages do not belong
    to the schema. A handle without a schema is not restricted.
    """

    _context: TypedContext[M]

    # Reading

    async def load(self, *, fresh: bool = False) -> M:
        """Read all fields as a validated model.

        Absent fields get the model's defaults; raises NotFound if nothing was written yet and a field has no default.
        Raises CorruptState naming the field and what is stored instead, SchemaMismatch if the record is newer.
        """
        return self._context.model(await self._context.read(fresh))

    # Changing

    async def create(self, values: M | Mapping[str, Any] | None = None, *, is_clear: bool = False) -> int:
        """Start the record as this model, checked as a whole, and return its version. Raises Conflict if it exists.

        A deleted record starts again; its version continues to count. `is_clear` as in other records.
        """
        fields = self._context.schema.settle({} if values is None else values)
        changes = self._context.differences(fields, {})
        return (await self._context.commit(creation(self._context, changes, is_clear))).version

    def edit(self) -> AsyncEdit[M]:
        """Open the model for changes: `async with session.edit() as trip: trip.days = 3`.

        The model is validated as a whole when the block ends, and the changed fields are written in one commit. Raises
        InvalidValue, or Conflict if the record changed meanwhile, and then nothing is written; `modify` retries
        instead.
        """
        return AsyncEdit(self._context)

    async def modify(self, change: Callable[[M], M | None]) -> M:
        """Run `change(model)` and commit its changes, retried on conflicts; return the model as committed.

        `change` alters the model or returns another one, as it must if the model is frozen. It may run several times.
        """
        schema = self._context.schema

        async def once() -> M:
            edit = self.edit()
            model = await edit.__aenter__()
            changed = change(model)
            if changed is not None and not isinstance(changed, schema.model):
                kind = type(changed).__name__
                raise InvalidValue(f"a change returns a {schema.model.__name__} or None, not a {kind}")
            return await edit.finish(model if changed is None else changed)

        return await write_path.until_no_conflict(self._context.tiers, once)

    async def is_older(self) -> bool:
        """Return whether `upcast` would change the record. Raises the same errors."""
        self._context.allow("read", VERSION)
        return await self._context.is_older()

    async def upcast(self) -> int | None:
        """Store the record in its present schema version; return the new version, None if it was up to date.

        Otherwise the first write upcasts the record. Raises SchemaMismatch or CorruptState, and then nothing is
        written.
        """
        self._context.allow("write", None)
        return await self._context.upcast()


@bounded()
class AsyncEdit(Generic[M]):
    """The `async with` around a model that is edited."""

    def __init__(self, context: TypedContext[M]) -> None:
        self._context = context
        self._schema = context.schema

    async def __aenter__(self) -> M:
        self._entry = await self._context.read(fresh=True)
        self._model = self._context.model(self._entry)
        self._before = self._schema.dump(self._model)
        return self._model

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.finish(self._model)

    async def finish(self, model: M) -> M:
        """Commit the differences between the record and this model."""
        fields = self._schema.settle(model)
        changes = self._context.differences(fields, self._before)
        if changes:
            entry = self._entry
            await self._context.commit(changes.draft("edit", expected=entry.version, epoch=entry.epoch))
        return self._schema.parse(fields)
