"""Writes an archive of the present layout as SQL text, `tests/archives/<revision>.sql`, to be opened by later versions.

    python tests/archives/make.py

To be run once for each layout that is released. `expected.json` beside it says what is to be read from all of them.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from distributed_state import Message, StateStore
from distributed_state.cold.tables import HEAD

HERE = Path(__file__).parent
_WINDOW = 2.0


def write(store: StateStore) -> None:
    """Some of everything."""
    session = store.session("s", user="u1", actor="worker:1")
    for number in range(8):
        said = Message(role="user", content=f"message {number} ü🦆")
        session.write(set={"n": number, "nested": {"a": [1, None, "x"]}}, append=[said])
    session.checkpoint("half way")
    for number in range(8, 12):
        session.write(set={"n": number}, append=[Message(role="assistant", content=f"message {number}")])
    session.rollback(label="half way")
    session.fork("forked", version=5)
    store.session("forked").append(Message(role="user", content="of the fork"))
    store.user("u1").set("airline", "Delta")
    store.session("gone").set("n", 1)
    store.delete("gone")
    store.session("erased").set("n", 1)
    store.erase("erased")
    store.emit("order.placed", {"number": 7})
    store.session("s").write(tag={"run": ["r1", "r2"], "model": "small"})
    store.session("s").write(untag={"run": "r1"})


def read(store: StateStore) -> dict[str, Any]:
    """All that can be read of it, as JSON has it, without what differs each time: times and event ids."""
    found: dict[str, Any] = {}
    for id in ("s", "forked"):
        session = store.session(id)
        changes = session.history()
        states = [session.at(version=change.version) for change in changes]
        found[id] = {
            "fields": session.get_all(),
            "messages": [message.content for message in session.messages()],
            "history": [[change.version, change.kind, change.actor, change.set] for change in changes],
            "states": [[state.fields, [message.content for message in state.messages]] for state in states],
            "tags": session.tags(),
            "checkpoints": [[each.label, each.version] for each in session.checkpoints()],
        }
    found["user"] = store.user("u1").get_all()
    found["sessions"] = [each.id for each in store.sessions()]
    found["of the user"] = [each.id for each in store.sessions(user="u1")]
    found["tagged"] = [[each.id for each in store.sessions(tags={"run": run})] for run in ("r1", "r2")]
    found["exists"] = [store.session(id).exists() for id in ("gone", "erased")]
    found["events"] = sorted([event.type, event.subject, event.data] for event in store.admin.audit())
    loaded: dict[str, Any] = json.loads(json.dumps(found))
    return loaded


def main() -> None:
    """Write the archive, and what is read from it."""
    with tempfile.TemporaryDirectory() as folder:
        archive = f"sqlite:///{folder}/archive.db"
        with StateStore.open(archive=archive, op_window=_WINDOW, retry_for=0.5, timeout=0.5) as store:
            write(store)
            time.sleep(_WINDOW)
            store.session("s").append(Message(role="user", content="after it was packed"))
            assert store.admin.compact(older_than=_WINDOW)["changes"]
            expected = read(store)
        with sqlite3.connect(f"{folder}/archive.db") as database:
            text = "\n".join(database.iterdump())
    (HERE / f"{HEAD}.sql").write_text(text + "\n")
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")
    sys.stdout.write(f"{HEAD}.sql and expected.json written\n")


if __name__ == "__main__":
    main()
