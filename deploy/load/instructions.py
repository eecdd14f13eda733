"""What a `set` and a turn cost beside an earlier commit: instructions of the client, CPU of the server.

Law: both run the same program with their own package, in turn. The load of the machine hardly changes instructions.

Counted are the bytecode instructions of Python, and, if wanted, those of the processor, by valgrind: the difference of
two runs, so that the start of the process does not count. The server's CPU is that of the scripts, by INFO
commandstats, the least of some rounds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.load.rows import Row, at_most

LIMIT = 1.01
_HERE = Path(__file__).parents[2]
_ROUNDS = 3
_FEW, _MANY = 300, 1300  # calls under callgrind
PROGRAM = """
import json
import sys
import redis
from distributed_state import StateStore

url, namespace, kind, times = *sys.argv[1:4], int(sys.argv[4])
instructions = 0


def count(frame, event, arg):
    global instructions
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    instructions += event == "opcode"
    return count


def calls(name, times):
    for number in range(times):
        if kind == "set":
            session.set("n", f"{name}-{number}")
        else:
            with session.turn(request_id=f"{name}-{number}") as turn:
                turn["n"] = number


def cpu():
    client.config_resetstat()
    calls(f"cpu-{round}", 200)
    stats = client.info("commandstats")
    store.admin.archive()
    return sum(each["usec"] for name, each in stats.items() if "evalsha" in name) / 200


with StateStore.open(url, archive="memory", namespace=namespace, archiver=False, beat=0) as store:
    session = store.session("s")
    session.set("n", 0)
    if times:  # under callgrind
        calls("counted", times)
        sys.exit()
    client = redis.Redis.from_url(url)
    taken = [cpu() for round in range(10)]
    sys.settrace(count)
    calls("traced", 50)
    sys.settrace(None)
    print(json.dumps([min(taken), instructions / 50]))
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call."""

    cpu_us: float
    bytecode: float


def cost(url: str, folder: Path, kind: str, number: int) -> Cost:
    """What a call of this kind costs with the package in this folder; kinds are `set` and `turn`."""
    return Cost(*json.loads(_run(_command(url, folder, kind, number, 0), folder)))


def callgrind(url: str, folder: Path, kind: str) -> float:
    """The processor's instructions of the client for a call."""
    few, many = (_counted(url, folder, kind, times) for times in (_FEW, _MANY))
    return (many - few) / (_MANY - _FEW)


def _counted(url: str, folder: Path, kind: str, times: int) -> int:
    with tempfile.TemporaryDirectory() as there:
        log = Path(there) / "log"
        words = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={there}/out", f"--log-file={log}"]
        _run([*words, *_command(url, folder, kind, times, times)], folder)
        return int(re.findall(r"Collected : (\d+)", log.read_text())[0])


def _command(url: str, folder: Path, kind: str, number: int, times: int) -> list[str]:
    return [sys.executable, "-c", PROGRAM, url, f"{kind}-{folder.name}-{number}", kind, str(times)]


def _run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the program fails with the package in {folder}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def compared(url: str, base: Path, kind: str, what: str) -> Iterator[Row]:
    """Server CPU and bytecode instructions of a call, beside the same call of the base commit."""
    found: dict[Path, list[Cost]] = {_HERE: [], base.resolve(): []}
    for number in range(_ROUNDS):
        for folder, costs in found.items():
            costs.append(cost(url, folder, kind, number))
    ours, theirs = found.values()
    for name, of, unit in (
        ("server CPU", lambda each: each.cpu_us, "us"),
        ("bytecode instructions", lambda each: each.bytecode, ""),
    ):
        yield at_most(f"{name} of {what}", min(map(of, ours)), min(map(of, theirs)), LIMIT, unit, "the base commit")


def unhandled(place: Any) -> Iterator[Row]:
    """What handlers cost those who have none: a `set`, and a turn of a session without a handler."""
    show: Callable[[str], None] = place.show
    for kind, what in (("set", "a `set`"), ("turn", "a turn of a session without a handler")):
        show(f"unhandled: {what}")
        yield from compared(place.url, place.base, kind, what)
        if place.callgrind:
            show(f"unhandled: {what}, under callgrind: minutes")
            ours, theirs = (callgrind(place.url, folder, kind) for folder in (_HERE, place.base.resolve()))
            yield at_most(
                f"instructions of the client for {what}, callgrind", ours, theirs, LIMIT, "", "the base commit"
            )
