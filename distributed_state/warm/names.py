"""The names of a partition's records, for Redis to know which ones are new. Law: none is missing, or there are none.

Redis cannot tell a record that never was from one that is archived and gone from there, so the first write of a name
asks SQL. Unless Redis knows all names: those that SQL had when the epoch began, put there with it, and those that were
begun or brought in since, which the same scripts add. They lie in the partition's `meta`, and are gone with the epoch.

Design: section 10.
"""

from __future__ import annotations

from collections.abc import Iterable

# As new_name.lua has them.
_FULL = 4092
_DIGITS = 6
_FACTOR = 65599
_PRIME = 268435399


def listed(texts: Iterable[str]) -> list[bytes] | None:
    """The fields of meta in which these names stand, and their values, in turn; None if they are too many."""
    found: dict[bytes, list[bytes]] = {}
    for text in texts:
        number = 0
        for byte in text.encode():
            number = (number * _FACTOR + byte) % _PRIME
        digits = b"%07x" % number
        found.setdefault(b"k" + digits[_DIGITS:], []).append(digits[:_DIGITS])
    if any(len(marks) * _DIGITS >= _FULL for marks in found.values()):
        return None
    return [word for field, marks in found.items() for word in (field, b"".join(marks))]
