"""A conversation: a record with messages, a phase and turns. Law: a method is one commit or one read.

A tool that is called outside a turn runs in a turn of its own, once for each pair (turn id, call id).

Design: sections 11, 13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal, overload

from pydantic import ValidationError

from distributed_state.conversation import agent_state, asks, inbox, output, replacing, window, workflow
from distributed_state.conversation.agent_state import AgentState, ToolCall
from distributed_state.conversation.output import AsyncOutput
from distributed_state.conversation.phases import DEFAULT, StateMachine, transition
from distributed_state.conversation.tools import Tool
from distributed_state.conversation.turn import AsyncTurn
from distributed_state.conversation.window import Bounds, Context, Strategy, Summarizer, Window, look
from distributed_state.errors import InvalidValue, WarmUnavailable
from distributed_state.formats import Counter, estimate
from distributed_state.port.waited import bounded
from distributed_state.records import messages
from distributed_state.records.access import MESSAGES, MOVES, VERSION
from distributed_state.records.context import context_of
from distributed_state.records.messages import Page, Shown
from distributed_state.records.record import AsyncRecord
from distributed_state.records.schema import M
from distributed_state.records.typed import AsyncTypedRecord
from distributed_state.results import Input, Lifetime, StopResult, Usage
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import field_ttl, message_ranges
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import LIFETIME, MAX_ID_BYTES, PHASE, Message
from distributed_state.values.usage import used

_ROUNDS = 100


async def read_lifetime(tiers: Tiers, keys: RecordKeys) -> Lifetime:
    """The session's current lifetime, from Redis."""
    for _ in range(_ROUNDS):
        if not (await read_path.load_uncached(tiers, keys)).version:
            return Lifetime(None, None, None)
        # One request reads all of them, so that they belong together: only a commit changes them, and it leaves them in
        # Redis.
        version, lifetime, last_ms = await tiers.warm.command(b"HMGET", keys.record, b"#v", LIFETIME, b"#t")
        if version is not None:
            return _lifetime_of(lifetime, last_ms)
    raise WarmUnavailable(f"{keys.ref.text[:200]}: is deleted and created again faster than it can be read")


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
    """Ends the turn of a failed tool without a commit."""


def request_of(turn_id: str, call_id: str) -> str:
    """The request id of the turn for a call. Raises InvalidValue."""
    for name, value in ("call_id", call_id), ("turn_id", turn_id):
        if not isinstance(value, str) or (name == "call_id" and not value):
            raise InvalidValue(f"{name} is a str{', and not empty' * (name == 'call_id')}, not {value!r:.80}")
    # The length keeps ("a/b", "c") and ("a", "b/c") apart.
    return f"{len(turn_id)}/{turn_id}/{call_id}"


async def call_once(
    turn: AsyncTurn, tool: Tool | str, arguments: dict[str, Any] | str | None, call_id: str, tools: Iterable[Tool]
) -> ToolCall:
    """Run a tool as the only work of this turn, or return the result of its first run.

    `request_of` gave the turn its id.
    """
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
        raise InvalidValue(f"call {call_id!r:.80}: a turn already has the request id of this call") from None
    name = tool.name if isinstance(tool, Tool) else tool
    if call.tool_name != name:
        raise InvalidValue(f"call {call_id!r:.80}: was {call.tool_name}, not {name:.80}; each call has its own id")
    return call


