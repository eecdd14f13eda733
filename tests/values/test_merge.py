"""Three-way merges of fields, by themselves: the same whoever comes first, and nobody's change is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_state import Conflict, InvalidValue, merge
from distributed_state.merge import append, last_writer, maximum, minimum, three_way, union
from distributed_state.values import codec
from distributed_state.values.field_ttl import wrap

pytestmark = pytest.mark.unit

FORM = codec.Codec("", "session:s")
items = st.lists(st.integers(0, 8), max_size=6, unique=True)
numbers = st.integers(-100, 100)


def stored(fields: dict[str, Any]) -> dict[bytes, bytes]:
    return {name.encode(): codec.encode(value) for name, value in fields.items()}


def steps(base: dict[str, Any], wanted: dict[str, Any]) -> dict[bytes, merge.Operation]:
    """What a writer sends to make `wanted` of `base`."""
    found = {}
    for key in base.keys() | wanted.keys():
        name = key.encode()
        if key not in wanted:
            found[name] = (b"d", name, b"")
        elif key not in base or base[key] != wanted[key]:
            found[name] = (b"s", name, codec.encode(wanted[key]))
    return found


def second(base: dict[str, Any], first: dict[str, Any], mine: dict[str, Any], **policies: Any) -> dict[str, Any] | None:
    """The state after both committed, `mine` the later; None if the second's change would run again."""
    merged = three_way(FORM, steps(base, mine), stored(base), stored(first), policies)
    if merged is None:
        return None
    state = dict(first)
    for name, (kind, _, value) in steps(base, mine).items():
        key = name.decode()
        if kind == b"s":
            state[key] = merged[key] if key in merged else codec.decode(value)
        else:
            state.pop(key, None)
    return state


@given(items, items, items)
def test_unions_commute(base: list[int], one: list[int], other: list[int]) -> None:
    assert sorted(union(base, one, other)) == sorted(union(base, other, one))


@given(items, items, items)
def test_a_union_holds_what_either_added_and_nothing_that_either_removed(
    base: list[int], one: list[int], other: list[int]
) -> None:
    merged = set(union(base, one, other))
    added, removed = (set(one) | set(other)) - set(base), set(base) - (set(one) & set(other))
    assert added <= merged
    assert not removed & merged
    assert merged == (set(base) | added) - removed
    assert len(union(base, one, other)) == len(merged)


@given(numbers, numbers, numbers)
def test_the_largest_and_the_smallest_commute(base: int, one: int, other: int) -> None:
    assert maximum(base, one, other) == maximum(base, other, one) == max(one, other)
    assert minimum(base, one, other) == minimum(base, other, one) == min(one, other)


@given(items, items, items)
def test_appending_keeps_every_item_in_the_order_of_commits(base: list[int], one: list[int], other: list[int]) -> None:
    assert append(base, base + one, base + other) == base + one + other


def test_appending_to_a_list_that_was_rewritten_is_no_append() -> None:
    with pytest.raises(Conflict):
        append([1, 2], [1, 2, 3], [2, 4])


states = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3), max_size=4)


@given(states, states, states)
def test_without_policies_a_merge_keeps_both_changes_or_is_not_made(
    base: dict[str, int], one: dict[str, int], other: dict[str, int]
) -> None:
    merged = second(base, one, other)
    changed = [{key for key in base.keys() | each.keys() if base.get(key) != each.get(key)} for each in (one, other)]
    if merged is None:
        assert any(one.get(key) != other.get(key) for key in changed[0] & changed[1]), "nothing stood in the way"
        return
    for side, keys in zip((one, other), changed, strict=True):
        assert all(merged.get(key) == side.get(key) for key in keys), "a change was lost"
    assert all(merged.get(key) == base.get(key) for key in "abcd" if key not in changed[0] | changed[1])


@given(states, states, states)
def test_two_writers_come_to_the_same_whoever_is_first(
    base: dict[str, int], one: dict[str, int], other: dict[str, int]
) -> None:
    policies = dict.fromkeys("abcd", maximum)
    there, back = second(base, one, other, **policies), second(base, other, one, **policies)
    assert there == back


def test_a_merge_is_not_made_over_a_deletion_a_deadline_or_a_phase() -> None:
    base = {"n": 1}
    policies = {"n": last_writer}
    assert second(base, {"n": 2}, {"n": 3}, **policies) == {"n": 3}
    assert second(base, {}, {"n": 3}, **policies) is None, "they deleted what I changed"
    assert second(base, {"n": 2}, {}, **policies) is None, "I deleted what they changed"
    assert second(base, {}, {}, **policies) == {}, "both deleted it"
    mine = steps(base, {"n": 3})
    assert three_way(FORM, mine, stored(base), {b"n": wrap(b"2", 1e9)}, policies) is None
    assert three_way(FORM, mine, stored(base), stored(base) | {b"#phase": b"done"}, policies) is None


def test_a_policy_that_fails_is_named() -> None:
    def broken(base: Any, theirs: Any, mine: Any) -> Any:
        raise KeyError("x")

    with pytest.raises(InvalidValue, match="'n': the merge policy raised KeyError"):
        second({"n": 1}, {"n": 2}, {"n": 3}, n=broken)
    with pytest.raises(InvalidValue, match="'n': merges lists, not a int"):
        second({"n": 1}, {"n": 2}, {"n": 3}, n=union)
    with pytest.raises(InvalidValue, match="'n': the merge policy raised TypeError"):
        second({"n": 1}, {"n": "text"}, {"n": 3}, n=maximum)


def test_merge_takes_a_policy_by_field() -> None:
    for nonsense in (union, ["tags"], {"tags": "union"}, {1: union}, {"#tags": union}):
        with pytest.raises(InvalidValue):
            merge.check(nonsense)
