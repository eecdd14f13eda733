"""Values that never leave the process. Law: nothing here is sent or stored; they end with the process.

Design: section 6.
"""

from __future__ import annotations

from typing import Any

from distributed_state.port import Mutex

RECORDS = 10_000


class Ephemeral:
    """A dict for each record, for the records used last."""

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._values: dict[str, dict[str, Any]] = {}

    def of(self, text: str) -> dict[str, Any]:
        """The dict of a record; the same one for all who ask."""
        with self._mutex:
            values = self._values.pop(text, None)
            self._values[text] = values = {} if values is None else values
            if len(self._values) > RECORDS:
                del self._values[next(iter(self._values))]
        return values

    def drop(self, text: str) -> None:
        """Forget one record's."""
        with self._mutex:
            self._values.pop(text, None)

    def forget(self) -> None:
        """In a forked child: what the parent kept is the parent's."""
        self._mutex = Mutex()  # perhaps held by a thread that is not here
        for values in self._values.values():
            values.clear()
        self._values = {}
