"""Loads that overtake each other on their way into hot: whoever comes later is never shown less."""

from __future__ import annotations

import threading
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_state.hot.cache import Hot
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.values.codec import Codec
from distributed_state.values.levels import Freshness

pytestmark = pytest.mark.unit


@pytest.fixture
def hot() -> Hot:
    port: Any = SimpleNamespace(monotonic=monotonic, mutex=threading.Lock, signal=threading.Event, here=bool)
    return Hot(port, entries=10, size=10_000, recent=3, max_staleness=2.0, evicted=lambda text: None)


@pytest.fixture
def received() -> Freshness:
    freshness = Freshness(0)
    freshness.prove(monotonic() + 60)
    return freshness


def at(version: int, epoch: str = "1-a") -> CachedRecord:
    return CachedRecord(Codec("", ""), epoch, version, {}, {})


def test_who_joins_a_load_that_was_overtaken_by_another_is_not_given_its_result(hot: Hot) -> None:
    """Its answer left the server first and arrives last; of the change between the two nothing was heard."""
    slow, _ = hot.take_off("s", freshness=None, alone=False)
    fast, _ = hot.take_off("s", freshness=None, alone=True)
    hot.land("s", fast, at(5))
    joined, ours = hot.take_off("s", freshness=None, alone=False)
    assert joined is slow
    assert not ours
    hot.land("s", slow, at(3))
    assert joined.result is None, "its readers look again"


def test_nobody_joins_a_load_that_is_older_than_hot_may_be(received: Freshness) -> None:
    """Its answer is late: what it brings may lack what was written since it was asked for."""
    now = 100.0
    port: Any = SimpleNamespace(monotonic=lambda: now, mutex=threading.Lock, signal=threading.Event, here=bool)
    hot = Hot(port, entries=10, size=10_000, recent=3, max_staleness=2.0, evicted=lambda text: None)
    slow, _ = hot.take_off("s", freshness=received, alone=False)
    now = 102.0
    assert hot.take_off("s", freshness=received, alone=False) == (slow, False)
    now = 102.1
    later, ours = hot.take_off("s", freshness=received, alone=False)
    assert ours
    now = 103.0
    assert hot.take_off("s", freshness=received, alone=False) == (later, False)


def test_one_that_brings_no_less_is_good_enough(hot: Hot) -> None:
    slow, _ = hot.take_off("s", freshness=None, alone=False)
    fast, _ = hot.take_off("s", freshness=None, alone=True)
    other, _ = hot.take_off("s", freshness=None, alone=True)
    hot.land("s", fast, at(5))
    hot.land("s", slow, at(5))
    assert slow.result is not None
    hot.land("s", other, at(1, "2-b"))
    assert other.result is not None, "another data id counts from the start"


def test_what_is_kept_gives_way_to_a_newer_one_that_is_not(hot: Hot, received: Freshness) -> None:
    fast, _ = hot.take_off("s", freshness=received, alone=True)
    hot.forget("s")
    kept, _ = hot.take_off("s", freshness=received, alone=True)
    hot.land("s", kept, at(3))
    assert hot.get("s") is not None
    hot.land("s", fast, at(5))
    assert hot.get("s") is None
