"""The hooks and commands of an agent, and how they are called. Law: a function gets only the parameters that it has.

Every hook is optional. A command runs only with the arguments that it declares.

Design: section 12.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from distributed_state.errors import CommandFailed, ConfigurationError, InvalidValue, NotFound, StateError
from distributed_state.port import Port
from distributed_state.results import Event
from distributed_state.values import codec


class Hooks:
    """The hooks that an agent may define; by default each does nothing.

    Hooks of one replica run one after another, in the order of the events. "Everywhere" below means on each replica
    that runs the agent. A hook that raises is logged with its event and does not stop the rest; a hook that takes
    longer than `slow_hook` seconds is logged. A hook for an event or a conversation that raises Unavailable, because
    Redis or SQL was down for longer than `retry_for`, is repeated, and runs at most three times: it must tolerate
    repetition.
    """

    def initialize(self) -> Any:
        """Prepare: commands, sections, ephemeral values. Runs at the start of each process, before any event."""

    def start(self) -> Any:
        """Start. Runs once the agent receives events, before `main_loop`."""

    def main_loop(self) -> Any:
        """Work in the background until the agent stops: `while self.wait(5.0): ...`.

        An exception is logged; it ends `run()`, which raises it, or is raised at the end of `with agent:`.
        """

    def on_new_conversation(self, conversation_id: str, is_clear: bool) -> Any:
        """A conversation was created or cleared. Runs everywhere; its defaults are already set, once for the fleet."""

    def on_conversation_switched(self, conversation_id: str, previous_id: str, message_count: int) -> Any:
        """A client switched to a conversation, which may be unknown here. Runs everywhere. `previous_id` may be ""."""

    def on_conversation_deleted(self, conversation_id: str) -> Any:
        """A conversation is deleted. The deleting replica runs this before the deletion, other replicas after it.

        After an expiry, every replica runs it. `self.conversation` has the last state in each case. Work that is done
        once for the fleet belongs in a handler of a group: `store.on("conversation.deleted", ..., group="cleaners")`.
        """

    def on_agent_activated(self, previous_agent: str | None, conversation_id: str) -> Any:
        """A client activated this agent. Runs everywhere; `previous_agent` may be "" or None, `conversation_id` ""."""

    def on_agent_deactivated(self, next_agent: str | None) -> Any:
        """A client left this agent, perhaps for another one.

        Runs everywhere, before the other agent's `on_agent_activated`.
        """

    def on_invocation_directory_changed(self, old_path: str, new_path: str) -> Any:
        """A client's user now works in another folder. Runs everywhere."""

    def on_config_update(self, *given: Any, **named: Any) -> Any:
        """The config changed. Parameters: `config`, and optionally `changed`, the set of names whose values differ."""

    def on_status(self, *given: Any, **named: Any) -> Any:
        """The status was requested, by SIGUSR1 or `status()`. `status` has the figures, which are already logged."""

    def on_resync(self, event: Event) -> Any:
        """This replica missed more events than the fleet keeps. The conversation and config were read again."""

    def on_event(self, event: Event) -> Any:
        """Any other event: those of `store.emit`, phases, checkpoints, lost locks and replicas."""

    def on_shutdown(self) -> Any:
        """The process is about to end; running work has finished. State need not be saved: every write was a commit."""

    def cleanup(self) -> Any:
        """Runs last: close the resources that `initialize` opened."""


# These two hooks may take any of these parameters; the other hooks take those of their signatures.
GIVEN = {"on_config_update": ("config", "changed"), "on_status": ("status",)}


def is_defined(agent: Hooks, hook: str) -> bool:
    """Whether the agent defines this hook."""
    return getattr(type(agent), hook) is not getattr(Hooks, hook, None) or hook in vars(agent)


def check(agent: Hooks) -> None:
    """Raise ConfigurationError for a hook that requires parameters which it cannot get."""
    for name, default in vars(Hooks).items():
        if not name.startswith("_"):
            given = GIVEN.get(name) or tuple(inspect.signature(default).parameters)[1:]
            try:
                binding(getattr(agent, name), dict.fromkeys(given))
            except TypeError as error:
                text = f"{type(agent).__name__}.{name} is given {', '.join(given) or 'nothing'}: {error}"
                raise ConfigurationError(text) from error


