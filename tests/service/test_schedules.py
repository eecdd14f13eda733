"""Conversations that go on by themselves, over HTTP: handlers, wakes, and questions to people."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock

import pytest
from below import said, until
from handled import ask, make_stuck, schedule_of, worked
from tenants import Served, opened

from distributed_state import AsyncStateStore
from distributed_state.programs.service import Access

ONE = "/v1/conversations/acme:c"


class Caller:
    """Somebody of a tenant, with a token of these rights."""

    def __init__(self, served: Served, token: str) -> None:
        self.served, self.token = served, token

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """The answer's JSON, which must be a success."""
        response = await self.served.ask(method, path, self.token, **options)
        assert response.status_code == 200, response.text
        return response.json()

    async def status(self, method: str, path: str, **options: Any) -> int:
        return (await self.served.ask(method, path, self.token, **options)).status_code


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[AsyncStateStore, Served, Caller]]:
    """A store with a conversation of tenant acme's, its service, and a writer of that tenant."""
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        await store.session("acme:c", user="acme:ada").create({"n": 0})
        yield store, served, Caller(served, await served.token("acme:", "read", "write"))
        await served.service.close()


async def other(served: Served, prefix: str, *rights: str) -> Caller:
    return Caller(served, await served.token(prefix, *rights))


# Handlers


async def test_a_stuck_conversation_is_listed_with_its_error_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (store, served, writer):
        await store.session("evil:c").create()
        await make_stuck(store, "acme:c", "evil:c")
        await store.admin.archive()
        [row] = (await writer.ask("GET", "/v1/conversations?stuck=true"))["conversations"]
        found = row["schedule"]
        assert (row["id"], found["handler"], found["due"], found["stuck"], found["error"]) == (
            "acme:c", "support", None, True, "ZeroDivisionError",
        )  # fmt: skip
        assert found["failures"] >= 1, "more often if its worker looked again before the failure was noted"
        assert found["failed"] == pytest.approx(row["updated"], abs=5)
        assert "a secret" not in str(row)
        listed = await store.sessions(stuck=True, prefix="acme:")
        assert len(listed) == 1

        reader = await other(served, "acme:", "read")
        assert await reader.status("POST", ONE + "/retry") == 403
        stranger = await other(served, "evil:", "read", "write")
        assert await stranger.status("POST", ONE + "/retry") == 403
        assert await stranger.status("GET", ONE + "/schedule") == 403

        assert await writer.ask("POST", ONE + "/retry") == {"retried": True}
        assert await writer.ask("POST", ONE + "/retry") == {"retried": False}
        with monkeypatch.context() as patched:
            patched.setattr(store, "sessions", AsyncMock(return_value=listed))  # SQL has not seen this yet; Redis has
            assert (await writer.ask("GET", "/v1/conversations?stuck=true"))["conversations"] == []
        now = await writer.ask("GET", ONE + "/schedule")
        assert (now["failures"], now["stuck"], now["error"], now["failed"]) == (0, False, None, None)
        assert now["due"] is not None
        async with worked(store, lambda turn: turn.append(*(each.message for each in turn.take()))):
            await until(lambda: store.session("acme:c").messages(fresh=True))


async def test_a_message_that_is_withdrawn_takes_the_error_with_it() -> None:
    async with serving() as (store, _, writer):
        await make_stuck(store, "acme:c")
        assert (await writer.ask("GET", ONE + "/schedule"))["error"] == "ZeroDivisionError"
        await writer.ask("DELETE", ONE + "/inbox/1")
        found = await writer.ask("GET", ONE + "/schedule")
        assert (found["handler"], found["stuck"], found["error"]) == ("support", False, None)


async def test_what_has_no_handler_cannot_be_tried_again() -> None:
    async with serving() as (store, _, writer):
        found = await writer.ask("GET", ONE + "/schedule")
        assert found == {
            "handler": None, "due": None, "failures": 0, "stuck": False, "error": None, "failed": None,
            "wakes": [], "asks": [],
        }  # fmt: skip
        assert await writer.status("POST", ONE + "/retry") == 404
        for id in ("acme:none", "acme:gone"):
            await store.session("acme:gone").create()
            await store.delete("acme:gone")
            expected = 404 if id == "acme:none" else 410
            assert await writer.status("GET", f"/v1/conversations/{id}/schedule") == expected


# Wakes


