"""Whether every acknowledged turn is there once. Law: pure; it is given what was acknowledged and what was found.

A turn is written as a text, from which its messages can be made again:
`c:3:2` turn 2 of the recorded conversation 3 · `t:text` one message of a user · `f:500:7` 500 messages, lot 7 ·
`i:text` an input and the answer of its handler · `n` none, because the conversation was only begun
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Source = Sequence[Sequence[list[dict[str, Any]]]]


@dataclass(frozen=True, slots=True)
class Difference:
    """What is wrong, in words. `lost`: something acknowledged is not there, and nothing else is wrong with it.

    That is what an asynchronous failover does to the writes that no replica had yet; anything else it must not do.
    `turns`: how many acknowledged turns that are.
    """

    text: str
    lost: bool = False
    turns: int = 0


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
    if kind == "i":
        return [{"role": "user", "content": rest}, {"role": "assistant", "content": f"to {rest}"}]
    if kind == "f":
        count, _, lot = rest.partition(":")
        roles = ("user", "assistant")
        return [{"role": roles[n % 2], "content": f"Lot {lot}, message {n}. " * 4} for n in range(int(count))]
    return []


def differences(source: Source, expected: Expected, found: Sequence[dict[str, Any]] | None) -> Iterator[Difference]:
    """Say what is lost, what is there more than once, and what nobody sent. `found` is None if nothing was there."""
    # Several processes may have begun the same conversation.
    acked = sorted(set(expected.acks))
    known = f"{expected.id}:"
    if found is None:
        if acked:
            turns = sum(turn != "n" for _, turn in acked)
            yield Difference(f"{known} the conversation is lost, with {turns} acknowledged turns", True, turns)
        return
    wanted = [Wanted(turn, version, _texts(messages_of(source, turn))) for version, turn in acked]
    maybe = [_texts(messages_of(source, turn)) for turn in expected.uncertain]
    there = _texts(found)
    missing = _missing(there, wanted, maybe)
    versions = [each.version for each in wanted if each not in (missing or ())]
    if len(set(versions)) != len(versions):
        yield Difference(f"{known} two turns were acknowledged with one version")
    if missing is None:
        yield from map(Difference, _told(known, there, wanted, maybe))
    else:
        yield from (Difference(f"{known} {each}, is lost", lost=True, turns=1) for each in missing)


@dataclass(frozen=True, slots=True)
class Wanted:
    """An acknowledged turn, with its messages as texts."""

    turn: str
    version: int
    texts: list[str]

    def __str__(self) -> str:
        return f"turn {self.turn}, acknowledged as version {self.version}"


def _missing(there: list[str], wanted: list[Wanted], maybe: list[list[str]]) -> list[Wanted] | None:
    """Which turns are not there; None if what is there is not the others, whole, once and in order.

    Any of `maybe` may stand at most once somewhere between them.
    """
    at = 0
    missing = []
    left = [texts for texts in maybe if texts]
    for each in [*wanted, None]:
        texts = each.texts if each else []
        while not texts or there[at : at + len(texts)] != texts:
            other = next((some for some in left if there[at : at + len(some)] == some), None)
            if other is None:
                break
            left.remove(other)
            at += len(other)
        if there[at : at + len(texts)] == texts:
            at += len(texts)
        elif each:
            missing.append(each)
    return missing if at == len(there) else None


def _told(known: str, there: list[str], wanted: list[Wanted], maybe: list[list[str]]) -> Iterator[str]:
    have = Counter(there)
    should = Counter(text for each in wanted for text in each.texts)
    could = Counter(text for texts in maybe for text in texts)
    clean = True
    for each in wanted:
        if any(have[text] < should[text] for text in each.texts):
            yield f"{known} {each}, is lost"
            clean = False
        elif any(have[text] > should[text] + could[text] for text in each.texts):
            yield f"{known} {each}, is there more than once"
            clean = False
    unknown = have - should - could
    if clean:
        others = f"{sum(unknown.values())} messages that nobody sent" if unknown else "the messages in another order"
        yield f"{known} holds {others}"


def _texts(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [json.dumps(message, sort_keys=True) for message in messages]
