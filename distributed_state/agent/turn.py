"""A turn: one request to a conversation, from its question to its answer. Law: it is one commit, or nothing.

A turn holds the record's lease, so that no other worker serves the same conversation meanwhile, and costs two round
trips: take the lease and read, commit and give the lease back.
"""

from __future__ import annotations

import inspect
import secrets
from types import TracebackType
from typing import Any, Protocol, Self
from zlib import crc32

from distributed_state import codec, lineage, record, timeline
from distributed_state.access import MESSAGES, VERSION, Action
from distributed_state.agent import effects, saving
from distributed_state.agent.machine import DEFAULT, StateMachine
from distributed_state.agent.state import AgentState, ToolCall
from distributed_state.agent.tokens import Counter, estimate
from distributed_state.agent.tools import Scratch, Tool
from distributed_state.agent.window import Bounds, Strategy, Summarizer, Window, summarized
from distributed_state.changes import Changes
from distributed_state.errors import Conflict, Deleted, Fenced, InvalidValue, StateError
from distributed_state.hot import Entry
from distributed_state.keys import RecordKeys
from distributed_state.model import OWNER, REQUEST, SUMMARY, Message, Written, unescape
from distributed_state.tiers import Tiers
from distributed_state.transaction import Transaction
from distributed_state.warm import Draft

BUSY = ("wait", "reject", "interrupt")


class Handle(Protocol):
    """What a turn needs of the session it is of."""

    _names: RecordKeys
    _owner: str
    _actor: str

    @property
    def _home(self) -> Any: ...
    def _changes(self) -> Changes: ...
    def _sign(self, draft: Draft) -> Draft: ...
    async def _ready(self, entry: Entry) -> Entry: ...
    def _stamp(self, draft: Draft, entry: Entry) -> Draft: ...
    def _allow(self, action: Action, *fields: str | None) -> None: ...


