"""Slots moved from node to node, as `redis-cli` does it. Law: step by step, so that a test can stop between any two."""

from __future__ import annotations

from collections.abc import Iterable

from hiredis import ReplyError

from distributed_state.programs.servers.cluster_node import ClusterNode

_KEYS_AT_ONCE = 100
_MIGRATE_MS = 5000


def begin_move(slot: int, source: ClusterNode, target: ClusterNode) -> None:
    """Mark a slot as on its way: from now on its keys may be on either node."""
    # The target first: the source may redirect a client to it at once.
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)


def move_keys(slot: int, source: ClusterNode, target: ClusterNode, count: int = _KEYS_AT_ONCE) -> int:
    """Move up to `count` keys of a slot on its way, and return how many were moved."""
    with source.connect() as connection:
        keys = connection.ask("CLUSTER", "GETKEYSINSLOT", slot, count)
        if keys:
            destination = ("127.0.0.1", target.port, "", 0, _MIGRATE_MS)
            connection.ask("MIGRATE", *destination, "AUTH", target.password, "KEYS", *keys)
        return len(keys)


def end_move(slot: int, source: ClusterNode, target: ClusterNode, others: Iterable[ClusterNode]) -> None:
    """Hand a slot over, and tell the `others` at once rather than by gossip."""
    # The target first: were it the source, a crash in between would leave a slot that nobody has.
    for node in (target, source, *others):
        try:
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)
        except ReplyError as error:
            # Who gave its last slot away, and heard so by gossip, is a replica of the new owner already.
            if node is target or "only with masters" not in str(error):
                raise
