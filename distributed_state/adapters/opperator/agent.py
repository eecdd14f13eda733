"""`OpperatorAgent`, the class of the daemon's SDK, on a store. Law: the SDK's code runs with only the import changed.

It adds to `Agent` the constructor, `run()` under a daemon, `running`, and requests to the daemon's socket.
Source of the names: the daemon's Python SDK, https://github.com/opper-ai/opperator.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from distributed_state import Agent, ConfigurationError, InvalidValue, StateError, StateStore
from distributed_state.adapters.opperator import wire
from distributed_state.adapters.opperator.bridge import run

log = logging.getLogger(__name__)
_CONFIGS = ("agents.yaml", "config.json")


class CommandExposure(StrEnum):
    """How a command is offered: to models, or to users as a slash command."""

    AGENT_TOOL = "agent_tool"
    SLASH_COMMAND = "slash_command"


class SlashCommandScope(StrEnum):
    """Where a slash command is offered: while the agent is active, or always."""

    LOCAL = "local"
    GLOBAL = "global"


class SecretError(StateError):
    """The daemon refused a secret, or cannot be reached."""


def config_file() -> Path | None:
    """The config in the working folder: the file in CONFIG_FILE, else agents.yaml or config.json; None without one."""
    named = os.environ.get("CONFIG_FILE")
    return next((file for file in map(Path, filter(None, (named, *_CONFIGS))) if file.is_file()), None)


class OpperatorAgent(Agent):
    """An agent written for the daemon's SDK: subclass it, define its hooks, `MyAgent().run()`.

    Example::

        class Notes(OpperatorAgent):
            def __init__(self):
                super().__init__(name="notes")

            def initialize(self):
                self.register_command("ping", lambda args: "pong")

        if __name__ == "__main__":
            Notes().run()

    `store` and `config` are those of `Agent`; the config is by default the working folder's: the file in CONFIG_FILE,
    agents.yaml or config.json. `max_async_workers` commands that are `async_enabled` run at a time, by default 8.
    """

    shutdown_timeout = 2.0  # the daemon kills the process 3 seconds after SIGTERM: `cleanup` has to run before that

    def __init__(
        self,
        name: str | None = None,
        version: str = "1.0.0",
        *,
        max_async_workers: int | None = None,
        store: StateStore | Callable[[], StateStore] | None = None,
        config: Any = None,
        client: str = "",
        since: str | None = None,
    ) -> None:
        super().__init__(
            store, name=name, config=config_file() if config is None else config, client=client, since=since
        )
        self.version = version
        self.max_async_workers = max_async_workers

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Raises ConfigurationError for those that OpperatorAgent does not let its author set."""
        try:
            super().__setattr__(name, value)
        except AttributeError as error:
            text = f"{type(self).__name__}.{name} is an attribute of OpperatorAgent that cannot be set"
            raise ConfigurationError(f"{text}: give your own attribute another name") from error

    def run(self) -> None:
        """Run under the daemon at the other end of standard input: a pipe, a socket or a file; otherwise run alone."""
        kind = _kind_of(0)
        if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or stat.S_ISREG(kind):
            run(self)
            return
        if os.isatty(0):
            text = "%s: standard input is a terminal, not a daemon's pipe: the agent runs alone, until Ctrl-C"
            log.warning(text, self.agent_context.name)
        super().run()

    @property
    def running(self) -> bool:
        """Whether the agent runs; set it to False to stop."""
        return self.agent_context.host is not None and not self.agent_context.stopping

    @running.setter
    def running(self, wanted: bool) -> None:
        if not wanted:
            self.agent_context.stop()

    def get_secret(self, name: str, *, timeout: float = 5.0) -> str:
        """Ask the daemon for a secret. Raises SecretError if the daemon refuses or does not answer."""
        return get_secret(name, timeout=timeout)


def get_secret(name: str, *, timeout: float = 5.0) -> str:
    """Ask the daemon for a secret. Raises SecretError if the daemon refuses or does not answer."""
    if not isinstance(name, str) or not name.strip():
        raise InvalidValue(f"the name of a secret is a non-empty str, not {name!r:.80}")
    try:
        answer = wire.ask(timeout, type="secret_get", secret_name=name.strip())
    except (OSError, ValueError) as error:
        raise SecretError(f"secret {name!r:.80}: the daemon does not answer: {error}") from error
    secret = answer.get("secret")
    if not answer.get("success") or not isinstance(secret, str):
        raise SecretError(f"secret {name!r:.80}: {answer.get('error') or 'the daemon sent an answer without it'}")
    return secret


def _kind_of(number: int) -> int:
    try:
        return os.fstat(number).st_mode
    except OSError:  # it is closed
        return 0
