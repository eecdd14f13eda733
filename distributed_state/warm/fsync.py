"""Whether a write is on the primary's disk. Law: only a server that is known to keep its word is believed.

With `appendfsync always` an answer leaves after the disk was written, so the answer of a script that wrote is enough.
Redis from 7.2 on says by WAITAOF when a write is on the disk. Valkey (9.1 was measured) says so with `everysec` before
it is, and loses what it confirmed when the power goes: it is believed with `always` alone.

Design: section 14.
"""

from __future__ import annotations

from typing import Any

from distributed_state.errors import ConfigurationError, StateError
from distributed_state.port import Port, Words

_ALWAYS = "appendonly yes, appendfsync always and no-appendfsync-on-rewrite no"
_NEEDED = {b"appendonly": b"yes", b"appendfsync": b"always", b"no-appendfsync-on-rewrite": b"no"}
_POLICY: Words = (b"CONFIG", b"GET", *_NEEDED)
_WAITAOF = (7, 2)


class Fsynced:
    """Waits for the primary's disk."""

    def __init__(self, port: Port, wait_ms: int) -> None:
        self._port = port
        self._wait_ms = wait_ms
        self._says: dict[str, bool] = {}  # by server: whether its WAITAOF is believed

    async def possible(self, node: str) -> str:
        """Nothing can be missing just now. Raises ConfigurationError if this server never keeps its word."""
        if await self._waits(node):
            policy, done = await self._port.apart(node, [], [_POLICY, (b"WAITAOF", 0, 0, 1)])
            if isinstance(done, StateError):
                raise done
            found = {} if isinstance(policy, StateError) else _pairs(policy)
            if found.get(b"appendonly") == b"no" or found.get(b"appendfsync") == b"no":
                raise ConfigurationError(f"{node}: {_shown(found)}: nothing is ever waited for; configure {_ALWAYS}")
            return ""
        why = _lacking(await self._port.command_with(node, *_POLICY))
        if why:
            raise ConfigurationError(f"{node}: durability 'fsynced' cannot be kept: {why}; configure {_ALWAYS}")
        return ""

    async def behind(self, node: str) -> list[Words]:
        """What is sent behind the scripts that write."""
        return [(b"WAITAOF", 1, 0, self._wait_ms) if await self._waits(node) else _POLICY]

    async def reached(self, node: str, sent: list[Words], answers: list[Any]) -> str | None:
        """'' if the level was reached, else why not."""
        if sent[0][0] == b"WAITAOF":
            return "" if int(answers[0][0]) >= 1 else "the disk was not written in time"
        # Asked each time: who restarts or reconfigures a server tells nobody.
        return _lacking(answers[0])

    def forget(self, node: str) -> None:
        """Another server may answer there from now on."""
        self._says.pop(node, None)

    async def _waits(self, node: str) -> bool:
        known = self._says.get(node)
        if known is None:
            text = (await self._port.command_with(node, b"INFO")).decode(errors="replace")
            info = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            known = self._says[node] = believed(info)
            if known and info.get("aof_enabled") != "1":
                del self._says[node]
                raise ConfigurationError(
                    f"{node}: durability 'fsynced' cannot be kept: no append-only file; configure appendonly yes"
                )
        return known


def believed(info: dict[str, str]) -> bool:
    """Whether WAITAOF of this server says what is so, by its INFO: Redis' does, from 7.2 on."""
    if "valkey_version" in info or info.get("server_name", "redis") != "redis":
        return False
    numbers = tuple(int(part) for part in info.get("redis_version", "0").split(".")[:2] if part.isdigit())
    return numbers >= _WAITAOF


def _pairs(answer: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(answer[::2], answer[1::2], strict=True))


def _lacking(answer: list[bytes]) -> str:
    """Why this policy does not write the disk before each answer; '' if it does."""
    found = _pairs(answer)
    return "" if found.items() >= _NEEDED.items() else _shown(found)


def _shown(found: dict[bytes, bytes]) -> str:
    return ", ".join(f"{name.decode()} {found[name].decode()}" for name in _NEEDED if name in found)
