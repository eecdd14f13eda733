"""The user of a turn: the user's fields, and the changes that the turn makes to them.

Law: the changes are applied once for each request, on top of later writes by others.

The session and its user are two records, so a turn makes two commits, the session's first: if that is refused, the user
is not changed. Before both, the user's commit is prepared and checked by the server, so that a reason to refuse it
stops the turn while nothing is written. It is applied after the session's commit, with retries. The turn's commit
stores the user's changes, so that a repeated request completes what a crash interrupted; the user's record stores the
request id, so that the changes are never applied twice.

Design: section 13.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypedDict, TypeVar

from distributed_state.conversation import request_log
from distributed_state.errors import (
    Conflict,
    Deleted,
    DurabilityUnknown,
    InvalidValue,
    Locked,
    StateError,
    WarmUnavailable,
)
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records.access import VERSION
from distributed_state.records.context import RecordContext
from distributed_state.records.transaction import GONE, Workspace
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.values import as_text, codec
from distributed_state.values.model import OWNER, REQUEST, Ref, unescape
from distributed_state.warm.answers import Draft
from distributed_state.warm.lease import AsyncLease

T = TypeVar("T")

Effects = dict[str, dict[str, Any]]
_TTL = 30.0
_IN_BASE64 = "_base64"


class Effect(TypedDict):
    """A turn's changes to its user, as the session stores them: the user, the user's version, the changes.

    `mark`: the name under which the user's record stores the request; None without a request id.
    """

    user: str
    version: int
    mark: str | None
    fields: Effects


def forgotten(effect: Effect, entry: CachedRecord, most: int) -> bool:
    """Whether the effect may have been applied although the user's record no longer stores the request.

    In that case it counts as applied: the user's commit follows the session's at once, so a crash in between is rare.
    """
    if entry.version < effect["version"]:
        return True  # the user's record was purged
    marks = [(data, codec.decode_key(name)) for name, data in entry.fields.items() if name[:2] == REQUEST]
    return len(marks) >= most and all(entry.codec.decode(*mark)[0] > effect["version"] for mark in marks)


# In the user's record


async def prepare(user: RecordContext, view: Workspace, effect: Effect, wait: float) -> Draft | None:
    """Prepare the commit of the user's record and let the server check it; None if it was applied before.

    Raises the server's refusal; LockTimeout if another owner holds the record for longer than `wait` seconds.
    """
    draft = _draft(user, view, effect)

    async def once() -> None:
        nonlocal draft
        try:
            if draft is not None:
                await write_path.check(user.tiers, user.keys, draft)
        except Conflict:
            draft = _draft(user, _reapplied(user, await _entry(user), effect), effect)
            raise
        except DurabilityUnknown as error:
            # A check writes nothing, so the outcome is certain.
            raise WarmUnavailable(f"{user.text[:200]}: cannot be checked, nothing was written: {error}") from error

    await _when_free(user, wait, lambda: write_path.until_no_conflict(user.tiers, once))
    return draft


async def complete(
    user: RecordContext, effect: Effect, wait: float, *, draft: Draft | None = None, doubted: bool = False
) -> None:
    """Apply the effect to the record's present state, unless it was applied before. `draft` is the result of `prepare`.

    A user that was deleted meanwhile stays deleted. `doubted`: the effect belongs to an earlier turn.
    """

    async def once() -> None:
        nonlocal draft
        change = draft
        draft = None
        if change is None:
            entry = await _entry(user)
            if entry.deleted or (doubted and forgotten(effect, entry, user.store.settings.remembered_requests)):
                return
            change = _draft(user, _reapplied(user, entry, effect), effect)
        if change is not None:
            await write_path.commit(user.tiers, user.keys, change)

    with suppress(Deleted):
        await _when_free(user, wait, lambda: write_path.until_no_conflict(user.tiers, once))


async def _when_free(user: RecordContext, wait: float, work: Callable[[], Awaitable[T]]) -> T:
    """Do the work; if another owner has locked the user's record, wait for the lock first."""
    try:
        return await work()
    except Locked:
        async with AsyncLease(user.tiers.leases, user.keys, wait=wait, ttl=_TTL):
            return await work()


async def _entry(user: RecordContext) -> CachedRecord:
    return await read_path.read(user.tiers, user.keys, fresh=True)


def _reapplied(user: RecordContext, entry: CachedRecord, effect: Effect) -> Workspace:
    view = Workspace(entry, user.changes(), user.allow)
    apply_changes(effect["fields"], view)
    return view


def _draft(user: RecordContext, view: Workspace, effect: Effect) -> Draft | None:
    """The commit of the user's record; None if this request has changed it already."""
    if effect["mark"] is not None:
        request = REQUEST + effect["mark"].encode("utf-8", "surrogatepass")
        if request in view.entry.fields:
            return None
        most = user.store.settings.remembered_requests
        request_log.add(most, view.changes, view.entry, request, [view.entry.version])
    draft = view.draft("turn")
    return None if draft is None else user.sign(draft)


# Changes of fields


