"""The part of a store that is about the whole fleet: what happened, on whichever replica."""

from __future__ import annotations

from distributed_state import acting, audit
from distributed_state.access import Action
from distributed_state.handles import AsyncHandles
from distributed_state.model import Event, Ref
from distributed_state.records import AsyncRecord


class AsyncFleet(AsyncHandles):
    """The part of a store that tells of the fleet."""

    def _allow(
        self, action: Action, ref: Ref | None = None, *, user: str | None = None, scope: str | None = None
    ) -> None:
        if self.guard is not None:
            self.guard.ask(action, ref, actor=acting.present(), user=user, scope=scope)

    async def audit(
        self,
        *,
        conversation: str | None = None,
        subject: str | AsyncRecord | None = None,
        type: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Event]:
        """Read what happened from SQL, the newest `limit` events in the order of the servers' clocks, newest last.

        Only those of a conversation, by its id; about a subject (a record, its text, or what `emit` was given); of a
        type, or of several as "conversation.*"; from a time on, and before another (seconds since 1970). To read on,
        give the `cursor` of the last event as `after`: the first `limit` that follow it, an empty list if there are
        none yet; `after="oldest"` is the beginning. Events that were purged or forgotten are gone.
        Raises ColdUnavailable if what was told so far cannot be archived.
        """
        ref, text = audit.about(conversation, subject.ref if isinstance(subject, AsyncRecord) else subject)
        wanted = audit.sought(text, type, since, until, limit, after)
        if ref is None:
            self._allow("read", scope="session")
        else:
            self._allow("read", ref)
        return await audit.audit(self.tiers(), wanted)
