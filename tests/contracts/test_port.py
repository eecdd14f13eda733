"""The rules on which the core may rely when it sends commands through a `Port`, the real one or the simulated one.

Law: a test is written once and runs on each of them (see `grounds`). A simulated port that breaks a rule of the real
port produces false faults; one that keeps a rule that the real port does not have hides faults.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path
from typing import Any, Protocol

import pytest

from distributed_state import port as port_package
from distributed_state.errors import ConfigurationError, StateError, WarmUnavailable
from distributed_state.port import Port, Script, identities, waited
from distributed_state.port.background import JobStopped
from distributed_state.port.commands import ReplyError
from tests.contracts.grounds import EMBEDDED, EVERY, LIMIT, NETWORK, SINGLE, Ground, Steps, on

SHORT = 0.5  # seconds, for tests that wait for an answer that never comes


def script_of(ground: Ground, text: str, *, living: bool = False) -> Script:
    """A script that no server has in its cache."""
    script = Script(text, living)
    vars(script)["text"] = f"-- {ground.key().decode()}\n{text}".encode()
    return script


@on(EVERY)
async def test_every_port_has_what_the_core_may_ask_for(ground: Any) -> None:
    asked = [name for name in vars(Port) if not name.startswith("_") and name not in ("monotonic", "wall")]
    assert "exchange" in asked
    for name in asked:
        promised, found = vars(Port)[name], inspect.getattr_static(type(ground.port), name)
        if isinstance(promised, property):
            continue
        wanted = list(inspect.signature(promised).parameters)
        if isinstance(found, staticmethod):  # of the standard library, in C: its signature is not known
            assert wanted == ["self"], name
            getattr(ground.port, name)()
        else:
            assert list(inspect.signature(found).parameters) == wanted, name


def unnamed(protocol: type, text: str) -> list[str]:
    """The public methods of a protocol that this text does not use."""
    return [name for name in vars(protocol) if not name.startswith("_") and not re.search(rf"[.\"]{name}\b", text)]


def test_the_contract_names_everything() -> None:
    """Each method of each protocol of the port's package."""
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_port*.py"))
    protocols = [each for each in vars(port_package).values() if getattr(each, "_is_protocol", False)]
    protocols.remove(Protocol)
    assert len(protocols) >= 5
    assert {each.__name__: unnamed(each, text) for each in protocols} == {each.__name__: [] for each in protocols}
    assert unnamed(Port, text.replace("relocate", "")) == ["relocate"], "a method that no test uses is noticed"


# Exchanges


@on(EVERY)
async def test_answers_come_in_the_order_of_the_commands(ground: Any) -> None:
    commands = [(b"ECHO", b"%d" % n) for n in range(200)]
    expected = [b"%d" % n for n in range(200)]
    assert await ground.port.exchange(commands) == expected
    assert await ground.port.exchange_with(ground.node, commands) == expected
    assert await ground.port.commands(commands) == expected
    assert await ground.port.command(b"ECHO", "text") == b"text"
    assert await ground.port.command_with(ground.node, b"ECHO", 7) == b"7"


@on(EVERY)
async def test_an_exchange_of_nothing_is_answered_at_once(ground: Any) -> None:
    assert await ground.port.exchange([]) == []
    assert await ground.port.exchange_with(ground.node, []) == []
    assert await ground.port.scripts([]) == []


@on(EVERY)
async def test_errors_stand_in_place_and_are_raised_by_command(ground: Any) -> None:
    port, key = ground.port, ground.key()
    stored, refused, found = await port.exchange([(b"SET", key, "x"), (b"LPUSH", key, "y"), (b"GET", key)])
    assert (stored, found) == (b"OK", b"x")
    assert isinstance(refused, ReplyError)
    assert refused.word == "WRONGTYPE"
    (again,) = await port.exchange_with(ground.node, [(b"LPUSH", key, "y")])
    assert isinstance(again, ReplyError)
    with pytest.raises(ConfigurationError, match="WRONGTYPE"):
        await port.command(b"LPUSH", key, "y")
    with pytest.raises(ConfigurationError, match="WRONGTYPE"):
        await port.command_with(ground.node, b"LPUSH", key, "y")
    with pytest.raises(ConfigurationError, match="WRONGTYPE"):
        await port.commands([(b"LPUSH", key, "y"), (b"SET", key, "z")])
    assert await port.command(b"GET", key) == b"z", "what stands behind an error is carried out"


