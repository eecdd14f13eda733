"""Several primaries that share the slots of a cluster. Law: a node answers by what it was told, which may be old.

Before a node carries a command out it looks at the slots of all its keys, as `getNodeByQuery` of Redis does. Each node
has a map of its own. Another one's config epoch and slots reach it some time after they changed; the higher epoch wins.
A slot moves as `redis-cli --cluster reshard` moves it: key by key, and then the target takes it.
"""

from __future__ import annotations

import bisect
import pickle
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import sha1
from typing import Any

from distributed_state.port.errors import ReplyError
from distributed_state.port.topology import SLOTS
from distributed_state.port.topology import slot_of as slot_of_key
from tests.simulation.node import Node
from tests.simulation.world import World

NODE_TIMEOUT = 1.0  # seconds: `cluster-node-timeout`
_REJOINS = 0.5  # seconds for which a node that was started takes no commands yet
_GOSSIP = 0.2  # seconds between two messages of a node to another, on average
_PATIENT = 10.0  # seconds for which a move waits for a node that is away
_KEYLESS = frozenset(b"TIME PING INFO CONFIG WAIT WAITAOF SCRIPT ROLE HELLO".split())
_ALL_KEYS = frozenset(b"DEL MGET UNLINK EXISTS".split())
_SHARD = frozenset(b"SSUBSCRIBE SUNSUBSCRIBE SPUBLISH".split())
_EVAL = frozenset((b"EVAL", b"EVALSHA"))
slot_of = lru_cache(maxsize=None)(slot_of_key)


def keys_of(words: Sequence[bytes]) -> Sequence[bytes]:
    """The keys and channels that a command names."""
    name = words[0]
    if name in _EVAL:
        return words[3 : 3 + int(words[2])]
    if name in _KEYLESS:
        return ()
    return words[1:] if name in _ALL_KEYS else words[1:2]


