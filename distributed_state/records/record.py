"""Records as a user meets them, asyncio face. Law: every method is one commit or one read; handles hold no state.

A handle does no I/O when it is made and may be shared by tasks and threads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar, Unpack

from distributed_state.errors import Conflict, CorruptState, InvalidValue
from distributed_state.hot.cached_record import MISSING, CachedRecord
from distributed_state.records.access import MOVES, VERSION, Action, written
from distributed_state.records.home import StoreContext
from distributed_state.records.lifecycle import AsyncLifecycle
from distributed_state.records.optimistic_retry import OptimisticRetry
from distributed_state.records.sanitizing import Sanitizing, sanitizer
from distributed_state.records.transaction import AsyncTransaction, Transaction
from distributed_state.tiers import actors
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.changes import Changes, add
from distributed_state.values import codec, field_ttl
from distributed_state.values.merge import Merge
from distributed_state.values.model import INITIALIZED, OWNER, PHASE, Message, Ref, escape
from distributed_state.values.results import Written
from distributed_state.warm.answers import Committed, Draft
from distributed_state.warm.lease import AsyncLease

T = TypeVar("T")


class AsyncRecord(AsyncLifecycle):
    """A versioned map: the state of a user, an app, a task, or the fields of a session.

    Example::

        user = store.user("u1")
        await user.set("language", "nb")
        visits = await user.increment("visits")
        await user.update("seats", {"train": "window"})
        assert await user.get_all() == {"language": "nb", "visits": visits, "seats": {"train": "window"}}

    Keys are text, values any JSON values; what is read is the caller's own. A write is one commit, and returns the
    record's new version unless it says otherwise. Any method may raise AccessDenied, Deleted on a deleted record if it
    writes, Locked if it writes while somebody else holds the record, and WarmUnavailable or ColdUnavailable.
    """

    def __init__(
        self,
        home: StoreContext,
        ref: Ref,
        *,
        user: str | None = None,
        actor: str = "",
        fresh: bool = False,
        lifetime: tuple[int, int] = (0, 0),
        **options: Unpack[Sanitizing],
    ) -> None:
        self._ref = ref
        self._fresh = fresh
        self._lifetime = lifetime
        # Given the error, the field's name and the default, it returns what stands for a field that cannot be read.
        self.unreadable: Callable[[CorruptState, str, Any], Any] | None = None
        self._home = home
        self._names = home.keys.of(ref)
        self._text = ref.text
        self._owner = "" if user is None else escape(Ref("user", user).id)
        self._actor = actors.noted(actor)
        chosen = sanitizer(options, home.clean, home.clean_messages)
        self._prepare = chosen.field if chosen else None
        self._prepare_message = chosen.message if chosen else None

    @property
    def ref(self) -> Ref:
        """What the record is called: its scope and id. It can be a key of a dict, as in `batch.versions`."""
        self._fresh = False  # whoever knows the id may write under it
        return self._ref

    @property
    def id(self) -> str:
        """The record's id within its scope; for a new session the one that was generated."""
        return self.ref.id

    @property
    def ephemeral(self) -> dict[str, Any]:
        """A dict of this process alone, shared by all handles of the record; never stored, empty after a fork.

        Kept for the 10,000 records that used it last.
        """
        return self._home.ephemeral.of(self._text)

    def _allow(self, action: Action, *fields: str | None, ref: Ref | None = None) -> None:
        """Ask the store's policy, if it has one, for each of these. Raises AccessDenied."""
        if self._home.guard is not None:
            actor = self._actor or actors.present()
            for each in fields:
                self._home.guard.ask(action, ref or self._ref, each, actor=actor, user=self._owner)

    def _allow_steps(self, draft: Draft, ref: Ref | None = None) -> None:
        for action, each in written(draft.steps) if self._home.guard is not None else ():
            self._allow(action, each, ref=ref)

    # Reading

    def _shortcut(self) -> Callable[[str], Any]:
        """How the blocking face may look into hot: not at all where a policy has to be asked first."""
        return self._peek if self._home.guard is None else lambda key: MISSING

    def _peek(self, key: str) -> Any:
        """The field if hot knows it, else MISSING. No I/O."""
        hot = self._home.tiers().hot
        entry = hot.entries.get(self._text)
        if entry is None or hot.clock() >= hot.good_until:
            return MISSING
        entry.used = True
        hot.hits += 1
        try:
            value = entry.values.get(key, MISSING)
        except TypeError:
            value = MISSING  # not even hashable: refused below
        if value is MISSING and not entry.deleted and entry.expires == field_ttl.NEVER:
            try:
                return entry.value(key, MISSING)
            except CorruptState:
                return MISSING  # met again below
        return value

    async def _entry(self, fresh: bool = False, field: str | None = None) -> CachedRecord:
        """The record, for one who wants to read this field of it; None: all of it."""
        self._allow("read", field)
        return await read_path.read(self._home.tiers(), self._names, fresh=fresh)

    def _asks(self, fresh: bool, max_staleness: float | None) -> bool:
        """Whether a read must ask the server, whatever hot holds."""
        return fresh if max_staleness is None else not self._home.tiers().within(max_staleness) or fresh

    async def get(
        self, key: str, default: Any = None, *, fresh: bool = False, max_staleness: float | None = None
    ) -> Any:
        """Read one field, or `default` if it is not there.

        Hot answers without I/O, at most `max_staleness` seconds old: the store's setting, or less if given here (more
        is refused).
        `fresh=True` asks the server. Raises CorruptState if stored bytes cannot be read, WarmUnavailable or
        ColdUnavailable if a server is away.
        """
        entry = await self._entry(self._asks(fresh, max_staleness), key)
        return default if entry.deleted else self._value(entry, key, default)

    def _value(self, entry: CachedRecord, key: str, default: Any) -> Any:
        try:
            return entry.value(key, default)
        except CorruptState as error:
            if self.unreadable is None:
                raise
            return self.unreadable(error, key, default)

    async def has(self, key: str, *, fresh: bool = False, max_staleness: float | None = None) -> bool:
        """Tell whether a field is there. `fresh` and `max_staleness` as in `get`."""
        entry = await self._entry(self._asks(fresh, max_staleness), key)
        return not entry.deleted and codec.encode_key(key) in entry.fields

    async def get_all(self, *, fresh: bool = False, max_staleness: float | None = None) -> dict[str, Any]:
        """Read all fields, as a dict of the caller's own; {} for a record never written. Options as in `get`."""
        return self._fields(await self._entry(self._asks(fresh, max_staleness)))

    def _fields(self, entry: CachedRecord) -> dict[str, Any]:
        fields = {} if entry.deleted else entry.all() if self.unreadable is None else self._each(entry)
        self._allow("read", *fields)
        return fields

    def _each(self, entry: CachedRecord) -> dict[str, Any]:
        """Every field of the user's, those that cannot be read as `unreadable` has them."""
        names = [codec.decode_key(name) for name in entry.fields if name[:1] != b"#"]
        return {name: self._value(entry, name, None) for name in names}

    async def version(self, *, fresh: bool = False, max_staleness: float | None = None) -> int:
        """Read the version: how many commits the record has had, 0 if it was never written. Options as in `get`."""
        return (await self._entry(self._asks(fresh, max_staleness), VERSION)).version

    async def exists(self, *, fresh: bool = False, max_staleness: float | None = None) -> bool:
        """Tell whether the record was written and not deleted since. Options as in `get`."""
        entry = await self._entry(self._asks(fresh, max_staleness), VERSION)
        return entry.version > 0 and not entry.deleted

    def invalidate(self, key: str | None = None) -> None:
        """Drop this process's copy, so that the next read asks the server. No I/O.

        A copy holds the record whole: with `key` it goes as well, and with it every other field.
        """
        if key is not None:
            codec.encode_key(key)
        self._home.tiers().hot.forget(self._text)

    # Changing

    def _changes(self) -> Changes:
        """Every change made through this handle begins here."""
        record_codec = self._home.codec_of(self._text)
        return Changes(self._home.settings, record_codec, self._prepare, self._prepare_message, self._now)

    def _now(self) -> float:
        return self._home.tiers().clock.now()

    def _sign(self, draft: Draft) -> Draft:
        """Say whose record it is, who writes, and whether it is surely new; raises AccessDenied if that may not be."""
        self._allow_steps(draft)
        self._own(draft)
        if self._fresh:
            # The id was generated here, so the first write need not ask SQL. Only one write ever says so.
            self._fresh = False
            draft.creation = "*"
        return draft

    def _own(self, draft: Draft) -> Draft:
        draft.owner = self._owner
        draft.actor = self._actor
        draft.lifetime = self._lifetime
        return draft

    async def _commit(self, draft: Draft, expect_version: int | None = None) -> Committed:
        self._sign(draft)
        if expect_version is not None:
            if type(expect_version) is not int or expect_version < 0:
                raise InvalidValue(f"expect_version is an int from 0 on, not {expect_version!r}")
            draft.expected = expect_version
        return await self._send(draft)

    async def _send(self, draft: Draft) -> Committed:
        return await write_path.commit_and_sweep(self._home.tiers(), self._names, draft)

    def _attempt(self, draft: Draft) -> Draft:
        """The change as it goes into a batch; if it is another one and meets a Conflict, `_send` repeats it."""
        return draft

    async def _ready(self, entry: CachedRecord) -> CachedRecord:
        """What a turn begins with, when it holds the record and read this."""
        return entry

    def _stamp(self, draft: Draft, entry: CachedRecord) -> Draft:
        """The change as it ends a turn, which began with this and held the record since."""
        return draft

    def _counts(self, key: str) -> bool:
        """Whether whole numbers are added to this field on the server."""
        return not self._home.codec_of(self._text).covers(key)

    async def set(self, key: str, value: Any, *, ttl: float | None = None, expect_version: int | None = None) -> int:
        """Set one field and return the record's new version.

        Example::

            version = await record.set("city", "Oslo")
            await record.set("city", "Bergen", expect_version=version)  # Conflict if somebody was faster
            await record.set("offer", {"price": 120}, ttl=900)  # for a quarter of an hour

        `value` is any JSON value and comes back exactly as given; else InvalidValue. One round trip. With
        `expect_version` the write is refused with Conflict unless the record is at that version (0: never written).

        With `ttl` it is there for that many seconds by the server's clock, known to this process within a round trip;
        then every read and write finds it absent, and it goes with a later commit of a process that has the record
        hot. `increment`, `update`, `append_to` and changes in place keep the deadline, `set` makes a new value. `at`
        and `history` show it as it was written.
        """
        changes = self._changes()
        if ttl is not None:
            await self._home.tiers().clock.know()
        changes.set(key, value, ttl=ttl)
        return (await self._commit(changes.draft("set"), expect_version)).version

    async def set_many(
        self, values: Mapping[str, Any], *, ttl: float | None = None, expect_version: int | None = None
    ) -> int:
        """Set several fields in one commit and return the new version. Options and errors as in `set`."""
        changes = self._changes()
        if ttl is not None:
            await self._home.tiers().clock.know()
        changes.set_many(values, ttl=ttl)
        return (await self._commit(changes.draft("set"), expect_version)).version

    async def delete(self, key: str, *, expect_version: int | None = None) -> int:
        """Delete one field and return the new version. A field that is not there is no error.

        With `expect_version` Conflict, and nothing is written, if the record is at another version.
        """
        changes = self._changes()
        changes.delete(key)
        return (await self._commit(changes.draft("delete"), expect_version)).version

    async def clear(self, *, messages: bool = False) -> int:
        """Delete all fields, and the conversation's messages if asked; return the new version. History stays."""
        changes = self._changes()
        changes.clear(messages=messages)
        changes.reserved(INITIALIZED, None)
        changes.emit("conversation.cleared", {"messages": messages})
        return (await self._commit(changes.draft("clear"))).version

    async def update(self, key: str, values: Mapping[str, Any]) -> int:
        """Merge `values` into the object stored at `key`, one level deep, and return the new version.

        Example::

            await record.update("seats", {"train": "window"})  # other entries of "seats" stay

        Creates the field if it is not there; raises InvalidValue if it holds anything but an object. Concurrent
        updates do not overwrite one another: this one is repeated on what the other left.
        """
        if not isinstance(values, Mapping):
            raise InvalidValue(f"{key!r}: update takes a mapping, not {type(values).__name__}")

        def merged(stored: Any) -> Any:
            if not isinstance(stored, dict):
                raise InvalidValue(f"{key!r}: holds a {type(stored).__name__}, not an object; set() replaces it")
            return {**stored, **values}

        return (await self._swap(key, "update", {}, merged))[1].version

    async def append_to(self, key: str, *items: Any) -> int:
        """Add items to the list stored at `key`, atomically, and return the new version. Creates the list.

        Raises InvalidValue if the field holds anything but a list.
        """

        def longer(stored: Any) -> Any:
            if not isinstance(stored, list):
                raise InvalidValue(f"{key!r}: holds a {type(stored).__name__}, not a list; set() replaces it")
            return [*stored, *items]

        return (await self._swap(key, "append_to", [], longer))[1].version

    async def increment(self, key: str, by: int | float = 1) -> int | float:
        """Add to a number, atomically, and return the sum. A field that is not there counts as 0.

        Whole numbers are added on the server; floats, very large integers and what is encrypted by a swap, exact
        either way as Python adds them. Raises InvalidValue if the field holds no number.
        """
        codec.encode_key(key)
        if isinstance(by, bool) or not isinstance(by, (int, float)):
            raise InvalidValue(f"{key!r}: a {type(by).__name__} is not a number")
        if type(by) is int and abs(by) < 10**15 and self._counts(key):
            changes = self._changes()
            changes.increment(key, by)
            draft = changes.draft("increment")
            try:
                done = await self._commit(draft)
                return (await write_path.sums(self._home.tiers(), self._names, draft, done, [key]))[key]
            except Conflict:
                pass  # what is stored is no plain integer: added here and swapped in
        self._allow("read", key)
        data, _ = await self._swap(key, "increment", 0, lambda stored: add(stored, by, key))
        return self._home.codec_of(self._text).decode(data, key)  # type: ignore[no-any-return]  # what was just encoded

    async def _swap(self, key: str, kind: str, empty: Any, change: Callable[[Any], Any]) -> tuple[bytes, Committed]:
        name = codec.encode_key(key)
        record_codec = self._home.codec_of(self._text)
        self._allow("write", key)

        def changed(raw: bytes | None) -> Changes:
            until = field_ttl.NEVER
            if raw is not None and field_ttl.marked(raw):
                until = field_ttl.split(raw)[0]
                if until <= self._now():
                    until = field_ttl.NEVER
                    raw = None
            changes = self._changes()
            changes.set(key, change(empty if raw is None else record_codec.decode(raw, key)), until=until)
            return changes

        def draft(changes: Changes) -> Draft:
            return self._own(changes.draft(kind))

        changes, done = await write_path.swap(self._home.tiers(), self._names, name, changed, draft)
        return changes.fields[name][2], done

    async def write(
        self,
        *,
        set: Mapping[str, Any] | None = None,
        delete: Iterable[str] = (),
        increment: Mapping[str, int] | None = None,
        append: Iterable[Message | dict[str, Any]] = (),
        phase: str | None = None,
        expect_version: int | None = None,
        expect_phase: str | None = None,
    ) -> Written:
        """Change fields, counters, messages and phase in one atomic commit of one round trip.

        Example::

            written = await session.write(
                set={"city": "Oslo"}, increment={"questions": 1}, append=[{"role": "user", "content": "And Bergen?"}]
            )
            print(written.version, written.results["questions"])

        Returns the new version, the sums, and the number of the first message that was added. `increment` takes whole
        numbers of at most 15 digits. `expect_version` and `expect_phase` raise Conflict, and nothing is written, if the
        record is elsewhere.
        """
        changes = self._changes()
        if isinstance(delete, str):
            raise InvalidValue(f"delete takes several names, as [{delete!r}]")
        for key in delete:
            changes.delete(key)
        changes.set_many(set or {})
        for key, by in (increment or {}).items():
            changes.increment(key, by)
        for message in append:
            changes.append(message)
        if phase is not None:
            changes.phase(phase)
        draft = changes.draft("write")
        if expect_phase is not None:
            if not isinstance(expect_phase, str):
                raise InvalidValue(f"expect_phase is a str, not {expect_phase!r}")
            self._allow("read", MOVES)  # who learns that it is another one has read it
            draft.expectations.append((PHASE, expect_phase.encode("utf-8", "surrogatepass")))
        done = await self._commit(draft, expect_version)
        tiers = self._home.tiers()
        sums = await write_path.sums(tiers, self._names, draft, done, changes.sums) if increment else {}
        return Written(done.version, sums, done.first_message)

    async def create(self, values: Mapping[str, Any] | None = None, *, is_clear: bool = False) -> int:
        """Start the record, with these fields, and return its version. Raises Conflict if it exists.

        A deleted record starts again with these fields; its version goes on counting. `is_clear` is passed on with the
        event `conversation.created`, for hooks: a client cleared a conversation that nobody knew.
        """
        changes = self._changes()
        changes.set_many(values or {})
        return (await self._commit(self._creation(changes, is_clear))).version

    def _creation(self, changes: Changes, is_clear: bool) -> Draft:
        if is_clear:
            changes.emit("conversation.created", {"is_clear": True})
        changes.undelete()
        changes.reserved(OWNER, self._owner.encode() or None)  # not that of its former life
        draft = changes.draft("create")
        draft.deleted = "create"
        return draft

    def transaction(self) -> AsyncTransaction:
        """Open a view that is committed at the end of `async with`, or not at all.

        Example::

            async with record.transaction() as view:
                view["seats"] = view.get("seats", 0) + 1

        Raises Conflict at the end if the record changed meanwhile; `apply` repeats.
        """
        return AsyncTransaction(self)

    async def apply(
        self, change: Callable[[Transaction], T | Awaitable[T]], *, merge: Mapping[str, Merge] | None = None
    ) -> T:
        """Run `change(transaction)` and commit, repeated on the newest state until nobody was faster; give its result.

        Example::

            def book(view):
                view["seats"] = view.get("seats", 0) + 1
                return view["seats"]

            seats = await record.apply(book)

        `change` may run several times. Raises Conflict after `conflict_retries` attempts.

        With `merge`, a policy by field as in `distributed_state.merge`, what it did is first merged with what
        others did meanwhile: a field that only one side changed is that side's, one that both changed is for its
        policy, messages go after theirs. It runs again only where no merge can express it: a field without policy,
        one that a side deleted, a phase that was moved. What `change` read and left as it was is not looked at again.
        """
        return await write_path.until_no_conflict(self._home.tiers(), OptimisticRetry(self, change, merge).once)

    def lock(self, *, wait: float = 5.0, ttl: float = 30.0, advisory: bool = False) -> AsyncLease:
        """Hold the record alone inside `async with`, or raise LockTimeout after `wait` seconds.

        Example::

            async with record.lock(wait=5.0) as lease:
                await record.set("seat", "12A")

        Renewed until released, and given up `ttl` seconds after its holder died. Writes inside carry the fencing token;
        once the lease is lost they raise Fenced, and the body is cancelled. Others' writes raise Locked; with
        `advisory=True` they pass, only locks exclude each other. Waiters come in order. The task that holds it may
        nest.
        """
        self._allow("lock", None)
        return self._home.tiers().lock(self._names, wait=wait, ttl=ttl, advisory=advisory)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._text[:200]}>"
