"""The items that an exported record needs beside its changes. Law: whatever of its versions shows an item has it.

A file begins at a version, and changes in it may bring back what an older one showed. Of each such version it has all
items, the older ones first, each as far as it differs from the one before.

Design: sections 9, 11.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, func, select

from distributed_state.cold import bulk, item_rows, layers
from distributed_state.cold.entries import Parsed
from distributed_state.cold.layers import Layer
from distributed_state.cold.record_index import keys
from distributed_state.cold.tables import items


class OlderItem(NamedTuple):
    """An item as it was at version `at`, and who put it: collection, NUL and key; an empty frame: there was none."""

    at: int
    name: bytes
    origin: str
    data: bytes


def older(
    connection: Connection, namespace: str, record: str, base: int, rollbacks: Mapping[int, int]
) -> list[OlderItem]:
    """What a file needs that begins behind version `base`, 0: with the first one, where a fork shows others' items.

    `rollbacks` has for each later version that brings items back the one that it brings back.
    """
    points: dict[int, Sequence[Layer]] = {}
    for version, back in rollbacks.items():
        if 0 < back < base:
            points[back] = layers.below(connection, namespace, record, version)
    points[base] = (
        layers.of(connection, namespace, record, base) if base else layers.below(connection, namespace, record, 1)
    )
    found: list[OlderItem] = []
    before: dict[bytes, tuple[str, bytes]] = {}
    for at in sorted(points):
        shown = _shown(connection, namespace, points[at])
        found += [OlderItem(at, name, record, b"") for name in sorted(before.keys() - shown.keys())]
        found += [OlderItem(at, name, *shown[name]) for name in sorted(shown) if before.get(name) != shown[name]]
        before = shown
    return found


def _shown(connection: Connection, namespace: str, places: Sequence[Layer]) -> dict[bytes, tuple[str, bytes]]:
    """All items that layers show, the uppermost first: who put each, and its frame."""
    i = items.c
    numbers = keys(connection, namespace, {layer.source for layer in places})
    found: dict[bytes, tuple[str, bytes]] = {}
    for layer in places:
        number = numbers.get(layer.source, -1)
        query = select(i.collection, i.key, func.max(i.version)).group_by(i.collection, i.key)
        rows = connection.execute(query.where(i.record == number, i.version.between(layer.first, layer.last))).all()
        newest = [tuple(row) for row in rows if row[0] + b"\0" + row[1] not in found]
        for (collection, key, _), (origin, data) in item_rows.written(connection, number, newest).items():
            found[collection + b"\0" + key] = (origin or layer.source, data)
    return {name: item for name, item in found.items() if item[1]}


def bring(
    connection: Connection, namespace: str, record: str, key: int, older: Iterable[OlderItem], parsed: Sequence[Parsed]
) -> None:
    """Insert what a file has of older items, as the record's own, and note which of its changes bring items back."""
    rows = [(key, *item.name.split(b"\0", 1), item.at, None, item.data) for item in older]
    bulk.add(connection, items, sorted(rows, key=lambda row: row[:4]))
    # Of the record itself alone: what a file says of others is not believed.
    layers.note(connection, namespace, [item for item in parsed if item.shows is not None], {record: key}, {key})
