"""One replica of the demo, as a process: an agent that notes all that it hears. Law: what it noted survives a SIGKILL.

It speaks JSON lines: orders on stdin; on stdout what it notes, as it notes it, and what became of its orders.

    -> {"name": ..., "notebook": path, "store": {...}}    the settings of the store, which may hold passwords
    <- {"kind": "start", "position": ..., "model": ..., "replica": ..., "pid": ...}
    -> {"order": n, "call": name, "arguments": {...}}     one of Orders
    <- {"kind": "done", "order": n} or {"kind": "failed", "order": n, "error": text}
    <- {"kind": "hook", "hook": name, "given": {...}, "found": {...}}
    <- {"kind": "event", "id": ..., "type": ..., "subject": ..., "position": ...}

It ends on SIGTERM, and when stdin does.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from distributed_state import Agent, Event, StateError, StateStore
from distributed_state.cold.private_files import opener
from distributed_state.programs.demo import notebook
from distributed_state.programs.worker_processes import Message, Parent

FIRST_MODEL = "small"


class Notebook:
    """Writes lines to the file, and reports them on stdout."""

    def __init__(self, file: Path, parent: Parent) -> None:
        self.name = file.stem
        self._file = open(file, "a", 1, "utf-8", opener=opener)  # noqa: SIM115 - for as long as the process lives
        self._parent = parent
        self._mutex = threading.Lock()

    def report(self, kind: str, **fields: Any) -> None:
        self._parent.send({"kind": kind, **fields})

    def note(self, kind: str, **fields: Any) -> None:
        with self._mutex:
            # One write of one line: a SIGKILL leaves it whole or not there.
            self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self.report(kind, **fields)


class DemoAgent(Agent):
    """What a user would write: hooks. Beside them `main_loop` keeps the list of all events, to be verified later."""

    name = "demo"
    conversation_defaults = MappingProxyType({"notes": []})

    class Config(BaseModel):
        """Which language model the agent asks."""

        model: str = FIRST_MODEL

    def __init__(self, place: Mapping[str, Any], book: Notebook, since: str | None) -> None:
        super().__init__(lambda: StateStore.open(**place), since=since)
        self.book = book
        self._goes_on = since

    def main_loop(self) -> None:
        with self.store.events("*", since=self._goes_on) as events:
            self.book.note(
                notebook.START,
                position=events.position,
                model=self.config.model,
                replica=self.store.replica,
                pid=os.getpid(),
            )
            while not self.stopping:
                event = events.next(timeout=0.1)
                if event is not None:
                    # The event and the position behind it in one line: it is noted once, whenever a kill comes.
                    self.note_event(event, events.position)

    def note_event(self, event: Event, position: str) -> None:
        self.book.note(notebook.EVENT, id=event.id, type=event.type, subject=event.subject, position=position)

    def note_hook(self, hook: str, given: dict[str, Any], **found: Any) -> None:
        self.book.note(notebook.HOOK, hook=hook, given=given, found=found)

    def on_new_conversation(self, conversation_id: str, is_clear: bool) -> None:
        self.note_hook("on_new_conversation", {"conversation_id": conversation_id, "is_clear": is_clear})

    def on_conversation_switched(self, conversation_id: str, previous_id: str, message_count: int) -> None:
        given = {"conversation_id": conversation_id, "previous_id": previous_id, "message_count": message_count}
        self.note_hook("on_conversation_switched", given)

    def on_conversation_deleted(self, conversation_id: str) -> None:
        # Both are the state before it was deleted; only the replica that deletes it still finds the session itself.
        there = self.store.session(conversation_id).exists(fresh=True)
        notes = self.conversation.get("notes", [])
        self.note_hook("on_conversation_deleted", {"conversation_id": conversation_id}, there=there, notes=notes)

    def on_config_update(self, config: Config) -> None:
        self.note_hook("on_config_update", {"model": config.model})

    def on_event(self, event: Event) -> None:
        self.note_hook("on_event", {"type": event.type, "id": event.id})


class Orders:
    """Orders that a replica carries out, as users of the package write them."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def create(self, conversation: str) -> None:
        self._store.session(conversation).create()

    def write(self, conversation: str, note: str) -> None:
        """A question and its answer, and a note of it."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        session = self._store.session(conversation)
        session.append(*messages)
        session.append_to("notes", note)

    def switch(self, conversation: str, previous: str) -> None:
        self._store.session(conversation).switch(previous_id=previous)

    def clear(self, conversation: str) -> None:
        self._store.session(conversation).clear(messages=True)

    def delete(self, conversation: str) -> None:
        self._store.delete(conversation)

    def reload_config(self, model: str) -> None:
        self._store.reload_config({"model": model})


def obey(agent: DemoAgent, book: Notebook, orders: Iterable[Message]) -> None:
    """Carry out orders until there are no more, then let the agent end."""
    for order in orders:
        try:
            getattr(Orders(agent.store), order["call"])(**order["arguments"])
        except StateError as error:
            book.report("failed", order=order["order"], error=f"{type(error).__name__}: {error}")
        else:
            book.report("done", order=order["order"])
    agent.stop()


def main(kind: type[DemoAgent] = DemoAgent) -> None:
    """Run until SIGTERM or the end of stdin."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    parent = Parent()
    orders = parent.orders()
    given = next(orders)
    file = Path(given["notebook"])
    since = notebook.position(notebook.read(file))
    book = Notebook(file, parent)
    agent = kind(given["store"], book, since)
    threading.Thread(target=obey, args=(agent, book, orders), daemon=True).start()
    agent.run()


if __name__ == "__main__":
    main()
