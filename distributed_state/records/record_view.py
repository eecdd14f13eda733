"""A record at one moment, each of its fields decoded when it is asked for. Law: it never changes, and asks nobody.

Design: section 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distributed_state.hot.cached_record import MISSING, CachedRecord
from distributed_state.records.access import MOVES, TAGS, VERSION
from distributed_state.records.context import RecordContext
from distributed_state.values import codec
from distributed_state.values.model import PHASE
from distributed_state.values.tags import tags_in


class RecordView(Mapping[str, Any]):
    """The fields of a record as they were at `version`, as a mapping; what is read is the caller's own.

    A field is decoded when it is read: CorruptState and DecryptionFailed are raised there. A record that was deleted
    or never written shows no fields.
    """

    def __init__(self, context: RecordContext, entry: CachedRecord) -> None:
        self._context = context
        self._entry = entry

    @property
    def version(self) -> int:
        """How many commits the record had had, 0 if it was never written."""
        return self._entry.version

    @property
    def exists(self) -> bool:
        """Whether it had been written, and not deleted since."""
        return self._entry.version > 0 and not self._entry.deleted

    @property
    def phase(self) -> str | None:
        """The phase, None if none was set."""
        data = None if self._entry.deleted else self._entry.fields.get(PHASE)
        return None if data is None else data.decode("utf-8", "surrogatepass")

    @property
    def tags(self) -> dict[str, tuple[str, ...]]:
        """The tags, texts by key in order."""
        return tags_in(() if self._entry.deleted else self._entry.fields)

    def __getitem__(self, key: str) -> Any:
        value = MISSING if self._entry.deleted else self._context.value(self._entry, key, MISSING)
        if value is MISSING:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and not self._entry.deleted and codec.encode_key(key) in self._entry.fields

    def __iter__(self) -> Iterator[str]:
        return iter(_names(self._entry))

    def __len__(self) -> int:
        return len(_names(self._entry))

    def __repr__(self) -> str:
        return f"<RecordView of {self._context.text[:200]} at version {self.version}>"


async def look(context: RecordContext, fresh: bool) -> RecordView:
    """The record as it is, if the policy allows all that a view shows."""
    entry = await context.read(fresh)
    context.allow("read", VERSION, MOVES, TAGS, *_names(entry))
    return RecordView(context, entry)


def _names(entry: CachedRecord) -> list[str]:
    return [] if entry.deleted else [codec.decode_key(name) for name in entry.fields if name[:1] != b"#"]
