"""What a record must be for a change of it to be made. Law: the server decides, at the moment of the change.

It compares stored bytes, so that it decodes no value: the client sends those that it takes for the value that is
expected, and if the server has others of the same value (in another order, encrypted another time, with a deadline), it
learns them from the refusal and sends the change again.

Design: section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed_state.errors import Conflict, CorruptState, InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records.access import VERSION
from distributed_state.records.context import RecordContext
from distributed_state.values import codec
from distributed_state.values.model import ABSENT, PRESENT, Presence
from distributed_state.warm.answers import Committed, Draft, unmet

_MOST = 1000  # Lua takes so many arguments, and some more
_WORDS = {ABSENT: b"!", PRESENT: b"+"}
_RECORD = b"#v"  # every record that is there has a version


def preconditions(
    context: RecordContext, expect: Mapping[str, Any] | None, exists: bool | None = None
) -> Preconditions | None:
    """What was asked for, checked; None if nothing was. Raises AccessDenied: who learns what is there has read it."""
    if exists is not None and not isinstance(exists, bool):
        raise InvalidValue(f"expect_exists is True, False or None, not {exists!r:.80}")
    if expect is not None and not isinstance(expect, Mapping):
        raise InvalidValue(f"expect takes what each field must hold, as {{'state': 'open'}}, not {expect!r:.80}")
    wanted = dict(expect or {})
    if len(wanted) > _MOST:
        raise InvalidValue(f"expect names {len(wanted)} fields, more than {_MOST}")
    for key in wanted:
        codec.encode_key(key)
    context.allow("read", *([] if exists is None else [VERSION]), *wanted)
    return None if exists is None and not wanted else Preconditions(context, wanted, exists)


class Preconditions:
    """The preconditions of one change."""

    def __init__(self, context: RecordContext, wanted: Mapping[str, Any], exists: bool | None) -> None:
        self._context = context
        self._words: dict[bytes, bytes] = {}  # for each field what the script is sent
        self._values: dict[bytes, tuple[str, Any]] = {}  # of those that must hold a value
        if exists is not None:
            self._words[_RECORD] = _WORDS[PRESENT if exists else ABSENT]
        known = context.tiers.hot.entries.get(context.text)
        for key, value in wanted.items():
            name = codec.encode_key(key)
            value = context.expected_value(key, value)
            if isinstance(value, Presence):
                self._words[name] = _WORDS[value]
                continue
            text = context.codec.text(value, key)
            self._words[name] = b"+" + context.codec.seal(text, key)
            self._values[name] = key, codec.decode_value(text, key)  # a copy: the caller may change theirs
            raw = None if known is None or known.deleted else known.raw(name)
            if raw is not None and self._is_equal(name, raw):
                self._words[name] = b"+" + raw

    def on(self, draft: Draft) -> Draft:
        """The change under these conditions."""
        return draft._replace(preconditions=tuple(self._words.items()))

    async def commit(self, draft: Draft) -> Committed:
        """Sign a change and apply it if they hold, else raise Conflict."""
        return await self.send(self._context.sign(draft))

    async def send(self, draft: Draft) -> Committed:
        """Apply a change that is signed if they hold, else raise Conflict."""
        left = self._context.store.settings.conflict_retries
        while True:
            left -= 1
            try:
                return await self._context.send(self.on(draft))
            except Conflict as conflict:
                if not self.learn(conflict) or left < 1:
                    raise

    def learn(self, conflict: Conflict) -> bool:
        """Take over from a refusal how equal values are stored; whether it is worth to ask once more."""
        learned = False
        for (name, word), raw in zip(list(self._words.items()), conflict.preconditions, strict=False):
            if name not in self._values or raw == word[1:]:
                continue
            if raw is None or not self._is_equal(name, raw, strict=True):
                return False
            self._words[name] = b"+" + raw
            learned = True
        return learned

    def check(self, entry: CachedRecord) -> None:
        """Raise Conflict unless they hold for a record that was read, and that nobody else changes."""
        for name, word in self._words.items():
            found = entry.fields.get(name)
            if name == _RECORD:
                found = b"%d" % entry.version if entry.version else None
            elif found is not None and name in self._values and self._is_equal(name, found, strict=True):
                continue
            said = unmet(self._context.text, name, word, found)
            if said is not None:
                raise Conflict(said, version=entry.version)

    def _is_equal(self, name: bytes, raw: bytes, *, strict: bool = False) -> bool:
        key, value = self._values[name]
        try:
            return equal(self._context.codec.decode(raw, key), value)
        except CorruptState:
            if strict:
                raise
            return False


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON: numbers by their value, objects in any order; true is no number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