def changes_of(view: Workspace) -> Effects:
    """The fields that a view changes: the old value (`base`) and the new one (`mine`); absent values are left out."""
    found: Effects = {}
    for key, base, mine in view.differences():
        found[key] = {name: value for name, value in (("base", base), ("mine", mine)) if value is not GONE}
        for name, value in list(found[key].items()):
            if isinstance(value, bytes):  # the effect must be JSON, and the names of parts are reserved
                del found[key][name]
                found[key][name + _IN_BASE64] = as_text.text_of(value)
    return found


def _parts(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that `changed` found."""
    plain = {name: value for name, value in stored.items() if not name.endswith(_IN_BASE64)}
    encoded = {name.removesuffix(_IN_BASE64): value for name, value in stored.items() if name not in plain}
    return as_text.together(plain, encoded)


def apply_changes(effects: Effects, view: Workspace) -> None:
    """Apply changes to a newer state: numbers are added, objects merged, lists extended; else the later value wins."""
    for key, stored in effects.items():
        parts = _parts(stored)
        if "mine" not in parts:
            view.pop(key, None)
        elif key in view and view[key] != parts.get("base"):
            view[key] = sum_of(parts.get("base"), view[key], parts["mine"])
        else:
            view[key] = parts["mine"]


def sum_of(base: Any, theirs: Any, mine: Any) -> Any:
    """Both changes of one value combined, where that is possible; else `mine`."""
    if _number(theirs) and _number(mine) and (base is None or _number(base)):
        return theirs + mine - (base or 0)
    if isinstance(theirs, list) and isinstance(mine, list):
        before = base if isinstance(base, list) else []
        return theirs + mine[len(before) :] if mine[: len(before)] == before else mine
    if isinstance(theirs, dict) and isinstance(mine, dict):
        return _merged(base if isinstance(base, dict) else {}, theirs, mine)
    return mine


def _merged(base: Mapping[str, Any], theirs: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    merged = {key: value for key, value in theirs.items() if key in mine or key not in base}
    for key, value in mine.items():
        if key not in base or value != base[key]:
            merged[key] = sum_of(base.get(key), theirs[key], value) if key in theirs else value
    return merged


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class TurnUser:
    """The record of a session's user, in a turn. `wait`: for its lock, in seconds."""

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
            user.refuse_deleted(found)
            self._user = user
            self._workspace = Workspace(found, user.changes(), user.allow)
        return self._workspace

    def _of(self, id: str) -> RecordContext:
        actor = unescape(self._session.actor)
        user = RecordContext(self._session.store, Ref("user", id), user=id, actor=actor)
        user.allow("read", VERSION)
        return user

    def effect(self, request_id: str | None) -> Effect | None:
        """The changes that this turn made to the user's record; None if it made none."""
        changed = changes_of(self._workspace) if self._workspace is not None else {}
        if self._user is None or self._workspace is None or not changed:
            return None
        mark = None if request_id is None else f"{request_id} {self._session.text}"
        version = self._workspace.entry.version
        return {"user": self._user.ref.id, "version": version, "mark": mark, "fields": changed}

    async def prepare(self, effect: Effect) -> Draft | None:
        """Make and check the commit of the user's record, before the turn's own commit: see `prepare`."""
        assert self._user is not None and self._workspace is not None
        return await prepare(self._user, self._workspace, effect, self._wait)

    async def apply(self, effect: Effect) -> None:
        """Change only the user's record, for a turn that does not change the session."""
        await complete(self._of(effect["user"]), effect, self._wait)

    async def follow(self, effect: Effect, draft: Draft, version: int, request_id: str | None) -> None:
        """Apply the prepared commit after the session's.

        A failure raises DurabilityUnknown, because the turn is applied.
        """
        try:
            await self._complete(effect, draft)
        except StateError as error:
            raise self._incomplete(effect, error, version, request_id) from error

    async def complete_earlier(self, effect: Effect, request_id: str | None, repeated: bool) -> None:
        """Apply the effect of the request that is stored in this turn's field, if a crash prevented it.

        The stored request is this one, or the one that this one replaces in a slot.
        """
        try:
            await self._complete(effect, doubted=True)
        except StateError as error:
            if not repeated:
                raise
            raise self._incomplete(effect, error, 0, request_id) from error

    async def _complete(self, effect: Effect, draft: Draft | None = None, *, doubted: bool = False) -> None:
        """Apply an effect to the user's present state, unless it was applied before."""
        wait = max(self._wait, self._session.store.settings.retry_for)
        await complete(self._of(effect["user"]), effect, wait, draft=draft, doubted=doubted)

    def _incomplete(self, effect: Effect, error: StateError, version: int, request_id: str | None) -> DurabilityUnknown:
        """The error for a turn whose session's change is applied while its change of the user's record is not."""
        text = self._session.text[:200]
        user = Ref("user", effect["user"]).text[:200]
        rest = "it had no request id by which to complete it"
        if request_id is not None:
            rest = f"request {request_id!r:.80} has its outcome, and completes it when it is repeated"
        why = f"{text}: the turn is applied, but not what it changes of {user}: {error}; {rest}"
        return DurabilityUnknown(why, version=version, request_id=request_id)
