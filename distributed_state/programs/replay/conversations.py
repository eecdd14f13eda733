"""Recorded conversations, cut into turns. Law: a file that cannot be read as a whole is not read at all.

A file holds one conversation a line: `{"id": ..., "messages": [...]}`, messages in the OpenAI chat format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from distributed_state.errors import InvalidValue
from distributed_state.values.model import Message


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation by turns: a user's message and everything up to the next one."""

    id: str
    turns: tuple[tuple[Message, ...], ...]

    @property
    def messages(self) -> list[Message]:
        """All messages in order."""
        return [message for turn in self.turns for message in turn]

    def again(self, round: int) -> Conversation:
        """The same conversation under another id, for round 2 and later."""
        return Conversation(f"{self.id}~{round}", self.turns) if round > 1 else self


def read_conversations(path: Path | None) -> list[Conversation]:
    """Read a file, or the sample that comes with the package. Raises InvalidValue naming the line."""
    if path is None:
        text = resources.files(__package__).joinpath("sample.jsonl").read_bytes()
        return parse_conversations(text.splitlines(), "the sample")
    try:
        with path.open("rb") as lines:
            return parse_conversations(lines, str(path))
    except OSError as error:
        raise InvalidValue(f"{path}: {error.strerror or error}") from error


def parse_conversations(lines: Iterable[bytes], place: str) -> list[Conversation]:
    """Check and cut every line. Raises InvalidValue naming the line."""
    found: dict[str, Conversation] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        conversation = _conversation(line, f"{place}, line {number}")
        if conversation.id in found:
            raise InvalidValue(f"{place}, line {number}: the id {conversation.id!r} occurs twice")
        found[conversation.id] = conversation
    if not found:
        raise InvalidValue(f"{place}: holds no conversation")
    return list(found.values())


def _conversation(line: bytes, place: str) -> Conversation:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidValue(f"{place}: is not JSON, or is truncated: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("id"), str) or not fields["id"]:
        raise InvalidValue(f'{place}: must have the form {{"id": "...", "messages": [...]}}')
    if not isinstance(fields.get("messages"), list) or not fields["messages"]:
        raise InvalidValue(f"{place}: {fields['id']!r} has no list of messages")
    return Conversation(fields["id"], cut([_message(one, place, at) for at, one in enumerate(fields["messages"])]))


def _message(fields: Any, place: str, at: int) -> Message:
    try:
        return Message.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in ("messages", at, *first["loc"]))
        raise InvalidValue(f"{place}: {path}: {first['msg']}") from error


def cut(messages: Iterable[Message]) -> tuple[tuple[Message, ...], ...]:
    """Start a turn at every user's message; what comes before the first one goes with it."""
    turns: list[list[Message]] = [[]]
    asked = False
    for message in messages:
        if message.role == "user":
            if asked:
                turns.append([])
            asked = True
        turns[-1].append(message)
    return tuple(tuple(turn) for turn in turns)
