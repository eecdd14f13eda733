"""Changes that depend on a record's state: preconditions, a workspace, transactions, optimistic retries, and batches.

Law: the server checks preconditions in the commit itself. A workspace is valid only for the version that it shows; a
commit against another version is refused and may be retried.

Preconditions are compared as stored bytes, so that the server decodes no value. The client sends the bytes that it
expects; if the server has other bytes for the same value (in another order, encrypted at another time, with a
deadline), the refusal contains them, and the client repeats the change with these bytes.

Design: section 4.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from distributed_state import merge
from distributed_state.errors import Conflict, CorruptState, InvalidValue, StateError
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port.waited import bounded
from distributed_state.records.access import MOVES, VERSION
from distributed_state.records.context import RecordContext, StoreContext, context_of
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec, field_ttl
from distributed_state.values.items import ANY
from distributed_state.values.levels import level_of
from distributed_state.values.model import ABSENT, PHASE, PRESENT, Message, Presence, Ref
from distributed_state.warm.answers import Committed, Draft, unmet

_MOST = 1000  # keys in one change: Lua's limit on arguments is higher
_WORDS = {ABSENT: b"!", PRESENT: b"+"}
_RECORD = b"#v"  # every existing record has a version


def preconditions(
    context: RecordContext, expect: Mapping[str, Any] | None, exists: bool | None = None
) -> Preconditions | None:
    """The requested preconditions, checked; None without any. Raises AccessDenied, because a refusal reveals values."""
    if exists is not None and not isinstance(exists, bool):
        raise InvalidValue(f"expect_exists is True, False or None, not {exists!r:.80}")
    if expect is not None and not isinstance(expect, Mapping):
        raise InvalidValue(f"expect maps each field to its required value, as {{'state': 'open'}}, not {expect!r:.80}")
    wanted = dict(expect or {})
    if len(wanted) > _MOST:
        raise InvalidValue(f"expect names {len(wanted)} fields, more than {_MOST}")
    for key in wanted:
        codec.encode_key(key)
    context.allow("read", *([] if exists is None else [VERSION]), *wanted)
    return None if exists is None and not wanted else Preconditions(context, wanted, exists)


class Preconditions:
    """The preconditions of one change."""

    def __init__(self, context: RecordContext, wanted: Mapping[str, Any], exists: bool | None) -> None:
        self._context = context
        self._words: dict[bytes, bytes] = {}  # by field: the word that is sent to the script
        self._values: dict[bytes, tuple[str, Any]] = {}  # of fields that must hold a value
        if exists is not None:
            self._words[_RECORD] = _WORDS[PRESENT if exists else ABSENT]
        known = context.tiers.hot.entries.get(context.text)
        for key, value in wanted.items():
            name = codec.encode_key(key)
            value = context.expected_value(key, value)
            if isinstance(value, Presence):
                self._words[name] = _WORDS[value]
                continue
            text = context.codec.text(value, key)
            self._words[name] = b"+" + context.codec.seal(text, key)
            self._values[name] = key, codec.decode_value(text, key)  # a copy: the caller may change theirs
            raw = None if known is None or known.deleted else known.raw(name)
            if raw is not None and self._is_equal(name, raw):
                self._words[name] = b"+" + raw

    def on(self, draft: Draft) -> Draft:
        """The change, with these preconditions."""
        return draft._replace(preconditions=tuple(self._words.items()))

    async def commit(self, draft: Draft) -> Committed:
        """Sign a change and apply it if the preconditions hold, else raise Conflict."""
        return await self.send(self._context.sign(draft))

    async def send(self, draft: Draft) -> Committed:
        """Apply a signed change if the preconditions hold, else raise Conflict."""
        left = self._context.store.settings.conflict_retries
        while True:
            left -= 1
            try:
                return await self._context.send(self.on(draft))
            except Conflict as conflict:
                if not self.learn(conflict) or left < 1:
                    raise

    def learn(self, conflict: Conflict) -> bool:
        """Take over the stored bytes of equal values from a refusal; returns whether a retry makes sense."""
        learned = False
        for (name, word), raw in zip(list(self._words.items()), conflict.preconditions, strict=False):
            if name not in self._values or raw == word[1:]:
                continue
            if raw is None or not self._is_equal(name, raw, strict=True):
                return False
            self._words[name] = b"+" + raw
            learned = True
        return learned

    def check(self, entry: CachedRecord) -> None:
        """Raise Conflict unless the preconditions hold for this entry, which others cannot change now."""
        for name, word in self._words.items():
            found = entry.fields.get(name)
            if name == _RECORD:
                found = b"%d" % entry.version if entry.version else None
            elif found is not None and name in self._values and self._is_equal(name, found, strict=True):
                continue
            why = unmet(self._context.text, name, word, found)
            if why is not None:
                raise Conflict(why, version=entry.version)

    def _is_equal(self, name: bytes, raw: bytes, *, strict: bool = False) -> bool:
        key, value = self._values[name]
        try:
            return equal(self._context.codec.decode(raw, key), value)
        except CorruptState:
            if strict:
                raise
            return False


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON: numbers by their value, objects in any order; true is not a number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


GONE: Any = object()  # stands for an absent field
_MISSING: Any = object()


class Workspace(MutableMapping[str, Any]):
    """The fields of `entry` as a dict; `changes` collects the changes to them.

    As in a dict, changing a list or object that was read or set here changes the field.
    """

    def __init__(self, entry: CachedRecord, changes: Changes, allow: Callable[..., None]) -> None:
        self.entry = entry
        self.changes = changes
        self.allow = allow
        self._now: dict[str, Any] = {}  # values that the caller read or set, GONE if deleted
        self.closed = ""  # why the workspace can no longer be changed

    @property
    def phase(self) -> str | None:
        """The phase before it was changed."""
        self.allow("read", MOVES)
        phase = self.entry.fields.get(PHASE)
        return None if phase is None else phase.decode("utf-8", "surrogatepass")

    def __getitem__(self, key: str) -> Any:
        value = self._now.get(key, _MISSING)
        if value is _MISSING:
            self.allow("read", key)
            value = GONE if self.entry.deleted else self.entry.value(key, GONE)
            if isinstance(value, (dict, list)):
                self._now[key] = value
        if value is GONE:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        self._now[key] = self.open().set(key, value)

    def __delitem__(self, key: str) -> None:
        self[key]  # KeyError if it is missing
        self.open().delete(key)
        self._now[key] = GONE

    def __iter__(self) -> Iterator[str]:
        stored = [codec.decode_key(name) for name in self.entry.fields if name[:1] != b"#"]
        stored = [] if self.entry.deleted else stored
        self.allow("read", None, *stored)  # listing or counting the names reads the record as a whole
        keys = dict.fromkeys([*stored, *self._now])
        yield from (key for key in keys if self._now.get(key) is not GONE)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        """The changes of this view: field, old value, new value; GONE if absent."""
        for key, value in self._now.items():
            before = GONE if self.entry.deleted else self.entry.value(key, GONE)
            if GONE in (before, value) or codec.encode_value(value, key) != codec.encode_value(before, key):
                yield key, before, value

    def end(self) -> Changes | None:
        """End the transaction and return its changes, None if nothing changed."""
        for key, value in self._now.items():
            if isinstance(value, (dict, list)):
                self._notice(key, value)
        self.closed = "this transaction is over; it can no longer change anything"
        return self.changes or None

    def draft(self, kind: str = "transaction", *, durability: str | None = None) -> Draft | None:
        """End the transaction and return its change, bound to the version that it shows; None if nothing changed."""
        changes, entry = self.end(), self.entry
        if changes is None:
            return None
        return changes.draft(kind, expected=entry.version, epoch=entry.epoch, durability=durability)

    def rebased(self, newest: CachedRecord, policies: Mapping[str, merge.Merge]) -> Draft | None:
        """The change of an ended transaction, merged with later changes by others; None if no merge is possible."""
        base = self.entry
        if newest.epoch != base.epoch or newest.deleted or base.deleted:
            return None
        merged = merge.three_way(base.codec, self.changes.fields, base.fields, newest.fields, policies)
        if merged is None:
            return None
        changes = self.changes.copy()
        for key, value in merged.items():
            changes.set(key, value)
        return changes.draft("transaction", expected=newest.version, epoch=newest.epoch)

    def _notice(self, key: str, value: Any) -> None:
        """Record a list or object that may have been changed in place. Its deadline stays unless the field was set."""
        name = codec.encode_key(key)
        form = self.entry.codec
        given = self.changes.fields.get(name)
        stored = given[2] if given else self.entry.fields.get(name)
        try:
            if stored is not None and form.text(value, key) == form.open(stored, key):
                return
        except InvalidValue:
            pass  # it is prepared, or refused, below
        self.changes.set(key, value, until=field_ttl.NEVER if given else self.entry.deadline(name))

    def open(self) -> Changes:
        """The changes, to add to. Raises InvalidValue after the end."""
        if self.closed:
            raise InvalidValue(self.closed)
        return self.changes


class Transaction(MutableMapping[str, Any]):
    """The record's fields as a dict. All changes are one commit at the end, or nothing.

    As in a dict, changing a list or object that was read or set here changes the field.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    @property
    def version(self) -> int:
        """The version that this view shows and that the commit expects."""
        return self._workspace.entry.version

    @property
    def phase(self) -> str | None:
        """The phase before this transaction."""
        return self._workspace.phase

    def put_item(
        self,
        collection: str,
        key: str,
        value: Any,
        *,
        if_absent: bool = False,
        if_present: bool = False,
        equals: Any = ANY,
        keep: bool = False,
    ) -> None:
        """Put an item of the record with this commit.

        `if_absent` and `if_present` are as in `record.items(collection).put`; `equals` takes a result of `find`, but
        not a value: no item is read here. `keep` leaves an existing item as it is.
        """
        changes = self._workspace.open()
        changes.put_item(
            collection, key, value, if_absent=if_absent, if_present=if_present, equals=equals, keep=keep
        )  # fmt: skip

    def delete_item(self, collection: str, key: str, *, if_present: bool = False, equals: Any = ANY) -> None:
        """Delete an item with this commit; a missing item is an error only with `if_present` or `equals`."""
        self._workspace.open().delete_item(collection, key, if_present=if_present, equals=equals)

    def __getitem__(self, key: str) -> Any:
        return self._workspace[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._workspace[key] = value

    def __delitem__(self, key: str) -> None:
        del self._workspace[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._workspace)

    def __len__(self) -> int:
        return len(self._workspace)

    def append(self, *messages: Message | dict[str, Any]) -> None:
        """Add messages to the conversation with this commit."""
        for message in messages:
            self._workspace.open().append(message)

    def tag(self, key: str, *texts: str) -> None:
        """Tag the record with one text or several under a key, with this commit."""
        self._workspace.open().tag(key, *texts)

    def untag(self, key: str, *texts: str) -> None:
        """Remove tags with this commit."""
        self._workspace.open().untag(key, *texts)

    def move_to(self, phase: str | None) -> None:
        """Set the phase with this commit."""
        self._workspace.open().phase(phase)


async def newest(context: RecordContext) -> Workspace:
    """A workspace on the server's present state of the record."""
    return Workspace(await context.read(True, VERSION), context.changes(), context.allow)


@bounded()
class AsyncTransaction:
    """The `async with` around a Transaction."""

    def __init__(self, context: RecordContext, durability: str | None = None) -> None:
        self._context = context
        self._durability = None if durability is None else level_of(durability).text

    async def __aenter__(self) -> Transaction:
        self._workspace = await newest(self._context)
        return Transaction(self._workspace)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        draft = self._workspace.draft(durability=self._durability) if error is None else None
        if draft is not None:
            await self._context.commit(draft)


T = TypeVar("T")


class OptimisticRetry(Generic[T]):
    """One call of `apply` with its retries: after a conflict the change is merged if possible, else run again."""

    def __init__(
        self,
        context: RecordContext,
        change: Callable[[Transaction], T | Awaitable[T]],
        policies: Mapping[str, merge.Merge] | None,
    ) -> None:
        self._context = context
        self._change = change
        self._policies = None if policies is None else merge.check(policies)
        self._refused: tuple[Workspace, T] | None = None

    async def once(self) -> T:
        """Commit, or raise Conflict."""
        context = self._context
        if self._refused is not None and self._policies is not None:
            workspace, result = self._refused
            draft = workspace.rebased(await context.read(True, VERSION), self._policies)
            if draft is not None:
                await context.commit(draft)
                return result
        self._refused = None
        workspace = await newest(context)
        found = self._change(Transaction(workspace))
        result = await found if inspect.isawaitable(found) else found
        draft = workspace.draft()
        if draft is not None:
            try:
                await context.commit(draft)
            except Conflict:
                self._refused = workspace, result
                raise
        return result


@bounded()
class AsyncBatch:
    """The `async with` around changes of many records. After it, `versions` maps each `record.ref` to the new version.

    Example::

        async with store.batch() as batch:
            batch.on(session).set("city", "Oslo")
            batch.on(store.user("u1")).increment("trips", 1)
        version = batch.versions[session.ref]
    """

    versions: dict[Ref, int]
    """The new version of each record that was changed, by `record.ref`; filled when the block ends."""

    def __init__(self, store: StoreContext, durability: str | None = None) -> None:
        self._store = store
        self._durability = None if durability is None else level_of(durability).text
        self._changes: dict[Ref, tuple[RecordContext, Changes]] = {}
        self._given: dict[Ref, Preconditions] = {}
        self.versions = {}

    def on(self, handle: Any, *, expect: Mapping[str, Any] | None = None, expect_exists: bool | None = None) -> Any:
        """Return the changes of one record, to add to: `batch.on(session).set("a", 1)`. No I/O.

        They have `set`, `set_many`, `delete`, `increment`, `append`, `phase`, `tag`, `untag`, `clear`, and
        `put_item(collection, key, value)` and `delete_item(collection, key)`. Raises InvalidValue if `handle` is not a
        record. `expect` and `expect_exists` are as in `write`: if they do not hold, that record is not changed, and
        the block ends with Conflict.
        """
        context = context_of(handle, "a batch")
        given = preconditions(context, expect, expect_exists)
        if given is not None:
            if handle.ref in self._given:
                raise InvalidValue(f"{context.text[:200]}: expectations of a record can be given only once in a batch")
            self._given[handle.ref] = given
        return self._changes.setdefault(handle.ref, (context, context.changes()))[1]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        built = [
            (context, changes.draft("batch", durability=self._durability))
            for ref, (context, changes) in self._changes.items()
            if changes or ref in self._given
        ]
        drafts = [(context, context.sign(draft)) for context, draft in built]
        conditional = [self._conditional(context, draft) for context, draft in drafts]
        attempts = [context.batched(draft) for (context, _), draft in zip(drafts, conditional, strict=True)]
        writes = [(context.keys, attempt) for (context, _), attempt in zip(drafts, attempts, strict=True)]
        results = await write_path.commit_many(self._store.tiers(), writes)
        failed: StateError | None = None
        for (context, draft), begun, attempt, result in zip(drafts, conditional, attempts, results, strict=True):
            if isinstance(result, Conflict):
                result = await self._again(context, draft, result, attempt is not begun)
            if isinstance(result, StateError):
                failed = failed or result
            else:
                self.versions[context.ref] = result.version
        if failed is not None:
            failed.add_note(f"{len(self.versions)} of {len(drafts)} records of the batch were changed; see versions")
            raise failed

    def _conditional(self, context: RecordContext, draft: Draft) -> Draft:
        given = self._given.get(context.ref)
        return draft if given is None else given.on(draft)

    async def _again(
        self, context: RecordContext, draft: Draft, refused: Conflict, guarded: bool
    ) -> Committed | StateError:
        """Send a refused change again outside the batch, unless the refusal is final."""
        given = self._given.get(context.ref)
        if given is None:
            return await _outcome(context.send(draft)) if guarded else refused
        return await _outcome(given.send(draft)) if guarded or given.learn(refused) else refused


async def _outcome(sending: Awaitable[Committed]) -> Committed | StateError:
    try:
        return await sending
    except StateError as error:
        return error
