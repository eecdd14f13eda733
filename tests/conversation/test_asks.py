"""Questions to people. Law: each question has one answer, and is listed while it has none."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from below import later, said, until
from working import due_set, schedule, working

from distributed_state import InvalidValue, NotFound
from distributed_state.values.schedule import Schedule


async def test_a_question_is_listed_answered_once_and_closed(store: Any) -> None:
    said_by: list[Any] = []

    def book(turn: Any) -> None:
        for each in turn.take():
            answers = (each.message.metadata or {}).get("answers")
            if answers is None and each.wake is None:
                turn.ask("Shall I book?", name="booking", data={"price": 900}, expires=3600)
            else:
                said_by.append((answers, each.wake, each.message.content))
                turn.move_to("done")

    session = store.session("s", user="u")
    async with working(store, {"a": book}):
        await session.post(said("a trip"), handler="a")
        await until(lambda: schedule(store, "s") not in (None, Schedule("a")) and due_set(store, "s") != {})
        while await session.phase() != "waiting_feedback":
            await asyncio.sleep(0.01)
        [ask] = await store.asks(fresh=True)
        assert (ask.session, ask.name, ask.question, ask.data, ask.user) == (
            "s",
            "booking",
            "Shall I book?",
            {"price": 900},
            "u",
        )
        assert ask.expires == pytest.approx(ask.asked + 3600, abs=0.002)
        assert [each.wake for each in await session.wakes()] == ["ask booking"]
        assert await store.asks(user="other", fresh=True) == []
        with pytest.raises(NotFound, match="no open question"):
            await session.answer("yes")
        store.stop_working()
    assert await session.answer({"book": True}, "booking") is True
    assert await store.asks(fresh=True) == [], "it was answered, although no turn has closed it"
    assert await session.answer("no", "booking") is False
    assert [each.message.content for each in await session.inbox()] == ['{"book":true}']
    async with session.turn() as turn:
        [taken] = turn.take()
        assert taken.message.metadata == {"answers": "booking", "value": {"book": True}}
        turn.move_to("done")
    assert await store.asks(fresh=True) == []
    assert await session.wakes() == []
    with pytest.raises(NotFound, match="no open question"):
        await session.answer("yes", "booking")


async def test_metadata_of_other_messages_closes_no_question(store: Any) -> None:
    session = store.session("s")
    async with session.turn() as turn:
        turn.ask("Well?", name="q")
    for named in (["q"], {"q": 1}, "q", 1):
        await session.post({"role": "user", "content": "x", "metadata": {"answers": named}})
    async with session.turn() as turn:
        assert len(turn.take()) == 4
    assert [each.name for each in await store.asks(fresh=True)] == ["q"]


async def test_an_answer_to_an_earlier_question_of_the_name_is_refused(store: Any) -> None:
    """A button that was shown for one question must not answer the next one."""
    session = store.session("s")
    found = []
    for question in ("Oslo?", "Bergen?"):
        async with session.turn() as turn:
            turn.ask(question)
        found += await store.asks(fresh=True)
    assert [each.question for each in found] == ["Oslo?", "Bergen?"]
    with pytest.raises(NotFound, match="no open question"):
        await session.answer("yes", id=found[0].id)
    assert await session.answer("yes", id=found[1].id) is True


@pytest.mark.parametrize(
    "forged",
    [
        "x",
        {"question": "x"},
        {"id": "x" * 300, "question": "x", "data": 1, "asked": 1, "expires": None},
        {"id": "x", "question": "x", "data": "x" * 40_000, "asked": 1, "expires": None},
        {"id": "x", "question": "x", "data": 1, "asked": "x", "expires": None},
        {"id": "x", "question": "x", "data": 1, "asked": 1, "expires": [1]},
    ],
)
async def test_a_field_that_looks_like_a_question_hides_no_others(store: Any, forged: Any) -> None:
    await store.session("forged").write(set={"ask.x": forged}, phase="waiting_feedback")
    async with store.session("s").turn() as turn:
        turn.ask("Well?")
    assert [each.question for each in await store.asks(fresh=True)] == ["Well?"]
    with pytest.raises(NotFound, match="no open question"):
        await store.session("forged").answer("yes", "x")


async def test_a_question_that_expires_arrives_as_a_wake_and_is_closed(store: Any) -> None:
    session = store.session("s")
    async with session.turn() as turn:
        turn.ask("Well?", expires=0.1)
    assert await session.phase() == "waiting_feedback"
    await until(session.inbox)
    assert await store.asks(fresh=True) == [], "it has expired, although no turn has closed it"
    with pytest.raises(NotFound, match="it was answered, or it expired"):
        await session.answer("yes")
    async with session.turn() as turn:
        [taken] = turn.take()
        assert (taken.wake, taken.message.content) == ("ask ", "Well?")
        turn.move_to("error")
    assert await store.asks(fresh=True) == []
    for bad in ("", 1, None):
        with pytest.raises(InvalidValue, match="question"):
            async with session.turn() as turn:
                turn.ask(bad)
    with pytest.raises(InvalidValue, match="name"):
        async with session.turn() as turn:
            turn.ask("?", name="n" * 101)
    with pytest.raises(InvalidValue, match="at most 16384 bytes"):
        async with session.turn() as turn:
            turn.ask("?", data="x" * 17_000)


async def test_an_answer_before_the_expiry_comes_without_it(store: Any) -> None:
    session = store.session("s")
    async with session.turn() as turn:
        turn.ask("Well?", name="q", expires=3600)
        turn.ask("Else?", name="other", expires=3600)
    assert await session.answer("yes", "q")
    later(store, 3601)  # no turn has taken the answer in time
    async with session.turn() as turn:
        assert [each.wake for each in turn.inbox] == ["ask other", None]
        assert [each.message.content for each in turn.take()] == ["Else?", "yes"]
        turn.move_to("done")
    assert await session.inbox() == await session.wakes() == []


async def test_the_expiry_of_a_question_does_not_end_the_next_one_of_its_name(store: Any) -> None:
    session = store.session("s")
    async with session.turn() as turn:
        turn.ask("Oslo?", name="q", expires=0)
    async with session.turn() as turn:
        turn.ask("Bergen?", name="q", expires=3600)
        turn.ask("Bergen?", name="q")
        assert turn.take() == ()
    assert await session.inbox() == await session.wakes() == []
    assert [each.question for each in await store.asks(fresh=True)] == ["Bergen?"]


async def test_a_session_with_many_questions_hides_no_others(store: Any) -> None:
    for id in ("many", "s"):
        async with store.session(id).turn() as turn:
            for number in range(12 if id == "many" else 1):
                turn.ask("Well?", name=str(number))
    found = await store.asks(fresh=True)
    assert Counter(each.session for each in found) == {"many": 10, "s": 1}
