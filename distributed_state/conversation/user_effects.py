"""What a turn changes in its user's record, beside its own. Law: once for each request, on top of what others wrote.

The two records are two commits, the turn's first: one that is refused leaves its user alone. The other is prepared
before it and asked of the server, so that what it would be refused for stops the turn while nothing is written; after
it, it is completed with patience. The turn's carries what the other is to be, so that a repeated request completes what
a crash or somebody faster left out; the other remembers the request, so that it is never applied twice.

Design: section 13.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypedDict, TypeVar

from distributed_state.conversation import remembered_requests
from distributed_state.errors import Conflict, Deleted, DurabilityUnknown, Locked, WarmUnavailable
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records.context import RecordContext
from distributed_state.records.workspace import GONE, Workspace
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.values import bytes_as_text, codec
from distributed_state.values.model import REQUEST
from distributed_state.warm.answers import Draft

T = TypeVar("T")

Effects = dict[str, dict[str, Any]]
_TTL = 30.0
_IN_BASE64 = "_base64"


class Effect(TypedDict):
    """What a turn remembers of it: whose record, its version then, the name under which that remembers the request."""

    user: str
    version: int
    mark: str | None
    fields: Effects


def forgotten(effect: Effect, entry: CachedRecord, remembered: int) -> bool:
    """Whether this record may have been changed so already and remember it no more: too much came after.

    Then it is taken for changed: one commit follows the other at once, and a crash in between is the rare case.
    """
    if entry.version < effect["version"]:
        return True  # purged since
    marks = [(data, codec.decode_key(name)) for name, data in entry.fields.items() if name[:2] == REQUEST]
    return len(marks) >= remembered and all(entry.codec.decode(*mark)[0] > effect["version"] for mark in marks)


# In the user's record


async def prepare(user: RecordContext, view: Workspace, effect: Effect, wait: float) -> Draft | None:
    """The change of the user's record, as the server would carry it out now; None if there is nothing left to do.

    Raises what it would be refused for; LockTimeout if somebody else holds the record for longer than `wait` seconds.
    """
    draft = _draft(user, view, effect)

    async def once() -> None:
        nonlocal draft
        try:
            if draft is not None:
                await write_path.check(user.tiers, user.keys, draft)
        except Conflict:
            draft = _draft(user, _anew(user, await _entry(user), effect), effect)
            raise
        except DurabilityUnknown as error:
            # Of a write that would be true, but this is a question.
            raise WarmUnavailable(f"{user.text[:200]}: cannot be asked, nothing was written: {error}") from error

    await _when_free(user, wait, lambda: write_path.until_no_conflict(user.tiers, once))
    return draft


async def complete(
    user: RecordContext, effect: Effect, wait: float, *, draft: Draft | None = None, doubted: bool = False
) -> None:
    """Apply the effect on what is there now, if that was not done yet; `draft` is what was prepared.

    A user that was deleted meanwhile stays so. `doubted`: the effect is of an earlier turn.
    """

    async def once() -> None:
        nonlocal draft
        change = draft
        draft = None
        if change is None:
            entry = await _entry(user)
            if entry.deleted or (doubted and forgotten(effect, entry, user.store.settings.remembered_requests)):
                return
            change = _draft(user, _anew(user, entry, effect), effect)
        if change is not None:
            await write_path.commit(user.tiers, user.keys, change)

    with suppress(Deleted):
        await _when_free(user, wait, lambda: write_path.until_no_conflict(user.tiers, once))


async def _when_free(user: RecordContext, wait: float, work: Callable[[], Awaitable[T]]) -> T:
    """Do it; if somebody else holds the user's record, when it is our turn to."""
    try:
        return await work()
    except Locked:
        async with user.tiers.lock(user.keys, wait=wait, ttl=_TTL):
            return await work()


async def _entry(user: RecordContext) -> CachedRecord:
    return await read_path.read(user.tiers, user.keys, fresh=True)


def _anew(user: RecordContext, entry: CachedRecord, effect: Effect) -> Workspace:
    view = Workspace(entry, user.changes(), user.allow)
    apply(effect["fields"], view)
    return view


def _draft(user: RecordContext, view: Workspace, effect: Effect) -> Draft | None:
    """The commit of the user's record; None if this request has changed it already."""
    if effect["mark"] is not None:
        request = REQUEST + effect["mark"].encode("utf-8", "surrogatepass")
        if request in view.entry.fields:
            return None
        most = user.store.settings.remembered_requests
        remembered_requests.remember(most, view.changes, view.entry, request, [view.entry.version])
    draft = view.draft("turn")
    return None if draft is None else user.sign(draft)


# What becomes of fields


def changed(view: Workspace) -> Effects:
    """The fields that a view changes: what each was (`base`) and is to be (`mine`); a part is left out if absent."""
    found: Effects = {}
    for key, base, mine in view.differences():
        found[key] = {name: value for name, value in (("base", base), ("mine", mine)) if value is not GONE}
        for name, value in list(found[key].items()):
            if isinstance(value, bytes):  # all this is JSON, and the name of a part is ours
                del found[key][name]
                found[key][name + _IN_BASE64] = bytes_as_text.text_of(value)
    return found


def _parts(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The parts as `changed` found them."""
    plain = {name: value for name, value in stored.items() if not name.endswith(_IN_BASE64)}
    encoded = {name.removesuffix(_IN_BASE64): value for name, value in stored.items() if name not in plain}
    return bytes_as_text.together(plain, encoded)


def apply(effects: Effects, view: Workspace) -> None:
    """Make these changes on a newer state: numbers add up, objects merge, lists grow; else the later one is right."""
    for key, stored in effects.items():
        parts = _parts(stored)
        if "mine" not in parts:
            view.pop(key, None)
        elif key in view and view[key] != parts.get("base"):
            view[key] = added(parts.get("base"), view[key], parts["mine"])
        else:
            view[key] = parts["mine"]


def added(base: Any, theirs: Any, mine: Any) -> Any:
    """Both changes of one value, as far as there is a sum of them; else `mine`."""
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
            merged[key] = added(base.get(key), theirs[key], value) if key in theirs else value
    return merged


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
