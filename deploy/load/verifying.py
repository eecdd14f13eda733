"""Whether every acknowledged turn is there once. Law: pure; it is given what was acknowledged and what was found.

A turn is written as a text, from which its messages can be made again:
`c:3:2` turn 2 of the recorded conversation 3 · `t:text` one message of a user · `f:500:7` 500 messages, lot 7 ·
`n` none, because the conversation was only begun
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Source = Sequence[Sequence[list[dict[str, Any]]]]


@dataclass(slots=True)
class Expected:
    """One conversation: its acknowledged turns with their versions, and those of which nothing is known."""

    id: str
    acks: list[tuple[int, str]] = field(default_factory=list)
    uncertain: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Expected:
        """What `asdict` made of one, after it was JSON."""
        return cls(fields["id"], [(version, turn) for version, turn in fields["acks"]], fields["uncertain"])

    def merge(self, other: Expected) -> None:
        """Add what another process knows of it."""
        self.acks += other.acks
        self.uncertain += other.uncertain


def messages_of(source: Source, turn: str) -> list[dict[str, Any]]:
    """The messages of a turn."""
    kind, _, rest = turn.partition(":")
    if kind == "c":
        conversation, _, number = rest.partition(":")
        return source[int(conversation)][int(number)]
    if kind == "t":
        return [{"role": "user", "content": rest}]
    if kind == "f":
        count, _, lot = rest.partition(":")
        roles = ("user", "assistant")
        return [{"role": roles[n % 2], "content": f"Lot {lot}, message {n}. " * 4} for n in range(int(count))]
    return []


def differences(source: Source, expected: Expected, found: Sequence[dict[str, Any]] | None) -> Iterator[str]:
    """Say what is lost, what is there more than once, and what nobody sent. `found` is None if nothing was there."""
    # Several processes may have begun the same conversation.
    acked = sorted(set(expected.acks))
    known = f"{expected.id}:"
    if found is None:
        if acked:
            yield f"{known} the conversation is lost, with {len(acked)} acknowledged turns"
        return
    versions = [version for version, _ in acked]
    if len(set(versions)) != len(versions):
        yield f"{known} two turns were acknowledged with one version"
    wanted = [(turn, version, _texts(messages_of(source, turn))) for version, turn in acked]
    maybe = [_texts(messages_of(source, turn)) for turn in expected.uncertain]
    there = _texts(found)
    if _fits(there, [texts for _, _, texts in wanted], maybe):
        return
    yield from _told(known, there, wanted, maybe)


def _fits(there: list[str], wanted: list[list[str]], maybe: list[list[str]]) -> bool:
    """Whether what is there is what is wanted, in order, with any of the others at most once somewhere between."""
    at = 0
    left = [texts for texts in maybe if texts]
    for texts in [*wanted, []]:
        while not texts or there[at : at + len(texts)] != texts:
            other = next((each for each in left if there[at : at + len(each)] == each), None)
            if other is None:
                break
            left.remove(other)
            at += len(other)
        if there[at : at + len(texts)] != texts:
            return False
        at += len(texts)
    return at == len(there)


def _told(
    known: str, there: list[str], wanted: list[tuple[str, int, list[str]]], maybe: list[list[str]]
) -> Iterator[str]:
    have = Counter(there)
    should = Counter(text for _, _, texts in wanted for text in texts)
    could = Counter(text for texts in maybe for text in texts)
    clean = True
    for turn, version, texts in wanted:
        if any(have[text] < should[text] for text in texts):
            yield f"{known} turn {turn}, acknowledged as version {version}, is lost"
            clean = False
        elif any(have[text] > should[text] + could[text] for text in texts):
            yield f"{known} turn {turn}, acknowledged as version {version}, is there more than once"
            clean = False
    unknown = have - should - could
    if clean:
        others = f"{sum(unknown.values())} messages that nobody sent" if unknown else "the messages in another order"
        yield f"{known} holds {others}"


def _texts(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [json.dumps(message, sort_keys=True) for message in messages]
