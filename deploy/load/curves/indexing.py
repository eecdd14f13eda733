"""What searching costs who writes. Law: the same commits on the same database, without an index, noted, and followed.

python -m deploy.load.curves.indexing           an archiver's passes, catching up, a search: PostgreSQL and SQLite
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from distributed_state import StateStore
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Batch, Cursor
from distributed_state.programs.servers import postgres_server
from distributed_state.values.journal import JournalEntry, pack

_WORDS = [f"word{number}" for number in range(5000)]
_BATCH = 1000
_PASSES = 20
_RECORDS = 500
_COMMITS = 400


def _entry(number: int) -> JournalEntry:
    chosen = random.Random(number)
    said = " ".join(chosen.choices(_WORDS, k=40))
    steps = [(b"m", b"%d" % (number // _RECORDS), b'!1000 {"role":"user","content":"%b"}' % said.encode())]
    record = f"session:c{number % _RECORDS}"
    if number < _RECORDS:
        steps.append((b"s", b"#owner", b"u1"))
    version = number // _RECORDS + 1
    return JournalEntry(number + 1, f"e.{number}", record, version, 1000 + number, "append", "", 0, pack(steps), 0)


class _Archiver:
    def __init__(self, cold: ColdStore) -> None:
        cold.register(1)
        minted = cold.mint(0, None)
        assert minted is not None
        self._cold, self._cursor, self._number = cold, minted, 0

    def seconds(self) -> float:
        """How long a pass of 1,000 messages takes."""
        entries = [_entry(number) for number in range(self._number, self._number + _BATCH)]
        at = self._cursor
        began = time.perf_counter()
        assert self._cold.archive([Batch(0, at.epoch, at.offset, entries, at.event)]).keys() == {0}
        taken = time.perf_counter() - began
        self._number += _BATCH
        self._cursor = Cursor(0, at.epoch, at.ordinal, entries[-1].offset, entries[-1].event)
        return taken


def _passes(url: str) -> None:
    """An archiver alone, with its changes noted, and with somebody who follows."""
    taken = {}
    for how in ("alone", "noted", "followed"):
        cold = ColdStore.open(url, how)
        archiver = _Archiver(cold)
        archiver.seconds()
        if how != "alone":
            cold.search.switch_on('{"dimensions":null,"elsewhere":false,"encrypted":false,"kinds":["field","item",'
                                  '"message"],"language":"simple"}', None)  # fmt: skip
        with _following(url, how) if how == "followed" else _nobody():
            taken[how] = median(archiver.seconds() for _ in range(_PASSES))
        if how == "noted":
            began = time.perf_counter()
            with StateStore.open(archive=url, namespace=how, partitions=1, search=True, archiver=False) as store:
                store.admin.update_index()
                rate = _BATCH * (_PASSES + 1) / (time.perf_counter() - began)
                began = time.perf_counter()
                for number in range(50):
                    store.search(f"word{number} word{number + 1}", match="any")
                search = (time.perf_counter() - began) / 50
            print(f"  catching up {rate:,.0f} messages/s; a search of two words among 21,000 {search * 1000:.1f} ms")
        cold.close()
    for how, seconds in taken.items():
        print(f"  {how:<10} {_BATCH / seconds:>8,.0f} commits/s, {seconds / taken['alone']:.2f} x alone")


@contextmanager
def _nobody() -> Iterator[None]:
    yield


@contextmanager
def _following(url: str, namespace: str) -> Iterator[None]:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    worker = context.Process(target=_follow, args=(url, namespace, ready, stop))
    worker.start()
    ready.wait()
    yield
    stop.set()
    worker.join()


def _follow(url: str, namespace: str, ready: threading.Event, stop: threading.Event) -> None:
    from distributed_state.errors import StateError

    def looked(_: object) -> None:
        ready.set()
        if stop.is_set():
            raise KeyboardInterrupt

    with StateStore.open(archive=url, namespace=namespace, partitions=1, search=True, archiver=False) as store:
        while not stop.is_set():
            try:
                store.admin.update_index(progress=looked)
            except StateError as error:
                print("  ", error)
            except KeyboardInterrupt:
                return


def _embedded(search: bool) -> float:
    """The seconds of an append to an embedded store, which is archived before it returns."""
    with tempfile.TemporaryDirectory() as folder:
        store = StateStore.open(archive=f"sqlite:///{folder}/a.db", search=search)
        session = store.session("c1")
        taken = []
        for number in range(_COMMITS):
            said = " ".join(random.Random(number).choices(_WORDS, k=40))
            began = time.perf_counter()
            session.append({"role": "user", "content": said})
            taken.append(time.perf_counter() - began)
        store.close()
        return median(taken)


if __name__ == "__main__":
    with postgres_server() as server:
        print("PostgreSQL")
        _passes(server.url)
    with tempfile.TemporaryDirectory() as place:
        print("SQLite")
        _passes(f"sqlite:///{place}/a.db")
    off, on = min(_embedded(False) for _ in range(3)), min(_embedded(True) for _ in range(3))
    print(f"embedded: an append {off * 1000:.2f} ms, with an index {on * 1000:.2f} ms, {on / off:.2f} x")