@on(EVERY)
async def test_a_word_that_is_none_is_an_error_before_anything_is_sent(ground: Any) -> None:
    port, key = ground.port, ground.key()
    with pytest.raises(TypeError):
        await port.exchange([(b"SET", key, "x"), (b"SET", key, None)])
    assert await port.command(b"GET", key) is None


@on(EVERY)
async def test_everybody_gets_the_answers_to_what_was_asked(ground: Any) -> None:
    async def ask(name: int) -> None:
        for round_ in range(5):
            words = [(b"ECHO", f"{name}/{round_}/{at}") for at in range(3)]
            assert await ground.port.exchange(words) == [each.encode() for _, each in words]

    for asking in [ground.begin(ask(name)) for name in range(20)]:
        await asking.result()


@on((*EMBEDDED, *SINGLE), api="asyncio")
async def test_commands_of_tasks_are_carried_out_in_the_order_in_which_they_were_sent(ground: Any) -> None:
    """The port awaits nothing before it sends a command; with several servers it looks first if it is in doubt."""
    port, key = ground.port, ground.key()
    sent = []

    async def push(name: int) -> None:
        for round_ in range(5):
            sent.append(f"{name}/{round_}".encode())
            await port.command(b"RPUSH", key, sent[-1])

    for pushing in [ground.begin(push(name)) for name in range(20)]:
        await pushing.result()
    assert await port.command(b"LRANGE", key, 0, -1) == sent


@on((*EMBEDDED, *SINGLE))  # elsewhere a look for the primary may come between
async def test_an_exchange_suspends_once_while_the_server_works(ground: Any) -> None:
    port, key = ground.port, ground.key()
    read = script_of(ground, "return redis.call('GET', KEYS[1])")
    await port.script(read, [key], [])
    for work in (
        port.command(b"PING"),
        port.command_with(ground.node, b"PING"),
        port.commands([(b"PING",)] * 3),
        port.script(read, [key], []),
        port.scripts([(read, [key], [])] * 3),
    ):
        steps = Steps(work)
        await steps
        assert steps.count == int(ground.suspends or ground.is_simulated)


@on(NETWORK, api="asyncio")
async def test_the_answer_of_a_cancelled_caller_is_nobody_elses(ground: Any) -> None:
    port, needle = ground.port, ground.key("needle")
    held = ground.hold(needle)
    first = ground.begin(port.command(b"ECHO", needle))
    await ground.until(held.arrived)
    second = ground.begin(port.command(b"ECHO", ground.key("second")))
    await ground.pause()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first.result()
    held.go()
    assert await second.result() == ground.key("second")
    assert await port.command(b"ECHO", ground.key("third")) == ground.key("third")


@on(NETWORK)
async def test_a_connection_that_is_cut_fails_all_that_wait_on_it_and_the_next_exchange_connects(ground: Any) -> None:
    port, needle = ground.port, ground.key("needle")
    held = ground.hold(needle, 3)
    waiting = [ground.begin(port.command(b"ECHO", needle)) for _ in range(3)]
    await ground.until(held.arrived)
    ground.cut()
    for each in waiting:
        with pytest.raises(WarmUnavailable):
            await each.result()
    held.go()
    assert await port.command(b"ECHO", b"again") == b"again"


@on(NETWORK)
async def test_a_connection_that_is_cut_while_nobody_waits_is_replaced(ground: Any) -> None:
    ground.cut()
    assert await ground.again(lambda: ground.port.command(b"ECHO", b"again")) == b"again"


@on(NETWORK)
async def test_commands_overtake_each_other_only_across_a_reconnect(ground: Any) -> None:
    port, key, needle = ground.port, ground.key(), ground.key("needle")
    held = ground.hold(needle)
    waiting = ground.begin(port.command(b"RPUSH", key, needle))
    await ground.until(held.arrived)
    ground.drop(port)
    with pytest.raises(WarmUnavailable):
        await waiting.result()
    assert await port.command(b"RPUSH", key, b"later") == 1
    held.go()
    found: list[bytes] = []

    async def look() -> bool:
        found[:] = await port.command(b"LRANGE", key, 0, -1)
        return len(found) == 2

    while not await look():
        await ground.pause()
    assert found == [b"later", needle]


