"""What processes of an agent's releases do to the same sessions. Law: one line on stdout per thing that happened."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from itertools import cycle
from typing import Any

from below import Worker
from pydantic import BaseModel

from distributed_state import Schema, StateError, StateStore


class Old(BaseModel):
    """The state as the first release has it."""

    n: int = 0
    name: str = "anon"


class New(BaseModel):
    """As the second release has it: what was counted has another name."""

    total: int = 0
    name: str = "anon"


def up(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {("total" if name == "n" else name): value for name, value in fields.items()}


def down(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {("n" if name == "total" else name): value for name, value in fields.items()}


# The canary reads both versions and writes the first; the second step leaves `write_version` out.
RELEASES: dict[str, Schema[Any]] = {
    "old": Schema(Old, version=1),
    "canary": Schema(New, version=2, upcasters={1: up}, write_version=1, downcasters={1: down}),
    "new": Schema(New, version=2, upcasters={1: up}, downcasters={1: down}),
}


class Release(Worker):
    """A process of one release."""

    crew = "releases.py"


def work(release: str, ids: list[str], **settings: Any) -> None:
    """Read, count up, and change under the optimistic guard, until a line comes: `did <id>`, or `failed <error>`."""
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    field = "n" if release == "old" else "total"
    with StateStore.open(**settings) as store:
        for id in cycle(ids):
            session = store.session(id, schema=RELEASES[release])
            try:
                session.load(fresh=True)
                session.increment(field)
                say(f"did {id}")
                session.modify(lambda state: setattr(state, field, getattr(state, field) + 1))
                say(f"did {id}")
            except StateError as error:
                say(f"failed {type(error).__name__}")
            if stop.wait(0.005):
                return


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the pipe to the test


if __name__ == "__main__":
    work(**json.loads(os.environ["ARGUMENTS"]))
