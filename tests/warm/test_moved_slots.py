"""Whether a partition that shows another node's data id has just moved here. Law: in doubt it is recovered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distributed_state.port.identities import ServerIdentity
from distributed_state.tiers.recovery import Recovery
from distributed_state.warm.answers import PartitionState

pytestmark = pytest.mark.unit

STARTED = 990  # by this node's clock, in whole seconds


class Node:
    """A node that has been running for ten seconds; the node whose data id the partition shows is called "there"."""

    is_cluster = True

    async def has_data_elsewhere(self, name: str, node: str) -> bool:
        return name == "there/1"

    async def command_with(self, node: str, word: bytes, *more: Any) -> Any:
        return b"redis_version:7\r\nuptime_in_seconds:10\r\n" if word == b"INFO" else [b"1000", b"900000"]


def recovery() -> Recovery:
    given: Any = Node(), SimpleNamespace(partitions=None), None, None, SimpleNamespace(timeout=1, retry_for=1, url="x")
    return Recovery(*given, leave_mark=None, gather=None, diverged=None)  # type: ignore[arg-type]  # stand-ins


async def is_same(proved: float, former: str = "") -> bool:
    """Whether a partition that was last used then is taken for one that has just moved."""
    place = PartitionState("epoch", 1, 1, 0, "there/1", int(proved * 1000))
    identity = ServerIdentity("here", "2", True, former)
    elsewhere = await recovery()._is_elsewhere(place, identity, "node")
    return await recovery()._is_same(place, identity, "node", elsewhere=elsewhere)


async def is_apart(data_id: str, proved: float, former: str = "", epoch: str = "epoch") -> bool:
    """Whether the keys of a partition with that data id, last used whole then, may be of several moments."""
    place = PartitionState(epoch, 1, 1, 0, data_id, int(proved * 1000))
    here = ServerIdentity("here", "2", True, former)
    elsewhere = await recovery()._is_elsewhere(place, here, "node")
    return await recovery()._is_mixed(place, here, "node", elsewhere=elsewhere)


@pytest.mark.parametrize(("proved", "moved"), [(STARTED + 2, True), (STARTED + 1.9, False), (STARTED - 5, False)])
async def test_a_slot_has_moved_to_a_node_that_ran_before_the_slot_was_last_used(proved: float, moved: bool) -> None:
    """Two seconds before: an uptime is in whole seconds, and the slot was last used by another node's clock."""
    assert await is_same(proved) == moved


async def test_a_slot_has_not_moved_to_a_node_that_was_promoted_since() -> None:
    assert not await is_same(STARTED + 100, former="copied")


async def test_keys_are_of_several_moments_if_a_server_ended_while_their_slot_was_moving() -> None:
    assert await is_apart("ended/1", STARTED + 1), "the former server ended: it was used while this one was running"
    assert await is_apart("there/1", STARTED - 5), "this one restarted: the former one is still running"
    assert await is_apart("ended/1", 0), "the former server restarted, and its slot was moving ever since"
    assert await is_apart("?", STARTED - 5), "who was recovering it died"
    assert await is_apart("", 0, epoch=""), "its meta was lost, perhaps alone"


async def test_keys_are_of_one_moment_if_this_server_restarted_or_was_promoted() -> None:
    assert not await is_apart("ended/1", STARTED - 5)
    assert not await is_apart("ended/1", STARTED + 1, former="ended")
