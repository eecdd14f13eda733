"""Logs of commands. Law: a terminal gets lines for people; whatever else reads them gets one JSON object a line.

Each has `time` (ISO 8601, UTC), `level`, `logger` and `message`; `replica` once a store is open, `request_id` where a
request was served, `record` where it is about one, and `exc_info` with an error's trace.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from typing import TextIO

from pythonjsonlogger.json import JsonFormatter
from rich.console import Console
from rich.logging import RichHandler

REQUEST_ID: ContextVar[str | None] = ContextVar("distributed_state_request_id", default=None)
"""The X-Request-Id of the request that is being served."""


class _Named(logging.Filter):
    """Adds whose line it is. It lets all pass."""

    def __init__(self) -> None:
        super().__init__()
        self.replica = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if self.replica:
            record.replica = self.replica
        if (request_id := REQUEST_ID.get()) is not None:
            record.request_id = request_id
        return True


_NAMED = _Named()


def write(level: int, console: Console) -> None:
    """Write logs from this level on to stderr, which `console` shows if it is a terminal."""
    handler: logging.Handler = RichHandler(console=console) if console.is_terminal else json_lines()
    logging.basicConfig(level=level, format="%(name)s: %(message)s", handlers=[handler])


def of_replica(replica: str) -> None:
    """Name this replica in each line from now on."""
    _NAMED.replica = replica


def json_lines() -> logging.StreamHandler[TextIO]:
    """What writes one JSON object a line to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_NAMED)
    renamed = {"levelname": "level", "name": "logger"}
    handler.setFormatter(
        JsonFormatter(["levelname", "name", "message"], rename_fields=renamed, timestamp="time", style="{")
    )
    return handler
