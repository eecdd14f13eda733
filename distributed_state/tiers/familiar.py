"""Which records this replica wrote, and so is sure to exist. Law: a hint; only the server knows.

Who writes another one says that it may be new, with the event that tells of its beginning: then Redis begins it at once
if it knows that the name is new. That is four words more, so it is not said of a record that was there before.

Design: section 10.
"""

from __future__ import annotations

_KEPT = 16_384


class Familiar:
    """The newest of them, by their texts."""

    def __init__(self) -> None:
        self._seen: dict[str, None] = {}

    def __contains__(self, text: str) -> bool:
        return text in self._seen

    def note(self, text: str) -> None:
        """A commit of this record was acknowledged."""
        if text not in self._seen:
            self._seen[text] = None
            while len(self._seen) > _KEPT:
                self._seen.pop(next(iter(self._seen), ""), None)
