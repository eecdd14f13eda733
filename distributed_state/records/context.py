"""The part of a record that its handle's methods share. Law: a handle has one context; its parts use public names only.

Users hold a handle, which has the record's methods and nothing else. Its context serves a turn, a window, a transaction
or a batch: it has the record's keys and the actor, reads the record, and begins a change (`changes`), signs it (`sign`:
the policy allows it) and commits it (`commit`). A record with a schema has a subclass of `RecordContext`: see `typed`.
All records of a store share one `StoreContext`.

Design: sections 4, 6.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Unpack

from distributed_state.errors import CorruptState, InvalidValue
from distributed_state.hot.cached_record import MISSING, CachedRecord
from distributed_state.port import Mutex
from distributed_state.records.access import ITEMS, Action, Guard, written
from distributed_state.records.sanitizing import Clean, CleanMessage, Sanitizing, sanitizer
from distributed_state.settings import Settings
from distributed_state.tiers import ambient
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec, field_ttl
from distributed_state.values.codec import Codec
from distributed_state.values.keys import Keys
from distributed_state.values.levels import level_of
from distributed_state.values.model import DELETED, Ref, deleted_error, escape
from distributed_state.warm.answers import Committed, Draft, Expectations

RECORDS = 10_000


class Ephemeral:
    """A dict for each of the most recently used records."""

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._values: dict[str, dict[str, Any]] = {}

    def of(self, text: str) -> dict[str, Any]:
        """The dict of a record; every caller gets the same one."""
        with self._mutex:
            values = self._values.pop(text, None)
            self._values[text] = values = {} if values is None else values
            if len(self._values) > RECORDS:
                del self._values[next(iter(self._values))]
        return values

    def drop(self, text: str) -> None:
        """Drop one record's dict."""
        with self._mutex:
            self._values.pop(text, None)

    def forget(self) -> None:
        """Start empty in a child process after os.fork: the dicts belong to the parent."""
        self._mutex = Mutex()  # the old one may be held by a thread that exists only in the parent
        for values in self._values.values():
            values.clear()
        self._values = {}


@dataclass(slots=True, kw_only=True)
class StoreContext:
    """The parts of a store that its records use.

    `tiers()` returns the tiers of the process. `blocking_of` turns a session or turn into its counterpart in the
    blocking API. `deleting` is awaited before this replica deletes a record.
    """

    settings: Settings
    keys: Keys
    codec_of: Callable[[str], Codec]
    guard: Guard | None
    tiers: Callable[[], Tiers]
    blocking_of: Callable[[Any], Any]
    ephemeral: Ephemeral = field(default_factory=Ephemeral)
    deleting: list[Callable[[Ref], Awaitable[None]]] = field(default_factory=list)
    clean: Clean | None = None
    clean_messages: CleanMessage | None = None

    def dressed(self, core: Any) -> Any:
        """The object that user code gets for a session or turn: asyncio or blocking, like the caller's API."""
        return core if self.tiers().port.suspends else self.blocking_of(core)

    def allow(
        self,
        action: Action,
        ref: Ref | None = None,
        *,
        field: str | None = None,
        user: str | None = None,
        scope: str | None = None,
        prefix: str | None = None,
    ) -> None:
        """Ask the store's policy, if it has one, about an action without a handle. Raises AccessDenied."""
        if self.guard is not None:
            self.guard.ask(action, ref, field, actor=ambient.actor(), user=user, scope=scope, prefix=prefix)


Note = Callable[[CachedRecord, Changes], None]
"""Adds operations to a change by the store itself; the change then applies only at the version of that entry."""


