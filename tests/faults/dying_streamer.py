"""Turns whose workers die while they stream: the environment's PLACE is that of the store as JSON, argv how many.

Each session's first worker is a forked child that is killed before it executes its n-th line after its first chunk,
counted over this package and this file; n moves through the rest of the turn: its streaming, commit and release. Every
other session has a second worker, which serves the request again. Two inputs wait in each session, and its turn takes
them. One line on stdout for each session.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from functools import partial
from typing import Any

from dying import Lines, in_child

from distributed_state import Fenced, StateStore

CHUNKS = 4
INPUTS = ("q1", "q2")


def answer(place: dict[str, Any], session: str, attempt: int, last_line: int) -> int:
    """Serve the request and count the lines; be killed before the given one."""
    lines = Lines(__file__, last_line)
    # It may be too slow for its lease.
    with StateStore.open(**place, stream_interval=0.0) as store, suppress(Fenced):
        with store.session(session).turn(request_id="r", ttl=1.0, wait=30) as turn:
            if turn.repeated:
                return lines.count
            turn.stream(f"{attempt}:1")
            sys.settrace(lines.trace)
            turn.append(*(each.message for each in turn.take()))
            for number in range(2, CHUNKS + 1):
                turn.stream(f"{attempt}:{number}")
            turn.append({"role": "assistant", "content": str(attempt)})
            turn.outcome = attempt
        sys.settrace(None)
    return lines.count


def main() -> None:
    """Let a worker die at points spread over the turn, each in a session of its own."""
    place, deaths = json.loads(os.environ["PLACE"]), int(sys.argv[1])
    with StateStore.open(**place) as store:
        for session in (*(f"whole{at}" for at in range(3)), *(f"s{death}" for death in range(deaths))):
            for text in INPUTS:
                store.session(session).post({"role": "user", "content": text}, request_id=text)
    # The first turn at a server also sends it the scripts, and any turn may have to repeat a call.
    lines = min(in_child(partial(answer, place, f"whole{at}", 1))[1] for at in range(3))
    for death in range(deaths):
        session, line = f"s{death}", 1 + lines * death // deaths
        killed, _ = in_child(partial(answer, place, session, 1), line)
        if death % 2:
            in_child(partial(answer, place, session, 2))
        print(json.dumps([session, line, killed]), flush=True)  # noqa: T201 - the pipe to the test


if __name__ == "__main__":
    main()