@on(NETWORK)
async def test_a_connection_without_an_answer_in_time_is_given_up(ground: Any) -> None:
    port = ground.open(timeout=SHORT)
    await ground.again(port.open)
    ground.mute()
    lost = ground.key("lost")
    waiting = [ground.begin(port.command(b"ECHO", lost)) for _ in range(2)]
    refused = 0
    for each in waiting:
        try:
            assert await each.result() == lost
        except WarmUnavailable:
            refused += 1
    assert refused == 2 if ground.suspends else refused >= 1, "a thread whose connection is new gets its answer"
    assert await ground.again(lambda: port.command(b"ECHO", b"again")) == b"again"


@on(NETWORK)
async def test_a_call_waits_no_longer_than_its_limit_whatever_it_asks(ground: Any) -> None:
    limit = 2 * SHORT
    port = ground.open(timeout=SHORT, retry_for=limit)
    await ground.again(port.open)
    ground.freeze()
    began = port.monotonic()
    with waited.call() as account:
        for _ in range(20):
            with pytest.raises(WarmUnavailable) as refused:
                await port.command(b"ECHO", ground.key("lost"))
            if "no answer for" in str(refused.value):
                break
        else:
            raise AssertionError("its limit is never reached")
        assert account.silent == {ground.node}
        took = port.monotonic() - began
        assert account.seconds(port.monotonic()) <= took
    assert limit - 0.01 < took < LIMIT / 2
    if ground.is_simulated:
        assert took < limit + 0.3, "beside the limit there is a moment for a server that was not asked yet"


@on(NETWORK)
async def test_a_call_with_a_shorter_limit_than_an_answer_may_take_ends_with_it(ground: Any) -> None:
    port = ground.open(timeout=LIMIT, retry_for=SHORT)
    await ground.again(port.open)
    ground.freeze()
    for _ in range(2):  # on an existing connection, and on a new one
        began = port.monotonic()
        with waited.call(), pytest.raises(WarmUnavailable):
            await port.command(b"ECHO", ground.key("lost"))
        took = port.monotonic() - began
        assert SHORT - 0.01 < took < (SHORT + 0.1 if ground.is_simulated else LIMIT / 2)
        ground.drop(port)
        await ground.pause()


@on(NETWORK)
async def test_a_server_that_says_nothing_cannot_be_opened_until_it_does(ground: Any) -> None:
    ground.freeze()
    port = ground.open(timeout=SHORT, retry_for=SHORT)
    for _ in range(3):
        with waited.call(), pytest.raises(WarmUnavailable):
            await port.open()
    ground.thaw()
    await ground.again(port.open)
    assert port.nodes() == ground.port.nodes()


@on(NETWORK)
async def test_an_answer_ends_what_a_server_is_blamed_for(ground: Any) -> None:
    with waited.call() as account:
        account.add(ground.port.monotonic(), ground.node)
        assert await ground.port.command(b"GET", ground.key()) is None
        assert account.silent == set()


# Scripts


@on(EVERY)
async def test_a_script_is_loaded_where_it_is_not_known(ground: Any) -> None:
    port, key = ground.port, ground.key()
    push = script_of(ground, "return redis.call('RPUSH', KEYS[1], ARGV[1])")
    (unknown,) = await port.exchange([push.call([key], ["x"])])
    assert isinstance(unknown, ReplyError)
    assert unknown.word == "NOSCRIPT"
    assert await port.script(push, [key], ["a"]) == 1
    assert await port.exchange([push.call([key], ["b"])]) == [2]
    assert await port.script(push, [key], ["c"]) == 3
    assert await port.command(b"LRANGE", key, 0, -1) == [b"a", b"b", b"c"]


@on(EVERY)
async def test_scripts_run_after_all_that_stand_before_them_whichever_are_known(ground: Any) -> None:
    port, key = ground.port, ground.key()
    write = script_of(ground, "redis.call('SET', KEYS[1], ARGV[1]) return ARGV[1]")
    read = script_of(ground, "return redis.call('GET', KEYS[1])")
    refuse = script_of(ground, "return redis.error_reply('MINE is an error')")
    await port.script(read, [key], [])  # so that the server has the second in its cache, but not the first
    calls = [(write, [key], ["x"]), (read, [key], []), (refuse, [key], []), (write, [key], ["y"]), (read, [key], [])]
    for _ in range(2):
        first, second, refused, *rest = await port.scripts(calls)
        assert [first, second, *rest] == [b"x", b"x", b"y", b"y"]
        assert isinstance(refused, StateError)
        assert "MINE is an error" in str(refused)


