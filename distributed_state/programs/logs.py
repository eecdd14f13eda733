"""Logs of commands. Law: a terminal gets readable lines; any other output gets one JSON object per line.

That includes warnings, errors that nothing caught, and lines about the progress of a command that containers run.

Each object has `time` (ISO 8601, UTC), `level`, `logger` and `message`; `request_id` if a request was being served,
`record` if it is about one, and `exc_info` with an error's trace. `replica` names the store whose background work it
is, else the open store. If several stores are open, `replica` is left out, as the line may be from any of them.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from contextvars import ContextVar
from typing import Any, TextIO

from pythonjsonlogger.json import JsonFormatter
from rich.console import Console
from rich.logging import RichHandler

log = logging.getLogger(__name__)
REQUEST_ID: ContextVar[str | None] = ContextVar("distributed_state_request_id", default=None)
"""The X-Request-Id of the request that is being served, set in the task that serves it."""
RECORD: ContextVar[str | None] = ContextVar("distributed_state_record", default=None)
"""The record that the request is about."""
_CONTEXT = {"request_id": REQUEST_ID, "record": RECORD}


class _Named(logging.Filter):
    """Adds a line's replica, and its request and record unless they are already set. It drops no line."""

    def __init__(self) -> None:
        super().__init__()
        self.replicas: list[str] = []  # of the open stores

    def filter(self, record: logging.LogRecord) -> bool:
        # Imported here, so that --help does not load the store's libraries.
        from distributed_state.port.background import REPLICA

        alone = self.replicas[0] if len(self.replicas) == 1 else ""
        if replica := REPLICA.get() or alone:
            record.replica = replica
        for name, variable in _CONTEXT.items():
            if (value := variable.get()) is not None and not hasattr(record, name):
                setattr(record, name, value)
        record.__dict__.pop("color_message", None)  # uvicorn's copy of its message, for terminals
        return True


_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class _Shown(logging.Formatter):
    """Escapes control characters, which could set a terminal's title or reverse a line: ids may contain anything."""

    def format(self, record: logging.LogRecord) -> str:
        return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], super().format(record))


_NAMED = _Named()


def write(level: int, console: Console) -> None:
    """Write logs of at least this level to stderr, with `console` if that is a terminal."""
    handler: logging.Handler = json_lines()
    if console.is_terminal:
        handler = RichHandler(console=console)
        handler.setFormatter(_Shown("%(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def opened(replica: str) -> None:
    """Name this replica in lines without one, as long as it is the only one."""
    _NAMED.replicas.append(replica)


def closed(replica: str) -> None:
    """Stop naming this replica."""
    _NAMED.replicas.remove(replica)


def json_lines(stream: TextIO | None = None) -> logging.StreamHandler[TextIO]:
    """A handler that writes one JSON object per line to this stream, by default stderr."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_NAMED)
    renamed = {"levelname": "level", "name": "logger"}
    handler.setFormatter(
        JsonFormatter("{levelname}{name}{message}", rename_fields=renamed, timestamp="time", style="{")
    )
    return handler


def report(text: str) -> None:
    """Write a line about the work of a command to stdout, whatever the level of its log."""
    _write_line(sys.stdout, logging.INFO, text)


def ended(text: str) -> None:
    """Write to stderr why a command ended."""
    _write_line(sys.stderr, logging.CRITICAL, f"ended: {text}")


def _write_line(stream: TextIO, level: int, text: str) -> None:
    if stream.isatty():
        stream.write(text + "\n")
        stream.flush()
    else:
        json_lines(stream).handle(log.makeRecord(log.name, level, "", 0, text, (), None))


def take_uncaught() -> None:
    """Log warnings, and errors that nothing caught, for which Python would print several lines to stderr."""
    logging.captureWarnings(True)

    def process_ended(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        log.critical("ended by an unexpected error: %s", error, exc_info=(kind, error, trace))

    def thread_ended(given: threading.ExceptHookArgs) -> None:
        name = given.thread.name if given.thread is not None else ""
        error = given.exc_value or given.exc_type()
        log.error("thread %s ended by an unexpected error: %s", name, error, exc_info=error)

    def ignored(given: Any) -> None:  # typeshed's name of its type does not exist at run time
        text = given.err_msg or "an error was ignored in"
        log.error("%s %r: %s", text, given.object, given.exc_value, exc_info=given.exc_value)

    sys.excepthook, threading.excepthook, sys.unraisablehook = process_ended, thread_ended, ignored
