"""One process of a cell: it writes, reads or listens. Law: what it was answered is said at once, and judged elsewhere.

It speaks JSON lines. -> {"name": "w0", "role": "write", "api": "blocking", "levels": [...], "records": 2, "tasks": 1,
"clock": "file", "settings": {...}}; <- {"say": "refused", "level": ..., "why": ...} for each level that the store does
not offer, then {"say": "ready", "levels": [...]}; <- what happened; -> {"order": "stop"} <- {"say": "stopped"}; at the
end of its stdin it closes its stores. Until then they are open: what they remember can be put back.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

from deploy.load.matrix.histories import marked, name_of, names_in, now
from distributed_state import AsyncStateStore, ConfigurationError, Event, StateError, StateStore, Unavailable
from distributed_state.programs.worker_processes import Message, Parent

_PAUSE = 0.003
_READ_PAUSE = 0.01
_EMIT_EVERY = 10
_OPENS_FOR = 25.0
_AGAIN = 0.2
_EVENT = "matrix.wrote"


class Process:
    """What all roles share: who it is, what it is to do, and whom it says it to."""

    def __init__(self, parent: Parent, plan: Message) -> None:
        self.say = parent.send
        self.name: str = plan["name"]
        self.role: str = plan["role"]
        self.tasks: int = plan["tasks"]
        self.pause = _PAUSE if self.tasks == 1 else 0.0
        self.records: int = plan["records"]
        self.asked: list[str] = plan["levels"]
        self.settings: dict[str, Any] = plan["settings"]
        self.stop = threading.Event()

    def record_ids(self, level: str) -> list[str]:
        return [f"{level}/{number}" for number in range(self.records)]

    def settings_of(self, level: str, first: bool) -> dict[str, Any]:
        # One archiver for each process, as in a fleet; the level "archived" drives its own commits.
        return self.settings | {"durability": level, "archiver": first and self.role == "write"}

    def refused(self, level: str, error: Exception) -> None:
        self.say({"say": "refused", "level": level, "why": " ".join(str(error).split())})

    def content(self, level: str, number: int, start: float) -> tuple[str, dict[str, Any]]:
        """The name of a write, and what it writes: a message, a counter and a field."""
        name = name_of(self.name, level, number, start)
        text = marked(name)
        message = {"role": "user", "content": text}
        return name, {"append": [message], "increment": {"n": 1}, "set": {"last": text}}

    def answered(self, name: str, record: str, level: str, start: float, version: int = 0, error: str = "") -> None:
        fields = {"name": name, "record": record, "level": level, "start": start, "end": now()}
        self.say({"say": "write", **fields, "version": version, "error": error})

    def read(self, record: str, start: float, fields: dict[str, Any], fresh: bool) -> None:
        last = names_in(fields.get("last", ""))
        found = {"count": fields.get("n", 0), "last": last[0] if last else "", "fresh": fresh}
        self.say({"say": "read", "record": record, "start": start, "end": now(), **found})

    def heard(self, event: Event) -> None:
        if event.type == "resync":
            self.say({"say": "heard", "resync": str(event.data.get("reason", ""))})
        else:
            place = {"partition": event.partition, "epoch": event.epoch, "sequence": event.sequence}
            self.say({"say": "heard", "id": event.id, **place})


def text_of(error: StateError) -> str:
    """The error's kind, and what it says."""
    return f"{type(error).__name__}: {error}"[:200]


