"""The names that the scripts of one record touch, and the cluster slot of a name as the specification computes it."""

from __future__ import annotations

from binascii import crc_hqx
from dataclasses import fields

from distributed_state.values.keys import Keys
from distributed_state.values.model import Ref


def slot(name: bytes) -> int:
    """CRC16 of what stands in the first braces, if anything does (Redis Cluster specification, hash tags)."""
    start = name.find(b"{")
    if start >= 0:
        stop = name.find(b"}", start + 1)
        if stop > start + 1:
            name = name[start + 1 : stop]
    return crc_hqx(name, 0) % 16384


def every_name(keys: Keys, ref: Ref, *, shared: bool = True) -> set[bytes]:
    """All keys and channels of a record, with those of its partition if `shared`. Found by type: none is left out."""
    record = keys.of(ref)
    partition = keys.partition(record.partition)
    owned = {value for each in fields(record) if isinstance(value := getattr(record, each.name), bytes)}
    common = {value for each in fields(partition) if isinstance(value := getattr(partition, each.name), bytes)}
    return (owned | common if shared else owned - common) - {record.text}
