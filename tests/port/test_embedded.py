"""The embedded server's own part: many threads, one order, and nobody called while a lock is held."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fakeredis._socket import FakeSocket

from distributed_state import ConfigurationError, WarmUnavailable
from distributed_state.port.background import JobStopped
from distributed_state.port.blocking import EmbeddedWire, finish
from distributed_state.port.commands import ReplyError
from distributed_state.port.embedded import EmbeddedServer
from distributed_state.port.embedded_client import EmbeddedClient, compiled

pytestmark = pytest.mark.unit

NEXT = b"""
  local n = (redis.call('GET', KEYS[1]) or 0) + 1
  redis.call('SET', KEYS[1], n)
  redis.call('SPUBLISH', KEYS[2], n)
"""
THREADS, ROUNDS = 4, 150


@pytest.fixture
def server() -> EmbeddedServer:
    return EmbeddedServer()


def in_threads(work: Callable[[int], Any]) -> None:
    """Switching so often that what is not atomic is seen."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(work, range(THREADS)))
    finally:
        sys.setswitchinterval(before)


def listening(server: EmbeddedServer, *channels: bytes) -> tuple[Any, list[Any]]:
    """A subscription that is confirmed, and what it heard since."""
    received = list[Any]()
    subscription = server.subscribe(received.append)
    for channel in channels:
        subscription.post(b"SSUBSCRIBE", channel)
    received.clear()
    return subscription, received


def listeners(server: EmbeddedServer, channel: bytes) -> int:
    ((_, count),) = server.exchange([(b"PUBSUB", b"SHARDNUMSUB", channel)])
    return int(count)


def test_scripts_of_many_threads_are_atomic_and_heard_in_order(server: EmbeddedServer) -> None:
    """Also by two who hear the same; and nothing stays behind in the queue."""
    one, other = list[Any](), list[Any]()

    def slowly(message: list[Any]) -> None:
        for _ in range(50):  # where threads are switched
            pass
        one.append(message)

    for hear in (slowly, other.append):
        server.subscribe(hear).post(b"SSUBSCRIBE", b"c")
    one.clear()
    other.clear()

    def work(_: int) -> None:
        for _ in range(ROUNDS):
            assert server.exchange([(b"EVAL", NEXT, 2, b"n", b"c")]) == [None]

    in_threads(work)
    assert server.exchange([(b"GET", b"n")]) == [b"%d" % (THREADS * ROUNDS)]
    assert [int(payload) for _, _, payload in one] == list(range(1, THREADS * ROUNDS + 1))
    assert one == other


def test_what_another_thread_adds_as_a_round_ends_is_not_left_behind(server: EmbeddedServer) -> None:
    """That thread saw us at work, and left."""
    subscription, received = listening(server, b"c")

    class Late:
        late = True

        def acquire(self, *, blocking: bool) -> bool:
            return not blocking

        def release(self) -> None:
            if self.late:
                self.late = False
                server._outbox.append((subscription, [b"smessage", b"c", b"late"]))

    server._delivering = Late()  # type: ignore[assignment]
    server.exchange([(b"SPUBLISH", b"c", b"early")])
    assert [payload for _, _, payload in received] == [b"early", b"late"]


def test_each_thread_gets_its_own_answers(server: EmbeddedServer) -> None:
    def work(me: int) -> None:
        for n in range(ROUNDS):
            sent = [b"%d %d" % (me, n), b"%d again" % me]
            assert server.exchange([(b"EVAL", b"return ARGV[1]", 0, each) for each in sent]) == sent
            assert server.exchange([(b"PING", each) for each in sent]) == sent

    in_threads(work)


def test_who_hears_may_command_publish_subscribe_and_end_it(server: EmbeddedServer) -> None:
    """No lock is held meanwhile; and what it publishes comes after what it hears."""
    received, inside = list[Any](), False

    def hear(message: list[Any]) -> None:
        nonlocal inside
        assert not inside, "never called inside a call"
        inside = True
        kind, channel, payload = message
        received.append((kind, channel, payload))
        if kind == b"smessage" and int(payload) < 3:
            assert server.exchange([(b"SPUBLISH", b"c", int(payload) + 1), (b"GET", b"k")]) == [1, b"v"]
            subscription.post(b"SSUBSCRIBE", b"d" + payload)
        elif kind == b"smessage":
            subscription.close()
        inside = False

    subscription = server.subscribe(hear)
    subscription.post(b"SSUBSCRIBE", b"c")
    server.exchange([(b"SET", b"k", b"v"), (b"SPUBLISH", b"c", 1)])
    said = [(b"smessage", b"c", b"1"), (b"smessage", b"c", b"2"), (b"ssubscribe", b"d1", 2), (b"smessage", b"c", b"3")]
    assert received == [(b"ssubscribe", b"c", 1), *said]


