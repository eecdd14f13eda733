"""The user of a turn: its fields beside the session's, and what the turn changes of them. Law: see `user_effects`.

Design: section 13.
"""

from __future__ import annotations

from distributed_state.conversation import user_effects
from distributed_state.conversation.user_effects import Effect
from distributed_state.errors import Deleted, DurabilityUnknown, InvalidValue, StateError
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records.access import VERSION
from distributed_state.records.context import RecordContext
from distributed_state.records.workspace import Workspace
from distributed_state.tiers import read as read_path
from distributed_state.values.model import OWNER, Ref, unescape
from distributed_state.warm.answers import Draft


class TurnUser:
    """The record of a session's user, as far as a turn has to do with it. `wait`: how long its lock is waited for."""

    def __init__(self, session: RecordContext, wait: float) -> None:
        self._session = session
        self._wait = wait
        self._user: RecordContext | None = None
        self._workspace: Workspace | None = None

    async def workspace(self, entry: CachedRecord) -> Workspace:
        """The user's fields, to be committed with the turn that began with this entry."""
        if self._workspace is None:
            owner = self._session.owner or entry.fields.get(OWNER, b"").decode()
            if not owner:
                raise InvalidValue(f"{self._session.text[:200]}: has no user; give `user=` with the session")
            user = self._of(unescape(owner))
            found = await read_path.read(user.tiers, user.keys, fresh=True)
            if found.deleted:
                raise Deleted(f"{user.text[:200]}: deleted at version {found.version}", version=found.version)
            self._user = user
            self._workspace = Workspace(found, user.changes(), user.allow)
        return self._workspace

    def _of(self, id: str) -> RecordContext:
        actor = unescape(self._session.actor)
        user = RecordContext(self._session.store, Ref("user", id), user=id, actor=actor)
        user.allow("read", VERSION)
        return user

    def effect(self, request_id: str | None) -> Effect | None:
        """What the turn changes of its user."""
        changed = user_effects.changed(self._workspace) if self._workspace is not None else {}
        if self._user is None or self._workspace is None or not changed:
            return None
        mark = None if request_id is None else f"{request_id} {self._session.text}"
        version = self._workspace.entry.version
        return {"user": self._user.ref.id, "version": version, "mark": mark, "fields": changed}

    async def prepare(self, effect: Effect) -> Draft | None:
        """The change of the user's record, as the server would carry it out now; None if nothing is left to do."""
        assert self._user is not None and self._workspace is not None
        return await user_effects.prepare(self._user, self._workspace, effect, self._wait)

    async def apply(self, effect: Effect) -> None:
        """Change the user's record alone, for a turn that changes nothing of its own."""
        await user_effects.complete(self._of(effect["user"]), effect, self._wait)

    async def follow(self, effect: Effect, draft: Draft, version: int, request_id: str | None) -> None:
        """Apply what was prepared, behind a turn that is applied and must not seem to be refused any more."""
        try:
            await self._complete(effect, draft)
        except StateError as error:
            raise self._incomplete(effect, error, version, request_id) from error

    async def complete_earlier(self, effect: Effect, request_id: str | None, repeated: bool) -> None:
        """Whatever the slot's last request left out: this one again, or one that this one takes the place of."""
        try:
            await self._complete(effect, doubted=True)
        except StateError as error:
            if not repeated:
                raise
            raise self._incomplete(effect, error, 0, request_id) from error

    async def _complete(self, effect: Effect, draft: Draft | None = None, *, doubted: bool = False) -> None:
        """Apply what a request changes of its user, if that was not done yet, on what is there now."""
        wait = max(self._wait, self._session.store.settings.retry_for)
        await user_effects.complete(self._of(effect["user"]), effect, wait, draft=draft, doubted=doubted)

    def _incomplete(self, effect: Effect, error: StateError, version: int, request_id: str | None) -> DurabilityUnknown:
        """What it comes to if that fails: the turn itself is applied."""
        text = self._session.text[:200]
        user = Ref("user", effect["user"]).text[:200]
        rest = "it had no request id by which to complete it"
        if request_id is not None:
            rest = f"request {request_id!r:.80} has its outcome, and completes it when it is repeated"
        said = f"{text}: the turn is applied, but not what it changes of {user}: {error}; {rest}"
        return DurabilityUnknown(said, version=version, request_id=request_id)
