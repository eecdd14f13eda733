"""A thread of LangGraph is a record: saves its checkpoints and reads them. Law: a checkpoint is one commit.

The record's fields have the thread's newest checkpoint in the root namespace once more: `at` is its id, `head` its
frame, `w:<id>` says that it has pending writes. So the newest comes with one read of the record, and that it still is
the newest is what a commit that goes on from it expects of `at`. All else is items (see `frames`).

Design: section 21.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    get_checkpoint_metadata,
    writes_sort_key,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from distributed_state import ABSENT, Conflict, CorruptState, Deleted, PutItem
from distributed_state.adapters.langgraph.frames import (
    BLOBS,
    CHECKPOINTS,
    WRITES,
    Saved,
    SavedWrite,
    Typed,
    blob_key,
    checkpoint_key,
    pack_blob,
    placed,
    unpack_blob,
    within,
    write_key,
    writes_prefix,
)
from distributed_state.adapters.langgraph.recent import Addressed, Latest, Recent, RecentThread
from distributed_state.adapters.langgraph.steps import Steps

AT, HEAD = "at", "head"
PAGE = 1000
_HEAD_BYTES = 16 * 1024
_ATTEMPTS = 100


def flag(checkpoint_id: str) -> str:
    """The field that says that the newest checkpoint has pending writes."""
    return f"w:{checkpoint_id}"


class Thread:
    """One thread, by a handle of its record of either face."""

    def __init__(self, record: Any, thread_id: str, serde: SerializerProtocol, recent: Recent) -> None:
        self.record = record
        self.id = thread_id
        self.serde = serde
        self.recent = recent
        self.known: RecentThread = recent.thread(thread_id)

    # Saving

    def put(
        self,
        config: Mapping[str, Any],
        namespace: str,
        parent: str | None,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> Steps[None]:
        """Save a checkpoint. Raises Conflict where a run went on from the newest one, and it is not that any more."""
        saved, items = yield from self._frame(config, namespace, parent, checkpoint, metadata, new_versions)
        items.append(PutItem(collection=CHECKPOINTS, key=checkpoint_key(namespace, saved.id), value=saved.pack()))
        if namespace:
            yield from self._commit({}, [], items, None)
        else:
            yield from self._advance(saved, parent, items)
        self.known.keep_values(namespace, saved.id, checkpoint["channel_versions"], saved.values)

    def _frame(
        self,
        config: Mapping[str, Any],
        namespace: str,
        parent: str | None,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> Steps[tuple[Saved, list[PutItem]]]:
        """The checkpoint as it is stored, and the values that are stored beside it."""
        given: dict[str, Any] = dict(checkpoint)
        values, versions = given.pop("channel_values"), checkpoint["channel_versions"]
        fresh = {channel: self.serde.dumps_typed(values[channel]) for channel in new_versions if channel in values}
        carried: dict[str, Typed | None] = {}
        inherited = versions.keys() - new_versions.keys()
        if inherited:
            before = (yield from self._values_of(namespace, parent)) if parent is not None else None
            for channel in inherited:
                if before is not None and before[0].get(channel) == versions[channel]:
                    if channel in before[1]:
                        carried[channel] = before[1][channel]
                elif channel in values:  # a copy of another checkpoint has this one's parent
                    fresh[channel] = self.serde.dumps_typed(values[channel])
        described: Any = get_checkpoint_metadata(dict(config), metadata)  # type: ignore[arg-type]
        if described.get("parents"):  # plain text, whatever the ids know of themselves
            described["parents"] = {space: str(named) for space, named in described["parents"].items()}
        inline, alone = placed(fresh, carried)
        run = described.get("run_id")
        saved = Saved(
            namespace, str(checkpoint["id"]), None if parent is None else str(parent), self.serde.dumps_typed(given),
            self.serde.dumps_typed(described), inline, str(run) if run is not None else None,
        )  # fmt: skip
        items = []
        for channel, value in alone.items():
            key = blob_key(namespace, channel, versions.get(channel, new_versions.get(channel)))
            items.append(PutItem(collection=BLOBS, key=key, value=pack_blob(value)))
            self.recent.keep_blob(self.id, key, value)
        return saved, items

    def _values_of(
        self, namespace: str, checkpoint_id: str
    ) -> Steps[tuple[Mapping[str, Any], Mapping[str, Typed | None]] | None]:
        """The versions of a checkpoint's channels, and where their values are."""
        known = self.known.parents.get((namespace, checkpoint_id))
        if known is None:
            saved = yield from self.find(namespace, checkpoint_id)
            if saved is not None:
                known = (self.serde.loads_typed(saved.checkpoint)["channel_versions"], saved.values)
        return known

    def _advance(self, saved: Saved, parent: str | None, items: list[PutItem]) -> Steps[None]:
        """Save a checkpoint of the root namespace; if it is the newest then, say so in the same commit."""
        continues = self.known.continues(parent)
        expected = parent if continues or not self.known.known else self.known.head
        frame = items[-1].value
        for _ in range(_ATTEMPTS):
            # A child of the newest is the newest, also if it was made by a machine whose clock is behind.
            newest = expected is None or expected == parent or saved.id >= expected
            fields: dict[str, Any] = {AT: saved.id} if newest else {}
            over = {flag(parent)} if parent else set()
            # Writes may be there before their checkpoint: only what lies behind this one is out of date.
            past = {name for name in self.known.flags if name < flag(saved.id)}
            gone = sorted((past | over) - {flag(saved.id)}) if newest else []
            if newest and len(frame) <= _HEAD_BYTES:
                fields[HEAD] = frame
            elif newest:
                gone.append(HEAD)
            try:
                yield from self._commit(fields, gone, items, expected)
            except (Conflict, Deleted) as error:
                found = yield from self._refused(error, saved.id, parent if continues else Addressed())
                expected = found
                continue
            self.known.saved(saved.id, saved.id if newest else expected)
            self.known.flags -= set(gone)
            return
        raise Conflict(f"thread {self.id!r:.80}: others save faster than this checkpoint can be")

    def _refused(self, error: Conflict | Deleted, own: str, parent: str | None) -> Steps[str | None]:
        """Which checkpoint is the newest, where another was expected. Raises Conflict for a run that is behind."""
        if isinstance(error, Deleted):
            if parent is not None and not isinstance(parent, Addressed):
                raise error
            with suppress(Conflict):  # somebody else just did
                yield self.record.create()
        fields = yield self.record.get_all(fresh=True)
        head: str | None = fields.get(AT)
        self.known.read(head, fields)
        if not isinstance(parent, Addressed) and head not in (parent, own):  # its own: it is saved once more
            raise Conflict(
                f"thread {self.id!r:.80} went on while this run was under way: its newest checkpoint is {head}, and "
                f"this run goes on from {parent}. Run it again on what is there now, or hold the thread with "
                "`saver.turn(config)` around each run"
            ) from error
        return head

    def _commit(
        self, fields: Mapping[str, Any], gone: Sequence[str], items: Sequence[Any], expected: str | None
    ) -> Steps[None]:
        if fields or gone:
            expect = {AT: ABSENT if expected is None else expected}
            yield self.record.write(set=fields, delete=gone, items=items, expect=expect)
            return
        for _ in range(_ATTEMPTS):
            try:
                yield self.record.write(items=items)
            except Deleted:
                try:
                    yield self.record.create()
                except Conflict:
                    continue
            else:
                return

    def put_writes(
        self, namespace: str, checkpoint_id: str, writes: Sequence[tuple[str, Any]], task_id: str, path: str
    ) -> Steps[None]:
        """Save what a task wrote; special writes replace what is there, others do not."""
        items: dict[int, PutItem] = {}
        for at, (channel, value) in enumerate(writes):
            index = WRITES_IDX_MAP.get(channel, at)
            if index >= 0 and index in items:
                continue
            frame = SavedWrite(str(checkpoint_id), task_id, index, channel, self.serde.dumps_typed(value), path).pack()
            key = write_key(namespace, checkpoint_id, task_id, index)
            items[index] = PutItem(collection=WRITES, key=key, value=frame, keep=index >= 0)
        if not items:
            return
        # Its checkpoint may come later: LangGraph saves both in the background.
        fields = {} if namespace else {flag(checkpoint_id): 1}
        for _ in range(_ATTEMPTS):
            try:
                yield self.record.write(set=fields, items=list(items.values()))
            except Deleted:
                try:
                    yield self.record.create()
                except Conflict:
                    continue
            else:
                self.known.flags.update(fields)
                return

    # Reading

    def find(self, namespace: str, checkpoint_id: str) -> Steps[Saved | None]:
        """A checkpoint by its id."""
        data = yield self.record.items(CHECKPOINTS).get(checkpoint_key(namespace, checkpoint_id))
        return None if data is None else Saved.unpack(data)

    def newest(self, namespace: str) -> Steps[tuple[Saved | None, bool]]:
        """The newest checkpoint of a namespace, as the server has it now, and whether it may have pending writes."""
        if namespace:
            page = yield self.record.items(CHECKPOINTS).list(prefix=within(namespace), limit=1, reverse=True)
            return (Saved.unpack(page.items[0].value) if page.items else None), True
        for _ in range(_ATTEMPTS):
            fields = yield self.record.get_all(fresh=True)
            head = fields.get(AT)
            self.known.read(head, fields)
            if head is None:
                return None, False
            saved = Saved.unpack(fields[HEAD]) if HEAD in fields else (yield from self.find("", head))
            if saved is not None:
                return saved, flag(head) in fields
            # It was removed in between; then another one is the newest, or none.
        raise CorruptState(f"thread {self.id!r:.80}: its newest checkpoint {head} is not there", field=AT)

    def get(self, namespace: str, checkpoint_id: str | None) -> Steps[CheckpointTuple | None]:
        """A checkpoint with its values and pending writes; without an id the newest."""
        try:
            return (yield from self._get(namespace, checkpoint_id))
        except CorruptState as error:
            if error.field != BLOBS:
                raise
            # Pruning removes a checkpoint before its values: if they are gone, so is that by now.
            return (yield from self._get(namespace, checkpoint_id))

    def _get(self, namespace: str, checkpoint_id: str | None) -> Steps[CheckpointTuple | None]:
        if checkpoint_id is None:
            saved, written = yield from self.newest(namespace)
        else:
            saved, written = (yield from self.find(namespace, checkpoint_id)), True
        if saved is None:
            return None
        writes = (yield from self.writes(namespace, saved.id)) if written else []
        shown = Latest(saved.id) if checkpoint_id is None and not namespace else Addressed(saved.id)
        found = yield from self.tuples([(saved, writes)], shown)
        return found[0]

    def writes(self, namespace: str, checkpoint_id: str) -> Steps[list[SavedWrite]]:
        """A checkpoint's pending writes, in the order in which a run applies them."""
        found: list[SavedWrite] = []
        after: str | None = None
        while True:
            page = yield self.record.items(WRITES).list(
                prefix=writes_prefix(namespace, checkpoint_id), after=after, limit=PAGE
            )
            found += [SavedWrite.unpack(item.value) for item in page.items]
            if page.next is None:
                return sorted(found, key=lambda each: writes_sort_key(each.path, each.task_id, each.index))
            after = page.next

    def tuples(
        self, chosen: Sequence[tuple[Saved, Sequence[SavedWrite]]], shown: str | None = None
    ) -> Steps[list[CheckpointTuple]]:
        """Checkpoints as LangGraph has them, with their values; values in items of their own come in one exchange."""
        loads = self.serde.loads_typed
        checkpoints = [loads(saved.checkpoint) for saved, _ in chosen]
        wanted = {}
        for (saved, _), checkpoint in zip(chosen, checkpoints, strict=True):
            for channel in _apart(saved):
                key = blob_key(saved.namespace, channel, checkpoint["channel_versions"].get(channel))
                wanted[saved.id, saved.namespace, channel] = key
        values = yield from self.blobs(sorted(set(wanted.values())))
        found = []
        for (saved, writes), checkpoint in zip(chosen, checkpoints, strict=True):
            stored = {channel: value for channel, value in saved.values.items() if value is not None}
            for channel in _apart(saved):
                value = values.get(wanted[saved.id, saved.namespace, channel])
                if value is None:
                    raise CorruptState(f"checkpoint {saved.id}: the value of {channel!r:.80} is not there", field=BLOBS)
                stored[channel] = value
            self.known.keep_values(saved.namespace, saved.id, checkpoint["channel_versions"], saved.values)
            checkpoint = {**checkpoint, "channel_values": {channel: loads(value) for channel, value in stored.items()}}
            found.append(
                CheckpointTuple(
                    config=self._config(saved.namespace, shown or Addressed(saved.id)),
                    checkpoint=checkpoint,  # type: ignore[arg-type]
                    metadata=loads(saved.metadata),
                    parent_config=self._config(saved.namespace, Addressed(saved.parent)) if saved.parent else None,
                    pending_writes=[(each.task_id, each.channel, loads(each.value)) for each in writes],
                )
            )
        return found

    def blobs(self, keys: Sequence[str]) -> Steps[dict[str, Typed]]:
        """Values that are items of their own, by their keys."""
        found = {key: value for key in keys if (value := self.recent.blob(self.id, key)) is not None}
        lacking = [key for key in keys if key not in found]
        for begin in range(0, len(lacking), PAGE):
            stored = yield self.record.items(BLOBS).get_many(lacking[begin : begin + PAGE])
            for key, data in stored.items():
                found[key] = unpack_blob(data)
                self.recent.keep_blob(self.id, key, found[key])
        return found

    def _config(self, namespace: str, checkpoint_id: str) -> Any:
        return {
            "configurable": {"thread_id": self.id, "checkpoint_ns": namespace, "checkpoint_id": checkpoint_id},
        }


def _apart(saved: Saved) -> Iterator[str]:
    """The channels whose values are items of their own."""
    return (channel for channel, value in saved.values.items() if value is None)
