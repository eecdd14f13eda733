"""The cluster model answers as real nodes do, even while a slot is moving."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import hiredis
import pytest
from below import server_binary

from distributed_state.port.commands import ReplyError
from distributed_state.programs.servers import begin_move, end_move, move_keys, redis_cluster
from tests.simulation.cluster import hand_over, slot_of
from tests.simulation.fleet import Fleet
from tests.simulation.node import Persistence
from tests.simulation.plan import SHAPES, Plan
from tests.simulation.run import Run
from tests.simulation.world import World

_KEY, _OTHER, _NEW, _CHANNEL = "{0.0}:a", "{0.0}:b", "{0.0}:c", "{0.0}:news"  # all in one slot
_ELSEWHERE = "{tag-1}:a"
_SLOT = slot_of(_KEY.encode())
_BOTH = "return redis.call('MGET', KEYS[1], KEYS[2])"
_NEVER = "return redis.pcall('EXISTS', KEYS[1] .. '?')"  # as same_data.lua finds out whether a slot is moving


class Simulated:
    """Three simulated nodes. A method names one of them: "source" owns the slot, "target" receives it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._world = World(1)
        self._stack.enter_context(self._world.rules())
        self._fleet = Fleet(self._world, Persistence("always"), (), 3, namespace="n", partitions=3)
        cluster = self._cluster = self._fleet.cluster
        assert cluster is not None
        cluster.slots.single[_SLOT] = cluster.slots.piece(_SLOT)
        source = cluster.owner(_SLOT)
        target = next(each for each in cluster.members.values() if each is not source)
        self._members = {"source": source, "target": target}
        self._heard: list[Any] = []
        self._wire = source.node.subscribe(self._heard.append)

    def name(self, node: str) -> str:
        return self._members[node].name

    def ask(self, node: str, *commands: tuple[Any, ...]) -> Any:
        answer = self._members[node].answer([tuple(str(word).encode() for word in each) for each in commands])[-1]
        return str(answer) if isinstance(answer, ReplyError) else _text(answer)

    def subscribe(self, channel: str) -> None:
        self._wire.post(b"SSUBSCRIBE", channel.encode())

    def received(self) -> Any:
        return _text(self._heard.pop(0))

    def begin(self) -> None:
        source, target = self._members.values()
        source.migrating[_SLOT], target.importing[_SLOT] = target.name, source.name

    def hand_over(self, *keys: str) -> None:
        source, target = self._members.values()
        for key in keys:
            hand_over(key.encode(), source.node, target.node)

    def end(self) -> None:
        source, target = self._members.values()
        self._cluster._take(_SLOT, source, target)

    def close(self) -> None:
        self._stack.close()


class Real:
    """The same with three real servers."""

    def __init__(self, kind: str) -> None:
        self._stack = ExitStack()
        cluster = self._stack.enter_context(redis_cluster(replicas=0, binary=server_binary(kind)))
        source = cluster.primary_of(_SLOT)
        target, other = [node for node in cluster.primaries() if node is not source]
        self._nodes, self._other = {"source": source, "target": target}, other
        self._wire = self._stack.enter_context(source.connect())

    def name(self, node: str) -> str:
        return f"127.0.0.1:{self._nodes[node].port}"

    def ask(self, node: str, *commands: tuple[Any, ...]) -> Any:
        with self._nodes[node].connect() as connection:
            for words in commands:
                try:
                    answer = connection.ask(*words)
                except hiredis.ReplyError as error:
                    answer = str(error)
        return answer

    def subscribe(self, channel: str) -> None:
        self._first = self._wire.ask("SSUBSCRIBE", channel)

    def received(self) -> Any:
        first, self._first = self._first, None
        return first or self._wire.ask("PING")  # its answer comes after all messages

    def begin(self) -> None:
        begin_move(_SLOT, *self._nodes.values())

    def hand_over(self, *keys: str) -> None:
        source, target = self._nodes.values()
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "AUTH", target.password, "KEYS", *keys)

    def end(self) -> None:
        source, target = self._nodes.values()
        while move_keys(_SLOT, source, target):
            pass
        end_move(_SLOT, source, target, [self._other])

    def close(self) -> None:
        self._stack.close()


def _text(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_text(each) for each in answer]
    return answer.decode() if isinstance(answer, bytes) else answer


