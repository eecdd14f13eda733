"""Follows and stops the turns of a session, from any replica. Law: a follower is shown a prefix of what was streamed.

In order and once, or with a mark where something is missing. An *attempt* is what one holder of the lease streams for
one request: it is named by the fencing token and the request's tag. The next attempt at the same request begins again.

Each regular end is an entry of the stream. A worker that dies leaves none, so a follower that receives nothing for a
second asks who holds the lock. If that is another holder, the record says whether the request was answered: recovery
may have kept the commit and lost the stream.

Design: section 29.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from distributed_state.conversation import inbox, request_log, workflow
from distributed_state.errors import ColdUnavailable, InvalidValue, WarmUnavailable
from distributed_state.port.waited import bounded
from distributed_state.records.access import MESSAGES, VERSION
from distributed_state.records.context import RecordContext
from distributed_state.results import (
    Abandoned,
    Chunk,
    Ended,
    Failed,
    Notice,
    OutputPart,
    Restarted,
    StopRequested,
    StopResult,
    Truncated,
)
from distributed_state.tiers import read as read_path
from distributed_state.values.codec import encode
from distributed_state.values.journal import Op, item_of, unpack
from distributed_state.values.model import DELETED, PHASE, RESTORED, SEGMENTS, START, is_input
from distributed_state.warm import output
from distributed_state.warm.lock import check_times
from distributed_state.warm.output import FAILED, STOPPED, Entry, Received, Seen, Taken
from distributed_state.warm.scripts import STOP

_LOOK_SECONDS = 1.0  # without a message, after which a follower asks who holds the lock
_STOP_LOOK = 0.1  # between two looks at a turn that was asked to stop
_STEP_LOOK = 0.3  # seconds for which the next step of a workflow is waited for, before the lock is looked at again
_STEP_MS = 5000
_KEPT_MS = 60_000  # how long a stop outlives the lease that it was sent for, because that may be renewed
_REASON_BYTES = 1024
_RESTORING = frozenset((DELETED, RESTORED, SEGMENTS, START))  # fields of commits that change what other commits wrote


PART_NAMES: dict[type[OutputPart], str] = {
    Chunk: "chunk",
    Restarted: "restarted",
    Truncated: "truncated",
    StopRequested: "stop_requested",
    Abandoned: "abandoned",
    Failed: "failed",
    Ended: "ended",
}
"""The parts of an output by their names over HTTP. A Notice has a name of its own."""


@dataclass(slots=True)
class _Attempt:
    """The attempt that a follower shows: `number` is its last chunk. `tag` None: not known yet."""

    token: int
    number: int
    tag: str | None
    live: bool = True
    failed: bool = False


@bounded()
class AsyncOutput:
    """The output of a session's running turns, from `session.output(...)`.

    Example::

        async for part in session.output("r1"):
            match part:
                case Chunk(position, data):
                    print(data)
                case Restarted():
                    print("again:")
                case Ended(version=version, outcome=outcome):
                    print(outcome)
    """

    def __init__(
        self, context: RecordContext, request_id: str | None, after: str | None, wait: float | None, notices: bool
    ) -> None:
        name = request_log.name_of(request_id)
        self._tag = None if name is None else request_log.tag_of(name)
        self._posted = self._tag  # the request of an input is served by a turn that has another tag
        self._context = context
        self._tiers = context.tiers
        self._wait = wait
        if wait is not None:
            check_times(wait, 1.0, None)
        self._after = "*" if self._tag else ""
        self._attempt: _Attempt | None = None
        if after is not None:
            try:
                place = output.place_of(after)
            except (ValueError, TypeError):
                raise InvalidValue(f"after is a position that was received, not {after!r:.80}") from None
            self._attempt = _Attempt(*place, None)
            self._after = f"={after}"
        self._ready: deque[OutputPart] = deque()
        self._received: Received | None = None
        self._last = (0, 0)  # the last entry of the stream
        self._stop = (0, "")  # the last one: the token, and the reason as it was sent
        self._stop_shown = 0  # the token for which a stop was shown
        self._over = self._running = False
        self._notices = Notices(self._ready) if notices else None

    @property
    def ready(self) -> int:
        """How many parts have come that `next` has not returned yet."""
        return len(self._ready)

    @property
    def over(self) -> bool:
        """Whether no part will come: the request's turn has ended, or the output was closed."""
        return self._over and not self._ready

    @property
    def running(self) -> bool:
        """Whether a turn ran, of any request, when the output was looked at last: at least once a second."""
        return self._running

    async def next(self, timeout: float | None = None) -> OutputPart | None:
        """Wait for the next part; None after `timeout` seconds without one, and after the end of the request's turn.

        Without `timeout` it waits without limit.
        """
        if timeout is not None:
            check_times(timeout, 1.0, None)
        clock = self._tiers.port.monotonic
        end = None if timeout is None else clock() + timeout
        if self._received is None:
            self._context.allow("read", MESSAGES)
            self._received = self._tiers.followers.join(self._context.keys.output_channel)
            if self._notices is not None:
                self._tiers.observe(self._context.keys, self._received)
            if self._attempt is not None and self._posted is not None:
                # Which turn took the input is said before this place.
                entry = await read_path.read(self._tiers, self._context.keys)
                self._after = self._after if inbox.fate_of(entry, self._posted) is None else "*"
        received = self._received
        while not self._ready and not self._over:
            received.arrived.clear()
            if self._notices is not None and (change := received.pop_change()) is not None:
                received.missed = self._notices.committed(change, self._position()) or received.missed
            elif received.missed:
                received.missed = False
                try:
                    await self._look()
                except (WarmUnavailable, ColdUnavailable):
                    received.missed = True
                    raise
            elif (payload := received.pop()) is not None:
                received.missed = not self._take(Entry.published(payload))
            else:
                left = _LOOK_SECONDS if end is None else min(_LOOK_SECONDS, end - clock())
                if left <= 0:
                    return None
                received.missed = not await received.arrived.wait(left)
        if self._over and not self._ready:
            await self.close()
            return None
        return self._ready.popleft()

    def _take(self, entry: Entry | None) -> bool:
        """Show a published entry if it continues what was shown; False: the stream has to be read."""
        known = self._attempt
        if entry is None or known is None or not known.live or known.tag is None:
            return False
        if (entry.token, entry.number) <= (known.token, known.number):
            return True
        if entry.token != known.token or entry.tag != known.tag or entry.first != known.number + 1 or entry.how != "c":
            return False
        self._chunks(known, entry)
        self._note(entry)
        return True

    def _position(self) -> str:
        """That of the last part, "" before the first one."""
        known = self._attempt
        return "" if known is None else f"{known.token}-{known.number}"

    def _note(self, entry: Entry) -> None:
        self._last = entry.token, entry.number
        self._after = f"{entry.token}-{entry.number}"

    async def _look(self) -> None:
        """Read what the stream has, and who holds the lock."""
        kept: list[Any] | None = None
        while not self._over:
            seen = await _looked(self._context, self._after)
            self._after = "{}-{}".format(*seen.begin)
            self._stop = seen.stop
            for entry in seen.entries:
                if not self._over:
                    await self._show(entry)
                self._note(entry)
            if seen.more or self._over:
                continue
            if kept is not None and not seen.entries:
                self._answered(kept)
                return
            kept = await self._judge(seen)
            if kept is None:
                return
            # A turn may have streamed and ended between the look and the read of the record, so look again.

    async def _show(self, entry: Entry) -> None:
        known = self._attempt
        if known is not None and known.tag is None and entry.token == known.token:
            known.tag = entry.tag
        if self._tag is not None and entry.tag != self._tag:
            number = self._taken_at(entry)
            if number is None or (known is not None and entry.token < known.token):
                return  # the request's next attempt may follow in the stream: see _judge
            self._tag = entry.tag
            if known is None or known.token != entry.token:
                known = await self._begin(entry.token, entry.tag, number, again=True)
        if known is None or (known.token, known.tag) != (entry.token, entry.tag) or not known.live:
            known = await self._begin(entry.token, entry.tag)
        if entry.how == "c":
            self._chunks(known, entry)
        elif not self._over:
            await self._end(known, entry)

    def _taken_at(self, entry: Entry) -> int | None:
        """The number under which a turn took the input of the request that is followed; None if it is not here."""
        parts = entry.chunks(self._tiers.codec_of(self._context.text)) if entry.how == "c" else ()
        taken = (number for number, each in enumerate(parts, entry.first) if self._posted in _tags(each))
        return next(taken, None)

    async def _begin(self, token: int, tag: str, number: int | None = None, *, again: bool = False) -> _Attempt:
        """Show that another attempt begins, after this number. `again`: of the same request, in another turn."""
        before = self._attempt
        if self._notices is not None:
            self._notices.runs(token, self._position())
        if number is None:
            number = self._last[1] if self._last[0] == token else 0
        if before is not None and (before.live or before.failed):
            if again or before.tag == tag or (before.tag is None and self._tag is not None):
                self._ready.append(Restarted(f"{token}-{number}"))
            elif before.live:
                await self._gone(before)
        self._attempt = _Attempt(token, number, tag)
        return self._attempt

    def _chunks(self, known: _Attempt, entry: Entry) -> None:
        if entry.first > known.number + 1:
            self._ready.append(Truncated(f"{entry.token}-{entry.first - 1}"))
        parts = entry.chunks(self._tiers.codec_of(self._context.text))
        for number, data in enumerate(parts, start=entry.first):
            if number > known.number and not isinstance(data, Taken):
                self._ready.append(Chunk(f"{entry.token}-{number}", data))
        known.number = max(known.number, entry.number)

    async def _end(self, known: _Attempt, entry: Entry) -> None:
        how, version = entry.ended
        kept = None if version is None else await self._answer(entry.tag)
        known.live = False
        known.failed = how == FAILED
        if entry.number <= known.number:
            return  # the follower goes on after this end
        if entry.first > known.number + 1:
            self._ready.append(Truncated(f"{entry.token}-{entry.first - 1}"))
        known.number = entry.number
        position = f"{entry.token}-{entry.number}"
        if how == STOPPED:
            self._show_stop(entry.token, f"{entry.token}-{entry.number - 1}")  # the end still follows
        if known.failed:
            self._ready.append(Failed(position))  # it is over, unless the request is served again: see _judge
        else:
            self._ready.append(Ended(position, version, None if kept is None else kept[1]))
            self._over = self._tag is not None
        if self._notices is not None:
            self._notices.runs(0, position)

    async def _answer(self, tag: str, *, fresh: bool = True) -> list[Any] | None:
        """The outcome of an answered request by the record, None if it does not have it."""
        return request_log.answer_to(await read_path.read(self._tiers, self._context.keys, fresh=fresh), tag)

    def _answered(self, kept: list[Any]) -> None:
        """Show the end of the request as the record has it, because the stream does not."""
        known = self._attempt
        place = self._last if known is None else (known.token, known.number)
        position = "{}-{}".format(*place)
        if known is not None and (known.live or known.failed):
            # The stream has lost the end, or another attempt answered: the chunks shown may not be the answer.
            self._ready.append(Truncated(position))
        self._ready.append(Ended(position, request_log.answered_at(kept), kept[1]))
        self._over = self._tag is not None

    async def _is_there(self, known: _Attempt) -> bool:
        """Whether the stream still has what was shown, so that it would have the end, too."""
        seen = await _looked(self._context, f"={known.token}-{known.number}")
        return any(entry.token == known.token for entry in seen.entries)

    async def _gone(self, known: _Attempt) -> None:
        """Show the end of an attempt that left no end in the stream."""
        position = f"{known.token}-{known.number}"
        kept = None if known.tag is None else await self._answer(known.tag)
        if kept is not None:
            self._answered(kept)
        elif known.tag is None or not await self._is_there(known):
            self._ready.append(Truncated(position))  # nothing is left by which to say how it ended
        else:
            known.failed = True
            self._ready.append(Abandoned(position))
        known.live = False

    async def _judge(self, seen: Seen) -> list[Any] | None:
        """Show what the lock says: a stop, an attempt that is over.

        Returns the answer if the request was answered, and the stream does not show it.
        """
        self._running = bool(seen.tag)
        if self._notices is not None:
            self._notices.runs(seen.token if self._running else 0, self._position())
        known = self._attempt
        mine = self._tag is None or seen.tag == self._tag
        if known is not None and known.live and seen.token != known.token:
            if mine and seen.token > known.token and known.tag in (seen.tag, None):
                await self._begin(seen.token, seen.tag)
            elif self._tag is None:
                await self._gone(known)
        if self._tag is not None and not mine:
            entry = await read_path.read(self._tiers, self._context.keys, fresh=known is not None)
            kept = request_log.answer_to(entry, self._tag)
            fate = inbox.fate_of(entry, self._posted or "")
            if kept is None and fate is not None and fate > 0:
                kept = [fate - 1, None]  # the turn that served the input had no request id, or is no longer remembered
            if kept is not None:
                return kept
            if known is not None or fate == -1:
                place = self._last if known is None else (known.token, known.number)
                if fate != 0 and (known is None or known.live):
                    self._ready.append(Abandoned("{}-{}".format(*place)))
                if known is not None:
                    known.live, known.failed = False, True
                self._over = fate != 0  # an input that waits is served by the next turn
        if mine and seen.token and not self._over:
            known = self._attempt
            number = known.number if known is not None and known.token == seen.token else 0
            self._show_stop(seen.token, f"{seen.token}-{number}")
        return None

    def _show_stop(self, token: int, position: str) -> None:
        """Show that the holder with this token was asked to stop, once."""
        asked, reason = self._stop
        if asked == token != self._stop_shown:
            self._stop_shown = token
            why = output.stopped(self._context.keys, self._tiers.codec_of(self._context.text), reason).reason
            self._ready.append(StopRequested(position, why))

    async def close(self) -> None:
        """Stop following."""
        self._over = True
        received, self._received = self._received, None
        if received is not None:
            if self._notices is not None:
                self._tiers.stop_observing(self._context.keys.channel, received)
            self._tiers.followers.leave(self._context.keys.output_channel, received)
            received.arrived.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputPart:
        part = await self.next(self._wait)
        if part is None:
            raise StopAsyncIteration
        return part


