"""When the agents of a host end. Law: what runs may finish until a deadline, and is left alone then.

Design: section 12.
"""

from __future__ import annotations

from collections.abc import Callable

from distributed_state.port import Port

_LAST_WORK = 5.0  # seconds that the end's hooks and the archive get, however late it is


class Shutdown:
    """Whether the agents are to end, until when they may take, and what failed in them first."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._deadline = 0.0
        self.requested = False
        self.failure: BaseException | None = None

    def request(self, timeout: float) -> None:
        """Let them end, within so many seconds; asked again, without waiting for what runs. From any thread."""
        if self.requested:
            self._deadline = 0.0
        else:
            # In this order: another thread that sees the request must not find that its time is over already.
            self._deadline = self._port.monotonic() + timeout
            self.requested = True

    def fail(self, error: BaseException) -> None:
        """Keep what is to be raised at the end: the first failure, which may have caused the others."""
        self.failure = self.failure or error

    @property
    def overdue(self) -> bool:
        """Whether what still runs has used up its time."""
        return self.requested and self._port.monotonic() >= self._deadline

    def time_left(self) -> float:
        """The seconds that a step of the end may take."""
        return max(self._deadline - self._port.monotonic(), _LAST_WORK)

    async def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait until it is true, at most until the deadline; whether it is."""
        while not condition():
            if self._port.monotonic() >= self._deadline:
                return False
            await self._port.sleep(0.01)
        return True
