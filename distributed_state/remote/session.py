"""A conversation behind a service. Law: a method is one request, or says how many.

Design: section 26.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from distributed_state.conversation.phases import DEFAULT, StateMachine
from distributed_state.conversation.session import AsyncSession
from distributed_state.errors import Deleted, InvalidValue, NotFound
from distributed_state.records.messages import Page
from distributed_state.remote import values
from distributed_state.remote.record import AsyncRemoteRecord
from distributed_state.values import field_ttl
from distributed_state.values.model import Message
from distributed_state.values.results import Lifetime


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

    async def append(self, *messages: Message | dict[str, Any], durability: str | None = None) -> int:
        """Add messages to the conversation in one commit and return the new version."""
        return await self._written({"kind": "append", "append": values.messages(messages)}, durability)

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
        """Read the last messages, or all, or a page of them, oldest first. One request for each 500.

        A message that was read knows its `number`. `after` and `before` are such numbers, both exclusive; `limit` is
        how many from the beginning, which with `order="desc"` is the newest.
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
        """Read messages as `messages` does, as dicts, the caller's own, with `number` and `timestamp`."""
        page = Page(last=last, limit=limit, before=before, after=after, order=order).checked()
        lines = await self._lines(page, values.must_ask(fresh, max_staleness))
        return [_raw(each) for each in lines]

    async def _lines(self, page: Page, fresh: bool) -> list[dict[str, Any]]:
        """The lines of a transcript, page by page from the end that counts."""
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

    async def message(self, number: int, *, fresh: bool = False, max_staleness: float | None = None) -> Message:
        """Read one message by its number. Raises NotFound if there is none, or the conversation shows it no more."""
        if type(number) is not int or number < 0:
            raise InvalidValue(f"a message has a number from 0 on, not {number!r:.80}")
        found = await self.messages(
            limit=1, after=number - 1 if number else None, fresh=fresh, max_staleness=max_staleness
        )
        if not found or found[0].number != number:
            raise NotFound(f"{self.ref.text[:200]}: shows no message {number}")
        return found[0]

    async def pop_message(self, *, durability: str | None = None) -> Message | None:
        """Take the last message back, in one commit, and return it; None if the conversation shows none."""
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
        """Show these in place of all messages behind the one numbered `after`, in one commit; the new version.

        Without `after` in place of all. Conflict if that one, or `expect_last` as the last, is not shown any more.
        """
        _unsaid(durability)
        body = {"messages": values.messages(messages), "after": after, "expect_last": expect_last}
        done = await self._place.write(body, method="PUT", to="/messages", owned=False)
        return int(done["version"])

    async def lifetime(self) -> Lifetime:
        """Read how long the session lives: what is set, and when it ends if nobody writes any more."""
        found = await self._place.read(f"{self._place.path}/lifetime", absent=None)
        return Lifetime(None, None, None) if found is None else values.made(Lifetime, found)

    async def set_lifetime(self, *, idle: float | None = None, lifetime: float | None = None) -> int:
        """Let the session end after `idle` seconds without a commit, and `lifetime` seconds from now at the latest.

        What is not given is without end. One commit, in place of what was set before.
        """
        for name, seconds in ("idle", idle), ("lifetime", lifetime):
            field_ttl.span_ms(name, seconds)
        return await self._written({"kind": "lifetime", "lives": {"idle": idle, "lifetime": lifetime}}, None)

    async def phase(self, *, fresh: bool = False, max_staleness: float | None = None) -> str | None:
        """Read the phase, None if it has none."""
        return (await self._place.state(fresh=values.must_ask(fresh, max_staleness))).phase

    async def transition(
        self,
        event: str,
        *,
        machine: StateMachine = DEFAULT,
        set: Mapping[str, Any] | None = None,
        append: Iterable[Message | dict[str, Any]] = (),
    ) -> str:
        """Move the phase along the table by an event, in one commit with what else changes; the new phase.

        Two requests. Raises InvalidTransition, and nothing is written, if the event leads nowhere from there.
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
