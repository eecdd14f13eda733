"""Example: an assistant with per-user state, kept as such agents like to: defaults, counters, caches, backups."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from distributed_state import InvalidValue, Message


class Concierge:
    """Looks after one guest. Everything it knows is in the store, so any worker can go on where another stopped."""

    def __init__(self, store: Any, guest: str) -> None:
        self.guest = store.user(guest)
        self.visit = store.session(f"visit-{guest}", user=guest)

    async def begin(self) -> None:
        """Defaults on first use, and a count of visits that no replica counts twice."""
        await self.guest.initialize({"preferences": {"language": "en", "style": "friendly"}, "visits": 0})
        await self.guest.increment("visits")

    async def hear(self, text: str) -> str:
        """One exchange: two messages and a counter, one commit."""
        preferences = await self.guest.get("preferences", {})
        answer = f"[{preferences.get('language')}] {len(text.split())} words heard"
        await self.visit.write(
            append=[Message(role="user", content=text), Message(role="assistant", content=answer)],
            increment={"exchanges": 1},
            set={"last_heard": text[:100]},
        )
        return answer

    async def summary(self) -> str:
        """What a tool would tell."""
        exchanges, visits = await self.visit.get("exchanges", 0), await self.guest.get("visits", 0)
        return f"{visits} visits, {exchanges} exchanges in this one"


async def test_a_conversation(store: Any) -> None:
    concierge = Concierge(store, "ana")
    await concierge.begin()
    await concierge.hear("a room with a view please")
    await concierge.guest.update("preferences", {"language": "pt"})
    assert await concierge.hear("obrigada") == "[pt] 1 words heard"
    await Concierge(store, "ana").begin()  # she comes again, perhaps to another worker
    assert await concierge.summary() == "2 visits, 2 exchanges in this one"
    assert await concierge.guest.get("preferences") == {"language": "pt", "style": "friendly"}


async def test_the_basic_operations(store: Any) -> None:
    state = store.session("s")
    await state.set("name", "Ana")
    assert await state.has("name")
    assert await state.get("name") == "Ana"
    assert await state.get("nobody", "default") == "default"
    assert await state.get("nobody") is None
    await state.delete("name")
    assert not await state.has("name")

    profile = {"name": "Ana", "stays": [{"city": "Porto", "nights": 2}]}
    await state.set("profile", profile)
    found = await state.get("profile")
    found["stays"].clear()  # the caller's own copy
    assert await state.get("profile") == profile

    await state.clear()
    assert await state.get_all() == {}


async def test_many_fields_and_many_records_at_once(store: Any) -> None:
    session, guest = store.session("s"), store.user("ana")
    await session.set_many({"city": "Porto", "nights": 2, "budget": 300})  # one commit
    async with store.batch() as batch:  # one round trip, one commit a record
        batch.on(session).set_many({"nights": 3, "booked": True})
        batch.on(guest).increment("bookings", 1)
    assert await session.get_all() == {"city": "Porto", "nights": 3, "budget": 300, "booked": True}
    assert await guest.get("bookings") == 1


async def test_reads_are_cached_as_long_as_the_reader_says(store: Any) -> None:
    session = store.session("s")
    await session.set("rate", 1.08)
    assert await session.get("rate") == 1.08  # from memory, as old as the setting `max_staleness` allows
    assert await session.get("rate", max_staleness=0.5) == 1.08  # from memory if that is at most half a second old
    assert await session.get("rate", fresh=True) == 1.08  # from the server
    store.invalidate()  # the next read of any record asks
    assert await session.get("rate") == 1.08


async def test_values_that_do_not_stay(store: Any) -> None:
    session = store.session("s")
    await session.set("code", 4711, ttl=120)  # for two minutes, on every replica
    assert await session.get("code") == 4711
    session.ephemeral["connection"] = object()  # for this process alone
    assert await session.get_all() == {"code": 4711}


async def test_backup_and_restore(store: Any) -> None:
    session = store.session("s")
    await session.write(set={"city": "Porto"}, append=[{"role": "user", "content": "hi"}], phase="planning")
    saved = json.dumps(await session.export_state(messages=True))
    await session.clear(messages=True)

    await session.restore_state(json.loads(saved))
    assert await session.get("city") == "Porto"
    assert [message.content for message in await session.messages()] == ["hi"]

    with pytest.raises(InvalidValue) as refused:
        await session.restore_state({"fields": {"city": "Faro", "when": datetime(2030, 1, 1), "#x": 1}})
    assert "when" in str(refused.value)
    assert "'#x'" in str(refused.value)
    assert await session.get("city") == "Porto", "all or nothing"


async def test_old_messages_are_tidied_away(store: Any) -> None:
    session = store.session("s")
    await session.append({"role": "user", "content": "hi"})
    assert await store.admin.cleanup(session.id, days=30) == 0  # nothing here is a month old
    assert await store.admin.cleanup(session.id, days=0) == 1
    assert await session.messages() == []
    assert len((await session.history())[0].appended) == 1, "the history keeps it until it is purged"


async def test_input_is_checked_or_made_fit(store: Any) -> None:
    strict, lenient = store.session("s"), store.session("s", on_invalid="stringify")
    when = datetime(2030, 1, 1, tzinfo=UTC)
    with pytest.raises(InvalidValue):
        await strict.set("when", when)
    await lenient.set("trip", {"when": when, "nights": 2})
    assert await lenient.get("trip") == {"when": "2030-01-01 00:00:00+00:00", "nights": 2}

    def tidy(key: str, value: Any) -> Any:
        if key == "age" and not 0 <= value < 150:
            raise InvalidValue(f"age: {value} is no age")
        return value.strip() if isinstance(value, str) else value

    def redact(message: Message) -> Message:
        return message.model_copy(update={"content": str(message.content).replace("4711", "****")})

    form = store.session("s", clean=tidy, clean_messages=redact)
    await form.set("name", "  Ana ")
    await form.append(Message(role="user", content="my code is 4711"))
    with pytest.raises(InvalidValue, match="no age"):
        await form.set_many({"name": "Eve", "age": -1})
    assert await form.get("name") == "Ana"
    assert (await form.messages())[0].content == "my code is ****"