def test_what_is_on_its_way_is_not_heard_after_the_end(server: EmbeddedServer) -> None:
    received = list[Any]()

    def hear(message: list[Any]) -> None:
        received.append(message)
        if message[0] == b"smessage":
            subscription.close()

    subscription = server.subscribe(hear)
    subscription.post(b"SSUBSCRIBE", b"c")
    script = b"redis.call('SPUBLISH', 'c', 1) redis.call('SPUBLISH', 'c', 2)"
    server.exchange([(b"EVAL", script, 0)])
    subscription.post(b"SSUBSCRIBE", b"c")
    subscription.close()
    assert received == [[b"ssubscribe", b"c", 1], [b"smessage", b"c", b"1"]]
    assert listeners(server, b"c") == 0


def test_a_subscription_that_ended_is_no_listener_at_once(server: EmbeddedServer) -> None:
    """A commit asks who else listens, and is published only if somebody does."""
    (one, _), (_, received) = listening(server, b"c", b"d"), listening(server, b"c")
    assert (listeners(server, b"c"), listeners(server, b"d")) == (2, 1)
    one.close()
    assert (listeners(server, b"c"), listeners(server, b"d")) == (1, 0)
    assert server.exchange([(b"SPUBLISH", b"c", b"x")]) == [1]
    assert received == [[b"smessage", b"c", b"x"]]


def test_a_reader_that_fails_ends_its_subscription_and_harms_nobody_else(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """As one whose event loop was closed before it closed its subscription."""

    def fail(message: list[Any]) -> None:
        if message[0] == b"smessage":
            raise RuntimeError("Event loop is closed")

    server.subscribe(fail).post(b"SSUBSCRIBE", b"c")
    _, received = listening(server, b"c")
    assert server.exchange([(b"SPUBLISH", b"c", b"x"), (b"SET", b"k", 1)]) == [2, b"OK"]
    assert received == [[b"smessage", b"c", b"x"]]
    assert listeners(server, b"c") == 1
    assert "Event loop is closed" in caplog.text


@pytest.mark.parametrize("word", [None, True, ["list"], object()])
def test_a_word_that_is_none_is_refused_before_anything_is_done(server: EmbeddedServer, word: Any) -> None:
    """As it is to a server, see test_connections.py; a number of bytes, say, would be zeros."""
    with pytest.raises(TypeError, match="a word of a command"):
        server.exchange([(b"SET", b"k", b"v"), (b"SET", b"k", word)])
    assert server.exchange([(b"GET", b"k")]) == [None]


def test_a_script_is_compiled_once(server: EmbeddedServer) -> None:
    text = b"return {ARGV[1], 'compiled once'}"
    sha = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
    compiled.cache_clear()
    call = (b"EVALSHA", sha, 0, b"x")
    (unknown,) = server.exchange([call])
    assert (unknown.word, str(unknown)[:8]) == ("NOSCRIPT", "NOSCRIPT")
    answer = [b"x", b"compiled once"]
    assert server.exchange([(b"EVAL", text, 0, b"x"), call, call]) == [answer] * 3
    assert server.exchange([(b"SCRIPT", b"FLUSH"), (b"SCRIPT", b"LOAD", text), call, call]) == [
        b"OK",
        sha,
        answer,
        answer,
    ]
    assert compiled.cache_info().misses == 1
    assert server.fake.script_cache[sha] == compiled(text) != text, "so no call finds text to compile"


def test_an_error_keeps_its_first_word_and_its_text(server: EmbeddedServer) -> None:
    (answer,) = server.exchange([(b"EVAL", b"return redis.error_reply('MINE and more')", 0)])
    assert type(answer) is ReplyError
    assert (answer.word, str(answer)) == ("MINE", "MINE and more")
    assert ReplyError("ALONE").word == "ALONE"


@pytest.mark.parametrize("name", ["_process_command", "_decode_error", "put_response", "eval"])
def test_another_fakeredis_is_refused_with_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """We rely on names behind its public ones: if tests here fail with a newer one, look there first."""
    owner = next(each for each in FakeSocket.__mro__ if name in vars(each))
    assert name in vars(EmbeddedClient) or name == "_process_command"
    monkeypatch.delattr(owner, name)
    monkeypatch.delitem(sys.modules, "distributed_state.port.embedded_client")
    with pytest.raises(ConfigurationError, match=rf"pip install 'fakeredis\[lua\]==2\.40\.\*'.*has no {name}"):
        EmbeddedServer()


def test_the_blocking_wire_waits_for_others_and_ends_when_closed(server: EmbeddedServer) -> None:
    wire = EmbeddedWire(server, lambda: None)
    wire.post(b"SSUBSCRIBE", b"c")
    assert finish(wire.receive()) == [b"ssubscribe", b"c", 1]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: finish(wire.receive()))
        server.exchange([(b"SPUBLISH", b"c", b"x")])
        assert waiting.result(10) == [b"smessage", b"c", b"x"]
        waiting = threads.submit(lambda: finish(wire.receive()))
        wire.close()
        with pytest.raises(WarmUnavailable, match="the link is closed"):
            waiting.result(10)
        with pytest.raises(WarmUnavailable, match="the link is closed"):
            finish(wire.receive())


def test_the_thread_that_reads_the_blocking_wire_is_asked_to_end(server: EmbeddedServer) -> None:
    def end_if_stopped() -> None:
        raise JobStopped

    with pytest.raises(JobStopped):
        finish(EmbeddedWire(server, end_if_stopped).receive())
