"""The ways answers come, on a connection of one thread and on one of all tasks: in halves, late, or never."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import redis.exceptions as driver
from hiredis import pack_command

from distributed_state.errors import WarmUnavailable
from distributed_state.port import Script, Words, sockets
from distributed_state.port import asyncio as pipe_module
from distributed_state.port.asyncio import Pipe
from distributed_state.port.background import JobStopped
from distributed_state.port.commands import Packer, ReplyError
from distributed_state.port.connections import Connections
from distributed_state.port.sockets import Socket, SocketWire

pytestmark = pytest.mark.unit

pack = Packer().pack
PING = [(b"PING",)]


class Connected:
    """A driver's connection whose handshake is done."""

    def __init__(self, ours: socket.socket) -> None:
        self._sock: socket.socket | None = ours
        self.closed = False
        self.redis_connect_func: Any = None

    def connect(self) -> None:
        self.redis_connect_func(self)

    def on_connect(self) -> None: ...

    def disconnect(self) -> None:
        self.closed = True
        if self._sock is not None:
            self._sock.close()


@pytest.fixture
def ends() -> Any:
    """Our end of a connection and the server's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


# One thread


def test_answers_may_come_in_any_pieces(ends: Any) -> None:
    ours, server = ends
    connection = Socket(Connected(ours), 5.0)
    whole = b"*2\r\n$3\r\nabc\r\n:7\r\n-ERR no\r\n"
    for cut in range(1, len(whole)):
        server.sendall(whole[:cut])
        connection.send(pack(PING))
        server.sendall(whole[cut:])
        first, second = connection.answers(2)
        assert first == [b"abc", 7]
        assert isinstance(second, ReplyError)
        assert second.word == "ERR"


def test_no_answer_in_time_closes_it(ends: Any) -> None:
    """Otherwise its next user would be given this answer."""
    ours, server = ends
    beneath = Connected(ours)
    connection = Socket(beneath, 0.05)
    server.sendall(b"*2\r\n:1\r\n")  # half an answer
    with pytest.raises(driver.TimeoutError):
        connection.exchange(pack(PING), 1)
    assert beneath.closed
    with pytest.raises(OSError, match="Bad file"):
        connection.exchange(pack(PING), 1)


def test_an_answer_that_is_late_makes_one_look_elsewhere(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds out that another server has the keys now shuts the connection, and its user need not wait."""
    monkeypatch.setattr(sockets, "LATE", 0.01)
    ours, server = ends
    looked: list[int] = []

    def look(seconds: float) -> None:
        assert 0 < seconds < 60, "what is left"
        looked.append(1)
        if len(looked) == 2:
            server.sendall(b"+PONG\r\n")
        if len(looked) == 4:
            connection.shut()

    connection = Socket(Connected(ours), 60.0, late=look)
    assert connection.exchange(pack(PING), 1) == [b"PONG"]
    assert len(looked) == 2, "once each time that nothing came"
    with pytest.raises(driver.ConnectionError):
        connection.exchange(pack(PING), 1)
    assert len(looked) == 4


def test_where_nobody_else_could_answer_there_is_nothing_to_look_for(ends: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sockets, "LATE", 0.01)
    ours, _ = ends
    asked = Connected(ours)
    connection = Socket(asked, 0.1)
    assert connection._receives_for == 0.1, "one wait of the kernel's, of all the time there is"
    with pytest.raises(driver.TimeoutError):
        connection.exchange(pack(PING), 1)


@pytest.mark.parametrize("said", [b"", b"*2\r\n:1\r\n"], ids=["nothing", "half"])
def test_a_server_that_leaves_is_told(ends: Any, said: bytes) -> None:
    ours, server = ends
    beneath = Connected(ours)
    server.sendall(said)
    server.close()
    connection = Socket(beneath, 5.0)
    with pytest.raises(driver.ConnectionError):
        connection.answers(1)
    assert beneath.closed


def test_what_is_no_answer_of_redis_closes_it(ends: Any) -> None:
    ours, server = ends
    beneath = Connected(ours)
    server.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(driver.InvalidResponse):
        Socket(beneath, 5.0).answers(1)
    assert beneath.closed


def test_an_interrupted_read_closes_it(ends: Any) -> None:
    ours, _ = ends
    beneath = Connected(ours)
    connection = Socket(beneath, 5.0)

    def interrupt(buffer: bytearray) -> int:
        raise KeyboardInterrupt

    connection._receive = interrupt  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        connection.exchange(pack(PING), 1)
    assert beneath.closed


