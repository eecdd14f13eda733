"""The ids that a replica knows, which all its threads add to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from distributed_state.tiers import assembly
from distributed_state.tiers.assembly import KnownIds

pytestmark = pytest.mark.unit


def test_a_thread_adds_an_id_while_another_removes_the_oldest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit of the thread that removed it had been applied, and raised RuntimeError."""
    monkeypatch.setattr(assembly, "_KNOWN_IDS", 2)
    added_or_waits = threading.Event()

    class Interrupted(KnownIds):
        """As its oldest id is about to be read, another thread adds one, as far as it gets."""

        def __iter__(self) -> Iterator[str]:
            found = super().__iter__()
            if threading.current_thread() is not other:
                other.start()
                assert added_or_waits.wait(30)
            return found

    class Noted:
        """A mutex that notes when the other thread waits for it."""

        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            if threading.current_thread() is other:
                added_or_waits.set()
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    def add() -> None:
        known.add("session:other")
        added_or_waits.set()

    known: Any = Interrupted()
    known._mutex = Noted()
    other = threading.Thread(target=add)
    known.add("session:a")
    known.add("session:b", "token")
    known.add("session:c")
    other.join()
    assert dict(known) == {"session:c": "", "session:other": ""}


def test_the_newest_ids_are_kept_and_each_as_it_was_added_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "_KNOWN_IDS", 2)
    known = KnownIds()
    for text, token in ("a", "t1"), ("b", ""), ("a", "t2"), ("b", ""), ("c", ""):
        known.add(text, token)
    assert dict(known) == {"a": "t2", "c": ""}
