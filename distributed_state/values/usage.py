"""The tokens that models used, and how a session's fields count them. Law: a count only grows, and by whole turns.

Each model has a field: its sums, and the share of the commit that wrote the field last, from which the archiver adds up
SQL's table.

Design: section 32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

from distributed_state.errors import InvalidValue, UsageExceeded
from distributed_state.values.model import USAGE, has_pair, is_storable

MODEL_NAME = 100
"""Characters of a model's name that are kept."""
MOST_TOKENS = 10**12
OTHERS = "(others)"
"""Counts the models of a session after the first 32."""
_MOST_MODELS = 32
_STORED = re.compile(rb"\d{1,18}( \d{1,18}){5}")


@dataclass(frozen=True, slots=True)
class Tokens:
    """How many calls of models there were, and the tokens that they read and wrote."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        """The tokens that were read and written, together."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            self.calls + other.calls, self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens
        )


@dataclass(frozen=True, slots=True)
class Usage(Tokens):
    """Tokens, in total and for each model. `days` has the usage of each day, such as "2026-11-29", from SQL."""

    models: Mapping[str, Tokens] = field(default_factory=dict)
    days: Mapping[str, Usage] = field(default_factory=dict)

    @classmethod
    def of(cls, models: Mapping[str, Tokens], days: Mapping[str, Usage] | None = None) -> Self:
        """The usage of these models."""
        total = sum(models.values(), Tokens())
        return cls(total.calls, total.input_tokens, total.output_tokens, dict(models), dict(days or {}))


def checked_tokens(input_tokens: int, output_tokens: int, calls: int = 1) -> Tokens:
    """The tokens of one call, or of several. Raises InvalidValue."""
    for name, given in ("input_tokens", input_tokens), ("output_tokens", output_tokens), ("calls", calls):
        if type(given) is not int or not 0 <= given <= MOST_TOKENS:
            raise InvalidValue(f"{name} is an int from 0 to 10**12, not {given!r:.80}")
    return Tokens(calls, input_tokens, output_tokens)


def checked_model(name: str) -> str:
    """The name under which a model is counted. Raises InvalidValue."""
    if not isinstance(name, str) or not name or has_pair(name) or not is_storable(name):
        raise InvalidValue(f"the name of a model is a non-empty str without NUL and surrogates, not {name!r:.80}")
    return name[:MODEL_NAME]


def checked_bound(usage_below: int | None) -> int | None:
    """The bound for a turn. Raises InvalidValue."""
    if usage_below is not None and (type(usage_below) is not int or usage_below < 0):
        raise InvalidValue(f"usage_below is a number of tokens from 0 on or None, not {usage_below!r:.80}")
    return usage_below


def refuse_above(bound: int, usage: Usage, record: str) -> None:
    """Raise UsageExceeded unless the session has used fewer tokens."""
    found = usage.tokens
    if found >= bound:
        text = f"{record[:200]}: its models have used {found} tokens, and this turn begins only below {bound}"
        raise UsageExceeded(text, tokens=found, limit=bound)


def used(fields: Mapping[bytes, bytes]) -> dict[str, Tokens]:
    """The tokens that a session has used so far, by model, according to its fields."""
    return {name[2:].decode(): Counted.read(value).sums for name, value in fields.items() if name[:2] == USAGE}


def spent(operations: Iterable[tuple[bytes, bytes, bytes]]) -> dict[str, Tokens]:
    """The tokens that the turn with these operations used, by model."""
    found = ((name, value) for kind, name, value in operations if kind == b"s" and name[:2] == USAGE)
    return {name[2:].decode(): Counted.read(value).share for name, value in found}


def counted(fields: Mapping[bytes, bytes], turn: Mapping[str, Tokens]) -> Iterator[tuple[bytes, bytes]]:
    """The fields to write, given those of the session, when a turn has used these tokens."""
    known = used(fields)
    shares: dict[str, Tokens] = {}
    for model, share in turn.items():
        if model not in known and len(known.keys() | shares.keys()) >= _MOST_MODELS:
            model = OTHERS
        shares[model] = shares.get(model, Tokens()) + share
    for model, share in shares.items():
        yield USAGE + model.encode(), Counted(known.get(model, Tokens()) + share, share).stored


@dataclass(frozen=True, slots=True)
class Counted:
    """The content of a model's field: its sums, and the share of the commit that wrote it."""

    sums: Tokens
    share: Tokens

    @classmethod
    def read(cls, stored: bytes) -> Self:
        """Parse the field. Raises ValueError."""
        if not _STORED.fullmatch(stored):
            raise ValueError(f"#u is {stored!r:.80}, not six counts")
        numbers = [int(each) for each in stored.split(b" ")]
        return cls(Tokens(*numbers[:3]), Tokens(*numbers[3:]))

    @property
    def stored(self) -> bytes:
        """The content of the field."""
        counts = [(each.calls, each.input_tokens, each.output_tokens) for each in (self.sums, self.share)]
        return " ".join(str(number) for each in counts for number in each).encode()