class RecordContext:
    """A record, its store, and the actor of this handle."""

    def __init__(
        self,
        store: StoreContext,
        ref: Ref,
        *,
        user: str | None = None,
        actor: str = "",
        fresh: bool = False,
        lifetime: tuple[int, int] = (0, 0),
        **options: Unpack[Sanitizing],
    ) -> None:
        self.store = store
        self.ref = ref
        self.keys = store.keys.of(ref)
        self.text = ref.text
        self.codec = store.codec_of(ref.text)  # encodes the record's values
        self.owner = "" if user is None else escape(Ref("user", user).id)
        self.actor = ambient.noted(actor)
        self.lifetime = lifetime
        # The id was generated here and is not known elsewhere, so the first write need not ask SQL.
        self.unused = fresh
        # Whether a write begins this record again after it expired.
        self.begins_again = ref.scope == "session" and store.settings.expired == "begin again"
        # Given the error, the field's name and the default, it returns a value for a field that cannot be read.
        self.unreadable: Callable[[CorruptState, str, Any], Any] | None = None
        chosen = sanitizer(options, store.clean, store.clean_messages)
        self.prepare = chosen.field if chosen else None
        self.prepare_message = chosen.message if chosen else None

    @property
    def tiers(self) -> Tiers:
        """The tiers of this process."""
        return self.store.tiers()

    def now(self) -> float:
        """The server's time."""
        return self.tiers.clock.now()

    # Permissions

    def allow(self, action: Action, *fields: str | None, ref: Ref | None = None) -> None:
        """Ask the store's policy, if it has one, for each of these. Raises AccessDenied."""
        if self.store.guard is not None:
            actor = self.actor or ambient.actor()
            for each in fields:
                self.store.guard.ask(action, ref or self.ref, each, actor=actor, user=self.owner)

    def allow_operations(self, draft: Draft, ref: Ref | None = None) -> None:
        """Ask the store's policy for everything that a change does."""
        if self.store.guard is not None:
            if draft.expected_items or any(operation == b"n" for operation, _, _ in draft.operations):
                self.allow("read", ITEMS, ref=ref)  # a refusal would reveal the item
            for action, each in written(draft.operations):
                self.allow(action, each, ref=ref)

    # Reading

    def shortcut(self) -> Callable[[str], Any]:
        """The blocking API's direct read of hot. It never finds a value where a policy has to be asked first."""
        return self.peek if self.store.guard is None else lambda key: MISSING

    def peek(self, key: str) -> Any:
        """The field if hot has it, else MISSING. No I/O."""
        hot = self.store.tiers().hot  # not through the property: this runs in every hot read
        entry = hot.entries.get(self.text)
        if entry is None or hot.clock() >= entry.freshness.good_until:
            return MISSING
        entry.used = True
        hot.hits += 1
        try:
            value = entry.values.get(key, MISSING)
        except TypeError:
            value = MISSING  # not hashable: refused below
        if value is MISSING and not entry.deleted and entry.expires == field_ttl.NEVER:
            try:
                return entry.value(key, MISSING)
            except CorruptState:
                return MISSING  # the full read raises it again
        return value

    async def read(self, fresh: bool = False, field: str | None = None) -> CachedRecord:
        """Read the record if the policy allows this field to be read; None: the whole record."""
        self.allow("read", field)
        return await read_path.read(self.tiers, self.keys, fresh=fresh)

    def must_ask(self, fresh: bool, max_staleness: float | None) -> bool:
        """Whether a read must ask the server even if hot has the record."""
        return fresh if max_staleness is None else not self.tiers.within(self.text, max_staleness) or fresh

    def value(self, entry: CachedRecord, key: str, default: Any) -> Any:
        """One field of a record that was read."""
        try:
            return entry.value(key, default)
        except CorruptState as error:
            if self.unreadable is None:
                raise
            return self.unreadable(error, key, default)

    def fields(self, entry: CachedRecord) -> dict[str, Any]:
        """All fields of a record that was read, if the policy allows each."""
        fields = {} if entry.deleted else entry.all() if self.unreadable is None else self._each(entry)
        self.allow("read", *fields)
        return fields

    def _each(self, entry: CachedRecord) -> dict[str, Any]:
        """All of the user's fields; `unreadable` gives the values of those that cannot be read."""
        names = [codec.decode_key(name) for name in entry.fields if name[:1] != b"#"]
        return {name: self.value(entry, name, None) for name in names}

    # Changing

    def changes(self) -> Changes:
        """An empty change. Every change made through this handle begins here."""
        return Changes(
            self.store.settings, self.codec, self.prepare, self.prepare_message, self.now,
            owner=self.owner, actor=self.actor, lifetime=self.lifetime,
        )  # fmt: skip

    def refuse_deleted(self, entry: CachedRecord, *, revive: bool = False) -> None:
        """Raise Deleted for a record that a write would not begin again."""
        if entry.deleted and not revive and not (self.begins_again and entry.expiry):
            raise deleted_error(self.text, entry.version, entry.fields[DELETED])

    def sign(self, draft: Draft) -> Draft:
        """Ask the policy for a change, and mark the first one of a generated id as new. Raises AccessDenied."""
        if self.store.guard is not None:
            self.allow_operations(draft)
        draft = self._beginning(draft)
        if self.unused:
            self.unused = False  # for one write only: after that the record exists
            return draft._replace(creation="*")
        return draft

    def _beginning(self, draft: Draft) -> Draft:
        """The change, beginning an expired session again if the setting says so."""
        return draft._replace(deleted="expired") if draft.deleted == "refuse" and self.begins_again else draft

    def durable(self, durability: str | None) -> AbstractContextManager[None]:
        """Set the durability of commits inside the `with`; None: keep the surrounding setting."""
        if durability is None:
            return nullcontext()
        return ambient.durable(self.store.settings, level_of(durability))

    def commit(self, draft: Draft) -> Coroutine[Any, Any, Committed]:
        """Sign a change at once, and return the coroutine that applies it."""
        return self.send(self.sign(draft))

    def send(self, draft: Draft) -> Coroutine[Any, Any, Committed]:
        """Return the coroutine that applies a signed change."""
        return write_path.commit_and_sweep(self.tiers, self.keys, draft)

    def batched(self, draft: Draft) -> Draft:
        """The draft to send in a batch. If another draft is returned and refused, `send` applies `draft`."""
        return draft

    def expected_value(self, key: str, value: Any) -> Any:
        """The expected content of a field in its stored form, or Presence."""
        return value

    async def swap(self, key: str, kind: str, empty: Any, change: Callable[[Any], Any]) -> tuple[bytes, Committed]:
        """Replace a field by the result of `change`, atomically; its stored bytes, and the commit."""
        name = codec.encode_key(key)
        form = self.codec
        self.allow("write", key)

        def changed(raw: bytes | None) -> Changes:
            until = field_ttl.NEVER
            if raw is not None and field_ttl.marked(raw):
                until = field_ttl.split(raw)[0]
                if until <= self.now():
                    until = field_ttl.NEVER
                    raw = None
            changes = self.changes()
            changes.set(key, change(empty if raw is None else form.decode(raw, key)), until=until)
            return changes

        def draft(changes: Changes, expectations: Expectations) -> Draft:
            return self._beginning(changes.draft(kind, expectations=expectations))

        changes, done = await write_path.swap(self.tiers, self.keys, name, changed, draft)
        return changes.fields[name][2], done

    def server_adds(self, key: str) -> bool:
        """Whether whole numbers are added to this field on the server."""
        return not self.codec.covers(key)

    # Turns

    async def turn_begins(self, entry: CachedRecord) -> CachedRecord:
        """The entry that a turn shows once it has taken the lease and read `entry`."""
        return entry

    def turn_ends(self, draft: Draft, entry: CachedRecord) -> Draft:
        """The draft that ends a turn. The turn began with `entry` and has held the lease since."""
        return draft


def context_of(handle: Any, wanted_by: str = "this") -> RecordContext:
    """The context of a record that a user gave. Raises InvalidValue for anything else."""
    context = getattr(handle, "_context", None)
    if not isinstance(context, RecordContext):
        text = f"{wanted_by} takes sessions and other records of a store, as store.user('u1')"
        raise InvalidValue(f"{text}, not {handle!r:.80}")
    return context
