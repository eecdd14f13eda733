"""Records whose fields are those of a pydantic model. Law: a model is validated as a whole before it is written.

Design: section 17.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Generic, Unpack

from distributed_state.errors import InvalidValue
from distributed_state.port.waited import bounded
from distributed_state.records.access import VERSION
from distributed_state.records.creation import creation
from distributed_state.records.record import AsyncRecord
from distributed_state.records.sanitizing import Sanitizing
from distributed_state.records.schema import M, Schema
from distributed_state.records.store_context import StoreContext
from distributed_state.records.typed_context import TypedContext
from distributed_state.tiers import commit as write_path
from distributed_state.values.model import Ref


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

    `load`, `edit` and `modify` speak in models. All other methods are those of a plain record: they give and take JSON
    values, upcast and checked against the model field by field. Stored data that the model refuses raises CorruptState,
    a record of a newer schema SchemaMismatch, when its fields are read and on every write. Messages are of no schema. A
    handle without schema may do everything.
    """

    def __init__(
        self,
        store: StoreContext,
        ref: Ref,
        *,
        schema: type[M] | Schema[M],
        user: str | None = None,
        actor: str = "",
        fresh: bool = False,
        lifetime: tuple[int, int] = (0, 0),
        **options: Unpack[Sanitizing],
    ) -> None:
        whole: Schema[M] = Schema.of(schema)
        self._context: TypedContext[M] = TypedContext(
            store, ref, schema=whole, user=user, actor=actor, fresh=fresh, lifetime=lifetime, **options
        )

    # Reading

    async def load(self, *, fresh: bool = False) -> M:
        """Read all fields as a validated model.

        Absent fields take the model's defaults; NotFound if nothing was written yet and a field has none. Raises
        CorruptState naming the field and what is stored instead, SchemaMismatch if the record is newer.
        """
        return self._context.model(await self._context.read(fresh))

    # Changing

    async def create(self, values: M | Mapping[str, Any] | None = None, *, is_clear: bool = False) -> int:
        """Start the record as this model, checked as a whole, and return its version. Raises Conflict if it exists.

        A deleted record starts again; its version goes on counting. `is_clear` as in other records.
        """
        fields = self._context.schema.settle({} if values is None else values)
        changes = self._context.differences(fields, {})
        return (await self._context.commit(creation(self._context, changes, is_clear))).version

    def edit(self) -> AsyncEdit[M]:
        """Open the model for changes: `async with session.edit() as trip: trip.days = 3`.

        It is validated as a whole when the block ends, and the fields that changed are one commit; InvalidValue, or
        Conflict if the record changed meanwhile, and nothing is written. `modify` repeats.
        """
        return AsyncEdit(self._context)

    async def modify(self, change: Callable[[M], M | None]) -> M:
        """Run `change(model)` and commit what changed, repeated until nobody was faster; return the model as committed.

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
        """Tell whether `upcast` would change the record. Raises what it would raise."""
        self._context.allow("read", VERSION)
        return await self._context.is_older()

    async def upcast(self) -> int | None:
        """Store the record as its present schema writes it; return the new version, None if it was stored so already.

        The first write does this on its own. Raises SchemaMismatch or CorruptState, and nothing is written.
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
        """Commit what makes of the record this model."""
        fields = self._schema.settle(model)
        changes = self._context.differences(fields, self._before)
        if changes:
            draft = changes.draft("edit")
            draft.expected = self._entry.version
            draft.epoch = self._entry.epoch
            await self._context.commit(draft)
        return self._schema.parse(fields)
