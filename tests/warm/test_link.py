"""What is heard when partitions lie on several nodes and move: links on a cluster that is played here, step by step.

Real clusters are in `integration`; here is what a server shows only now and then, or in another order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from slots import slot

from distributed_state.errors import WarmUnavailable
from distributed_state.port.shared import LoopJob
from distributed_state.values.keys import Keys
from distributed_state.values.levels import Freshness
from distributed_state.warm import link
from distributed_state.warm.clock import Rounds
from distributed_state.warm.link import Link, NodeChannels

pytestmark = pytest.mark.unit

KEYS = Keys("ns", 4)
STEP = 0.002


class Node:
    """One server: who listens, what it refuses, and which epochs its partitions have."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.listeners: dict[bytes, set[Wire]] = {}
        self.refusing = ""
        self.moving = b""
        self.epochs: dict[bytes, str] = {}
        self.wires: list[Wire] = []
        self.mute = False  # it takes connections, and says nothing on them

    def serves(self, channel: bytes) -> bool:
        return self.cluster.owner[slot(channel)] == self.name

    def publish(self, channel: bytes, payload: bytes) -> int:
        for wire in self.listeners.get(channel, set()):
            wire.answer([b"smessage", channel, payload])
        return len(self.listeners.get(channel, set()))

    def heard_by(self, channel: bytes) -> int:
        return len(self.listeners.get(channel, set()))


class Wire:
    """A subscription connection, as a server of a cluster answers on it."""

    def __init__(self, node: Node) -> None:
        self.node, self.queue, self.closed = node, asyncio.Queue[Any](), False
        self.held: list[Any] | None = [] if node.mute else None  # answers that are not delivered yet
        node.wires.append(self)

    def post(self, kind: bytes, channel: bytes) -> None:
        listeners = self.node.listeners.setdefault(channel, set())
        if not self.node.serves(channel):
            owner = self.node.cluster.owner[slot(channel)]
            self.answer([b"error", f"MOVED {slot(channel)} {owner}".encode()])
            return
        (listeners.add if kind == b"SSUBSCRIBE" else listeners.discard)(self)
        self.answer([kind.lower(), channel, 1])

    def post_all(self, kind: bytes, channels: Sequence[bytes]) -> None:
        for each in channels:
            self.post(kind, each)

    def answer(self, message: list[Any]) -> None:
        self.queue.put_nowait(message) if self.held is None else self.held.append(message)

    async def receive(self) -> list[Any]:
        found = await self.queue.get()
        if found is None:
            raise WarmUnavailable("the link is closed")
        return found  # type: ignore[no-any-return]

    def close(self) -> None:
        self.closed = True
        for listeners in self.node.listeners.values():
            listeners.discard(self)
        self.queue.put_nowait(None)