@bounded("phase")
class AsyncSession(AsyncRecord):
    """A conversation: a record with messages, a phase and turns. `store.session(id)` returns one, without I/O.

    Example::

        session = store.session("c1", user="u1")
        async with session.turn(request_id="r1") as turn:  # one commit, even if the request is repeated
            if not turn.repeated:
                turn.append({"role": "user", "content": "Where to?"}, {"role": "assistant", "content": "Oslo."})
                turn["city"] = "Oslo"
        for message in await session.messages(last=10):
            print(message.role, message.content)

    `fresh` and `max_staleness` (seconds) of methods are as in `get`.
    """

    async def append(
        self, *messages: Message | dict[str, Any], revive: bool = False, durability: str | None = None
    ) -> int:
        """Add messages to the conversation in one commit and return the new version.

        Example::

            await session.append({"role": "user", "content": "Where to?"}, Message(role="assistant", content="Oslo."))

        Raises InvalidValue for an invalid message and TooLarge for one beyond `max_message_bytes`; then no message is
        added. A message without a `timestamp` gets the time of its commit when it is read. `revive` is as in `write`.
        """
        changes = self._context.changes()
        for message in messages:
            changes.append(message)
        if revive:
            changes.undelete()
        draft = changes.draft("append", deleted="begin" if revive else "refuse", durability=durability)
        return (await self._context.commit(draft)).version

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
        """Read the last messages, all, or a page of them, oldest first.

        Those before the `recent_messages` come from SQL.

        Each message has its `number`, which does not change; numbers are missing where messages were removed. `after`
        and `before` are such numbers, both exclusive. `limit` counts from the beginning, or with `order="desc"` from
        the newest: `messages(limit=20, order="desc", before=oldest.number)` is the previous page, and
        `messages(last=20, before=oldest.number)` the same with the oldest first. Only the page itself is read.

        A message is decoded when it is first accessed: CorruptState and DecryptionFailed are raised there.
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
        """Read messages as `messages` does, as new dicts: the fastest way to read all of a long conversation.

        Example::

            await session.append({"role": "user", "content": "Where to?"})
            [message] = await session.raw_messages(last=1)
            assert message == {
                "role": "user", "content": "Where to?", "number": message["number"], "timestamp": message["timestamp"]
            }

        Each dict holds the fields that were appended, and `number` and `timestamp` as a Message has them; `number`
        replaces an appended field of that name. Raises CorruptState or DecryptionFailed if any cannot be read.
        """
        page = Page(last=last, limit=limit, before=before, after=after, order=order)
        found = (await self._shown(page, fresh, max_staleness)).raw()
        return found[::-1] if order == "desc" else found

    async def _shown(self, page: Page, fresh: bool, max_staleness: float | None) -> Shown:
        page.checked()
        self._context.allow("read", MESSAGES)
        asks = self._context.must_ask(fresh, max_staleness)
        return await messages.chosen(self._context.tiers, self._context.keys, page, fresh=asks)

    async def pop_message(self, *, durability: str | None = None) -> Message | None:
        """Remove the last message, in one commit, and return it, or None if the conversation has no messages.

        Two concurrent calls remove two different messages, and a message appended meanwhile is the last one. Earlier
        versions still show a removed message, and its number is not used again. Raises CorruptState or
        DecryptionFailed, and removes nothing, if it cannot be read. Raises TooLarge if the remaining messages have gaps
        at more than 2,000 places; to close the gaps, pass all of them to `replace_messages`.
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
        """Replace all messages after number `after` (None: all messages) by these, in one commit.

        Example::

            await session.append({"role": "user", "content": "Where to?"})
            seen = await session.messages()
            short = [{"role": "assistant", "content": "We went through hotels in Oslo."}]
            await session.replace_messages(short, expect_last=seen[-1].number)  # Conflict if another was added

        Returns the new version. Raises Conflict and writes nothing if `after` is no longer shown or `expect_last` is
        not the last message. Earlier versions show the replaced messages. Errors as in `append`; TooLarge as in
        `pop_message`.
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
        """Read the part of the conversation to send to a model: the newest whole turns that fit in `max_tokens`.

        Example::

            window = await session.window(max_tokens=8000)
            request = {"messages": formats.to_openai(window.messages)}

        A turn is a user message and all that follows it. The last `keep_last` turns, and with `keep_system` the system
        messages at the beginning, are kept even if they do not fit, so compare `tokens` where that matters. With
        `strategy="summarize"` the other messages are passed to `summarizer(messages, previous_summary)`, which returns
        text. The summarizer is not called for each new message, but when the messages no longer fit: it then gets all
        beyond half of `max_tokens`. The summary is stored with the session in a commit of its own, once for all
        replicas, and extended later. A replica waits at most `wait` seconds for another one's summary, else it raises
        LockTimeout; writes of others are not blocked.
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
        """Move the phase along the table of `machine`, in one commit with fields and messages; return the new phase.

        Example::

            phase = await session.transition("new_task", machine=TASK_MACHINE, set={"goal": "a weekend in Oslo"})

        A session without a phase is in the machine's initial one. If another writer changed the phase meanwhile, the
        event is applied to that phase. Raises InvalidTransition, and writes nothing, if the event is not allowed there.
        """
        self._context.allow("read", MOVES)
        self._context.allow("write", MOVES)
        return await transition(self._context, event, machine=machine, set=set or {}, append=append)

    async def context(
        self, *, last: int = 20, beside: Iterable[AsyncRecord] = (), counter: Counter = estimate
    ) -> Context:
        """Read the context for a model: the last messages, and the fields of the session and the records in `beside`.

        Example::

            context = await session.context(last=10, beside=[store.user("u1")])
            prompt = context.render()

        `beside` takes records: `[store.user("u1"), store.task("t1")]`. All records that are not in hot are read in one
        round trip; messages older than `recent_messages` need further reads. `render()` gives the state as text for a
        prompt.
        """
        contexts = [self._context, *(context_of(each, "a context") for each in beside)]
        for each in contexts:
            each.allow("read", None)
        self._context.allow("read", MESSAGES, MOVES)
        return await look(contexts, last, counter)

    @overload
    async def load_state(self) -> AgentState | None: ...
    @overload
    async def load_state(self, kind: type[M]) -> M | None: ...
    async def load_state(self, kind: type[Any] = AgentState) -> Any:
        """Read the agent's state, None if none was saved, with the version and values that `save_state` expects.

        `kind` is the class of the state: AgentState, your subclass with fields of its own, or a dataclass.
        """
        self._context.allow("read", None)
        state = await agent_state.load(self._context, kind)
        self._context.allow("read", *agent_state.shown(state))
        return state

    async def save_state(self, state: M) -> M:
        """Save an agent's state in one commit and return the saved state, to continue from.

        Example::

            state = AgentState.from_user_input("Where to?", session_id="c1")
            for step in (AgentState.to_executing, AgentState.to_reflecting):
                state = await session.save_state(step(state))

        The state is an AgentState, of a subclass, or of a dataclass; a dataclass is kept in fields, with its history.
        Sends only the changes since it was loaded or saved, and appends only new messages. Raises Conflict if the
        record changed meanwhile; InvalidValue for the state of another session, an outdated state, a history that does
        not continue the stored one, or an invalid value.
        """
        found: M = await agent_state.save(self._context, state)
        return found

    async def switch(self, *, previous_id: str = "", client: str = "", message_count: int | None = None) -> int:
        """Publish that a client continues with this conversation; return the record's new version.

        One commit that changes no field, with the event `conversation.switched`: `conversation_id`, `previous_id`, the
        number of messages shown, by default of those stored here, and the client. The store does not track which
        conversation a client uses.
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
        """Read the session's lifetime: its settings, and when it ends without further writes. Asks the server."""
        self._context.allow("read", VERSION)
        return await read_lifetime(self._context.tiers, self._context.keys)

    async def set_lifetime(self, *, idle: float | None = None, lifetime: float | None = None) -> int:
        """Let the session end after `idle` seconds without a commit, and `lifetime` seconds from now at the latest.

        None means unlimited. One commit, which replaces the earlier settings. When the session ends, or at most `sweep`
        seconds later (about 14 seconds more if the replica in charge crashed), one event `session.expired` is published
        with the `reason`, "idle" or "lifetime". The session is then like a deleted one, and its history stays. Reads do
        not extend its life. It does not end while a `lock()` or a turn holds it.
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
        usage_below: int | None = None,
        revive: bool = False,
        durability: str | None = None,
    ) -> AsyncTurn:
        """Serve one request inside `async with`: its changes are one commit at the end, or nothing.

        Example::

            async with session.turn(request_id="r1", busy="reject", limit=60) as turn:
                if not turn.repeated:
                    turn.append({"role": "user", "content": "Where to?"})
                    turn.outcome = "Oslo."

        Others cannot write the record meanwhile. If the `request_id` was answered before, `turn.repeated` is true and
        `turn.outcome` is that of the first turn, even after a `rollback`, `restore_state`, `clear` or import. A session
        keeps its last 32 requests (setting `remembered_requests`).

        If a turn is already running: `busy="wait"` queues up to `wait` seconds (LockTimeout), "reject" raises
        LockTimeout at once, "interrupt" takes over and the other turn raises Interrupted. A turn that runs longer than
        `limit` seconds loses its lease and raises Fenced; inside a `lock()` of this task the lock's lease counts
        instead. With a `slot` the session keeps only the last request of that slot, without one a request for each id.

        `expect` and `expect_exists` are as in `write`, and must hold when the turn begins: else Conflict. They are not
        checked for a request that was answered before. With `revive`, a session that was deleted or expired begins
        again, empty, with this turn's changes; a request that was answered before stays answered.

        With `usage_below`, the turn begins only while the session's models have used fewer tokens, as `usage` counts
        them: else UsageExceeded. A turn that begins below the bound may end above it.

        `durability` is as in `store.durable`. A turn that raised DurabilityUnknown may be repeated under its
        `request_id`: it is not applied twice, and it has reached the level when a repeat returns without an error.
        """
        return AsyncTurn(
            self, self._context, request_id=request_id, busy=busy, wait=wait, ttl=ttl, limit=limit, slot=slot,
            durability=durability, expect=expect, expect_exists=expect_exists, usage_below=usage_below,
            revive=revive,
        )  # fmt: skip

    async def usage(self, *, fresh: bool = False, max_staleness: float | None = None) -> Usage:
        """Read the tokens that models used in the session's turns so far: see `turn.model`.

        Example::

            async with session.turn() as turn:
                turn.model("gpt-5", input_tokens=812, output_tokens=90)
            assert (await session.usage()).models["gpt-5"].output_tokens == 90

        Counted once for each committed turn, also for a repeated request; a turn that raises counts nothing. A
        rollback, a clear or a deletion takes nothing back; a fork starts at zero. `days` is empty: see `store.usage`.
        """
        entry = await self._context.read(self._context.must_ask(fresh, max_staleness), VERSION)
        return Usage.of(used(entry.fields))

    def output(
        self,
        request_id: str | None = None,
        *,
        after: str | None = None,
        wait: float | None = None,
        notices: bool = False,
    ) -> AsyncOutput:
        """Follow what running turns stream, from any replica: chunks in order and once, and how the turn ends.

        Example::

            async with session.turn(request_id="r1") as turn:  # on any replica
                await turn.stream("Oslo")
                turn["city"] = "Oslo"
            async for part in session.output("r1", after=None, wait=30):
                if isinstance(part, results.Chunk):
                    print(part.data, part.position)  # a client that comes back passes the last position as `after`

        With a request id it shows that request's turn, from its first chunk, or the turn that took the input posted
        with it, from there on. It ends with that turn: `Ended`, `Failed` or `Abandoned`. Without a request id it shows
        the turn that runs, then the next ones. `after` is a position that was received earlier, on any replica. The
        iteration ends after `wait` seconds without anything; None: never.

        Also: `Restarted` (drop what was shown; another attempt serves the request), `Truncated` (chunks are missing)
        and `StopRequested`; and with `notices`, a `Notice` when a turn begins or ends, messages or fields change, or
        an input comes. Output is not state: Redis keeps its last `output_bytes` for `output_ttl` seconds.
        """
        return AsyncOutput(self._context, request_id, after, wait, notices)

    async def post(
        self,
        message: Message | dict[str, Any],
        *,
        request_id: str | None = None,
        handler: str | None = None,
        durability: str | None = None,
    ) -> int:
        """Leave a message for a turn of this session, even while another turn runs; return its number in the inbox.

        Example::

            number = await session.post({"role": "user", "content": "And Bergen?"}, request_id="r2")
            async with session.turn() as turn:
                for each in turn.take():  # served: the commit of this turn removes them
                    turn.append(each.message)

        An input is stored as durably as any commit, and is served by exactly one committed turn; that of a turn which
        fails or dies stays. A request id is accepted once, while its input waits or is among the last
        `remembered_requests`: repeated, it returns the same number. Raises Backpressure if `inbox_limit` inputs or
        `inbox_bytes` wait already.
        """
        return await inbox.post(self._context, message, request_id, handler, durability)

    async def inbox(self) -> list[Input]:
        """The inputs that wait for a turn, in the order in which they were accepted."""
        return await inbox.read(self._context)

    async def withdraw(self, number: int) -> bool:
        """Take an input out of the inbox; False if it is no longer there.

        A turn that runs may have read it already, and may still answer it.
        """
        return await inbox.withdraw(self._context, number)

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
        """Begin a turn later: a worker that has the session's handler is given `text` in `turn.inbox` then.

        Example::

            await session.wake("Ask whether the flight was on time.", after=3600, name="flight", handler="support")
            assert [each.wake for each in await session.wakes()] == ["flight"]

        `after` is in seconds, `at` in seconds since 1970 by the server's clock; with `every` it repeats, after so many
        seconds from when it was due. A wake replaces the one with its name that has not been served. Wakes are kept
        like inputs: a rollback leaves them, a deletion or expiry ends them.
        """
        later = inbox.Later(text, after, at, every)
        await inbox.wake(self._context, later, name, handler, durability)

    async def wakes(self) -> list[Input]:
        """Read the wakes that are set, the next one first; `time` is when each is due. One round trip."""
        return await inbox.read_wakes(self._context)

    async def cancel_wake(self, name: str = "") -> bool:
        """Remove a wake; False if none with this name is set. A turn that runs may have read it already."""
        return await inbox.cancel_wake(self._context, name)

    async def answer(self, value: Any, name: str = "", *, id: str | None = None, durability: str | None = None) -> bool:
        """Answer an open question of the session: see `turn.ask`. False if somebody has answered it already.

        The answer is posted as an input, so the session's handler is called with it. `value` is any JSON value; a str
        is the message's content as it is. The content of another value is its JSON, and `metadata["value"]` is the
        value. With the `id` of an `Ask`, answers only that question and not a later one of its name. Raises NotFound if
        there is no such question, or it has expired.
        """
        return await asks.answer(self._context, name, value, id, durability)

    async def retry(self) -> bool:
        """Let a session go on that failed or was stopped; False if it did not.

        After the session's handler failed, a worker calls it again now. A workflow that ended in phase "error" goes on
        in the phase that failed, with `max_steps` further steps: a worker does the next one, or without a handler the
        next `store.run(workflow, session_id=...)`. A worker also continues a workflow whose turn was stopped. Raises
        NotFound if the session has neither a handler nor a workflow.
        """
        return await workflow.retry(self._context)

    async def stop(
        self,
        request_id: str | None = None,
        *,
        token: int | None = None,
        reason: str | None = None,
        wait: float = 5.0,
    ) -> StopResult:
        """Ask the turn that runs, or that request's, to stop, from any replica; wait up to `wait` seconds for its end.

        Example::

            stopped = await session.stop("r1", reason="the user pressed stop")
            assert stopped.state in ("stopped", "finished", "nothing ran", "stopping")

        A turn may keep what it has: see `turn.stoppable`. Otherwise it raises Stopped, and nothing is written. A
        request that waits for its turn does not begin. The request of a posted message means the turn that has taken
        the message; a message that waits is removed with `withdraw`. `token` means only the turn with this fencing
        token, as a `turn.started` notice has it: a late click never stops the next turn. `reason` has at most 1,024
        bytes; the turn and its followers see it.
        """
        return await output.stop(self._context, request_id, token, reason, wait)

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
        """Run a tool in a turn of its own, once for each (`turn_id`, `call_id`); a repeat returns the first result.

        Example::

            @tool
            def book(state, city: str, nights: int = 1) -> str:
                state["booked"] = {"city": city, "nights": nights}
                return f"{nights} nights in {city}"

            call = await session.call(book, '{"city": "Oslo"}', call_id="call_0")
            assert call.result == "1 nights in Oslo"

        `tool` is a tool, or the name of one of `tools`. A failure of the tool or a mistake of the model is returned in
        the call; it changes nothing and is not stored, so a call may be repeated until it succeeds.
        """
        turn = self.turn(request_id=request_of(turn_id, call_id), wait=wait)
        return await call_once(turn, tool, arguments, call_id, tools)


@bounded()
class AsyncTypedSession(AsyncTypedRecord[M], AsyncSession):
    """A session whose fields are those of a pydantic model: `store.session("c1", schema=Trip)`."""
