"""Processes of our own that are spoken with in JSON lines: orders on their stdin, what they say on their stdout.

Law: who was started here is gone when `end` returns; a line that a kill cut off was not said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from distributed_state.cold.private_files import opener

Message = dict[str, Any]
_SAID = 2000


class WorkerProcess:
    """One process, from its start to its end."""

    def __init__(
        self, command: Sequence[str], listen: Callable[[Message | None], None], *, log: Path | None = None
    ) -> None:
        """Start it. A thread gives all that it says to `listen`, and None at its end; its stderr goes to `log`."""
        pipe = subprocess.PIPE
        self._log = log
        with nullcontext() if log is None else open(log, "ab", opener=opener) as errors:
            # Its own session: a Ctrl-C in the terminal is for us, who then end it.
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, encoding="utf-8", start_new_session=True
            )
        self._listener = threading.Thread(target=self._listen, args=(listen,), daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def _listen(self, listen: Callable[[Message | None], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):
                    listen(json.loads(line))
        listen(None)

    def send(self, message: Message) -> None:
        """Give it an order. That it is gone is told by None, not here."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """There are no more orders."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def terminate(self) -> None:
        """Ask it to end, by SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, as a crash would end it; what it said before is heard still."""
        self._process.kill()

    def wait(self, seconds: float) -> int | None:
        """Wait until it has ended; its exit code, None if it took longer."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def end(self) -> int:
        """Kill it unless it has ended, and hear the rest of what it said; its exit code."""
        self._process.kill()
        code = self._process.wait()
        self._listener.join()
        self.close()
        return code

    def complaint(self) -> str:
        """The end of what is in its log."""
        text = "" if self._log is None else self._log.read_text(errors="replace").strip()[-_SAID:]
        return text or "it said nothing"


class Parent:
    """Whoever started this process, as seen from here. From now on others' prints go to stderr."""

    def __init__(self) -> None:
        self._said = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)
        self._mutex = threading.Lock()

    def send(self, message: Message) -> None:
        """Say something, from any thread."""
        line = json.dumps(message) + "\n"
        with self._mutex:
            self._said.write(line)

    def orders(self) -> Iterator[Message]:
        """What it says, until it says no more or is gone."""
        for line in sys.stdin:
            yield json.loads(line)
