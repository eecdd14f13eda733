"""What commit.lua refused, as the error that the caller gets. Law: no user's value stands in a message.

Design: section 4.
"""

from __future__ import annotations

from typing import Any

from distributed_state.errors import (
    Backpressure,
    Conflict,
    Deleted,
    Fenced,
    Locked,
    StateError,
    TooLarge,
    WarmUnavailable,
)
from distributed_state.values import codec
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import PHASE, SCHEMA
from distributed_state.values.tags import MOST
from distributed_state.warm.answers import Draft

REFUSALS = (
    *("backpressure", "conflict", "deleted", "epoch", "exists"),
    *("fenced", "forgotten", "item", "locked", "misused", "tags", "toolarge"),
)


_SHOWN = {PHASE: "phase", SCHEMA: "schema version"}


def holder_of(lock_value: str) -> str:
    """Name the holder of a lock, from the lock's value, for an error message."""
    head, _, name = lock_value.partition(":")
    token, _, _ = head[1:].partition("@")
    return f"{name.partition('.')[0][:80]!r} with token {token[:20]}" if name else "nobody"


def _shown(name: bytes, raw: bytes | None) -> str:
    """What a field is expected to hold, or holds. Never a user's value: errors end up in logs."""
    if raw is None:
        return "nothing"
    return repr(raw[:40].decode(errors="replace")) if name in _SHOWN else f"{len(raw)} bytes"


def _named(name: bytes) -> str:
    return _SHOWN.get(name) or (name[1:].decode(errors="replace") if name[:1] == b"#" else _field(name))


def _field(name: bytes) -> str:
    return f"field {codec.decode_key(name)!r:.80}"


def _expected_item(draft: Draft, name: bytes, version: bytes) -> str:
    collection, _, key = name.partition(b"\0")
    wanted = {each: value for step, each, value in draft.expected_items if step == b"M"}.get(name)
    found = "there is none" if version == b"-" else f"there is one, of version {version.decode()}"
    what = f"item {key[:80].decode(errors='replace')!r} of {collection.decode(errors='replace')!r}"
    return f"{what}: {found}" + (
        f", not the expected one of version {wanted.decode()}" if wanted else ", as was not expected"
    )


def unmet(record: str, name: bytes, word: bytes, raw: bytes | None) -> str | None:
    """What is to be said if this is not as commit.lua's word wants it; None if it is."""
    absent = raw is None
    if name == b"#v":
        found, wanted = ("no record", "one") if absent else ("a record", "none")
        return f"{record[:200]}: expected {wanted}, found {found}" if absent is not (word == b"!") else None
    if (absent and word == b"!") or (not absent and word in (b"+", b"+" + (raw or b""))):
        return None
    found = "is not there" if absent else "is there" if word == b"!" else "holds another value"
    return f"{record[:200]}: {_field(name)} {found}"


def _conflict(record: str, draft: Draft, version: int, found: tuple[bytes | None, ...]) -> Conflict:
    own = len(draft.preconditions)
    held, found = found[:own], found[own:]
    expected = f"version {draft.expected}" if draft.expected else "no record (version 0)"
    seen, said = f"version {version}", None
    if draft.expected in (None, version):  # then it is one of these
        judged = (unmet(record, *each, raw) for each, raw in zip(draft.preconditions, held, strict=False))
        said = next(filter(None, judged), None)
        pairs = zip(draft.expectations, found, strict=False)
        others = [(name, raw, now) for (name, raw), now in pairs if raw != now]
        expected = ", ".join(f"{_named(name)} = {_shown(name, raw)}" for name, raw, _ in others) or expected
        now_held = ", ".join(_shown(name, now) for name, _, now in others)
        seen = f"{now_held} at version {version}" if others else seen
    text = said or f"{record}: expected {expected}, found {seen}"
    return Conflict(text, version=version, found=found, preconditions=held)


def refusal(names: RecordKeys, draft: Draft, answer: list[Any]) -> StateError:
    """The error for what commit.lua refused."""
    word = answer[0].decode()
    rest = answer[1:]
    record = names.ref.text[:200]
    if word == "epoch":
        return Conflict(f"{record}: read under epoch {draft.epoch}, now it is {rest[0].decode()}")
    if word == "exists":
        return Conflict(f"{record}: exists already, at version {int(rest[0])}", version=int(rest[0]))
    if word == "conflict":
        return _conflict(record, draft, int(rest[0]), tuple(rest[1:]))
    if word == "item":
        return Conflict(f"{record}: {_expected_item(draft, *rest)}")
    if word == "deleted":
        return Deleted(f"{record}: deleted at version {int(rest[0])}", version=int(rest[0]))
    if word == "fenced":
        held = rest[0].decode(errors="replace")
        text = f"{record}: {holder_of(draft.lock_value)} no longer holds the lease, {holder_of(held)} does"
        return Fenced(text, holder=held)
    if word == "locked":
        return Locked(f"{record}: held by {holder_of(rest[0].decode(errors='replace'))}")
    if word == "backpressure":
        return Backpressure(f"{record}: {int(rest[0])} commits, {int(rest[1])} bytes of its partition are not archived")
    if word == "toolarge":
        return TooLarge(f"{record}: the record would grow to {int(rest[0])} bytes")
    if word == "tags":
        return TooLarge(f"{record}: the record would have {int(rest[0])} tags, more than {MOST}")
    if word == "forgotten":
        return WarmUnavailable(f"{record}: a repeated write came after its answer was forgotten; not applied again")
    return StateError(f"{record}: commit.lua answered {word}")