class Notices:
    """Turns the messages about commits, which hot copies are updated by, into notices, added to `ready`."""

    def __init__(self, ready: deque[OutputPart]) -> None:
        self._ready = ready
        self._epoch = b""
        self._version = 0
        self._turn = 0

    def _add(self, position: str, name: str, **data: Any) -> None:
        self._ready.append(Notice(position, name, data))

    def committed(self, payload: bytes, position: str) -> bool:
        """Add notices of a commit; b"": messages may be missing. Returns whether the turn may have ended with it."""
        if not payload:
            self._version = 0
            self._add(position, "resync")
            return True
        epoch, number, _, change = payload.split(b" ", 3)
        version = int(number)
        if change[:1] not in (b"+", b"-"):
            return False  # about the lease
        if self._version and (epoch, version) != (self._epoch, self._version + 1):
            if epoch == self._epoch and version <= self._version:
                return False
            self._add(position, "resync")
        elif change[:1] == b"-":
            self._add(position, "resync")
        else:
            self._name(unpack(change[1:]), version, position)
        self._epoch, self._version = epoch, version
        return True

    def _name(self, operations: Sequence[Op], version: int, position: str) -> None:
        numbers = [int(each.name) for each in operations if each.kind == b"m"]
        inputs = [(each.kind, int(each.name[2:])) for each in operations if is_input(each.name)]
        changed = [each.name for each in operations if each.kind in b"sd"]
        names = sorted(name.decode("utf-8", "surrogatepass") for name in changed if name[:1] != b"#")
        if any(each.kind in b"cw" or each.name in _RESTORING for each in operations):
            self._add(position, "resync")
            return
        items = sorted(
            {item_of(each.name)[0].decode("utf-8", "surrogatepass") for each in operations if each.kind in b"pq"}
        )
        if numbers:
            self._add(position, "message.appended", version=version, first=min(numbers), last=max(numbers))
        if names or items or PHASE in changed:
            more = {"items": items, "phase": PHASE in changed}
            self._add(position, "fields.changed", version=version, names=names, **more)
        for number in (number for kind, number in inputs if kind == b"s"):
            self._add(position, "inbox.posted", version=version, number=number)
        if taken := sorted(number for kind, number in inputs if kind == b"d"):
            self._add(position, "inbox.taken", version=version, numbers=taken)

    def runs(self, token: int, position: str) -> None:
        """Add notices if another turn runs now, or none (0)."""
        if token == self._turn:
            return
        if self._turn:
            self._add(position, "turn.ended", token=self._turn)
        if token:
            self._add(position, "turn.started", token=token)
        self._turn = token


