"""The public asyncio API of records. Law: every method is one commit or one read; handles hold no state.

A handle does no I/O when it is made and may be shared by tasks and threads. All public methods of a record are here;
`context.py` and the modules beside it carry them out, on the write path (`tiers/commit.py`) and the read path
(`tiers/read.py`).

Design: sections 4, 6.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from distributed_state.errors import Conflict, InvalidValue
from distributed_state.hot.cached_record import MISSING, CachedRecord
from distributed_state.merge import Merge
from distributed_state.port.waited import bounded
from distributed_state.records import history, lifecycle, restoring
from distributed_state.records import items as item_handle
from distributed_state.records.access import MOVES, TAGS, VERSION
from distributed_state.records.context import RecordContext
from distributed_state.records.items import AsyncItems
from distributed_state.records.messages import Page
from distributed_state.records.transaction import AsyncTransaction, OptimisticRetry, Transaction, preconditions
from distributed_state.results import Change, Checkpoint, Snapshot, Written
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.changes import add
from distributed_state.tiers.durability import ensure_version
from distributed_state.values import codec
from distributed_state.values.items import DeleteItem, PutItem
from distributed_state.values.model import INITIALIZED, PHASE, Message, Ref
from distributed_state.values.search import tags_in
from distributed_state.warm.answers import Expectations
from distributed_state.warm.lease import AsyncLease

_EXACT = 10**15  # the server adds doubles, which are exact up to here
T = TypeVar("T")


@bounded("get", "has", "get_all", "view", "version", "exists", "tags")
class AsyncRecord:
    """A versioned map: the state of a user, an app, a task, or the fields of a session.

    Example::

        user = store.user("u1")
        await user.set("language", "nb")
        visits = await user.increment("visits")
        await user.update("seats", {"train": "window"})
        assert await user.get_all() == {"language": "nb", "visits": visits, "seats": {"train": "window"}}

    Keys are text, values any JSON values or `bytes`. Reads return copies. A write is one commit, and returns the
    record's new version unless it says otherwise. Any method may raise AccessDenied, WarmUnavailable or
    ColdUnavailable; writes raise Deleted on a deleted record, and Locked while another owner holds the record.
    """

    def __init__(self, context: RecordContext) -> None:
        self._context = context

    @property
    def ref(self) -> Ref:
        """The record's scope and id. It can be a key of a dict, as in `batch.versions`."""
        self._context.unused = False  # from now on other code may know the id and write
        return self._context.ref

    @property
    def id(self) -> str:
        """The record's id within its scope; for a new session, the generated id."""
        return self.ref.id

    @property
    def ephemeral(self) -> dict[str, Any]:
        """A dict in this process, shared by all handles of the record; it is never stored, and empty after an os.fork.

        The 10,000 most recently used dicts are kept.
        """
        return self._context.store.ephemeral.of(self._context.text)

    # Reading

    async def get(
        self, key: str, default: Any = None, *, fresh: bool = False, max_staleness: float | None = None
    ) -> Any:
        """Read one field, or `default` if it is not there.

        The value may come from hot, without I/O, and is then at most `max_staleness` seconds old: the store's setting,
        or a smaller value given here (a larger one is refused). `fresh=True` asks the server. Raises CorruptState if
        stored bytes cannot be read, WarmUnavailable or ColdUnavailable if a server is unavailable.
        """
        entry = await self._context.read(self._context.must_ask(fresh, max_staleness), key)
        return default if entry.deleted else self._context.value(entry, key, default)

    async def has(self, key: str, *, fresh: bool = False, max_staleness: float | None = None) -> bool:
        """Return whether a field exists. `fresh` and `max_staleness` as in `get`."""
        entry = await self._context.read(self._context.must_ask(fresh, max_staleness), key)
        return not entry.deleted and codec.encode_key(key) in entry.fields

    async def get_all(self, *, fresh: bool = False, max_staleness: float | None = None) -> dict[str, Any]:
        """Read all fields, as a new dict; {} for a record never written. Options as in `get`."""
        return self._context.fields(await self._context.read(self._context.must_ask(fresh, max_staleness)))

    async def view(self, *, fresh: bool = False, max_staleness: float | None = None) -> RecordView:
        """Read the record as it is at one moment, as a mapping that decodes a field when it is accessed.

        Example::

            view = await record.view()
            print(view.version, view.phase, view.get("city"), list(view))

        Only fields that are accessed are decoded, which saves time in a record with many fields; `get_all` decodes all.
        Options as in `get`.
        """
        entry = await self._context.read(self._context.must_ask(fresh, max_staleness))
        self._context.allow("read", VERSION, MOVES, TAGS, *_names(entry))  # everything that a view shows
        return RecordView(self._context, entry)

    async def version(
        self, *, fresh: bool = False, max_staleness: float | None = None, durability: str | None = None
    ) -> int:
        """Read the version: how many commits the record has had, 0 if it was never written. Options as in `get`.

        With `durability`, asks the server, and waits until that version has this level, as in `store.durable`; raises
        DurabilityUnknown if the level is not reached::

            await record.increment("paid", 10)  # if it raised DurabilityUnknown, it was applied: do not repeat it
            version = await record.version(durability="archived")  # SQL has it now
        """
        asks = self._context.must_ask(fresh or durability is not None, max_staleness)
        with self._context.durable(durability):
            entry = await self._context.read(asks, VERSION)
            if durability is not None and entry.version:
                await ensure_version(self._context.tiers, self._context.keys, entry.epoch, entry.version)
        return entry.version

    async def exists(self, *, fresh: bool = False, max_staleness: float | None = None) -> bool:
        """Return whether the record was written and not deleted since. Options as in `get`."""
        entry = await self._context.read(self._context.must_ask(fresh, max_staleness), VERSION)
        return entry.version > 0 and not entry.deleted

    async def tags(self, *, fresh: bool = False, max_staleness: float | None = None) -> dict[str, tuple[str, ...]]:
        """Read the tags, texts by key in order; {} without tags. Options as in `get`."""
        entry = await self._context.read(self._context.must_ask(fresh, max_staleness), TAGS)
        return tags_in(() if entry.deleted else entry.fields)

    def items(self, collection: str) -> AsyncItems:
        """Return a collection of items: many keyed values beside the fields, which are read one by one. No I/O."""
        return AsyncItems(self._context, collection)

    # Changing

    async def set(
        self,
        key: str,
        value: Any,
        *,
        ttl: float | None = None,
        expect: Mapping[str, Any] | None = None,
        expect_version: int | None = None,
        durability: str | None = None,
    ) -> int:
        """Set one field and return the record's new version.

        Example::

            version = await record.set("city", "Oslo")
            await record.set("city", "Bergen", expect_version=version)  # Conflict if another writer committed first
            await record.set("city", "Oslo", expect={"city": "Bergen"})  # Conflict if the city differs; see `write`
            await record.set("offer", {"price": 120}, ttl=900)  # for a quarter of an hour
            await record.set("paid", True, durability="archived")  # SQL has it when this returns

        `value` is any JSON value and comes back exactly as given, or `bytes`, which are stored as they are and cannot
        be inside a list or an object; else InvalidValue. One round trip. With `expect_version` the write is refused
        with Conflict unless the record is at that version (0: never written).

        `durability` is the level that this write must reach before it is acknowledged, as in `store.durable`. Here and
        in every method that takes it, DurabilityUnknown means that the write was applied and the level was not reached.

        With `ttl` the field expires after that many seconds by the server's clock, which this process knows to within a
        round trip. Every read and write then finds it absent, and a later commit by a process that has the record in
        hot deletes it. `increment`, `update`, `append_to` and changes in place keep the deadline; `set` replaces the
        value and drops it. `at` and `history` show the field as it was written.
        """
        changes = self._context.changes()
        if ttl is not None:
            await self._context.tiers.clock.know()
        changes.set(key, value, ttl=ttl)
        given = None if expect is None else preconditions(self._context, expect)
        draft = changes.draft("set", expected=expect_version, durability=durability)
        return (await (self._context if given is None else given).commit(draft)).version

    async def set_many(
        self,
        values: Mapping[str, Any],
        *,
        ttl: float | None = None,
        expect_version: int | None = None,
        durability: str | None = None,
    ) -> int:
        """Set several fields in one commit and return the new version. Options and errors as in `set`."""
        changes = self._context.changes()
        if ttl is not None:
            await self._context.tiers.clock.know()
        changes.set_many(values, ttl=ttl)
        draft = changes.draft("set", expected=expect_version, durability=durability)
        return (await self._context.commit(draft)).version

    async def delete(self, key: str, *, expect_version: int | None = None, durability: str | None = None) -> int:
        """Delete one field and return the new version. A missing field is not an error.

        With `expect_version`, raises Conflict and writes nothing if the record is at another version.
        """
        changes = self._context.changes()
        changes.delete(key)
        draft = changes.draft("delete", expected=expect_version, durability=durability)
        return (await self._context.commit(draft)).version

    async def clear(self, *, messages: bool = False, items: bool = False, durability: str | None = None) -> int:
        """Delete all fields, and messages and items if asked; return the new version. History stays."""
        changes = self._context.changes()
        changes.clear(messages=messages, items=items)
        changes.reserved(INITIALIZED, None)
        changes.emit("conversation.cleared", {"messages": messages})
        return (await self._context.commit(changes.draft("clear", durability=durability))).version

    async def update(self, key: str, values: Mapping[str, Any] | None = None, *, durability: str | None = None) -> int:
        """Merge `values` into the object stored at `key`, one level deep, and return the new version.

        To set several fields use `set_many`.

        Example::

            await record.update("seats", {"train": "window"})  # other entries of "seats" stay

        Creates the field if it is missing; raises InvalidValue if it holds anything but an object. Concurrent updates
        do not overwrite one another: this one is retried on top of the other's result.
        """
        given = codec.checked_merge(key, values)

        def merged(stored: Any) -> Any:
            if not isinstance(stored, dict):
                raise InvalidValue(f"{key!r}: holds a {type(stored).__name__}, not an object; set() replaces it")
            return {**stored, **given}

        with self._context.durable(durability):
            return (await self._context.swap(key, "update", {}, merged))[1].version

    async def append_to(self, key: str, *items: Any, durability: str | None = None) -> int:
        """Add items to the list stored at `key`, atomically, and return the new version. Creates the list.

        Raises InvalidValue if the field holds anything but a list.
        """

        def longer(stored: Any) -> Any:
            if not isinstance(stored, list):
                raise InvalidValue(f"{key!r}: holds a {type(stored).__name__}, not a list; set() replaces it")
            return [*stored, *items]

        with self._context.durable(durability):
            return (await self._context.swap(key, "append_to", [], longer))[1].version

    async def increment(self, key: str, by: int | float = 1, *, durability: str | None = None) -> int | float:
        """Add to a number, atomically, and return the sum. A missing field counts as 0.

        Whole numbers are added on the server; floats, very large integers and encrypted values are added here and
        swapped in. Either way the sum is the one that Python computes. Raises InvalidValue if the field does not hold a
        number.
        """
        context = self._context
        with context.durable(durability):
            codec.encode_key(key)
            if isinstance(by, bool) or not isinstance(by, (int, float)):
                raise InvalidValue(f"{key!r}: a {type(by).__name__} is not a number")
            if type(by) is int and abs(by) < _EXACT and context.server_adds(key):
                changes = context.changes()
                changes.increment(key, by)
                try:
                    done = await context.commit(changes.draft("increment"))
                    return (await write_path.sums(context.tiers, context.keys, done, [key]))[key]
                except Conflict:
                    pass  # the stored value is not a plain integer: add here and swap it in
            context.allow("read", key)
            data, _ = await context.swap(key, "increment", 0, lambda stored: add(stored, by, key))
            return context.codec.decode(data, key)  # type: ignore[no-any-return]  # it was encoded above

    async def write(
        self,
        *,
        set: Mapping[str, Any] | None = None,
        delete: Iterable[str] = (),
        increment: Mapping[str, int] | None = None,
        append: Iterable[Message | dict[str, Any]] = (),
        phase: str | None = None,
        items: Iterable[PutItem | DeleteItem] = (),
        tag: Mapping[str, str | Iterable[str]] | None = None,
        untag: Mapping[str, str | Iterable[str]] | None = None,
        expect: Mapping[str, Any] | None = None,
        expect_exists: bool | None = None,
        expect_version: int | None = None,
        expect_phase: str | None = None,
        revive: bool = False,
        durability: str | None = None,
    ) -> Written:
        """Change fields, counters, messages, items, phase and tags in one atomic commit of one round trip.

        Example::

            written = await session.write(
                set={"city": "Oslo"}, increment={"questions": 1}, append=[{"role": "user", "content": "And Bergen?"}]
            )
            print(written.version, written.results["questions"])

        Returns the new version, the sums, and the number of the first message that was added. `increment` takes whole
        numbers of at most 15 digits, `items` `PutItem` and `DeleteItem` values, `phase` at most 200 characters.
        `expect_version` and `expect_phase` raise Conflict, and nothing is written, if the record's version or phase
        differs. `expect` maps fields to a value, ABSENT or PRESENT, and raises Conflict if a field differs.
        `expect_exists` requires that the record was written before (True), or was not (False)::

            await session.write(set={"owner": "w1"}, expect={"owner": ABSENT})

        Values are compared as JSON: numbers by value, objects in any order. An expired field is absent. This needs an
        extra round trip only if this process cannot predict how the value is stored.

        `tag` adds tags, by which `store.sessions` finds records, and `untag` removes them: one or several texts under a
        key, of at most 64 bytes for the key and 256 for a text; a record has at most 256, else TooLarge. Tags are not
        encrypted::

            await session.write(set={"city": "Oslo"}, tag={"run": ["r1", "r2"], "model": "small"}, untag={"run": "r0"})

        One commit changes at most 10,000 fields, messages and tags, and 1,000 items; more raise TooLarge before
        anything is sent.

        With `revive` a deleted record starts again with these changes, else Deleted is raised; its version continues
        to count, and it keeps its owner. It has no effect on a live record.
        """
        codec.check_containers(
            {"set": set, "increment": increment, "tag": tag, "untag": untag, "expect": expect},
            {"delete": delete, "append": append, "items": items},
        )
        changes = self._context.changes()
        for key in delete:
            changes.delete(key)
        changes.set_many(set or {})
        for key, by in (increment or {}).items():
            changes.increment(key, by)
        for message in append:
            changes.append(message)
        if phase is not None:
            changes.phase(phase)
        changes.put_tags(tag or {}, untag or {})
        await item_handle.add(self._context, changes, items)
        given = preconditions(self._context, expect, expect_exists)
        expectations: Expectations = ()
        if expect_phase is not None:
            if not isinstance(expect_phase, str):
                raise InvalidValue(f"expect_phase is a str, not {expect_phase!r}")
            self._context.allow("read", MOVES)  # a refusal would reveal the phase
            expectations = [(PHASE, expect_phase.encode("utf-8", "surrogatepass"))]
        if revive:
            changes.undelete()
        draft = changes.draft(
            "write", expected=expect_version, deleted="begin" if revive else "refuse", expectations=expectations,
            durability=durability,
        )  # fmt: skip
        done = await (self._context if given is None else given).commit(draft)
        tiers = self._context.tiers
        sums = await write_path.sums(tiers, self._context.keys, done, changes.sums) if increment else {}
        return Written(done.version, sums, done.added)

    async def create(self, values: Mapping[str, Any] | None = None, *, is_clear: bool = False) -> int:
        """Start the record, with these fields, and return its version. Raises Conflict if it exists.

        A deleted record starts again with these fields; its version continues to count. `is_clear` is part of the event
        `conversation.created` that hooks get: a client cleared a conversation that did not exist.
        """
        changes = self._context.changes()
        changes.set_many(values or {})
        return (await self._context.commit(lifecycle.creation(self._context, changes, is_clear))).version

    def transaction(self, *, durability: str | None = None) -> AsyncTransaction:
        """Open a view whose changes are committed together at the end of `async with`; after an error nothing is.

        Example::

            async with record.transaction() as view:
                view["seats"] = view.get("seats", 0) + 1

        Raises Conflict at the end if the record changed meanwhile; `apply` retries instead.
        """
        return AsyncTransaction(self._context, durability)

    async def apply(
        self, change: Callable[[Transaction], T | Awaitable[T]], *, merge: Mapping[str, Merge] | None = None
    ) -> T:
        """Run `change(transaction)`, commit, and return its result; on a conflict, retry on the newest state.

        Example::

            def book(view):
                view["seats"] = view.get("seats", 0) + 1
                return view["seats"]

            seats = await record.apply(book)

        `change` may run several times. Raises Conflict after `conflict_retries` attempts.

        With `merge`, policies by field as in `distributed_state.merge`, a conflict is first resolved by merging: a
        field that only one side changed keeps that change, a field that both changed is merged by its policy, and new
        messages follow those of others. `change` runs again only if a merge is impossible: for a field without a
        policy, a field that one side deleted, or a changed phase. Fields that `change` only read are not checked again.
        """
        retry = OptimisticRetry(self._context, change, merge)
        return await write_path.until_no_conflict(self._context.tiers, retry.once)

    def lock(
        self, *, wait: float = 5.0, ttl: float = 30.0, advisory: bool = False, take_over: int | None = None
    ) -> AsyncLease:
        """Lock the record inside `async with`, or raise LockTimeout after `wait` seconds.

        Example::

            async with record.lock(wait=5.0) as lease:
                await record.set("seat", "12A")

        The lease is renewed until it is released or its body, thread or task has ended. It expires `ttl` seconds after
        its process died. Writes inside carry the fencing token; once the lease is lost they raise Fenced, and the body
        is cancelled. Others' writes raise Locked; with `advisory=True` they pass, and only locks exclude each other.
        Waiters are served in order. The task that holds the lock may nest it. `take_over`, the token of a lease (see
        `store.admin.leases`), takes the lock from its holder, before all waiters: the holder's later writes are
        refused. That needs the right `admin`.
        """
        self._context.allow("lock", None)
        if take_over is not None:
            self._context.allow("admin", None)
        leases = self._context.tiers.leases
        return AsyncLease(leases, self._context.keys, wait=wait, ttl=ttl, advisory=advisory, take_over=take_over)

    async def initialize(
        self, defaults: Mapping[str, Any] | Callable[[], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]
    ) -> bool:
        """Set the missing fields, once for each record; return True if this call set them.

        Example::

            await record.initialize({"notes": [], "language": "en"})

        One atomic commit: one of many replicas succeeds, and existing values are not overwritten. `defaults` may be a
        function, called only if the record is not initialized yet. `clear()` allows it to be initialized again.
        """
        return await lifecycle.initialize(self._context, defaults)

    async def export_state(self, *, messages: bool = False) -> dict[str, Any]:
        """Read fields, phase and, if asked, all messages as one JSON object, for `restore_state`.

        It holds `fields` and `phase`; if there are any, `bytes` (the fields that are bytes, in base64) and `expires`
        (deadlines of fields in seconds since 1970); and `messages` if asked.
        """
        return await restoring.export_state(self._context, messages=messages)

    async def restore_state(self, state: Mapping[str, Any]) -> int:
        """Replace fields, and phase and messages if `state` holds them, in one commit; return the new version.

        `state` is the result of `export_state`, or, without an entry `fields`, that of `get_all`, which has no
        deadlines. Everything is checked first: InvalidValue names every entry that cannot be stored, and then nothing
        is written.
        """
        return await restoring.restore_state(self._context, state)

    # The past

    async def history(
        self, *, after: int = 0, before: int | None = None, limit: int | None = None, branch: str | None = None
    ) -> list[Change]:
        """Read the changes between two versions (exclusive), oldest first: who, when, what.

        Example::

            for change in await record.history(after=10, limit=100):
                print(change.version, change.time, change.actor, change.kind, change.set)

        Waits until they are archived; raises ColdUnavailable rather than returning fewer. With the id of a `branch`
        returns that branch's changes; NotFound if it does not exist.
        """
        return await history.history(self._context, after, before, limit, branch)

    async def at(self, *, version: int | None = None, branch: str | None = None) -> Snapshot:
        """Read the record at a version, with messages and phase. Raises NotFound if it never existed or was purged.

        With the id of a `branch` reads a state of that branch: at one of its own versions, or without `version` the
        last state that can be rebuilt. If versions of the branch are `missing`, that is the last version before the
        missing ones; the state of later commits cannot be rebuilt, but they are still in `history(branch=)`.
        """
        return await history.at(self._context, version, branch)

    async def checkpoint(self, label: str) -> int:
        """Name the present state and return its version; `rollback(label=...)` restores it.

        A name is text of 1 to 500 characters, else InvalidValue; `rollback` uses the last checkpoint of a name.
        """
        changes = self._context.changes()
        changes.label(label)
        changes.emit("session.checkpoint", {"label": label})
        return (await self._context.commit(changes.draft("checkpoint"))).version

    async def checkpoints(
        self,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        order: Literal["asc", "desc"] = "asc",
    ) -> list[Checkpoint]:
        """Read the named versions between two versions (exclusive), oldest first; at most `limit`.

        Raises ColdUnavailable rather than returning fewer.
        """
        return await history.checkpoints(self._context, Page(limit=limit, before=before, after=after, order=order))

    async def rollback(
        self,
        *,
        steps: int | None = None,
        label: str | None = None,
        version: int | None = None,
        checkpoints: int | None = None,
    ) -> int:
        """Restore an earlier state and return the new version: one step back, or what one of the arguments names.

        `steps` back, the last checkpoint with this `label`, the last checkpoint of any name (`checkpoints=1`; 2 is the
        one before it), or a `version`.

        Example::

            await record.set("city", "Oslo")
            await record.checkpoint("before the booking")
            await record.set("city", "Bergen")
            await record.rollback(label="before the booking")

        A new commit restores fields, messages and phase; history is not rewritten. A deleted record is revived. A step
        is a commit that changed any of these, including a deletion. Rollbacks and checkpoints are not steps, so
        repeated rollbacks of one step go 3 -> 2 -> 1. A rollback itself is undone by `version`. Answered requests stay
        answered: the same request is not applied again, so a caller that wants it applied again gives it another id.
        Raises NotFound if there are fewer steps or checkpoints, Deleted if the record was deleted in the target state.
        """
        return await restoring.rollback(self._context, restoring.Target(steps, label, version, checkpoints))

    async def fork(self, new_id: str, *, version: int | None = None, branch: str | None = None) -> int:
        """Start another record, of the same scope and owner, from this one's state at `version` (default: now).

        Messages are shared, not copied. Returns the new record's version; Conflict or Deleted if the id was used.
        With the id of a `branch` it starts from that branch's state, as `at` reads it; the branch stays. Requests that
        were answered in that state are answered in the fork too; later ones are not.
        """
        return await restoring.fork(self._context, new_id, version, branch)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._context.text[:200]}>"


class RecordView(Mapping[str, Any]):
    """The fields of a record as they were at `version`, as a mapping. Reads return copies.

    A field is decoded when it is read: CorruptState and DecryptionFailed are raised there. A record that was deleted
    or never written shows no fields.
    """

    def __init__(self, context: RecordContext, entry: CachedRecord) -> None:
        self._context = context
        self._entry = entry

    @property
    def version(self) -> int:
        """The number of commits of the record at that moment, 0 if it was never written."""
        return self._entry.version

    @property
    def exists(self) -> bool:
        """Whether the record was written by then and not deleted since."""
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


def _names(entry: CachedRecord) -> list[str]:
    return [] if entry.deleted else [codec.decode_key(name) for name in entry.fields if name[:1] != b"#"]
