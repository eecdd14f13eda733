"""What can be listed from SQL where no store can be opened, as Redis is away. Law: it says what it may lack.

Only what needs nothing of Redis but what is not archived yet: listings, branches, the audit trail.

Design: section 27.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Wanted
from distributed_state.errors import WarmUnavailable
from distributed_state.events import audit
from distributed_state.records import branches
from distributed_state.settings import Settings
from distributed_state.store import maintenance
from distributed_state.values.codec import Codec
from distributed_state.values.encryption import Encryption, Sealed
from distributed_state.values.model import Ref, escape
from distributed_state.values.results import Branch, Event, SessionInfo
from distributed_state.values.tags import tag_texts


@contextmanager
def archive_alone(settings: Settings, error: WarmUnavailable) -> Iterator[ArchiveAlone]:
    """Open the archive alone; nothing is changed there. `error` is why there is no Redis."""
    cold = ColdStore.open(
        settings.archive or "", settings.namespace, migrate=False,
        snapshot_every=settings.snapshot_every, timeout=settings.sql_timeout,
    )  # fmt: skip
    try:
        yield ArchiveAlone(cold, settings.namespace, error)
    finally:
        cold.close()


class ArchiveAlone:
    """The archive of a namespace. What it has has the names and arguments of the store's methods."""

    def __init__(self, cold: ColdStore, namespace: str, error: WarmUnavailable) -> None:
        self._cold = cold
        self._namespace = namespace
        self._error = error

    def sessions(
        self,
        *,
        user: str | None,
        prefix: str | None,
        tags: Mapping[str, Sequence[str]],
        limit: int,
        after: str | None,
        scope: str,
        fresh: bool,
        phase: str | None,
        changed_since: float | None,
        changed_before: float | None,
        larger_than: int | None,
    ) -> list[SessionInfo]:
        """One page of records. Raises WarmUnavailable if what is not archived is wanted."""
        if fresh:
            raise self._error
        Ref(scope, "any")
        owner = None if user is None else escape(Ref("user", user).id)
        sought = tuple(tag_texts(tags, "tags"))
        begin = None if prefix is None else escape(prefix)
        wanted = Wanted(scope, limit, owner=owner, prefix=begin, tags=sought, after=after)
        wanted = maintenance.narrowed(wanted, phase, changed_since, changed_before, larger_than)
        return [maintenance.shown(row) for row in self._cold.listing(wanted, [])]

    def branches(self, *, limit: int = 100, after: str | None = None) -> list[Branch]:
        """The branches of the next records that have any."""
        return [branches.shown(each) for each in self._cold.branches.page(after or "", limit)]

    def audit(
        self,
        *,
        conversation: str | None,
        subject: str | None,
        type: str | None,
        since: float | None,
        until: float | None,
        limit: int,
        after: str | None,
    ) -> list[Event]:
        """What happened, oldest first."""
        _, text = audit.about(conversation, subject)
        rows = self._cold.audit(audit.sought(text, type, since, until, limit, after))
        return [audit.event_of(self._codec_of(row.subject), row) for row in rows]

    def record_branches(self, ref: Ref) -> list[Branch]:
        """The branches of one record. The oldest first."""
        return [branches.shown(each) for each in self._cold.branches.of(ref.text)]

    def _codec_of(self, subject: str) -> Codec:
        encryption = Encryption.from_environment()
        root = Codec(self._namespace, "") if encryption is None else Sealed(encryption, self._namespace, "")
        return root.of(subject)
