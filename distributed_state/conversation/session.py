"""A conversation: a record with messages, a phase and turns. Law: a method is one commit or one read.

A tool that is called outside a turn runs in a turn of its own, once for each pair of turn id and call id.

Design: sections 11, 13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal

from pydantic import ValidationError

from distributed_state.conversation import agent_state, replacing, window
from distributed_state.conversation.agent_state import AgentState, ToolCall
from distributed_state.conversation.formats import Counter, estimate
from distributed_state.conversation.phases import DEFAULT, StateMachine, transition
from distributed_state.conversation.tools import Tool
from distributed_state.conversation.turn import AsyncTurn
from distributed_state.conversation.window import Bounds, Context, Strategy, Summarizer, Window, look
from distributed_state.errors import InvalidValue, WarmUnavailable
from distributed_state.port.waited import bounded
from distributed_state.records import messages
from distributed_state.records.access import MESSAGES, MOVES, VERSION
from distributed_state.records.context import context_of
from distributed_state.records.messages import Page, Shown
from distributed_state.records.record import AsyncRecord
from distributed_state.records.schema import M
from distributed_state.records.typed import AsyncTypedRecord
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import field_ttl, message_ranges
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import LIFETIME, MAX_ID_BYTES, PHASE, Message
from distributed_state.values.results import Lifetime

_ROUNDS = 100


async def read_lifetime(tiers: Tiers, names: RecordKeys) -> Lifetime:
    """The lifetime that a session has now, from Redis."""
    for _ in range(_ROUNDS):
        if not (await read_path.load_uncached(tiers, names)).version:
            return Lifetime(None, None, None)
        # Together, so that they fit; only a commit that leaves the record in Redis has changed either.
        version, lifetime, last_ms = await tiers.warm.command(b"HMGET", names.record, b"#v", LIFETIME, b"#t")
        if version is not None:
            return _lifetime_of(lifetime, last_ms)
    raise WarmUnavailable(f"{names.ref.text[:200]}: comes and goes faster than it can be read")


def _lifetime_of(lifetime: bytes | None, last_ms: bytes | None) -> Lifetime:
    if lifetime is None:
        return Lifetime(None, None, None)
    idle_ms, until_ms = field_ttl.parse_lifetime(lifetime)
    return Lifetime(
        idle=idle_ms / 1000 if idle_ms else None,
        until=until_ms / 1000 if until_ms else None,
        ends=field_ttl.end_ms(lifetime, int(last_ms or 0)) / 1000,
    )


class _Failed(Exception):
    """Ends the turn of a tool that failed without a commit."""


def request_of(turn_id: str, call_id: str) -> str:
    """The request id of the turn that a call is. Raises InvalidValue."""
    for name, value in ("call_id", call_id), ("turn_id", turn_id):
        if not isinstance(value, str) or (name == "call_id" and not value):
            raise InvalidValue(f"{name} is a str{', and not empty' * (name == 'call_id')}, not {value!r:.80}")
    # The length keeps ("a/b", "c") and ("a", "b/c") apart.
    return f"{len(turn_id)}/{turn_id}/{call_id}"


async def call_once(
    turn: AsyncTurn, tool: Tool | str, arguments: dict[str, Any] | str | None, call_id: str, tools: Iterable[Tool]
) -> ToolCall:
    """Run a tool as this whole turn, of the request id above, or return what it returned when it ran before."""
    call: ToolCall | None = None
    with suppress(_Failed):
        async with turn:
            if turn.repeated:
                return _first(turn.outcome, tool, call_id)
            call = await turn.call(tool, arguments, call_id=call_id, tools=tools)
            if not call.succeeded:
                raise _Failed
            turn.outcome = dict(call.__dict__)
    assert call is not None
    return call


def _first(outcome: Any, tool: Tool | str, call_id: str) -> ToolCall:
    try:
        call = ToolCall.model_validate(outcome)
    except ValidationError:
        raise InvalidValue(f"call {call_id!r:.80}: a turn was given the request id of this call") from None
    name = tool.name if isinstance(tool, Tool) else tool
    if call.tool_name != name:
        raise InvalidValue(f"call {call_id!r:.80}: was {call.tool_name}, not {name:.80}; each call has its own id")
    return call


@bounded("phase")
class AsyncSession(AsyncRecord):
    """A conversation: a record with messages, a phase and turns. `store.session(id)` returns one, without I/O.

    Example::

        session = store.session("c1", user="u1")
        async with session.turn(request_id="r1") as turn:  # one commit, made once however often the request comes
            if not turn.repeated:
                turn.append({"role": "user", "content": "Where to?"}, {"role": "assistant", "content": "Oslo."})
                turn["city"] = "Oslo"
        for message in await session.messages(last=10):
            print(message.role, message.content)

    Where a method is given `fresh` or `max_staleness` (seconds), these are as in `get`.
    """

    async def append(self, *messages: Message | dict[str, Any], durability: str | None = None) -> int:
        """Add messages to the conversation in one commit and return the new version.

        Example::

            await session.append({"role": "user", "content": "Where to?"}, Message(role="assistant", content="Oslo."))

        Raises InvalidValue for what is no message, TooLarge beyond `max_message_bytes`; then none is added. One that
        names no `timestamp` has that of its commit when it is read.
        """
        changes = self._context.changes()
        for message in messages:
            changes.append(message)
        return (await self._context.commit(changes.draft("append", durability=durability))).version

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
        """Read the last messages, or all, or a page of them, oldest first. Older ones than recent come from SQL.

        A message that was read knows its `number`, which stays; some are left out where messages were taken back.
        `after` and `before` are such numbers, both exclusive. `limit` is how many from the beginning, which with
        `order="desc"` is the newest: `messages(limit=20, order="desc", before=oldest.number)` is the page before, and
        `messages(last=20, before=oldest.number)` the same with the oldest first. A page costs what it holds.

        What is stored is read when a message is first looked at: CorruptState and DecryptionFailed are raised there.
        """
        page = Page(last=last, limit=limit, before=before, after=after, order=order)
        found = (await self._shown(page, fresh, max_staleness)).messages()
        return found[::-1] if order == "desc" else found

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
        """Read messages as `messages` does, as dicts, the caller's own: the fastest way to all of a long conversation.

        Example::

            await session.append({"role": "user", "content": "Where to?"})
            [message] = await session.raw_messages(last=1)
            assert message == {
                "role": "user", "content": "Where to?", "number": message["number"], "timestamp": message["timestamp"]
            }

        Each holds the fields that were given, and as attributes of a Message do, `number` (in place of a field of that
        name, if one was given) and `timestamp`. Raises CorruptState or DecryptionFailed if any cannot be read.
        """
        page = Page(last=last, limit=limit, before=before, after=after, order=order)
        found = (await self._shown(page, fresh, max_staleness)).raw()
        return found[::-1] if order == "desc" else found

    async def _shown(self, page: Page, fresh: bool, max_staleness: float | None) -> Shown:
        page.checked()
        self._context.allow("read", MESSAGES)
        asks = self._context.must_ask(fresh, max_staleness)
        return await messages.chosen(self._context.tiers, self._context.keys, page, fresh=asks)

    async def message(self, number: int, *, fresh: bool = False, max_staleness: float | None = None) -> Message:
        """Read one message by its number. Raises NotFound if there is none, or the conversation shows it no more."""
        self._context.allow("read", MESSAGES)
        asks = self._context.must_ask(fresh, max_staleness)
        return await messages.message(self._context.tiers, self._context.keys, number, fresh=asks)

    async def pop_message(self, *, durability: str | None = None) -> Message | None:
        """Take the last message back, in one commit, and return it; None if the conversation shows none.

        Of two workers that do it at once each gets another one, and what somebody appends meanwhile is not passed over.
        Versions before show it still, and its number is not used again. Raises CorruptState or DecryptionFailed if it
        cannot be read; then it stays. Raises TooLarge if messages were taken back between the others at more than 2,000
        places: `replace_messages` with all that are shown makes them one run again.
        """
        return await replacing.pop(self._context, durability)

    async def replace_messages(
        self,
        messages: Iterable[Message | dict[str, Any]],
        *,
        after: int | None = None,
        expect_last: int | None = None,
        durability: str | None = None,
    ) -> int:
        """Show these in place of all messages behind the one numbered `after`, in one commit; None: of all messages.

        Example::

            await session.append({"role": "user", "content": "Where to?"})
            seen = await session.messages()
            short = [{"role": "assistant", "content": "We went through hotels in Oslo."}]
            await session.replace_messages(short, expect_last=seen[-1].number)  # Conflict if somebody added one

        Returns the new version. Raises Conflict, and nothing is written, if `after` is not shown any more or the last
        message is another one than `expect_last`. Versions before show what was replaced. Errors as in `append`;
        TooLarge as in `pop_message`.
        """
        return await replacing.replace(self._context, messages, after, expect_last, durability)

    async def window(
        self,
        *,
        max_tokens: int,
        keep_last: int = 6,
        keep_system: bool = True,
        counter: Counter = estimate,
        strategy: Strategy = "drop",
        summarizer: Summarizer | None = None,
        wait: float = 60.0,
    ) -> Window:
        """Read what of the conversation to send to a model: the newest whole turns that fit in `max_tokens`.

        Example::

            window = await session.window(max_tokens=8000)
            request = {"messages": to_openai(window.messages)}

        A turn is a user message and all that follows it; the last `keep_last` turns, and with `keep_system` the system
        messages of the beginning, are kept even if they do not fit, so compare `tokens` where that matters. With
        `strategy="summarize"` what does not fit is given to `summarizer(messages, previous_summary)`, which returns
        text: from time to time, down to half of `max_tokens`, not with each message. The summary is stored with the
        session by a commit of its own, made once however many replicas ask, and continued the next time. They
        wait for one another under the session's lock, at most `wait` seconds, else LockTimeout; others may write.
        """
        bounds = Bounds(max_tokens, keep_last, keep_system, counter, strategy, summarizer, wait)
        self._context.allow("read", MESSAGES)
        if strategy == "summarize":
            self._context.allow("lock", None)
            self._context.allow("write", MESSAGES)
        return await window.of_session(self._context, bounds)

    async def phase(self, *, fresh: bool = False, max_staleness: float | None = None) -> str | None:
        """Read the phase, None if none was set. Options as in `get`."""
        entry = await self._context.read(self._context.must_ask(fresh, max_staleness), MOVES)
        data = None if entry.deleted else entry.fields.get(PHASE)
        return None if data is None else data.decode("utf-8", "surrogatepass")

    async def transition(
        self,
        event: str,
        *,
        machine: StateMachine = DEFAULT,
        set: Mapping[str, Any] | None = None,
        append: Iterable[Message | dict[str, Any]] = (),
    ) -> str:
        """Move the phase along the table of `machine` and return the new phase, in one commit with fields and messages.

        Example::

            phase = await session.transition("new_task", machine=TASK_MACHINE, set={"goal": "a weekend in Oslo"})

        No phase counts as the machine's initial one. If somebody moved it first, the event is judged again from where
        it is now. Raises InvalidTransition, and nothing is written, if it is not allowed there.
        """
        self._context.allow("read", MOVES)
        self._context.allow("write", MOVES)
        return await transition(self._context, event, machine=machine, set=set or {}, append=append)

    async def context(
        self, *, last: int = 20, beside: Iterable[AsyncRecord] = (), counter: Counter = estimate
    ) -> Context:
        """Read all that a model should know: the last messages, the fields, and those of the records beside it.

        Example::

            context = await session.context(last=10, beside=[store.user("u1")])
            prompt = context.render()

        `beside` takes records as `[store.user("u1"), store.task("t1")]`. What is not hot comes in one round trip,
        messages older than `recent_messages` in more. `render()` gives the state as text for a prompt.
        """
        contexts = [self._context, *(context_of(each, "a context") for each in beside)]
        for each in contexts:
            each.allow("read", None)
        self._context.allow("read", MESSAGES, MOVES)
        return await look(contexts, last, counter)

    async def load_state(self) -> AgentState | None:
        """Read the agent's state, None if none was saved. The value knows what `save_state` must write and expect."""
        self._context.allow("read", None)
        state = await agent_state.load(self._context)
        self._context.allow("read", *agent_state.shown(state))
        return state

    async def save_state(self, state: AgentState) -> AgentState:
        """Save an agent's state in one commit and return it as saved, the value to go on from.

        Only what changed since it was loaded or saved is sent, and only new messages are appended. Raises Conflict if
        the record changed meanwhile; InvalidValue for the state of another session, one that this session holds a
        successor of already, a history that is not the stored one and more, or a value that is not valid.
        """
        return await agent_state.save(self._context, state)

    async def switch(self, *, previous_id: str = "", client: str = "", message_count: int | None = None) -> int:
        """Publish that a client goes on with this conversation; return the record's new version.

        One commit that changes no field, with the event `conversation.switched`: `conversation_id`, `previous_id`, the
        number of messages shown, by default of those kept here, and the client. Which conversation a client is at is
        the client's to know.
        """
        for name, value in ("previous_id", previous_id), ("client", client):
            if not isinstance(value, str) or len(value) > MAX_ID_BYTES:
                raise InvalidValue(f"{name} is a str of at most {MAX_ID_BYTES} characters, not {value!r:.80}")
        if message_count is not None and (type(message_count) is not int or message_count < 0):
            raise InvalidValue(f"message_count is an int from 0 on or None, not {message_count!r:.80}")
        self._context.allow("write", VERSION)
        entry = await self._context.read(field=VERSION)
        changes = self._context.changes()
        count = message_count
        if count is None:
            runs = [] if entry.deleted else message_ranges.segments(self._context.text, entry.fields)
            count = message_ranges.count(runs)
        place = {"conversation_id": self._context.ref.id, "previous_id": previous_id}
        changes.emit("conversation.switched", {**place, "message_count": count, "client": client})
        return (await self._context.commit(changes.draft("switch"))).version

    async def lifetime(self) -> Lifetime:
        """Read how long the session lives: what is set, and when it ends if nobody writes any more. Asks the server."""
        self._context.allow("read", VERSION)
        return await read_lifetime(self._context.tiers, self._context.keys)

    async def set_lifetime(self, *, idle: float | None = None, lifetime: float | None = None) -> int:
        """Let the session end after `idle` seconds without a commit, and `lifetime` seconds from now at the latest.

        What is not given is without end. One commit, in place of what was set before. At the end, or at most `sweep`
        seconds later (some 14 more if the replica that looked after it crashed), one `session.expired` is published
        with the `reason`, "idle" or "lifetime"; the session is as a deleted one then, and its history stays. Reading
        does not keep it alive. Who holds its `lock()`, or is in a turn, is waited for.
        """
        self._context.allow("write", None)
        changes = self._context.changes()
        changes.set_lifetime(field_ttl.span_ms("idle", idle), field_ttl.span_ms("lifetime", lifetime))
        return (await self._context.commit(changes.draft("lifetime"))).version

    def turn(
        self,
        *,
        request_id: str | None = None,
        busy: str = "wait",
        wait: float = 60.0,
        ttl: float = 30.0,
        limit: float | None = None,
        slot: str | None = None,
        expect: Mapping[str, Any] | None = None,
        expect_exists: bool | None = None,
        durability: str | None = None,
    ) -> AsyncTurn:
        """Serve one request inside `async with`: what is changed there is one commit at its end, or nothing.

        Example::

            async with session.turn(request_id="r1", busy="reject", limit=60) as turn:
                if not turn.repeated:
                    turn.append({"role": "user", "content": "Where to?"})
                    turn.outcome = "Oslo."

        Nobody else writes the record meanwhile. A `request_id` that was answered before gives `turn.repeated` and the
        first one's `turn.outcome`, also after a `rollback`, `restore_state`, `clear` or import: a session remembers its
        last 32 requests (`remembered_requests`).

        If a turn runs already: `busy="wait"` queues up to `wait` seconds (LockTimeout), "reject" raises LockTimeout at
        once, "interrupt" takes over and the other one's turn raises Interrupted. After `limit` seconds the turn is
        given up, however alive: Fenced; inside a `lock()` of this task that lock's time counts. Of one `slot` only the
        last request is remembered, else of each id.

        `expect` and `expect_exists` are as in `write`, and must hold when the turn begins: else Conflict. Of a request
        that was answered before they are not asked.

        With `durability`, as in `store.durable`, a turn that raised DurabilityUnknown may be begun again under its
        `request_id`: it is not made twice, and if that does not raise, it is kept so hard.
        """
        return AsyncTurn(
            self, self._context, request_id=request_id, busy=busy, wait=wait, ttl=ttl, limit=limit, slot=slot,
            durability=durability, expect=expect, expect_exists=expect_exists,
        )  # fmt: skip

    async def call(
        self,
        tool: Tool | str,
        arguments: dict[str, Any] | str | None = None,
        *,
        call_id: str,
        turn_id: str = "",
        wait: float = 60.0,
        tools: Iterable[Tool] = (),
    ) -> ToolCall:
        """Run a tool in a turn of its own, once for each (`turn_id`, `call_id`); a repeated call returns the first's.

        Example::

            @tool
            def book(state, city: str, nights: int = 1) -> str:
                state["booked"] = {"city": city, "nights": nights}
                return f"{nights} nights in {city}"

            call = await session.call(book, '{"city": "Oslo"}', call_id="call_0")
            assert call.result == "1 nights in Oslo"

        A name stands for the one of `tools` that has it. A failure, the model's included, is in what comes back,
        changes nothing, and is not remembered: a call may be repeated until it works.
        """
        turn = self.turn(request_id=request_of(turn_id, call_id), wait=wait)
        return await call_once(turn, tool, arguments, call_id, tools)


@bounded()
class AsyncTypedSession(AsyncTypedRecord[M], AsyncSession):
    """A session whose fields are those of a pydantic model: `store.session("c1", schema=Trip)`."""