def test_a_connection_that_was_closed_at_once_is_said() -> None:
    connection = Connected(socket.socket())
    connection.disconnect()
    connection._sock = None
    with pytest.raises(driver.ConnectionError, match="at once"):
        Socket(connection, 1.0)


async def test_a_wire_gives_errors_as_messages_and_ends_with_ours(ends: Any) -> None:
    ours, server = ends
    wire = SocketWire(Socket(Connected(ours), 5.0), "place", lambda: None)
    wire.post(b"SSUBSCRIBE", b"c")
    assert server.recv(100) == b"*2\r\n$10\r\nSSUBSCRIBE\r\n$1\r\nc\r\n"
    server.sendall(b"-MOVED 7 h:1\r\n*3\r\n$10\r\nssubscribe\r\n$1\r\nc\r\n:1\r\n+PONG\r\n")
    assert await wire.receive() == [b"error", b"MOVED 7 h:1"]
    assert await wire.receive() == [b"ssubscribe", b"c", 1]
    assert await wire.receive() == [b"PONG"]
    wire.close()
    wire.post(b"PING")
    with pytest.raises(WarmUnavailable, match="closed"):
        await wire.receive()


class Hurried(Socket):
    """One whose server speaks when nothing was heard in time for the third time."""

    __slots__ = ("missed", "server")

    def read(self) -> None:
        try:
            super().read()
        except driver.TimeoutError:
            self.missed += 1
            if self.missed == 3:
                self.server.sendall(b"+PONG\r\n")
            raise


async def test_a_wire_may_be_silent_for_longer_than_an_answer_may_take(ends: Any) -> None:
    """Where little happens there is little to hear; whether the server is there, its owner asks by other means."""
    ours, server = ends
    connection = Hurried(Connected(ours), 0.01)
    connection.server, connection.missed = server, 0

    def end_if_stopped() -> None:
        if connection.missed > 3:
            raise JobStopped

    wire = SocketWire(connection, "place", end_if_stopped)
    assert await wire.receive() == [b"PONG"]
    assert connection.missed == 3
    with pytest.raises(JobStopped):
        await wire.receive()


# All tasks of a loop


class Streams:
    """A driver's asyncio connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader: Any = reader
        self._writer: Any = writer


@asynccontextmanager
async def piped(timeout: float = 5.0) -> AsyncIterator[tuple[Pipe, socket.socket, list[int]]]:
    """A pipe, the server's end, and who was told that it is lost."""
    ours, server = socket.socketpair()
    lost: list[int] = []
    streams = Streams(*await asyncio.open_connection(sock=ours))
    looked: list[int] = []
    pipe = Pipe(streams, timeout, ReplyError, lambda: lost.append(1), lambda: looked.append(1))
    pipe.looked = looked  # type: ignore[attr-defined]  # for the tests
    with server:
        server.setblocking(False)
        try:
            yield pipe, server, lost
        finally:
            pipe.fail(driver.ConnectionError("over"))


