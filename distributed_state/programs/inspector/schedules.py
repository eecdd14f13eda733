"""Sessions that go on by themselves: questions to people, stuck sessions, and when a conversation is due.

Law: an answer reaches exactly the displayed question, and none is sent twice.

A page of questions is read again every few seconds. It is exchanged only if other questions are open, and the displayed
ones stay as they are, so that a half-written answer is not lost.

Design: section 28.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from distributed_state.programs.inspector.pages import (
    HEADERS,
    Api,
    Found,
    Refused,
    conversation_page,
    digest,
    form,
    named,
    page,
    query_of,
)
from distributed_state.programs.inspector.values import Budget, message_shown, trees

_ROWS = 50
_FEW = 5  # conversations on a page, if the questions of 50 are too large for one
_NODES = 60  # of the data of a question
_CHOICES = 10  # buttons for a question
_LONGEST_CHOICE = 80  # characters
_CLOSED = "This question is not open: it was answered, or it expired. Your answer was not sent."
_ANSWERED = "Somebody has answered this question already. Your answer was not sent."
_SERVED = "The last call of its handler did not fail: somebody has retried it already, or it was served meanwhile."


# Questions to people


async def questions(request: Request, api: Api) -> Response:
    """The open questions of all conversations."""
    query = query_of(request)
    found, may_write = await asyncio.gather(_asked(request, api, query.get("after", "")), _may_write(request, api))
    rows = [question_shown(each) for each in found.json["asks"]]
    seen = digest(" ".join(each["place"] for each in rows))
    if query.get("seen") == seen and "hx-request" in request.headers:
        return Response(status_code=204, headers=HEADERS)  # htmx leaves the page as it is
    return page(
        request, "questions", rows=rows, may_write=may_write, after=query.get("after", ""), seen=seen,
        following=found.json["after"],
    )  # fmt: skip


async def _asked(request: Request, api: Api, after: str) -> Found:
    try:
        return await api.get(request, "/v1/asks", {"limit": _ROWS, "after": after})
    except Refused as refused:
        if refused.status != 413:
            raise
        return await api.get(request, "/v1/asks", {"limit": _FEW, "after": after})


async def _may_write(request: Request, api: Api) -> bool:
    return "write" in (await api.get(request, "/v1/caller")).json["rights"]


def question_shown(ask: dict[str, Any]) -> dict[str, Any]:
    """A question of the interface, in the form for a template; `place` is its id on the page."""
    data, choices = ask["data"], _choices(ask["data"])
    if choices:
        data = {name: data[name] for name in data if name != "choices"} if isinstance(data, dict) else None
    told = trees(data if isinstance(data, dict) else {} if data is None else {"data": data}, budget=Budget(_NODES))
    place = digest("\n".join(repr(ask[each]) for each in ("conversation", "name", "id")))[:16]
    return ask | {"choices": choices, "told": told, "place": f"ask-{place}"}


def _choices(data: Any) -> list[str]:
    """The answers among which a question lets its reader choose: `data`, or its `choices`, if it is a list of texts."""
    found = data.get("choices") if isinstance(data, dict) else data
    if not isinstance(found, list) or not 0 < len(found) <= _CHOICES:
        return []
    return found if all(isinstance(each, str) and 0 < len(each) <= _LONGEST_CHOICE for each in found) else []


async def answer(request: Request, api: Api) -> Response:
    """Answer a question, and go back to the page that showed it."""
    given = await form(request)
    text = given.get("answer", "").replace("\r\n", "\n")
    if not text.strip():
        raise Refused(422, "the answer is empty, so nothing was sent")
    body = {"name": given.get("name", ""), "id": given.get("id", ""), "value": text}
    try:
        done = (await api.ask(request, "POST", f"{_place(request)}/answers", given=body)).json
    except Refused as refused:
        if refused.status != 404:
            raise
        raise Refused(409, _CLOSED) from None
    if not done["accepted"]:
        raise Refused(409, _ANSWERED)
    return _back(request, given, "questions")


# Stuck conversations


async def stuck(request: Request, api: Api) -> Response:
    """The conversations whose handler failed so often that no worker calls it again."""
    query = {"stuck": "true", "fresh": "true", "limit": _ROWS, "after": query_of(request).get("after", "")}
    found, may_write = await asyncio.gather(api.get(request, "/v1/conversations", query), _may_write(request, api))
    return page(
        request, "stuck", rows=found.json["conversations"], may_write=may_write, after=query["after"],
        following=found.json["after"],
    )  # fmt: skip


async def retry(request: Request, api: Api) -> Response:
    """Let the handler be called again, and go back to the page that had the button."""
    given = await form(request)
    if not (await api.ask(request, "POST", f"{_place(request)}/retry")).json["retried"]:
        raise Refused(409, _SERVED)
    return _back(request, given, "stuck")


async def retry_all(request: Request, api: Api) -> Response:
    """Let the handlers of all stuck conversations be called again, a page of them at a time."""
    await form(request)
    after: str | None = ""
    while after is not None:
        query = {"stuck": "true", "fresh": "true", "limit": _ROWS, "after": after}
        found = (await api.get(request, "/v1/conversations", query)).json
        for each in found["conversations"]:
            await api.ask(request, "POST", named("/v1/conversations/{}/retry", each["id"]))
        after = found["after"]
    return RedirectResponse(f"{request.scope['root_path']}/stuck", 303, HEADERS)


def _back(request: Request, given: dict[str, str], listed: str) -> Response:
    root = request.scope["root_path"]
    place = conversation_page(request.path_params["id"], root) if given.get("back") else f"{root}/{listed}"
    return RedirectResponse(place, 303, HEADERS)


def _place(request: Request) -> str:
    return named("/v1/conversations/{}", request.path_params["id"])


# One conversation


async def cancel_wake(request: Request, api: Api) -> Response:
    """Remove a wake, and go back to its conversation."""
    name = (await form(request)).get("name", "")
    if not (await api.ask(request, "DELETE", f"{_place(request)}/wakes", {"name": name})).json["cancelled"]:
        raise Refused(409, "there is no such wake: it was served or cancelled meanwhile")
    return RedirectResponse(conversation_page(request.path_params["id"], request.scope["root_path"]), 303, HEADERS)


async def one(request: Request, api: Api) -> Response:
    """When a conversation goes on."""
    return page(request, "schedule", id=request.path_params["id"], plan=await plan_of(request, api))


async def plan_of(request: Request, api: Api) -> dict[str, Any]:
    """When a conversation goes on, or the reason why that cannot be shown, and whether the visitor may change it."""
    part = api.part(request, f"{_place(request)}/schedule")
    (found, problem), may_write = await asyncio.gather(part, _may_write(request, api))
    if not found:
        return {"problem": problem, "may_write": may_write}
    wakes = [each | {"text": message_shown(each["message"])["text"]} for each in found["wakes"]]
    asks = [question_shown(each) for each in found["asks"]]
    return {**found, "problem": "", "may_write": may_write, "wakes": wakes, "asks": asks}
