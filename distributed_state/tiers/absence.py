"""Which records SQL was seen not to have. Law: what is noted is a proof for as long as it can be checked, not a memory.

A record that Redis does not hold may be new, or archived and gone from there, which only SQL knows. So a conversation
that is begun under a name costs a look into SQL, and could not be begun while SQL is away. But a miss leaves a
hydration token in Redis, for half a minute, which every commit and every hydration of that record removes. SQL said
"nothing" after a token was seen: while that very token is still there, nobody has begun the record, so SQL would say
it again. Tokens are never used twice; one of another epoch proves nothing.

*What was noted by name alone, for the same half a minute, let a second record be begun under a name that another
worker had used, archived and seen expire meanwhile.*

Design: section 10.
"""

from __future__ import annotations

from distributed_state.warm.answers import Cold

_KEPT = 4096


class Absence:
    """The newest answers of SQL that there is no such record, by its text."""

    def __init__(self) -> None:
        self._seen: dict[str, Cold] = {}

    def note(self, text: str, cold: Cold) -> None:
        """SQL has no such record, as it said after this answer of Redis came."""
        if cold.token:
            self._seen.pop(text, None)
            self._seen[text] = cold
            while len(self._seen) > _KEPT:
                self._seen.pop(next(iter(self._seen), ""), None)

    def proven(self, text: str, cold: Cold) -> bool:
        """Whether SQL would say so now, given what Redis answers now."""
        return bool(cold.token) and self._seen.get(text) == cold