class Slots:
    """All slots in pieces, each of which has one owner: an even share for each node, and those that may move."""

    def __init__(self, nodes: int, single: Iterable[int]) -> None:
        self.single = {slot: nodes + at for at, slot in enumerate(sorted(set(single)))}
        bounds = [SLOTS * at // nodes for at in range(nodes)]
        starts = sorted({*bounds, *self.single, *(slot + 1 for slot in self.single if slot + 1 < SLOTS)})
        self._starts = starts
        self._pieces = [self.single.get(start, bisect.bisect_right(bounds, start) - 1) for start in starts]
        self.home = [*range(nodes), *(bisect.bisect_right(bounds, slot) - 1 for slot in self.single)]
        """Which node has each piece in the beginning."""

    def piece(self, slot: int) -> int:
        """The piece that a slot belongs to."""
        return self._pieces[bisect.bisect_right(self._starts, slot) - 1]

    def spans(self, owners: Sequence[str]) -> list[tuple[int, int, str]]:
        """First slot, last slot and owner of each stretch that has one."""
        found: list[tuple[int, int, str]] = []
        for at, (start, piece) in enumerate(zip(self._starts, self._pieces, strict=True)):
            end = self._starts[at + 1] - 1 if at + 1 < len(self._starts) else SLOTS - 1
            if found and found[-1][2] == owners[piece] and found[-1][1] == start - 1:
                found[-1] = (found[-1][0], end, owners[piece])
            elif owners[piece]:
                found.append((start, end, owners[piece]))
        return found


class Member:
    """What one node knows of its cluster; its file keeps that over a restart."""

    def __init__(self, cluster: Cluster, node: Node, number: int) -> None:
        self.cluster, self.node, self.name = cluster, node, node.name
        self.id = sha1(node.name.encode(), usedforsecurity=False).hexdigest()
        self.owners: list[str] = []
        self.epochs: dict[str, int] = {}  # of all nodes, as last heard of
        self.unclaimed: dict[int, None] = {}  # pieces that their owner no longer claims
        self.migrating: dict[int, str] = {}  # slots on their way to another node, and from one
        self.importing: dict[int, str] = {}
        self.deaf_until = 0.0
        self.serves_from = 0.0
        self.away_from = self.away_until = -1.0
        node.member = self

    @property
    def epoch(self) -> int:
        """Its config epoch."""
        return self.epochs[self.name]

    def owner(self, slot: int) -> str:
        """Who has a slot, as far as it knows."""
        return self.owners[self.cluster.slots.piece(slot)]

    # Commands

    def answer(self, commands: Sequence[tuple[bytes, ...]]) -> list[Any]:
        """The answers to commands that came together over one connection."""
        answers: list[Any] = []
        is_asking = False
        for words in commands:
            if words[0] == b"ASKING":
                answers.append(b"OK")
                is_asking = True
                continue
            if words[0] == b"CLUSTER":
                answers.append(self._said(words))
            else:
                refused = self.refusal(words, is_asking=is_asking)
                answers += self.node.carry_out([words]) if refused is None else [refused]
            is_asking = False
        return answers

    def refusal(self, words: Sequence[bytes], *, is_asking: bool = False) -> ReplyError | None:
        """Why it does not carry a command out, if it does not."""
        keys = keys_of(words)
        if not keys:
            return None
        slot = slot_of(keys[0])
        owner = self.owner(slot)
        if any(slot_of(key) != slot for key in keys):
            return ReplyError("CROSSSLOT Keys in request don't hash to the same slot")
        if not owner:
            return ReplyError("CLUSTERDOWN Hash slot not served")
        is_shard = words[0] in _SHARD
        if not is_shard and not self.is_up():
            return ReplyError("CLUSTERDOWN The cluster is down")
        is_leaving = owner == self.name and slot in self.migrating
        is_coming = owner != self.name and slot in self.importing
        if not is_shard and (is_leaving or (is_coming and is_asking)):
            present = self.node.carry_out([(b"EXISTS", key) for key in keys])
            is_lacking = not all(present)
            if is_lacking and (any(present) if is_leaving else len(keys) > 1):
                return ReplyError("TRYAGAIN Multiple keys request during rehashing of slot")
            if is_lacking and is_leaving:
                return ReplyError(f"ASK {slot} {self.migrating[slot]}")
            return None
        return None if owner == self.name else ReplyError(f"MOVED {slot} {owner}")

    def _said(self, words: Sequence[bytes]) -> Any:
        slots, cluster = self.cluster.slots, self.cluster
        match words[1]:
            case b"MYID":
                return self.id.encode()
            case b"KEYSLOT":
                return slot_of(words[2])
            case b"SLOTS":
                return [
                    [first, last, [*_place(owner), cluster.members[owner].id.encode()]]
                    for first, last, owner in slots.spans(self.owners)
                ]
            case b"NODES":
                return b"\n".join(self._line(each).encode() for each in cluster.members.values())
            case b"INFO":
                has = sum(last - first + 1 for first, last, _ in slots.spans(self.owners))
                state = "ok" if self.is_up() else "fail"
                return f"cluster_state:{state}\r\ncluster_slots_assigned:{has}\r\ncluster_slots_ok:{has}\r\n".encode()
        return ReplyError(f"ERR unknown subcommand '{words[1].decode()}'")

    def _line(self, other: Member) -> str:
        flags = "myself,master" if other is self else "master"
        spans = self.cluster.slots.spans(self.owners)
        shares = " ".join(f"{first}-{last}" for first, last, owner in spans if owner == other.name)
        return f"{other.id} {other.name}@1 {flags} - 0 0 {self.epochs[other.name]} connected {shares}"

    # Whether it serves

    def goes_away(self, seconds: float) -> None:
        """From now on the others hear nothing of it for so long."""
        now = self.node.world.now
        if self.away_until < now:
            self.away_from = now
        self.away_until = max(self.away_until, now + seconds)

    def is_silent(self, now: float) -> bool:
        """Whether the others have not heard of it for so long that they take it for failed."""
        return self.away_from >= 0 and self.away_from + NODE_TIMEOUT <= now < self.away_until

    def is_up(self) -> bool:
        """Whether it takes the cluster for one that serves: it was not just started, and hears enough of the others."""
        now, members = self.node.world.now, self.cluster.members
        if now < self.serves_from:
            return False
        silent = [each for each in members.values() if each is not self and each.is_silent(now)]
        if 2 * (len(members) - len(silent)) <= len(members):
            return False
        return not (self.cluster.is_whole and any(each.name in self.owners for each in silent))

    def started(self, node: Node) -> None:
        """Its process is another one, with what its file had. Keys of slots that others have are taken for imported."""
        self.node, node.member = node, self
        self.serves_from = node.world.now + _REJOINS
        for key in sorted(node.fake.dbs[0]._dict):
            slot = slot_of(key)
            if self.owner(slot) != self.name:
                self.importing.setdefault(slot, self.owner(slot))

    # What it hears of the others

    def hear(self, sender: Member) -> None:
        """Take what another node says of itself: its config epoch, and which slots it has."""
        before = list(self.owners)
        epoch = self.epochs[sender.name] = sender.epoch
        for piece, owner in enumerate(sender.owners):
            mine = self.owners[piece]
            if owner == sender.name:
                if mine != owner and (not mine or piece in self.unclaimed or self.epochs[mine] < epoch):
                    self.owners[piece] = owner
                if self.owners[piece] == owner:
                    self.unclaimed.pop(piece, None)
            elif mine == sender.name:
                self.unclaimed[piece] = None
        if epoch == self.epoch and sender.id > self.id:
            self.epochs[self.name] = max(self.epochs.values()) + 1
            self.cluster.spread(self)
        if before != self.owners:
            self.gave_up(before)

    def gave_up(self, before: Sequence[str]) -> None:
        """End the subscriptions of slots that it had before and has no longer, and drop the keys."""
        if not any(was == self.name != now for was, now in zip(before, self.owners, strict=True)):
            return
        for slot in [slot for slot in self.migrating if self.owner(slot) != self.name]:
            del self.migrating[slot]
        self.node.world.note("gave slots up", self.name)
        self.node.end_subscriptions(lambda channel: self.owner(slot_of(channel)) != self.name)
        if keys := [key for key in sorted(self.node.fake.dbs[0]._dict) if self._was_mine(key, before)]:
            self.node.carry_out([(b"DEL", key) for key in keys])

    def _was_mine(self, key: bytes, before: Sequence[str]) -> bool:
        piece = self.cluster.slots.piece(slot_of(key))
        return before[piece] == self.name != self.owners[piece]

    def keys_in(self, slot: int) -> list[bytes]:
        """The keys that it holds of a slot."""
        return [key for key in self.node.present() if slot_of(key) == slot]


def _place(name: str) -> tuple[bytes, int]:
    host, _, port = name.rpartition(":")
    return host.encode(), int(port)


class Cluster:
    """All nodes of it. `is_whole`: none serves while a slot has no node that does."""

    def __init__(self, world: World, nodes: Sequence[Node], single: Iterable[int], *, is_whole: bool) -> None:
        self.world, self.is_whole = world, is_whole
        self.slots = Slots(len(nodes), single)
        names = [node.name for node in nodes]
        self.members = {node.name: Member(self, node, at) for at, node in enumerate(nodes)}
        for member in self.members.values():
            member.owners = [names[at] for at in self.slots.home]
            member.epochs = {name: at + 1 for at, name in enumerate(names)}
        self.moving: dict[int, None] = {}

    def owner(self, slot: int) -> Member:
        """Who has a slot: of those who say that they do, the one with the highest config epoch."""
        claims = [each for each in self.members.values() if each.owner(slot) == each.name]
        return max(claims, key=lambda each: each.epoch)

    def spread(self, sender: Member) -> None:
        """Let the others hear of it, each in its own time."""
        for other in self.members.values():
            if other is not sender:
                self._send(sender, other)

    def _send(self, sender: Member, other: Member) -> None:
        def arrive() -> None:
            now = self.world.now
            if is_away(sender.node) or is_away(other.node) or other.deaf_until > now:
                self._send(sender, other)  # as it says the same again and again
            else:
                self.world.note("gossip", sender.name, other.name)
                other.hear(sender)

        self.world.after(0.001 + self.world.chance.expovariate(1 / _GOSSIP), arrive)

    # Slots move

    async def move(self, slot: int, target: Member, pause: float) -> None:
        """Move a slot to a node, one key after the other, if nobody does; given up before it began if one is away."""
        source = self.owner(slot)
        if source is target or slot in self.moving or is_away(source.node) or is_away(target.node):
            return
        self.moving[slot] = None
        world = self.world
        world.note("slot leaves", str(slot), source.name, target.name)
        if left := target.keys_in(slot):
            target.node.carry_out([(b"DEL", key) for key in left])  # it came back from an old file
        target.importing[slot] = source.name
        source.migrating[slot] = target.name
        try:
            while keys := await self._when_both(source, target, slot):
                for key in keys[: world.chance.randint(1, 4)]:
                    hand_over(key, source.node, target.node)
                await world.sleep(world.chance.expovariate(1 / pause))
            self._take(slot, source, target)
        finally:
            del self.moving[slot]

    async def _when_both(self, source: Member, target: Member, slot: int) -> list[bytes]:
        while is_away(source.node) or is_away(target.node):
            await self.world.sleep(0.05)
        return source.keys_in(slot)

    def _take(self, slot: int, source: Member, target: Member) -> None:
        """The target has the slot from now on, and the source knows; the others hear of it."""
        self.world.note("slot has moved", str(slot), source.name, target.name)
        piece = self.slots.piece(slot)
        target.importing.pop(slot, None)
        target.owners[piece] = target.name
        target.unclaimed.pop(piece, None)
        if target.epoch < max(target.epochs.values()):
            target.epochs[target.name] = max(target.epochs.values()) + 1
        before = list(source.owners)
        source.owners[piece] = target.name
        source.epochs[target.name] = target.epoch
        source.gave_up(before)
        self.spread(target)
        self.spread(source)


def is_away(node: Node) -> bool:
    """Whether it answers nobody now."""
    return node.is_down or node.frozen_until > node.world.now


def hand_over(key: bytes, source: Node, target: Node) -> None:
    """MIGRATE: one key with its deadline. What the target has is newer: the source came back from an old file."""
    item = source.fake.dbs[0]._dict.get(key)
    if item is None:
        return
    if not target.carry_out([(b"EXISTS", key)])[0]:
        value = pickle.dumps(item.value)
        words: list[tuple[Any, ...]] = [
            (b"RESTORE", key, b"0", sha1(value, usedforsecurity=False).digest() + value, b"REPLACE")
        ]
        if item.expireat is not None:
            words.append((b"PEXPIREAT", key, b"%d" % round(item.expireat * 1000)))
        target.carry_out(words)
    source.carry_out([(b"DEL", key)])
