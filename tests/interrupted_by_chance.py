"""Interrupts locks and turns by real signals, in a process of its own: `interrupted_by_chance.py API COUNT SEED`.

A signal is raised only inside the package's code below a `with`: what it would break in the event loop itself is not
ours. Prints how many interruptions there were, and of how many the lease was still held afterwards.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import signal
import sys
import warnings
from types import FrameType
from typing import Any

from interrupting import PACKAGE, Interrupted
from store.test_interruptions import LOCK, TURN, held_by_a_task_for, held_for, is_held

from distributed_state import StateStore

_AGAIN = 0.00002  # seconds until a signal that came elsewhere is tried again
_LATEST = 0.0015  # seconds after which a lock or a turn is over
_BODIES = {held_for.__code__, held_by_a_task_for.__code__}
raised = 0


def interrupt(_: int, frame: FrameType | None) -> None:
    """Raise where a signal of a user would be a fault of ours; else come again."""
    global raised
    if frame is not None and frame.f_code.co_filename.startswith(PACKAGE) and _below_a_body(frame):
        raised += 1
        raise Interrupted
    signal.setitimer(signal.ITIMER_REAL, _AGAIN)


def _below_a_body(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _BODIES:
        frame = frame.f_back
    return frame is not None


def armed() -> None:
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00001, _LATEST))


def blocking(store: StateStore, count: int) -> int:
    left = tries = 0
    while raised < count:
        id, tries = f"s{tries % 1000}", tries + 1
        try:
            try:
                armed()
                held_for(random.choice([LOCK, TURN])(store.session(id)))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            left += is_held(store, id)
    return left


async def on_asyncio(store: StateStore, count: int) -> int:
    left = tries = 0
    while raised < count:
        id, tries = f"s{tries % 1000}", tries + 1
        try:
            try:
                armed()
                await held_by_a_task_for(random.choice([LOCK, TURN])(store.aio.session(id)))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            left += is_held(store, id)
    return left


def main(api: str, count: int, seed: int) -> None:
    # What is interrupted between its making and its first step is never awaited.
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None
    random.seed(seed)
    signal.signal(signal.SIGALRM, interrupt)
    with StateStore.open(archive="memory") as store:
        left: Any = asyncio.run(on_asyncio(store, count)) if api == "asyncio" else blocking(store, count)
        sys.stdout.write(f"{raised} interrupted, {left} left\n")
    gc.collect()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