@on(EVERY)
async def test_the_error_of_a_script_is_raised(ground: Any) -> None:
    refuse = script_of(ground, "return redis.error_reply('MINE is an error')")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="MINE is an error"):
            await ground.port.script(refuse, [ground.key()], [])


@on(EVERY)
async def test_a_living_script_gets_the_data_id_of_its_connection(ground: Any) -> None:
    port = ground.port
    script = script_of(ground, "return {ARGV[1], ARGV[2]}", living=True)
    for _ in range(2):
        assert await port.script(script, [ground.key()], ["more"]) == [
            port.known_data_id(ground.node).encode(),
            b"more",
        ]
    assert (await port.identity_of(ground.node)).data_id == port.known_data_id(ground.node)
    assert await port.script(script, [ground.key()], [b"x"]) == [port.known_data_id(ground.node).encode(), b"x"]


@on(NETWORK)
async def test_what_waits_on_a_connection_apart_holds_up_nobody_else(ground: Any) -> None:
    port, key = ground.port, ground.key()
    push = script_of(ground, "return redis.call('RPUSH', KEYS[1], ARGV[1])")
    await port.script(push, [key], ["a"])
    waiting = ground.begin(port.apart(ground.node, [(push, [key], ["b"])], [(b"WAIT", 9, 0)]))
    while await port.command(b"LLEN", key) < 2:
        await ground.pause()
    assert not waiting.ended()
    ground.cut()
    with pytest.raises(WarmUnavailable):
        await waiting.result()


@on(NETWORK)
async def test_answers_of_a_connection_apart_stand_in_place(ground: Any) -> None:
    port, key = ground.port, ground.key()
    push = script_of(ground, "return redis.call('RPUSH', KEYS[1], ARGV[1])")
    refuse = script_of(ground, "return redis.error_reply('MINE is an error')")
    calls = [(push, [key], ["a"]), (refuse, [key], [])]
    info = (b"INFO", b"server", b"replication")
    count, refused, acknowledged, said = await port.apart(ground.node, calls, [(b"WAIT", 0, 1), info])
    assert count >= 1
    assert acknowledged in (0, 1), "by the replica, if there is one"
    assert isinstance(refused, StateError)
    assert identities.read(said).data_id == port.known_data_id(ground.node)
    (synced,) = await port.apart(ground.node, [], [(b"WAITAOF", 1, 0, 1)])
    assert isinstance(synced, StateError) or len(synced) == 2
    (unfinished,) = await port.apart(ground.node, [], [(b"WAIT", 9, 1)])
    assert unfinished < 9


@on(NETWORK, api="asyncio")
async def test_what_stands_behind_a_command_that_waits_waits_as_well(ground: Any) -> None:
    port, key = ground.port, ground.key()
    push = script_of(ground, "return redis.call('RPUSH', KEYS[1], ARGV[1])")
    await port.apart(ground.node, [(push, [key], ["a"])], [])
    ended = []

    async def wait(name: str, *words: Any) -> None:
        await port.apart(ground.node, [], [words])
        ended.append(name)

    first = ground.begin(wait("first", b"WAIT", 9, 50))
    await ground.pause()
    if ground.is_simulated:  # it may still be in transit
        await ground.until(lambda: any(each._is_blocked for each in ground.process.connections))
    second = ground.begin(wait("second", b"RPUSH", key, "b"))
    await second.result()
    await first.result()
    assert ended == ["first", "second"]


# Data ids


@on((*EMBEDDED, *SINGLE))
async def test_one_server_has_all_keys(ground: Any) -> None:
    port = ground.port
    await ground.again(port.relocate)
    assert port.node_of(b"x") == ground.node
    assert not port.several
    assert not port.is_cluster
    assert port.replicas(ground.node) is None
    assert port.sentinels() == []
    server = await port.identity_of(ground.node)
    assert server.primary
    assert server.data_id == port.known_data_id(ground.node) != ""
    assert not await port.has_data_elsewhere(server.data_id, ground.node)
    assert port.known_data_id("elsewhere:1") in ("", "embedded/embedded")


