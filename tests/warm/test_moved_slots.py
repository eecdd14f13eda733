"""Whether a partition that shows another node's life has just moved here. Law: in doubt it is recovered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distributed_state.port.facts import Life
from distributed_state.tiers.recovery import Recovery
from distributed_state.warm.answers import PartitionState

pytestmark = pytest.mark.unit

STARTED = 990  # by this node's clock, in whole seconds


class Node:
    """A node that has been running for ten seconds; the node whose life the partition shows is still running."""

    async def lives_elsewhere(self, name: str, node: str) -> bool:
        return True

    async def command_with(self, node: str, word: bytes, *more: Any) -> Any:
        return b"redis_version:7\r\nuptime_in_seconds:10\r\n" if word == b"INFO" else [b"1000", b"900000"]


async def is_same(proved: float, former: str = "") -> bool:
    """Whether a partition that was last used then is taken for one that has just moved."""
    given: Any = Node(), SimpleNamespace(partitions=None), None, None, SimpleNamespace(timeout=1, retry_for=1, url="x")
    recovery = Recovery(*given, leave_mark=lambda: None)  # type: ignore[arg-type,return-value]  # stand-ins
    place = PartitionState("epoch", 1, 1, 0, "there/1", int(proved * 1000))
    return await recovery._is_same(place, Life("here", "2", True, former), "node")


@pytest.mark.parametrize(("proved", "moved"), [(STARTED + 2, True), (STARTED + 1.9, False), (STARTED - 5, False)])
async def test_a_slot_has_moved_to_a_node_that_ran_before_the_slot_was_last_used(proved: float, moved: bool) -> None:
    """Two seconds before: an uptime is in whole seconds, and the slot was last used by another node's clock."""
    assert await is_same(proved) == moved


async def test_a_slot_has_not_moved_to_a_node_that_was_promoted_since() -> None:
    assert not await is_same(STARTED + 100, former="copied")
