"""Workers beside RQ and arq: jobs of one size, on one server, in as many processes, in turns."""

from __future__ import annotations

import statistics
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from deploy.load.rows import Row, at_least
from deploy.load.workers.handlers import COUNT
from deploy.load.workers.job_queues import KINDS, QUEUE
from deploy.load.workers.processes import PROCESSES, Place, pace, served_pace
from distributed_state.programs.servers.process import guard, unguard

MISSING = "beside RQ and arq: python3 -m venv FOLDER && FOLDER/bin/pip install rq arq, then --peers FOLDER"
WHAT = {
    "rq": "RQ, Worker: a fork for each job (the default)",
    "rq-simple": "RQ, SimpleWorker: no forks",
    "arq": "arq as it is: 10 jobs at once, two looks a second",
    "arq-32": "arq, 32 jobs at once, a look each 10 ms",
}
_SHARE = {"rq": 0.1, "arq": 0.5}  # of the jobs, because these are slower
_PROGRAM = Path(__file__).with_name("job_queues.py")


def python(peers: Path | None) -> Path:
    """The interpreter that has RQ and arq. Raises ValueError that says how to install them."""
    if peers is None:
        raise ValueError(MISSING)
    found = peers / "bin" / "python"
    if (
        not found.exists()
        or subprocess.run([found, "-c", "import rq, arq"], capture_output=True, check=False).returncode
    ):
        raise ValueError(f"{peers} has no RQ and arq; {MISSING}")
    return found


def queues(place: Place) -> Iterator[Row]:
    """Inputs that two workers serve in a second, beside the jobs of other libraries."""
    interpreter = python(place.peers)
    paces: dict[str, list[float]] = {"ours": [], **{kind: [] for kind in KINDS}}
    for number in range(place.rounds):
        for kind, found in paces.items():
            place.show(f"queues: {kind}, round {number + 1} of {place.rounds}")
            place.client().flushall()
            if kind == "ours":
                found.append(_ours(place))
            else:
                found.append(_theirs(place, interpreter, kind, max(50, int(place.sessions * _SHARE.get(kind, 1)))))
    ours = statistics.median(paces.pop("ours"))
    best = max(paces, key=lambda kind: statistics.median(paces[kind]))
    for kind, found in paces.items():
        limit = 2 if kind == best else 0
        name = f"inputs served a second, {PROCESSES} processes"
        yield at_least(name, ours, statistics.median(found), limit, "/s", WHAT[kind])


def _ours(place: Place) -> float:
    """An input each for new sessions, which a turn serves and that sets a field. Nothing archives them meanwhile."""
    return served_pace(place, f"queues-{uuid.uuid4().hex[:8]}", COUNT, new=True)


def _theirs(place: Place, interpreter: Path, kind: str, count: int) -> float:
    library = kind.partition("-")[0]
    subprocess.run([interpreter, _PROGRAM, "post", library, place.url, str(count)], check=True)
    with place.client() as client, _peers(interpreter, kind, place.url):
        return pace(lambda: _left(client, library, count), count)


def _left(client: redis.Redis, library: str, count: int) -> int:
    if library == "arq":
        return int(client.zcard("arq:queue"))
    return count - int(client.zcard(f"rq:finished:{QUEUE}"))


@contextmanager
def _peers(interpreter: Path, kind: str, url: str) -> Iterator[None]:
    words = [interpreter, _PROGRAM, "work", kind, url]
    started = [
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
        for _ in range(PROCESSES)
    ]
    for each in started:
        guard(each.pid)
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()
            unguard(each.pid)
