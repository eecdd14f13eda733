"""Whether a field is there, as a precondition says it. Law: each of the two is one object, in every process.

Design: section 4.
"""

from __future__ import annotations

from enum import Enum


class Presence(Enum):
    """What stands in `expect` in place of a value: ABSENT for a field that is not there, PRESENT for one that is."""

    ABSENT = "absent"
    PRESENT = "present"

    def __repr__(self) -> str:
        return self.name


ABSENT = Presence.ABSENT
PRESENT = Presence.PRESENT
