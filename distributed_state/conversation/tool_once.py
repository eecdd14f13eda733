"""A tool run as a turn of its own. Law: once for each turn and call id, however often it is asked for.

Design: section 13.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from distributed_state.conversation.tools import Tool
from distributed_state.conversation.turn import AsyncTurn
from distributed_state.conversation.working_memory import ToolCall
from distributed_state.errors import InvalidValue


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
