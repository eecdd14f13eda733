"""A turn: one request to a conversation, from its question to its answer. Law: it is one commit, or nothing.

A turn holds the record's lease, so that no other worker serves the same conversation meanwhile, and costs two round
trips: take the lease and read, commit and give the lease back.
"""

from __future__ import annotations

import secrets
from types import TracebackType
from typing import Any, Protocol, Self
from zlib import crc32

from distributed_state import codec, lineage, record, timeline
from distributed_state.agent.machine import DEFAULT, StateMachine
from distributed_state.changes import Changes
from distributed_state.errors import Deleted, InvalidValue
from distributed_state.hot import Entry
from distributed_state.keys import RecordKeys
from distributed_state.lease import AsyncLease
from distributed_state.model import REQUEST, Message, Written
from distributed_state.tiers import Tiers
from distributed_state.transaction import Transaction
from distributed_state.warm import Committed, Draft

BUSY = ("wait", "reject", "interrupt")


class Handle(Protocol):
    """What a turn needs of the session it is of."""

    _names: RecordKeys

    @property
    def _home(self) -> Any: ...
    def _changes(self) -> Changes: ...
    async def _commit(self, draft: Draft, *, last: AsyncLease | None = None) -> Committed: ...


class AsyncTurn(Transaction):
    """One turn: the session's fields as a dict, its messages, its phase. Committed whole at the end of `async with`.

    A request id makes it repeatable: when that request was answered already, `repeated` is true, `outcome` is what the
    first one left, and nothing can be changed.
    """

    def __init__(
        self, handle: Handle, *, request_id: str | None, busy: str, wait: float, ttl: float, limit: float | None
    ) -> None:
        super().__init__(Entry("", 0, {}, {}), handle._changes())
        self._over = True  # until it is entered
        self._handle, self._tiers = handle, _tiers(handle)
        self.request_id, self.repeated = request_id, False
        self.written: Written | None = None  # after the end: the version and the number of the first message
        self._request = _request(request_id)
        self._outcome: Any = None
        self._pending: list[Message] = []
        self._moved: list[str] = []
        if busy not in BUSY:
            raise InvalidValue(f"busy is one of {', '.join(BUSY)}, not {busy!r}")
        tag = secrets.token_hex(4) if self._request is None else f"{crc32(self._request):x}"
        self._lease = self._tiers.lock(
            handle._names, wait=0.0 if busy == "reject" else wait, ttl=ttl, limit=limit, turn=tag,
            seize=busy == "interrupt",
        )  # fmt: skip

    @property
    def token(self) -> int:
        """The fencing token of the turn's lease."""
        return self._lease.token

    @property
    def lost(self) -> bool:
        """Whether the lease is gone, so that nothing of this turn can be committed any more."""
        return self._lease.lost

    @property
    def phase(self) -> str | None:
        """The phase, as this turn has moved it."""
        return self._moved[-1] if self._moved else super().phase

    @property
    def pending(self) -> tuple[Message, ...]:
        """The messages that this turn adds."""
        return tuple(self._pending)

    @property
    def outcome(self) -> Any:
        """What the request came to, any JSON value: set it, and a repeated request finds it."""
        return self._outcome

    @outcome.setter
    def outcome(self, value: Any) -> None:
        self._open()
        codec.encode(value, "outcome")
        self._outcome = value

    def append(self, *messages: Message | dict[str, Any]) -> None:
        """Add messages to the conversation with this turn."""
        for message in messages:
            self._open().append(message)
            self._pending.append(message if isinstance(message, Message) else codec.as_message(message))

    def move_to(self, phase: str | None) -> None:
        """Set the phase with this turn."""
        if phase is None:
            raise InvalidValue("a turn moves to a phase; None is none")
        self._open().phase(phase)
        self._moved.append(phase)

    def transition(self, event: str, *, machine: StateMachine = DEFAULT) -> str:
        """Move to the phase that follows by this event and return it. Raises InvalidTransition."""
        phase = machine.next(self.phase or machine.initial, event)
        self.move_to(phase)
        return phase

    async def messages(self, *, last: int | None = None) -> list[Message]:
        """Read the last messages, or all, oldest first, those that this turn adds included."""
        if last is not None and (type(last) is not int or last < 0):
            raise InvalidValue(f"last is an int from 0 on or None, not {last!r}")
        if last is not None and last <= len(self._pending):
            return self._pending[len(self._pending) - last :]
        runs = lineage.segments(self._handle._names.ref.text, self._entry.fields)
        runs = runs if last is None else lineage.last(runs, last - len(self._pending))
        entry = self._entry
        if any(n not in entry.messages for run in runs for n in range(run.start, run.stop)):
            entry = await record.whole(self._tiers, self._handle._names, entry)
        return [*await timeline.visible(self._tiers, self._handle._names, entry, runs), *self._pending]

    async def __aenter__(self) -> Self:
        names = self._handle._names
        try:
            self._entry = await record.hold(self._tiers, names, self._lease)
            if self._entry.deleted:
                raise Deleted(f"{names.ref.text[:200]}: deleted at version {self._entry.version}")
            answered = self._entry.fields.get(self._request or b"")
            if answered is not None:
                self.repeated, self._outcome = True, codec.decode(answered, "outcome")[1]
        except BaseException:
            await self._lease.release()
            raise
        if self.repeated:
            await self._lease.release()
        else:
            self._over = False
            self._lease.protect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.repeated:
            return
        try:
            if error is None:
                await self._commit()
            self._over = True
        except BaseException as failed:
            await self._lease.__aexit__(type(failed), failed, failed.__traceback__)
            raise
        await self._lease.__aexit__(kind, error, trace)

    async def _commit(self) -> None:
        if self._request is not None:
            self._changes.reserved(self._request, codec.encode([self._entry.version, self._outcome], "outcome"))
            for name in self._outdated():
                self._changes.reserved(name, None)
        draft = self._draft("turn")
        if draft is not None:
            # The lease is what keeps others out; what this task wrote beside the turn is no conflict.
            draft.expected = None
            done = await self._handle._commit(draft, last=self._lease)
            self.written = Written(done.version, first_message=done.first_message)

    def _outdated(self) -> list[bytes]:
        """Requests that make room for this one, the oldest first."""
        known = {name: data for name, data in self._entry.fields.items() if name[:2] == REQUEST}
        oldest = sorted(known, key=lambda name: int(codec.decode(known[name], "outcome")[0]))
        return oldest[: max(len(known) + 1 - self._tiers.settings.remembered_requests, 0)]

    def _open(self) -> Changes:
        if self.repeated:
            raise InvalidValue(f"request {self.request_id!r:.200} was answered already: see `repeated` and `outcome`")
        return super()._open()


def _tiers(handle: Handle) -> Tiers:
    tiers: Tiers = handle._home.tiers()
    return tiers


def _request(request_id: str | None) -> bytes | None:
    if request_id is None:
        return None
    if not isinstance(request_id, str) or not 0 < len(request_id.encode("utf-8", "surrogatepass")) <= 256:
        raise InvalidValue(f"a request id is a str of 1 to 256 bytes, not {request_id!r:.80}")
    return REQUEST + request_id.encode("utf-8", "surrogatepass")
