"""A record as another version of its schema sees it. Law: the stored one stays with it.

Design: section 17.
"""

from __future__ import annotations

from distributed_state.hot.cached_record import CachedRecord


class View(CachedRecord):
    """A record as another version of its schema than the stored one sees it."""

    __slots__ = ("stored",)

    def __init__(self, stored: CachedRecord, fields: dict[bytes, bytes]) -> None:
        super().__init__(stored.codec, stored.epoch, stored.version, fields, stored.messages)
        self.stored = stored


def holds_fields(entry: CachedRecord) -> bool:
    """Whether there is anything to upcast."""
    return not entry.deleted and any(name[:1] != b"#" for name in entry.fields)
