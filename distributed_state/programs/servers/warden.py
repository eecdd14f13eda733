"""Ends the servers that a killed process left behind. Law: it acts when its pipe closes, however its maker ended.

`atexit` and `finally` do not run in a process that is killed. So a small process that is nobody's business waits at the
other end of a pipe: the system closes that with the process that holds it.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from pathlib import Path

_PROGRAM = """if True:
    import os, shutil, signal, sys
    left = {}
    for line in sys.stdin:
        if line[0] == "+":
            left[line[1:-1]] = None
        else:
            left.pop(line[1:-1], None)
    for pid in (int(what) for what in left if what.isdigit()):
        try:
            if os.getsid(pid) == pid:  # else it ended, and another has its number
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for folder in (what for what in left if not what.isdigit()):
        shutil.rmtree(folder, ignore_errors=True)
"""
_pipe = -1  # its writing end; -1 before there is a warden


def begin(what: int | Path) -> None:
    """From now on this process, which leads a session, or this folder goes when we do."""
    global _pipe
    if _pipe < 0:
        reading, _pipe = os.pipe()
        command = [sys.executable, "-S", "-E", "-c", _PROGRAM]
        warden = subprocess.Popen(command, stdin=reading, start_new_session=True)
        os.close(reading)
        atexit.register(_end, os.getpid(), warden)
    _say(f"+{what}")


def over(what: int | Path) -> None:
    """It is gone already."""
    if _pipe >= 0:
        _say(f"-{what}")


def _say(line: str) -> None:
    os.write(_pipe, f"{line}\n".encode())


def _end(owner: int, warden: subprocess.Popen[bytes]) -> None:
    if os.getpid() == owner:
        os.close(_pipe)
        warden.wait()


def _after_fork() -> None:
    # Else our copy of the pipe would keep it open when our parent ends.
    global _pipe
    if _pipe >= 0:
        os.close(_pipe)
        _pipe = -1


os.register_at_fork(after_in_child=_after_fork)
