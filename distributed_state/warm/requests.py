"""What was asked on one subscription connection and is not answered yet. Law: answers come in order, pushes anywhere.

A server that does not have a slot refuses (UN)SUBSCRIBE without naming the channel, so it takes the order to know which
one was meant. What it pushes of itself, as the end of a subscription whose slot has moved, stands between the answers.

Design: sections 7, 20.
"""

from __future__ import annotations

from collections import Counter, deque

SUBSCRIBE = b"SSUBSCRIBE"
UNSUBSCRIBE = b"SUNSUBSCRIBE"


class Requests:
    """Those of one connection."""

    def __init__(self) -> None:
        self._asked: deque[tuple[bytes, bytes]] = deque()
        self._open: Counter[bytes] = Counter()

    def ask(self, kind: bytes, channel: bytes) -> None:
        """Note that this is sent now."""
        self._asked.append((kind, channel))
        self._open[channel] += 1

    def confirmed(self, channel: bytes) -> bool:
        """Note the answer to a subscription; whether it counts: nothing was asked about the channel since."""
        wanted = SUBSCRIBE, channel
        if wanted in self._asked:
            while self._drop() != wanted:
                pass
        return channel not in self._open

    def ended(self, channel: bytes) -> bool:
        """Note the end of a subscription; whether it was asked for."""
        if self._asked and self._asked[0] == (UNSUBSCRIBE, channel):
            self._drop()
            return True
        # The server ended it of itself, and answers what was asked later.
        return self._open[channel] > 0 and (UNSUBSCRIBE, channel) in self._asked

    def refused(self) -> bytes | None:
        """Note an error; the channel that it is about, None if nothing was asked."""
        return self._drop()[1] if self._asked else None

    def oldest(self) -> bytes | None:
        """The channel whose answer comes next."""
        return self._asked[0][1] if self._asked else None

    def _drop(self) -> tuple[bytes, bytes]:
        kind, channel = self._asked.popleft()
        self._open[channel] -= 1
        if not self._open[channel]:
            del self._open[channel]
        return kind, channel
