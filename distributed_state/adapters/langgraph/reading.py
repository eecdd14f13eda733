"""Reads the checkpoints of a thread. Law: the newest is what the server has now, in one read of the record.

The record's fields have the thread's newest checkpoint in the root namespace once more: `at` is its id, `head` its
frame, `w:<id>` says that it has pending writes. `again` is in one that was deleted and began again. All else is items
(see `frames`).

Design: section 22.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from langgraph.checkpoint.base import CheckpointTuple, writes_sort_key
from langgraph.checkpoint.serde.base import SerializerProtocol

from distributed_state import CorruptState
from distributed_state.adapters.langgraph.frames import (
    BLOBS,
    CHECKPOINTS,
    WRITES,
    Saved,
    SavedWrite,
    Typed,
    blob_key,
    checkpoint_key,
    unpack_blob,
    within,
    writes_prefix,
)
from distributed_state.adapters.langgraph.recent import Addressed, Latest, Recent, RecentThread
from distributed_state.adapters.langgraph.steps import Steps

AT, HEAD = "at", "head"
AGAIN = "again"  # the version of the deletion after which the thread began again
HEAD_BYTES = 16 * 1024  # a greater checkpoint is only an item
PAGE = 1000
_ATTEMPTS = 100


def flag(checkpoint_id: str) -> str:
    """The field that says that the newest checkpoint has pending writes."""
    return f"w:{checkpoint_id}"


class ThreadReading:
    """One thread, by a handle of its record of either face."""

    def __init__(self, record: Any, thread_id: str, serde: SerializerProtocol, recent: Recent) -> None:
        self.record = record
        self.id = thread_id
        self.serde = serde
        self.recent = recent
        self.known: RecentThread = recent.thread(thread_id)
        self.version = 0  # as it was when it was looked at last
        self.begun_after: int | None = None

    def find(self, namespace: str, checkpoint_id: str) -> Steps[Saved | None]:
        """A checkpoint by its id."""
        data = yield self.record.items(CHECKPOINTS).get(checkpoint_key(namespace, checkpoint_id))
        return None if data is None else Saved.unpack(data)

    def look(self) -> Steps[Any]:
        """The record as the server has it now, a mapping of its fields with its version."""
        fields = yield self.record.view(fresh=True)
        self.known.read(fields.get(AT), fields, fields.get(AGAIN))
        self.version, self.begun_after = fields.version, fields.get(AGAIN)
        return fields

    def newest(self, namespace: str) -> Steps[tuple[Saved | None, bool]]:
        """The newest checkpoint of a namespace, as the server has it now, and whether it may have pending writes."""
        if namespace:
            return (yield from self._newest_within(namespace)), True
        for _ in range(_ATTEMPTS):
            fields = yield from self.look()
            head = fields.get(AT)
            if head is None:
                return None, False
            saved = Saved.unpack(fields[HEAD]) if HEAD in fields else (yield from self.find("", head))
            if saved is not None:
                return saved, flag(head) in fields
            # It was removed in between; then another one is the newest, or none.
        raise CorruptState(f"thread {self.id!r:.80}: its newest checkpoint {head} is not there", field=AT)

    def _newest_within(self, namespace: str) -> Steps[Saved | None]:
        """The newest checkpoint of a namespace other than the root's. What was removed may fill a page."""
        before: str | None = None
        size = 1
        while True:
            page = yield self.record.items(CHECKPOINTS).list(
                prefix=within(namespace), before=before, limit=size, reverse=True
            )
            if page.items or page.next is None:
                return Saved.unpack(page.items[0].value) if page.items else None
            before, size = page.next, PAGE

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
            if not namespace:
                yield from self.look()  # before it: it may be found in a thread that is deleted just now
            saved, written = (yield from self.find(namespace, checkpoint_id)), True
        if not namespace:
            empty_at = self.version if saved is None and checkpoint_id is None else None
            self.recent.look(self.id, self.begun_after, empty_at)
        if saved is None:
            return None
        writes = (yield from self.writes(namespace, saved.id)) if written else []
        shown = Latest(saved.id) if checkpoint_id is None and not namespace else Addressed(saved.id)
        found = yield from self.tuples([(saved, writes)], shown)
        self.recent.keep_values(self.id, namespace, saved.id, (found[0].checkpoint["channel_versions"], saved.values))
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
