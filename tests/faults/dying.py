"""Forked workers that are killed before they execute a given line of the package, or of the program that forks them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import distributed_state

PACKAGE = str(Path(distributed_state.__file__).parent)


class Lines:
    """Counts lines while `sys.settrace(lines.trace)` is set, and kills the process before the last one (0: never)."""

    def __init__(self, program: str, last: int) -> None:
        self.count = 0
        self._files = (PACKAGE, program)
        self._last = last

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """What `sys.settrace` takes."""
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        if event == "line":
            self.count += 1
            if self.count == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.trace


def in_child(work: Callable[[int], int], last_line: int = 0) -> tuple[bool, int]:
    """Do the work in a child; return whether it was killed, and how many lines it came to."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(work(last_line)).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with open(read) as pipe:
        counted = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True, last_line
    if status != 0:
        sys.exit(f"the worker failed at line {last_line or 'none'}")
    return False, int(counted)
