"""Names in Redis: no two ids share one, and a record's names share one slot."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slots import every_name, slot

from distributed_state import ConfigurationError
from distributed_state.values.keys import Keys, RecordKeys, tag
from distributed_state.values.model import SCOPES, Ref

pytestmark = pytest.mark.unit

always = settings(derandomize=True, deadline=None, database=None)
hostile = st.characters(exclude_categories=()) | st.sampled_from("{}:%\0\n*?[]lockwait#")
refs = st.builds(Ref, st.sampled_from(SCOPES), st.text(hostile, min_size=1, max_size=30))


@always
@given(refs, refs, st.sampled_from([1, 64, 1000]))
def test_two_records_share_no_name_of_their_own(one: Ref, other: Ref, partitions: int) -> None:
    keys = Keys("ns", partitions)

    def own(keys: RecordKeys) -> set[bytes]:
        return {keys.record, keys.lock, keys.wait, keys.hydration, keys.channel, keys.lock_channel}

    mine, theirs = own(keys.of(one)), own(keys.of(other))
    assert len(mine) == 6
    assert mine == theirs if one == other else not mine & theirs


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a", "a:lock"),
        ("a", "a:wait"),
        ("a:lock", "a%3Alock"),
        ("a", "h:session:a"),
        ("x}", "x"),
        ("{x}", "x"),
        ("A", "a"),
    ],
)
def test_ids_made_to_collide_do_not(one: str, other: str) -> None:
    keys = Keys("ns", 64)
    assert not every_name(keys, Ref("session", one), shared=False) & every_name(
        keys, Ref("session", other), shared=False
    )


@always
@given(refs, st.sampled_from([1, 64, 1000]))
def test_all_names_of_a_record_fall_into_one_slot(ref: Ref, partitions: int) -> None:
    assert len({slot(name) for name in every_name(Keys("ns", partitions), ref)}) == 1


@pytest.mark.parametrize("partitions", [1, 2, 12, 64, 1000, 1024])
def test_tags_spread_evenly_over_the_slots(partitions: int) -> None:
    """Each partition lies in its own even share of the slots, so any number of nodes gets an even share of them."""
    slots = [slot(tag(partition, partitions).encode()) for partition in range(partitions)]
    assert [int(each / (16384 / partitions)) for each in slots] == list(range(partitions))
    for nodes in (3, 5, 12):
        if partitions >= nodes:
            on_each = Counter(each * nodes // 16384 for each in slots)
            # A node's border cuts at most one share at either end.
            assert all(abs(on_each[node] - partitions / nodes) < 2 for node in range(nodes))


def test_tags_are_stable() -> None:
    """Stored data lies under these names: they may never change."""
    assert [tag(partition, 64) for partition in (0, 1, 2, 63)] == ["0.178", "1.2", "2.303", "63.28"]
    names = Keys("ns", 64).of(Ref("session", "user-123"))
    assert (names.partition, names.record) == (13, b"ns:{13.18}:r:session:user-123")


@pytest.mark.parametrize("partitions", [1, 64, 1000])
def test_records_spread_over_the_partitions(partitions: int) -> None:
    keys, count = Keys("ns", partitions), 20_000
    found = Counter(keys.of(Ref("session", f"user-{number}")).partition for number in range(count))
    assert len(found) == partitions
    assert max(found.values()) < 3 * count / partitions


def test_namespaces_share_no_name() -> None:
    ref = Ref("session", "x")
    assert not every_name(Keys("a", 64), ref) & every_name(Keys("b", 64), ref)


@pytest.mark.parametrize("namespace", ["", "a:b", "a{b}", "a b", "é", "x" * 65, "a\n", "*"])
def test_a_namespace_that_could_break_a_name_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigurationError, match="namespace"):
        Keys(namespace, 64)


@pytest.mark.parametrize("partitions", [0, -1, 1025])
def test_a_number_of_partitions_out_of_range_is_refused(partitions: Any) -> None:
    with pytest.raises(ConfigurationError, match="partitions"):
        Keys("ns", partitions)


@given(refs, st.sampled_from([1, 64, 1024]))
def test_a_channel_says_whose_changes_are_published_on_it(ref: Ref, partitions: int) -> None:
    keys = Keys("a.b-c_d", partitions)
    assert keys.text_of(keys.of(ref).channel) == ref.text
