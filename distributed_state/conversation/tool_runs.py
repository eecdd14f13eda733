"""The tool calls of one turn. Law: what a model got wrong is a failed call that it can read, never an exception.

Raised is what the program got wrong, and errors of the store. A call with an id runs once; one that was refused before
its tool began has no duration, and its id is free.

Design: section 13.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from distributed_state.conversation.tools import Scratch, Tool, chosen
from distributed_state.conversation.turn_clock import TurnClock
from distributed_state.conversation.working_memory import ToolCall
from distributed_state.errors import InvalidValue, NotFound, StateError
from distributed_state.port import Port
from distributed_state.values import codec

Arguments = dict[str, Any] | str | None
Inject = Callable[[frozenset[str]], Awaitable[Mapping[str, Any]]]
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")


class ToolRuns:
    """Runs the tools of a turn, and knows what came of them."""

    def __init__(self, port: Port, clock: TurnClock) -> None:
        self._port = port
        self._clock = clock
        self._calls: dict[str, ToolCall] = {}

    @property
    def all(self) -> tuple[ToolCall, ...]:
        """The calls, in order."""
        return tuple(self._calls.values())

    async def call(
        self, tool: Tool | str, arguments: Arguments, call_id: str, tools: Iterable[Tool], inject: Inject
    ) -> ToolCall:
        """Run a tool, or say why not. What it wants of the turn, `inject` makes."""
        try:
            it = chosen(tool, tools)
        except NotFound as error:
            # An API refuses a whole conversation for a name with other characters.
            return self._failed(_NO_NAME.sub("_", str(tool))[:64] or "unnamed", {}, error, call_id)
        if inspect.iscoroutinefunction(it.function) and not self._port.suspends:
            raise InvalidValue(f"{it.name}: a coroutine function is a tool for asyncio only, not for blocking code")
        given: dict[str, Any] = {}
        try:
            given = it.read(arguments)
            known = self._calls.get(call_id)
            if known is not None and known.duration_ms is not None:
                if (known.tool_name, known.arguments) == (it.name, given):
                    return known
                raise InvalidValue(f"the id {call_id!r:.80} is that of another call of {known.tool_name} in this turn")
            bound = it.bind(given)
        except Exception as error:  # noqa: BLE001 - the model sees it, and may try something else
            return self._failed(it.name, given, error, call_id)
        return await self._run(it, given, bound, call_id, await inject(it.wants))

    async def _run(
        self, it: Tool, given: dict[str, Any], bound: dict[str, Any], call_id: str, injected: Mapping[str, Any]
    ) -> ToolCall:
        states = [each for each in injected.values() if isinstance(each, Scratch)]
        began = self._port.monotonic()
        result = None
        try:
            with self._clock.running("tool", it.name):
                result = it.function(**bound, **{name: injected[name] for name in it.wants})
                if inspect.isawaitable(result):
                    result = await result
            codec.encode(result, "result")
            for each in states:
                each.check()
        except Exception as error:
            if isinstance(error, StateError) and not isinstance(error, InvalidValue):
                raise
            return self._failed(it.name, given, error, call_id, began)
        for each in states:
            each.keep()
        took = (self._port.monotonic() - began) * 1000
        return self._noted(ToolCall(tool_name=it.name, arguments=given, result=result, duration_ms=took), call_id)

    def _failed(
        self, name: str, given: dict[str, Any], error: Exception, call_id: str, began: float | None = None
    ) -> ToolCall:
        took = None if began is None else (self._port.monotonic() - began) * 1000
        text = f"{type(error).__name__}: {error}"
        return self._noted(ToolCall(tool_name=name, arguments=given, error=text, duration_ms=took), call_id)

    def _noted(self, call: ToolCall, call_id: str) -> ToolCall:
        call = call.model_copy(update={"call_id": call_id}) if call_id else call
        known = self._calls.get(call.call_id)
        if known is None or known.duration_ms is None:  # else it was run, and that stays known
            self._calls[call.call_id] = call
        return call
