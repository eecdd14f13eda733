"""Splits what has a size into portions of about one size, as a transaction takes them. Law: the order stays.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def portions(sized: Iterable[tuple[T, int]], most: int) -> Iterator[list[T]]:
    """Lists of what comes with its size, each of `most` together at the most; what is larger is alone."""
    some: list[T] = []
    size = 0
    for each, its in sized:
        if some and size + its > most:
            yield some
            some, size = [], 0
        some.append(each)
        size += its
    if some:
        yield some