def binding(function: Callable[..., Any], given: Mapping[str, Any]) -> Callable[[], Any]:
    """Bind the values of `given` to a function's parameters by name; other parameters get the rest in order.

    Raises TypeError if it requires more.
    """
    signature = inspect.signature(function)
    rest = [value for name, value in given.items() if name not in signature.parameters]
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for each in signature.parameters.values():
        if each.kind is each.VAR_KEYWORD:
            named |= {name: value for name, value in given.items() if name not in signature.parameters}
        elif each.kind is each.VAR_POSITIONAL:
            positional += rest
            rest = []
        elif each.kind is each.KEYWORD_ONLY:
            if each.name in given:
                named[each.name] = given[each.name]
        elif each.name in given:
            positional.append(given[each.name])
        elif each.default is each.empty and rest:
            positional.append(rest.pop(0))
        elif each.default is not each.empty:
            positional.append(each.default)
    signature.bind(*positional, **named)
    return partial(function, *positional, **named)


async def call(port: Port, function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a plain or a coroutine function, from the sync or the asyncio API, and return its result."""
    bound = binding(function, given)
    if inspect.iscoroutinefunction(function):
        return await port.complete(bound())
    result = await port.thread(bound)
    return await port.complete(result) if inspect.isawaitable(result) else result


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
    """An argument of a command. `type` is "string", "integer", "number", "boolean", "array" or "object".

    `enum` lists the allowed values. `items` describes the values of an array, `properties` those of an object by name:
    `{"type": "string", "required": True}`; a description may have `items`, `properties` and `enum` of its own.
    """

    name: str
    type: str = "string"
    description: str = ""
    required: bool = False
    default: Any = None
    enum: Sequence[Any] | None = None
    items: Mapping[str, Any] | None = None
    properties: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidValue(f"the name of an argument is a non-empty str, not {self.name!r:.80}")
        _check_description(f"argument {self.name!r}", self._described)
        if self.default is not None:
            self.check(self.default)

    def check(self, value: Any) -> Any:
        """Return the value if it is as described. Raises InvalidValue."""
        _check(f"argument {self.name!r}", value, self._described)
        return value

    @property
    def _described(self) -> dict[str, Any]:
        return {"type": self.type, "enum": self.enum, "items": self.items, "properties": self.properties}

    def to_dict(self) -> dict[str, Any]:
        """The argument's description, as JSON values."""
        return {name: value for name, value in asdict(self).items() if value is not None or name == "default"}


def _check_description(what: str, described: Any) -> None:
    """Raise InvalidValue unless it describes values: their type, and what an array or object holds."""
    if not isinstance(described, Mapping) or described.get("type", "string") not in _TYPES:
        found = described.get("type") if isinstance(described, Mapping) else described
        raise InvalidValue(f"{what}: type {found!r:.80} is not one of {', '.join(_TYPES)}")
    enum = described.get("enum")
    if isinstance(enum, str) or not isinstance(enum or (), Sequence):
        raise InvalidValue(f"{what}: enum is a list of values, not {enum!r:.80}")
    if described.get("items") is not None:
        _check_description(f"{what}, its items", described["items"])
    for name, each in (described.get("properties") or {}).items():
        _check_description(f"{what}, its property {name!r:.80}", each)


def _check(what: str, value: Any, described: Mapping[str, Any]) -> None:
    """Raise InvalidValue unless the value is as described."""
    wanted = described.get("type", "string")
    # In Python a bool is an int; in the arguments of a command it is not.
    fits: bool = isinstance(value, _TYPES[wanted]) and (wanted == "boolean" or not isinstance(value, bool))
    if not fits:
        raise InvalidValue(f"{what} is of type {wanted}, not {type(value).__name__}")
    if described.get("enum") and value not in described["enum"]:
        raise InvalidValue(f"{what} is one of {', '.join(map(repr, described['enum']))}, not {value!r:.80}")
    if wanted == "array" and described.get("items"):
        for number, each in enumerate(value):
            _check(f"{what}, item {number}", each, described["items"])
    for name, each in (described.get("properties") or {}).items() if wanted == "object" else ():
        if value.get(name) is not None:
            _check(f"{what}, property {name!r}", value[name], each)
        elif each.get("required"):
            raise InvalidValue(f"{what}, property {name!r} is missing")


_EXPOSURES = ("agent_tool", "slash_command")


def exposures(name: str, given: str | Iterable[str] | None) -> list[str]:
    """How a command is offered, as texts; texts and their enums are taken. Raises InvalidValue."""
    found = [plain(each) for each in ([given] if isinstance(given, str) else given or ())]
    for each in found:
        if each not in _EXPOSURES:
            raise InvalidValue(f"{name}: expose_as is one of {', '.join(_EXPOSURES)}, not {each!r:.80}")
    return found


def plain(text: str | None) -> str:
    """The text itself, without the enum that it is a member of."""
    return str(text.value if isinstance(text, Enum) else text or "")


@dataclass(frozen=True, slots=True)
class Command:
    """A function that users of an agent may run."""

    name: str
    function: Callable[..., Any]
    description: str = ""
    arguments: tuple[CommandArgument, ...] = ()
    shown: Mapping[str, Any] = field(default_factory=dict)  # more of its description, for programs that offer it

    def to_dict(self) -> dict[str, Any]:
        """The command's description, as JSON values."""
        arguments = [each.to_dict() for each in self.arguments]
        return {"name": self.name, "description": self.description, "arguments": arguments, **self.shown}

    def read(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The given arguments, checked, and the defaults of others. Raises InvalidValue, which names the wrong one."""
        if given is not None and not isinstance(given, Mapping):
            raise InvalidValue(f"{self.name}: the arguments are an object, not a {type(given).__name__}")
        values = dict(given or {})
        found = dict[str, Any]()
        for each in self.arguments:
            value = values.pop(each.name, None)
            if value is None and each.required:
                raise InvalidValue(f"{self.name}: argument {each.name!r} is missing")
            try:
                value = copy.deepcopy(each.default) if value is None else each.check(value)
            except InvalidValue as error:
                raise InvalidValue(f"{self.name}: {error}") from error
            if value is not None:
                found[each.name] = value
        if values:
            names = ", ".join(each.name for each in self.arguments)
            known = f"it takes {names}" if names else "it was registered without `arguments=`"
            raise InvalidValue(f"{self.name}: takes no argument {next(iter(values))!r:.80}; {known}")
        return found

    async def run(self, port: Port, arguments: dict[str, Any], progress: Progress | None) -> Any:
        """Call the function and return its result. Raises CommandFailed; errors of the store are raised unchanged."""

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

    def remove(self, name: str) -> bool:
        """Remove a command; False if there is none with that name."""
        return self._known.pop(name, None) is not None

    def register(self, command: Command) -> None:
        """Add a command, or replace the one with that name. Raises InvalidValue."""
        if not isinstance(command.name, str) or not command.name:
            raise InvalidValue(f"the name of a command is a non-empty str, not {command.name!r:.80}")
        if not callable(command.function):
            raise InvalidValue(f"{command.name}: a command is a function, not {command.function!r:.80}")
        names = [each.name for each in command.arguments]
        if len(set(names)) < len(names):
            raise InvalidValue(f"{command.name}: two of these arguments have the same name: {', '.join(names)}")
        try:
            binding(command.function, given(command, dict.fromkeys(names), lambda text, **fields: None))
        except TypeError as error:
            raise InvalidValue(f"{command.name}: {error}") from error
        self._known[command.name] = command

    def find(self, name: str) -> Command:
        """The command with a name. Raises NotFound, which lists the known commands."""
        command = self._known.get(name)
        if command is None:
            raise NotFound(f"no command {name!r:.80}; there are {', '.join(self._known) or 'none'}")
        return command

    def to_list(self) -> list[dict[str, Any]]:
        """The descriptions of all commands, as JSON values."""
        return [each.to_dict() for each in self._known.values()]


def given(command: Command, arguments: dict[str, Any], progress: Callable[..., None]) -> dict[str, Any]:
    """The values the function may take: each argument, `args` (all as a dict), `progress(text, **fields)`.

    An argument that was not given is not in `args`; a parameter of its name gets its own default, or None without one.
    """
    own = inspect.signature(command.function).parameters
    absent = {
        name: None
        for name in (each.name for each in command.arguments)
        if name not in arguments and name in own and own[name].default is inspect.Parameter.empty
    }
    return {"args": arguments, **absent, **arguments, "progress": progress}
