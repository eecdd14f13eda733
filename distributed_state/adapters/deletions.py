"""Whether an object that keeps one conversation may begin it again. Law: not if it knew it before it was deleted.

A run reads its conversation, works, and then adds what was said. Had it been deleted meanwhile, what was erased would
come back with that.
"""

from __future__ import annotations


class Known:
    """An object's knowledge of its conversation: none, that it exists, or at which version it did not."""

    def __init__(self) -> None:
        self._looked = False
        self._empty_at: int | None = None

    def look(self, empty_at: int | None) -> None:
        """Note what a read found: something, or nothing at this version of the record, which may be a deletion."""
        self._looked, self._empty_at = True, empty_at

    def wrote(self) -> None:
        """Note that something was written: an object that has not looked knows the conversation from then on."""
        self._looked = True

    def deletion(self) -> int | None:
        """The only deletion after which it may begin again; None: after any. Asked for before what is written."""
        return (-1 if self._empty_at is None else self._empty_at) if self._looked else None
