"""Plain functions as tools of a model, the calls of one turn, and a few ready tools (`TOOLBOX`).

Law: all changes of a tool are kept if it returns, and all are dropped if it fails.

A mistake of the model (an unknown tool, arguments that do not fit) gives a failed call whose error says what was
expected; only mistakes of the program and errors of the store are raised. A call with an id runs once. A call that was
refused before its tool began has no duration, and its id can be used again.

Design: section 13.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, create_model

from distributed_state.conversation.agent_state import ToolCall
from distributed_state.conversation.turn_clock import TurnClock
from distributed_state.errors import CorruptState, InvalidValue, NotFound, StateError
from distributed_state.port import Port
from distributed_state.values import codec

INJECTED = ("state", "agent_state", "user_state", "session")
_GONE: Any = object()
_WRONG = 5  # number of wrong arguments that one error names


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. A direct call of a Tool calls the function."""

    name: str
    description: str
    function: Callable[..., Any]
    wants: frozenset[str]
    arguments: type[BaseModel]

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the function, unchecked."""
        return self.function(*args, **named)

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments that the model gives, without injected parameters."""
        schema = self.arguments.model_json_schema()
        return {"type": "object", "properties": schema.pop("properties", {})} | {
            name: part for name, part in schema.items() if name not in ("title", "type")
        }

    def to_openai(self) -> dict[str, Any]:
        """An entry of `tools` in the OpenAI chat format."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def to_anthropic(self) -> dict[str, Any]:
        """An entry of `tools` in the Anthropic messages format."""
        return {"name": self.name, "description": self.description, "input_schema": self.parameters}

    def read(self, arguments: dict[str, Any] | str | None) -> dict[str, Any]:
        """The arguments from the model, an object or its JSON text. Raises InvalidValue."""
        if arguments is None or arguments == "":
            return {}
        try:
            given = codec.decode(arguments.encode()) if isinstance(arguments, str) else arguments
            codec.encode(given)  # NaN and the like: Python reads them, but they are not JSON
        except (CorruptState, UnicodeEncodeError, InvalidValue) as error:
            # The error omits the arguments: they may be secret, and errors are logged.
            what = f"the {len(arguments)} characters of" if isinstance(arguments, str) else "the"
            raise InvalidValue(f"{self.name}: {what} arguments are not JSON; {self.takes}") from error
        if not isinstance(given, dict):
            kind = "null" if given is None else f"a {type(given).__name__}"
            raise InvalidValue(f"{self.name}: the arguments are an object, not {kind}; {self.takes}")
        return given

    def bind(self, given: dict[str, Any]) -> dict[str, Any]:
        """The function's arguments, checked and converted. Raises InvalidValue, which names the wrong ones."""
        try:
            checked = self.arguments.model_validate(given)
        except ValidationError as error:
            places = [(".".join(map(str, each["loc"])) or "arguments", each["msg"]) for each in error.errors()[:_WRONG]]
            wrong = "; ".join(f"{place:.80}: {text}" for place, text in places)
            raise InvalidValue(f"{wrong}; {self.takes}") from error
        return {name: getattr(checked, _safe(name)) for name in self.parameter_names if _safe(name) in checked.__dict__}

    @property
    def takes(self) -> str:
        """The expected arguments as one line of an error: "book takes city: string, nights: integer (optional)"."""
        schema = self.parameters
        kinds = {name: f": {part['type']}" if "type" in part else "" for name, part in schema["properties"].items()}
        needed = schema.get("required", [])
        words = [f"{name}{kind}{'' if name in needed else ' (optional)'}" for name, kind in kinds.items()]
        return f"{self.name} takes {', '.join(words) or 'no arguments'}"

    @property
    def parameter_names(self) -> list[str]:
        """The parameters that the model gives."""
        return [name for name in inspect.signature(self.function).parameters if name not in INJECTED]


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(*, name: str | None = None, description: str | None = None) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, description: str | None = None
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function: `@tool`, or `@tool(name=..., description=...)`.

    A parameter `state` (or `agent_state`) receives the session's fields and `user_state` those of its user, as dicts
    that also have the methods of a record; `session` receives the session. The model gives the other arguments, which
    are checked against their annotations; each needs one. Coroutine functions may be tools only in the asyncio API.
    """
    if function is None:
        return lambda each: _tool(each, name, description)
    return _tool(function, name, description)


def _tool(function: Callable[..., Any], name: str | None, description: str | None) -> Tool:
    if not callable(function):
        raise InvalidValue(f"a tool is a function, not {function!r:.80}")
    called = str(name or getattr(function, "__name__", "tool"))
    text = description or inspect.getdoc(function) or ""
    if not text and sys.flags.optimize >= 2:
        raise InvalidValue(f"{called}: python -OO removes docstrings, so the tool needs @tool(description=...)")
    signature = inspect.signature(function)
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for each in signature.parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
            raise InvalidValue(f"{called}: parameter {each.name!r} cannot be given by name; a model gives each by name")
        if each.name not in INJECTED:
            if each.name not in hints:
                # Without an annotation any argument would be accepted, and the schema could not describe it to the
                # model.
                text = f"{called}: parameter {each.name!r} needs an annotation for the argument"
                raise InvalidValue(f"{text}; only these need none: {', '.join(INJECTED)}")
            default = ... if each.default is each.empty else each.default
            fields[_safe(each.name)] = (hints[each.name], Field(default, alias=each.name))
    arguments = create_model(called, __config__=ConfigDict(extra="forbid"), **fields)
    return Tool(called, text, function, frozenset(signature.parameters) & set(INJECTED), arguments)


def _safe(name: str) -> str:
    return f"p_{name}"  # the prefix avoids a clash with pydantic's own attributes


def chosen(tool: Tool | str, tools: Iterable[Tool]) -> Tool:
    """The tool itself, or the tool of this name. Raises NotFound, which lists the known names."""
    if isinstance(tool, Tool):
        return tool
    if not isinstance(tool, str):
        raise InvalidValue(f"a turn calls a Tool, as @tool makes it of a function, or its name, not {tool!r:.80}")
    known = {each.name: each for each in tools}
    if tool not in known:
        raise NotFound(f"there is no tool {tool!r:.80}; there are {', '.join(known) or 'none'}")
    return known[tool]


class Scratch(MutableMapping[str, Any]):
    """A dict on top of another one: all its changes are written to that one by `keep`, or dropped.

    It has the methods of a dict and those of a record, because a tool may use either.
    """

    def __init__(self, below: MutableMapping[str, Any]) -> None:
        self._below = below
        self._now: dict[str, Any] = {}
        self._given: dict[str, bytes] = {}  # lists and objects that were read, encoded at that time

    def __getitem__(self, key: str) -> Any:
        if key not in self._now:
            value = self._below[key]
            if not isinstance(value, (dict, list)):
                return value
            self._given[key] = codec.encode(value, key)
            self._now[key] = copy.deepcopy(value)
        if self._now[key] is _GONE:
            raise KeyError(key)
        return self._now[key]

    def __setitem__(self, key: str, value: Any) -> None:
        codec.encode_key(key)
        codec.encode_value(value, key)
        self._given.pop(key, None)
        self._now[key] = value

    def __delitem__(self, key: str) -> None:
        self[key]  # KeyError if it is missing
        self._given.pop(key, None)
        self._now[key] = _GONE

    def __iter__(self) -> Iterator[str]:
        keys = dict.fromkeys([*self._below, *self._now])
        return (key for key in keys if self._now.get(key) is not _GONE)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def set(self, key: str, value: Any) -> None:
        """Set a field."""
        self[key] = value

    def has(self, key: str) -> bool:
        """Return whether a field exists."""
        return key in self

    def delete(self, key: str) -> None:
        """Delete a field. A missing field is not an error."""
        self.pop(key, None)

    def get_all(self) -> dict[str, Any]:
        """All fields."""
        return dict(self)

    def update(self, other: Any = (), values: Any = _GONE, /, **named: Any) -> None:
        """Like `dict.update`; or `update(key, values)`: merge `values` into the object at `key`, one level deep."""
        if values is _GONE:
            super().update(other, **named)
            return
        stored = self.get(other, {})
        if named or not isinstance(values, Mapping) or not isinstance(stored, dict):
            found = f"the field holds a {type(stored).__name__}, values is a {type(values).__name__}"
            raise InvalidValue(f"{other!r:.80}: update(key, values) merges two objects; {found}")
        self[other] = {**stored, **values}

    def check(self) -> None:
        """Raise InvalidValue if a change in place cannot be stored."""
        for key, value in self._now.items():
            if value is not _GONE:
                codec.encode_value(value, key)

    def keep(self) -> None:
        """Write the changes to the dict below."""
        for key, value in self._now.items():
            if value is _GONE:
                self._below.pop(key, None)
            elif self._given.get(key) != codec.encode_value(value, key):
                self._below[key] = value


Arguments = dict[str, Any] | str | None
Inject = Callable[[frozenset[str]], Awaitable[Mapping[str, Any]]]
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")


class ToolRuns:
    """Runs the tools of a turn, and keeps their results."""

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
        """Run a tool, or return a failed call with the reason. `inject` makes the arguments that the turn provides."""
        try:
            it = chosen(tool, tools)
        except NotFound as error:
            # An API refuses the whole conversation if a name has other characters.
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
        except Exception as error:  # noqa: BLE001 - the model sees the error and may try an alternative
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
        if known is None or known.duration_ms is None:  # else the tool ran, and its result stays
            self._calls[call.call_id] = call
        return call


State = MutableMapping[str, Any]
Name = Annotated[str, Field(min_length=1, max_length=200, description="Its name.")]


@tool(description="Add to a counter of this conversation and return the sum.")
def count(state: State, name: Name = "counter", by: int = 1) -> int:  # noqa: D103 - the description
    state[name] = _number(state, name) + by
    return int(state[name])


@tool(description="Set a counter of this conversation to zero and return what it was.")
def reset(state: State, name: Name = "counter") -> int:  # noqa: D103 - the description
    before = _number(state, name)
    state[name] = 0
    return before


@tool(description="Keep a note for later in this conversation.")
def note(state: State, key: Name, text: str) -> str:  # noqa: D103 - the description
    state["notes"] = {**state.get("notes", {}), key: text}
    return f"noted under {key}"


@tool(description="Look up what the user prefers; null if nothing is known.")
def get_preference(user_state: State, name: Name) -> Any:  # noqa: D103 - the description
    return user_state.get("preferences", {}).get(name)


@tool(description="Remember what the user prefers, in all conversations.")
def set_preference(user_state: State, name: Name, value: JsonValue) -> str:  # noqa: D103 - the description
    user_state["preferences"] = {**user_state.get("preferences", {}), name: value}
    return f"{name} is remembered"


@tool(description="Sum up what is known: counters of this conversation, notes taken, and the user's preferences.")
def user_statistics(state: State, user_state: State) -> dict[str, Any]:  # noqa: D103 - the description
    counters = {key: value for key, value in state.items() if isinstance(value, int) and not isinstance(value, bool)}
    return {
        "counters": counters,
        "notes": len(state.get("notes", {})),
        "preferences": user_state.get("preferences", {}),
        "conversations": user_state.get("conversations", 0),
    }


TOOLBOX = (count, reset, note, get_preference, set_preference, user_statistics)
"""Tools that most agents can use: counters and notes of the session, preferences and figures of its user."""


def _number(state: State, name: str) -> int:
    value = state.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidValue(f"{name!r} is not a counter, it holds {value!r:.80}")
    return value
