"""A conversation behind a service. Law: a method is one request, unless its docstring gives another number.

Design: section 26.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Literal, Never, Self

from distributed_state.conversation.inbox import Later
from distributed_state.conversation.phases import DEFAULT, StateMachine
from distributed_state.conversation.request_log import name_of
from distributed_state.conversation.session import AsyncSession
from distributed_state.conversation.turn import AsyncTurn
from distributed_state.conversation.turn_clock import ModelCall, TurnClock
from distributed_state.errors import Deleted, InvalidValue, NotFound, Stopped
from distributed_state.port.bodies import leaving
from distributed_state.records.messages import Page
from distributed_state.remote import values
from distributed_state.remote.record import AsyncRemoteRecord, RemoteTransaction
from distributed_state.remote.requests import (
    HEADER,
    AsyncRemoteLease,
    EventSource,
    RecordPlace,
    State,
    path_of,
    with_query,
)
from distributed_state.results import Ended, Input, Lifetime, OutputPart, StopResult, Tokens, Usage
from distributed_state.values import codec, field_ttl
from distributed_state.values.model import Message
from distributed_state.values.schedule import checked_handler
from distributed_state.values.usage import checked_bound, checked_model, refuse_above
from distributed_state.warm.lock import check_times

_INTERVAL = 0.05  # seconds between two requests with chunks
_BATCH = 16 * 1024  # characters of chunks, after which they are sent at once


class AsyncRemoteTurn(RemoteTransaction):
    """One request to a conversation, from `async with session.turn(...)`: the fields of the locked record as a dict.

    If the request was answered before, `repeated` is true, `outcome` is that of the first turn, and nothing can be
    changed.
    """

    request_id: str | None
    """The id of the request, if it has one."""
    repeated: bool
    """Whether the request was answered before."""
    answered_version: int
    """The version that answered a repeated request."""
    written: int | None
    """After the end: the turn's version, None if nothing changed."""

    def __init__(self, state: State, request_id: str | None, place: RecordPlace, lease: AsyncRemoteLease) -> None:
        super().__init__(state)
        self.request_id = request_id
        self._place = place
        self._lease = lease
        self._pending: list[dict[str, Any]] = []
        self._size = 0
        self._sent = float("-inf")
        self._streamed = 0
        self._inputs: dict[int, Input] = {}
        self._taken: list[int] = []
        self._noted: list[int] = []  # taken inputs of which the followers of the turn do not know yet
        self._clock = TurnClock(place.requests.http.monotonic)
        self._clock.begin()
        self._spent: dict[str, Tokens] = {}
        self.repeated = False
        self.answered_version = 0
        self.written = None
        self._outcome: Any = None

    def __getattr__(self, name: str) -> Any:
        raise values.refuse(self, name, lambda: AsyncTurn)

    def show(self, answered: Mapping[str, Any]) -> None:
        """Show the stored outcome of the request, which can no longer be changed."""
        self.repeated = True
        self.answered_version = answered["version"]
        self._outcome = answered["outcome"]
        self._closed = f"request {self.request_id!r:.200} was answered already: see `repeated` and `outcome`"

    async def stream(self, chunk: Any) -> None:
        """Show a part of the answer to those who follow this turn: a str, a JSON value or bytes.

        Chunks are sent together: one request for each 50 ms or 16 KiB, `flush`, and the end. Raises Stopped, once, if
        somebody asked the turn to stop, and Fenced if the lease is lost.
        """
        self._open()
        if chunk == "":
            return
        body = values.chunk_body(chunk)
        self._pending.append(body)
        self._size += len(str(body))
        now = self._place.requests.http.monotonic()
        if self._size >= _BATCH or now - self._sent >= _INTERVAL:
            await self.flush()

    async def flush(self) -> None:
        """Send the chunks that wait."""
        if not self._pending and not self._noted:
            return
        first = self._streamed + 1
        body = {"first": first, "chunks": self._pending, "inputs": self._noted}
        self._sent = self._place.requests.http.monotonic()
        headers = {HEADER: self._lease.lease}
        try:
            done = await self._place.requests.order(
                "POST", f"{self._place.path}/output", body, headers=headers, repeatable=True
            )
        except Stopped:
            raise  # nothing was appended: the chunks still wait
        self._streamed = done["last"]
        self._pending, self._size, self._noted = [], 0, []

    @property
    def inbox(self) -> tuple[Input, ...]:
        """The inputs that `arrived` has read and that this turn has not taken, oldest first."""
        return tuple(each for number, each in sorted(self._inputs.items()) if number not in self._taken)

    async def arrived(self) -> tuple[Input, ...]:
        """Read the inputs that wait; those that are new since the last time. They are then in `inbox`."""
        self._open()
        found = await read_inbox(self._place)
        new = tuple(each for each in found if each.number not in self._inputs)
        self._inputs = {each.number: each for each in found}
        return tuple(each for each in new if each.number not in self._taken)

    def take(self, *numbers: int) -> tuple[Input, ...]:
        """Take the inputs of `inbox`, or those with these numbers: the commit of this turn removes them."""
        self._open()
        found = tuple(each for each in self.inbox if not numbers or each.number in numbers)
        self._taken += [each.number for each in found]
        self._noted += [each.number for each in found if each.request_id is not None]
        return found

    def model(self, name: str, *, input_tokens: int = 0, output_tokens: int = 0) -> ModelCall:
        """Note the tokens of a model's call, or measure a call by `with`, as in a turn of a direct store."""
        checked_model(name)
        call = ModelCall(self._clock, name, self._use)
        if input_tokens or output_tokens:
            call.used(input_tokens=input_tokens, output_tokens=output_tokens)
        return call

    def _use(self, name: str, tokens: Tokens) -> None:
        self._open()
        model = checked_model(name)
        self._spent[model] = self._spent.get(model, Tokens()) + tokens

    @property
    def usage(self) -> Usage:
        """The tokens that models used in this turn, as noted by `model`."""
        return Usage.of(self._spent)

    @property
    def streamed(self) -> int:
        """The number of the last chunk that was sent."""
        return self._streamed

    @property
    def outcome(self) -> Any:
        """The result of the request, any JSON value. A repeated request gets the value that was set here."""
        return self._outcome

    @outcome.setter
    def outcome(self, value: Any) -> None:
        self._open()
        codec.encode(value, "outcome")
        self._outcome = value

    def move_to(self, phase: str | None) -> None:
        """Set the phase with this turn."""
        if phase is None:
            raise InvalidValue("a turn moves to a phase, not to None")
        super().move_to(phase)

    @property
    def phase(self) -> str | None:
        """The phase, including a move by this turn."""
        moved: str | None = self._more.get("phase", super().phase)
        return moved

    def transition(self, event: str, *, machine: StateMachine = DEFAULT) -> str:
        """Move to the phase that this event leads to and return it. Raises InvalidTransition."""
        following = machine.next(self.phase or machine.initial, event)
        self.move_to(following)
        return following

    def body(self) -> dict[str, Any] | None:
        """End the turn and return it as a request body, None if there is nothing to commit."""
        found = super().body() or {}
        if self._taken:
            found["inputs"] = self._taken
        if self._spent:
            found["usage"] = {name: asdict(each) for name, each in self._spent.items()}
        if not found and self.request_id is None:
            return None
        times = self._clock.times
        if times.runs:
            found |= {"runs": [asdict(each) for each in times.runs], "seconds": times.total}
        found.pop("kind", None)
        if "append" in found:
            found["messages"] = found.pop("append")
        if self._streamed:
            found["streamed"] = self._streamed
        return found if self.request_id is None else {**found, "request_id": self.request_id, "outcome": self._outcome}


