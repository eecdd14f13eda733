"""A chat backend: any worker serves any request, each request once, with tools that remember.

What a web handler would do, in one function; the model is played by a few lines of Python.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from distributed_state import TOOLBOX, InvalidValue, LockTimeout, Tool, tool

State = MutableMapping[str, Any]


@tool
def add_to_cart(state: State, user_state: State, item: str, quantity: int = 1) -> dict[str, int]:
    """Put something into the cart of this conversation."""
    if quantity < 1:
        raise InvalidValue("quantity: at least 1")
    cart = state.setdefault("cart", {})
    cart[item] = cart.get(item, 0) + quantity
    user_state["items_ever"] = user_state.get("items_ever", 0) + quantity
    return dict(cart)


TOOLS: dict[str, Tool] = {each.name: each for each in (add_to_cart, *TOOLBOX)}


def model(messages: list[Any]) -> dict[str, Any]:
    """Asks for a tool after a user's message, and says what the tool returned after that."""
    last = messages[-1]
    if last.role == "tool":
        return {"role": "assistant", "content": f"Your cart: {last.content}"}
    call = {"name": "add_to_cart", "arguments": '{"item": "tea", "quantity": 2}'}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
    }


async def answer(store: Any, session_id: str, request_id: str, text: str) -> Any:
    """One request. Sent twice, it is served once; a worker that dies in the middle has changed nothing."""
    async with store.session(session_id, user="u1").turn(request_id=request_id, busy="wait", wait=30) as turn:
        if turn.repeated:
            return turn.outcome
        turn.append({"role": "user", "content": text})
        while True:
            said = model(await turn.messages(last=20))
            turn.append(said)
            if not said.get("tool_calls"):
                break
            for each in said["tool_calls"]:
                function = each["function"]
                call = await turn.call(TOOLS[function["name"]], function["arguments"], call_id=each["id"])
                turn.append(call.to_message())
        turn["requests"] = turn.get("requests", 0) + 1
        turn.outcome = said["content"]
        return turn.outcome


async def test_each_request_is_served_once(store: Any) -> None:
    for attempt in range(3):  # a client that lost the answer asks again
        assert await answer(store, "chat", "request-1", "Two teas") == 'Your cart: {"tea":2}', attempt
    assert await answer(store, "chat", "request-2", "Two more") == 'Your cart: {"tea":4}'
    session = store.session("chat")
    assert await session.get_all(fresh=True) == {"cart": {"tea": 4}, "requests": 2}
    assert await store.user("u1").get("items_ever", fresh=True) == 4
    assert [message.role for message in await session.messages()] == ["user", "assistant", "tool", "assistant"] * 2
    assert await session.version() == 2, "a turn is one commit"
    told = (await session.messages())[2].metadata["tool_call"]
    assert (told["tool_name"], told["arguments"], told["error"]) == (
        "add_to_cart",
        {"item": "tea", "quantity": 2},
        None,
    )
    assert told["duration_ms"] >= 0


async def test_a_second_request_meanwhile_is_told_to_wait_or_to_go(store: Any) -> None:
    async with store.session("chat").turn() as turn:
        turn["busy"] = True
        with pytest.raises(LockTimeout):
            # A request is a task of its own; this one's would nest.
            await asyncio.create_task(rejected(store))


async def rejected(store: Any) -> None:
    async with store.session("chat").turn(busy="reject"):
        raise AssertionError("not reached")


async def test_a_tool_tells_the_model_what_it_takes(store: Any) -> None:
    schema = add_to_cart.to_openai()["function"]["parameters"]
    assert set(schema["properties"]) == {"item", "quantity"}, "not the state, which we give"
    async with store.session("chat", user="u1").turn() as turn:
        call = await turn.call(add_to_cart, {"item": "tea", "quantity": 0})
        assert call.error == "InvalidValue: quantity: at least 1"
        assert "cart" not in turn, "a tool that fails changes nothing"
