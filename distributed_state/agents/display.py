"""What an agent shows of itself: prompt, sections, log. Law: plain values, replaced whole, so that anybody may read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from enum import Enum
from typing import Any

from distributed_state.errors import InvalidValue, NotFound
from distributed_state.port import Mutex

log = logging.getLogger(__name__)
Listener = Callable[[str, dict[str, Any]], Any]


class LogLevel(Enum):
    """How much a line of the log matters."""

    DEBUG = logging.DEBUG
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR
    CRITICAL = logging.CRITICAL


class Visible:
    """The visible part of an agent. Nothing here does I/O; the replica tells of it with its next heartbeat.

    `visible` is all of it as a dict of JSON values. `listeners` are called with each change, as `("section", {...})`,
    each line of the log, `("started", {})`, and `("event", {...})` when the hooks for an event have run, in whichever
    thread made it.
    """

    name: str

    def __init__(self) -> None:
        self._mutex = Mutex()
        self.listeners: list[Listener] = []
        self.visible: dict[str, Any] = {"description": "", "system_prompt": "", "sections": {}, "commands": []}
        self.active = False
        self.invocation_directory = ""

    def log(self, level: LogLevel | str | int, message: str, **fields: Any) -> None:
        """Log a line with fields, by the logger `distributed_state.agent.<name>`.

        `level` is a LogLevel or its name. The record has the attributes `agent` and `fields` for structured handlers.
        """
        self._log(level, message, fields)

    def _log(
        self, level: LogLevel | str | int, message: str, fields: dict[str, Any], error: BaseException | None = None
    ) -> None:
        number = _number(level)
        shown = "".join(f" {name}={value!r}" for name, value in fields.items())
        extra = {"agent": self.name, "fields": fields}
        logging.getLogger(f"distributed_state.agent.{self.name}").log(
            number, "%s%s", message, shown, extra=extra, exc_info=error
        )
        line = {"level": logging.getLevelName(number).lower(), "message": message, "fields": fields}
        self._tell("log", line if error is None else line | {"error": f"{type(error).__name__}: {error}"})

    def set_system_prompt(self, prompt: str) -> None:
        """Set the system prompt that makes a model this agent."""
        self._show("system_prompt", "system_prompt", _text("prompt", prompt))

    def set_description(self, description: str) -> None:
        """Say in a sentence what the agent is for."""
        self._show("description", "description", _text("description", description))

    def register_section(self, id: str, title: str, content: str = "", *, collapsed: bool = False) -> None:
        """Add a section of text that users of the agent see, or replace the one of that id."""
        _text("id", id)
        section = {"title": _text("title", title), "content": _text("content", content), "collapsed": bool(collapsed)}
        self._put_section(id, section)

    def update_section(
        self, id: str, content: str | None = None, *, title: str | None = None, collapsed: bool | None = None
    ) -> None:
        """Change what a section shows. Raises NotFound if there is none of that id."""
        given = {"content": content, "title": title, "collapsed": collapsed}
        for name in ("content", "title"):
            _text(name, given[name] or "")
        self._put_section(id, self._section(id) | {name: each for name, each in given.items() if each is not None})

    def remove_section(self, id: str) -> None:
        """Take a section away. Raises NotFound if there is none of that id."""
        self._section(id)
        with self._mutex:
            sections = {name: each for name, each in self.visible["sections"].items() if name != id}
            self.visible = self.visible | {"sections": sections}
        self._tell("section_removed", {"id": id})

    def get_working_directory(self) -> str:
        """The folder that this process runs in."""
        return os.getcwd()

    def _section(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] | None = self.visible["sections"].get(id)
        if found is None:
            raise NotFound(f"no section {id!r:.80}; there are {', '.join(self.visible['sections']) or 'none'}")
        return found

    def _put_section(self, id: str, section: dict[str, Any]) -> None:
        with self._mutex:
            self.visible = self.visible | {"sections": self.visible["sections"] | {id: section}}
        self._tell("section", {"id": id, **section})

    def _show(self, kind: str, name: str, value: Any) -> None:
        with self._mutex:
            self.visible = self.visible | {name: value}
        self._tell(kind, {name: value})

    def _tell(self, kind: str, content: dict[str, Any]) -> None:
        for listener in list(self.listeners):
            try:
                listener(kind, content)
            except Exception:
                log.exception("agent %s: a listener failed at %s", self.name, kind)


def _number(level: LogLevel | str | int) -> int:
    if isinstance(level, LogLevel):
        return level.value
    number = logging.getLevelNamesMapping().get(level.upper()) if isinstance(level, str) else level
    if type(number) is not int:
        raise InvalidValue(f"level is one of {', '.join(each.name for each in LogLevel)}, not {level!r:.80}")
    return number


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidValue(f"{name} is a str, not {type(value).__name__}")
    return value