class AsyncTurn(Transaction):
    """One turn: the session's fields as a dict, its messages, its phase. Committed whole at the end of `async with`.

    A request id makes it repeatable: when that request was answered already, `repeated` is true, `outcome` is what the
    first one left, and nothing can be changed.
    """

    def __init__(
        self,
        handle: Handle,
        *,
        request_id: str | None,
        busy: str,
        wait: float,
        ttl: float,
        limit: float | None,
        slot: str | None = None,
    ) -> None:
        # `slot`: the name under which the answered request is remembered, if it is not its own
        form = handle._home.form(handle._names.ref.text)
        super().__init__(Entry(form, "", 0, {}, {}), handle._changes(), handle._allow)
        self._over, self._entered = True, False
        self._handle, self._tiers = handle, _tiers(handle)
        self.request_id, self.repeated = request_id, False
        self.written: Written | None = None  # after the end: the version and the number of the first message
        self._request = REQUEST + b"#" + slot.encode() if slot else _request(request_id)
        self._outcome: Any = None
        self._pending: list[Message] = []
        self._moved: list[str] = []
        self._calls: dict[str, ToolCall] = {}
        self._user: tuple[Any, Transaction] | None = None
        self._state: AgentState | None = None
        self._summary: bytes | None = None
        self.session: Any = handle._home.dress(handle)
        if busy not in BUSY:
            raise InvalidValue(f"busy is one of {', '.join(BUSY)}, not {busy!r}")
        tag = secrets.token_hex(4) if request_id is None else f"{crc32(_request(request_id) or b''):x}"
        self._lease = self._tiers.lock(
            handle._names, wait=0.0 if busy == "reject" else wait, ttl=ttl, limit=limit, turn=tag,
            seize=busy == "interrupt",
        )  # fmt: skip

    @property
    def token(self) -> int:
        """The fencing token of the turn's lease."""
        return self._lease.token

    @property
    def epoch(self) -> str:
        """The epoch of the version that this turn shows."""
        return self._entry.epoch

    @property
    def suspends(self) -> bool:
        """Whether coroutine functions can be run in this turn: on the asyncio face."""
        return self._tiers.port.suspends

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
            stored = self._open().append(message)
            self._pending.append(stored if isinstance(stored, Message) else codec.as_message(stored))

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
        return [*await self._before(None if last is None else last - len(self._pending)), *self._pending]

    async def _before(self, last: int | None) -> list[Message]:
        """The last messages, or all, as they were before this turn."""
        self._allow("read", MESSAGES)
        entry, names = self._entry, self._handle._names
        runs = lineage.segments(names.ref.text, entry.fields)
        runs = runs if last is None else lineage.last(runs, last)
        if any(n not in entry.messages for run in runs for n in range(run.start, run.stop)):
            entry = await record.whole(self._tiers, names, entry)
        return await timeline.visible(self._tiers, names, entry, runs)

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
        """Read what to send to a model, the messages that this turn adds included: see `session.window`.

        A summary that has to be made is committed with this turn.
        """
        self._allow("read", MESSAGES)
        bounds = Bounds(max_tokens, keep_last, keep_system, counter, strategy, summarizer)

        async def look() -> Entry:
            it = self._entry
            return it if self._summary is None else it.with_field(SUMMARY, self._summary)

        async def keep(entry: Entry, data: bytes) -> None:
            self._open().put(SUMMARY, data)
            self._summary = data

        return await summarized(
            self._tiers, self._handle._names, bounds, look=look, keep=keep, pending=tuple(self._pending)
        )

    async def load_state(self) -> AgentState | None:
        """Read the agent's state as it was before this turn, None if none was saved."""
        self._allow("read", None)
        state = saving.read(self._handle._names, self._entry, await self._before(None))
        self._allow("read", *saving.told(state))
        return state

    async def save_state(self, state: AgentState) -> None:
        """Commit an agent's state with this turn: what changed since it was loaded. After the turn `state` holds it.

        Raises Conflict if it was not loaded from what this turn began with, and what `session.save_state` raises.
        """
        self._open()
        names, entry = self._handle._names, self._entry
        base, new = saving.known(names, state)
        if new:
            base = saving.before(names, entry, await self._before(None))
        elif (base.epoch, base.version) != (entry.epoch, entry.version):
            text = (
                f"{names.ref.text[:200]}: the state was loaded at version {base.version}, the turn at {entry.version}"
            )
            raise Conflict(text, version=entry.version)
        self._state = saving.put(self._changes, state, base)

    @property
    def state(self) -> AgentState | None:
        """The agent's state that this turn saves; after the turn the value to go on from."""
        return self._state

    async def call(self, tool: Tool, arguments: dict[str, Any] | str | None = None, *, call_id: str = "") -> ToolCall:
        """Run a tool on this turn's state and return what came of it, its failure included.

        What the tool changes is committed with the turn, that of `user_state` in the user's record beside it; a tool
        that fails changes nothing. `arguments` are an object or its JSON text. A call id that this turn has run
        already is not run again. Errors of the store itself are raised.
        """
        self._open()
        if not isinstance(tool, Tool):
            raise InvalidValue(f"a turn calls a Tool, as @tool makes it of a function, not {tool!r:.80}")
        if inspect.iscoroutinefunction(tool.function) and not self.suspends:
            raise InvalidValue(f"{tool.name}: a coroutine function is a tool for asyncio only, not for blocking code")
        given = tool.read(arguments)
        known = self._calls.get(call_id)
        if known is not None:
            if (known.tool_name, known.arguments) != (tool.name, given):
                raise InvalidValue(f"call {call_id!r:.80}: was {known.tool_name} with other arguments in this turn")
            return known
        state = Scratch(self)
        user = Scratch(await self._user_state()) if "user_state" in tool.wants else None
        injected = {"state": state, "user_state": user, "session": self.session}
        began, result, failure = self._tiers.port.monotonic(), None, None
        try:
            result = tool.function(**tool.bind(given), **{name: injected[name] for name in tool.wants})
            if inspect.isawaitable(result):
                result = await result
            codec.encode(result, "result")
            for each in (state, user):
                if each is not None:
                    each.check()
        except StateError as error:
            if not isinstance(error, InvalidValue):
                raise
            result, failure = None, f"InvalidValue: {error}"
        except Exception as error:  # noqa: BLE001 - the model is told, and may try something else
            result, failure = None, f"{type(error).__name__}: {error}"
        if failure is None:
            state.keep()
            if user is not None:
                user.keep()
        took = (self._tiers.port.monotonic() - began) * 1000
        call = ToolCall(tool_name=tool.name, arguments=given, result=result, error=failure, duration_ms=took)
        if call_id:
            call = call.model_copy(update={"call_id": call_id})
        self._calls[call.call_id] = call
        return call

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that this turn has run, in order."""
        return tuple(self._calls.values())

    async def _user_state(self) -> Transaction:
        """The fields of the session's user, to be committed with this turn."""
        if self._user is None:
            self._user = await self._user_view()
        return self._user[1]

    async def _user_view(self) -> tuple[Any, Transaction]:
        owner = self._handle._owner or self._entry.fields.get(OWNER, b"").decode()
        if not owner:
            raise InvalidValue(f"{self._handle._names.ref.text[:200]}: has no user; give `user=` with the session")
        user, entry = await self._user_entry(unescape(owner))
        if entry.deleted:
            raise Deleted(f"{user.ref.text[:200]}: deleted at version {entry.version}")
        return user, Transaction(entry, user._changes(), user._allow)

    async def _user_entry(self, id: str) -> tuple[Any, Entry]:
        user = self._handle._home.user(id, actor=unescape(self._handle._actor))
        user._allow("read", VERSION)
        return user, await record.read(self._tiers, user._names, fresh=True)

    async def __aenter__(self) -> Self:
        names = self._handle._names
        if self._entered:
            raise InvalidValue(f"{names.ref.text[:200]}: a turn is entered once; session.turn() makes another")
        self._allow("lock", None)
        self._allow("read", VERSION)
        try:
            self._entry = await self._handle._ready(await record.hold(self._tiers, names, self._lease))
            if self._entry.deleted:
                raise Deleted(f"{names.ref.text[:200]}: deleted at version {self._entry.version}")
            answered = self._entry.fields.get(self._request or b"")
            if answered is not None:
                name = codec.decode_key(self._request or b"")
                _, outcome, request_id, effect = self._entry.form.decode(answered, name)
                if effect:
                    await self._complete(effect)
                if request_id == self.request_id:
                    self.repeated, self._outcome = True, outcome
        except BaseException:
            await self._lease.release()
            raise
        self._entered = True
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
        handle, names = self._handle, self._handle._names
        effect = self._effect()
        if self._request is not None and self.request_id is not None:
            kept = [self._entry.version, self._outcome, self.request_id, effect]
            self._remember(self._changes, self._entry, self._request, kept)
        draft = self._draft("turn")
        if draft is None:
            if effect:
                self._tiers.leases.grip(names.ref.text)  # raises Fenced if the turn is over
                await self._complete(effect, doubted=False)
            return
        # The lease is what keeps others out; what this task wrote beside the turn is no conflict.
        draft.expected = None
        draft = handle._stamp(draft, self._entry)
        signed = handle._sign(draft)
        theirs = self._change(*self._user, effect["mark"]) if self._user and effect else None
        try:
            done = await record.commit(self._tiers, names, signed, last=self._lease)
        except Fenced as error:
            raise self._tiers.leases.judge(self._lease, error) from None
        self.written = Written(done.version, first_message=done.first_message)
        if self._state is not None:
            self._state = saving.saved(self._state, names, done.epoch, done.version)
        if self._user and effect and theirs:
            # After the turn's own: they are two commits, and one that is refused must not leave the other behind.
            try:
                await record.commit(self._tiers, self._user[0]._names, theirs)
            except Conflict:
                await self._complete(effect, doubted=False)

    def _effect(self) -> effects.Effect | None:
        """What this turn changes of its user."""
        changed = effects.changed(self._user[1]) if self._user else {}
        if self._user is None or not changed:
            return None
        user, view = self._user
        mark = None if self.request_id is None else f"{self.request_id} {self._handle._names.ref.text}"
        return {"user": user.ref.id, "version": view.version, "mark": mark, "fields": changed}

    async def _complete(self, effect: effects.Effect, *, doubted: bool = True) -> None:
        """Apply what a request changes of its user, if that was not done yet, on what is there now."""
        most = self._tiers.settings.remembered_requests

        async def once() -> None:
            user, entry = await self._user_entry(effect["user"])
            if entry.deleted or (doubted and effects.forgotten(effect, entry, most)):
                return
            view = Transaction(entry, user._changes(), user._allow)
            effects.apply(effect["fields"], view)
            draft = self._change(user, view, effect["mark"])
            if draft is not None:
                await record.commit(self._tiers, user._names, draft)

        await record.until_no_conflict(self._tiers, once)

    def _change(self, user: Any, view: Transaction, mark: str | None) -> Draft | None:
        """The commit of the user's record; None if this request has changed it already."""
        if mark is not None:
            request = REQUEST + mark.encode("utf-8", "surrogatepass")
            if request in view._entry.fields:
                return None
            self._remember(view._changes, view._entry, request, [view._entry.version])
        draft = view._draft("turn")
        return None if draft is None else user._sign(draft)

    def _remember(self, changes: Changes, entry: Entry, request: bytes, kept: list[Any]) -> None:
        """Note that a request was answered, and make room for it."""
        form = entry.form
        changes.reserved(request, form.encode(kept, codec.decode_key(request)))
        known = {name: data for name, data in entry.fields.items() if name[:2] == REQUEST and name != request}
        too_many = len(known) + 1 - self._tiers.settings.remembered_requests
        if too_many > 0:
            oldest = sorted(known, key=lambda name: int(form.decode(known[name], codec.decode_key(name))[0]))
            for name in oldest[:too_many]:
                changes.reserved(name, None)

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
    if request_id[0] == "#":
        raise InvalidValue(f"request id {request_id!r:.80}: those that begin with '#' are slots")
    return REQUEST + request_id.encode("utf-8", "surrogatepass")
