"""The server model: a server rebuilt from its log holds the same data, and reports its state as real servers do."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from distributed_state.port import identities
from distributed_state.port.commands import ReplyError
from distributed_state.port.identities import ServerIdentity
from tests.simulation import node as nodes
from tests.simulation.fleet import Fleet
from tests.simulation.network import Connection
from tests.simulation.node import Node, Persistence
from tests.simulation.plan import SHAPES, Plan
from tests.simulation.run import Run
from tests.simulation.world import Process, Task, World

READ = {
    b"string": (b"GET",), b"hash": (b"HGETALL",), b"list": (b"LRANGE", 0, -1), b"set": (b"SMEMBERS",),
    b"zset": (b"ZRANGE", 0, -1, b"WITHSCORES"), b"stream": (b"XRANGE", b"-", b"+"),
}  # fmt: skip


def more(stream: Any) -> tuple[Any, ...]:
    """The properties of a stream besides its entries."""
    return stream.last_item_key(), stream.entries_added, stream.max_deleted_id


def content(node: Node) -> dict[bytes, Any]:
    """Type, value and deadline of each key that has not expired."""
    found = {}
    keys = node.present()
    for key in keys:
        (kind,) = node.carry_out([(b"TYPE", key)])
        if kind == b"none":
            continue  # it expired, and no command has removed it yet
        read, *rest = READ[kind]
        (value, deadline) = node.carry_out([(read, key, *rest), (b"PEXPIRETIME", key)])
        if kind == b"hash":
            value = dict(zip(value[::2], value[1::2], strict=True))
        elif kind == b"set":
            value = sorted(value)
        elif kind == b"stream":
            value = (value, more(node.fake.dbs[0][key].value))
        found[key] = (kind, value, deadline)
    return found


def without_pictures(node: Node, until: float) -> Node:
    """The server rebuilt from its whole log."""
    pictures = list(node._snapshots)
    node._snapshots.clear()
    try:
        return node.rebuilt(until, node.identity)
    finally:
        node._snapshots[:] = pictures


BRIEF = {"calm", "all", "cluster"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in BRIEF else [pytest.mark.wide]) for n in SHAPES])
def test_a_server_that_is_rebuilt_from_its_log_holds_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_SNAPSHOT_EVERY", 50)  # more often than in other runs
    run = Run(Plan.of(2, SHAPES[name]))
    most, pictures = 0, 0

    def look() -> None:
        """Compare during the run: later most keys have expired."""
        for node in run.fleet.servers:
            if not node.is_down:
                compare(node)

    def compare(node: Node) -> None:
        nonlocal most, pictures
        now = run.world.now
        found = content(node)
        most, pictures = max(most, len(found)), max(pictures, len(node._snapshots))
        rebuilt = node.rebuilt(now, node.identity)
        assert content(rebuilt) == found
        assert content(rebuilt.rebuilt(now, node.identity)) == found
        assert content(without_pictures(node, now)) == found
        for part in (0.5, 0.9) if node._times else ():
            before = node._times[int(part * (len(node._times) - 1))]
            assert content(node.rebuilt(before, node.identity)) == content(without_pictures(node, before))

    for at in range(1, 7):
        run.world.after(0.5 * at, look)
    assert not run.result().broken
    assert most >= 10
    assert pictures, "a picture was taken, and used"


def test_a_server_that_is_rebuilt_knows_the_scripts_of_its_log_wherever_it_begins() -> None:
    world = World(1)
    with world.rules():
        node = node_of(world)
        text = b"return redis.call('RPUSH', KEYS[1], ARGV[1])"
        sha = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
        node.carry_out([(b"EVAL", text, 1, b"list", 0)])
        for n in range(1, 400):
            node.carry_out([(b"EVALSHA", sha, 1, b"list", n)])
        node.fake.script_cache.clear()  # as SCRIPT FLUSH does
        assert node._snapshots
        rebuilt = node.rebuilt(world.now, node.identity)
        assert rebuilt.carry_out([(b"LLEN", b"list")]) == [400]
        assert rebuilt.rebuilt(world.now, node.identity).carry_out([(b"LLEN", b"list")]) == [400]
        for server in (node, rebuilt):
            (unknown,) = server.carry_out([(b"EVALSHA", sha, 1, b"list", 0)])
            assert isinstance(unknown, ReplyError), "no script survives a restart"
            found = server.carry_out([(b"EVAL", text, 1, b"list", 0), (b"EVALSHA", sha, 1, b"list", 0)])
            assert found == [401, 402], "one that is sent again is known again"


def test_what_a_script_wrote_before_its_error_is_kept() -> None:
    world = World(1)
    with world.rules():
        node = node_of(world)
        text = b"redis.call('SET', KEYS[1], 'x') return redis.call('LPUSH', KEYS[1], 'y')"
        (refused,) = node.carry_out([(b"EVAL", text, 1, b"key")])
        assert isinstance(refused, ReplyError)
        assert node.carry_out([(b"GET", b"key")]) == [b"x"]
        assert node.rebuilt(world.now, node.identity).carry_out([(b"GET", b"key")]) == [b"x"]


@pytest.mark.parametrize("former", ["", "da7a00000001"])
def test_info_reports_the_data_id_of_a_server(former: str) -> None:
    identity = ServerIdentity("da7a00000002", "4ace00000002", True, former)
    with World(1).rules():
        node = node_of(World(1))
        node.identity = identity
        (said,) = node.carry_out([identities.INFO])
    assert identities.read(said) == identity._replace(uptime=3600)


def test_info_names_the_replicas_that_are_attached() -> None:
    world = World(1)
    with world.rules():
        fleet = Fleet(world, Persistence("always"), (0.1, 0.1))
        fleet.group.cut("copy1:6379")
        (said,) = fleet.server.carry_out([(b"INFO",)])
    lines = said.decode().splitlines()
    assert "connected_slaves:1" in lines
    assert "slave0:ip=copy0,port=6379,state=online" in lines


@pytest.mark.parametrize("seed", range(1, 6))
def test_requests_stay_in_order_however_often_a_server_stands_still(seed: int) -> None:
    world = World(seed)
    with world.rules():
        fleet = Fleet(world, Persistence("always"))
        process, node = Process(world, "replica"), fleet.server
        connection = Connection(fleet.network, process, node, ReplyError)

        async def send() -> None:
            answers = []
            for n in range(300):
                answers.append(connection.send([(b"RPUSH", b"list", n)]))
                await world.sleep(world.chance.expovariate(1000))
                if world.chance.random() < 0.1:
                    fleet.freeze_server(node, world.chance.uniform(0, 0.05))
            assert [(await each)[0] for each in answers] == list(range(1, 301))

        root = Task(process, send(), "send")
        world.run_until(root.ended, 100)
        assert root.ended.error is None
        assert node.carry_out([(b"LRANGE", b"list", 0, -1)])[0] == [b"%d" % n for n in range(300)]


def node_of(world: World) -> Node:
    """A server that holds nothing yet."""
    return Node(world, "server:6379", ServerIdentity("da7a00000001", "4ace00000001", True), Persistence("always"))
