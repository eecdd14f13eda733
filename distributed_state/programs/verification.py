"""What the programs that verify a store share. Law: pure, and a difference is told in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def gaps(versions: Iterable[int]) -> Iterator[str]:
    """Say where versions first are not 1, 2, 3, and so on."""
    for wanted, version in enumerate(versions, 1):
        if version != wanted:
            yield f"version {version} stands where version {wanted} should"
            return


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same types all the way down: 1, 1.0 and True are three values."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)
