"""Changes of one field that depend on what it holds. Law: none of two that meet is lost, and none is made twice."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import model_validator
from starlette.responses import Response

from distributed_state.errors import InvalidValue
from distributed_state.programs.service import leasing, requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.remembering import OnceOnly
from distributed_state.programs.service.resources.shapes import Body, Id, Name, Values, Written
from distributed_state.programs.service.resources.writes import owned
from distributed_state.programs.service.routes import Asked
from distributed_state.records.access import VERSION
from distributed_state.records.context import RecordContext, context_of
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.changes import add
from distributed_state.values import codec
from distributed_state.values.model import Scope


class FieldChange(Body):
    """What becomes of the field `key`: a number is added, an object merged one level deep, or a list continued.

    A field that is not there counts as 0, {} or []. `user` owns a record that begins with it.
    """

    key: Name
    add: int | float | None = None
    merge: Values | None = None
    extend: list[Any] | None = None
    user: Id | None = None
    durability: str | None = None

    @model_validator(mode="after")
    def _one(self) -> FieldChange:
        if sum(each is not None for each in (self.add, self.merge, self.extend)) != 1:
            raise ValueError("give add, merge or extend, one of them")
        return self

    @property
    def kind(self) -> str:
        """What the history shows."""
        return "update" if self.merge is not None else "append_to" if self.extend is not None else "increment"

    def applied(self, stored: Any) -> Any:
        """What the field holds then. Raises InvalidValue."""
        if self.add is not None:
            return add(stored, self.add, self.key)
        if self.merge is not None:
            return {**_kept(stored, dict, "an object", self.key), **self.merge}
        return [*_kept(stored, list, "a list", self.key), *(self.extend or ())]


def _kept(stored: Any, kind: type, what: str, key: str) -> Any:
    if not isinstance(stored, kind):
        raise InvalidValue(f"{key!r:.80}: holds a {type(stored).__name__}, not {what}; set() replaces it")
    return stored


class FieldChanged(Written):
    """The new version; `sum` is what a number came to, else null."""

    sum: int | float | None


async def change(scope: Scope, asked: Asked) -> Response:
    """Change a field by what it holds."""
    given = requests.body(asked.request, asked.limits, FieldChange)
    context = context_of(await owned(asked, scope, given.user))
    leasing.carry(asked, context)
    # Who repeats a request is told what came of it, too.
    context.allow("write", given.key)
    context.allow("read", given.key)
    once = OnceOnly.of(asked, context)
    with context.durable(given.durability):
        swapping = write_path.until_no_conflict(context.tiers, partial(_swap, context, once, given))
        found, done = await once.settle(swapping)
    version, total = found if done is None else (done.version, done.found.get("sum"))
    return answer({"version": version, "repeated": done is not None, "sum": total}, version=version)


async def _swap(context: RecordContext, once: OnceOnly, given: FieldChange) -> tuple[int, int | float | None]:
    """The new version, and what a number came to."""
    entry = await context.read(True, VERSION)
    once.look(entry)  # before its value is, which may be none that can be changed so any more
    name = codec.encode_key(given.key)
    empty: Any = 0 if given.add is not None else {} if given.merge is not None else []
    value = given.applied(empty if entry.deleted else entry.value(given.key, empty))
    total = value if given.add is not None else None
    changes = context.changes()
    changes.set(given.key, value, until=entry.deadline(name))
    once.remember(entry, changes, sum=total)
    draft = context.ready(changes.draft(given.kind), entry.version)
    draft.epoch = entry.epoch
    return (await context.send(draft)).version, total