def _tags(part: Any) -> Sequence[str]:
    return part.tags if isinstance(part, Taken) else ()


async def _looked(context: RecordContext, after: str) -> Seen:
    """Look at the output; after Redis lost its data, start the partition again first."""
    while (seen := await output.look(context.tiers.warm, context.keys, after)) is None:
        await context.tiers.start(context.keys.partition)
    return seen


# Stops


async def stop(
    context: RecordContext, request_id: str | None, token: int | None, reason: str | None, wait: float
) -> StopResult:
    """Ask the running turn to stop, and wait for its end: see `session.stop`."""
    name = request_log.name_of(request_id)
    if reason is not None and (not isinstance(reason, str) or len(encode(reason)) > _REASON_BYTES):
        raise InvalidValue(f"reason is a str of at most {_REASON_BYTES} bytes, not {reason!r:.80}")
    if token is not None and (type(token) is not int or token < 1):
        raise InvalidValue(f"token is the fencing token of a turn, not {token!r:.80}")
    check_times(wait, 1.0, None)
    context.allow("write", VERSION)
    tag = "" if name is None else request_log.tag_of(name)
    tiers = context.tiers
    keys = context.keys
    end = tiers.port.monotonic() + wait
    sealed = output.sealed_reason(tiers.codec_of(context.text), reason)
    touched = [keys.lock, keys.stop, keys.wait, keys.meta, keys.channel, keys.lock_channel, keys.output_channel]
    result = StopResult("nothing ran")
    serving: int | None = None  # the turn that serves the input of this request, which has another tag
    while True:
        which = [tag, sealed, _KEPT_MS, token or ""] if serving is None else ["", sealed, _KEPT_MS, serving]
        answer = await tiers.warm.script(STOP, touched, which)
        if answer[0] == b"uninitialised":
            await tiers.start(keys.partition)
            continue
        if answer[0] == b"asked":
            result = await _ended(context, answer[1].decode(), end)
        if result.state not in ("finished", "nothing ran"):
            return result
        entry = await read_path.read(tiers, keys, fresh=True)
        kept = request_log.answer_to(entry, tag) if tag and answer[0] != b"asked" else None
        if kept is not None:
            return StopResult("finished", request_log.answered_at(kept))
        if answer[0] == b"waiting":
            return StopResult("stopped")
        fate = inbox.fate_of(entry, tag) if token is None else None
        if fate is not None and fate > 0 and serving is None:
            return StopResult("finished", fate)
        serving = await _serving(context, tag, min(end, tiers.port.monotonic() + _STEP_LOOK)) if fate == 0 else None
        if serving is not None:
            continue
        if token is not None or not workflow.is_unfinished(entry):
            return result
        if await _stops_before_a_step(
            context, keys.stop_of(tag), sealed, min(end - tiers.port.monotonic(), _STEP_LOOK)
        ):
            return StopResult("stopped")
        if tiers.port.monotonic() >= end:
            return result


