"""The embedded server answers as a real one does, to all that the package sends and all that its scripts call."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hiredis import Reader, pack_command

import distributed_state
from distributed_state.port import Words
from distributed_state.port.commands import ReplyError
from distributed_state.port.embedded import EmbeddedServer

PACKAGE = Path(distributed_state.__file__).parent
ECHO = b"return {KEYS[1], ARGV[1], 7, 2.9, false, true, {'a', {}}, {ok = 'FINE'}, {err = 'MINE own'}}"
UNKNOWN = b"0" * 40
LONG = "\xe9\0" * 3000

# In this order on one empty database. A command that the scripts call in a form of its own is here in that form.
COMMANDS: dict[str, list[Words]] = {
    "strings": [
        (b"PING",),
        (b"GET", b"k"),
        (b"SET", b"k", "\xe9"),
        (b"GET", b"k"),
        (b"SET", b"k", 5, b"NX"),
        (b"SET", b"m", -(2**62), b"NX", b"PX", 100_000),
        (b"SET", b"f", 0.1),
        (b"MGET", b"k", b"m", b"f", b"nothing"),
        (b"EXISTS", b"k"),
        (b"EXISTS", b"nothing"),
        (b"GETDEL", b"nothing"),
        (b"PEXPIRE", b"k", 100_000),
        (b"PEXPIRE", b"m", 50_000, b"XX"),
        (b"PEXPIRE", b"f", 50_000, b"XX"),
        (b"PEXPIRE", b"nothing", 1000),
        (b"PERSIST", b"k"),
        (b"PERSIST", b"k"),
        (b"PTTL", b"k"),
        (b"PTTL", b"nothing"),
        (b"SET", b"", b""),
        (b"GET", b""),
        (b"DEL", b"k", b"m", b"nothing"),
        (b"SET", b"long", LONG),
        (b"GET", b"long"),
    ],
    "hashes": [
        (b"HSET", b"h", b"a", b"1", b"", b"empty", b"b", b"\xff\r\n"),
        (b"HSET", b"h", b"a", b"2"),
        (b"HGET", b"h", b"a"),
        (b"HGET", b"h", b"nothing"),
        (b"HEXISTS", b"h", b"a"),
        (b"HEXISTS", b"h", b"nothing"),
        (b"HLEN", b"h"),
        (b"HLEN", b"nothing"),
        (b"HMGET", b"h", b"a", b"nothing", b""),
        (b"HMGET", b"nothing", b"a", b"b"),
        (b"HSTRLEN", b"h", b"b"),
        (b"HSTRLEN", b"h", b"nothing"),
        (b"HDEL", b"h", b"b", b"nothing"),
        (b"HKEYS", b"h"),
        (b"HGETALL", b"h"),
        (b"HGETALL", b"nothing"),
    ],
    "sorted sets": [
        (b"ZADD", b"z", 1.5, b"m", 2, b"n"),
        (b"ZADD", b"z", b"NX", 9, b"m", -3, b"o", b"1700000000.123456", b"p"),
        (b"ZSCORE", b"z", b"m"),
        (b"ZSCORE", b"z", b"n"),
        (b"ZSCORE", b"z", b"p"),
        (b"ZSCORE", b"z", b"nothing"),
        (b"ZRANGE", b"z", 0, 0, b"WITHSCORES"),
        (b"ZRANGE", b"z", -1, -1),
        (b"ZRANGEBYSCORE", b"z", b"(1", b"+inf", b"WITHSCORES"),
        (b"ZRANGEBYSCORE", b"z", b"-inf", 2, b"WITHSCORES", b"LIMIT", 0, 1),
        (b"ZCARD", b"z"),
        (b"ZCOUNT", b"z", 0, b"+inf"),
        (b"ZREM", b"z", b"n", b"nothing"),
        (b"ZREMRANGEBYSCORE", b"z", b"-inf", b"1.500000"),
        (b"ZREMRANGEBYSCORE", b"nothing", 1, 1),
    ],
    "streams": [
        (b"XADD", b"s", b"1-0", b"h", b"one", b"d", b""),
        (b"XADD", b"s", b"3-0", b"h", b"three"),
        (b"XADD", b"s", b"4-0", b"h", b"four"),
        (b"XADD", b"s", b"2-0", b"h", b"too late"),
        (b"XRANGE", b"s", b"-", b"+", b"COUNT", 2),
        (b"XRANGE", b"s", b"(1-0", b"+"),
        (b"XRANGE", b"nothing", b"-", b"+"),
        (b"XREVRANGE", b"s", b"+", b"-", b"COUNT", 1),
        (b"XDEL", b"s", b"3-0", b"9-0"),
        (b"XTRIM", b"s", b"MINID", b"4-0"),
        (b"XRANGE", b"s", b"-", b"+"),
    ],
    "scripts": [
        (b"EVALSHA", UNKNOWN, 0),
        (b"EVAL", ECHO, 1, b"key", b"argument"),
        (b"EVAL", b"return redis.call('HGET', KEYS[1], 'a')", 1, b"h"),
        (b"EVAL", b"return {redis.call('GET', KEYS[1]), redis.call('ZSCORE', KEYS[2], 'p')}", 2, b"nothing", b"z"),
        (b"EVAL", b"return redis.call('HGETALL', KEYS[1])", 1, b"h"),
        (b"EVAL", b"return redis.call('XRANGE', KEYS[1], '-', '+')", 1, b"s"),
        (b"EVAL", b"return redis.call('SET', KEYS[1], 'v')", 1, b"w"),
        (b"EVAL", b"return redis.pcall('HSET', KEYS[1], 'a', 1).err ~= nil", 1, b"w"),
        (b"EVAL", b"return 'unfinished", 0),
        (b"EVAL", b"return nil + 1", 0),
        (b"EVAL", b"return redis.error_reply('MINE own')", 0),
    ],
    "errors": [
        (b"HGET", b"w", b"a"),
        (b"GET", b"h"),
        (b"XADD", b"h", b"1-0", b"a", b"b"),
        (b"EVAL", b"return redis.call('HGET', KEYS[1], 'a')", 1, b"w"),
        (b"GET",),
        (b"NOSUCHCOMMAND", b"a"),
        (b"PEXPIRE", b"w", b"soon"),
        (b"SET", b"w", b"v", b"XX", b"NX"),
    ],
    "channels": [
        (b"SPUBLISH", b"c", b"nobody"),
        (b"PUBSUB", b"SHARDNUMSUB", b"c", b"d"),
    ],
}
NOT_COMPARED = {
    "TIME": "another each time",
    "INFO": "asked of real servers alone, by `doctor`",
    **dict.fromkeys(
        ("LRANGE", "RPUSH", "SCAN", "WAIT", "WAITAOF", "CONFIG"),
        "asked of real servers alone, about what they may lose",
    ),
    **dict.fromkeys(
        ("HELLO", "ROLE", "CLUSTER", "ASKING", "SENTINEL", "MASTER", "SUBSCRIBE"), "asked where a server is, or of it"
    ),
    "SSUBSCRIBE": "below",
    "SUNSUBSCRIBE": "below",
}


class Raw:
    """A connection to a real server, without a client library."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._reader = Reader(replyError=ReplyError)

    def exchange(self, commands: list[Words]) -> list[Any]:
        for words in commands:
            self._socket.sendall(pack_command(words))
        return [self.receive() for _ in commands]

    def receive(self) -> Any:
        while (answer := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(65536))
        return answer

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def connect(servers: Any) -> Iterator[Callable[[], Raw]]:
    """Connections to an empty Valkey."""
    opened = list[Raw]()

    def connection() -> Raw:
        server = servers.redis("valkey")
        opened.append(Raw(server.port))
        assert opened[-1].exchange([(b"AUTH", server.password)]) == [b"OK"]
        return opened[-1]

    assert connection().exchange([(b"SELECT", 9), (b"FLUSHDB",)]) == [b"OK", b"OK"]
    yield connection
    for each in opened:
        each.close()


