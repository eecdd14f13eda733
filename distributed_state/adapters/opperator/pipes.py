"""Lines in and lines out of a process. Law: a writer never waits for the reader, and no line stops the next."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

MAX_LINE = 16 * 2**20
_CHUNK = 2**16
_WAITING_LOGS = 1000


class Incoming:
    """The lines of a pipe. `close()`, from any thread, ends the reading of it."""

    def __init__(self, source: Any, too_long: Callable[[int], None]) -> None:
        self._file = source.fileno()
        self._too_long = too_long
        self._woken, self._waker = os.pipe()

    def __iter__(self) -> Iterator[bytes]:
        """Yield each line without its end. Skips empty ones, and, with a report, those longer than MAX_LINE."""
        parts = list[bytes]()
        size = 0
        while chunk := self._chunk():
            *whole, rest = chunk.split(b"\n")
            for piece in whole:
                size += len(piece)
                if size > MAX_LINE:
                    self._too_long(size)
                elif line := b"".join([*parts, piece]).strip():
                    yield line
                parts = []
                size = 0
            size += len(rest)
            if size <= MAX_LINE:
                parts.append(rest)
            else:
                parts.clear()
        if parts and (line := b"".join(parts).strip()):
            yield line

    def _chunk(self) -> bytes:
        ready, _, _ = select.select([self._file, self._woken], [], [])
        if self._woken in ready:
            return b""
        try:
            return os.read(self._file, _CHUNK)
        except OSError:  # the other end of a terminal or socket is closed
            return b""

    def close(self) -> None:
        """Wake whoever reads, who then finds the end."""
        os.write(self._waker, b"x")

    def free(self) -> None:
        """Close the descriptors that this opened, once nobody reads any more."""
        os.close(self._woken)
        os.close(self._waker)


class Outgoing:
    """Lines for a pipe, written by a thread, so that a slow reader blocks nobody. `lost` is called if it is closed."""

    def __init__(self, target: Any, lost: Callable[[], None]) -> None:
        self._file = target.fileno()
        self._lost = lost
        self._lines: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._logs = self._dropped = 0
        self._closed = self.broken = False
        self._thread = threading.Thread(target=self._write, name="opperator out", daemon=True)
        self._thread.start()

    def send(self, line: bytes) -> None:
        """Queue a line; it is dropped once the pipe is broken."""
        with self._changed:
            if not self.broken:
                self._lines.append(line)
                self._changed.notify_all()

    def send_log(self, line: bytes) -> int:
        """Send a line, or drop it if too many wait. Returns how many were dropped since the last that was sent."""
        with self._changed:
            if len(self._lines) >= _WAITING_LOGS:
                self._dropped += 1
                return 0
            dropped = self._dropped
            self._dropped = 0
        self.send(line)
        return dropped

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    if self._closed:
                        return
                    self._changed.wait()
                rest = memoryview(self._lines[0])
            try:
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except OSError:
                with self._changed:
                    self.broken = True
                    self._lines.clear()
                    self._changed.notify_all()
                self._lost()
                return
            with self._changed:
                self._lines.popleft()

    def close(self, seconds: float) -> bool:
        """Wait until everything is written, at most so long; False if it was not."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(seconds)
        return not self._thread.is_alive() and not self.broken


class Busy:
    """Counts what is not finished."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def add(self, count: int) -> None:
        """Count up, or down by a negative number, and wake whoever waits."""
        with self._changed:
            self._count += count
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is left; False if it took longer."""
        end = time.monotonic() + seconds
        with self._changed:
            return self._changed.wait_for(lambda: not self._count, max(0.0, end - time.monotonic()))


@contextmanager
def standard_streams() -> Iterator[tuple[Any, Any]]:
    """Lend standard input and output to the caller alone: others print to standard error, and read nothing.

    The process's own descriptors change, so that this holds for libraries in C and for child processes, too.
    """
    sys.stdout.flush()
    ours = [os.dup(0), os.dup(1)]
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    os.close(empty)
    try:
        with (
            os.fdopen(ours[0], "rb", buffering=0, closefd=False) as source,
            os.fdopen(ours[1], "wb", buffering=0, closefd=False) as target,
            redirect_stdout(sys.stderr),
        ):
            yield source, target
    finally:
        sys.stdout.flush()
        for number, file in enumerate(ours):
            os.dup2(file, number)
            os.close(file)