async def _serving(context: RecordContext, tag: str, end: float) -> int | None:
    """The token of the running turn that has taken the input of this request; None if there is none."""
    after = ""
    while True:
        seen = await _looked(context, after)
        form = context.tiers.codec_of(context.text)
        for entry in seen.entries:
            after = f"{entry.token}-{entry.number}"
            chunks = entry.chunks(form) if entry.how == "c" else ()
            if entry.token == seen.token and any(tag in _tags(each) for each in chunks):
                return seen.token
        if not seen.more:
            if not seen.lock_value or context.tiers.port.monotonic() >= end:
                return None
            await context.tiers.port.sleep(_STOP_LOOK / 10)  # the note that it was taken waits for `stream_interval`


async def _stops_before_a_step(context: RecordContext, key: bytes, reason: str, seconds: float) -> bool:
    """Ask the session's workflow to stop before its next step; return whether it noticed that within this time."""
    warm = context.tiers.warm
    await warm.command(b"SET", key, reason, b"PX", _STEP_MS)
    end = context.tiers.port.monotonic() + seconds
    while context.tiers.port.monotonic() < end:
        await context.tiers.port.sleep(_STOP_LOOK / 10)
        if b"\n" in (await warm.command(b"GET", key) or b""):
            break
    return b"\n" in (await warm.command(b"GETDEL", key) or b"")  # what acquire.lua writes