def told(answer: Any) -> Any:
    """The type and the value of an answer; of an error its first word, as each server has its own text."""
    if isinstance(answer, list):
        return [told(each) for each in answer]
    return (ReplyError, answer.word) if isinstance(answer, ReplyError) else (type(answer), answer)


def test_it_answers_as_a_server_does(connect: Callable[[], Raw]) -> None:
    """Types too: there are no booleans and no floats, nil is None, an error stands in its place."""
    embedded, real = EmbeddedServer(), connect()
    real.exchange([(b"SELECT", 9)])
    for kind, commands in COMMANDS.items():
        for words, ours, theirs in zip(commands, embedded.exchange(commands), real.exchange(commands), strict=True):
            assert told(ours) == told(theirs), f"{kind}: {words}"
    for here in (embedded, real):
        ((seconds, micros),) = here.exchange([(b"TIME",)])
        assert (type(seconds), type(micros)) == (bytes, bytes)


def test_everything_that_the_package_sends_is_compared() -> None:
    compared = {words[0].decode() for commands in COMMANDS.values() for words in commands} | set(NOT_COMPARED)
    scripts = "\n".join(path.read_text() for path in PACKAGE.glob("warm/lua/**/*.lua"))
    modules = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if "programs" not in path.parts)
    called, sent = set(re.findall(r"call\('(\w+)'", scripts)), set(re.findall(r'\(b"([A-Z]{3,})"', modules))
    assert len(called) > 20
    assert len(sent) > 10
    assert called | sent <= compared


def test_a_subscription_hears_what_one_of_a_server_hears(connect: Callable[[], Raw]) -> None:
    """Confirmations, messages of others and of scripts, answers to PING, and an error that leaves it as it was."""
    embedded, real, listening = EmbeddedServer(), connect(), connect()
    received = list[Any]()
    subscription = embedded.subscribe(received.append)
    script = b"redis.call('SPUBLISH', KEYS[1], 'two') redis.call('SPUBLISH', KEYS[1], 'three') return {'ok'}"
    publish: list[Words] = [(b"SPUBLISH", b"answers:c", b"one"), (b"EVAL", script, 1, b"answers:c")]
    for posted in [
        (b"SSUBSCRIBE", b"answers:c"),
        (b"SSUBSCRIBE", b"answers:d"),
        (b"SSUBSCRIBE", b"answers:c"),
        (b"PING",),
        (b"GET", b"k"),
        (b"SUNSUBSCRIBE", b"answers:d"),
        (b"SUNSUBSCRIBE", b"answers:e"),
    ]:
        subscription.post(*posted)
        (theirs,) = listening.exchange([posted])
        if isinstance(theirs, ReplyError):
            assert received.pop()[0] == b"error"
        else:
            assert received.pop() == theirs
        assert told(embedded.exchange(publish)) == told(real.exchange(publish))
        assert received == [listening.receive() for _ in received]
        assert len(received) == 3
        received.clear()
        count: Words = (b"PUBSUB", b"SHARDNUMSUB", b"answers:c", b"answers:d")
        assert embedded.exchange([count]) == real.exchange([count])
    subscription.close()
    listening.close()
    assert embedded.exchange([count]) == [[b"answers:c", 0, b"answers:d", 0]]
