"""Reads and saves the checkpoints of a LangGraph thread, which is a record. Law: a checkpoint is one commit.

Checkpoints, values and pending writes are items of the record (see `frames`). Its fields repeat the newest checkpoint
in the root namespace: `at` is its id, `head` its frame, `w:<id>` marks that it has pending writes; `again` is set in a
thread that was deleted and began again. So one read returns the newest checkpoint from the server.

Interrupts of the root namespace are questions to people, as `turn.ask` leaves them. The commit that saves a task's
writes opens those of its interrupts and closes its earlier ones; the next checkpoint closes the rest.

A commit of a run expects the field `at` to name the checkpoint from which the run continues. Only a run that found the
thread deleted can begin a deleted thread again.

Design: section 22.
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
    get_checkpoint_id,
    get_checkpoint_metadata,
    writes_sort_key,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.types import INTERRUPT, RESUME
from langgraph.types import Interrupt

from distributed_state import ABSENT, AsyncSession, Conflict, CorruptState, Deleted, InvalidValue, PutItem
from distributed_state.adapters.langgraph.frames import (
    BLOBS,
    CHECKPOINTS,
    RUN,
    WRITES,
    Saved,
    SavedWrite,
    Typed,
    blob_key,
    checkpoint_key,
    pack_blob,
    placed,
    run_tag,
    unpack_blob,
    within,
    write_key,
    writes_prefix,
)
from distributed_state.adapters.langgraph.recent import Addressed, Latest, Recent, RecentThread, Values
from distributed_state.adapters.stores import ASK, WAITING, every, question

AT, HEAD = "at", "head"
AGAIN = "again"  # the version of the deletion after which the thread began again
HEAD_BYTES = 16 * 1024  # a larger checkpoint is only an item
PAGE = 1000
_ATTEMPTS = 100


def flag(checkpoint_id: str) -> str:
    """The field that marks pending writes of the newest checkpoint."""
    return f"w:{checkpoint_id}"


class Thread:
    """One thread, with a handle of its record."""

    def __init__(self, record: AsyncSession, thread_id: str, serde: SerializerProtocol, recent: Recent) -> None:
        self.record = record
        self.id = thread_id
        self.serde = serde
        self.recent = recent
        self.known: RecentThread = recent.thread(thread_id)
        self.version = 0  # at the last look
        self.begun_after: int | None = None

    # Reading

    async def find(self, namespace: str, checkpoint_id: str) -> Saved | None:
        """A checkpoint by its id."""
        data = await self.record.items(CHECKPOINTS).get(checkpoint_key(namespace, checkpoint_id))
        return None if data is None else Saved.unpack(data)

    async def look(self) -> Any:
        """The record as the server has it now, a mapping of its fields with its version."""
        fields = await self.record.view(fresh=True)
        self.known.read(fields.get(AT), fields, fields.get(AGAIN))
        self.known.waiting = fields.phase == WAITING
        self.version, self.begun_after = fields.version, fields.get(AGAIN)
        return fields

    async def newest(self, namespace: str) -> tuple[Saved | None, bool]:
        """The newest checkpoint of a namespace on the server now, and whether it may have pending writes."""
        if namespace:
            return (await self._newest_within(namespace)), True
        for _ in range(_ATTEMPTS):
            fields = await self.look()
            head = fields.get(AT)
            if head is None:
                return None, False
            saved = Saved.unpack(fields[HEAD]) if HEAD in fields else (await self.find("", head))
            if saved is not None:
                return saved, flag(head) in fields
            # It was removed in between, so the newest is now another one or missing.
        raise CorruptState(f"thread {self.id!r:.80}: its newest checkpoint {head} is missing", field=AT)

    async def _newest_within(self, namespace: str) -> Saved | None:
        """The newest checkpoint of a namespace other than the root's. A page may consist of removed checkpoints."""
        before: str | None = None
        size = 1
        while True:
            page = await self.record.items(CHECKPOINTS).list(
                prefix=within(namespace), before=before, limit=size, reverse=True
            )
            if page.items or page.next is None:
                return Saved.unpack(page.items[0].value) if page.items else None
            before, size = page.next, PAGE

    async def get(self, namespace: str, checkpoint_id: str | None) -> CheckpointTuple | None:
        """A checkpoint with its values and pending writes; the newest if the id is None."""
        try:
            return await self._get(namespace, checkpoint_id)
        except CorruptState as error:
            if error.field != BLOBS:
                raise
            # Pruning removes a checkpoint before its values: if they are gone, the checkpoint is gone too.
            return await self._get(namespace, checkpoint_id)

    async def _get(self, namespace: str, checkpoint_id: str | None) -> CheckpointTuple | None:
        if checkpoint_id is None:
            saved, written = await self.newest(namespace)
        else:
            if not namespace:
                await self.look()  # before the checkpoint is read, as the thread may be deleted in between
            saved, written = (await self.find(namespace, checkpoint_id)), True
        if not namespace:
            empty_at = self.version if saved is None and checkpoint_id is None else None
            self.recent.look(self.id, self.begun_after, empty_at)
        if saved is None:
            return None
        writes = (await self.writes(namespace, saved.id)) if written else []
        shown = Latest(saved.id) if checkpoint_id is None and not namespace else Addressed(saved.id)
        found = await self.tuples([(saved, writes)], shown)
        self.recent.keep_values(self.id, namespace, saved.id, (found[0].checkpoint["channel_versions"], saved.values))
        return found[0]

    async def writes(self, namespace: str, checkpoint_id: str) -> list[SavedWrite]:
        """A checkpoint's pending writes, in the order in which a run applies them."""
        items = await every(self.record.items(WRITES), prefix=writes_prefix(namespace, checkpoint_id))
        found = [SavedWrite.unpack(item.value) for item in items]
        return sorted(found, key=lambda each: writes_sort_key(each.path, each.task_id, each.index))

    async def tuples(
        self, chosen: Sequence[tuple[Saved, Sequence[SavedWrite]]], shown: str | None = None
    ) -> list[CheckpointTuple]:
        """Checkpoints in LangGraph's form, with their values; values in separate items take one exchange."""
        loads = self.serde.loads_typed
        checkpoints = [loads(saved.checkpoint) for saved, _ in chosen]
        wanted = {}
        for (saved, _), checkpoint in zip(chosen, checkpoints, strict=True):
            for channel in _apart(saved):
                key = blob_key(saved.namespace, channel, checkpoint["channel_versions"].get(channel))
                wanted[saved.id, saved.namespace, channel] = key
        values = await self.blobs(sorted(set(wanted.values())))
        found = []
        for (saved, writes), checkpoint in zip(chosen, checkpoints, strict=True):
            stored = {channel: value for channel, value in saved.values.items() if value is not None}
            for channel in _apart(saved):
                value = values.get(wanted[saved.id, saved.namespace, channel])
                if value is None:
                    raise CorruptState(f"checkpoint {saved.id}: the value of {channel!r:.80} is missing", field=BLOBS)
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

    async def blobs(self, keys: Sequence[str]) -> dict[str, Typed]:
        """Values that are separate items, by key."""
        found = {key: value for key in keys if (value := self.recent.blob(self.id, key)) is not None}
        lacking = [key for key in keys if key not in found]
        for begin in range(0, len(lacking), PAGE):
            stored = await self.record.items(BLOBS).get_many(lacking[begin : begin + PAGE])
            for key, data in stored.items():
                found[key] = unpack_blob(data)
                self.recent.keep_blob(self.id, key, found[key])
        return found

    def _config(self, namespace: str, checkpoint_id: str) -> Any:
        return {
            "configurable": {"thread_id": self.id, "checkpoint_ns": namespace, "checkpoint_id": checkpoint_id},
        }

    # Saving

    async def put(
        self,
        config: Mapping[str, Any],
        namespace: str,
        parent: str | None,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> None:
        """Save a checkpoint. Raises Conflict if the run began at the newest one, and that is no longer the newest."""
        saved, blobs = await self._frame(config, namespace, parent, checkpoint, metadata, new_versions)
        items = [PutItem(collection=BLOBS, key=key, value=pack_blob(value)) for key, value in blobs.items()]
        items.append(PutItem(collection=CHECKPOINTS, key=checkpoint_key(namespace, saved.id), value=saved.pack()))
        tag = None if saved.run is None else run_tag(saved.run)
        if namespace:
            await self._demand_same_thread(root_of(config, metadata))
            await self._commit({}, [], items, None, tag)
        else:
            await self._advance(saved, parent, items, tag)
        for key, value in blobs.items():
            self.recent.keep_blob(self.id, key, value)
        self.recent.keep_values(self.id, namespace, saved.id, (checkpoint["channel_versions"], saved.values))

    async def _frame(
        self,
        config: Mapping[str, Any],
        namespace: str,
        parent: str | None,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> tuple[Saved, dict[str, Typed]]:
        """The checkpoint in its stored form, and the values that become separate items, by key."""
        given: dict[str, Any] = dict(checkpoint)
        values, versions = given.pop("channel_values"), checkpoint["channel_versions"]
        fresh = {channel: self.serde.dumps_typed(values[channel]) for channel in new_versions if channel in values}
        carried: dict[str, Typed | None] = {}
        inherited = versions.keys() - new_versions.keys()
        if inherited:
            before = (await self._values_of(namespace, parent)) if parent is not None else None
            for channel in inherited:
                if before is not None and before[0].get(channel) == versions[channel]:
                    if channel in before[1]:
                        carried[channel] = before[1][channel]
                elif channel in values:  # a copy of another checkpoint has the same parent
                    fresh[channel] = self.serde.dumps_typed(values[channel])
        described: Any = get_checkpoint_metadata(dict(config), metadata)  # type: ignore[arg-type]
        if described.get("parents"):  # plain strings instead of subclasses of str
            described["parents"] = {space: str(named) for space, named in described["parents"].items()}
        inline, alone = placed(fresh, carried)
        run = described.get("run_id")
        saved = Saved(
            namespace, str(checkpoint["id"]), None if parent is None else str(parent), self.serde.dumps_typed(given),
            self.serde.dumps_typed(described), inline, str(run) if run is not None else None,
        )  # fmt: skip
        blobs = {
            blob_key(namespace, channel, versions.get(channel, new_versions.get(channel))): value
            for channel, value in alone.items()
        }
        return saved, blobs

    async def _values_of(self, namespace: str, checkpoint_id: str) -> Values | None:
        """The versions of a checkpoint's channels, and the places of their values."""
        known = self.recent.values(self.id, namespace, checkpoint_id)
        if known is None:
            saved = await self.find(namespace, checkpoint_id)
            if saved is not None:
                known = (self.serde.loads_typed(saved.checkpoint)["channel_versions"], saved.values)
        return known

    async def _advance(self, saved: Saved, parent: str | None, items: list[PutItem], tag: str | None) -> None:
        """Save a checkpoint of the root namespace; if it becomes the newest, the same commit records that."""
        # Decided by what the run itself found: only one of two runs that found the thread empty begins it.
        continues = self.recent.begins(self.id) if parent is None else self.known.continues(parent)
        expected = parent if continues or not self.known.known else self.known.head
        frame = items[-1].value
        may_begin = parent is None
        for _ in range(_ATTEMPTS):
            if not continues:
                await self._demand_living(parent)
            # A child of the newest is the newest, even if it comes from a machine whose clock is behind.
            newest = expected is None or expected == parent or saved.id >= expected
            fields: dict[str, Any] = {AT: saved.id} if newest else {}
            gone = self._outdated(saved.id, parent) if newest else []
            closed = [name for name, (at, _) in dict(self.known.asks).items() if newest and at not in ("", saved.id)]
            gone += closed
            phase = self.phase_without(closed) if newest else None
            if newest and len(frame) <= HEAD_BYTES:
                fields[HEAD] = frame
            elif newest:
                gone.append(HEAD)
            try:
                await self._commit(fields, gone, items, expected, tag, may_begin=may_begin, phase=phase)
            except Conflict as error:
                found = await self._refused(error, saved.id, parent if continues else Addressed())
                expected = found
                continue
            self.recent.begun(self.id)
            self.known.saved(saved.id, saved.id if newest else expected)
            self.known.flags.difference_update(gone)
            self._forget(closed)
            self.known.waiting = self.known.waiting and phase is None
            return
        raise Conflict(f"thread {self.id!r:.80}: others save faster than this checkpoint can be saved")

    def _outdated(self, checkpoint_id: str, parent: str | None) -> list[str]:
        """The known marks of pending writes that a new newest checkpoint removes.

        Writes may be stored before their checkpoint, so only marks of earlier checkpoints are outdated. A mark that
        another worker sets at the parent meanwhile stays until a run has read it.
        """
        flags = self.known.flags
        if not flags:
            return []
        own, before = flag(checkpoint_id), flag(parent) if parent else None
        return sorted(name for name in tuple(flags) if name < own or name == before)

    async def _refused(self, error: Conflict, own: str, parent: str | None) -> str | None:
        """The id of the newest checkpoint, after another one was expected. Raises Conflict for an outdated run."""
        head: str | None = (await self.look()).get(AT)
        if not isinstance(parent, Addressed) and head not in (parent, own):
            await self._demand_living(parent)
        if not isinstance(parent, Addressed) and head not in (parent, own):  # own: a repeated save
            self.recent.begun(self.id)
            raise Conflict(
                f"thread {self.id!r:.80} was continued by another run meanwhile: its newest checkpoint is {head}, and "
                f"this run continues {parent}. Hold the thread with `saver.turn(config)` around each run; or run it "
                'again from the newest checkpoint, with durability="exit"; otherwise its earlier checkpoints stay'
            ) from error
        return head

    async def _commit(
        self,
        fields: Mapping[str, Any],
        gone: Sequence[str],
        items: Sequence[Any],
        expected: str | None,
        tag: str | None,
        *,
        may_begin: bool = False,
        phase: str | None = None,
    ) -> None:
        added = {} if tag is None or tag in self.known.tags else {RUN: tag}
        change: dict[str, Any] = {"items": items, "tag": added, "phase": phase}
        if fields or gone:
            expect = {AT: ABSENT if expected is None else expected}
            change |= {"set": fields, "delete": gone, "expect": expect}
        await self._write(change, may_begin=may_begin)
        self.known.tags.update(added.values())

    async def _write(self, change: Mapping[str, Any], *, may_begin: bool = False) -> None:
        """Change the record; a deleted one first begins again, if this run found it deleted.

        With `may_begin` this also holds for a caller that begins a thread without having looked at it. Raises Deleted.
        """
        seen = self.recent.seen(self.id)
        for _ in range(_ATTEMPTS):
            expect = dict(change.get("expect", {}))
            expected = None if seen is None else seen.begun_after  # another task of this run may change it meanwhile
            if seen is not None:
                expect[AGAIN] = ABSENT if expected is None else expected
            try:
                await self.record.write(**{**change, "expect": expect})
                return
            except Conflict as error:
                if seen is None:
                    raise
                begun_after = (await self.look()).get(AGAIN)
                if begun_after == expected:
                    raise
                if begun_after != seen.empty_at:
                    raise self._deleted() from error
                seen.begun_after = begun_after  # this run found that deletion: it may begin or join the thread
                continue
            except Deleted as error:
                if not (may_begin if seen is None else seen.empty_at == error.version):
                    raise self._deleted(error.expired) from error
                version = error.version
            with suppress(Conflict):  # another run has just begun it
                await self.record.create({AGAIN: version})
            if seen is not None:
                seen.begun_after = version
            await self.look()
        raise Conflict(f"thread {self.id!r:.80}: is deleted again and again")

    def _deleted(self, expired: float | None = None) -> Deleted:
        ended = "was deleted" if expired is None else "expired"
        said = f"thread {self.id!r:.80} {ended} after this run, or this config, began: nothing was saved"
        return Deleted(said, expired=expired)

    async def _demand_living(self, checkpoint_id: str | None) -> None:
        """Raise Deleted if the checkpoint to continue from was lost when the thread was deleted and began again."""
        known = self.known
        if checkpoint_id is None or known.begun_after is None or checkpoint_id in known.own:
            return
        if (await self.find("", checkpoint_id)) is None:
            raise self._deleted()

    async def _demand_same_thread(self, root: str | None) -> None:
        """Check the same for a save that belongs to a root checkpoint, which the run may still be saving."""
        if self.recent.seen(self.id) is None or isinstance(root, Latest | Addressed):
            await self._demand_living(root)

    async def put_writes(
        self,
        config: Mapping[str, Any],
        namespace: str,
        checkpoint_id: str,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        path: str,
    ) -> None:
        """Save a task's writes; only special writes replace existing ones."""
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
        # The checkpoint may be saved later: LangGraph saves both in the background.
        await self._demand_same_thread(root_of(config, {}) if namespace else checkpoint_id)
        fields = {} if namespace else {flag(checkpoint_id): 1}
        asked, closed = ({}, []) if namespace else self._questions(str(checkpoint_id), task_id, dict(writes))
        change = {"set": {**fields, **asked}, "delete": closed, "items": list(items.values())}
        await self._write({**change, "phase": WAITING if asked else None})
        self.known.flags.update(fields)
        self._forget(closed)
        self.known.asks.update({name: (ask["checkpoint"], ask["task"]) for name, ask in asked.items()})
        self.known.waiting = self.known.waiting or bool(asked)

    # Interrupts

    def _questions(
        self, checkpoint_id: str, task_id: str, writes: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[str]]:
        """The fields of the questions that a task's writes open, and the names of those that they close."""
        known = dict(self.known.asks)
        # Releases before 1.2.20 give all interrupts of a task the same id, so the number of its answers is added.
        given = writes.get(RESUME)
        answers = len(given) if isinstance(given, list) else 0
        hidden = isinstance(self.serde, EncryptedSerializer)
        asked: dict[str, Any] = {}
        for each in writes.get(INTERRUPT, ()):
            if not isinstance(each, Interrupt):
                continue
            name = f"{each.id}.{answers}" if answers else str(each.id)
            value = "the graph waits for an answer" if hidden else each.value
            asked[ASK + name] = question(self.record, name, value, checkpoint=checkpoint_id, task=task_id)
        closed = [name for name, of in known.items() if of == (checkpoint_id, task_id) and name not in asked]
        return {name: ask for name, ask in asked.items() if name not in known}, closed

    def phase_without(self, closed: Sequence[str]) -> str | None:
        """The phase of the thread's next checkpoint, which closes these questions; None if it stays."""
        return "idle" if self.known.waiting and not self.known.asks.keys() - set(closed) else None

    def _forget(self, closed: Sequence[str]) -> None:
        for name in closed:
            self.known.asks.pop(name, None)


def _apart(saved: Saved) -> Iterator[str]:
    """The channels whose values are separate items."""
    return (channel for channel, value in saved.values.items() if value is None)


# The parts of LangGraph's configs


def thread_of(config: Any) -> str:
    """The thread's id, as text. Raises InvalidValue if missing: otherwise runs without an id would share a thread."""
    id = config["configurable"].get("thread_id")
    if id is None:
        raise InvalidValue("a run names its thread in config['configurable']['thread_id']")
    return str(id)


def namespace_of(config: Any) -> str:
    """The namespace of checkpoints; the root's is empty."""
    return str(config["configurable"].get("checkpoint_ns") or "")


def id_of(config: Any) -> str | None:
    """The checkpoint's id, None for the newest."""
    return get_checkpoint_id(config) or None


def root_of(config: Any, metadata: Any) -> str | None:
    """The id of the root checkpoint from which a subgraph runs, None if unknown."""
    named = config["configurable"].get("checkpoint_map") or metadata.get("parents") or {}
    return named.get("")
