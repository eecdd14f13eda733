"""Load from several processes while servers fail, and what must hold then. Law: what was acknowledged is counted."""

from __future__ import annotations

import itertools
import queue
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from below import Worker

from distributed_state import AsyncStateStore

IDS = [f"s{number}" for number in range(12)]  # over all nodes of a cluster, and few enough to be contended


class Load:
    """What the processes said."""

    def __init__(self, workers: Sequence[Worker], settings: dict[str, Any], ids: Sequence[str]) -> None:
        self.settings, self.ids = settings, list(ids)
        self._workers = workers
        self.versions: dict[str, list[int]] = defaultdict(list)
        self.times: dict[str, list[float]] = defaultdict(list)
        self.locked: Counter[str] = Counter()
        self.failed: list[str] = []
        self.emitted: list[str] = []
        self._ended = False

    def end(self) -> None:
        """Let them finish what they do, and read what they said."""
        if self._ended:
            return
        self._ended = True
        for worker in self._workers:
            worker.say("end")
        for worker in self._workers:
            for line in worker.lines():
                self._hear(line)
            assert worker.process.exit_code == 0

    def _hear(self, line: str) -> None:
        word, id, *rest = line.split(" ", 2)
        if word == "event":
            self.emitted.append(id)
            return
        if word == "ack":
            version, at = rest[0].split(" ")
            self.versions[id].append(int(version))
            self.times[id].append(float(at))
        elif word == "locked":
            self.locked[id] += 1
        else:
            self.failed.append(line)

    def gap(self, ids: Sequence[str] = (), since: float = 0.0, until: float = float("inf")) -> float:
        """The longest time in which none of these was acknowledged."""
        times = sorted(at for id in ids or self.ids for at in self.times[id] if since <= at <= until)
        times = [since, *times] if since else times
        return max(later - before for before, later in itertools.pairwise(times))

    def acknowledged(self) -> int:
        return sum(map(len, self.versions.values()))

    async def check(self) -> None:
        """Assert what is promised where no server failed, after `end`."""
        assert not self.failed, self.failed[:3]
        async with AsyncStateStore.open(**self.settings) as store:
            while await store.admin.archive():
                pass
            rows = _versions_in_sql(self.settings)
            for id in self.ids:
                session, acked = store.session(id), self.versions[id]
                now = await session.version(fresh=True)
                fields = await session.get_all(fresh=True)
                assert sorted(acked) == list(range(1, now + 1)), f"{id}: dense, each acknowledged once"
                assert fields["n"] + fields.get("locked", 0) == now, f"{id}: applied once"
                assert fields.get("locked", 0) == self.locked[id], f"{id}: nobody overwrote another one's"
                assert [change.version for change in await session.history()] == list(range(1, now + 1))
                assert rows[id] == list(range(1, now + 1)), f"{id}: archived once and in order"

    async def check_what_is_left(self) -> int:
        """Assert, after a failover that may have lost the last commits, that none was applied twice; how many it lost.

        Where commits were lost, a worker may still go on from what it had seen of them.
        """
        lost = 0
        async with AsyncStateStore.open(**{**self.settings, "archiver": False}) as store:
            for id in self.ids:
                version = await store.session(id).version(fresh=True)
                fields = await store.session(id).get_all(fresh=True)
                gone = max(0, len(self.versions[id]) - version)
                assert abs(fields["n"] + fields.get("locked", 0) - version) <= gone, id
                lost += gone
        return lost


def _versions_in_sql(settings: dict[str, Any]) -> dict[str, list[int]]:
    from sqlalchemy import create_engine, text

    found: dict[str, list[int]] = defaultdict(list)
    engine = create_engine(settings["archive"])
    with engine.connect() as connection:
        columns = "SELECT r.record, c.version FROM changes c JOIN records r ON r.key = c.record WHERE r.namespace = :n"
        named = {"n": settings["namespace"]}
        for record, version in connection.execute(text(f"{columns} ORDER BY r.record, c.version"), named):
            found[record.rpartition(":")[2]].append(version)
    engine.dispose()
    return found


class Listener:
    """A process that hears every event."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.seen: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.resyncs = 0

    def check(self, emitted: Sequence[str]) -> None:
        """Assert that each event was seen once and in order, or that it was told to resync."""
        missing = set(emitted)
        deadline = time.monotonic() + 20
        while missing and time.monotonic() < deadline:
            try:
                partition, *rest = self._worker.line(1.0).split(" ")
            except queue.Empty:
                if self.resyncs:
                    break
                continue
            if partition == "resync":
                self.resyncs += 1
                continue
            self.seen[partition].append((int(rest[0]), rest[1]))
            missing.discard(rest[1])
        assert not missing or self.resyncs, f"{len(missing)} of {len(emitted)} were not seen"
        for events in self.seen.values():
            numbers = [number for number, _ in events]
            assert numbers == sorted(set(numbers)), "in order, and once"
            assert self.resyncs or numbers == list(range(numbers[0], numbers[-1] + 1)), "without a gap"
            assert len({id for _, id in events}) == len(events)


@contextmanager
def listening(**settings: Any) -> Iterator[Listener]:
    """Hear every event while the block runs."""
    with Worker("listen", **settings) as worker:
        assert worker.line() == "opened"
        yield Listener(worker)


@contextmanager
def load(count: int = 4, ids: Sequence[str] = IDS, **settings: Any) -> Iterator[Load]:
    """Processes of both APIs that commit to the same sessions while the block runs."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker("serve", ids=list(ids), me=me, api=("blocking", "asyncio")[me % 2], **settings))
            for me in range(count)
        ]
        for worker in workers:
            assert worker.line() == "opened"
        yield (running := Load(workers, settings, ids))
        running.end()


def now() -> float:
    """By the clock in which acknowledgements are timed."""
    return time.monotonic()
