"""One worker of a replay: serves any turn that it receives. Law: it keeps no state between turns.

As a process it speaks JSON lines, orders on stdin and reports on stdout:

    -> the settings of the store; not as arguments, because other users of the machine could read the passwords
    <- {"report": "ready"}
    -> {"conversation": id, "turn": n, "messages": [...]}
    <- {"report": "begin"}                                  before the turn's lease is requested
    <- {"report": "ack", "version": v, "first": m}          as soon as the commit's reply has arrived
    <- {"report": "already"}                                a predecessor committed this turn and was killed
    <- {"report": "done", "seconds": {...}}                 when the turn is finished; sometimes with "hot"
    <- {"report": "failed", "error": text}
    <- {"report": "bye", "hot": {...}}                      after the last order
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from distributed_state import Message, StateError, StateStore
from distributed_state.programs.worker_processes import Parent

LOCK_TTL = 2.0
LOCK_WAIT = 30.0
CONTEXT = 20
FIGURES_SHARE = 0.05
Report = Callable[[dict[str, Any]], None]


def serve_turn(store: StateStore, order: dict[str, Any], report: Report) -> None:
    """Serve one turn as an agent's worker would: take it, read the context, go through its phases, commit once."""
    report({"report": "begin"})
    watch = Stopwatch()
    try:
        with watch("turn"):
            _serve(store, order, report, watch)
    except StateError as error:
        report({"report": "failed", "error": f"{type(error).__name__}: {error}"})
        return
    # Figures cost a round trip, so only some turns report them; those of the last turns before a kill are lost.
    hot = {"hot": hot_figures(store)} if random.random() < FIGURES_SHARE else {}
    report({"report": "done", "seconds": watch.seconds} | hot)


def hot_figures(store: StateStore) -> dict[str, int]:
    """The hits and misses of this worker's hot tier."""
    stats = store.admin.stats()
    return {name: stats[name] for name in ("hot_hits", "hot_misses")}


def _serve(store: StateStore, order: dict[str, Any], report: Report, watch: Stopwatch) -> None:
    session = store.session(order["conversation"])
    number = order["turn"]
    messages = [Message.model_validate(fields) for fields in order["messages"]]
    with ExitStack() as stack:
        with watch("begin"):
            turn = stack.enter_context(session.turn(request_id=f"turn {number}", ttl=LOCK_TTL, wait=LOCK_WAIT))
        if turn.repeated:
            report({"report": "already"})
            return
        with watch("read"):
            turn.messages(last=CONTEXT)
        turn.transition("new_task")
        turn.transition("plan_ready")
        turn.append(*messages)
        turn["turn"] = number + 1
        turn["last_role"] = messages[-1].role
        turn.transition("task_complete")
        with watch("commit"):
            stack.close()
    assert turn.written is not None
    report({"report": "ack", "version": turn.written.version, "first": turn.written.first_message})


class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - start


def main() -> None:
    """Serve orders from stdin until it ends."""
    parent = Parent()
    orders = parent.orders()
    with StateStore.open(**next(orders)) as store:
        parent.send({"report": "ready"})
        for order in orders:
            serve_turn(store, order, parent.send)
        parent.send({"report": "bye", "hot": hot_figures(store)})


if __name__ == "__main__":
    main()
