"""The hooks of an agent, and how one is called. Law: a hook gets the parameters that it names, and may be left out.

Design: section 12.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from distributed_state.errors import ConfigurationError
from distributed_state.port import Port
from distributed_state.values.results import Event


class Hooks:
    """What an agent may define; each does nothing unless it does.

    Hooks of one replica run one after another, in the order of the events. "Everywhere" below is each replica that runs
    the agent. A hook that raises is logged with its event and does not stop the rest; one that takes longer than
    `slow_hook` seconds is logged. A hook of an event or a conversation that raises Unavailable, as Redis or SQL were
    away for longer than `retry_for`, is run again, three times at most: it should bear that.
    """

    def initialize(self) -> Any:
        """Prepare: commands, sections, ephemeral values. Runs at the start of each process, before any event."""

    def start(self) -> Any:
        """Begin. Runs once the agent listens to events, before `main_loop`."""

    def main_loop(self) -> Any:
        """Work in the background until it is time to end: `while self.wait(5.0): ...`.

        What it raises is logged, and raised by `run()`, which it ends, or at the end of `with agent:`.
        """

    def on_new_conversation(self, conversation_id: str, is_clear: bool) -> Any:
        """A conversation was created or cleared. Everywhere; its defaults are there, put in once for the fleet."""

    def on_conversation_switched(self, conversation_id: str, previous_id: str, message_count: int) -> Any:
        """A client went to a conversation, perhaps one unknown here. Everywhere. `previous_id` may be ""."""

    def on_conversation_deleted(self, conversation_id: str) -> Any:
        """A conversation goes. On the replica that deletes it before its data goes, elsewhere and when expired after.

        `self.conversation` shows the last state either way. What must be done once for the fleet belongs in a handler
        of a group: `store.on("conversation.deleted", ..., group="cleaners")`.
        """

    def on_agent_activated(self, previous_agent: str | None, conversation_id: str) -> Any:
        """A client chose this agent. Everywhere; `previous_agent` may be "" or None, `conversation_id` ""."""

    def on_agent_deactivated(self, next_agent: str | None) -> Any:
        """A client left this agent for another one, or for none. Everywhere; before the other is activated."""

    def on_invocation_directory_changed(self, old_path: str, new_path: str) -> Any:
        """A client's user works from another folder. Everywhere."""

    def on_config_update(self, *given: Any, **named: Any) -> Any:
        """The config is another one now. Take `config`, or also `changed`, the set of names whose values differ."""

    def on_status(self, *given: Any, **named: Any) -> Any:
        """Somebody asked how this replica is, by SIGUSR1 or `status()`. The figures, `status`, are logged already."""

    def on_resync(self, event: Event) -> Any:
        """This replica missed events, more than the fleet keeps. The conversation and config were read again."""

    def on_event(self, event: Event) -> Any:
        """Any other event: those of `store.emit`, phases, checkpoints, lost locks and replicas."""

    def on_shutdown(self) -> Any:
        """The process is about to end; what ran has finished. State need not be saved: every write was a commit."""

    def cleanup(self) -> Any:
        """The last thing: close what `initialize` opened."""


# What these two are given; an agent takes what it names. The parameters of the other hooks are as written above.
GIVEN = {"on_config_update": ("config", "changed"), "on_status": ("status",)}


def is_defined(agent: Hooks, hook: str) -> bool:
    """Whether the agent does something there."""
    return getattr(type(agent), hook) is not getattr(Hooks, hook, None) or hook in vars(agent)


def check(agent: Hooks) -> None:
    """Raise ConfigurationError for a hook that wants more than it can be given."""
    for name, default in vars(Hooks).items():
        if not name.startswith("_"):
            given = GIVEN.get(name) or tuple(inspect.signature(default).parameters)[1:]
            try:
                binding(getattr(agent, name), dict.fromkeys(given))
            except TypeError as error:
                text = f"{type(agent).__name__}.{name} is given {', '.join(given) or 'nothing'}: {error}"
                raise ConfigurationError(text) from error


def binding(function: Callable[..., Any], given: Mapping[str, Any]) -> Callable[[], Any]:
    """The call of a function with what it names of `given`; parameters of other names get the rest in order.

    Raises TypeError if it wants more.
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
    """Call a plain function or a coroutine function, whichever the face, and return what it returned."""
    bound = binding(function, given)
    if inspect.iscoroutinefunction(function):
        return await port.complete(bound())
    result = await port.thread(bound)
    return await port.complete(result) if inspect.isawaitable(result) else result