class AsyncRemoteTurnBody:
    """The `async with` around a AsyncRemoteTurn."""

    def __init__(
        self, place: RecordPlace, request_id: str | None, wait: float, ttl: float, revive: bool, below: int | None
    ) -> None:
        self._place = place
        self._revive = revive
        self._usage_below = below
        self._request_id = request_id
        turn = {"turn": True} if request_id is None else {"turn": True, "request": request_id}
        self._lease = AsyncRemoteLease(place.requests, place.path, wait=wait, ttl=ttl, turn=turn)

    async def __aenter__(self) -> AsyncRemoteTurn:
        await self._lease.acquire()
        try:
            answered = None
            if self._request_id is not None:
                path = path_of(self._place.ref, "/turns/{}", self._request_id)
                answered = await self._place.read(path, absent=None)
            state = await self._place.state(fresh=True)
            if state.deleted and not (self._revive or state.deleted.begins_again):
                raise state.deleted
            if self._usage_below is not None and answered is None:
                refuse_above(self._usage_below, await read_usage(self._place), self._place.ref.text)
            self._view = AsyncRemoteTurn(state, self._request_id, self._place, self._lease)
            if answered is not None:
                self._view.show(answered)
                await self._lease.release()
        except BaseException:
            await self._lease.release()
            raise
        return self._view

    @leaving("_lease.body")
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        view = self._view
        try:
            if error is None and not view.repeated:
                await view.flush()
            self._lease.ends_output(view.streamed, failed=True)
            body = None if error is not None or view.repeated else view.body()
            if body is None:
                self._lease.ends_output(view.streamed, failed=error is not None)
            else:
                if self._revive:
                    body["revive"] = True
                done = await self._place.write(
                    body, to="/turns", owned=view.version == 0, lease=self._lease,
                    expect_exists=None if view.version else False,
                )  # fmt: skip
                self._lease.ends_output(0, failed=False)  # the commit has ended it
                # While the lease is held, only an earlier attempt of this turn itself can have been answered.
                if done["repeated"] and self._request_id is not None and not await self._lease.renew():
                    view.show(done)
                else:
                    view.written = done["version"]
        finally:
            await self._lease.release()


