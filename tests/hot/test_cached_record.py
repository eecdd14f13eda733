"""A record as hot keeps it, after a change."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_state.hot.cached_record import CachedRecord
from distributed_state.values.codec import Codec
from distributed_state.values.journal import Op
from distributed_state.values.model import NEXT

pytestmark = pytest.mark.unit

always = settings(derandomize=True, deadline=None, database=None)
names = st.sampled_from([b"a", b"b", b"cc", b"#phase", b"#owner"])
steps = st.one_of(
    st.builds(Op, st.just(b"s"), names, st.binary(max_size=9)),
    st.builds(Op, st.just(b"d"), names, st.just(b"")),
    st.builds(Op, st.just(b"c"), st.just(b""), st.just(b"")),
    st.builds(Op, st.just(b"w"), st.just(b""), st.integers(0, 500).map(lambda n: b"%d" % n)),
    st.builds(Op, st.just(b"m"), st.integers(0, 500).map(lambda n: b"%d" % n), st.binary(max_size=9)),
    st.builds(Op, st.just(b"l"), st.just(b""), st.just(b"label")),
)


@always
@given(st.lists(st.lists(steps, max_size=5), max_size=6))
def test_the_size_that_is_carried_on_is_the_size_that_would_be_measured(changes: list[list[Op]]) -> None:
    entry = CachedRecord(Codec("", ""), "e", 1, {b"a": b"1", NEXT: b"7"}, {})
    for version, ops in enumerate(changes, 2):
        entry = entry.after(version, ops, 3)
        measured = CachedRecord(Codec("", ""), "e", version, entry.fields, entry.messages)
        assert (entry.size, entry.fields_size) == (measured.size, measured.fields_size)
