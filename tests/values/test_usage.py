"""The counts of tokens in a session's fields."""

from __future__ import annotations

import pytest

from distributed_state import InvalidValue
from distributed_state.values.usage import OTHERS, Counted, Tokens, Usage, checked_model, checked_tokens, counted, used

pytestmark = pytest.mark.unit


def test_a_field_has_the_sums_and_the_share_of_its_commit() -> None:
    first = dict(counted({}, {"gpt-5": Tokens(1, 812, 90)}))
    assert first == {b"#ugpt-5": b"1 812 90 1 812 90"}
    second = dict(counted(first, {"gpt-5": Tokens(2, 8, 10)}))
    assert second == {b"#ugpt-5": b"3 820 100 2 8 10"}
    assert Counted.read(second[b"#ugpt-5"]) == Counted(Tokens(3, 820, 100), Tokens(2, 8, 10))
    assert used({**second, b"n": b"1", b"#qr": b"[]"}) == {"gpt-5": Tokens(3, 820, 100)}
    assert dict(counted(second, {})) == {}


def test_a_field_keeps_a_small_session_compact() -> None:
    """Redis stores a hash with a longer value as a table of twice the size."""
    stored = Counted(Tokens(10**5, 10**12 - 1, 10**12 - 1), Tokens(99, 10**8 - 1, 10**8 - 1)).stored
    assert len(stored) <= 64


def test_a_session_has_a_limited_number_of_models() -> None:
    """Their names may come from a client."""
    fields: dict[bytes, bytes] = {}
    for number in range(100):
        fields |= dict(counted(fields, {f"m{number}": Tokens(1, 1, 1), f"n{number}": Tokens(1, 1, 1)}))
    found = used(fields)
    assert len(found) == 33
    assert found[OTHERS] == Tokens(200 - 32, 200 - 32, 200 - 32)
    assert Usage.of(found).tokens == 400
    fields |= dict(counted(fields, {"m0": Tokens(1, 5, 0)}))
    assert used(fields)["m0"] == Tokens(2, 6, 1), "a known one is counted under its name"


@pytest.mark.parametrize("stored", [b"", b"1 2 3", b"1 2 3 4 5 6 7", b"1 2 3 4 5 -6", b"1 2 3 4 5 x", b" 1 2 3 4 5 6"])
def test_other_contents_are_refused(stored: bytes) -> None:
    with pytest.raises(ValueError, match="not six counts"):
        Counted.read(stored)


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", 7, None])
def test_a_models_name_is_a_text_that_sql_can_store(name: str) -> None:
    with pytest.raises(InvalidValue, match="name of a model"):
        checked_model(name)


def test_of_a_long_name_a_part_is_kept() -> None:
    assert checked_model("m" * 200) == "m" * 100


@pytest.mark.parametrize("given", [(-1, 0), (0, -1), (1.0, 0), (True, 0), (10**12 + 1, 0), ("1", 0)])
def test_tokens_are_counts(given: tuple[int, int]) -> None:
    with pytest.raises(InvalidValue, match="_tokens is an int from 0"):
        checked_tokens(*given)
