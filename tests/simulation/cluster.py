"""Several primaries that share the slots of a cluster. Law: a node answers from its own view, which may be out of date.

Before a node executes a command, it checks the slots of all its keys, as `getNodeByQuery` of Redis does. Each node
has its own slot map. It learns another node's config epoch and slots some time after they changed; the higher epoch
wins. A slot moves as with `redis-cli --cluster reshard`: key by key, and then the target takes the slot.

If the others have received nothing from a primary for `cluster-node-timeout`, a replica replaces it. A primary that
was cut off from them rejects commands after that time; until then it accepts writes that will be lost.
"""

from __future__ import annotations

import bisect
import pickle
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import sha1
from typing import Any

from distributed_state.port.commands import ReplyError
from distributed_state.port.topology import SLOTS
from distributed_state.port.topology import slot_of as slot_of_key
from tests.simulation.node import Node
from tests.simulation.replication import Group
from tests.simulation.world import World

NODE_TIMEOUT = 1.0  # seconds: `cluster-node-timeout`
_REJOINS = 0.5  # seconds after its start during which a node rejects commands
_BEAT = 1.0
_GOSSIP = 0.2  # average seconds between two messages from one node to another
_KEYLESS = frozenset(b"TIME PING ECHO INFO CONFIG WAIT WAITAOF SCRIPT ROLE HELLO SCAN".split())
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
    """All slots in ranges, each with one owner: an equal share for each node, and the slots that may move."""

    def __init__(self, nodes: int, single: Iterable[int]) -> None:
        self.single = {slot: nodes + at for at, slot in enumerate(sorted(set(single)))}
        bounds = [SLOTS * at // nodes for at in range(nodes)]
        starts = sorted({*bounds, *self.single, *(slot + 1 for slot in self.single if slot + 1 < SLOTS)})
        self._starts = starts
        self._pieces = [self.single.get(start, bisect.bisect_right(bounds, start) - 1) for start in starts]
        self.home = [*range(nodes), *(bisect.bisect_right(bounds, slot) - 1 for slot in self.single)]
        """Which node has each piece in the beginning."""

    def piece(self, slot: int) -> int:
        """The range that a slot belongs to."""
        return self._pieces[bisect.bisect_right(self._starts, slot) - 1]

    def spans(self, owners: Sequence[str]) -> list[tuple[int, int, str]]:
        """First slot, last slot and owner of each range that has an owner."""
        found: list[tuple[int, int, str]] = []
        for at, (start, piece) in enumerate(zip(self._starts, self._pieces, strict=True)):
            end = self._starts[at + 1] - 1 if at + 1 < len(self._starts) else SLOTS - 1
            if found and found[-1][2] == owners[piece] and found[-1][1] == start - 1:
                found[-1] = (found[-1][0], end, owners[piece])
            elif owners[piece]:
                found.append((start, end, owners[piece]))
        return found


class Member:
    """One node's view of its cluster; its file keeps that across a restart. `group`: its primary and replicas."""

    def __init__(self, cluster: Cluster, node: Node, group: Group) -> None:
        self.cluster, self.node, self.name, self.group = cluster, node, node.name, group
        self.id = sha1(node.name.encode(), usedforsecurity=False).hexdigest()
        self.owners: list[str] = []
        self.epochs: dict[str, int] = {}  # of all nodes, as last received
        self.unclaimed: dict[int, None] = {}  # ranges that their owner no longer claims
        self.migrating: dict[int, str] = {}  # slots that are moving, with the other node
        self.importing: dict[int, str] = {}
        self.deaf_until = 0.0
        self.serves_from = 0.0
        self.silences: list[tuple[float, float]] = []  # intervals during which the others receive nothing from it
        self.is_cut_off_until = 0.0  # from the other nodes; clients may still reach it
        node.member = self

    @property
    def epoch(self) -> int:
        """Its config epoch."""
        return self.epochs[self.name]

    def owner(self, slot: int) -> str:
        """The owner of a slot, as far as this node knows."""
        return self.owners[self.cluster.slots.piece(slot)]

    # Commands

    def answer(self, commands: Sequence[tuple[bytes, ...]]) -> list[Any]:
        """The answers to commands that arrived together on one connection."""
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
        """The error with which it rejects a command, or None."""
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

    def lacks(self, words: Sequence[bytes]) -> bool:
        """Whether a script may not execute this command: its slot leaves, and not all of its keys are here."""
        keys = keys_of(words)
        present = self.node.fake.dbs[0]
        return any(slot_of(key) in self.migrating and key not in present for key in keys)

    def _said(self, words: Sequence[bytes]) -> Any:
        slots, cluster = self.cluster.slots, self.cluster
        match words[1]:
            case b"MYID":
                return self.id.encode()
            case b"KEYSLOT":
                return slot_of(words[2])
            case b"SLOTS":
                return [
                    [first, last, *(each.endpoint() for each in self._shard(owner))]
                    for first, last, owner in slots.spans(self.owners)
                ]
            case b"NODES":
                return b"\n".join(self._line(each).encode() for each in cluster.members.values())
            case b"INFO":
                has = sum(last - first + 1 for first, last, _ in slots.spans(self.owners))
                state = "ok" if self.is_up() else "fail"
                return f"cluster_state:{state}\r\ncluster_slots_assigned:{has}\r\ncluster_slots_ok:{has}\r\n".encode()
        return ReplyError(f"ERR unknown subcommand '{words[1].decode()}'")

    def _shard(self, owner: str) -> list[Member]:
        """The owner of a slot, and its replicas."""
        members = self.cluster.members
        replicas = [name for name in members[owner].group.names if name != owner and name not in self.owners]
        return [members[name] for name in (owner, *replicas)]

    def endpoint(self) -> list[Any]:
        """Its address and id."""
        host, _, port = self.name.rpartition(":")
        return [host.encode(), int(port), self.id.encode()]

    def _line(self, other: Member) -> str:
        flags = ["myself"] if other is self else []
        spans = self.cluster.slots.spans(self.owners)
        shares = " ".join(f"{first}-{last}" for first, last, owner in spans if owner == other.name)
        follows = "" if shares else next((name for name in other.group.names if name in self.owners), "")
        flags.append("slave" if follows else "master")
        of = self.cluster.members[follows].id if follows else "-"
        epoch = self.epochs[follows or other.name]
        return f"{other.id} {other.name}@1 {','.join(flags)} {of} 0 0 {epoch} connected {shares}"

    # Whether it serves

    def falls_silent(self, seconds: float) -> None:
        """From now on the others receive nothing from it for this many seconds; they may replace it."""
        now = self.node.world.now
        since = next((since for since, until in self.silences if until >= now), now)
        until = max([now + seconds, *(until for _, until in self.silences)])
        self.silences = [(since, until)]
        self.cluster.watch(self)

    def is_silent(self, now: float) -> bool:
        """Whether the others have received nothing from it for so long that they consider it failed."""
        return any(since + NODE_TIMEOUT <= now < until for since, until in self.silences)

    def is_up(self) -> bool:
        """Whether it considers the cluster up: it has been running for a while, and receives enough from the others."""
        now, members = self.node.world.now, self.cluster.members
        if now < self.serves_from or (self.is_cut_off_until > now and self.is_silent(now)):
            return False
        primaries = [members[name] for name in dict.fromkeys(self.owners) if name]
        silent = [each for each in primaries if each is not self and each.is_silent(now)]
        return 2 * len(silent) < len(primaries) and not (self.cluster.is_whole and silent)

    def started(self, node: Node) -> None:
        """Continue as a new process with the data of its file. Slots of other nodes whose keys it has are importing."""
        self.node, node.member = node, self
        self.rejoins()
        for key in sorted(node.fake.dbs[0]._dict):
            slot = slot_of(key)
            if self.owner(slot) != self.name and self.name in self.owners:
                self.importing.setdefault(slot, self.owner(slot))

    def rejoins(self) -> None:
        """Reject commands until it has received messages from the others."""
        self.serves_from = max(self.node.world.now, self.node.frozen_until) + _REJOINS
        for group in self.cluster.groups:
            sender = self.cluster.primary(group)
            if sender is not self:
                self.cluster.send(sender, self, soon=True)

    # Messages from the others

    def hear(self, sender: Member) -> None:
        """Process a message of another node about itself: its config epoch and its slots."""
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
        if epoch == self.epoch and sender.id > self.id and self.name in self.owners:
            self.epochs[self.name] = max(self.epochs.values()) + 1
            self.cluster.spread(self)
        if before != self.owners:
            self.node.world.note("another map", self.name, sender.name)
            self.gave_up(before)
            if self.name in before and self.name not in self.owners and self.group.primary_name != self.name:
                self.group.attach(self.name, after=self.cluster.world.chance.uniform(0.0, 0.3))

    def gave_up(self, before: Sequence[str]) -> None:
        """End the subscriptions of slots that it no longer owns, and delete their keys."""
        if not any(was == self.name != now for was, now in zip(before, self.owners, strict=True)):
            return
        for slot in [slot for slot in self.migrating if self.owner(slot) != self.name]:
            del self.migrating[slot]
        self.node.world.note("gave slots up", self.name)
        if self.group.primary_name != self.name:
            return  # it was replaced: its subscribers are not notified, and it copies the data of the new primary
        self.node.end_subscriptions(lambda channel: self.owner(slot_of(channel)) != self.name)
        if keys := [key for key in sorted(self.node.fake.dbs[0]._dict) if self._was_mine(key, before)]:
            self.node.carry_out([(b"DEL", key) for key in keys])

    def _was_mine(self, key: bytes, before: Sequence[str]) -> bool:
        piece = self.cluster.slots.piece(slot_of(key))
        return before[piece] == self.name != self.owners[piece]

    def keys_in(self, slot: int) -> list[bytes]:
        """The keys of a slot that it holds."""
        return [key for key in self.node.present() if slot_of(key) == slot]


class Cluster:
    """All nodes of a cluster. `is_whole`: no node serves while any slot lacks a serving node."""

    def __init__(self, world: World, groups: Sequence[Group], single: Iterable[int], *, is_whole: bool) -> None:
        self.world, self.groups, self.is_whole = world, groups, is_whole
        self.slots = Slots(len(groups), single)
        self.members = {node.name: Member(self, node, group) for group in groups for node in group.nodes()}
        epochs = {name: groups.index(member.group) + 1 for name, member in self.members.items()}
        for member in self.members.values():
            member.owners = [groups[at].primary_name for at in self.slots.home]
            member.epochs = dict(epochs)
        self.moving: dict[int, None] = {}
        self._on_its_way: dict[tuple[str, str], None] = {}
        self._beat()

    def is_sound(self) -> bool:
        """Whether all primaries take writes, all nodes know where all slots are, and no slot is moving."""
        primaries = [self.primary(group) for group in self.groups]
        members = self.members.values()
        return (
            not self.moving
            and all(each.is_up() and not is_apart(each) for each in primaries)
            and all(len(each.node.attached()) >= each.node.least for each in primaries)
            and all(each.owners == primaries[0].owners and not is_apart(each) for each in members)
        )

    def tidy(self) -> None:
        """Delete keys that came back from old files although others now own their slots, as an operator does."""
        for member in map(self.primary, self.groups):
            left = [key for key in sorted(member.node.fake.dbs[0]._dict) if member.owner(slot_of(key)) != member.name]
            if left:
                member.node.carry_out([(b"DEL", key) for key in left])

    def primary(self, group: Group) -> Member:
        """The member that owns the slots of a group."""
        return self.members[group.primary_name]

    def owner(self, slot: int) -> Member:
        """The owner of a slot: of the nodes that claim it, the one with the highest config epoch."""
        claims = [each for each in self.members.values() if each.owner(slot) == each.name]
        return max(claims, key=lambda each: each.epoch)

    def _beat(self) -> None:
        """Regularly let all primaries announce their slots, and replicas that lost their primary follow it again."""
        for group in self.groups:
            self.spread(self.primary(group))
            cut = [node for node in group.nodes() if node.link is not None and node.link.cut_at <= self.world.now]
            for node in cut if not is_apart(self.primary(group)) else ():
                if not is_apart(self.members[node.name]):
                    group.attach(node.name, after=self.world.chance.uniform(0.0, 0.3))
        self.world.after(_BEAT, self._beat)

    def spread(self, sender: Member) -> None:
        """Send an announcement to all others; each receives it after its own delay."""
        for other in self.members.values():
            if other is not sender:
                self.send(sender, other)

    def send(self, sender: Member, other: Member, *, soon: bool = False) -> None:
        """Send an announcement from one node to another."""
        way = sender.name, other.name

        def arrive() -> None:
            self._on_its_way.pop(way, None)
            if is_apart(sender) or is_apart(other) or other.deaf_until > self.world.now:
                self.send(sender, other)  # the sender repeats it again and again
            elif sender.name in sender.owners:
                other.hear(sender)

        if way not in self._on_its_way or soon:
            self._on_its_way[way] = None
            self.world.after(0.1 if soon else 0.001 + self.world.chance.expovariate(1 / _GOSSIP), arrive)

    # A primary is replaced

    def cut_off(self, member: Member, seconds: float) -> None:
        """Cut a node off from the others, in both directions; clients still reach it."""
        self.world.note("cut off", member.name, f"{seconds:.3f}")
        member.is_cut_off_until = max(member.is_cut_off_until, self.world.now + seconds)
        member.group.cut_replicas(member.name)
        member.falls_silent(seconds)
        if seconds > NODE_TIMEOUT:
            self.world.after(seconds, member.rejoins)

    def watch(self, member: Member) -> None:
        """Replace a primary once it has been silent for long enough and a majority of the others agree."""
        election = NODE_TIMEOUT + 0.2 + self.world.chance.uniform(0.0, 0.3)
        self.world.after(election, lambda: self._elect(member))

    def _elect(self, failed: Member) -> None:
        group, now = failed.group, self.world.now
        if group.primary_name != failed.name or not failed.is_silent(now):
            return
        primaries = [self.primary(each) for each in self.groups]
        voters = [each for each in primaries if each is not failed and not is_apart(each)]
        ready = [name for name in group.names if name != failed.name and not is_apart(self.members[name])]
        if 2 * len(voters) <= len(primaries):
            ready = []
        ready = [name for name in ready if self.members[name].node.catch_up()]
        if not ready:
            self.watch(failed)
            return
        chosen = self.members[min(ready, key=lambda name: group.lags[name])]
        before = list(chosen.owners)
        group.promote(chosen.name)
        chosen.epochs[chosen.name] = max(epoch for each in voters for epoch in each.epochs.values()) + 1
        chosen.owners = [chosen.name if owner == failed.name else owner for owner in before]
        for name in group.names:
            if name not in (chosen.name, failed.name):
                group.attach(name, after=self.world.chance.uniform(0.0, 0.3))
        self.spread(chosen)

    # Slots move

    async def move(self, slot: int, target: Group, pause: float) -> None:
        """Move a slot to another group, key by key. Does nothing if it is being moved already, or a primary is away."""
        source = self.owner(slot).group
        if source is target or slot in self.moving or self._is_away(source, target):
            return
        self.moving[slot] = None
        world = self.world
        world.note("slot leaves", str(slot), source.primary_name, target.primary_name)
        if left := self.primary(target).keys_in(slot):
            target.primary.carry_out([(b"DEL", key) for key in left])  # these keys came back from an old file
        try:
            while keys := await self._next(slot, source, target):
                for key in keys[: world.chance.randint(1, 4)]:
                    hand_over(key, source.primary, target.primary)
                await world.sleep(world.chance.expovariate(1 / pause))
            self._take(slot, self.primary(source), self.primary(target))
        finally:
            del self.moving[slot]

    def _is_away(self, *groups: Group) -> bool:
        """Whether one of them has no primary that answers, or one that does not know its slots yet."""
        return any(
            is_apart(self.primary(each)) or each.primary_name not in self.primary(each).owners for each in groups
        )

    async def _next(self, slot: int, source: Group, target: Group) -> list[bytes]:
        """The keys that remain to be moved; a primary that replaced another is informed that the slot is moving."""
        while self._is_away(source, target):
            await self.world.sleep(0.05)
        self.primary(target).importing[slot] = source.primary_name
        self.primary(source).migrating[slot] = target.primary_name
        return self.primary(source).keys_in(slot)

    def _take(self, slot: int, source: Member, target: Member) -> None:
        """Give the slot to the target. The source knows at once; the others learn it later."""
        self.world.note("slot has moved", str(slot), source.name, target.name)
        piece = self.slots.piece(slot)
        for each in self.members.values():
            each.importing.pop(slot, None)
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
    """Whether it answers no client now."""
    return node.is_down or node.frozen_until > node.world.now


def is_apart(member: Member) -> bool:
    """Whether the other nodes receive nothing from it now."""
    return is_away(member.node) or member.is_cut_off_until > member.node.world.now


def hand_over(key: bytes, source: Node, target: Node) -> None:
    """MIGRATE: move one key with its deadline. A key in the target wins: the source came back from an old file."""
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