class BlockingProcess(Process):
    """On the sync API: a thread for each level and task."""

    def run(self, ended: threading.Event) -> None:
        with ExitStack() as stack:
            stores = self._open(stack)
            work = [threading.Thread(target=each, daemon=True) for each in self._work(stores)]
            self.say({"say": "ready", "levels": list(stores)})
            for thread in work:
                thread.start()
            for thread in work if self.role != "listen" else ():
                thread.join()
            self.stop.wait()
            self.say({"say": "stopped"})
            ended.wait()

    def _open(self, stack: ExitStack) -> dict[str, StateStore]:
        stores: dict[str, StateStore] = {}
        for level in self.asked:
            try:
                settings = self.settings_of(level, not stores)
                stores[level] = with_retry(lambda given=settings: StateStore.open(**given))  # type: ignore[misc]
                stack.callback(stores[level].close)
            except ConfigurationError as error:
                self.refused(level, error)
        return stores

    def _work(self, stores: dict[str, StateStore]) -> Iterable[Callable[[], None]]:
        for level, store in stores.items():
            if self.role == "write":
                for task in range(self.tasks):
                    yield lambda level=level, store=store, task=task: self._write(level, store, task)  # type: ignore[misc]
            elif self.role == "listen":
                yield lambda store=store: self._listen(store)  # type: ignore[misc]
        if self.role == "read":
            yield lambda: self._read(stores)

    def _write(self, level: str, store: StateStore, task: int) -> None:
        records = self.record_ids(level)
        for number in itertools.count(task, self.tasks):
            if self.stop.wait(self.pause):
                return
            record, start = records[number // self.tasks % len(records)], now()
            name, content = self.content(level, number, start)
            try:
                written = store.session(record).write(**content)
                self.answered(name, record, level, start, written.version)
                if number % _EMIT_EVERY == 0 and level == "memory":
                    self.say({"say": "emitted", "id": store.emit(_EVENT, {"n": number}, subject=record).id})
            except StateError as error:
                self.answered(name, record, level, start, error=text_of(error))

    def _read(self, stores: dict[str, StateStore]) -> None:
        store = next(iter(stores.values()))
        records = [record for level in stores for record in self.record_ids(level)]
        for number in itertools.count():
            if self.stop.wait(_READ_PAUSE):
                return
            record, start, fresh = records[number % len(records)], now(), number // len(records) % 2 == 0
            try:
                self.read(record, start, store.session(record).get_all(fresh=fresh), fresh)
            except StateError as error:
                self.say({"say": "unread", "record": record, "error": text_of(error)})

    def _listen(self, store: StateStore) -> None:
        with store.events() as events:
            self.say({"say": "listening"})
            for event in events:
                self.heard(event)


class AsyncProcess(Process):
    """On the asyncio API: a task for each level and task."""

    def run(self, ended: threading.Event) -> None:
        asyncio.run(self._run(ended))

    async def _run(self, ended: threading.Event) -> None:
        async with AsyncExitStack() as stack:
            stores: dict[str, AsyncStateStore] = {}
            for level in self.asked:
                try:
                    stores[level] = await self._opened(self.settings_of(level, not stores))
                    stack.push_async_callback(stores[level].close)
                except ConfigurationError as error:
                    self.refused(level, error)
            self.say({"say": "ready", "levels": list(stores)})
            each = [(level, store, task) for level, store in stores.items() for task in range(self.tasks)]
            await asyncio.gather(*(self._write(*one) for one in each))
            self.say({"say": "stopped"})
            await asyncio.to_thread(ended.wait)

    async def _opened(self, settings: dict[str, Any]) -> AsyncStateStore:
        deadline = time.monotonic() + _OPENS_FOR
        while True:
            try:
                return await AsyncStateStore.open(**settings)
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_AGAIN)

    async def _write(self, level: str, store: AsyncStateStore, task: int) -> None:
        records = self.record_ids(level)
        for number in itertools.count(task, self.tasks):
            await asyncio.sleep(self.pause)
            if self.stop.is_set():
                return
            record, start = records[number // self.tasks % len(records)], now()
            name, content = self.content(level, number, start)
            try:
                written = await store.session(record).write(**content)
                self.answered(name, record, level, start, written.version)
            except StateError as error:
                self.answered(name, record, level, start, error=text_of(error))


def follow(clock: Path) -> None:
    """From now on time.time() is off by the seconds in a file, which may jump; the monotonic clock is not."""
    real, off = time.time, 0.0

    def look() -> None:
        nonlocal off
        while True:
            with suppress(OSError, ValueError):  # it is just being written
                off = float(clock.read_text())
            time.sleep(0.05)

    time.time = lambda: real() + off
    threading.Thread(target=look, daemon=True).start()


def with_retry(opened: Callable[[], Any]) -> Any:
    """Open, and again while a server is away: who takes a killed worker's place may come before the servers do."""
    deadline = time.monotonic() + _OPENS_FOR
    while True:
        try:
            return opened()
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    parent = Parent()
    orders = parent.orders()
    plan = next(orders)
    follow(Path(plan["clock"]))
    process = (AsyncProcess if plan["api"] == "asyncio" else BlockingProcess)(parent, plan)
    ended = threading.Event()

    def obey() -> None:
        for order in orders:
            if order["order"] == "stop":
                process.stop.set()
        process.stop.set()
        ended.set()

    threading.Thread(target=obey, daemon=True).start()
    process.run(ended)


if __name__ == "__main__":
    main()
