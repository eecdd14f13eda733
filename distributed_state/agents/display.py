"""An agent's display: prompt, sections, log, figures. Law: values are immutable and replaced as a whole.

Figures are read only on request.

Design: section 12.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from distributed_state.errors import InvalidValue
from distributed_state.port import Mutex

log = logging.getLogger(__name__)
Listener = Callable[[str, dict[str, Any]], Any]


class LogLevel(Enum):
    """The severity of a line of the log."""

    DEBUG = logging.DEBUG
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR
    CRITICAL = logging.CRITICAL
    FATAL = CRITICAL


class Display:
    """One agent's display. Nothing here does I/O; the replica publishes `visible` with its next heartbeat."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._mutex = Mutex()
        self.listeners: list[Listener] = []
        self.visible: dict[str, Any] = {"description": "", "system_prompt": "", "sections": {}, "commands": []}

    def log(
        self, level: LogLevel | str | int, message: str, fields: dict[str, Any], error: BaseException | None = None
    ) -> None:
        """Log a line with fields, and pass it to the listeners."""
        number = _number(level)
        shown = "".join(f" {name}={value!r}" for name, value in fields.items())
        extra = {"agent": self._name, "fields": fields}
        logging.getLogger(f"distributed_state.agent.{self._name}").log(
            number, "%s%s", message, shown, extra=extra, exc_info=error
        )
        line = {"level": logging.getLevelName(number).lower(), "message": message, "fields": fields}
        self.notify("log", line if error is None else line | {"error": f"{type(error).__name__}: {error}"})

    def show(self, name: str, value: Any) -> None:
        """Replace one of the visible values."""
        with self._mutex:
            self.visible = self.visible | {name: value}
        self.notify(name, {name: value})

    def show_description(self, description: str) -> None:
        """Replace the description. Raises InvalidValue if it is not a str."""
        self.show("description", _text("description", description))

    def show_system_prompt(self, prompt: str, replace: bool) -> None:
        """Replace the system prompt. Raises InvalidValue if it is not a str."""
        with self._mutex:
            self.visible = self.visible | {"system_prompt": _text("prompt", prompt)}
        self.notify("system_prompt", {"system_prompt": prompt, "replace": bool(replace)})

    def register_section(self, id: str, title: str, content: str, collapsed: bool) -> None:
        """Add a section, or replace the one with that id."""
        _text("id", id)
        section = {"title": _text("title", title), "content": _text("content", content), "collapsed": bool(collapsed)}
        with self._mutex:
            self.visible = self.visible | {"sections": self.visible["sections"] | {id: section}}
        self.notify("section", {"id": id, **section})

    def update_section(self, id: str, content: str | None, title: str | None, collapsed: bool | None) -> None:
        """Change those values of a section that are not None, or add it. Raises InvalidValue."""
        before = self.visible["sections"].get(id, {"title": id, "content": "", "collapsed": False})
        given = {"content": content, "title": title, "collapsed": collapsed}
        section = before | {name: each for name, each in given.items() if each is not None}
        self.register_section(id, section["title"], section["content"], section["collapsed"])

    def remove_section(self, id: str) -> bool:
        """Remove a section; False, with a warning in the log, if there is none."""
        with self._mutex:
            sections = {name: each for name, each in self.visible["sections"].items() if name != id}
            there = len(sections) < len(self.visible["sections"])
            self.visible = self.visible | {"sections": sections}
        if there:
            self.notify("section_removed", {"id": id})
        else:
            self.log(LogLevel.WARNING, "no such section to remove", {"section": id})
        return there

    def notify(self, kind: str, content: dict[str, Any]) -> None:
        """Call every listener with a change; if one fails, log that and call the next."""
        for listener in list(self.listeners):
            try:
                listener(kind, content)
            except Exception:
                log.exception("agent %s: a listener failed at %s", self._name, kind)


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


MB = 2**20


@dataclass(frozen=True, slots=True)
class Status:
    """The status of one replica of an agent.

    `requests` counts the commands and hooks run, `errors` those that failed; `error_rate` is in percent. `queue_size`
    counts waiting events, and work that the agent counts itself. `lag` is the age in seconds of the last event when its
    hooks ran. `tiers` is `store.admin.stats()`, empty while servers are down.
    """

    agent: str
    replica: str
    uptime: float
    requests: int
    errors: int
    error_rate: float
    queue_size: int
    memory_mb: float
    conversations: int
    lag: float
    active: bool
    paused: bool
    tiers: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return asdict(self)

    def warnings(self, limits: Limits) -> Iterator[tuple[str, str, float, float]]:
        """For each figure beyond its limit: a description of the problem, the figure's name, its value, its limit."""
        if self.error_rate > limits.error_rate:
            yield "high error rate", "error_rate", self.error_rate, limits.error_rate
        if self.queue_size > limits.queue_size:
            yield "long queue", "queue_size", self.queue_size, limits.queue_size
        if self.lag > limits.lag:
            yield "far behind", "lag", self.lag, limits.lag
        if limits.memory_mb and self.memory_mb > limits.memory_mb:
            yield "much memory", "memory_mb", self.memory_mb, limits.memory_mb


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits beyond which a figure causes a warning. `error_rate` is in percent; `memory_mb` 0 means no limit."""

    error_rate: float = 10.0
    queue_size: int = 1000
    lag: float = 10.0
    memory_mb: float = 0.0


def memory_mb() -> float:
    """This process's present memory, its peak where only that is known, else 0."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB
    try:
        import resource
    except ImportError:
        return 0.0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / MB if sys.platform == "darwin" else most / 1024
