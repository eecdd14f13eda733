"""Runs many cells, some side by side. Law: a Ctrl-C ends every process that was started."""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from deploy.load.matrix import report
from deploy.load.matrix.cells import Cell
from deploy.load.matrix.run import Lane, Outcome, run
from deploy.load.matrix.workers import Interrupted

INTERRUPTED = 130


def run_all(
    cells: Iterable[Cell], *, seconds: float, seed: int, lanes: int, shown: Callable[[Outcome], None]
) -> tuple[list[Outcome], bool]:
    """Run these, `lanes` at a time; what they came to in their order, and whether all were run."""
    stop, mutex = threading.Event(), threading.Lock()
    waiting: Iterator[tuple[int, Cell]] = enumerate(cells)
    done: dict[int, Outcome] = {}

    def work(lane: Lane) -> None:
        with suppress(Interrupted):
            while not stop.is_set():
                with mutex:
                    at, cell = next(waiting, (-1, None))
                if cell is None:
                    return
                outcome = run(cell, lane, seconds, seed + at)
                with mutex:
                    done[at] = outcome
                    shown(outcome)

    with tempfile.TemporaryDirectory(prefix="distributed-state-matrix-", ignore_cleanup_errors=True) as place:
        Path(place).chmod(0o755)
        with ThreadPoolExecutor(lanes) as pool:
            every = [Lane(Path(place) / f"lane-{at}", stop) for at in range(lanes)]
            try:
                for future in [pool.submit(work, lane) for lane in every]:
                    while True:
                        with suppress(TimeoutError):
                            future.result(0.5)
                            break
            except KeyboardInterrupt:
                stop.set()
                print("interrupted: ending the servers", file=sys.stderr)
            finally:
                stop.set()
                pool.shutdown()
                for lane in every:
                    lane.close()
    return [done[at] for at in sorted(done)], next(waiting, None) is None


def conclude(outcomes: Sequence[Outcome], *, whole: bool) -> int:
    """Print the sums; the exit code."""
    for text in [*report.sums(outcomes), *report.not_reached(outcomes)]:
        print(text)
    if not whole:
        return INTERRUPTED
    return 1 if any(each.missed for each in outcomes) else 0


def prepare() -> None:
    """SIGTERM ends a run as Ctrl-C does; what our own readers log is in the report, as the doctor's advice."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.getLogger("distributed_state").addHandler(logging.NullHandler())


def show(outcome: Outcome) -> None:
    """One cell, as it ends."""
    print(report.line(outcome), flush=True)