async def _ended(context: RecordContext, lock_value: str, end: float) -> StopResult:
    """Wait for the end of the turn with this lock value."""
    tiers = context.tiers
    received = tiers.followers.join(context.keys.output_channel)
    token = int(lock_value[1:].partition("@")[0])
    after = f"{token}-0"
    result: StopResult | None = None
    try:
        while True:
            received.arrived.clear()
            seen = await _looked(context, after)
            for entry in seen.entries:
                after = f"{entry.token}-{entry.number}"
                if entry.token == token and entry.how == "e":
                    how, version = entry.ended
                    result = StopResult("stopped" if how == STOPPED else "finished", version)
                    if entry.tag == output.tag_of(lock_value):
                        return result
            if seen.more:
                continue
            if seen.lock_value != lock_value:
                return result or await _without_end(context, lock_value)
            left = end - tiers.port.monotonic()
            if left <= 0:
                return StopResult("stopping")
            await received.arrived.wait(min(left, _STOP_LOOK))
    finally:
        tiers.followers.leave(context.keys.output_channel, received)


async def _without_end(context: RecordContext, lock_value: str) -> StopResult:
    """The result for a holder that left no end: it ended before it noticed the stop, writes over HTTP, or died."""
    tiers = context.tiers
    keys = context.keys
    tag = output.tag_of(lock_value)
    kept = request_log.answer_to(await read_path.read(tiers, keys, fresh=True), tag) if tag else None
    if kept is not None:
        return StopResult("finished", request_log.answered_at(kept))
    asked, token = await tiers.warm.commands([(b"GET", keys.stop), (b"ZSCORE", keys.leases, keys.record)])
    mine = lock_value.encode() + b"\n"
    if asked is not None and asked.startswith(mine) and asked.removeprefix(mine).endswith(b"\n"):
        return StopResult("stopped")  # it knows: see CarriedLease.check
    # The lock of a worker that died leaves its member: see held_leases.py.
    died = token is not None and int(float(token)) == int(lock_value[1:].partition("@")[0])
    return StopResult("stopped" if died else "finished")
