"""The names that scripts and commands touch, and the cluster slot of a name as the specification computes it."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest

from distributed_state.port.routing import Router
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


# Where the keys of a command stand. One that is in no list fails the test that meets it: say here where its keys are.
KEYLESS = {"TIME", "PING", "INFO", "CONFIG", "CLUSTER", "WAIT", "WAITAOF", "SCRIPT"}
FIRST = {
    "GET", "SET", "HGET", "HSET", "HMGET", "HGETALL", "HKEYS", "HDEL", "PEXPIRE", "PTTL", "TTL", "TYPE", "EXISTS",
    "XRANGE", "XREVRANGE", "XLEN", "ZADD", "ZREM", "ZCARD", "ZSCORE", "ZRANGE", "ZRANGEBYSCORE", "HLEN", "HSTRLEN",
    "STRLEN", "SPUBLISH",
}  # fmt: skip
ALL = {"DEL", "MGET", "UNLINK"}


def keys_of(words: Sequence[Any]) -> list[bytes]:
    """The keys that a command names, as the server finds them. Of a command that goes to all servers there are none."""
    name = words[0].decode().upper()
    if name in ("EVAL", "EVALSHA"):
        return list(words[3 : 3 + int(words[2])])
    assert name in KEYLESS | FIRST | ALL, f"{name}: say where its keys are, and whether each server has to be asked"
    return list(words[1:2] if name in FIRST else words[1:] if name in ALL else ())


@contextmanager
def commands_of_several_slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Commands whose keys lie in several slots, those that name none and yet go to whichever server, and unknown ones.

    In the list after the block.
    """
    found: list[str] = []

    def look(commands: Sequence[Any]) -> None:
        for words in commands:
            try:
                keys = keys_of(words)
                if len({slot(key) for key in keys}) != 1 and words[0] != b"PING":
                    found.append(f"{words[0]!r} {keys}")
            except AssertionError as error:
                found.append(str(error))

    exchange = Router.exchange

    async def looking(self: Router, commands: Sequence[Any]) -> list[Any]:
        look(commands)
        return await exchange(self, commands)

    with monkeypatch.context() as patched:
        patched.setattr(Router, "exchange", looking)
        yield found
