"""What a turn changes in its user's record, beside its own. Law: once for each request, on top of what others wrote.

The two records are two commits, the turn's first: one that is refused leaves its user alone. It carries what the other
is to be, so that a repeated request completes what a crash left out; the other remembers the request, so that it is
never applied twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from distributed_state import codec
from distributed_state.hot import Entry
from distributed_state.model import REQUEST
from distributed_state.transaction import _GONE as GONE
from distributed_state.transaction import Transaction

Effects = dict[str, dict[str, Any]]


class Effect(TypedDict):
    """What a turn remembers of it: whose record, its version then, the name under which that remembers the request."""

    user: str
    version: int
    mark: str | None
    fields: Effects


def forgotten(effect: Effect, entry: Entry, remembered: int) -> bool:
    """Whether this record may have been changed so already and remember it no more: too much came after.

    Then it is taken for changed: one commit follows the other at once, and a crash in between is the rare case.
    """
    if entry.version < effect["version"]:
        return True  # purged since
    marks = [(data, codec.decode_key(name)) for name, data in entry.fields.items() if name[:2] == REQUEST]
    return len(marks) >= remembered and all(entry.form.decode(*mark)[0] > effect["version"] for mark in marks)


def changed(view: Transaction) -> Effects:
    """The fields that a view changes: what each was (`base`) and is to be (`mine`); a part is left out if absent."""
    found: Effects = {}
    for key, base, mine in view._differences():
        found[key] = {name: value for name, value in (("base", base), ("mine", mine)) if value is not GONE}
    return found


def apply(effects: Effects, view: Transaction) -> None:
    """Make these changes on a newer state: numbers add up, objects merge, lists grow; else the later one is right."""
    for key, parts in effects.items():
        if "mine" not in parts:
            view.pop(key, None)
        elif key in view and view[key] != parts.get("base"):
            view[key] = added(parts.get("base"), view[key], parts["mine"])
        else:
            view[key] = parts["mine"]


def added(base: Any, theirs: Any, mine: Any) -> Any:
    """Both changes of one value, as far as there is a sum of them; else `mine`."""
    if _number(theirs) and _number(mine) and (base is None or _number(base)):
        return theirs + mine - (base or 0)
    if isinstance(theirs, list) and isinstance(mine, list):
        before = base if isinstance(base, list) else []
        return theirs + mine[len(before) :] if mine[: len(before)] == before else mine
    if isinstance(theirs, dict) and isinstance(mine, dict):
        return _merged(base if isinstance(base, dict) else {}, theirs, mine)
    return mine


def _merged(base: Mapping[str, Any], theirs: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    merged = {key: value for key, value in theirs.items() if key in mine or key not in base}
    for key, value in mine.items():
        if key not in base or value != base[key]:
            merged[key] = added(base.get(key), theirs[key], value) if key in theirs else value
    return merged


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
