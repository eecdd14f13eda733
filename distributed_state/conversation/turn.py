"""A turn: one request to a conversation, from its question to its answer. Law: it is one commit, or nothing.

A turn holds the record's lease, so that no other worker serves the same conversation meanwhile, and costs two round
trips: take the lease and read, commit and give the lease back.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol, Self
from zlib import crc32

from distributed_state.conversation import agent_state_storage, user_effects
from distributed_state.conversation.agent_state import AgentState, ToolCall
from distributed_state.conversation.phases import DEFAULT, StateMachine
from distributed_state.conversation.tokens import Counter, estimate
from distributed_state.conversation.tool_runs import ToolRuns
from distributed_state.conversation.tools import Scratch, Tool
from distributed_state.conversation.window import Bounds, Strategy, Summarizer, Window, summarized
from distributed_state.errors import Conflict, Deleted, DurabilityUnknown, Fenced, InvalidValue, StateError
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records import history
from distributed_state.records.access import MESSAGES, VERSION, Action
from distributed_state.records.transaction import Transaction
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec, message_ranges
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import OWNER, REQUEST, SUMMARY, Message, Ref, unescape
from distributed_state.values.results import Written
from distributed_state.warm.answers import Draft

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
    async def _ready(self, entry: CachedRecord) -> CachedRecord: ...
    def _stamp(self, draft: Draft, entry: CachedRecord) -> Draft: ...
    def _allow(self, action: Action, *fields: str | None) -> None: ...


class AsyncTurn(Transaction):
    """One turn: the session's fields as a dict, its messages, its phase. Committed whole at the end of `async with`.

    Example::

        async with session.turn(request_id="r1") as turn:
            if not turn.repeated:
                turn.append({"role": "user", "content": "Where to?"})
                window = await turn.window(max_tokens=8000)  # what to send to the model
                turn.append({"role": "assistant", "content": "Oslo."})
                turn["city"] = "Oslo"
                turn.outcome = "Oslo."
        answer = turn.outcome

    A request id makes it repeatable: when that request was answered already, `repeated` is true, `outcome` is what the
    first one left, and nothing can be changed.
    """

    request_id: str | None
    """The request that this turn answers, None if it was given none."""

    repeated: bool
    """Whether the request was answered before: then `outcome` is what it came to, and nothing can be changed."""

    written: Written | None
    """After the end: the version that the turn became, and its first message's number. None: nothing changed."""

    session: Any
    """The session that the turn is of."""

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
        record_codec = handle._home.codec_of(handle._names.ref.text)
        super().__init__(CachedRecord(record_codec, "", 0, {}, {}), handle._changes(), handle._allow)
        self._over = True
        self._entered = False
        self._handle = handle
        self._tiers = _tiers(handle)
        self.request_id = request_id
        self.repeated = False
        self.written = None
        self._request = REQUEST + b"#" + slot.encode() if slot else _request(request_id)
        self._outcome: Any = None
        self._answered = 0  # of a repeated request: the version that the first one's turn became
        self._pending: list[Message] = []
        self._moved: list[str] = []
        self._calls = ToolRuns(self._tiers.port, self._injected)
        self._user: tuple[Any, Transaction] | None = None
        self._state: AgentState | None = None
        self._summary: bytes | None = None
        self.session = handle._home.wrap(handle)
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
        entry = self._entry
        names = self._handle._names
        runs = message_ranges.segments(names.ref.text, entry.fields)
        runs = runs if last is None else message_ranges.last(runs, last)
        if any(n not in entry.messages for run in runs for n in range(run.start, run.stop)):
            entry = await read_path.load_whole(self._tiers, names, entry)
        return await history.visible(self._tiers, names, entry, runs)

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

        async def look() -> CachedRecord:
            it = self._entry
            return it if self._summary is None else it.with_field(SUMMARY, self._summary)

        async def keep(entry: CachedRecord, data: bytes) -> None:
            self._open().put(SUMMARY, data)
            self._summary = data

        return await summarized(
            self._tiers, self._handle._names, bounds, look=look, keep=keep, pending=tuple(self._pending)
        )

    async def load_state(self) -> AgentState | None:
        """Read the agent's state as it was before this turn, None if none was saved."""
        self._allow("read", None)
        state = agent_state_storage.read(self._handle._names, self._entry, await self._before(None))
        self._allow("read", *agent_state_storage.told(state))
        return state

    async def save_state(self, state: AgentState) -> None:
        """Commit an agent's state with this turn: what changed since it was loaded. After the turn `state` holds it.

        Raises Conflict if it was not loaded from what this turn began with, and what `session.save_state` raises.
        """
        self._open()
        names = self._handle._names
        entry = self._entry
        base, new = agent_state_storage.known(names, state)
        if new:
            base = agent_state_storage.before(names, entry, await self._before(None))
        elif (base.epoch, base.version) != (entry.epoch, entry.version):
            text = (
                f"{names.ref.text[:200]}: the state was loaded at version {base.version}, the turn at {entry.version}"
            )
            raise Conflict(text, version=entry.version)
        self._state = agent_state_storage.put(self._changes, state, base)

    @property
    def state(self) -> AgentState | None:
        """The agent's state that this turn saves; after the turn the value to go on from."""
        return self._state

    async def call(
        self,
        tool: Tool | str,
        arguments: dict[str, Any] | str | None = None,
        *,
        call_id: str = "",
        tools: Iterable[Tool] = (),
    ) -> ToolCall:
        """Run a tool, or the one of `tools` that has this name, on this turn's state; return what came of it.

        What it changes is committed with the turn, that of `user_state` in the user's record beside it; a tool that
        fails changes nothing. `arguments` are an object or its JSON text. A call id that this turn has run already is
        not run again. What the model got wrong is a failed call with an error for it to read: a name that no tool has,
        arguments that are no object or do not fit, an id that another call has. Errors of the store itself are raised.
        """
        self._open()
        return await self._calls.call(tool, arguments, call_id, tools)

    async def _injected(self, wants: frozenset[str]) -> dict[str, Any]:
        """What a tool is given by us; its changes are kept if it returns."""
        state = Scratch(self)
        user = Scratch(await self._user_state()) if "user_state" in wants else None
        return {"state": state, "agent_state": state, "user_state": user, "session": self.session}

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of this turn, in order."""
        return self._calls.all

    async def _user_state(self) -> Transaction:
        """The fields of the session's user, to be committed with this turn."""
        if self._user is None:
            self._user = await self._user_view()
        return self._user[1]

    async def _user_view(self) -> tuple[Any, Transaction]:
        owner = self._handle._owner or self._entry.fields.get(OWNER, b"").decode()
        if not owner:
            raise InvalidValue(f"{self._handle._names.ref.text[:200]}: has no user; give `user=` with the session")
        user = self._user_handle(unescape(owner))
        entry = await read_path.read(self._tiers, user._names, fresh=True)
        if entry.deleted:
            raise Deleted(f"{user.ref.text[:200]}: deleted at version {entry.version}")
        return user, Transaction(entry, user._changes(), user._allow)

    def _user_handle(self, id: str) -> Any:
        user = self._handle._home.user(id, actor=unescape(self._handle._actor))
        user._allow("read", VERSION)
        return user

    async def _complete_earlier(self, effect: user_effects.Effect) -> None:
        """Whatever the slot's last request left out: this one again, or one that this one takes the place of."""
        try:
            await self._complete(effect, doubted=True)
        except StateError as error:
            if not self.repeated:
                raise
            raise self._incomplete(effect, error, 0) from error

    async def __aenter__(self) -> Self:
        names = self._handle._names
        if self._entered:
            raise InvalidValue(f"{names.ref.text[:200]}: a turn is entered once; session.turn() makes another")
        self._allow("lock", None)
        self._allow("read", VERSION)
        try:
            self._entry = await self._handle._ready(await read_path.hold(self._tiers, names, self._lease))
            if self._entry.deleted:
                raise Deleted(f"{names.ref.text[:200]}: deleted at version {self._entry.version}")
            # Only what a request id names: any other field is what somebody wrote there.
            answered = None if self._request is None else self._entry.fields.get(self._request)
            if self._request is not None and answered is not None:
                name = codec.decode_key(self._request)
                before, outcome, request_id, effect = self._entry.codec.decode(answered, name)
                if request_id == self.request_id:
                    self.repeated = True
                    self._outcome = outcome
                    self._answered = before + 1
                if effect:
                    await self._complete_earlier(effect)
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
        handle = self._handle
        names = self._handle._names
        effect = self._effect()
        if self._request is not None and self.request_id is not None:
            kept = [self._entry.version, self._outcome, self.request_id, effect]
            user_effects.remember(self._tiers, self._changes, self._entry, self._request, kept)
        draft = self._draft("turn")
        if effect:
            self._tiers.leases.lock_value(names.ref.text)  # raises Fenced if the turn is over
        if draft is None:
            if effect:
                await user_effects.complete(self._tiers, self._user_handle(effect["user"]), effect, self._lease.wait)
            return
        # The lease is what keeps others out; what this task wrote beside the turn is no conflict.
        draft.expected = None
        draft = handle._stamp(draft, self._entry)
        signed = handle._sign(draft)
        theirs = None
        if self._user and effect:
            theirs = await user_effects.prepare(self._tiers, *self._user, effect, self._lease.wait)
        try:
            done = await write_path.commit(self._tiers, names, signed, last=self._lease)
        except Fenced as error:
            raise self._tiers.leases.judge(self._lease, error) from None
        except DurabilityUnknown as error:
            if error.version:  # else nobody knows whether it is applied, and its user is left alone
                await self._follow(effect, theirs, error.version)
            raise
        self.written = Written(done.version, first_message=done.first_message)
        if self._state is not None:
            self._state = agent_state_storage.saved(self._state, names, done.epoch, done.version)
        await self._follow(effect, theirs, done.version)

    async def _follow(self, effect: user_effects.Effect | None, theirs: Draft | None, version: int) -> None:
        """What is applied of the turn is followed by its user's part; from here on it cannot be refused any more."""
        if effect and theirs:
            try:
                await self._complete(effect, theirs)
            except StateError as error:
                raise self._incomplete(effect, error, version) from error

    def _effect(self) -> user_effects.Effect | None:
        """What this turn changes of its user."""
        changed = user_effects.changed(self._user[1]) if self._user else {}
        if self._user is None or not changed:
            return None
        user, view = self._user
        mark = None if self.request_id is None else f"{self.request_id} {self._handle._names.ref.text}"
        return {"user": user.ref.id, "version": view.version, "mark": mark, "fields": changed}

    async def _complete(self, effect: user_effects.Effect, draft: Draft | None = None, **done: Any) -> None:
        """Apply what a request changes of its user, if that was not done yet, on what is there now."""
        user = self._user_handle(effect["user"])
        wait = max(self._lease.wait, self._tiers.settings.retry_for)
        await user_effects.complete(self._tiers, user, effect, wait, draft=draft, **done)

    def _incomplete(self, effect: user_effects.Effect, error: StateError, version: int) -> DurabilityUnknown:
        """What it comes to if that fails: the turn itself is applied, and must not seem to be refused."""
        text = self._handle._names.ref.text[:200]
        user = Ref("user", effect["user"]).text[:200]
        rest = "it had no request id by which to complete it"
        if self.request_id is not None:
            rest = f"request {self.request_id!r:.80} has its outcome, and completes it when it is repeated"
        said = f"{text}: the turn is applied, but not what it changes of {user}: {error}; {rest}"
        return DurabilityUnknown(said, version=version, request_id=self.request_id)

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