async def test_wakes_are_set_read_replaced_and_removed() -> None:
    async with serving() as (store, served, writer):
        made = {"text": "Ask again", "after": 3600, "name": "again", "every": 86400, "handler": "support"}
        assert await writer.ask("POST", ONE + "/wakes", json=made) == {"name": "again"}
        assert await writer.ask("POST", ONE + "/wakes", json={"at": 4e9}) == {"name": ""}
        found = await writer.ask("GET", ONE + "/schedule")
        assert [(each["wake"], each["every"], each["message"]["content"]) for each in found["wakes"]] == [
            ("again", 86400, "Ask again"),
            ("", None, ""),
        ]
        assert found["due"] == pytest.approx(found["wakes"][0]["time"], abs=0.002)
        assert found["wakes"][1]["time"] == 4e9
        assert await writer.ask("GET", ONE + "/inbox") == {"inputs": []}, "none is due"

        reader = await other(served, "acme:", "read")
        assert await reader.status("POST", ONE + "/wakes", json={"after": 1}) == 403
        assert await reader.status("DELETE", ONE + "/wakes?name=again") == 403
        assert await writer.ask("DELETE", ONE + "/wakes?name=again") == {"cancelled": True}
        assert await writer.ask("DELETE", ONE + "/wakes?name=again") == {"cancelled": False}
        assert await writer.ask("DELETE", ONE + "/wakes") == {"cancelled": True}
        assert await store.session("acme:c").wakes() == []


async def test_a_wake_that_is_due_is_shown_in_the_inbox_as_one() -> None:
    async with serving() as (store, _, writer):
        await store.session("acme:c").wake("now", after=0, name="n")
        [found] = (await writer.ask("GET", ONE + "/inbox"))["inputs"]
        assert (found["wake"], found["every"], found["request_id"]) == ("n", None, None)


@pytest.mark.parametrize(
    "body", [{}, {"after": 1, "at": 1}, {"after": -1}, {"every": 0.5}, {"after": 1, "handler": "a b"}, {"text": 1}]
)
async def test_bad_wakes_are_refused(body: dict[str, Any]) -> None:
    async with serving() as (_, _, writer):
        assert await writer.status("POST", ONE + "/wakes", json=body) == 422


async def test_a_wake_begins_no_conversation_and_keeps_the_handler() -> None:
    async with serving() as (store, _, writer):
        assert await writer.status("POST", "/v1/conversations/acme:typo/wakes", json={"after": 1}) == 404
        assert await store.session("acme:typo").version() == 0
        await store.session("acme:c").post(said("hi"), handler="support")
        assert await writer.status("POST", ONE + "/wakes", json={"after": 1, "handler": "other"}) == 409


# Questions to people


async def test_a_question_is_listed_in_its_tenant_and_answered_once() -> None:
    async with serving() as (store, served, writer):
        await ask(store, "acme:c", "Shall I book?", name="booking", data={"price": 900})
        [found] = (await writer.ask("GET", "/v1/asks"))["asks"]
        assert {name: found[name] for name in ("conversation", "name", "question", "data", "expires", "user")} == {
            "conversation": "acme:c", "name": "booking", "question": "Shall I book?", "data": {"price": 900},
            "expires": None, "user": "acme:ada",
        }  # fmt: skip
        assert (await writer.ask("GET", ONE + "/schedule"))["asks"] == [found]
        stranger = await other(served, "evil:", "read", "write")
        assert await stranger.ask("GET", "/v1/asks") == {"asks": [], "after": None}
        reader = await other(served, "acme:", "read")
        body = {"name": "booking", "value": "yes", "id": found["id"]}
        for caller in (stranger, reader):
            assert await caller.status("POST", ONE + "/answers", json=body) == 403
        assert await writer.status("POST", ONE + "/answers", json=body | {"id": "an earlier one"}) == 404
        assert await writer.ask("POST", ONE + "/answers", json=body) == {"accepted": True}
        assert await writer.ask("GET", "/v1/asks") == {"asks": [], "after": None}
        assert await writer.ask("POST", ONE + "/answers", json=body | {"value": "no"}) == {"accepted": False}
        assert [each.message.content for each in await store.session("acme:c").inbox()] == ["yes"]
        assert await writer.status("POST", ONE + "/answers", json={"value": "yes"}) == 404


async def test_open_questions_are_paged_by_their_conversations() -> None:
    async with serving() as (store, _, writer):
        for id in "abcde":
            await ask(store, f"acme:{id}", f"{id}?")
        await store.session("acme:bb").write(phase="waiting_feedback")  # it asks nothing
        found, after, pages = list[str](), "", 0
        while after is not None:
            page = await writer.ask("GET", f"/v1/asks?limit=2&after={after}" if after else "/v1/asks?limit=2")
            found += [each["conversation"] for each in page["asks"]]
            after, pages = page["after"], pages + 1
        assert found == [f"acme:{id}" for id in "abcde"]
        assert pages in (3, 4)


async def test_an_expired_question_is_not_listed() -> None:
    async with serving() as (store, _, writer):
        await ask(store, "acme:c", "Now?", expires=0.05)
        await until(store.session("acme:c").inbox)
        assert (await writer.ask("GET", "/v1/asks"))["asks"] == []
        assert (await writer.ask("GET", ONE + "/schedule"))["asks"] == []
        assert await writer.status("POST", ONE + "/answers", json={"value": "yes"}) == 404
        assert await schedule_of(store.session("acme:c")) is None
