"""The rules on which the core may rely when Sentinels or a cluster say which server has which keys.

Law: as in `test_port`. Faults that only happen there, such as a redirection, are made by the servers themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from below import logged_in, relocated
from combinations import APIS

from distributed_state.errors import Backpressure, ConfigurationError, NotPermitted, StateError, WarmUnavailable
from distributed_state.port.commands import ReplyError
from distributed_state.programs.servers import free_port
from tests.contracts.grounds import CLUSTER, EVERY, NETWORK, REAL, SENTINEL, Case, Ground, cases, on
from tests.contracts.test_port import SHORT, script_of

REPLICATED = ("valkey", "redis", "sentinel")  # those of a simulator: tests/simulation/test_replication.py


async def answered(ground: Ground, ask: Callable[..., Any], *given: Any) -> Any:
    """The result of a call that gives servers a second each, and on a busy machine needs another attempt."""

    async def call() -> Any:
        found = ask(*given)
        return await found if inspect.isawaitable(found) else found

    return await ground.again(call)


async def refused(ground: Ground, reason: str, ask: Callable[..., Any], *given: Any) -> WarmUnavailable:
    """The WarmUnavailable that gives this reason; before it a call may succeed, or be refused for another one."""
    while True:
        try:
            found = ask(*given)
            await found if inspect.isawaitable(found) else found
        except WarmUnavailable as error:
            if reason in str(error):
                return error
        await ground.pause()


# Who has which keys


@on(NETWORK)
async def test_before_a_port_has_looked_no_server_is_known_to_have_a_key(ground: Any) -> None:
    port = ground.open()
    with pytest.raises(WarmUnavailable, match="no server is known to have slot"):
        port.node_of(ground.key())
    assert port.nodes() == []
    await answered(ground, port.relocate)
    assert port.node_of(ground.key()) == ground.node
    assert port.nodes() == ground.port.nodes()


@on(SENTINEL)
async def test_sentinels_name_the_one_server_that_has_all_keys(ground: Any) -> None:
    port = ground.port
    await answered(ground, port.relocate)
    assert port.nodes() == [ground.node] == [port.node_of(b"x")]
    assert port.several
    assert not port.is_cluster
    known = await answered(ground, port.replicas, ground.node)
    assert len(known.promotable) == 1
    assert not known.others
    await ground.until(lambda: not any(each.problem or each.no_failover for each in port.sentinels()))
    said = port.sentinels()
    assert said
    assert {(each.primary, each.no_failover, each.problem) for each in said} == {(ground.node, "", "")}
    server = await port.identity_of(ground.node)
    assert server.primary
    assert not await port.has_data_elsewhere(server.data_id, ground.node)


@on(SENTINEL)
async def test_the_replicas_of_a_server_that_is_not_the_primary_are_not_known(ground: Any) -> None:
    await refused(ground, "no longer the primary", ground.port.replicas, "127.0.0.1:1")


@on(CLUSTER)
async def test_the_servers_of_a_cluster_share_the_keys(ground: Any) -> None:
    port, nodes = ground.port, ground.port.nodes()
    await answered(ground, port.relocate)
    assert len(nodes) == 3
    assert port.several
    assert port.is_cluster
    assert {port.node_of(b"{%d}" % number) for number in range(100)} == set(nodes)
    assert port.node_of(b"{1}a") == port.node_of(b"b{1}c")
    assert port.sentinels() == []
    for node in nodes:
        assert await answered(ground, port.replicas, node) == (frozenset(), frozenset())
    data_ids = [(await port.identity_of(node)).data_id for node in nodes]
    assert len(set(data_ids)) == 3
    assert await port.has_data_elsewhere(data_ids[0], nodes[1])
    assert not await port.has_data_elsewhere(data_ids[0], nodes[0])
    assert not await port.has_data_elsewhere("another/data", nodes[0])


@on(CLUSTER)
async def test_an_exchange_with_several_servers_is_answered_in_order(ground: Any) -> None:
    port = ground.port
    keys = [ground.key_of(node) for node in port.nodes()] * 3
    assert await port.exchange([(b"SET", key, b"%d" % n) for n, key in enumerate(keys)]) == [b"OK"] * 9
    assert await port.commands([(b"GET", key) for key in keys]) == [b"6", b"7", b"8"] * 3
    read = script_of(ground, "return redis.call('GET', KEYS[1])")
    refuse = script_of(ground, "return redis.error_reply('MINE is an error')")
    await port.script(read, keys[:1], [])  # so that one server knows the script, and the others do not
    *found, refused = await port.scripts([*((read, [key], []) for key in keys), (refuse, keys[:1], [])])
    assert found == [b"6", b"7", b"8"] * 3
    assert isinstance(refused, StateError)


@on(CLUSTER)
async def test_a_living_script_gets_the_data_id_of_its_own_server(ground: Any) -> None:
    port = ground.port
    script = script_of(ground, "return ARGV[1]", living=True)
    calls = [(script, [ground.key_of(node)], []) for node in port.nodes()]
    assert await port.scripts(calls) == [port.known_data_id(node).encode() for node in port.nodes()]


@on(CLUSTER)
async def test_answers_of_a_server_that_is_away_are_errors_in_place_of_its_answers(ground: Any) -> None:
    port = ground.open(timeout=SHORT)
    await ground.again(port.open)
    other = ground.key_of(port.nodes()[1])
    await ground.again(lambda: port.commands([(b"SET", other, "x"), (b"DEL", ground.key())]))
    ground.freeze()
    found = None
    while found != b"x":  # this server, too, may take longer on a busy machine
        lost, found = await ground.again(lambda: port.exchange([(b"GET", ground.key()), (b"GET", other)]))
        assert isinstance(lost, WarmUnavailable)
    with pytest.raises(WarmUnavailable):
        await port.exchange([(b"GET", ground.key()), (b"GET", ground.key("another"))])


@on(CLUSTER)
async def test_keys_of_several_slots_in_one_command_are_refused(ground: Any) -> None:
    other = ground.key_of(ground.port.nodes()[1])
    with pytest.raises(ConfigurationError, match="CROSSSLOT"):
        await ground.port.command(b"MGET", ground.key(), other)


# Slots that move


@on(CLUSTER)
async def test_a_key_that_has_moved_is_asked_for_where_it_is(ground: Any) -> None:
    port, key, source = ground.port, ground.key(), ground.node
    await port.command(b"SET", key, "x")
    target = ground.begin_move()
    ground.move(key)
    ground.end_move()
    assert port.node_of(key) == source, "nothing says so until it is asked for"
    (moved,) = await port.exchange_with(source, [(b"GET", key)])
    assert isinstance(moved, ReplyError)
    assert moved.word == "MOVED"
    assert port.node_of(key) == source, "what one server is asked for is not followed"
    assert await port.command(b"GET", key) == b"x"
    assert port.node_of(key) == target
    assert await port.command_with(target, b"GET", key) == b"x"


@on(CLUSTER)
async def test_a_redirection_on_a_connection_apart_is_an_error_and_is_learned(ground: Any) -> None:
    port, key, source = ground.port, ground.key(), ground.node
    push = script_of(ground, "return redis.call('RPUSH', KEYS[1], ARGV[1])")
    target = ground.begin_move()
    ground.end_move()
    (moved,) = await port.apart(source, [(push, [key], ["a"])], [])
    assert isinstance(moved, WarmUnavailable)
    assert port.node_of(key) == target
    assert await port.apart(target, [(push, [key], ["a"])], []) == [1]
    await answered(ground, port.relocate)
    assert port.node_of(key) == target


@on(CLUSTER)
async def test_a_key_on_its_way_is_found_on_either_server(ground: Any) -> None:
    port, key, other, new, source = ground.port, ground.key(), ground.key("other"), ground.key("new"), ground.node
    script = script_of(ground, "return {ARGV[1], redis.call('GET', KEYS[1])}", living=True)
    await port.commands([(b"SET", key, "x"), (b"SET", other, "y")])
    target = ground.begin_move()
    ground.move(key)
    assert await port.commands([(b"GET", key), (b"GET", other), (b"GET", new)]) == [b"x", b"y", None]
    assert await port.command(b"GET", key) == b"x"
    (asked,) = await port.exchange_with(source, [(b"GET", key)])
    assert isinstance(asked, ReplyError)
    assert asked.word == "ASK"
    for each, value in ((key, b"x"), (other, b"y")):
        assert await port.script(script, [each], []) == [port.known_data_id(source).encode(), value], (
            "until it is moved"
        )
    assert port.node_of(key) == source
    ground.move(other)
    ground.end_move()
    assert await ground.again(lambda: port.script(script, [key], [])) == [port.known_data_id(target).encode(), b"x"]


@on(CLUSTER)
async def test_keys_of_which_one_is_on_its_way_are_unavailable_until_the_others_are(ground: Any) -> None:
    port, keys = ground.port, [ground.key("one"), ground.key("two")]
    both = script_of(ground, "return redis.call('MGET', KEYS[1], KEYS[2])")
    await port.commands([(b"SET", key, "x") for key in keys])
    ground.begin_move()
    ground.move(keys[0])
    (word,) = {answer.word for answer in await port.exchange([(b"MGET", *keys)])}
    assert word == "TRYAGAIN"
    with pytest.raises(WarmUnavailable, match="on their way"):
        await port.script(both, keys, [])
    ground.move(keys[1])
    assert await port.script(both, keys, []) == [b"x", b"x"]


@on(CLUSTER)
async def test_a_slot_without_an_owner_is_unavailable_until_it_has_one(ground: Any) -> None:
    port, key = ground.port, ground.key()
    await port.command(b"SET", key, "x")
    ground.give_up_slot()
    with pytest.raises(WarmUnavailable, match="CLUSTERDOWN"):
        await port.command(b"GET", key)
    ground.take_slot()
    assert await ground.again(lambda: port.command(b"GET", key)) == b"x"


# Servers that are replaced


@on(REPLICATED)
async def test_a_server_that_became_a_replica_refuses_writes_and_its_connections_are_dropped(ground: Any) -> None:
    port, key = ground.port, ground.key()
    script = script_of(ground, "redis.call('SET', KEYS[1], ARGV[1]) return ARGV[1]", living=True)
    before = await port.script(script, [key], [])
    assert before == port.known_data_id(ground.node).encode()
    ground.demote()
    with pytest.raises(WarmUnavailable) as caught:
        await port.command(b"SET", key, "lost")
    assert caught.value.demoted
    if ground.kind not in SENTINEL:  # there no connection to a replica is made
        server = await ground.again(lambda: port.identity_of(ground.node))
        assert not server.primary
    ground.promote()
    now = await ground.again(lambda: port.script(script, [key], []))
    assert now == port.known_data_id(ground.node).encode() != before, "what it holds may be older"


@on(SENTINEL)
async def test_a_connection_to_a_replica_is_not_made(ground: Any) -> None:
    port, source = ground.port, ground.node
    ground.demote()
    ground.drop(port)
    await refused(ground, "not the primary", port.command, b"GET", ground.key())
    ground.promote()
    assert await ground.again(lambda: port.command(b"EXISTS", ground.key())) == 0
    assert port.nodes() == [source]


@on(SENTINEL)
async def test_a_primary_that_was_replaced_is_no_longer_asked(ground: Any) -> None:
    port, key, source = ground.port, ground.key(), ground.node
    script = script_of(ground, "redis.call('SET', KEYS[1], ARGV[1]) return ARGV[1]", living=True)
    before = await port.script(script, [key], [])
    ground.replace()
    while port.nodes() == [source]:
        await answered(ground, port.relocate)
        await ground.pause()
    now = await ground.again(lambda: port.script(script, [key], []))
    assert port.node_of(key) == ground.node != source
    assert now == port.known_data_id(ground.node).encode() != before
    with pytest.raises(StateError):
        await port.command_with(source, b"SET", key, "lost")
    assert await port.command(b"GET", key) == now


# Servers that refuse


@on(REAL)
async def test_a_full_server_refuses_what_needs_memory(ground: Any) -> None:
    port, key = ground.port, ground.key()
    await port.command(b"SET", key, "x")
    ground.afterwards(lambda: ground.ask("CONFIG", "SET", "maxmemory", 0))
    ground.ask("CONFIG", "SET", "maxmemory", 1)
    with pytest.raises(Backpressure):
        await port.command(b"SET", key, "y")
    assert await port.command(b"GET", key) == b"x"
    ground.ask("CONFIG", "SET", "maxmemory", 0)
    assert await port.command(b"SET", key, "y") == b"OK"


@on(REAL)
async def test_a_wrong_password_is_not_permitted_and_is_in_no_message(ground: Any) -> None:
    port = ground.open_at(logged_in(ground.url, ":hidden"))
    with pytest.raises(NotPermitted) as caught:
        await ground.again(port.open)
    assert "hidden" not in str(caught.value)


@on(REAL)
async def test_where_nobody_listens_servers_are_unavailable(ground: Any) -> None:
    port = ground.open_at(relocated(ground.url, f"127.0.0.1:{free_port()}"))
    for look in (port.open, port.relocate):
        with pytest.raises(WarmUnavailable):
            await look()
    assert port.nodes() == []


@on(REAL)
async def test_a_url_of_another_kind_of_server_is_a_configuration_error(ground: Any) -> None:
    schemes = {"redis": "redis+cluster", "redis+sentinel": "redis", "redis+cluster": "redis+sentinel"}
    parts = urlsplit(ground.url)
    path = "/service/0" if parts.scheme == "redis+cluster" else ""
    port = ground.open_at(parts._replace(scheme=schemes[parts.scheme], path=path, query="").geturl())
    for look in (port.open, port.relocate):
        with pytest.raises(
            ConfigurationError,
            match=r"is not (a Sentinel|part of)|a Sentinel: use|refused user name",
        ):
            await ground.again(look)


@on(("sentinel",))
async def test_a_service_that_sentinels_do_not_know_is_a_configuration_error(ground: Any) -> None:
    port = ground.open_at(ground.url.replace("/mymaster/", "/another/"))
    with pytest.raises(ConfigurationError, match="No such master"):
        await ground.again(port.open)
    with pytest.raises(ConfigurationError):
        await answered(ground, port.replicas, ground.node)
    await ground.until(lambda: "No such master" in port.sentinels()[0].problem)


# The grounds themselves


def test_all_tests_together_meet_every_kind_of_ground_on_both_apis() -> None:
    every = {Case(kind, api) for kind in EVERY for api in APIS}
    names = [f"test_{number}" for number in range(300)]
    found = [cases(name, EVERY, APIS) for name in names]
    assert {len(each) for each in found} == {3}, "embedded, simulated and one real kind"
    assert {each for one in found for each in one} == every
    wide = [cases(name, EVERY, APIS, "wide") for name in names]
    assert all(sorted(case.kind for case in one) == sorted(EVERY) for one in wide)
    assert all(one[:3] == first for one, first in zip(wide, found, strict=True)), "what a default run has, and more"
    assert all({case.api for case in one} == set(APIS) for one in wide)
    assert {each for one in wide for each in one} == every
    assert set(cases("test", EVERY, APIS, "full")) == every
    assert {*cases("test", CLUSTER, APIS[:1], "wide")} == {Case(kind, APIS[0]) for kind in CLUSTER}
