"""The log that each replica of the demo writes to its file. Law: an incomplete line counts as not written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START = "start"
EVENT = "event"
HOOK = "hook"


@dataclass(frozen=True, slots=True)
class Heard:
    """An event that a replica received."""

    id: str
    type: str
    subject: str


@dataclass(frozen=True, slots=True)
class Called:
    """A hook that ran: what it was given, and what it found in the conversation then."""

    hook: str
    given: dict[str, Any]
    found: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Account:
    """The whole log of one replica, over its restarts. `models` are the values of its config, in order."""

    name: str
    heard: tuple[Heard, ...] = ()
    called: tuple[Called, ...] = ()
    models: tuple[str, ...] = ()
    lives: int = 1


def account(name: str, lines: Iterable[dict[str, Any]]) -> Account:
    """Parse the lines of a log."""
    heard = []
    called = []
    models = []
    lives = 0
    for line in lines:
        kind = line["kind"]
        if kind == START:
            lives += 1
            models.append(line["model"])
        elif kind == EVENT:
            heard.append(Heard(line["id"], line["type"], line["subject"]))
        elif kind == HOOK:
            called.append(Called(line["hook"], line["given"], line["found"]))
            if line["hook"] == "on_config_update":
                models.append(line["given"]["model"])
    return Account(name, tuple(heard), tuple(called), tuple(models), lives)


def read(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log; none if there is no file."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def position(lines: Iterable[dict[str, Any]]) -> str | None:
    """Return the position after the last event in a log, None if there is none."""
    return next((line["position"] for line in reversed(list(lines)) if "position" in line), None)