@pytest.fixture(params=["simulated", "valkey", pytest.param("redis", marks=pytest.mark.wide)])
def nodes(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = Simulated() if request.param == "simulated" else Real(request.param)
    try:
        yield made
    finally:
        made.close()


def test_a_node_answers_for_its_slots_as_real_ones_do(nodes: Any) -> None:
    source, target = nodes.name("source"), nodes.name("target")
    again = "TRYAGAIN Multiple keys request during rehashing of slot"
    nodes.ask("source", ("SET", _KEY, "1"))
    nodes.ask("source", ("SET", _OTHER, "2"))
    assert nodes.ask("target", ("GET", _KEY)) == f"MOVED {_SLOT} {source}"
    assert nodes.ask("source", ("MGET", _KEY, _ELSEWHERE)) == "CROSSSLOT Keys in request don't hash to the same slot"
    nodes.subscribe(_CHANNEL)
    assert nodes.received() == ["ssubscribe", _CHANNEL, 1]

    assert nodes.ask("source", ("EVAL", _NEVER, 1, _KEY)) == 0
    nodes.begin()
    assert nodes.ask("source", ("MGET", _KEY, _OTHER)) == ["1", "2"], "nothing was moved yet"
    assert "non local key" in nodes.ask("source", ("EVAL", _NEVER, 1, _KEY))
    nodes.hand_over(_KEY)
    assert nodes.ask("source", ("GET", _KEY)) == f"ASK {_SLOT} {target}"
    assert nodes.ask("source", ("SET", _NEW, "3")) == f"ASK {_SLOT} {target}", "what is not there is made at the target"
    assert nodes.ask("source", ("GET", _OTHER)) == "2"
    assert nodes.ask("source", ("MGET", _KEY, _OTHER)) == again
    assert nodes.ask("source", ("EVAL", _BOTH, 2, _KEY, _OTHER)) == again
    assert nodes.ask("source", ("EVAL", _BOTH, 2, _KEY, _NEW)) == f"ASK {_SLOT} {target}"
    assert nodes.ask("target", ("GET", _KEY)) == f"MOVED {_SLOT} {source}", "who does not ask is sent to the owner"
    assert nodes.ask("target", ("ASKING",), ("GET", _KEY)) == "1"
    assert nodes.ask("target", ("ASKING",), ("GET", _NEW)) is None
    assert nodes.ask("target", ("ASKING",), ("EVAL", _NEVER, 1, _KEY)) == 0, "the target has no other to refer to"
    assert nodes.ask("target", ("ASKING",), ("EVAL", _BOTH, 2, _KEY, _OTHER)) == again
    assert nodes.ask("target", ("ASKING",), ("GET", _KEY), ("GET", _KEY)) == f"MOVED {_SLOT} {source}", "once"

    nodes.hand_over(_OTHER)
    nodes.end()
    assert nodes.received() == ["sunsubscribe", _CHANNEL, 0]
    assert nodes.ask("source", ("GET", _KEY)) == f"MOVED {_SLOT} {target}"
    assert nodes.ask("source", ("SPUBLISH", _CHANNEL, "x")) == f"MOVED {_SLOT} {target}"
    assert nodes.ask("target", ("EVAL", _BOTH, 2, _KEY, _OTHER)) == ["1", "2"]
    assert nodes.ask("target", ("EVAL", _NEVER, 1, _KEY)) == 0


def test_a_node_is_rebuilt_with_what_its_scripts_could_not_access_while_a_slot_moved() -> None:
    nodes = Simulated()
    try:
        source = nodes._members["source"].node
        written = "local found = redis.pcall('EXISTS', KEYS[1] .. '?') redis.call('RPUSH', KEYS[1], type(found))"
        nodes.ask("source", ("EVAL", written, 1, _KEY))
        nodes.begin()
        nodes.ask("source", ("EVAL", f"{written} {written.replace('local ', '')}", 1, _KEY))
        made = source.rebuilt(source.world.now, source.identity)
        found = made.carry_out([(b"LRANGE", _KEY.encode(), b"0", b"-1")])
        assert found == [[b"number", b"table", b"table"]]
    finally:
        nodes.close()


def test_a_node_that_is_cut_off_from_the_others_takes_no_commands_after_its_timeout() -> None:
    run = Run(Plan.of(1, SHAPES["failover"]).without(*(f"f{at}" for at in range(20))))
    refused: list[str] = []

    def cut() -> None:
        cluster = run.fleet.cluster
        assert cluster is not None
        member = cluster.primary(cluster.groups[0])
        cluster.cut_off(member, 3.0)
        for after in (0.5, 1.1):
            run.world.after(after, lambda: refused.append(str(member.refusal((b"GET", _key_of(member))))))

    run.world.after(0.2, cut)
    assert not run.result().broken
    assert refused == ["None", "CLUSTERDOWN The cluster is down"]
    assert run.fleet.groups[0].primary_name != run.fleet.groups[0].names[0], "a replica was promoted"


def test_a_replica_follows_its_primary_again_although_that_stood_still_when_its_cut_ended() -> None:
    run = Run(Plan.of(1, SHAPES["failover"]).without(*(f"f{at}" for at in range(20))))
    attached: list[int] = []

    def cut() -> None:
        cluster, primary = run.fleet.cluster, run.fleet.groups[0].primary
        assert cluster is not None
        cluster.cut_off(primary.member, 0.4)
        run.fleet.freeze_server(primary, 0.6)
        for after in (0.1, 2.5):
            run.world.after(after, lambda: attached.append(len(primary.attached())))

    run.world.after(0.2, cut)
    assert not run.result().broken
    assert attached == [0, 1]
    assert run.fleet.groups[0].primary_name == run.fleet.groups[0].names[0]


def _key_of(member: Any) -> bytes:
    return next(key for key in (b"%d" % n for n in range(1000)) if member.owner(slot_of(key)) == member.name)