async def read_usage(place: RecordPlace) -> Usage:
    """The tokens that the session's models have used."""
    found = await place.read(f"{place.path}/usage", absent=None)
    return Usage() if found is None else values.usage(found)


async def read_inbox(place: RecordPlace) -> list[Input]:
    """The inputs that wait."""
    found = await place.read(f"{place.path}/inbox", absent={"inputs": []})
    return [values.waiting(each) for each in found["inputs"]]


class AsyncRemoteOutput:
    """The output of a conversation's running turns, from `session.output(...)`: see the direct store's.

    One connection, which is made again when it breaks, here or to another worker, after the last part.
    """

    def __init__(
        self, place: RecordPlace, request_id: str | None, after: str | None, wait: float | None, notices: bool
    ) -> None:
        name_of(request_id)
        query = {"request": request_id, "after": after, "notices": notices or None}
        self._source = EventSource(place.requests, with_query(f"{place.path}/output", query), after or "", finite=True)
        self._request_id = request_id
        self._wait = wait
        if wait is not None:
            check_times(wait, 1.0, None)
        self._clock = place.requests.http.monotonic

    async def next(self, timeout: float | None = None) -> OutputPart | None:
        """Wait for the next part; None after `timeout` seconds without one, and after the end of the request's turn."""
        if timeout is not None:
            check_times(timeout, 1.0, None)
        end = None if timeout is None else self._clock() + timeout
        while not self._source.closed:
            found = await self._source.next(None if end is None else max(0.0, end - self._clock()))
            if found is not None and "data" in found:
                part = values.part(found.get("event", ""), self._source.position, json.loads(found["data"]))
                if self._request_id is not None and isinstance(part, Ended):
                    await self.close()
                return part
            if found is None and end is not None and self._clock() >= end:
                return None
        return None

    async def close(self) -> None:
        """Stop following."""
        await self._source.close()

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


