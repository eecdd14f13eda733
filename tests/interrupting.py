"""Interruptions of our own code. Law: each is raised where the interpreter would run a signal handler that raises.

CPython runs those when a call has returned, at the beginning of a function, and at the end of a loop's round. `Steps`
goes through all such points of the package's code, one in each run, or through those of every n-th call.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import distributed_state

PACKAGE = str(Path(distributed_state.__file__).parent)
_AFTER = ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX")


class Interrupted(BaseException):
    """As a soft time limit, or Ctrl-C."""


@cache
def points(code: CodeType) -> frozenset[int]:
    """Where a function may be interrupted, by the offset of the next instruction.

    An interruption after a call is the call's: only where the next instruction is handled by the same `except` is it
    the same to raise there.
    """
    table = list(getattr(dis.Bytecode(code), "exception_entries", ()))

    def handler(offset: int) -> Any:
        return next(((each.start, each.target) for each in table if each.start <= offset < each.end), None)

    found = set[int]()
    before = None
    for each in dis.get_instructions(code):
        if before is not None and before.opname in _AFTER and handler(before.offset) == handler(each.offset):
            found.add(each.offset)
        if each.opname.startswith("JUMP_BACKWARD") and handler(each.argval) == handler(each.offset):
            found.add(each.argval)
        before = each
    return frozenset(found)


class Steps:
    """All points of what runs inside `interrupting`, one after the other: a new one each time, until `over`."""

    def __init__(self, every: int = 1) -> None:
        self.over = False
        self.where = ""
        self._every = every
        self._call = 1  # which call of a function of ours is interrupted,
        self._point = 1  # and where in it
        self._calls = self._points = 0
        self._inside: FrameType | None = None

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, one point is interrupted."""
        self._calls = self._points = 0
        self._inside = None
        raised = False
        sys.settrace(self._enters)
        try:
            yield
        except Interrupted:
            raised = True
            raise
        finally:
            sys.settrace(None)
            self._inside = None
            if raised:
                self._point += 1
            elif self._calls >= self._call:
                self._call, self._point = self._call + self._every, 1
            else:
                self.over = True

    def _enters(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        self._calls += 1
        if self._calls != self._call:
            return None
        self._inside = frame
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._runs

    def _runs(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame is not self._inside:
            return None
        if event == "return":
            self._inside = None
        elif event == "opcode" and frame.f_lasti in points(frame.f_code):
            self._points += 1
            if self._points == self._point:
                sys.settrace(None)
                self._inside = None
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise Interrupted
        return self._runs
