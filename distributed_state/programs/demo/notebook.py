"""What a replica of the demo notes, in a file of its own. Law: a line is whole, or it was never written."""

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
    """An event as a replica heard it."""

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
    """All that one replica noted, in all its lives. `models` is what it was configured with, one after another."""

    name: str
    heard: tuple[Heard, ...] = ()
    called: tuple[Called, ...] = ()
    models: tuple[str, ...] = ()
    lives: int = 1


def account(name: str, lines: Iterable[dict[str, Any]]) -> Account:
    """Read the lines of a notebook."""
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
    """The whole lines of a notebook; none if there is no file."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def position(lines: Iterable[dict[str, Any]]) -> str | None:
    """Where whoever wrote this goes on: behind the last event noted. None if it was never there."""
    return next((line["position"] for line in reversed(list(lines)) if "position" in line), None)
