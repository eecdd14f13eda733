"""A turn: one request to a conversation, from its question to its answer. Law: it is one commit, or nothing.

A turn holds the record's lease, so that no other worker serves the same conversation meanwhile, and costs two round
trips: `__aenter__` takes the lease and reads the record, `__aexit__` commits the changes and releases the lease.

With a request id the commit also stores the outcome, in a field of the record (`request_log.py`). A turn that
finds its request there (`_look_for_answer`) is `repeated`: it releases the lease at once and changes nothing.

Design: section 13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Self, overload

from distributed_state.conversation import agent_state, asks, inbox, request_log, window
from distributed_state.conversation.agent_state import AgentState, ToolCall
from distributed_state.conversation.phases import DEFAULT, StateMachine
from distributed_state.conversation.request_log import name_of, slot_of
from distributed_state.conversation.tools import Scratch, Tool, ToolRuns
from distributed_state.conversation.turn_clock import ModelCall, TurnClock
from distributed_state.conversation.turn_user import TurnUser
from distributed_state.conversation.window import Bounds, Strategy, Summarizer, Window
from distributed_state.errors import DurabilityUnknown, Fenced, InvalidValue
from distributed_state.formats import Counter, estimate
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import Guard
from distributed_state.port.bodies import leaving
from distributed_state.port.waited import bounded
from distributed_state.records import messages
from distributed_state.records.access import MESSAGES, VERSION
from distributed_state.records.context import RecordContext
from distributed_state.records.schema import M
from distributed_state.records.transaction import Transaction, Workspace, preconditions
from distributed_state.results import Input, TimedRun, Tokens, TurnTimes, Usage, Written
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.durability import ensure_version
from distributed_state.values import chance, codec
from distributed_state.values.levels import level_of
from distributed_state.values.model import FAILURE, SUMMARY, Message
from distributed_state.values.turn_times import operation_of
from distributed_state.values.usage import checked_bound, checked_model, counted, refuse_above, used
from distributed_state.warm.lease import AsyncLease
from distributed_state.warm.output import Taken

BUSY = ("wait", "reject", "interrupt")
_NOT_OPEN = "this transaction is over; it can no longer change anything"
_NOT_BEGUN = "this turn has not begun: it is open inside `with session.turn(...) as turn:`, or `async with`"


class AsyncStoppable:
    """A part of a turn that a stop ends by itself, from `turn.stoppable()`."""

    def __init__(self, lease: AsyncLease) -> None:
        self._lease = lease
        self._guard: Guard | None = None

    async def __aenter__(self) -> None:
        self._guard = await self._lease.stoppable()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._guard is not None:
            await self._lease.resume(self._guard, error)


@bounded()
class AsyncTurn(Transaction):
    """One turn: the session's fields as a dict, its messages, its phase. The end of `async with` commits it as a whole.

    Example::

        async with session.turn(request_id="r1") as turn:
            if not turn.repeated:
                turn.append({"role": "user", "content": "Where to?"})
                window = await turn.window(max_tokens=8000)  # what to send to the model
                turn.append({"role": "assistant", "content": "Oslo."})
                turn["city"] = "Oslo"
                turn.outcome = "Oslo."
        answer = turn.outcome

    A request id makes it repeatable: if that request was answered before, `repeated` is true, `outcome` is that of the
    first turn, and nothing can be changed.
    """

    request_id: str | None
    """The id of the request that this turn answers, None without one."""

    repeated: bool
    """Whether the request was answered before: then `outcome` is the first turn's, and nothing can be changed."""

    _inputs: Sequence[Input] | None = None  # None: those of the entry
    _taken: tuple[Input, ...] = ()
    _outdated: tuple[Input, ...] = ()  # wakes at which questions would expire that this turn asks again
    _wakes: Mapping[str, inbox.Later] = MappingProxyType({})
    _mode = b""  # how the commit changes the schedule of a session with a handler: see schedule.lua

    written: Written | None
    """After the end: the turn's version, and the number of its first message. None: nothing changed."""

    def __init__(
        self,
        session: Any,
        context: RecordContext,
        *,
        request_id: str | None,
        busy: str,
        wait: float,
        ttl: float,
        limit: float | None,
        slot: str | None = None,
        durability: str | None = None,
        expect: Mapping[str, Any] | None = None,
        expect_exists: bool | None = None,
        usage_below: int | None = None,
        revive: bool = False,
    ) -> None:
        # `slot`: the request is stored under this name instead of its id, so it replaces the slot's last request
        super().__init__(Workspace(CachedRecord(context.codec, "", 0, {}, {}), context.changes(), context.allow))
        self._workspace.closed = _NOT_BEGUN
        self._entered = False
        self._context = context
        given = expect is not None or expect_exists is not None
        self._expected = preconditions(context, expect, expect_exists) if given else None
        self._usage_below = checked_bound(usage_below)
        self._spent: dict[str, Tokens] = {}
        self._tiers = context.tiers
        self._durability = None if durability is None else level_of(durability).text
        self.request_id = request_id
        self.repeated = False
        self.written: Written | None = None  # after the end: the version and the number of the first message
        own = name_of(request_id)
        self._request = slot_of(slot) if slot else own
        self._outcome: Any = None
        self._answered = 0
        self._pending: list[Message] = []
        self._moved: list[str] = []
        self._clock = TurnClock(self._tiers.port.monotonic)
        self._calls = ToolRuns(self._tiers.port, self._clock)
        self._state: Any = None
        self._summary: bytes | None = None
        self._session = session
        self._revive = revive
        if busy not in BUSY:
            raise InvalidValue(f"busy is one of {', '.join(BUSY)}, not {busy!r}")
        tag = chance.token_hex(4) if own is None else request_log.tag_of(own)
        self._lease = AsyncLease(
            self._tiers.leases, context.keys, wait=0.0 if busy == "reject" else wait, ttl=ttl, limit=limit, turn=tag,
            seize=busy == "interrupt",
        )  # fmt: skip
        self._user = TurnUser(context, self._lease.wait)

    @property
    def session(self) -> Any:
        """The session to which the turn belongs."""
        return self._session

    @property
    def token(self) -> int:
        """The fencing token of the turn's lease."""
        return self._lease.token

    @property
    def epoch(self) -> str:
        """The epoch of the version that this turn shows."""
        return self._workspace.entry.epoch

    @property
    def suspends(self) -> bool:
        """Whether this turn can run coroutine functions: only in the asyncio API."""
        return self._tiers.port.suspends

    @property
    def lost(self) -> bool:
        """Whether the lease is lost, so that this turn can no longer commit."""
        return self._lease.lost

    @property
    def phase(self) -> str | None:
        """The phase, including a move by this turn."""
        return self._moved[-1] if self._moved else super().phase

    @property
    def pending(self) -> tuple[Message, ...]:
        """The messages that this turn adds."""
        return tuple(self._pending)

    @property
    def answered_version(self) -> int:
        """If `repeated`, the version of the turn that answered the request first, else 0."""
        return self._answered

    @property
    def outcome(self) -> Any:
        """The result of the request, any JSON value. A repeated request gets the value that was set here."""
        return self._outcome

    @outcome.setter
    def outcome(self, value: Any) -> None:
        self._workspace.open()
        codec.encode(value, "outcome")
        self._outcome = value

    @property
    def inbox(self) -> tuple[Input, ...]:
        """The inputs that wait for a turn and that this one has not taken, oldest first: see `session.post`."""
        self._context.allow("read", MESSAGES)
        if self._inputs is None:
            self._inputs = inbox.waiting(self._workspace.entry, self._tiers.clock.now())
        taken = {each.number for each in (*self._taken, *self._outdated)}
        late = asks.late(self._inputs, self)
        return tuple(each for each in self._inputs if each.number not in taken and each.wake not in late)

    def take(self, *numbers: int) -> tuple[Input, ...]:
        """Take the inputs of `inbox`, or those with these numbers: this turn serves them, and its commit removes them.

        From here on, those who follow the requests of these inputs follow this turn: see `session.output`.
        """
        self._workspace.open()
        found = tuple(each for each in self.inbox if not numbers or each.number in numbers)
        self._taken += found
        names = asks.closed(found, self) if found else ()
        for name in names:
            del self[asks.field_of(name)]
        # The wakes at which they would have expired are not needed.
        expiries = {asks.wake_of(name) for name in names} - {each.wake for each in found}
        if expiries:
            self._taken += tuple(each for each in inbox.wakes(self._workspace.entry) if each.wake in expiries)
        tags = [tag for each in found if (tag := inbox.tag_of(each))]
        if tags and not self._lease.lost:
            self._lease.output().note(Taken(tags))
        return found

    def wake(
        self,
        text: str = "",
        *,
        after: float | None = None,
        at: float | None = None,
        name: str = "",
        every: float | None = None,
    ) -> None:
        """Set a wake of the session with this turn: see `session.wake`. `after=0`: begin another turn at once."""
        self._workspace.open()
        self._context.allow("write", MESSAGES)
        self._wakes = {**self._wakes, name: inbox.Later(text, after, at, every)}

    def ask(self, question: str, *, name: str = "", data: Any = None, expires: float | None = None) -> None:
        """Ask a person: the turn's commit moves the session to "waiting_feedback", with an open question.

        Example::

            async with session.turn() as turn:
                turn.ask("It costs 900. Shall I book?", name="booking", data={"price": 900}, expires=86_400)

        `store.asks()` lists open questions, and `session.answer("yes", "booking")` posts the answer: an input, whose
        `message.metadata["answers"]` is the question's name. The turn that takes it closes the question, and moves to
        another phase itself. After `expires` seconds without an answer a wake arrives instead, named "ask booking".
        `question` and `data` have at most 16 KiB together. A step of a workflow that asks returns `state.to_waiting()`.
        """
        field = asks.field_of(name)
        self[field] = asks.opened(question, data, self._tiers.clock.now(), expires)
        self.move_to(asks.PHASE)
        wake = asks.wake_of(name)
        self._wakes = {key: each for key, each in self._wakes.items() if key != wake}
        self._outdated += tuple(each for each in inbox.wakes(self._workspace.entry) if each.wake == wake)
        if expires is not None:
            self.wake(question, after=expires, name=wake)

    async def arrived(self) -> tuple[Input, ...]:
        """Look for inputs that were posted since the turn began or looked last, and add them to `inbox`.

        For a body that can change its course: look between two steps, and take what came.
        """
        self._workspace.open()
        self._lease.check()
        known = {each.number for each in (*self.inbox, *self._taken)}
        self._inputs = await inbox.read(self._context)
        return tuple(each for each in self._inputs if each.number not in known)

    def append(self, *messages: Message | dict[str, Any]) -> None:
        """Add messages to the conversation with this turn."""
        for message in messages:
            self._pending.append(self._workspace.open().append(message))

    def move_to(self, phase: str | None) -> None:
        """Set the phase with this turn."""
        if phase is None:
            raise InvalidValue("a turn moves to a phase, not to None")
        self._workspace.open().phase(phase)
        self._moved.append(phase)

    def transition(self, event: str, *, machine: StateMachine = DEFAULT) -> str:
        """Move to the phase that this event leads to and return it. Raises InvalidTransition."""
        phase = machine.next(self.phase or machine.initial, event)
        self.move_to(phase)
        return phase

    async def messages(self, *, last: int | None = None) -> list[Message]:
        """Read the last messages, or all, oldest first, including those that this turn adds."""
        if last is not None and (type(last) is not int or last < 0):
            raise InvalidValue(f"last is an int from 0 on or None, not {last!r}")
        if last is not None and last <= len(self._pending):
            return self._pending[len(self._pending) - last :]
        return [*await self._before(None if last is None else last - len(self._pending)), *self._pending]

    async def _before(self, last: int | None) -> list[Message]:
        """The last messages, or all, without those of this turn."""
        self._lease.check()
        self._context.allow("read", MESSAGES)
        with self._clock.reading():
            return await messages.last_of(self._tiers, self._context.keys, self._workspace.entry, last)

    async def window(
        self,
        *,
        max_tokens: int,
        keep_last: int = 6,
        keep_system: bool = True,
        counter: Counter = estimate,
        strategy: Strategy = "drop",
        summarizer: Summarizer | None = None,
    ) -> Window:
        """Read the messages to send to a model, including those that this turn adds: see `session.window`.

        A new summary is committed with this turn.
        """
        self._context.allow("read", MESSAGES)
        bounds = Bounds(max_tokens, keep_last, keep_system, counter, strategy, summarizer)

        async def look() -> CachedRecord:
            it = self._workspace.entry
            return it if self._summary is None else it.with_field(SUMMARY, self._summary)

        async def keep(entry: CachedRecord, data: bytes) -> None:
            self._workspace.open().put(SUMMARY, data)
            self._summary = data

        return await window.summarized(
            self._tiers, self._context.keys, bounds, look=look, keep=keep, pending=tuple(self._pending)
        )

    @overload
    async def load_state(self) -> AgentState | None: ...
    @overload
    async def load_state(self, kind: type[M]) -> M | None: ...
    async def load_state(self, kind: type[Any] = AgentState) -> Any:
        """Read the agent's state as it was before this turn, None if none was saved."""
        self._context.allow("read", None)
        state = agent_state.read(self._context.keys, self._workspace.entry, await self._before(None), kind)
        self._context.allow("read", *agent_state.shown(state))
        return state

    async def save_state(self, state: Any) -> None:
        """Commit an agent's state with this turn: the changes since it was loaded. After the turn `state` holds it.

        Raises Conflict if it was not loaded from the version that this turn began with; other errors as in
        `session.save_state`.
        """
        self._workspace.open()
        entry = self._workspace.entry
        base = await agent_state.base_for(self._context.keys, entry, state, partial(self._before, None))
        self._state = agent_state.put(self._workspace.changes, state, base)

    @property
    def state(self) -> Any:
        """The agent's state that this turn saves; continue with this value after the turn."""
        return self._state

    async def call(
        self,
        tool: Tool | str,
        arguments: dict[str, Any] | str | None = None,
        *,
        call_id: str = "",
        tools: Iterable[Tool] = (),
    ) -> ToolCall:
        """Run a tool (or name one of `tools`) on this turn's state; return the call with its result.

        Its changes are committed with the turn, those to `user_state` in the user's record; a tool that fails changes
        nothing. `arguments` are an object or its JSON text. A call id that this turn has run already is not run again.
        A mistake of the model gives a failed call with an error for the model: an unknown tool, arguments that are not
        an object or do not fit, the id of another call. Errors of the store itself are raised.
        """
        self._workspace.open()
        self._lease.check()
        return await self._calls.call(tool, arguments, call_id, tools, self._injected)

    async def stream(self, chunk: Any) -> None:
        """Show a part of the answer to those who follow this turn, on any replica: see `session.output`.

        A chunk is a str, bytes or a JSON value. It is sent within `stream_interval` seconds, is not state, and is
        never in the history. Raises Fenced if the lease is lost, TooLarge above a quarter of `output_bytes`.
        """
        self._context.allow("write", MESSAGES)
        self._workspace.open()
        self._lease.check()
        self._tiers.leases.lock_value(self._context.text)  # raises Fenced
        if chunk or not isinstance(chunk, (str, bytes)):
            await self._lease.output().stream(chunk)

    async def flush(self) -> None:
        """Send the chunks that wait for `stream_interval`."""
        self._lease.check()
        if self._lease.streamed is not None:
            await self._lease.streamed.flush()

    def serve(self, request_id: str | None) -> None:
        """Let the turn be stopped under the id of a request that it is a part of."""
        name = name_of(request_id)
        self._lease.serve("" if name is None else request_log.tag_of(name))

    def end_if_stopped(self) -> None:
        """After the turn, raise Stopped if somebody asked it to stop."""
        stopped = (self._lease.outer or self._lease).stopped
        if stopped is not None:
            raise stopped

    @property
    def stopping(self) -> bool:
        """Whether somebody asked this turn to stop."""
        return (self._lease.outer or self._lease).stopped is not None

    def stoppable(self) -> AsyncStoppable:
        """A part of the turn that `session.stop` ends by itself: Stopped is raised at its end, and the turn goes on.

        Example::

            async with session.turn(request_id="r1") as turn:
                answer = ""
                try:
                    async with turn.stoppable():
                        for token in ("Os", "lo"):  # from a model
                            answer += token
                            await turn.stream(token)
                except Stopped:
                    answer += " (stopped)"
                turn.append({"role": "assistant", "content": answer})

        Outside of it a stop ends the whole turn, and nothing is written.
        """
        return AsyncStoppable(self._lease)

    def model(self, name: str, *, input_tokens: int = 0, output_tokens: int = 0) -> ModelCall:
        """Note the tokens of a model's call, or measure a call: `with turn.model("gpt-5"):` around it, in either API.

        Example::

            async with session.turn() as turn:
                with turn.model("gpt-5") as call:
                    ...  # call the model
                    call.used(input_tokens=812, output_tokens=90)

        The time is shown in `times`, the tokens in `usage`. The turn's commit adds them to the session's: see
        `session.usage` and `store.usage`. The name is cut after 100 characters.
        """
        checked_model(name)
        call = ModelCall(self._clock, name, self._use)
        if input_tokens or output_tokens:
            call.used(input_tokens=input_tokens, output_tokens=output_tokens)
        return call

    def _use(self, name: str, tokens: Tokens) -> None:
        """Count these tokens of a model."""
        self._workspace.open()
        model = checked_model(name)
        self._spent[model] = self._spent.get(model, Tokens()) + tokens
        self._tiers.telemetry.used(model, tokens)

    @property
    def usage(self) -> Usage:
        """The tokens that models used in this turn, as noted by `model`."""
        return Usage.of(self._spent)

    def tool(self, name: str) -> AbstractContextManager[None]:
        """Measure a tool that is not run by `call`, for example one that an agent framework runs."""
        return self._clock.running("tool", name)

    def reported(self, seconds: float, runs: Sequence[TimedRun]) -> None:
        """Add runs of tools or models that a client reports, from the `seconds` before it sent the turn."""
        self._clock.reported(seconds, runs)

    @property
    def times(self) -> TurnTimes:
        """How the turn's time was spent so far; after the turn's end this includes the commit."""
        return self._clock.times

    async def _injected(self, wants: frozenset[str]) -> dict[str, Any]:
        """The arguments that a tool receives from the turn; the tool's changes to them are kept if it returns."""
        state = Scratch(self)
        user = None
        if "user_state" in wants:
            with self._clock.reading():
                user = Scratch(await self._user.workspace(self._workspace.entry))
        return {
            "state": state,
            "agent_state": state,
            "user_state": user,
            "session": self._context.store.dressed(self._session),
        }

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of this turn, in order."""
        return self._calls.all

    async def __aenter__(self) -> Self:
        keys = self._context.keys
        if self._entered:
            raise InvalidValue(f"{keys.ref.text[:200]}: a turn is entered once; session.turn() makes another")
        self._context.allow("lock", None)
        self._context.allow("read", VERSION)
        self._clock.begin()
        try:
            entry = await self._context.turn_begins(await read_path.hold(self._tiers, keys, self._lease))
            self._clock.held(self._lease.waited)
            self._workspace.entry = entry
            self._context.refuse_deleted(entry, revive=self._revive)
            await self._look_for_answer(entry)
            # Checked only here: others cannot write while the turn holds the lease. An answered request is not checked.
            if self._expected is not None and not self.repeated:
                self._expected.check(entry.living(self._context.now()))
            if self._usage_below is not None and not self.repeated:
                refuse_above(self._usage_below, Usage.of(used(entry.fields)), keys.ref.text)
        except BaseException:
            await self._lease.release()
            raise
        self._entered = True
        if self.repeated:
            await self._lease.release()
        else:
            self._workspace.closed = ""
            self._lease.protect()
            if self._lease.span is not None:
                schedule = inbox.schedule_of(entry)
                self._tiers.telemetry.began(self._lease.span, keys, None if schedule is None else schedule.handler)
        return self

    async def _look_for_answer(self, entry: CachedRecord) -> None:
        """Set `repeated` if this request was answered before, and complete its change of the user's record."""
        found = None if self._request is None else request_log.find(entry, self._request)
        if found is None:
            return
        _, outcome, request_id, effect = found
        if request_id == self.request_id:
            self.repeated = True
            self._workspace.closed = f"request {request_id!r:.200} was answered already: see `repeated` and `outcome`"
            self._outcome = outcome
            self._answered = request_log.answered_at(found)
        with self._context.durable(self._durability):
            if self.repeated:
                version = min(self._answered, entry.version)
                await ensure_version(self._tiers, self._context.keys, entry.epoch, version)
            if effect:
                await self._user.complete_earlier(effect, self.request_id, self.repeated)

    @leaving("_lease.body")
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.repeated:
            return
        self._tiers.leases.hold_here(self._lease.outer or self._lease)
        if self._lease.span is not None:
            self._tiers.telemetry.ends(self._lease.span, self.usage)
        given = error
        if self._lease.end_body():
            error = await self._lease.absorb(given)
        try:
            if error is None:
                with self._context.durable(self._durability):
                    await self._commit()
            self._workspace.closed = _NOT_OPEN
        except BaseException as failed:
            await self._lease.leave(failed)
            raise
        finally:
            self._clock.stop()
            if self._tiers.telemetry.measures:
                self._tiers.telemetry.turn(self._clock.parts)
        await self._lease.leave(error)
        if error is not None and error is not given:
            raise error

    async def _commit(self) -> None:
        """Commit the session's changes and release the lease, then commit the changes to its user (`turn_user.py`)."""
        context = self._context
        begun = self._workspace.entry
        effect = self._user.effect(self.request_id)
        if self._request is not None and self.request_id is not None:
            kept = [begun.version, self._outcome, self.request_id, effect]
            most = context.store.settings.remembered_requests
            request_log.add(most, self._workspace.changes, begun, self._request, kept)
        taken = {each.number: each for each in (*self._taken, *self._outdated)}
        if taken or self._wakes:
            most = context.store.settings.remembered_requests
            await self._tiers.clock.know()
            now = self._tiers.clock.now()
            inbox.take(self._workspace.changes, begun, taken.values(), self._wakes, most, now)
        for name, stored in counted(begun.fields, self._spent):
            self._workspace.changes.reserved(name, stored)
        changes = self._workspace.end()
        if (effect or changes) and self._tiers.leases.lock_value(context.text) != self._lease.lock_value:
            raise self._lease.fenced("nothing was sent")  # not lost, but ended with a surrounding lock
        if changes is None:
            if effect:
                await self._user.apply(effect)
            return
        deleted = "refuse"
        if self._revive and begun.deleted:
            changes.undelete()
            deleted = "begin"
        # The commit expects no version: the lease excludes others, and this task may have written outside the turn.
        signed = context.sign(context.turn_ends(changes.draft("turn", epoch=begun.epoch, deleted=deleted), begun))
        user_draft = None
        if effect:
            with self._clock.reading():
                user_draft = await self._user.prepare(effect)
        self._clock.stop()
        timed = signed._replace(operations=(*signed.operations, operation_of(self._clock.times)))
        if (schedule := inbox.schedule_of(begun)) is not None:
            timed = timed.scheduled(schedule.handler, self._mode)
        output = self._lease.ending_output(None)
        if output is not None:
            await output.flush()
            timed = timed._replace(ends_output=output.end_operation)
        try:
            done = await write_path.commit(self._tiers, context.keys, timed, last=self._lease)
            self._clock.committed()
            if output is not None:
                output.committed()
        except Fenced as error:
            raise self._tiers.leases.judge(self._lease, error) from None
        except DurabilityUnknown as error:
            if effect and user_draft and error.version:  # without a version, the turn may not be applied
                await self._user.follow(effect, user_draft, error.version, self.request_id)
            raise
        self.written = Written(done.version, first_message=done.added)
        if self._state is not None:
            self._state = agent_state.saved(self._state, context.keys, done.epoch, done.version)
        if effect and user_draft:
            await self._user.follow(effect, user_draft, done.version, self.request_id)


class HandledTurn(AsyncTurn):
    """A turn in which a worker calls the handler of a session."""

    @property
    def begun(self) -> CachedRecord:
        """The session as it was when the turn began."""
        return self._workspace.entry

    @property
    def taken(self) -> tuple[Input, ...]:
        """The inputs that the handler has taken."""
        return self._taken

    @property
    def overdue(self) -> bool:
        """Whether the turn has taken longer than its limit."""
        return self._tiers.port.monotonic() >= self._lease.ends

    def settle(self, mode: bytes, *, forgets: bool) -> None:
        """Let the commit set when the session is due next, as in schedule.lua; `forgets` the last failure."""
        self._mode = mode
        if forgets:
            self._workspace.open().reserved(FAILURE, None)