@on(NETWORK)
async def test_connections_of_another_data_id_are_dropped_and_those_that_listen_go_on(ground: Any) -> None:
    port = ground.port
    script = script_of(ground, "return ARGV[1]", living=True)
    before = await port.script(script, [ground.key()], [])
    assert before == port.known_data_id(ground.node).encode()

    async def listen() -> Any:
        wire = await port.wire(ground.node)
        ground.other_data()
        other = await port.wire(ground.node)  # this connection notices the new data id
        wire.post(b"PING", b"x")
        answer = await wire.receive()
        wire.close()
        other.close()
        return answer

    assert await ground.in_job(listen) == [b"x"]
    now = port.known_data_id(ground.node)
    assert now.encode() != before
    assert await ground.again(lambda: port.script(script, [ground.key()], [])) == now.encode()
    assert (await port.identity_of(ground.node)).data_id == now


# Subscriptions


@on(EVERY)
async def test_a_wire_hears_answers_and_messages_in_order(ground: Any) -> None:
    port, one, two = ground.port, ground.key("one"), ground.key("two")

    async def listen() -> Any:
        wire = await port.wire(ground.node)
        wire.post_all(b"SSUBSCRIBE", [one, two])
        received = [await wire.receive(), await wire.receive()]
        for n in range(20):
            await port.command(b"SPUBLISH", one, b"%d" % n)
        wire.post(b"SUNSUBSCRIBE", two)
        wire.post(b"PING", b"end")
        while received[-1][:1] != [b"pong"]:
            received.append(await wire.receive())
        wire.close()
        return received

    received = await ground.in_job(listen)
    assert received[:2] == [[b"ssubscribe", one, 1], [b"ssubscribe", two, 2]]
    assert received[2:22] == [[b"smessage", one, b"%d" % n] for n in range(20)]
    assert received[22:] == [[b"sunsubscribe", two, 1], [b"pong", b"end"]]


@on(EVERY)
async def test_an_error_on_a_wire_is_a_message(ground: Any) -> None:
    async def listen() -> Any:
        wire = await ground.port.wire(ground.node)
        wire.post(b"SSUBSCRIBE")
        found = await wire.receive()
        wire.close()
        return found

    kind, text = await ground.in_job(listen)
    assert kind == b"error"
    assert text.startswith(b"ERR")


@on(EVERY)
async def test_a_closed_wire_is_an_error_to_who_receives_and_silent_to_who_posts(ground: Any) -> None:
    port, wires, errors = ground.port, [], []

    async def listen() -> None:
        wires.append(await port.wire(ground.node))
        for _ in range(2):
            try:
                await wires[0].receive()
            except WarmUnavailable as error:
                errors.append(error)

    job = port.spawn(listen, "contract")
    await ground.until(lambda: wires)
    wires[0].close()
    wires[0].post(b"PING", b"x")
    wires[0].post_all(b"SSUBSCRIBE", [ground.key()])
    await ground.until(lambda: len(errors) == 2)
    await job.stop()


@on(NETWORK)
async def test_a_wire_that_is_cut_is_an_error(ground: Any) -> None:
    async def listen() -> None:
        wire = await ground.port.wire(ground.node)
        ground.cut()
        await wire.receive()

    with pytest.raises(WarmUnavailable):
        await ground.in_job(listen)


@on(NETWORK)
async def test_a_wire_to_a_server_that_says_nothing_is_an_error(ground: Any) -> None:
    port = ground.open(timeout=SHORT)
    await ground.again(port.open)
    ground.freeze()
    errors = []

    async def listen() -> None:
        try:
            await port.wire(ground.node)
        except WarmUnavailable as error:
            errors.append(error)

    await port.spawn(listen, "contract").stop()
    assert errors


@on(EVERY)
async def test_a_job_that_is_asked_to_end_does_so_at_its_next_message(ground: Any) -> None:
    port, received = ground.port, []

    async def listen() -> None:
        wire = await port.wire(ground.node)
        try:
            wire.post(b"PING", b"x")
            wire.post(b"PING", b"y")
            received.append(await wire.receive())
            await proceed.wait()
            received.append(await wire.receive())
        except BaseException as error:
            received.append(type(error))
            raise
        finally:
            wire.close()

    proceed = port.signal()
    job = port.spawn(listen, "contract")
    await ground.until(lambda: received)
    proceed.set()
    job.ask()
    await job.stop()
    assert received[0] == [b"x"]
    assert received[1:] in ([JobStopped], [[b"y"]]), "it may have received before it was asked"
