"""Whether a replay kept its word. Law: pure; it is given what went in, what was acknowledged and what came out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed_state.programs.replay.conversations import Conversation
from distributed_state.programs.verification import gaps, same


@dataclass(frozen=True, slots=True)
class Ack:
    """One acknowledged turn: the version and the number of the first message that the commit's reply named.

    A reply that had to be asked for again may come without the number.
    """

    conversation: str
    turn: int
    version: int
    first: int | None


@dataclass(frozen=True, slots=True)
class Kept:
    """One conversation as the SQL database has it: messages, turn counter, what each version appended, last phase."""

    messages: Sequence[dict[str, Any]]
    turns: Any
    changes: Sequence[tuple[int, Sequence[dict[str, Any]]]]
    phase: str | None


def differences(conversation: Conversation, acks: Iterable[Ack], kept: Kept) -> list[str]:
    """Say everything by which `kept` differs from what it should be; an empty list if nothing does."""
    found = [*_order(conversation, kept), *_versions(kept), *_acknowledged(conversation, acks, kept)]
    if kept.turns != len(conversation.turns):
        found.append(f"the turn counter is {kept.turns!r} instead of {len(conversation.turns)}")
    if kept.phase != "done":
        found.append(f"the phase is {kept.phase!r} instead of 'done'")
    return [f"{conversation.id}: {text}" for text in found]


def _order(conversation: Conversation, kept: Kept) -> Iterable[str]:
    wanted = [message.to_dict() for message in conversation.messages]
    if len(wanted) != len(kept.messages):
        yield f"{len(kept.messages)} messages instead of {len(wanted)}"
    for at, (left, right) in enumerate(zip(wanted, kept.messages, strict=False)):
        if not same(left, right):
            place = f"message {at} is {_short(right)} instead of {_short(left)}"
            earlier = next((n for n in range(at) if same(wanted[n], right)), None)
            yield place if earlier is None else f"{place}; equal to message {earlier}"
            return


def _versions(kept: Kept) -> Iterable[str]:
    yield from gaps([version for version, _ in kept.changes])


def _acknowledged(conversation: Conversation, acks: Iterable[Ack], kept: Kept) -> Iterable[str]:
    changes = dict(kept.changes)
    seen: set[int] = set()
    for ack in acks:
        wanted = [message.to_dict() for message in conversation.turns[ack.turn]]
        name = f"turn {ack.turn}, acknowledged as version {ack.version},"
        if ack.turn in seen:
            yield f"{name} was acknowledged twice"
        seen.add(ack.turn)
        if not same(wanted, list(changes.get(ack.version, ()))):
            yield f"{name} is not what that version appended"
        if ack.first is not None and not same(wanted, list(kept.messages[ack.first : ack.first + len(wanted)])):
            yield f"{name} is not at messages {ack.first} to {ack.first + len(wanted) - 1}"


def _short(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else repr(content or message.get("tool_calls"))
    return f"{message.get('role')} {text[:60]!r}"
