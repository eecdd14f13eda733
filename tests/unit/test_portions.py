"""What has a size, in portions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distributed_state.values.portions import portions


@given(st.lists(st.integers(0, 12)), st.integers(1, 10))
def test_portions_keep_the_order_and_are_as_large_as_they_may_be(sizes: list[int], most: int) -> None:
    found = list(portions(enumerate(sizes), most))
    assert [each for some in found for each in some] == list(range(len(sizes)))
    weights = [sum(sizes[each] for each in some) for some in found]
    assert all(weight <= most or len(some) == 1 for weight, some in zip(weights, found, strict=True))
    assert all(weight + sizes[some[0]] > most for weight, some in zip(weights, found[1:], strict=False))
