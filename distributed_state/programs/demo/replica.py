"""One replica of the demo, as a process: an agent that logs every event it receives. Law: its log survives a SIGKILL.

It speaks JSON lines: it reads orders from stdin, and writes its log entries and the results of orders to stdout.

    -> {"name": ..., "notebook": path, "store": {...}}    the settings of the store, which may hold passwords
    <- {"kind": "start", "position": ..., "model": ..., "replica": ..., "pid": ...}
    -> {"order": n, "call": name, "arguments": {...}}     one of Orders
    <- {"kind": "done", "order": n} or {"kind": "failed", "order": n, "error": text}
    <- {"kind": "hook", "hook": name, "given": {...}, "found": {...}}
    <- {"kind": "event", "id": ..., "type": ..., "subject": ..., "position": ...}

An incomplete line in the log counts as not written. The log is compared with the stream: every event must be received
exactly once and in order.

The process ends on SIGTERM, and at the end of stdin.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from distributed_state import Agent, Event, StateError, StateStore
from distributed_state.events.config import digest
from distributed_state.programs.worker_processes import Message, Parent
from distributed_state.settings import private_opener

START = "start"
EVENT = "event"
HOOK = "hook"


@dataclass(frozen=True, slots=True)
class Received:
    """An event that a replica received."""

    id: str
    type: str
    subject: str


@dataclass(frozen=True, slots=True)
class Called:
    """A hook that ran: its arguments, and the state that it found in the conversation."""

    hook: str
    given: dict[str, Any]
    found: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Account:
    """The whole log of one replica, over its restarts. `models` are the values of its config, in order."""

    name: str
    received: tuple[Received, ...] = ()
    called: tuple[Called, ...] = ()
    models: tuple[str, ...] = ()
    lives: int = 1


def account(name: str, lines: Iterable[dict[str, Any]]) -> Account:
    """Parse the lines of a log."""
    received = []
    called = []
    models = []
    lives = 0
    for line in lines:
        kind = line["kind"]
        if kind == START:
            lives += 1
            models.append(line["model"])
        elif kind == EVENT:
            received.append(Received(line["id"], line["type"], line["subject"]))
        elif kind == HOOK:
            called.append(Called(line["hook"], line["given"], line["found"]))
            if line["hook"] == "on_config_update":
                models.append(line["given"]["model"])
    return Account(name, tuple(received), tuple(called), tuple(models), lives)


def read(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log; none if there is no file."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def position(lines: Iterable[dict[str, Any]]) -> str | None:
    """Return the position after the last event in a log, None if there is none."""
    return next((line["position"] for line in reversed(list(lines)) if "position" in line), None)


_ORDINARY = {
    "conversation.created": "on_new_conversation",
    "conversation.cleared": "on_new_conversation",
    "conversation.switched": "on_conversation_switched",
    "conversation.deleted": "on_conversation_deleted",
}
# A restarted replica takes only the newest config, so this hook may run less often.
_CONFIG = "on_config_update"


def differences(stream: Sequence[Event], audited: Sequence[Event], accounts: Iterable[Account]) -> list[str]:
    """Descriptions of all errors; empty if there are none.

    `stream` has the events in Redis, `audited` those in SQL, both in the order of each subject.
    """
    found = list(_archive(stream, audited))
    for each in accounts:
        found += _received(stream, each)
        found += _called(stream, each)
        found += _configured(stream, each)
    return found + list(_deleted_first(stream, list(accounts)))


def _archive(stream: Sequence[Event], audited: Sequence[Event]) -> Iterator[str]:
    kept = {each.id for each in audited}
    published = {each.id for each in stream}
    for each in stream:
        if each.id not in kept:
            yield f"SQL: {each.type} of {each.subject} is missing"
    for each in audited:
        if each.id not in published:
            yield f"SQL: {each.type} of {each.subject} was never in the stream"


def _received(stream: Sequence[Event], account: Account) -> Iterator[str]:
    """Check that each event was received once, and those of a subject in order."""
    names = {each.id: f"{each.type} of {each.subject}" for each in stream}
    times = Counter(each.id for each in account.received)
    for id, name in names.items():
        if times[id] != 1:
            yield f"{account.name}: {'missed' if not times[id] else f'received {times[id]} times'}: {name}"
    for each in account.received:
        if each.id not in names:
            yield f"{account.name}: received an event that is not in the stream: {each.type} of {each.subject}"
    should = defaultdict(list)
    did = defaultdict(list)
    for event in stream:
        should[event.subject].append(event.id)
    for received in account.received:
        did[received.subject].append(received.id)
    for subject, ids in should.items():
        if did[subject] != ids and sorted(did[subject]) == sorted(ids):
            yield f"{account.name}: events of {subject} came in another order"


def _called(stream: Sequence[Event], account: Account) -> Iterator[str]:
    """Check each subject's hooks: the right ones, in the order of its events, with the events' data."""
    should = defaultdict(list)
    did = defaultdict(list)
    for event in stream:
        if event.type != "config.changed":
            should[event.subject].append(_hook_of(event))
    ids = {event.id: event.subject for event in stream}
    for called in account.called:
        if called.hook != _CONFIG:
            did[_subject_of(called, ids)].append((called.hook, called.given))
    for subject in should.keys() | did.keys():
        if should[subject] != did[subject]:
            names = ", ".join(hook for hook, _ in did[subject]) or "none"
            wanted = ", ".join(hook for hook, _ in should[subject]) or "none"
            if names == wanted:
                wanted += " with other arguments"
            yield f"{account.name}: hooks of {subject} were {names}; expected {wanted}"


def _hook_of(event: Event) -> tuple[str, dict[str, Any]]:
    hook = _ORDINARY.get(event.type, "on_event")
    id = event.conversation_id
    if hook == "on_event":
        return hook, {"type": event.type, "id": event.id}
    if hook == "on_new_conversation":
        return hook, {"conversation_id": id, "is_clear": event.type == "conversation.cleared"}
    if hook == "on_conversation_switched":
        given = {name: event.data[name] for name in ("previous_id", "message_count")}
        return hook, {"conversation_id": id, **given}
    return hook, {"conversation_id": id}


def _subject_of(called: Called, ids: dict[str, str]) -> str:
    if called.hook == "on_event":
        return ids.get(called.given["id"], "nothing in the stream")
    return f"session:{called.given['conversation_id']}"


def _configured(stream: Sequence[Event], account: Account) -> Iterator[str]:
    """Check that each run of the process saw the configs in order, and ended with the last one."""
    should = [event.data["digest"] for event in stream if event.type == "config.changed"]
    models = [model for at, model in enumerate(account.models) if not at or model != account.models[at - 1]]
    did = [digest({"model": model}) for model in models]
    if account.lives == 1 and did[1:] != should:
        names = ", ".join(models[1:]) or "none"
        yield f"{account.name}: configs were {names}, not the {len(should)} that the fleet was given"
    elif should and did[-1:] != should[-1:]:
        yield f"{account.name}: ended with the config {models[-1] if models else 'none'}, not with the fleet's last"


def _deleted_first(stream: Sequence[Event], accounts: Sequence[Account]) -> Iterator[str]:
    """Check that the deleting replica's hook ran before the deletion, the others' after it, all with the last notes."""
    for event in stream:
        if event.type == "conversation.deleted":
            found = {
                each.name: called.found
                for each in accounts
                for called in each.called
                if (called.hook, called.given.get("conversation_id"))
                == ("on_conversation_deleted", event.conversation_id)
            }
            before = [name for name, it in found.items() if it["there"]]
            if len(before) != 1:
                whose = " and ".join(before) or "nobody"
                yield f"{event.subject} was there for the hooks of {whose}, not just of its deleter"
            if len({tuple(it["notes"]) for it in found.values()}) > 1:
                yield f"{event.subject} had another last state for some: {found}"


FIRST_MODEL = "small"


class Notebook:
    """Writes lines to the file, and reports them on stdout."""

    def __init__(self, file: Path, parent: Parent) -> None:
        self.name = file.stem
        self._file = open(file, "a", 1, "utf-8", opener=private_opener)  # noqa: SIM115 - for as long as the process lives
        self._parent = parent
        self._mutex = threading.Lock()

    def report(self, kind: str, **fields: Any) -> None:
        self._parent.send({"kind": kind, **fields})

    def note(self, kind: str, **fields: Any) -> None:
        with self._mutex:
            # One write for the line: after a SIGKILL it is either complete or missing.
            self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self.report(kind, **fields)


class DemoAgent(Agent):
    """Hooks like those that a user writes. `main_loop` also lists all events, which are verified later."""

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
                START,
                position=events.position,
                model=self.config.model,
                replica=self.store.replica,
                pid=os.getpid(),
            )
            while not self.stopping:
                event = events.next(timeout=0.1)
                if event is not None:
                    # The event and the position after it are one line, so it is logged once, whenever a kill happens.
                    self.note_event(event, events.position)

    def note_event(self, event: Event, position: str) -> None:
        self.book.note(EVENT, id=event.id, type=event.type, subject=event.subject, position=position)

    def note_hook(self, hook: str, given: dict[str, Any], **found: Any) -> None:
        self.book.note(HOOK, hook=hook, given=given, found=found)

    def on_new_conversation(self, conversation_id: str, is_clear: bool) -> None:
        self.note_hook("on_new_conversation", {"conversation_id": conversation_id, "is_clear": is_clear})

    def on_conversation_switched(self, conversation_id: str, previous_id: str, message_count: int) -> None:
        given = {"conversation_id": conversation_id, "previous_id": previous_id, "message_count": message_count}
        self.note_hook("on_conversation_switched", given)

    def on_conversation_deleted(self, conversation_id: str) -> None:
        # Both are the state before the deletion; only the deleting replica still finds the session itself.
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
        """Write a question, its answer, and a note of it."""
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
        self._store.admin.reload_config({"model": model})


def obey(agent: DemoAgent, book: Notebook, orders: Iterable[Message]) -> None:
    """Carry out orders until the last one, then stop the agent."""
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
    since = position(read(file))
    book = Notebook(file, parent)
    agent = kind(given["store"], book, since)
    threading.Thread(target=obey, args=(agent, book, orders), daemon=True).start()
    agent.run()


if __name__ == "__main__":
    main()