async def received(server: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(server, 100_000)


async def test_what_tasks_ask_in_one_turn_of_the_loop_leaves_together() -> None:
    async with piped() as (pipe, server, _):
        first = pipe.send(PING)
        rest = [pipe.send([(b"GET", b"%d" % n)]) for n in range(3)]
        assert await received(server) == pack(PING), "alone, it does not wait for others"
        assert await received(server) == pack([(b"GET", b"%d" % n) for n in range(3)])
        server.send(b"+PONG\r\n:0\r\n:1\r\n:2\r\n")
        assert await first == [b"PONG"]
        assert [await each for each in rest] == [[0], [1], [2]]


async def test_of_many_tasks_the_first_groups_leave_while_the_others_make_their_commands(monkeypatch: Any) -> None:
    """So that the server works while they do; in one write it would wait for the last of them."""
    monkeypatch.setattr(pipe_module, "GROUP", 4)
    async with piped() as (pipe, server, _):
        waiting = [pipe.send(PING) for _ in range(11)]
        assert server.recv(100_000) == pack(PING * 9), "in the same turn of the loop: one alone, and two groups of 4"
        assert await received(server) == pack(PING * 2)
        server.send(b"+PONG\r\n" * 11)
        assert [await each for each in waiting] == [[b"PONG"]] * 11
        assert not pipe._outgoing


async def test_one_write_of_all_would_leave_the_server_waiting(monkeypatch: Any) -> None:
    monkeypatch.setattr(pipe_module, "GROUP", 1_000)
    async with piped() as (pipe, server, _):
        waiting = [pipe.send(PING) for _ in range(11)]
        assert server.recv(100_000) == pack(PING)
        server.send(b"+PONG\r\n" * 11)
        await asyncio.gather(*waiting)


async def test_answers_in_pieces_reach_those_who_wait_for_them() -> None:
    async with piped() as (pipe, server, _):
        one, two = pipe.send([*PING, *PING]), pipe.send(PING)
        for byte in b"*1\r\n$2\r\nab\r\n-ERR no\r\n:3\r\n":
            server.send(bytes([byte]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        first, second = await one
        assert first == [b"ab"]
        assert isinstance(second, ReplyError)
        assert await two == [3]


async def test_a_cancelled_caller_keeps_its_place() -> None:
    """Its answer is read all the same, and given to nobody."""
    async with piped() as (pipe, server, lost):
        callers = [asyncio.ensure_future(pipe.send([(b"GET", b"%d" % n)])) for n in range(4)]
        await asyncio.sleep(0)
        callers[0].cancel()
        callers[2].cancel()
        server.send(b":0\r\n:1\r\n:2\r\n:3\r\n")
        assert [await callers[1], await callers[3]] == [[1], [3]]
        assert not lost


async def test_what_does_not_answer_in_time_is_given_up_with_all_that_wait() -> None:
    async with piped(0.05) as (pipe, _, lost):
        waiting = [pipe.send(PING) for _ in range(3)]
        for each in waiting:
            with pytest.raises(driver.ConnectionError, match="no answer in time"):
                await each
        assert isinstance(pipe.broken, driver.TimeoutError)
        assert lost == [1]


async def test_an_answer_that_is_late_makes_a_loop_look_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe_module, "LATE", 0.01)
    async with piped(60.0) as (pipe, server, lost):
        assert await asyncio.wait_for(asyncio.gather(pipe.send(PING), asyncio.to_thread(server.send, b"+PONG\r\n")), 10)
        waiting = pipe.send(PING)
        while len(looked := pipe.looked) < 3:  # type: ignore[attr-defined]  # played
            await asyncio.sleep(0)
        assert not waiting.done()
        pipe.fail(driver.ConnectionError("another server has its keys now"))
        with pytest.raises(driver.ConnectionError, match="another server"):
            await waiting
        assert lost == [1]
        assert looked


async def blocked_loop(pipe: Pipe, server: socket.socket, seconds: float) -> None:
    """Ask, and let the loop stand still for longer than an answer may take while the answer lies there."""
    waiting = pipe.send(PING)
    server.send(b"+PONG\r\n")
    clock = pipe.loop.time
    pipe.loop.time = lambda: clock() + seconds  # type: ignore[method-assign]
    pipe._watch()  # as it may be called before what came is read
    try:
        assert await waiting == [b"PONG"]
    finally:
        pipe.loop.time = clock  # type: ignore[method-assign]


async def test_a_loop_that_stood_still_reads_what_came_before_it_misses_it() -> None:
    async with piped(60.0) as (pipe, server, lost):
        await blocked_loop(pipe, server, 100.0)
        assert not lost
        assert pipe.broken is None


async def test_else_it_would_give_up_a_sound_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe_module, "_STOOD_STILL", 1000.0)
    async with piped(60.0) as (pipe, server, lost):
        with pytest.raises(driver.ConnectionError, match="no answer in time"):
            await blocked_loop(pipe, server, 100.0)
        assert lost == [1]


async def test_a_server_that_leaves_is_told_to_all_who_wait() -> None:
    async with piped() as (pipe, server, lost):
        waiting = [pipe.send(PING) for _ in range(3)]
        server.close()
        for each in waiting:
            with pytest.raises(driver.ConnectionError):
                await each
        assert pipe.broken is not None
        assert lost == [1]


@pytest.mark.parametrize("said", [b"HTTP/1.1 400\r\n", b":1\r\n:2\r\n"], ids=["not redis", "one too many"])
async def test_answers_out_of_order_end_it(said: bytes) -> None:
    async with piped() as (pipe, server, _):
        waiting = pipe.send(PING)
        server.send(said)
        with suppress(driver.ConnectionError):
            await waiting
        await asyncio.sleep(0)
        assert pipe.broken is not None


class Interrupted(float):
    """A number that a signal handler interrupts whenever its text is asked for."""

    def __repr__(self) -> str:
        raise KeyboardInterrupt

    __str__ = __repr__


def wire_of(words: Words) -> bytes:
    """What a subscription sends."""
    sent: list[bytes] = []
    connection: Any = SimpleNamespace(send=sent.append)
    SocketWire(connection, "a server", lambda: None).post(*words)
    return b"".join(sent)


def driver_of(words: Words) -> bytes:
    """What the driver sends in a handshake."""
    connection = Connections("redis://127.0.0.1:1", 1.0)._blocking("127.0.0.1:1", {})
    return b"".join(connection.pack_command(*words))


def packer_of(words: Words) -> bytes:
    return Packer("a-data-id").pack([words])


WRITERS = pytest.mark.parametrize("written", [packer_of, wire_of, driver_of])


@WRITERS
def test_words_are_written_as_hiredis_writes_them(written: Callable[[Words], bytes]) -> None:
    odd = (b"", b"x" * 999, b"x" * 1000, b"x" * 1001, 0, -1, 2**63, float("inf"), float("nan"), 1e300)
    words = (b"SET", "t\xe9xt", 5, -(2**70), 0.1, memoryview(b"view"), *odd)
    assert written(words) == pack_command(words)


@WRITERS
def test_a_word_that_is_none_is_an_error(written: Callable[[Words], bytes]) -> None:
    """To hiredis, a number that is too long to be written was the end of the interpreter."""
    for word in ("\ud800", None, True, ["list"], object()):
        with pytest.raises((TypeError, ValueError)):
            written((b"SET", b"k", word))
    with pytest.raises(ValueError, match="digits"):
        written((b"SET", b"k", 10**5000))


@WRITERS
def test_nothing_is_asked_of_a_word_that_could_raise(written: Callable[[Words], bytes]) -> None:
    assert written((b"SET", b"k", Interrupted(1.5))) == pack_command((b"SET", b"k", 1.5))


def test_the_bytes_of_commands_are_those_of_the_protocol() -> None:
    made: Callable[..., bytes] = pack
    assert (
        made([(b"SET", "k", 1), (b"GET", 1.5)])
        == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\n1\r\n*2\r\n$3\r\nGET\r\n$3\r\n1.5\r\n"
    )


def test_a_call_with_constants_is_written_as_any_other() -> None:
    """Whatever was kept of an earlier call: another record, other constants, other keys of the same record."""
    script = Script("commit", living=True)
    packer = Packer("a-data-id")
    for constants in ((b"replica", b"1"), (b"other", b"1")):
        for keys in ((b"record",), (b"record", b"events"), (b"record", b"output"), (b"second",)):
            for rest in ((), (1, "two", b"\r\n$3\r\n" * 3), (3,)):
                words = script.call(keys, [constants, *rest])
                plain = (b"EVALSHA", script.sha, len(keys), *keys, "a-data-id", *constants, *rest)
                assert packer.pack([words]) == packer.pack([plain]) == pack_command(plain)
                assert packer.pack([words, plain]) == pack_command(plain) * 2
                first = (b"EVAL", script.text, *plain[2:])
                assert packer.pack([script.first_call(words)]) == pack_command(first)


def test_what_calls_begin_with_is_kept_for_so_many_records() -> None:
    packer = Packer("a-data-id")
    script = Script("commit", living=True)
    for number in range(3000):
        packer.pack([script.call((b"%d" % number,), [(b"replica",), number])])
    assert 0 < len(packer._beginnings) <= 1000


@pytest.mark.parametrize("late", [True, False])
def test_an_answer_is_waited_for_only_as_long_as_its_caller_may_wait(ends: Any, late: bool) -> None:
    """And the next one again as long as ever."""
    ours, server = ends
    connection = Socket(Connected(ours), 60.0, **({"late": lambda _: None} if late else {}))
    server.sendall(b"+PONG\r\n")
    assert connection.exchange(pack(PING), 1, 30.0) == [b"PONG"]
    assert (connection._receives_for, connection._sends_for) == (sockets.LATE if late else 30.0, 30.0)
    server.sendall(b"+PONG\r\n")
    assert connection.exchange(pack(PING), 1) == [b"PONG"]
    assert (connection._receives_for, connection._sends_for) == (sockets.LATE if late else 60.0, 60.0)
    with pytest.raises(driver.TimeoutError):
        connection.exchange(pack(PING), 1, 0.01)
