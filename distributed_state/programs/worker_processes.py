"""Worker processes that speak JSON lines: orders on their stdin, reports on their stdout.

Law: a process has ended when `end` returns; a line cut off by a kill counts as not sent. The replay, the demo, the load
generator and the matrix of faults all use it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from distributed_state.settings import private_opener

Message = dict[str, Any]
_SAID = 2000


class WorkerProcess:
    """One process, from its start to its end."""

    def __init__(
        self,
        command: Sequence[str],
        listen: Callable[[Any], None],
        *,
        read: Callable[[str], Any] = json.loads,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process. A thread passes its lines, parsed by `read`, to `listen`, and None at its end.

        Its stderr goes to `log`, if given.
        """
        pipe = subprocess.PIPE
        self._log = log
        with nullcontext() if log is None else open(log, "ab", opener=private_opener) as errors:
            # In a session of its own, so that a Ctrl-C in the terminal reaches only this process, which ends the
            # worker.
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=errors,
                env=environment,
                encoding="utf-8",
                start_new_session=True,
            )
        self._listener = threading.Thread(target=self._listen, args=(listen, read), daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code, None while the process runs."""
        return self._process.poll()

    def _listen(self, listen: Callable[[Any], None], read: Callable[[str], Any]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):
                    listen(read(line))
        listen(None)

    def send(self, message: Message | str) -> None:
        """Send an order to the process. If it has ended, nothing is raised: `listen` gets None."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Close its stdin after the last order."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def terminate(self) -> None:
        """Request its end, by SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process with SIGKILL, as a crash would; its earlier reports still arrive."""
        self._process.kill()

    def wait(self, seconds: float) -> int | None:
        """Wait until it has ended, and return its exit code; None if it took longer."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def end(self) -> int:
        """Kill the process unless it has ended, read the rest of its output, and return its exit code."""
        self._process.kill()
        code = self._process.wait()
        self._listener.join()
        self.close()
        return code

    def complaint(self) -> str:
        """The end of its log."""
        text = "" if self._log is None else self._log.read_text(errors="replace").strip()[-_SAID:]
        return text or "it said nothing"


class Parent:
    """The process that started this one. From now on, output of other code goes to stderr."""

    def __init__(self) -> None:
        self._said = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)
        self._mutex = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message to it, from any thread."""
        line = json.dumps(message) + "\n"
        with self._mutex:
            self._said.write(line)

    def orders(self) -> Iterator[Message]:
        """The parent's orders, until it closes the pipe or ends."""
        for line in sys.stdin:
            yield json.loads(line)
