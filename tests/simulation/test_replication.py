"""Replicas and promotions: a replica has the first part of its primary's writes, and answers as real ones do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from distributed_state.port import identities
from distributed_state.port.commands import ReplyError
from tests.simulation.fleet import SERVER, Fleet
from tests.simulation.network import Connection
from tests.simulation.node import Node, Persistence
from tests.simulation.test_node import content
from tests.simulation.world import Future, Process, World

PUSH = b"redis.call('INCR', KEYS[2]) return redis.call('RPUSH', KEYS[1], ARGV[1])"
COPY, OTHER = "copy0:6379", "copy1:6379"


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    world = World(1)
    with world.rules():
        yield Fleet(world, Persistence("always"), (0.105, 0.305))


def write(node: Node, *values: int) -> list[Any]:
    """Push these values, each a hundredth of a second after the previous one."""
    answers = []
    for value in values:
        node.world.now += 0.01
        answers += node.carry_out([(b"EVAL", PUSH, 2, b"list", b"count", value)])
    return answers


def pushed(node: Node) -> list[int]:
    """The values that it returns."""
    (found,) = node.carry_out([(b"LRANGE", b"list", 0, -1)])
    return [int(each) for each in found]


def wait(fleet: Fleet, wanted: int, within_ms: int) -> Any:
    """The answer to WAIT after a write on the same connection."""
    world = fleet.world
    connection = Connection(fleet.network, Process(world, "replica"), fleet.server, ReplyError)
    answer = connection.send([(b"SET", b"key", 1), (b"WAIT", wanted, within_ms)])
    world.run_until(answer, 10)
    return answer.value[1]


def test_a_replica_has_what_its_primary_had_a_while_ago(fleet: Fleet) -> None:
    copy, other = fleet.network.nodes[COPY], fleet.network.nodes[OTHER]
    write(fleet.server, *range(400))
    assert pushed(copy) == list(range(389))
    assert pushed(other) == list(range(369))
    fleet.world.now += 0.4
    assert pushed(copy) == pushed(other) == list(range(400))
    assert content(copy) == content(other) == content(fleet.server)


def test_a_replica_refuses_writes_and_says_what_it_is(fleet: Fleet) -> None:
    copy = fleet.network.nodes[COPY]
    write(fleet.server, 1)
    caught = b"return redis.pcall('HSET', KEYS[1], 'a', 'b').err"
    refused = copy.carry_out([(b"SET", b"a", 1), (b"EVAL", PUSH, 2, b"list", b"count", 2), (b"EVAL", caught, 1, b"h")])
    assert [str(each).split()[0] for each in refused[:2]] == ["READONLY", "READONLY"]
    assert refused[2].startswith(b"READONLY ")
    role, info = copy.carry_out([(b"ROLE",), identities.INFO])
    assert role[:3] == [b"slave", b"server", 6379]
    assert identities.read(info).data_id == ""
    fleet.world.now += 1
    assert content(copy) == content(fleet.server)


@pytest.mark.parametrize(("wanted", "within_ms", "found"), [(1, 0, 1), (2, 0, 2), (2, 200, 1), (3, 1000, 2)])
def test_wait_counts_those_that_have_it(fleet: Fleet, wanted: int, within_ms: int, found: int) -> None:
    fleet.world.now = 1.0
    assert wait(fleet, wanted, within_ms) == found


def test_wait_counts_none_that_is_cut_off_or_stands_still(fleet: Fleet) -> None:
    fleet.world.now = 1.0
    fleet.group.cut(COPY)
    fleet.network.nodes[OTHER].frozen_until = 100.0
    assert wait(fleet, 1, 900) == 0


def test_the_one_that_is_promoted_goes_on_with_what_it_had(fleet: Fleet) -> None:
    old, copy = fleet.server, fleet.network.nodes[COPY]
    write(old, *range(300))
    fleet.group.promote(COPY)
    assert fleet.server is copy
    assert pushed(copy) == list(range(289))
    identity = identities.read(copy.carry_out([identities.INFO])[0])
    assert identity.primary
    assert identity.follows(old.identity.data_id)
    ((since, until),) = [(each.since, each.until) for each in fleet.group.losses]
    assert 2.8 < since < fleet.world.now < until

    write(copy, 1000)
    write(old, 2000)
    assert pushed(copy)[-1] == 1000
    assert pushed(old)[-1] == 2000, "it does not know"

    # Its own writes are lost when it follows the new primary.
    fleet.group.attach(SERVER, after=0.5)
    assert fleet.group.losses[0].until == fleet.world.now
    assert pushed(old)[-1] == 2000
    fleet.world.now += 1
    assert content(old) == content(copy)
    assert pushed(old)[-1] == 1000
    assert identities.read(old.carry_out([identities.INFO])[0]).data_id == ""
    # The other replica followed the old primary, which has the new primary's data by now.
    assert pushed(fleet.network.nodes[OTHER])[-1] == 1000
    fleet.group.attach(OTHER)
    fleet.world.now += 1
    assert content(fleet.network.nodes[OTHER]) == content(copy)


def test_one_that_was_cut_off_is_promoted_with_what_it_had_then(fleet: Fleet) -> None:
    write(fleet.server, *range(200))
    fleet.group.cut(COPY)
    write(fleet.server, *range(200, 400))
    fleet.group.promote(COPY)
    assert pushed(fleet.server) == list(range(189))


def test_a_primary_that_is_made_a_replica_and_promoted_again_has_another_data_id(fleet: Fleet) -> None:
    old = fleet.server
    before = old.identity
    write(old, 1, 2, 3)
    fleet.group.promote(COPY)
    fleet.group.attach(SERVER)
    fleet.world.now += 1
    fleet.group.promote(SERVER)
    assert fleet.server is old
    assert old.identity.process == before.process
    assert old.identity.follows(fleet.network.nodes[COPY].identity.data_id)
    assert not old.identity.follows(before.data_id)


def test_a_promoted_server_is_rebuilt_with_the_times_of_both(fleet: Fleet) -> None:
    stamp = b"local now = redis.call('TIME') return redis.call('RPUSH', KEYS[1], now[1] .. '.' .. now[2])"
    for _ in range(2):
        for _ in range(200):
            fleet.world.now += 0.01
            fleet.server.carry_out([(b"EVAL", stamp, 1, b"times"), (b"SET", fleet.world.now, 1, b"PX", 700)])
        if fleet.server.name == SERVER:
            fleet.group.promote(COPY)
    rebuilt = fleet.server.rebuilt(fleet.world.now, fleet.server.identity)
    assert content(rebuilt) == content(fleet.server)


def test_a_primary_refuses_writes_without_the_replicas_that_it_wants(fleet: Fleet) -> None:
    fleet.server.least = 2
    write(fleet.server, 1)
    fleet.group.cut(COPY)
    (refused,) = write(fleet.server, 2)
    assert refused.word == "NOREPLICAS"
    assert pushed(fleet.server) == [1]


def test_a_script_hears_of_another_name_of_the_data(fleet: Fleet) -> None:
    said = b"redis.call('SET', KEYS[1], redis.call('INFO', 'replication'))"
    fleet.server.carry_out([(b"EVAL", said, 1, b"before")])
    fleet.group.rename()
    fleet.server.carry_out([(b"EVAL", said, 1, b"after")])
    before, after = fleet.server.carry_out([(b"GET", b"before"), (b"GET", b"after")])
    assert identities.read(after).renames(identities.read(before).data_id)
    rebuilt = fleet.server.rebuilt(fleet.world.now, fleet.server.identity)
    assert rebuilt.carry_out([(b"GET", b"before"), (b"GET", b"after")]) == [before, after]


def test_who_waits_for_replicas_hears_that_the_primary_is_none_any_more(fleet: Fleet) -> None:
    old, world = fleet.server, fleet.world
    connection = Connection(fleet.network, Process(world, "replica"), old, ReplyError)
    answer = connection.send([(b"SET", b"key", 1), (b"WAIT", 3, 0)])
    world.run_until(pause(world, 0.5), 1)
    fleet.group.promote(COPY)
    fleet.group.attach(SERVER)
    world.run_until(answer, 1)
    assert answer.value[1].word == "UNBLOCKED"


def pause(world: World, seconds: float) -> Future:
    """A future that is settled after this many seconds."""
    future = Future()
    world.after(seconds, future.settle)
    return future
