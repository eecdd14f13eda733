"""A record's life: its beginning, its past, backup, cleanup. Law: what depends on what was read holds only for that."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from distributed_state.errors import Conflict, InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records import backup, erasure, history, transaction
from distributed_state.records.access import MESSAGES, MOVES, VERSION, Action
from distributed_state.records.home import StoreContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.values import message_ranges
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import INITIALIZED, Ref, escape
from distributed_state.values.results import Change, Checkpoint, Snapshot
from distributed_state.warm.answers import Committed, Draft


class Handle(transaction.Handle, Protocol):
    """What a record is to those who build on it."""

    _home: StoreContext
    _names: RecordKeys
    _actor: str
    _lifetime: tuple[int, int]

    @property
    def ref(self) -> Ref:
        """What the record is called."""
        ...

    def _allow(self, action: Action, *fields: str | None, ref: Ref | None = None) -> None: ...
    def _allow_steps(self, draft: Draft, ref: Ref | None = None) -> None: ...
    def _fields(self, entry: CachedRecord) -> dict[str, Any]: ...
    async def _commit(self, draft: Draft, expect_version: int | None = None) -> Committed: ...


class AsyncLifecycle(Handle):
    """What a record can do besides being read and changed."""

    async def initialize(
        self, defaults: Mapping[str, Any] | Callable[[], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]
    ) -> bool:
        """Set the fields that are not there yet, once in the record's life; True if this call did it.

        Example::

            await record.initialize({"notes": [], "language": "en"})

        One atomic commit: of many replicas one does it, and nothing that was set is overwritten. `defaults` may be a
        function, called only while that is still to be done. After `clear()` it is to be done again.
        """
        return await self.initialize_for("1", defaults)

    async def initialize_for(
        self, owner: str, defaults: Mapping[str, Any] | Callable[[], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]
    ) -> bool:
        """As `initialize`, once for each owner of defaults: several agents may have some for the same conversation."""
        mark = escape(owner).encode()
        values: Mapping[str, Any] | None = None
        entry = await self._entry()

        async def once() -> bool:
            nonlocal values, entry
            done = entry.fields[INITIALIZED].split(b"\n") if INITIALIZED in entry.fields else []
            if mark in done and not entry.deleted:
                return False
            if values is None:
                found = defaults() if callable(defaults) else defaults
                values = await found if inspect.isawaitable(found) else found
            changes = self._changes()
            changes.set_many(values)
            for name in changes.fields.keys() & entry.fields.keys():
                changes.leave(name)
            changes.reserved(INITIALIZED, b"\n".join([*done, mark]))
            draft = changes.draft("initialize")
            draft.expected = entry.version
            draft.epoch = entry.epoch
            try:
                await self._commit(draft)
            except Conflict:
                entry = await self._entry(fresh=True)
                raise
            return True

        return await write_path.until_no_conflict(self._home.tiers(), once)

    async def export_state(self, *, messages: bool = False) -> dict[str, Any]:
        """Read fields, phase and, if asked, all messages as one JSON object, for `restore_state`.

        It holds `fields`, `phase`, `expires` (times in seconds since 1970) if a field has a deadline, `messages`.
        """
        self._allow("read", MOVES, *([MESSAGES] if messages else []))
        entry = await self._entry(fresh=True)
        tiers = self._home.tiers()
        if not messages:
            return backup.export(entry, self._fields(entry), None)
        # One look at the record for both: a later one might show another conversation.
        entry = await read_path.load_whole(tiers, self._names, entry)
        runs = message_ranges.segments(self._names.ref.text, entry.fields)
        shown = await history.visible(tiers, self._names, entry, runs)
        return backup.export(entry, self._fields(entry), shown)

    async def restore_state(self, state: Mapping[str, Any]) -> int:
        """Replace fields, and phase and messages if `state` holds them, in one commit; return the new version.

        `state` is what `export_state` returned, or, without an entry `fields`, what `get_all` did, which has no
        deadlines. Everything is checked first: InvalidValue names every entry that cannot be stored, and then nothing
        is.
        """
        self._allow("write", None)
        changes = self._changes()
        clock = self._home.tiers().clock
        await clock.know()
        backup.restore(changes, state, clock.now())
        return (await self._commit(changes.draft("restore"))).version

    async def cleanup(self, *, days: float) -> int:
        """Hide the messages that were committed more than `days` days ago; return how many.

        One commit, of a size that does not depend on the messages. The server's time of each commit counts, not
        what a message says; history keeps the messages until `purge`. Where `purge`, or `erase` of the record that
        messages were forked from, came first and left no commit of that age, nothing is known to be older, and nothing
        is hidden.
        """
        if isinstance(days, bool) or not isinstance(days, (int, float)) or not 0 <= days < 1e6:
            raise InvalidValue(f"days is a number from 0 on, not {days!r:.80}")
        self._allow("write", MESSAGES)
        tiers = self._home.tiers()
        await tiers.clock.know()
        before = tiers.clock.now() - days * 86400

        async def once() -> int:
            draft, hidden = await history.cleanup(tiers, self._names, self._changes(), before)
            if draft is not None:
                await self._commit(draft)
            return hidden

        return await write_path.until_no_conflict(tiers, once)

    async def erase(self) -> bool:
        """Remove the record for good: fields, messages, history, events, in every tier; False if there was nothing.

        Forks stay, and keep what they share with it. Its versions are not used again; that the conversation is
        deleted stays in Redis for replicas that are away, for `events_for` seconds. Raises Locked while somebody else
        holds it. Once begun it is carried through by any replica that archives, even if this raises; called again it
        goes on. A fork that was on its way meanwhile may go as well.
        """
        self._allow("admin", None)
        return await erasure.erase(self._home.tiers(), self._names, self._home.deleting)

    # The past

    async def history(self, *, after: int = 0, before: int | None = None, limit: int | None = None) -> list[Change]:
        """Read the changes between two versions (exclusive), oldest first: who, when, what.

        Example::

            for change in await record.history(after=10, limit=100):
                print(change.version, change.time, change.actor, change.kind, change.set)

        Waits until they are archived; raises ColdUnavailable rather than returning fewer.
        """
        self._allow("read", None)
        changes = await history.history(self._home.tiers(), self._names, after, before, limit)
        self._allow("read", *history.told(changes))
        return changes

    async def at(self, *, version: int) -> Snapshot:
        """Read the record as it was at a version, with messages and phase. Raises NotFound if it is none or purged."""
        self._allow("read", None)
        snapshot = await history.at(self._home.tiers(), self._names, version)
        self._allow("read", *snapshot.fields, MESSAGES, MOVES)
        return snapshot

    async def checkpoint(self, label: str) -> int:
        """Name the present state and return the version that carries the name; `rollback(label=...)` comes back to it.

        A name is text of 1 to 500 characters, else InvalidValue; the last checkpoint of a name counts.
        """
        changes = self._changes()
        changes.label(label)
        changes.emit("session.checkpoint", {"label": label})
        return (await self._commit(changes.draft("checkpoint"))).version

    async def checkpoints(self) -> list[Checkpoint]:
        """Read the named versions, oldest first. Raises ColdUnavailable rather than returning fewer."""
        self._allow("read", VERSION)
        return await history.checkpoints(self._home.tiers(), self._names)

    async def rollback(self, *, steps: int | None = None, label: str | None = None, version: int | None = None) -> int:
        """Make the record what it was `steps` states ago, at a checkpoint or at a version; return the new version.

        Example::

            await record.set("city", "Oslo")
            await record.checkpoint("before the booking")
            await record.set("city", "Bergen")
            await record.rollback(label="before the booking")

        Fields, messages and phase come back by a new commit; history is not rewritten. Brings a deleted record back.
        A step is a commit that changed something of these, a deletion included: one after another, rollbacks of one
        step go 3 -> 2 -> 1, for a rollback is a new version, but no step, nor is a checkpoint. What a rollback took
        away comes back by `version`. Raises NotFound if there are not so many, Deleted where the record was deleted.
        """
        self._allow("write", None)

        async def once() -> int:
            draft = await history.rollback(self._home.tiers(), self._names, self._changes(), steps, label, version)
            return (await self._commit(draft)).version

        return await write_path.until_no_conflict(self._home.tiers(), once)

    async def fork(self, new_id: str, *, version: int | None = None) -> int:
        """Start another record, of the same scope and owner, from this one's state at `version` (default: now).

        Messages are shared, not copied. Returns the new record's version; Conflict or Deleted if the id was used.
        """
        tiers = self._home.tiers()
        target = self._home.keys.of(Ref(self.ref.scope, new_id))
        self._allow("read", None)
        self._allow("write", None, ref=target.ref)
        draft = await history.fork(tiers, self._names, target, self._changes(), version)
        self._allow("read", *history.copied(draft))
        self._allow_steps(draft, target.ref)
        draft.actor = self._actor
        draft.lifetime = self._lifetime
        return (await write_path.commit(tiers, target, draft)).version