class AsyncRemoteSession(AsyncRemoteRecord):
    """A conversation behind a service: a record with messages and a phase, from `store.session(id)`.

    Example::

        session = store.session("c1", user="u1")
        await session.append({"role": "user", "content": "Where to?"}, {"role": "assistant", "content": "Oslo."})
        for message in await session.messages(last=10):
            print(message.role, message.content)
    """

    def __getattr__(self, name: str) -> Any:
        raise values.refuse(self, name, lambda: AsyncSession)

    def turn(
        self,
        *,
        request_id: str | None = None,
        busy: str = "wait",
        wait: float = 60.0,
        ttl: float = 30.0,
        usage_below: int | None = None,
        revive: bool = False,
        **others: Never,
    ) -> AsyncRemoteTurnBody:
        """Serve one request inside `async with`: its changes are one commit at the end, or nothing.

        Example::

            async with session.turn(request_id="r1") as turn:
                if not turn.repeated:
                    turn.append({"role": "user", "content": "Where to?"})
                    turn.outcome = "Oslo."

        The turn holds a lease on the conversation, like `lock`. If the `request_id` was answered before, here or by the
        direct store, `turn.repeated` is true and `turn.outcome` is that of the first turn. If a turn is already
        running, this one waits up to `wait` seconds (LockTimeout); with `busy="reject"` it does not wait. With
        `revive`, a session that was deleted or expired begins again with this turn. With `usage_below` the turn begins
        only while the session's models have used fewer tokens (UsageExceeded). Four requests, one more with a
        `request_id`, and one with `usage_below`.
        """
        values.refuse_options("turn", others)
        if busy not in ("wait", "reject"):
            raise InvalidValue(f"busy is wait or reject on a remote store, not {busy!r:.80}")
        name_of(request_id)
        wait = 0.0 if busy == "reject" else wait
        check_times(wait, ttl, None)
        return AsyncRemoteTurnBody(self._place, request_id, wait, ttl, revive, checked_bound(usage_below))

    async def usage(self, *, fresh: bool = False, max_staleness: float | None = None) -> Usage:
        """Read the tokens that models used in the session's turns so far, as on a direct store."""
        values.must_ask(fresh, max_staleness)
        return await read_usage(self._place)

    def output(
        self,
        request_id: str | None = None,
        *,
        after: str | None = None,
        wait: float | None = None,
        notices: bool = False,
    ) -> AsyncRemoteOutput:
        """Follow what running turns stream: chunks in order and once, and how the turn ends.

        Example::

            async for part in session.output("r1", wait=30):
                print(part)

        All arguments and parts are those of the direct store's session. One request, and one for each reconnection.
        """
        return AsyncRemoteOutput(self._place, request_id, after, wait, notices)

    async def stop(
        self,
        request_id: str | None = None,
        *,
        token: int | None = None,
        reason: str | None = None,
        wait: float = 5.0,
    ) -> StopResult:
        """Ask the turn that runs, or that request's, to stop, and wait up to `wait` seconds, at most 20, for its end.

        The result is that of the direct store's session.
        """
        name_of(request_id)
        check_times(wait, 1.0, None)
        body = {"request": request_id, "token": token, "reason": reason, "wait": wait}
        done = await self._place.requests.order("POST", f"{self._place.path}/stop", body, repeatable=True, wait=wait)
        return StopResult(done["state"], done["version"])

    async def post(
        self,
        message: Message | dict[str, Any],
        *,
        request_id: str | None = None,
        handler: str | None = None,
        durability: str | None = None,
    ) -> int:
        """Leave a message for a turn of this session, even while another turn runs; return its number in the inbox.

        A request id is accepted once; without one the request gets one, so that it may be sent again.
        """
        _unsaid(durability)
        name_of(request_id)
        (given,) = values.messages([message])
        path = f"{self._place.path}/inbox"
        body: dict[str, Any] = {"message": given}
        if handler is not None:
            body["handler"] = checked_handler(handler)
        if request_id is None:
            return int((await self._place.requests.write("POST", path, body))["number"])
        body["request_id"] = request_id
        return int((await self._place.requests.order("POST", path, body, repeatable=True))["number"])

    async def inbox(self) -> list[Input]:
        """The inputs that wait for a turn, in the order in which they were accepted."""
        return await read_inbox(self._place)

    async def withdraw(self, number: int) -> bool:
        """Take an input out of the inbox; False if it is no longer there."""
        if type(number) is not int or number < 1:
            raise InvalidValue(f"an input's number is an int from 1 on, not {number!r:.80}")
        done = await self._place.requests.order("DELETE", f"{self._place.path}/inbox/{number}", repeatable=True)
        return bool(done["withdrawn"])

    async def wake(
        self,
        text: str = "",
        *,
        after: float | None = None,
        at: float | None = None,
        name: str = "",
        every: float | None = None,
        handler: str | None = None,
        durability: str | None = None,
    ) -> None:
        """Begin a turn later, as on a direct store. If the reply is lost, the wake is set again, under its name."""
        _unsaid(durability)
        Later(text, after, at, every)
        given = {"text": text, "after": after, "at": at, "every": every, "name": name}
        body = {key: value for key, value in given.items() if value is not None}
        if handler is not None:
            body["handler"] = checked_handler(handler)
        await self._place.requests.order("POST", f"{self._place.path}/wakes", body, repeatable=True)

    async def wakes(self) -> list[Input]:
        """Read the wakes that are set, the next one first; `time` is when each is due."""
        found = await self._place.read(f"{self._place.path}/schedule", absent={"wakes": []})
        return [values.waiting(each) for each in found["wakes"]]

    async def cancel_wake(self, name: str = "") -> bool:
        """Remove a wake; False if none with this name is set."""
        path = with_query(f"{self._place.path}/wakes", {"name": name})
        return bool((await self._place.requests.order("DELETE", path, repeatable=True))["cancelled"])

    async def answer(self, value: Any, name: str = "", *, id: str | None = None, durability: str | None = None) -> bool:
        """Answer an open question of the session, as on a direct store; False if somebody has answered it already.

        If the reply is lost this raises Unavailable, because a repetition could not tell this answer from another one.
        """
        _unsaid(durability)
        codec.encode(value, "value")
        body = {"value": value, "name": name} | ({} if id is None else {"id": id})
        return bool((await self._place.requests.order("POST", f"{self._place.path}/answers", body))["accepted"])

    async def retry(self) -> bool:
        """Let a session go on that failed or was stopped, as on a direct store; False if it did not."""
        done = await self._place.requests.order("POST", f"{self._place.path}/retry", repeatable=True)
        return bool(done["retried"])

    async def append(
        self, *messages: Message | dict[str, Any], revive: bool = False, durability: str | None = None
    ) -> int:
        """Add messages to the conversation in one commit and return the new version. `revive` is as in `write`."""
        body = {"kind": "append", "append": values.messages(messages), "revive": revive}
        return await self._written(body, durability)

    async def messages(
        self,
        *,
        last: int | None = None,
        limit: int | None = None,
        before: int | None = None,
        after: int | None = None,
        order: Literal["asc", "desc"] = "asc",
        fresh: bool = False,
        max_staleness: float | None = None,
    ) -> list[Message]:
        """Read the last messages, all, or a page of them, oldest first. One request for each 500.

        Each message has its `number`. `after` and `before` are such numbers, both exclusive; `limit` counts from the
        beginning, or with `order="desc"` from the newest.
        """
        page = Page(last=last, limit=limit, before=before, after=after, order=order).checked()
        lines = await self._lines(page, values.must_ask(fresh, max_staleness))
        return [values.message(each["message"], each["number"], each["time"]) for each in lines]

    async def raw_messages(
        self,
        *,
        last: int | None = None,
        limit: int | None = None,
        before: int | None = None,
        after: int | None = None,
        order: Literal["asc", "desc"] = "asc",
        fresh: bool = False,
        max_staleness: float | None = None,
    ) -> list[dict[str, Any]]:
        """Read messages as `messages` does, as new dicts, with `number` and `timestamp`."""
        page = Page(last=last, limit=limit, before=before, after=after, order=order).checked()
        lines = await self._lines(page, values.must_ask(fresh, max_staleness))
        return [_raw(each) for each in lines]

    async def _lines(self, page: Page, fresh: bool) -> list[dict[str, Any]]:
        """The lines of a transcript, page by page from its beginning or its end."""
        newest_first = page.last is not None or page.order == "desc"
        most = page.last if page.last is not None else page.limit
        query = {"before": page.before, "after": page.after, "fresh": fresh or None}
        try:
            found: list[dict[str, Any]] = await self._place.pages(
                "messages", query, most, "number", order="desc" if newest_first else "asc", at="transcript"
            )
        except (NotFound, Deleted):
            return []
        return found[::-1] if newest_first and page.order == "asc" else found

    async def pop_message(self, *, durability: str | None = None) -> Message | None:
        """Remove the last message, in one commit, and return it, or None if the conversation has no messages."""
        _unsaid(durability)
        found = (await self._place.write({}, method="DELETE", to="/messages/last", owned=False))["message"]
        return None if found is None else values.message(found["message"], found["number"], found["time"])

    async def replace_messages(
        self,
        messages: Iterable[Message | dict[str, Any]],
        *,
        after: int | None = None,
        expect_last: int | None = None,
        durability: str | None = None,
    ) -> int:
        """Replace all messages after number `after` by these, in one commit, and return the new version.

        Without `after` it replaces all. Raises Conflict if `after` is no longer shown or `expect_last` is not the last.
        """
        _unsaid(durability)
        body = {"messages": values.messages(messages), "after": after, "expect_last": expect_last}
        done = await self._place.write(body, method="PUT", to="/messages", owned=False)
        return int(done["version"])

    async def lifetime(self) -> Lifetime:
        """Read the session's lifetime: its settings, and when it ends without further writes."""
        found = await self._place.read(f"{self._place.path}/lifetime", absent=None)
        return Lifetime(None, None, None) if found is None else values.made(Lifetime, found)

    async def set_lifetime(self, *, idle: float | None = None, lifetime: float | None = None) -> int:
        """Let the session end after `idle` seconds without a commit, and `lifetime` seconds from now at the latest.

        None means unlimited. One commit, which replaces the earlier settings.
        """
        for name, seconds in ("idle", idle), ("lifetime", lifetime):
            field_ttl.span_ms(name, seconds)
        return await self._written({"kind": "lifetime", "lives": {"idle": idle, "lifetime": lifetime}}, None)

    async def phase(self, *, fresh: bool = False, max_staleness: float | None = None) -> str | None:
        """Read the phase, None if none was set."""
        return (await self._place.state(fresh=values.must_ask(fresh, max_staleness))).phase

    async def transition(
        self,
        event: str,
        *,
        machine: StateMachine = DEFAULT,
        set: Mapping[str, Any] | None = None,
        append: Iterable[Message | dict[str, Any]] = (),
    ) -> str:
        """Move the phase along the table by an event, in one commit with other changes; return the new phase.

        Two requests. Raises InvalidTransition, and writes nothing, if the event is not allowed in the present phase.
        """
        if not isinstance(machine, StateMachine):
            raise InvalidValue(f"machine is a StateMachine, not {machine!r:.80}")
        more = {**values.fields(set or {}), "append": values.messages(append)}

        async def once() -> str:
            before = (await self._place.state(fresh=True)).phase
            following = machine.next(machine.initial if before is None else before, event)
            await self._place.write({**more, "kind": "transition", "phase": following, "expect_phase": before})
            return following

        return await self._place.until_no_conflict(once)


def _raw(line: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = line["message"]
    if line["time"] is not None:
        found["timestamp"] = line["time"]
    found["number"] = line["number"]
    return found


def _unsaid(durability: str | None) -> None:
    if durability is not None:
        raise InvalidValue("a remote store takes durability= with other writes, not with this one")
