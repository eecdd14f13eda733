"""The plain ways to do what the store does. Law: they ask the same of the server, and `same_commands` checks it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import hiredis
import redis

from deploy.load.baseline import WATCHED, login, watched
from distributed_state import StateStore

# What commit.lua does for one `set`, without its logic. `same_commands` checks that it is the same.
BARE = """
redis.call('TIME')
redis.call('HGET', KEYS[5], 'journal')
redis.call('HMGET', KEYS[1], '#v', '#ops', '#deleted', '#mn', '#size', '#lifetime', ARGV[1])
redis.call('GET', KEYS[2])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2], '#v', ARGV[3], '#ops', ARGV[4])
redis.call('PERSIST', KEYS[1])
redis.call('HSET', KEYS[5], 'journal', ARGV[4])
redis.call('XADD', KEYS[4], ARGV[3] .. '-0', 'h', ARGV[4], 'd', ARGV[2])
redis.call('SPUBLISH', KEYS[6], ARGV[4])
return 'ok ' .. ARGV[3] .. ' 1-abcdef12 0  ' .. ARGV[3] .. ' 1795237177 378000'
"""
OPS = "aabbccddeeff 1 1795237177378 1:1:abcdef12:0,"


class Bare:
    """redis-py calling BARE."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.count = 0
        self.name = f"bare{time.time_ns()}"
        self.sha = client.script_load(BARE) if isinstance(client, redis.Redis) else ""

    def call(self, n: int = 0) -> Any:
        self.count += 1
        key = f"{self.name}.{n}"
        keys = (f"{{{key}}}:r", f"{{{key}}}:l", f"{{{key}}}:h", f"{{{key}}}:j", f"{{{key}}}:m", f"{{{key}}}:c")
        return self.client.evalsha(self.sha, 6, *keys, "a", 7, self.count, OPS)


class RawSocket:
    """A blocking socket that sends the words of a `set` of ours, packed anew each time, and reads what comes back.

    The words are watched on the server. Only the number of the write is counted on, because a write that the server
    remembers would be answered without being carried out.
    """

    def __init__(self, url: str, fields: dict[str, Any]) -> None:
        given: dict[str, Any] = {"archive": "memory", "archiver": False, "beat": 0}
        with StateStore.open(url, namespace=f"{WATCHED}-raw", **given) as store:
            session = store.session("set")
            session.set_many(fields)
            session.set("a", 7)
            ((before, _),), ((words, _),) = (watched(url, lambda: session.set("a", 7)) for _ in range(2))
        changed = [at for at, (old, new) in enumerate(zip(before, words, strict=True)) if old != new]
        self._number = min(int(words[at]) for at in changed if words[at].isdigit())
        number = b"%d" % self._number
        self._counted = [
            (at, words[at].removesuffix(number))
            for at in changed
            if words[at] == number or words[at].endswith(b"." + number)
        ]
        self._words = list(words)
        place = urlsplit(url)
        self._socket = socket.create_connection((place.hostname or "", place.port or 6379))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()
        if login(url):
            self._socket.sendall(login(url))
            assert self._answer() == b"OK"
        versions = [int(self.call().split()[1]) for _ in range(2)]  # 'ok version ...'
        assert versions[1] == versions[0] + 1, f"the words that were watched change nothing when sent again: {versions}"

    def call(self) -> Any:
        """Send them once more."""
        self._number += 1
        for at, before in self._counted:
            self._words[at] = b"%b%d" % (before, self._number)
        self._socket.sendall(hiredis.pack_command(tuple(self._words)))
        return self._answer()

    def _answer(self) -> Any:
        while (answer := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(65536))
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def same_commands(url: str, store: StateStore) -> str:
    """Compare what the server executed for a `set` of ours and a call of BARE."""
    client = redis.Redis.from_url(url)
    session = store.session("same")
    bare = Bare(client)

    def executed(call: Callable[[], Any]) -> dict[str, int]:
        call()
        client.config_resetstat()
        for _ in range(100):
            call()
        stats = client.info("commandstats")
        return {
            name: row["calls"]
            for name, row in stats.items()
            if name not in ("cmdstat_config|resetstat", "cmdstat_info")
        }

    for _ in range(5):  # the store's own probes are counted as well, if one falls into it
        ours = executed(lambda: session.set("a", 7))
        theirs = executed(bare.call)
        if ours == theirs:
            break
    assert ours == theirs, f"the comparison is not fair: {ours} against {theirs}"
    return ", ".join(f"{name.removeprefix('cmdstat_')} {calls // 100}" for name, calls in ours.items())
