"""Processes that are spoken with in JSON lines: what they say is heard to the last whole line, and none stays."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from distributed_state.programs.worker_processes import WorkerProcess

ECHO = """
from distributed_state.programs.worker_processes import Parent
parent = Parent()
print("this is for nobody")
for order in parent.orders():
    parent.send({"heard": order})
"""
CUT = """
import os, sys, time
sys.stdout.write('{"whole": 1}\\n{"whole": ')
sys.stdout.flush()
time.sleep(60)
"""


def started(program: str, **options: Any) -> tuple[WorkerProcess, SimpleQueue[Any]]:
    said: SimpleQueue[Any] = SimpleQueue()
    return WorkerProcess([sys.executable, "-c", program], said.put, **options), said


def test_orders_are_answered_until_there_are_no_more(tmp_path: Path) -> None:
    worker, said = started(ECHO, log=tmp_path / "log")
    worker.send({"n": 1})
    worker.send({"n": "ü\n"})
    assert [said.get(timeout=30), said.get(timeout=30)] == [{"heard": {"n": 1}}, {"heard": {"n": "ü\n"}}]
    worker.close()
    assert said.get(timeout=30) is None
    assert worker.wait(30) == 0
    assert worker.end() == 0
    assert worker.complaint() == "this is for nobody", "prints do not garble what it says"


def test_what_a_kill_cut_off_was_not_said() -> None:
    worker, said = started(CUT)
    assert said.get(timeout=30) == {"whole": 1}
    assert worker.running
    worker.kill()
    assert worker.wait(30) == -9
    worker.send({"n": "told to nobody"})
    assert worker.end() == -9
    assert said.get(timeout=1) is None
    assert not worker.running
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
