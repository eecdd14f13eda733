"""Operations that need only SQL, for use while Redis is unavailable. Law: an error names the data that only Redis has.

Listings, histories, branches, the audit trail and searches read only archived data. `compact` and `purge` keep SQL
small and do not touch unarchived data.

Design: section 27.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Self

import orjson

from distributed_state.cold.store import ColdStore
from distributed_state.errors import ConfigurationError, WarmUnavailable
from distributed_state.events import audit
from distributed_state.port.blocking import finish
from distributed_state.records import branches
from distributed_state.records.history import as_change
from distributed_state.results import Branch, Change, Event, SessionInfo
from distributed_state.search import querying
from distributed_state.search.follower import OFF
from distributed_state.settings import Settings
from distributed_state.store import maintenance
from distributed_state.values.codec import Codec
from distributed_state.values.encryption import Encryption, Sealed
from distributed_state.values.model import Ref
from distributed_state.values.search import KINDS, SearchHit

_CLOCKS_MS = 600_000  # SQL's clock may be this far ahead of Redis', whose times all data has


@contextmanager
def archive_alone(settings: Settings, error: WarmUnavailable) -> Iterator[ArchiveAlone]:
    """Open only the archive; its schema is not migrated. `error` says why Redis is unavailable."""
    cold = ColdStore.open(
        settings.archive or "", settings.namespace, migrate=False,
        snapshot_every=settings.snapshot_every, timeout=settings.sql_timeout,
    )  # fmt: skip
    try:
        yield ArchiveAlone(cold, settings, error)
    finally:
        cold.close()


class ArchiveAlone:
    """The archive of a namespace. Its methods have the names and arguments of the store's."""

    def __init__(self, cold: ColdStore, settings: Settings, error: WarmUnavailable) -> None:
        self._cold = cold
        self._namespace = settings.namespace
        self._op_window = settings.op_window
        self._error = error

    def sessions(self, *, fresh: bool, **wanted: Any) -> list[SessionInfo]:
        """One page of records. Raises WarmUnavailable if unarchived data is requested."""
        if fresh:
            raise self._error
        return [maintenance.shown(row) for row in self._cold.listing(maintenance.wanted(**wanted), [])]

    @property
    def admin(self) -> Self:
        """The methods that a store has in `admin`."""
        return self

    def branches(
        self, id: str | None = None, *, scope: str = "session", limit: int = 100, after: str | None = None
    ) -> list[Branch]:
        """The branches of a record, or of the next records that have branches."""
        if id is not None:
            return [branches.shown(each) for each in self._cold.branches.of(Ref(scope, id).text)]
        return [branches.shown(each) for each in self._cold.branches.page(after or "", limit)]

    def audit(self, *, conversation: str | None, subject: str | None, **wanted: Any) -> list[Event]:
        """Events, oldest first."""
        _, text = audit.about(conversation, subject)
        rows = self._cold.audit(audit.sought(text, **wanted))
        return [audit.event_of(self._codec_of(row.subject), row) for row in rows]

    def history(self, ref: Ref, last: int) -> list[Change]:
        """The last changes of a record, the oldest first; empty if it never existed."""
        version = self._cold.version(ref.text) or 0
        rows = self._cold.history(ref.text, after=max(0, version - last))
        return [as_change(self._codec_of(ref.text), row) for row in rows]

    def search(
        self, query: str, *, scope: str | None, prefix: str, user: str | None, limit: int, fresh: bool
    ) -> list[SearchHit]:
        """Search the index, which may lag behind the archive. Raises ConfigurationError if it cannot be used."""
        stored = self._cold.search.settings()
        if stored is None:
            raise ConfigurationError(OFF)
        made = orjson.loads(stored)
        if made["dimensions"] or made["elsewhere"]:
            raise ConfigurationError(f"search: this index needs functions of your program, and Redis: {self._error}")
        asked = querying.checked(query, "all", scope, KINDS, prefix, user, None, limit, 0)
        if not asked.words:
            return []
        found = self._cold.search.search(asked, self._cold.clock_us() // 1000, made["language"], None, 0, stored, False)
        return [querying.row_shown(row, asked.words) for row in found.rows[:limit]] if found else []

    def compact(self, *, older_than: float, progress: Callable[[int], None]) -> dict[str, int]:
        """Pack old history into blocks."""

        async def call(method: Callable[[], Any]) -> Any:
            return method()

        maintenance.require_age(older_than, self._op_window)
        return finish(maintenance.pack(self._cold, call, self._before_ms(older_than), progress))

    def purge(self, **wanted: Any) -> dict[str, int]:
        """Remove old data. Raises WarmUnavailable for options that change which messages conversations show."""
        retention = maintenance.Retention(**wanted)
        if retention.of_messages:
            raise WarmUnavailable(f"the messages that a conversation shows can only be changed in Redis: {self._error}")
        return asdict(retention.purge(self._cold, self._before_ms)) | {"left_out": 0}

    def _before_ms(self, age: float) -> int:
        """The time before which data is older than `age`.

        It is set early, because Redis' and SQL's clocks may differ.
        """
        return self._cold.clock_us() // 1000 - int(age * 1000) - _CLOCKS_MS

    def _codec_of(self, subject: str) -> Codec:
        encryption = Encryption.from_environment()
        root = Codec(self._namespace, "") if encryption is None else Sealed(encryption, self._namespace, "")
        return root.of(subject)
