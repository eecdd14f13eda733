"""Commands that an agent offers. Law: a command runs only with the arguments that it declared.

Design: section 12.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from distributed_state.agents.hooks import binding, call
from distributed_state.errors import CommandFailed, InvalidValue, NotFound, StateError
from distributed_state.port import Port
from distributed_state.values import codec

Progress = Callable[[str, dict[str, Any]], Any]
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
}


@dataclass(frozen=True, slots=True)
class CommandArgument:
    """An argument of a command. `type` is "string", "integer", "number", "boolean", "array" or "object"."""

    name: str
    type: str = "string"
    description: str = ""
    required: bool = False
    default: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidValue(f"the name of an argument is a non-empty str, not {self.name!r:.80}")
        if self.type not in _TYPES:
            raise InvalidValue(f"argument {self.name!r}: type {self.type!r:.80} is none of {', '.join(_TYPES)}")
        if self.default is not None:
            self.check(self.default)

    def check(self, value: Any) -> Any:
        """The value, if it is of the type. Raises InvalidValue."""
        # To Python a bool is an int; to whoever calls a command it is not.
        if not isinstance(value, _TYPES[self.type]) or (isinstance(value, bool) and self.type != "boolean"):
            raise InvalidValue(f"argument {self.name!r} is of type {self.type}, not {type(value).__name__}")
        return value


@dataclass(frozen=True, slots=True)
class Command:
    """A function that users of an agent may run."""

    name: str
    function: Callable[..., Any]
    description: str = ""
    arguments: tuple[CommandArgument, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """What is shown of it, as JSON values."""
        arguments = [asdict(each) for each in self.arguments]
        return {"name": self.name, "description": self.description, "arguments": arguments}

    def read(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The arguments, checked, with defaults in place. Raises InvalidValue naming the wrong one."""
        if given is not None and not isinstance(given, Mapping):
            raise InvalidValue(f"{self.name}: the arguments are an object, not a {type(given).__name__}")
        values = dict(given or {})
        found = dict[str, Any]()
        for each in self.arguments:
            value = values.pop(each.name, None)
            if value is None and each.required:
                raise InvalidValue(f"{self.name}: argument {each.name!r} is missing")
            try:
                found[each.name] = each.default if value is None else each.check(value)
            except InvalidValue as error:
                raise InvalidValue(f"{self.name}: {error}") from error
        if values:
            known = f"it takes {', '.join(found)}" if found else "it was registered without `arguments=`"
            raise InvalidValue(f"{self.name}: takes no argument {next(iter(values))!r:.80}; {known}")
        return found

    async def run(self, port: Port, arguments: dict[str, Any], progress: Progress | None) -> Any:
        """Call the function and return what it returned. Raises CommandFailed; errors of the store as they are."""

        def report(text: str = "", **fields: Any) -> None:
            if progress is not None:
                progress(text, fields)

        try:
            result = await call(port, self.function, given(self, arguments, report))
            codec.encode(result, f"the result of {self.name}")
        except StateError:
            raise
        except Exception as error:
            raise CommandFailed(f"{self.name}: {type(error).__name__}: {error}") from error
        return result


class Commands:
    """The commands of one agent."""

    def __init__(self) -> None:
        self._known: dict[str, Command] = {}

    def register(self, command: Command) -> None:
        """Add a command, or replace the one of that name. Raises InvalidValue."""
        if not isinstance(command.name, str) or not command.name:
            raise InvalidValue(f"the name of a command is a non-empty str, not {command.name!r:.80}")
        if not callable(command.function):
            raise InvalidValue(f"{command.name}: a command is a function, not {command.function!r:.80}")
        names = [each.name for each in command.arguments]
        if len(set(names)) < len(names):
            raise InvalidValue(f"{command.name}: two arguments have one name among {', '.join(names)}")
        try:
            binding(command.function, given(command, dict.fromkeys(names), lambda text, **fields: None))
        except TypeError as error:
            raise InvalidValue(f"{command.name}: {error}") from error
        self._known[command.name] = command

    def find(self, name: str) -> Command:
        """The command of a name. Raises NotFound with those that there are."""
        command = self._known.get(name)
        if command is None:
            raise NotFound(f"no command {name!r:.80}; there are {', '.join(self._known) or 'none'}")
        return command

    def to_list(self) -> list[dict[str, Any]]:
        """What is shown of all of them, as JSON values."""
        return [each.to_dict() for each in self._known.values()]


def given(command: Command, arguments: dict[str, Any], progress: Callable[..., None]) -> dict[str, Any]:
    """What the function may take: each argument, `args` (all of them as a dict), `progress(text, **fields)`."""
    return {"args": arguments, **arguments, "progress": progress}