class Cluster:
    """Nodes with slots; as a port, what a link asks of one."""

    def __init__(self, *names: str) -> None:
        self.now = 1000.0
        self.servers = {name: Node(self, name) for name in names}
        self.owner = {KEYS.slot(each): names[each * len(names) // 4] for each in range(4)}
        self.seen = dict(self.owner)  # as the port knows it
        self.knows = True
        for each in range(4):
            self.servers[self.owner[KEYS.slot(each)]].epochs[KEYS.partition(each).meta] = f"1-{each}"

    def move(self, partition: int, to: str, *, push: bool = True) -> None:
        """A slot goes to another node, with its keys; the former one ends the subscriptions of that slot."""
        former = self.servers[self.owner[KEYS.slot(partition)]]
        self.owner[KEYS.slot(partition)] = to
        meta = KEYS.partition(partition).meta
        self.servers[to].epochs[meta] = former.epochs.pop(meta)
        for channel, listeners in former.listeners.items():
            if slot(channel) == KEYS.slot(partition):
                for wire in listeners if push else ():
                    wire.queue.put_nowait([b"sunsubscribe", channel, 0])
                listeners.clear()

    async def until(self, condition: Callable[[], Any]) -> None:
        """Let time pass until something is so."""
        for _ in range(5000):
            if condition():
                return
            await self.passes()
        raise AssertionError(f"not so in {5000 * STEP:g} s")

    async def passes(self) -> None:
        """Let a moment pass."""
        self.now += STEP
        await asyncio.sleep(0)

    # The port

    def node_of(self, key: bytes) -> str:
        if slot(key) not in self.seen:
            raise WarmUnavailable("nobody has it")
        return self.seen[slot(key)]

    async def relocate(self) -> None:
        if self.knows:
            self.seen = dict(self.owner)

    async def wire(self, node: str) -> Wire:
        if self.servers[node].refusing == "connections":
            raise WarmUnavailable("refused")
        return Wire(self.servers[node])

    async def exchange_with(self, node: str, commands: list[Any]) -> list[Any]:
        server = self.servers[node]
        ((_, _, _, meta, echoes, _, sent),) = commands
        if server.refusing or not server.serves(meta) or server.moving == meta:
            return [WarmUnavailable(server.refusing or "MOVED, or TRYAGAIN")]
        epoch = server.epochs.get(meta, "")
        server.publish(echoes, f"{epoch} {sent}".encode())
        return [[b"ok", b"1", b"0"]]

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            await asyncio.sleep(0)

    def spawn(self, job: Any, name: str) -> LoopJob:
        return LoopJob(asyncio.get_running_loop(), job, name)

    def signal(self) -> Signal:
        return Signal(self)

    def mutex(self) -> Any:
        return nullcontext()


class Signal:
    """By the time that is played here."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._set = cluster, False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    async def wait(self, timeout: float) -> bool:
        end = self._cluster.now + timeout
        while not self._set and self._cluster.now < end:
            await asyncio.sleep(0)
        return self._set


class Replica:
    """A link, and what it told its owner."""

    def __init__(self, cluster: Cluster, max_staleness: float = 0.2) -> None:
        self.cluster, self.received, self.lost, self.epochs = cluster, dict[bytes, list[bytes]](), list[Freshness](), []
        self.epochs = list[tuple[int, str]]()
        self.rounds = rounds = Rounds(lambda: cluster.now)
        rounds._phase = cluster.now  # so that tests know when they are
        self.link = Link(
            cluster, KEYS, "me", max_staleness=max_staleness, rounds=rounds, lost=self.lost.extend,
            epoch_received=lambda *epoch: self.epochs.append(epoch), time_received=lambda *answer: None,
        )  # type: ignore[arg-type]  # fmt: skip

    def watch(self, partition: int, name: str = "c") -> bytes:
        channel = f"{KEYS.partition(partition).meta.decode()[:-4]}{name}".encode()
        self.received[channel] = []
        self.link.watch(channel, lambda of, payload: self.received[of].append(payload))
        return channel

    async def hears(self, partition: int, name: str = "c") -> bytes:
        channel = self.watch(partition, name)
        await self.cluster.until(lambda: self.link.confirmed(channel))
        return channel

    def good(self, channel: bytes) -> bool:
        freshness = self.link.freshness(channel)
        return freshness is not None and freshness.good_until > self.cluster.now


@pytest.fixture
def cluster() -> Cluster:
    return Cluster("a:1", "b:2")


async def one_silent_node(cluster: Cluster) -> None:
    replica = Replica(cluster)
    near, far = await replica.hears(0), await replica.hears(3)
    assert {name: len(each.wires) for name, each in cluster.servers.items()} == {"a:1": 1, "b:2": 1}
    await cluster.until(lambda: replica.good(near) and replica.good(far))
    kept = replica.link.freshness(near)
    cluster.servers["b:2"].refusing = "READONLY You can't write against a read only replica."
    await cluster.until(lambda: not replica.good(far))
    for _ in range(200):
        assert replica.good(near), "the other node proves its link as before"
        assert not replica.good(far)
        await cluster.passes()
    assert replica.link.freshness(near) is kept
    assert replica.link.silence > 0.2
    cluster.servers["b:2"].refusing = ""
    await cluster.until(lambda: replica.good(far))
    await replica.link.close()
    assert all(wire.closed for each in cluster.servers.values() for wire in each.wires)


async def test_a_silent_node_ends_what_is_hot_of_its_partitions_alone(cluster: Cluster) -> None:
    await one_silent_node(cluster)


async def test_if_one_echo_proved_every_link_a_silent_node_would_be_taken_for_calm(
    cluster: Cluster, monkeypatch: Any
) -> None:
    every = list[Freshness]()
    made, prove = Freshness.__init__, Freshness.prove

    def noted(self: Freshness, partition: int) -> None:
        made(self, partition)
        every.append(self)

    monkeypatch.setattr(Freshness, "__init__", noted)
    monkeypatch.setattr(Freshness, "prove", lambda self, until: [prove(each, until) for each in every])
    with pytest.raises(AssertionError):
        await one_silent_node(cluster)


async def a_lost_connection(cluster: Cluster) -> None:
    replica = Replica(cluster)
    near, far = await replica.hears(0), await replica.hears(3)
    kept, gone = replica.link.freshness(near), replica.link.freshness(far)
    cluster.servers["b:2"].wires[0].close()
    await cluster.until(lambda: gone in replica.lost)
    assert gone is not None
    assert gone.over
    await cluster.until(lambda: replica.link.confirmed(far))
    assert replica.link.freshness(far) is not gone, "what was read before never answers again"
    assert replica.link.freshness(near) is kept
    assert kept not in replica.lost
    assert replica.link.breaks == 1
    await replica.link.close()


async def test_a_partition_that_is_heard_later_is_as_good_as_the_last_proof(cluster: Cluster) -> None:
    """It need not wait for the next one; but what was proved on a connection that is lost counts for no other."""
    replica = Replica(cluster)
    first = await replica.hears(0)
    await cluster.until(lambda: replica.good(first))
    proofs = len(replica.epochs)
    second = await replica.hears(1)
    assert replica.good(second)
    kept = replica.link.freshness(first)
    assert kept is not None
    found = replica.link.freshness(second)
    assert found is not None
    assert len(replica.epochs) == proofs
    assert found.good_until == kept.good_until
    server = cluster.servers["a:1"]
    server.refusing = "READONLY"
    server.wires[-1].close()
    await cluster.until(lambda: not replica.link.confirmed(first))
    await cluster.until(lambda: replica.link.confirmed(first))
    assert not replica.good(first)
    await replica.link.close()


async def test_a_lost_link_empties_what_its_node_has(cluster: Cluster) -> None:
    await a_lost_connection(cluster)


async def a_slot_moves(cluster: Cluster) -> None:
    """Its keys and channels go to another node, in the middle of everything."""
    replica = Replica(cluster)
    near, moving, far = await replica.hears(0), await replica.hears(1), await replica.hears(3)
    other = await replica.hears(1, "d")
    own = replica.link.subscribed_as(moving)
    assert slot(own) == slot(moving), "so that the server ends both"
    assert cluster.servers["a:1"].heard_by(own) == 1
    kept, gone = replica.link.freshness(near), replica.link.freshness(moving)
    cluster.move(1, "b:2")
    await cluster.until(lambda: gone in replica.lost)
    assert gone is not None
    assert gone.over, "nobody was told what was changed meanwhile"
    for channel in (moving, other):
        await cluster.until(lambda channel=channel: replica.link.confirmed(channel))
        assert cluster.servers["b:2"].heard_by(channel) == 1
    assert replica.received[moving] == [b"", b""]
    assert replica.link.subscribed_as(moving) not in (b"", own), (
        "the name of before may still be a listener's somewhere"
    )
    assert cluster.servers["b:2"].heard_by(replica.link.subscribed_as(moving)) == 1
    assert replica.link.freshness(near) is kept
    await cluster.until(lambda: all(map(replica.good, (near, moving, other, far))))
    assert cluster.servers["b:2"].publish(moving, b"after") == 1
    await cluster.until(lambda: replica.received[moving][-1] == b"after")
    await replica.link.close()


async def test_a_slot_that_moves_is_heard_at_its_new_node(cluster: Cluster) -> None:
    await a_slot_moves(cluster)


async def test_a_slot_that_moves_unnoticed_would_be_taken_for_calm(cluster: Cluster, monkeypatch: Any) -> None:
    monkeypatch.setattr(NodeChannels, "ended", lambda self, channel: None)
    monkeypatch.setattr(NodeChannels, "probe_another", lambda self: None)
    with pytest.raises(AssertionError):
        await a_slot_moves(cluster)


async def test_a_partition_that_is_being_moved_does_not_make_its_node_silent(cluster: Cluster) -> None:
    """For as long as that takes, no script of it is carried out, nor the probe; nothing of it is changed either."""
    replica = Replica(cluster)
    channels = [await replica.hears(0), await replica.hears(1)]
    await cluster.until(lambda: all(map(replica.good, channels)))
    for each in (0, 1):
        cluster.servers["a:1"].moving = KEYS.partition(each).meta
        for _ in range(200):
            await cluster.passes()
            assert all(map(replica.good, channels))
    await replica.link.close()


async def test_a_node_from_which_all_moved_is_left(cluster: Cluster) -> None:
    replica = Replica(cluster)
    channels = [await replica.hears(each) for each in range(4)]
    for each in (2, 3):
        cluster.move(each, "a:1")
    await cluster.until(lambda: all(wire.closed for wire in cluster.servers["b:2"].wires))
    await cluster.until(lambda: all(map(replica.good, channels)))
    assert replica.link.up
    await cluster.until(lambda: not [each for each in replica.link._ending if each.running])
    await replica.link.close()


async def test_who_asks_the_wrong_node_is_sent_to_the_right_one(cluster: Cluster) -> None:
    """What the port knows may be old. The refusal names no channel; others of that connection are not disturbed."""
    replica = Replica(cluster)
    near = await replica.hears(0)
    kept = replica.link.freshness(near)
    cluster.move(1, "b:2")
    cluster.knows = False
    moved = replica.watch(1)
    own = replica.watch(0, "d")
    await cluster.until(lambda: replica.link.confirmed(own))
    for _ in range(200):
        await cluster.passes()
    assert not replica.link.confirmed(moved), "nobody knows where it is"
    assert replica.link.freshness(near) is kept
    cluster.knows = True
    await cluster.until(lambda: replica.good(moved))
    assert cluster.servers["b:2"].heard_by(moved) == 1
    await replica.link.close()


@pytest.mark.parametrize("first", ["end", "answer"])
async def test_leaving_what_the_server_ended_at_that_moment_confuses_no_other(cluster: Cluster, first: str) -> None:
    """The end that nobody asked for comes before the refusal of the one that was, or is all that comes."""
    replica = Replica(cluster)
    near, moving = await replica.hears(0), await replica.hears(1)
    wire = cluster.servers["a:1"].wires[0]
    wire.held = []
    if first == "end":
        replica.link.leave(moving)
        assert wire.held.pop()[0] == b"sunsubscribe"
        cluster.servers["a:1"].listeners[moving].add(wire)
        cluster.move(1, "b:2")
        wire.held.append([b"error", f"MOVED {KEYS.slot(1)} b:2".encode()])
    else:
        cluster.move(1, "b:2", push=False)
        replica.link.leave(moving)
    asked = [replica.watch(0, name) for name in "xyz"]
    for each in wire.held:
        wire.queue.put_nowait(each)
    wire.held = None
    await cluster.until(lambda: all(map(replica.good, [near, *asked])))
    assert replica.received[near] == [b""], "it was never lost"
    replica.link.leave(asked[0])
    assert not replica.link.confirmed(asked[0])
    assert replica.good(asked[1])
    again = await replica.hears(1)
    assert cluster.servers["b:2"].heard_by(again) == 1
    await replica.link.close()


async def test_a_primary_that_is_one_no_more_is_left_for_the_one_that_took_over(cluster: Cluster) -> None:
    """It keeps its listeners, and tells them what it hears: only that it may not write gives it away."""
    replica = Replica(cluster)
    channels = [await replica.hears(each) for each in (2, 3)]
    owns = [replica.link.subscribed_as(each) for each in channels]
    before = [replica.link.freshness(each) for each in channels]
    former, taker = cluster.servers["b:2"], cluster.servers["a:1"]
    former.refusing = "MOVED"
    former.serves = lambda channel: True  # type: ignore[method-assign]
    for each in (2, 3):
        cluster.owner[KEYS.slot(each)] = "a:1"
        taker.epochs[KEYS.partition(each).meta] = former.epochs[KEYS.partition(each).meta]
    await cluster.until(lambda: all(taker.heard_by(each) for each in channels))
    await cluster.until(lambda: all(map(replica.good, channels)))
    assert not set(owns) & {replica.link.subscribed_as(each) for each in channels}
    assert not any(map(former.heard_by, [*channels, *owns]))
    assert all(each is not None and each.over and each in replica.lost for each in before)
    await replica.link.close()


async def test_what_is_heard_elsewhere_is_heard_at_its_former_node_no_more(cluster: Cluster) -> None:
    """Where that says nothing of itself; our own name is the first to go, or a writer there would be taken for us."""
    replica = Replica(cluster)
    staying, going = await replica.hears(2), await replica.hears(3)
    own, before = replica.link.subscribed_as(going), replica.link.freshness(going)
    former = cluster.servers["b:2"]
    former.serves = lambda channel: True  # type: ignore[method-assign]
    cluster.owner[KEYS.slot(3)] = "a:1"
    asked = list[bytes]()
    post = former.wires[0].post
    former.wires[0].post = lambda kind, channel: (asked.append(channel), post(kind, channel))  # type: ignore[method-assign]
    await replica.link.relocate()
    assert asked[:2] == [own, going]
    assert before in replica.lost
    await cluster.until(lambda: replica.link.confirmed(going))
    assert former.heard_by(own) == former.heard_by(going) == 0
    assert former.heard_by(staying) == cluster.servers["a:1"].heard_by(going) == 1
    await replica.link.close()


async def test_a_node_that_cannot_be_reached_is_asked_for_again_and_again(cluster: Cluster) -> None:
    cluster.servers["b:2"].refusing = "connections"
    replica = Replica(cluster)
    near, far = await replica.hears(0), replica.watch(3)
    await cluster.until(lambda: replica.good(near))
    assert not replica.link.up
    cluster.servers["b:2"].refusing = ""
    await cluster.until(lambda: replica.good(far))
    await replica.link.close()


async def test_a_link_whose_first_request_is_never_answered_is_made_anew(cluster: Cluster) -> None:
    server = cluster.servers["a:1"]
    server.mute = True
    replica = Replica(cluster)
    near = replica.watch(0)
    await cluster.until(lambda: len(server.wires) > 1)
    assert server.wires[0].closed
    assert not replica.link.confirmed(near)
    server.mute = False
    await cluster.until(lambda: replica.good(near))
    await replica.link.close()


async def stood_still(cluster: Cluster) -> int:
    """A loop that was blocked for longer than silence may last; how many connections it made by then."""
    replica = Replica(cluster)
    near = await replica.hears(0)
    await cluster.until(lambda: replica.good(near))
    server = cluster.servers["a:1"]
    for _ in range(3):
        server.wires[0].held = []  # what comes while the loop is blocked, and is read after the next probe
        cluster.now += 60
        await cluster.until(lambda: len(server.wires[0].held or ()) == 1 or server.wires[0].closed)
        for message in server.wires[0].held:
            server.wires[0].queue.put_nowait(message)
        server.wires[0].held = None
        await cluster.until(lambda: replica.good(near))
    await replica.link.close()
    return len(server.wires)


async def test_a_loop_that_stood_still_keeps_a_sound_link(cluster: Cluster) -> None:
    assert await stood_still(cluster) == 1


async def test_if_that_counted_as_silence_it_would_be_lost(cluster: Cluster, monkeypatch: Any) -> None:
    monkeypatch.setattr(link, "_ROUND", 1e9)
    assert await stood_still(cluster) > 1


async def test_a_slot_that_nobody_has_is_heard_once_somebody_has_it(cluster: Cluster) -> None:
    """And asking for it spoils nothing for the others, which are looked for as before."""
    orphan = KEYS.slot(0)
    owner = cluster.seen.pop(orphan)
    cluster.knows = False
    replica = Replica(cluster)
    lost = replica.watch(0)
    near = await replica.hears(1)
    far = await replica.hears(3)
    assert not replica.link.confirmed(lost)
    cluster.seen[orphan] = owner
    await replica.link.relocate()
    await cluster.until(lambda: replica.good(lost) and replica.good(near) and replica.good(far))
    del cluster.seen[orphan]
    cluster.seen[KEYS.slot(3)] = "a:1"
    cluster.move(3, "a:1")
    await replica.link.relocate()
    await cluster.until(lambda: replica.good(far))
    await replica.link.close()


async def test_an_emptied_node_is_noticed_by_a_partition_that_holds_something(cluster: Cluster) -> None:
    """One that was never used shows nothing, whatever becomes of the others."""
    cluster.servers["a:1"].epochs.pop(KEYS.partition(0).meta)
    replica = Replica(cluster)
    await replica.hears(0)
    used = await replica.hears(1)
    await cluster.until(lambda: (1, "1-1") in replica.epochs)
    seen = len(replica.epochs)
    cluster.servers["a:1"].epochs.clear()
    await cluster.until(lambda: (1, "") in replica.epochs[seen:])
    kept = replica.link.freshness(used)
    replica.link.renew(1)
    assert {each.partition for each in replica.lost} == {0, 1}, "all that this node has, and nothing else"
    assert kept is not None
    assert kept.over
    assert replica.link.confirmed(used), "the subscription goes on"
    await cluster.until(lambda: replica.good(used))
    await replica.link.close()


async def test_the_name_that_commits_say_is_another_one_when_a_channel_named_with_it_is_left(cluster: Cluster) -> None:
    replica = Replica(cluster)
    one, two, apart = await replica.hears(0), await replica.hears(0, "d"), await replica.hears(1)
    name, elsewhere = replica.link.subscribed_as(one), replica.link.subscribed_as(apart)
    assert replica.link.subscribed_as(two) == name
    assert name != elsewhere
    replica.link.leave(two)
    assert cluster.servers["a:1"].heard_by(name) == 0
    assert replica.link.subscribed_as(one) != name
    assert replica.link.subscribed_as(two) == b""
    assert replica.link.subscribed_as(apart) == elsewhere, "another partition's is its own"
    await replica.link.close()


def test_a_request_is_confirmed_by_the_last_answer_only() -> None:
    requests = link.Requests()
    for kind in (b"SSUBSCRIBE", b"SUNSUBSCRIBE", b"SSUBSCRIBE"):
        requests.ask(kind, b"c")
    assert not requests.confirmed(b"c")
    assert requests.ended(b"c"), "as asked"
    assert requests.confirmed(b"c")
    assert not requests.ended(b"c"), "of itself"
    requests.ask(b"SSUBSCRIBE", b"d")
    requests.ask(b"SUNSUBSCRIBE", b"c")
    assert requests.ended(b"c"), "of itself, and it was to end"
    assert requests.refused() == b"d"
    assert requests.refused() == b"c"
    assert requests.refused() is None


def listening(cluster: Cluster, **how: float) -> Replica:
    """A replica that hears a channel of which nothing is kept."""
    replica = Replica(cluster, **how)
    replica.link.listen(f"{KEYS.partition(0).meta.decode()[:-4]}e".encode(), lambda *_: None)
    return replica


async def passed(cluster: Cluster, seconds: float) -> None:
    end = cluster.now + seconds
    await cluster.until(lambda: cluster.now >= end)


async def rests(cluster: Cluster) -> None:
    """How often a link is proved, by what is kept of its node."""
    replica = listening(cluster)
    await cluster.until(lambda: replica.epochs)
    await passed(cluster, 7.0)
    assert len(replica.epochs) <= 4
    assert len(cluster.servers["a:1"].wires) == 1, "it was not taken for silent"
    near = await replica.hears(0)
    await cluster.until(lambda: replica.good(near))
    before = len(replica.epochs)
    await passed(cluster, 1.0)
    assert replica.good(near)
    assert len(replica.epochs) - before >= 10, "what is kept is proved as often as ever"
    replica.link.leave(near)
    await passed(cluster, 0.1)
    before = len(replica.epochs)
    await passed(cluster, 1.0)
    assert len(replica.epochs) - before <= 1, "nothing is kept any more"
    await replica.link.close()


async def test_a_link_on_which_nothing_rests_is_proved_rarely(cluster: Cluster) -> None:
    await rests(cluster)


async def test_a_link_that_never_rested_would_be_proved_all_the_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeChannels, "nothing_kept", False)
    with pytest.raises(AssertionError):
        await rests(cluster)


async def test_a_link_that_always_rested_would_prove_too_little(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeChannels, "nothing_kept", True)
    with pytest.raises(AssertionError):
        await rests(cluster)


async def rests_in_a_large_fleet(cluster: Cluster) -> None:
    """A thousand replicas prove such links every nine seconds; what begins to be kept then is kept at once."""
    replica = listening(cluster)
    replica.rounds.spread(1000)
    await cluster.until(lambda: replica.epochs)
    for _ in range(4):
        await passed(cluster, 8.0)
    assert len(replica.epochs) <= 6
    assert len(cluster.servers["a:1"].wires) == 1, "it was not taken for silent"
    near = await replica.hears(0)
    await cluster.until(lambda: replica.good(near))
    await passed(cluster, 1.0)
    assert replica.good(near)
    assert len(cluster.servers["a:1"].wires) == 1, "nor when it was proved often again"
    await replica.link.close()


async def test_in_a_large_fleet_a_link_that_rests_is_proved_more_rarely_and_not_taken_for_silent(
    cluster: Cluster,
) -> None:
    await rests_in_a_large_fleet(cluster)


async def test_it_would_be_taken_for_silent_as_soon_as_another(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(link, "ROUND_SECONDS", 9.0)
    with pytest.raises(AssertionError):
        await rests_in_a_large_fleet(cluster)


async def begins_to_keep(cluster: Cluster) -> None:
    replica = listening(cluster, max_staleness=1.0)
    await cluster.until(lambda: replica.epochs)
    await passed(cluster, 2.37)  # the echo proves nothing any more, and the next round is some time away
    began = cluster.now
    near = await replica.hears(0)
    await cluster.until(lambda: replica.good(near))
    assert cluster.now - began < 0.05
    await replica.link.close()


async def test_a_link_that_rests_is_proved_at_once_when_something_is_to_be_kept(cluster: Cluster) -> None:
    await begins_to_keep(cluster)


async def test_it_would_wait_for_the_next_round_if_nobody_woke_the_probe(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link.NodeLink, "watch", lambda self, *channel: self.channels.watch(*channel))
    with pytest.raises(AssertionError):
        await begins_to_keep(cluster)
