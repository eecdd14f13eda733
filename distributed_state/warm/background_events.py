"""Events whose writers cannot wait, as that a lock was lost. Law: each is tried once, and only logged if that fails.

Design: section 12.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from distributed_state.errors import StateError
from distributed_state.port import Job, Port
from distributed_state.values import codec
from distributed_state.values.keys import Keys
from distributed_state.values.model import log_fields
from distributed_state.warm.stream import Stream

log = logging.getLogger(__name__)
_MOST_WAITING = 1000
_PATIENCE = 1.0


class BackgroundEvents:
    """The events of one replica that wait to be written."""

    def __init__(self, port: Port, stream: Stream, keys: Keys) -> None:
        self._port = port
        self._stream = stream
        self._keys = keys
        self._waiting: deque[tuple[str, str, dict[str, Any]]] = deque(maxlen=_MOST_WAITING)
        self._mutex = port.mutex()
        self._done = port.signal()
        self._job: Job | None = None

    def emit(self, type: str, subject: str, data: dict[str, Any]) -> None:
        """Write this event soon. Does not wait, and never fails."""
        with self._mutex:
            self._waiting.append((type, subject, data))
            if self._job is None:
                self._done.clear()
                self._job = self._port.spawn(self._run, "distributed-state-background-events")

    async def _run(self) -> None:
        while True:
            with self._mutex:
                if not self._waiting:
                    self._job = None
                    self._done.set()
                    return
                type, subject, data = self._waiting.popleft()
            keys = self._keys.partition(self._keys.partition_of(subject))
            try:
                if not await self._stream.try_to_emit(keys, type, subject, codec.encode(data, "data")):
                    text = "%s of %s is not published: Redis was emptied or its journal is full"
                    log.warning(text, type, subject[:200], extra=log_fields(subject))
            except StateError as error:
                text = "%s of %s is not published: %s"
                log.warning(text, type, subject[:200], error, extra=log_fields(subject))

    async def close(self) -> None:
        """Give what waits a moment."""
        job = self._job
        if job is not None:
            await self._done.wait(_PATIENCE)
            await job.stop()
