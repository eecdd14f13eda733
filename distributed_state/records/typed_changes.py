"""A change of a record of a schema, being put together. Law: each field is checked alone, before anything is sent.

Design: section 17.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed_state.errors import InvalidValue
from distributed_state.records.schema import Schema
from distributed_state.settings import Settings
from distributed_state.tiers.changes import Changes
from distributed_state.values.codec import Codec
from distributed_state.values.model import Message


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
    ) -> None:
        def prepared(key: str, value: Any) -> Any:
            return schema.prepare(key, value if prepare is None else prepare(key, value))

        super().__init__(settings, form, prepared, prepare_message, now)
        self._schema = schema

    def delete(self, key: str) -> None:
        """Delete a field, unless the model cannot do without it."""
        self._schema.deletable(key)
        super().delete(key)

    def increment(self, key: str, by: int) -> None:
        """Add on the server, if the model takes any whole number for the field."""
        if not self._schema.countable(key):
            what = "is no int without limits that counts from 0, so the server cannot add to it unseen"
            raise InvalidValue(f"{key!r}: {what}; use increment() or edit()")
        super().increment(key, by)
