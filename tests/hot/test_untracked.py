"""What hot keeps is nothing to the garbage collector, and is freed without it."""

from __future__ import annotations

import gc
import sys
import threading
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_state.hot import cached_record
from distributed_state.hot.cache import Hot
from distributed_state.hot.cached_record import CachedRecord, untrack
from distributed_state.values import field_ttl
from distributed_state.values.codec import Codec
from distributed_state.values.journal import Op
from distributed_state.values.levels import Freshness
from distributed_state.values.model import TIMED

pytestmark = pytest.mark.unit

RECORDS = 100
FRESH = Freshness(0)


def hot() -> Hot:
    port: Any = SimpleNamespace(monotonic=monotonic, mutex=threading.Lock, signal=threading.Event, here=bool)
    return Hot(port, entries=RECORDS, size=10**8, recent=3, max_staleness=2.0, evicted=lambda text: None)


def entry(**fields: bytes) -> CachedRecord:
    return CachedRecord(Codec("n", "r"), "e", 1, {k.encode(): v for k, v in fields.items()}, {1: b"{}"})


def behind(start: object) -> list[object]:
    """Everything that an object leads to, but for what it is made of: classes, and what those hold."""
    found: list[object] = []
    waiting = [start]
    while waiting:
        for each in gc.get_referents(waiting.pop()):
            if not isinstance(each, type) and not any(each is known for known in found):
                found.append(each)
                waiting.append(each)
    return found


def tracked_by(records: int) -> int:
    """How many objects more the collector walks while hot keeps so many records, read, merged and looked at."""
    cache = hot()
    gc.collect()
    before = len(gc.get_objects())
    for number in range(records):
        text = f"session:{number}"
        flight, _ = cache.take_off(text, freshness=FRESH, alone=True)
        cache.land(text, flight, entry(a=b"1", b=b'"x"'))
        cache.apply(text, "e", 2, [Op(b"s", b"a", b"2")])
        assert cache.entries[text].value("a", None) == 2
    del flight
    gc.collect()
    return len(gc.get_objects()) - before


def test_what_is_kept_is_not_walked() -> None:
    assert tracked_by(RECORDS) < RECORDS / 10


def test_without_that_each_record_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_record, "untrack", lambda *_: None)
    assert tracked_by(RECORDS) >= 2 * RECORDS


def test_what_is_kept_leads_to_nothing_that_is_walked_and_not_back_to_itself() -> None:
    kept = entry(a=field_ttl.wrap(b"1", 5.0), b=b"2")
    kept = kept.with_field(TIMED, b"1")
    kept.freshness = FRESH
    assert kept.living(6.0).value("b", None) == 2
    assert kept.living(6.0).raw(b"a") == kept.fields[b"a"]
    kept.untrack()
    reached = behind(kept)
    assert kept.living(6.0) in reached
    assert not any(each is kept for each in reached)
    assert {type(each) for each in reached if gc.is_tracked(each)} <= {Freshness, CachedRecord, dict, tuple}
    assert not any(gc.is_tracked(each) for each in (kept, kept.codec, kept.fields, kept.messages, kept.values))


def test_a_record_that_leads_back_to_itself_is_seen_by_this_test() -> None:
    kept = entry(a=b"1")
    kept.living(0.0)
    kept._rest = kept
    assert any(each is kept for each in behind(kept))
    kept._rest = None


def test_what_is_dropped_is_freed_without_a_collection() -> None:
    cache = hot()
    value = b'"a value of its own, which is long enough"'
    alone = sys.getrefcount(value)
    gc.disable()
    try:
        for number in range(10):
            flight, _ = cache.take_off(f"s{number}", freshness=FRESH, alone=True)
            timed = entry(a=value, b=field_ttl.wrap(b"1", 5.0)).with_field(TIMED, b"1")
            cache.land(f"s{number}", flight, timed)
            timed.living(6.0)
        del timed, flight
        assert sys.getrefcount(value) > alone
        cache.clear()
        assert sys.getrefcount(value) == alone
    finally:
        gc.enable()


@pytest.mark.parametrize("atom", [b"bytes", "text", 7, 1.5, None, ()])
def test_what_has_no_place_on_the_list_is_left_alone(atom: Any) -> None:
    untrack(atom)
    assert not gc.is_tracked(atom)
